"""Run: the handles of a training, built once. TrainState: the numbers that change, and the only ones that do."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import broadcast
from torch import Tensor, nn

from trainer.accelerator import memory_format
from trainer.comm_hooks import PowerSgd, share_gradients
from trainer.config import Config
from trainer.data.augment import Augment
from trainer.data.loaders import Data, build_loaders
from trainer.data.sampler import BatchPlan, EpochSampler
from trainer.data.transforms import Normalize
from trainer.ema import Ema
from trainer.finite import Finite
from trainer.models.build import batchnorm_layers, keep_strides, make_model, only_batchnorm_buffers, synchronise_batchnorm
from trainer.models.head import freeze_backbone
from trainer.optim import LrPlan, build_optimizer, plan_lr
from trainer.pace import Pace
from trainer.runtime import Processes, UserError
from trainer.seeding import derive_seed
from trainer.stops import NOT_WRITTEN
from trainer.watch import Watch
from trainer.writer import Writer

if TYPE_CHECKING:
    from accelerate import Accelerator

# Losses of micro-batches that wait at most.
COUNTED = 128


@dataclass
class TrainState:
    """Where the training is; the same on all ranks.

    Attributes:
        epoch: finished epochs.
        step: finished optimizer updates.
        samples: images seen by finished updates, over all ranks.
        consumed: samples of the epoch in progress that are behind it, in its order; the position of a resume.
        skipped: updates that the GradScaler refused, because a gradient had overflowed; they count in neither step nor samples.
        skipped_in_a_row: the newest of them, without a finished update between.
        loss_scale: the GradScaler's factor after the newest step; None without one.
        bad_images: training images of the epoch in progress, or the newest one, that could not be read, up to the last log line.
        metrics: of the newest evaluation; `acc1` in percent, `loss`, `samples`, …
        best: metrics of the best epoch so far, with its number under `epoch`.
        lr_factor: what the falls of `--lr_scheduler plateau` have come to.
        lowest_loss: of all evaluations that it has judged; `stale_epochs`: those in a row since, or since a fall, that were not lower.
        stop: fit ends after the epoch in progress and its evaluation.
        interrupted: fit ends here, to be resumed: why all ranks agreed to.
    """

    epoch: int = 0
    step: int = 0
    samples: int = 0
    consumed: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    loss_scale: float | None = None
    bad_images: int = 0
    metrics: dict[str, Any] = field(default_factory=dict)
    best: dict[str, Any] = field(default_factory=dict)
    lr_factor: float = 1.0
    lowest_loss: float | None = None
    stale_epochs: int = 0
    stop: bool = False
    interrupted: str | None = None

    def finish_epoch(self) -> None:
        """Count the epoch, and keep its metrics when its accuracy is the best so far (the earlier one on a tie)."""
        self.epoch += 1
        self.consumed = 0
        if not self.best or self.metrics["acc1"] > self.best["acc1"]:
            self.best = {**self.metrics, "epoch": self.epoch}

    def judge_plateau(self, patience: int, gamma: float) -> None:
        """Let the rate fall by `gamma` after the `patience`-th evaluation in a row whose loss is not the lowest so far."""
        loss = self.metrics["loss"]
        if self.lowest_loss is None or loss < self.lowest_loss:
            self.lowest_loss, self.stale_epochs = loss, 0
        else:
            self.stale_epochs += 1
        if self.stale_epochs == patience:
            self.lr_factor *= gamma
            self.stale_epochs = 0


@dataclass
class Window:
    """What training measured since the last log line; this rank's, on its device, so that nothing waits for it.

    Attributes:
        loss: sum of the per-image losses, float64 (), without those that still wait, see `add`.
        samples: images behind the whole sum.
        grad_norm: L2 norm of the newest update's gradient before clipping; None without clipping.
        waited: seconds spent waiting for data.
        bad: images that could not be read, int64 ().
        waiting: mean losses, (), and their numbers of images, that are not yet in the sum.
    """

    loss: Tensor
    bad: Tensor
    samples: int = 0
    grad_norm: Tensor | None = None
    waited: float = 0.0
    waiting: list[tuple[Tensor, int]] = field(default_factory=list)

    def add(self, loss: Tensor, images: int) -> None:
        """Count a micro-batch by its mean loss, (): many at once, which takes a fifth of the time that one takes after each update."""
        self.samples += images
        self.waiting.append((loss, images))
        if len(self.waiting) == COUNTED:
            self.sum_up()

    def sum_up(self) -> Tensor:
        """`loss` with all of them, in the order in which they came."""
        for loss, images in self.waiting:
            self.loss.add_(loss, alpha=images)
        self.waiting.clear()
        return self.loss

    def clear(self) -> None:
        self.waiting.clear()
        self.loss.zero_()
        self.bad.zero_()
        self.samples, self.waited = 0, 0.0


@dataclass
class Run:
    """The handles of a training.

    Attributes:
        module: the plain model, clean state_dict keys; `model` is the same one prepared (autocast, DDP, compiled).
        augment: uint8 batch and its keys -> the augmented batch; normalize: uint8 batch -> the model's input; both on its device.
        sampler: the train loader's order and position.
        sync_bn_layers: BatchNorm layers converted to synchronised ones.
        late_buffers: rank 0's buffers, BatchNorm statistics all, are sent before an evaluation, not by DDP at each forward pass.
        planned: updates of all epochs, when the scaler skips none.
        total_steps: updates that the run will do: `planned`, or `max_steps`.
        finite: sees whether losses and gradients are finite.
        watch: knows where each rank is.
        output_dir: the run's folder, made by the main process.
        checkpoint: the newest whole one, written or resumed from; `pending`: the one that `writer` is writing.
        resume_notes: what the user should know of a resume; `notes`: of what has happened since the last log line.
        on_phase: told of each phase of the loop while a hook records them.
        on_entry: told of each entry of metrics.jsonl, on the main process, those from before a resume first.
        generators: states to put this rank's generators into, once the resumed epoch's first batch is there.
        first_step: updates that were done before this process started.
        ema: the averaged weights; None without `--ema_decay`.
        pace: how often all ranks agree whether to go on.
        power_sgd: None without `--comm_hook powersgd`, and on one process.
        shared_gradients: small gradients go through shared memory.
        weights: where the model's weights came from.
    """

    config: Config
    processes: Processes
    accelerator: "Accelerator"
    data: Data
    module: nn.Module
    model: nn.Module
    augment: Augment
    normalize: Normalize
    optimizer: Any
    train_loader: Any
    eval_loader: Any
    sampler: EpochSampler
    lr_plan: LrPlan
    sync_bn_layers: int
    late_buffers: bool
    planned: int
    total_steps: int
    state: TrainState
    window: Window
    finite: Finite
    watch: Watch
    writer: Writer
    output_dir: Path = Path()
    checkpoint: Path | None = None
    pending: Path | None = None
    resume_notes: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    generators: dict[str, Tensor] | None = None
    first_step: int = 0
    on_phase: Callable[[str], None] | None = None
    on_entry: Callable[[dict[str, Any]], None] | None = None
    ema: Ema | None = None
    pace: Pace = field(default_factory=Pace)
    power_sgd: PowerSgd | None = None
    shared_gradients: bool = False
    weights: str = "random"

    @property
    def plan(self) -> BatchPlan:
        return self.data.plan

    @property
    def is_main(self) -> bool:
        return self.processes.is_main

    @property
    def max_steps_done(self) -> bool:
        return self.config.max_steps is not None and self.state.step >= self.config.max_steps

    @property
    def lr(self) -> float:
        """The learning rate of the next update."""
        return self.lr_plan.at(self.state.step, self.state.epoch, self.state.lr_factor)

    def share_statistics(self) -> None:
        """Give every rank rank 0's BatchNorm statistics where they may be its own; before an evaluation. A collective."""
        if self.late_buffers and not self.sync_bn_layers:
            for buffer in self.module.buffers():
                broadcast(buffer, from_process=0)

    def averaged(self) -> AbstractContextManager[None]:
        """Inside, `module` holds the weights that are evaluated and exported: the averaged ones, where there are any."""
        return self.ema.in_place() if self.ema is not None else nullcontext()

    def at(self, phase: str) -> None:
        """Tell the watch where this rank is; see `watch.PHASES`."""
        self.watch.at(phase, self.state.epoch + 1, self.state.step)
        if self.on_phase is not None:
            self.on_phase(phase)

    def close(self) -> None:
        """End the data workers. In a cycle that the garbage collector breaks up they would be waited for in vain, 5 seconds each."""
        for loader in (self.train_loader, self.eval_loader):
            loader = getattr(loader, "base_dataloader", loader)
            # An exception's frames can hold the iterator too; and a launcher's SIGTERM may have reached its workers already.
            if hasattr(loader._iterator, "_shutdown_workers"):
                workers = list(loader._iterator._workers)
                with suppress(RuntimeError):
                    loader._iterator._shutdown_workers()
                # torch's SIGTERM to one that is stuck is ignored like any other, and Python would wait for it when it ends.
                for worker in workers:
                    worker.kill()
            loader._iterator = None


def build_evaluation(
    config: Config, processes: Processes, data: Data, accelerator: "Accelerator", module: nn.Module, normalize: Normalize
) -> Run:
    """A run that can evaluate `data.test`, and nothing else: no optimizer, no DDP. A collective.

    Args:
        module: the trained model, the same on all ranks.
        normalize: its normalisation.
    """
    layout = memory_format(config, accelerator)
    module = module.to(memory_format=layout)
    normalize.memory_format = layout
    train_loader, eval_loader, sampler = build_loaders(data, config, accelerator.device, accelerator.native_amp)
    zero = torch.zeros((), device=accelerator.device)
    return Run(
        config=config,
        processes=processes,
        accelerator=accelerator,
        data=data,
        module=module,
        model=accelerator.prepare_model(module, evaluation_mode=True),
        augment=Augment(config, data.mean, shift=False),
        normalize=normalize.to(accelerator.device),
        optimizer=None,
        train_loader=train_loader,
        eval_loader=accelerator.prepare(eval_loader),
        sampler=sampler,
        lr_plan=plan_lr(config, data.plan, 1),
        sync_bn_layers=0,
        late_buffers=False,
        planned=0,
        total_steps=0,
        state=TrainState(),
        window=Window(zero.double(), zero.long()),
        finite=Finite(accelerator.device),
        watch=Watch(processes, config.hang_timeout),
        writer=Writer(lambda: None),
    )


def loss_scale(accelerator: "Accelerator") -> float | None:
    """The GradScaler's factor; None without one. Waits for the device."""
    return accelerator.scaler.get_scale() if accelerator.scaler is not None else None


def planned_steps(config: Config, updates: int) -> int:
    """Updates of a run whose epochs have `updates`."""
    return updates if config.max_steps is None else min(updates, config.max_steps)


def build_run(
    config: Config, processes: Processes, data: Data, accelerator: "Accelerator", module: nn.Module | None = None, resumed: bool = False
) -> Run:
    """Build model, optimizer and loaders, and let the Accelerator prepare them. A collective.

    Args:
        module: a model of one's own instead of `config.model`'s, with the same weights on all ranks or not: DDP sends rank 0's.
        resumed: a checkpoint will be restored: `config.weights` are not loaded.

    Raises:
        UserError: the model cannot be built or does not fit the images, or BatchNorm statistics would differ between ranks.
    """
    torch.manual_seed(derive_seed(config.seed, "init"))
    converted, weights, plan = 0, "random", data.plan
    # SyncBatchNorm talks in each forward pass, which is what local SGD is to save.
    synchronise = config.sync_bn == "on" or (config.sync_bn == "auto" and processes.count > 1 and config.local_sgd_steps is None)
    if module is None:
        channels, height, width = data.train.shape
        last, classes = plan.micro_batches - 1, len(data.classes)
        smallest = plan.size(last) if synchronise else plan.share(last, processes.count - 1)
        module, weights = processes.local_main_first(lambda: make_model(config, channels, (height, width), classes, smallest, resumed))
    # Without its BatchNorm layers, whose statistics stay: there are none to synchronise then.
    frozen = config.freeze == "backbone"
    if frozen:
        freeze_backbone(config.model, module, len(data.classes))
    if synchronise and processes.control is not None and not frozen:
        module, converted = synchronise_batchnorm(module, accelerator.device)
    elif config.sync_bn == "on" and processes.control is None:
        raise UserError("--sync_bn on needs more than one process: leave it at auto", agreed=True)
    averaged = config.broadcast_buffers or config.local_sgd_steps is not None
    if processes.count > 1 and not (synchronise or frozen or averaged) and batchnorm_layers(module):
        raise UserError(
            "--sync_bn off with --broadcast_buffers false gives every rank its own BatchNorm statistics: change one of them", agreed=True
        )
    layout = memory_format(config, accelerator)
    module = module.to(memory_format=layout)
    if processes.count > 1:
        keep_strides(module)
    optimizer = build_optimizer(config, module)
    train_loader, eval_loader, sampler = build_loaders(data, config, accelerator.device, accelerator.native_amp)
    model, optimizer = accelerator.prepare(module, optimizer)
    # What is in the CPU's memory is where the model takes it.
    placed = [accelerator.device.type != "cpu"]
    late_buffers = processes.count > 1 and config.broadcast_buffers and only_batchnorm_buffers(module)
    if late_buffers:
        # It has sent them once. A broadcast at each forward pass lets all ranks wait for rank 0 there, for numbers that none reads.
        getattr(model, "_orig_mod", model).broadcast_buffers = False
    # Our batch sampler has dealt out the short last batch itself; evaluation is filled up, and gather_for_metrics cuts that off.
    accelerator.dataloader_config.even_batches = False
    train_loader = accelerator.prepare(train_loader, device_placement=placed)
    accelerator.dataloader_config.even_batches = True
    eval_loader = accelerator.prepare(eval_loader, device_placement=placed)
    power_sgd, shared_gradients = None, False
    # A compiled model holds the wrapper.
    wrapper = getattr(model, "_orig_mod", model)
    if config.comm_hook == "powersgd" and processes.count > 1:
        power_sgd = PowerSgd(wrapper, module, config.powersgd_rank, config.powersgd_start, config.seed)
    elif config.comm_hook == "none" and processes.count > 1 and config.local_sgd_steps is None:
        shared_gradients = share_gradients(wrapper)
    planned = config.epochs * data.plan.updates
    total = planned_steps(config, planned)
    return Run(
        config=config,
        processes=processes,
        accelerator=accelerator,
        data=data,
        module=module,
        model=model,
        augment=Augment(config, data.mean, shift=not data.train.random_crop),
        normalize=Normalize(data.mean, data.std, layout).to(accelerator.device),
        optimizer=optimizer,
        train_loader=train_loader,
        eval_loader=eval_loader,
        sampler=sampler,
        lr_plan=plan_lr(config, data.plan, total),
        sync_bn_layers=converted,
        late_buffers=late_buffers,
        planned=planned,
        total_steps=total,
        state=TrainState(loss_scale=loss_scale(accelerator)),
        window=Window(
            torch.zeros((), dtype=torch.float64, device=accelerator.device), torch.zeros((), dtype=torch.int64, device=accelerator.device)
        ),
        finite=Finite(accelerator.device),
        watch=Watch(processes, config.hang_timeout),
        writer=Writer(lambda: processes.stops.request(NOT_WRITTEN)),
        # Only now are all ranks' weights rank 0's.
        ema=Ema(module, config.ema_decay) if config.ema_decay is not None else None,
        power_sgd=power_sgd,
        shared_gradients=shared_gradients,
        weights=weights,
    )
