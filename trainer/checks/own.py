"""This trainer's own run as the subject of an inspection."""

import copy
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer import checkpoint
from trainer.accelerator import build_accelerator, requested_precision
from trainer.agreement import await_checkpoint
from trainer.checks.base import Images, Subject
from trainer.config import Config
from trainer.data.dataset import Batch, ImageDataset, Shape, Transform
from trainer.data.loaders import Data, open_splits
from trainer.data.sampler import unpack_key
from trainer.data.sources import Source
from trainer.finite import Finite, Update
from trainer.hooks.base import Hook, HookList
from trainer.hooks.gather_metrics import GatherMetrics
from trainer.hooks.save_on_main import SaveOnMain
from trainer.hooks.seed_processes import SeedProcesses
from trainer.hooks.set_epoch import SetEpoch
from trainer.loop import evaluate, optimizer_step, train_epoch
from trainer.runtime import Processes, UserError
from trainer.seeding import generator_states
from trainer.state import Run, TrainState, build_run, loss_scale

# Test images that are evaluated twice, about.
EVALUATED = 2048
# Updates of the run that is stopped halfway.
UPDATES = 4

# A rounding's share of a number is at most 2**-11 in fp16, 2**-9 in bf16; PowerSGD gives an approximation of any quality.
TOLERANCES = {"fp16": 3e-3, "bf16": 1e-2, "powersgd": float("inf")}


def images_of(source: Source, config: Config) -> tuple[Images, ...]:
    """Both splits, opened as the training opens them."""
    try:
        train, test, _ = open_splits(source, config, None)
    except UserError:
        # An image is broken whose header was looked at, or they have several sizes: the size that all must have is unknown.
        shape = Shape("RGB", (32, 32), resize=True)
        train = ImageDataset(source.name, source.train, source.train_labels, shape, numbers=source.train_numbers)
        test = ImageDataset(f"{source.name} ({source.test_split})", source.test, source.test_labels, shape, numbers=source.test_numbers)
    return (
        Images("train", len(train), train.open),
        Images(source.test_split, len(test), test.open),
    )


def shorten_test(data: Data, config: Config, processes: Processes) -> tuple[Data, Config]:
    """The first test images, about `EVALUATED`, whose last batch is filled up as the whole split's would be."""
    size = min(config.eval_batch_size or 125, max(1, EVALUATED // processes.count))
    every = size * processes.count
    if len(data.test) <= max(EVALUATED, every):
        return data, config
    count = len(data.test) % every + max(1, EVALUATED // every) * every
    test = copy.copy(data.test)
    test.labels = test.labels[:count]
    return replace(data, test=test), replace(config, eval_batch_size=size)


def kept(run: Run) -> int:
    """Checkpoints that will lie in the output folder at once."""
    every = run.config.checkpointing_steps
    written = run.total_steps // every + 1 if isinstance(every, int) else run.config.epochs
    return written if run.config.save_total_limit is None else min(written, run.config.save_total_limit)


class SaveAt(Hook):
    """Writes a checkpoint after update `step`."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, run: Run) -> None:
        if run.state.step == self.step and run.checkpoint is None:
            checkpoint.save(run, {})
            await_checkpoint(run)


def resumed(run: Run, folder: Path) -> Iterator[dict[str, Tensor]]:
    """Two runs built like `run`: one trains `UPDATES` updates and saves halfway, the other goes on from there. A collective.

    What can fail on one rank alone is inside the run's own `together`.
    """
    processes = run.processes
    config = replace(
        run.config, max_steps=UPDATES, epochs=max(run.config.epochs, UPDATES), output_dir=str(folder), resume_from_checkpoint=None
    )

    def build(config: Config) -> Run:
        built = build_run(config, processes, run.data, build_accelerator(config, processes))
        built.output_dir = folder
        return built

    def train(built: Run, *more: Hook) -> dict[str, Tensor]:
        hooks, state = HookList((SetEpoch(), SeedProcesses(), *more)), built.state
        while not state.stop:
            hooks.on_epoch_start(built)
            train_epoch(built, hooks)
            if not state.stop:
                state.epoch, state.consumed = state.epoch + 1, 0
        built.close()
        # Until an evaluation a rank's BatchNorm statistics may be its own, which no checkpoint holds and nothing reads.
        built.share_statistics()
        parts = {"weights": built.module.state_dict(), "optimizer": checkpoint.optimizer_tensors(built)}
        parts["averages"] = built.ema.averages if built.ema is not None else {}
        parts["generators"] = generator_states(built.accelerator.device)
        parts["run"] = {"loss_scale": torch.tensor(state.loss_scale or 1.0), "samples": torch.tensor(state.samples)}
        return {f"{part}/{name}": tensor.detach().cpu().clone() for part, tensors in parts.items() for name, tensor in tensors.items()}

    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True):
        whole = build(config)
        yield train(whole, SaveAt(UPDATES // 2))
        config = replace(config, resume_from_checkpoint=str(whole.checkpoint))
        found = checkpoint.find(config, processes)
        assert found is not None
        again = build(config)
        with torch.no_grad():
            # Built from the same seed it would come to the same end without a checkpoint too.
            for parameter in again.module.parameters():
                parameter.zero_()
        checkpoint.restore(again, found, HookList(()).load_state_dict)
        checkpoint.restore_folder(again, found)
        yield train(again)


def subject_of(run: Run, processes: Processes, images: tuple[Images, ...], folder: Path) -> Subject:
    """The run, with its own loop, hooks and writers as the callables.

    Args:
        processes: for the checks' messages.
    """
    accelerator, config = run.accelerator, run.config

    def fresh(**state: Any) -> Run:
        finite = Finite(accelerator.device)
        return replace(run, state=TrainState(loss_scale=loss_scale(accelerator), **state), finite=finite, checkpoint=None, first_step=0)

    def forward(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        images, labels, _ = (tensor.to(accelerator.device) for tensor in batch)
        return model(run.normalize(images)), labels

    def start_epoch(epoch: int) -> None:
        HookList((SetEpoch(), SeedProcesses())).on_epoch_start(fresh(epoch=epoch))

    def train_step(batch: Batch) -> None:
        logits, labels = forward(run.model, batch)
        loss = nn.functional.cross_entropy(logits, labels)
        accelerator.backward(loss)
        optimizer_step(fresh(), Update(0, 0, 0, len(labels)), [loss.detach()])

    def evaluated() -> tuple[float, ...]:
        evaluation = fresh()
        evaluate(evaluation, HookList((GatherMetrics(),)))
        metrics = evaluation.state.metrics
        return round(metrics["acc1"] * metrics["samples"] / 100), metrics["samples"], metrics["loss"]

    def save(folder: Path) -> None:
        saving = replace(fresh(epoch=1, best={"epoch": 1, "acc1": 0.0, "loss": 0.0}), output_dir=folder)
        SaveOnMain().on_epoch_end(saving)
        checkpoint.save(saving, {})
        await_checkpoint(saving)

    def seeded_by_sample(transform: Transform) -> ImageDataset:
        dataset = copy.copy(run.data.train)
        dataset.transform = transform
        return dataset

    return Subject(
        processes=processes,
        device=accelerator.device,
        model=run.model,
        optimizer=run.optimizer,
        train_loader=run.train_loader,
        eval_loader=run.eval_loader,
        accelerator=accelerator,
        scaler=accelerator.scaler,
        precision=requested_precision(config),
        forward=forward,
        start_epoch=start_epoch,
        train_step=train_step,
        evaluate=evaluated,
        save=save,
        resumed=partial(resumed, run),
        index_of=lambda key: unpack_key(key)[1],
        seeded_by_sample=seeded_by_sample,
        images=images,
        skips_bad=config.on_bad_image == "skip",
        folder=folder,
        checkpoints=kept(run),
        tolerance=TOLERANCES.get(config.comm_hook, 1e-3),
        averages=sum(average.nbytes for average in run.ema.averages.values()) if run.ema is not None else 0,
        eval_note=f" (the first of {images[1].count:,})" if images and images[1].count > len(run.data.test) else "",
    )
