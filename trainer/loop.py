"""The training loop, which reads like the tutorials' own.

    fit
      on_fit_start
      for each epoch
        on_epoch_start                      SetEpoch, SeedProcesses
        train_epoch
          for each micro-batch: forward, backward
          after the last one of an update: clip, optimizer step
            on_step_end                     unless the GradScaler skipped the step
        evaluate
          on_eval_start
          for each batch: on_eval_batch     GatherMetrics
          on_eval_end
        on_epoch_end                        SaveOnMain, Log
      on_fit_end

Every rank runs every line, and every hook.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import TypeVar

import torch
import torch.nn.functional as F

from trainer.hooks.base import HookList
from trainer.hooks.gather_metrics import GatherMetrics
from trainer.hooks.save_on_main import SaveOnMain
from trainer.hooks.seed_processes import SeedProcesses
from trainer.hooks.set_epoch import SetEpoch
from trainer.runtime import UserError
from trainer.state import Run, Window, loss_scale

REQUIRED_HOOKS = (SetEpoch, SeedProcesses, GatherMetrics, SaveOnMain)

T = TypeVar("T")


def fit(run: Run, hooks: HookList) -> None:
    """Train for `config.epochs` epochs or `config.max_steps` updates, whichever ends first, and evaluate after each epoch.

    Raises:
        ValueError: one of the four hooks that correctness rests on is missing.
    """
    missing = [kind.__name__ for kind in REQUIRED_HOOKS if not any(isinstance(hook, kind) for hook in hooks)]
    if missing:
        raise ValueError(f"fit needs the hooks {', '.join(missing)}")
    state = run.state
    hooks.on_fit_start(run)
    while state.epoch < run.config.epochs and not state.stop:
        hooks.on_epoch_start(run)
        train_epoch(run, hooks)
        evaluate(run, hooks)
        state.finish_epoch()
        hooks.on_epoch_end(run)
    hooks.on_fit_end(run)


def train_epoch(run: Run, hooks: HookList) -> None:
    """One pass over this rank's share of the train split."""
    plan, state, rank = run.plan, run.state, run.processes.rank
    run.model.train()
    for micro, (images, labels) in enumerate(timed(run.train_loader, run.window)):
        update = plan.ends_update(micro)
        with nullcontext() if update else run.accelerator.no_sync(run.model):
            loss = F.cross_entropy(run.model(run.normalize(images)), labels)
            run.accelerator.backward(loss * plan.loss_weight(micro, rank))
        run.window.loss += loss.detach() * len(labels)
        run.window.samples += len(labels)
        if not update or not optimizer_step(run):
            continue
        state.step += 1
        state.samples += plan.update_size(micro)
        hooks.on_step_end(run)
        if state.step == run.config.max_steps:
            state.stop = True
            # Accelerate would keep a loader that is left early on its stack of active ones.
            run.train_loader.end()
            break


def optimizer_step(run: Run) -> bool:
    """Clip and update; False when the GradScaler skipped the update because a gradient had overflowed.

    A skip shows in the falling scale. (Accelerate's own flag misses it with fused optimizers.)
    """
    state = run.state
    if state.step == 0:
        check_gradients(run)
    if run.config.max_grad_norm is not None:
        run.window.grad_norm = run.accelerator.clip_grad_norm_(run.model.parameters(), run.config.max_grad_norm)
    for group in run.optimizer.param_groups:
        group["lr"] = run.lr_plan.at(state.step)
    run.optimizer.step()
    run.optimizer.zero_grad()
    before, state.loss_scale = state.loss_scale, loss_scale(run.accelerator)
    skipped = before is not None and state.loss_scale is not None and state.loss_scale < before
    state.skipped += skipped
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
    hooks.on_eval_start(run)
    for images, labels in run.eval_loader:
        hooks.on_eval_batch(run, run.model(run.normalize(images)), labels)
    hooks.on_eval_end(run)


def timed(loader: Iterable[T], window: Window) -> Iterator[T]:
    """The loader's batches; the seconds that they let the loop wait go to `window.waited`."""
    batches = iter(loader)
    while True:
        start = time.perf_counter()
        try:
            batch = next(batches)
        except StopIteration:
            return
        window.waited += time.perf_counter() - start
        yield batch
