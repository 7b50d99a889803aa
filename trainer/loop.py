"""The training loop, which reads like the tutorials' own.

    fit
      on_fit_start
      for each epoch
        on_epoch_start                      SetEpoch, SeedProcesses
        train_epoch
          for each micro-batch: mixup or CutMix, forward, backward
          after the last one of an update: clip, optimizer step
            average the weights             with --ema_decay
            all ranks take their mean       with --local_sgd_steps, when it is due
            on_step_end                     unless the GradScaler skipped the step; Log, Audit, Checkpoints
            all ranks agree whether to stop
        evaluate                            the averaged weights, with --ema_decay
          on_eval_start
          for each batch: on_eval_batch     GatherMetrics
            all ranks agree whether to stop
          on_eval_end
        --lr_scheduler plateau judges the loss
        on_epoch_end                        SaveOnMain, Log, Checkpoints
      on_fit_end, or on_interrupt           Checkpoints: after a stop that will be resumed

Every rank runs every line, and every hook. `run.at` tells the watch where this rank is, should another wait for it in vain.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.agreement import interrupted, note_finding, settle
from trainer.data.dataset import Batch
from trainer.data.mix import draw_mixture
from trainer.data.sampler import BatchPlan
from trainer.finite import Finding, Update
from trainer.hooks.base import HookList
from trainer.hooks.gather_metrics import GatherMetrics
from trainer.hooks.save_on_main import SaveOnMain
from trainer.hooks.seed_processes import SeedProcesses
from trainer.hooks.set_epoch import SetEpoch
from trainer.local_sgd import average_ranks, averaging_due
from trainer.models.head import train_mode
from trainer.runtime import UserError
from trainer.seeding import derive_seed, restore_generators
from trainer.state import Run, loss_scale

# From PyTorch's first scale, 65536, so many skips in a row lead to one at which no gradient of a sound loss overflows.
MAX_SKIPS = 30
REQUIRED_HOOKS = (SetEpoch, SeedProcesses, GatherMetrics, SaveOnMain)

T = TypeVar("T")


def fit(run: Run, hooks: HookList) -> None:
    """Train to the end of `config.epochs` epochs or `config.max_steps` updates, whichever comes first, and evaluate after each epoch.

    A run that was resumed goes on where its state says, inside an epoch or before its evaluation. When all ranks agree to stop, the
    epoch in progress is left as it is: no evaluation, `state.interrupted` says why.

    Raises:
        ValueError: one of the four hooks that correctness rests on is missing.
        RunError: a loss or gradient is not finite.
    """
    missing = [kind.__name__ for kind in REQUIRED_HOOKS if not any(isinstance(hook, kind) for hook in hooks)]
    if missing:
        raise ValueError(f"fit needs the hooks {', '.join(missing)}")
    state = run.state
    run.processes.stops.training = True
    hooks.on_fit_start(run)
    settle(run)
    # A resume of a run that had come to its end there has no epoch to count.
    state.stop = state.stop or (run.max_steps_done and not state.consumed)
    while state.epoch < run.config.epochs and not state.stop and not state.interrupted:
        hooks.on_epoch_start(run)
        train_epoch(run, hooks)
        if not state.interrupted:
            # Several ranks do not agree at each update (`Pace`): weights that are not finite would be evaluated, and saved.
            settle(run)
        if not state.interrupted:
            with run.averaged():
                evaluate(run, hooks)
        if state.interrupted:
            break
        state.finish_epoch()
        if run.lr_plan.kind == "plateau" and state.step > run.lr_plan.warmup:
            state.judge_plateau(run.config.plateau_patience, run.config.lr_gamma)
        hooks.on_epoch_end(run)
        settle(run)
    if state.interrupted:
        hooks.on_interrupt(run)
    else:
        hooks.on_fit_end(run)


def train_epoch(run: Run, hooks: HookList) -> None:
    """One pass over this rank's share of the train split, or over what a resumed epoch still has of it."""
    state = run.state
    start, plan = state.consumed, run.plan.rest(state.consumed)
    state.stop = run.max_steps_done
    if state.stop or not plan.micro_batches:
        resume_generators(run)
        return
    state.bad_images = state.bad_images if state.consumed else 0
    train_mode(run.model, run.config.freeze)
    losses: list[Tensor] = []
    for micro, batch in enumerate(timed(run.train_loader, run)):
        if micro == 0:
            # Not before: making the loader's iterator drew from them.
            resume_generators(run)
        update = plan.ends_update(micro)
        losses.append(forward_backward(run, plan, micro, batch, start + micro * plan.micro_batch_size))
        run.window.add(losses[-1], len(batch[1]))
        if run.config.on_bad_image == "skip":
            run.window.bad += (batch[2] < 0).sum()
        if not update:
            continue
        run.at("update")
        size = plan.update_size(micro)
        made_of = Update(state.epoch, state.step, state.consumed, size)
        done = optimizer_step(run, made_of, losses)
        losses = []
        state.consumed += size
        if done:
            state.step += 1
            state.samples += size
            if run.ema is not None:
                run.ema.update(state.step)
            if averaging_due(run):
                average_ranks(run)
            hooks.on_step_end(run)
        state.stop = run.max_steps_done
        if (averaging_due(run) and interrupted(run)) or state.stop:
            # Accelerate would keep a loader that is left early on its stack of active ones.
            run.train_loader.end()
            return
    assert state.consumed == start + plan.samples - plan.dropped, (state.consumed, start, plan)


def forward_backward(run: Run, plan: BatchPlan, micro: int, batch: Batch, position: int) -> Tensor:
    """A micro-batch's share of its update's gradient; returns the mean loss of this rank's images, ().

    Args:
        plan, micro: the plan that the micro-batch is number `micro` of.
        batch: this rank's, on the device.
        position: of the micro-batch's first sample in the order of the epoch, over all ranks.
    """
    config, rank = run.config, run.processes.rank
    images, labels, keys = batch
    apart = config.local_sgd_steps is not None or not plan.ends_update(micro)
    with run.accelerator.no_sync(run.model) if apart else nullcontext():
        run.at("forward")
        inputs, mixture = run.normalize(run.augment(images, keys)), None
        if config.mixup or config.cutmix:
            seed = derive_seed(config.seed, "mix", run.state.epoch, position, rank)
            mixture = draw_mixture(config.mixup, config.cutmix, (images.shape[-2], images.shape[-1]), seed)
            inputs = mixture.images(inputs)
        logits = run.model(inputs)
        if mixture is None:
            loss = F.cross_entropy(logits, labels, label_smoothing=config.label_smoothing)
        else:
            loss = mixture.loss(logits, labels, config.label_smoothing)
        run.at("backward")
        weight = plan.loss_weight(micro, rank)
        share = loss if weight == 1 else loss * weight
        if run.accelerator.scaler is None:
            # All that Accelerate's would add is a division by 1, forward and backward.
            share.backward()
        else:
            run.accelerator.backward(share)
    return loss.detach()


def resume_generators(run: Run) -> None:
    """In the epoch that a resume goes on with, put this rank's generators where they were."""
    if run.generators is not None:
        restore_generators(run.generators, run.accelerator.device)
        run.generators = None


def optimizer_step(run: Run, made_of: Update, losses: list[Tensor]) -> bool:
    """Clip and update; False when the GradScaler skipped the update because a gradient had overflowed.

    A skip shows in the falling scale. (Accelerate's own flag misses it with fused optimizers.)
    """
    state, scaler = run.state, run.accelerator.scaler
    if state.step == run.first_step:
        check_gradients(run)
    norm = None
    if run.config.max_grad_norm is not None:
        norm = run.window.grad_norm = run.accelerator.clip_grad_norm_(run.model.parameters(), run.config.max_grad_norm)
    if scaler is None:
        # Not module.parameters(): walking through the modules takes longer than the look.
        trained = [parameter for group in run.optimizer.param_groups for parameter in group["params"]]
        run.finite.see(made_of, losses, [gradient for parameter in trained if (gradient := parameter.grad) is not None], norm)
        note_finding(run)
    lr = run.lr
    for group in run.optimizer.param_groups:
        group["lr"] = lr
    # Without a scaler Accelerate's wrapper has nothing to do, and takes its time for it.
    optimizer = run.optimizer if scaler is not None else run.optimizer.optimizer
    optimizer.step()
    optimizer.zero_grad()
    if scaler is None:
        return True
    before, state.loss_scale = state.loss_scale, loss_scale(run.accelerator)
    skipped = before is not None and state.loss_scale is not None and state.loss_scale < before
    state.skipped += skipped
    state.skipped_in_a_row = state.skipped_in_a_row + 1 if skipped else 0
    if state.skipped_in_a_row == MAX_SKIPS:
        mean = float(torch.stack(losses).mean())
        run.finite.find(Finding(made_of, mean, None, f"the gradient overflows at every loss scale: {MAX_SKIPS} skips in a row, the newest"))
        note_finding(run)
    return not skipped


def check_gradients(run: Run) -> None:
    """Name the parameters that the first backward pass did not reach; DDP would abort at the next one, with numbers only. A collective.

    Raises:
        UserError: there are such parameters, more than one process, and no option that allows it.
    """
    if run.processes.count == 1 or run.config.find_unused_parameters or run.config.static_graph:
        return
    with run.processes.together():
        unused = [name for name, parameter in run.module.named_parameters() if parameter.requires_grad and parameter.grad is None]
        if unused:
            raise UserError(
                f"the model's output does not depend on {', '.join(unused)}: use --find_unused_parameters, or remove "
                f"{'it' if len(unused) == 1 else 'them'} from the model"
            )


@torch.no_grad()
def evaluate(run: Run, hooks: HookList) -> None:
    """One pass over the test split; a hook turns the logits into `state.metrics`. Through the prepared model, on every rank."""
    run.model.eval()
    run.share_statistics()
    hooks.on_eval_start(run)
    run.at("evaluation data")
    for images, labels, keys in run.eval_loader:
        run.at("evaluation forward")
        logits = run.model(run.normalize(images))
        run.at("gather")
        hooks.on_eval_batch(run, logits, labels, keys)
        if interrupted(run):
            run.eval_loader.end()
            return
        run.at("evaluation data")
    hooks.on_eval_end(run)


def timed(loader: Iterable[T], run: Run) -> Iterator[T]:
    """The loader's batches; the seconds that they let the loop wait go to `run.window.waited`."""
    batches = iter(loader)
    while True:
        run.at("data")
        start = time.perf_counter()
        try:
            batch = next(batches)
        except StopIteration:
            return
        run.window.waited += time.perf_counter() - start
        yield batch
