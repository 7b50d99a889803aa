"""The optimizer, and the learning rate as a function of the update's number, known and printed before training."""

import math
from dataclasses import dataclass

import torch
from torch import nn

from trainer.config import Config
from trainer.data.sampler import BatchPlan


def build_optimizer(config: Config, model: nn.Module) -> torch.optim.Optimizer:
    """torch.optim's SGD, Adam or AdamW over all parameters that take gradients; fused: one kernel for all of an update."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if config.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay, fused=True)
    kind = torch.optim.AdamW if config.optimizer == "adamw" else torch.optim.Adam
    return kind(parameters, lr=config.lr, weight_decay=config.weight_decay, fused=True)


@dataclass(frozen=True)
class LrPlan:
    """The learning rate of each update, a pure function of the number of updates already done.

    A step that the GradScaler skipped is no update, so the rate does not advance on it; nor does it depend on the number of
    processes other than through the number of updates.

    Attributes:
        peak: the rate after warm-up.
        kind: 'constant', 'linear' or 'cosine'.
        warmup: updates of the linear rise; the first update already moves.
        total: updates of the run; from there on the rate stays at its last value.
    """

    peak: float
    kind: str
    warmup: int
    total: int

    def at(self, step: int) -> float:
        """The rate of the update that follows `step` finished ones."""
        if step < self.warmup:
            return self.peak * (step + 1) / (self.warmup + 1)
        done = min(1.0, (step - self.warmup) / max(1, self.total - self.warmup))
        if self.kind == "linear":
            return self.peak * (1 - done)
        if self.kind == "cosine":
            return self.peak * (1 + math.cos(math.pi * done)) / 2
        return self.peak

    def __str__(self) -> str:
        start = f"0 -> {self.peak:.3g} over {self.warmup} updates, then" if self.warmup else f"{self.peak:.3g}"
        return f"{start} {self.kind}" + (f" to 0 at update {self.total}" if self.kind != "constant" else "")


def plan_lr(config: Config, plan: BatchPlan, total: int) -> LrPlan:
    """The plan that the config asks for.

    `--scale_lr linear` multiplies the rate by the global batch over one process's batch (Goyal et al. 2017), `sqrt` by its root.
    """
    factor = plan.processes * plan.accumulation
    scale = {"none": 1.0, "linear": float(factor), "sqrt": math.sqrt(factor)}[config.scale_lr]
    return LrPlan(config.lr * scale, config.lr_scheduler, min(total, round(config.warmup_epochs * plan.updates)), total)
