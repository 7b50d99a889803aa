"""The optimizer, and the learning rate as a function of the update's number, known and printed before training."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trainer.config import Config
from trainer.data.sampler import BatchPlan

OPTIMIZERS: dict[str, Any] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "adamax": torch.optim.Adamax,
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
    "adadelta": torch.optim.Adadelta,
}
# One kernel for all of an update, on the CPU and on CUDA.
FUSED = ("sgd", "adam", "adamw")
# Of the peak rate: where one_cycle begins and ends.
ONE_CYCLE_START, ONE_CYCLE_END = 1 / 25, 1e-4


def build_optimizer(config: Config, model: nn.Module) -> torch.optim.Optimizer:
    """torch.optim's class of that name over all parameters that take gradients; in two groups when some of them do not decay."""
    keywords: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    if config.optimizer in ("sgd", "rmsprop"):
        keywords["momentum"] = config.momentum
    if config.optimizer == "sgd":
        keywords["nesterov"] = config.nesterov
    if config.optimizer in FUSED:
        keywords["fused"] = True
    optimizer: torch.optim.Optimizer = OPTIMIZERS[config.optimizer](parameter_groups(config, model), **keywords)
    return optimizer


def parameter_groups(config: Config, model: nn.Module) -> list[dict[str, Any]]:
    """The trained parameters; with `--weight_decay_1d false` those of one dimension apart, without decay."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if config.weight_decay_1d:
        return [{"params": parameters}]
    groups: list[dict[str, Any]] = [
        {"params": [parameter for parameter in parameters if parameter.ndim > 1]},
        {"params": [parameter for parameter in parameters if parameter.ndim <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


@dataclass(frozen=True)
class LrPlan:
    """The learning rate of each update, a pure function of what has been done: updates, for 'step' epochs, for 'plateau' its falls.

    A step that the GradScaler skipped is no update, so the rate does not advance on it; nor does it depend on the number of
    processes other than through the number of updates.

    Attributes:
        peak: the rate after warm-up.
        kind: 'constant', 'linear', 'cosine', 'step', 'one_cycle' (Smith and Topin 2018) or 'plateau'.
        warmup: updates of the rise, in a line from 0, for 'one_cycle' in a half cosine from peak / 25; the first update already moves.
        total: updates of the run; from there on the rate stays at its last value.
        floor: what the fall ends at; for 'one_cycle' at least peak / 10000.
        gamma: the factor of each fall of 'step' and 'plateau'.
        period: epochs between two falls of 'step'.
        patience: epochs without a lower test loss before a fall of 'plateau'; for the reader.
    """

    peak: float
    kind: str
    warmup: int
    total: int
    floor: float = 0.0
    gamma: float = 0.1
    period: int = 30
    patience: int = 10

    def at(self, step: int, epoch: int = 0, factor: float = 1.0) -> float:
        """The rate of the update that follows `step` finished ones.

        Args:
            epoch: finished epochs.
            factor: what the falls of 'plateau' have come to.
        """
        if self.kind == "one_cycle":
            return self._one_cycle(step)
        if step < self.warmup:
            return self.peak * (step + 1) / (self.warmup + 1)
        done = min(1.0, (step - self.warmup) / max(1, self.total - self.warmup))
        if self.kind == "linear":
            return self.floor + (self.peak - self.floor) * (1 - done)
        if self.kind == "cosine":
            return self.floor + (self.peak - self.floor) * (1 + math.cos(math.pi * done)) / 2
        if self.kind == "step":
            return max(self.floor, self.peak * self.gamma ** (epoch // self.period))
        if self.kind == "plateau":
            return max(self.floor, self.peak * factor)
        return self.peak

    def _one_cycle(self, step: int) -> float:
        """As torch's OneCycleLR with pct_start = (warmup + 1) / total: its last update, and not the one after it, has the lowest rate."""
        if step < self.warmup:
            return _half_cosine(self.peak * ONE_CYCLE_START, self.peak, step / self.warmup)
        done = min(1.0, (step - self.warmup) / max(1, self.total - 1 - self.warmup))
        return _half_cosine(self.peak, self.end, done)

    @property
    def end(self) -> float:
        """The rate that the fall over all updates ends at."""
        return max(self.floor, self.peak * ONE_CYCLE_END) if self.kind == "one_cycle" else self.floor

    @property
    def planned_over_all_updates(self) -> bool:
        return self.kind in ("linear", "cosine", "one_cycle")

    def __str__(self) -> str:
        first = self.peak * ONE_CYCLE_START if self.kind == "one_cycle" else 0
        start = f"{first:.3g} -> {self.peak:.3g} over {self.warmup} updates, then" if self.warmup else f"{self.peak:.3g}"
        floor = f", at least {self.floor:.3g}" if self.floor else ""
        if self.planned_over_all_updates:
            return f"{start} {self.kind} to {self.end:.3g} at update {self.total}"
        if self.kind == "step":
            return f"{start} x {self.gamma:g} every {self.period} epochs{floor}"
        if self.kind == "plateau":
            return f"{start} x {self.gamma:g} after {self.patience} epochs without a lower test loss{floor}"
        return f"{start} {self.kind}"


def _half_cosine(start: float, end: float, done: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * done)) / 2


def plan_lr(config: Config, plan: BatchPlan, total: int) -> LrPlan:
    """The plan that the config asks for.

    `--scale_lr linear` multiplies the rate by the global batch over one process's batch (Goyal et al. 2017), `sqrt` by its root.
    """
    factor = plan.processes * plan.accumulation
    scale = {"none": 1.0, "linear": float(factor), "sqrt": math.sqrt(factor)}[config.scale_lr]
    return LrPlan(
        peak=config.lr * scale,
        kind=config.lr_scheduler,
        warmup=min(total, round(config.warmup_epochs * plan.updates)),
        total=total,
        floor=config.min_lr,
        gamma=config.lr_gamma,
        period=config.lr_step_epochs,
        patience=config.plateau_patience,
    )
