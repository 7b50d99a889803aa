"""This trainer's own run as the subject of an inspection."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from trainer.accelerator import requested_precision
from trainer.checks.base import Images, Subject
from trainer.config import Config
from trainer.data.dataset import Batch, ImageDataset, Transform, open_image
from trainer.data.loaders import Data, open_splits
from trainer.data.sampler import unpack_key
from trainer.data.sources import Source
from trainer.hooks.base import HookList
from trainer.hooks.gather_metrics import GatherMetrics
from trainer.hooks.save_on_main import SaveOnMain
from trainer.hooks.seed_processes import SeedProcesses
from trainer.hooks.set_epoch import SetEpoch
from trainer.loop import evaluate, optimizer_step
from trainer.runtime import Processes, UserError
from trainer.state import Run, TrainState, loss_scale

# Test images that are evaluated twice, about.
EVALUATED = 2048


def images_of(source: Source, config: Config) -> tuple[Images, ...]:
    """Both splits, opened as the training opens them."""
    try:
        train, test = open_splits(source, config, None)
    except UserError:
        # The very first image is broken, and with it the size that all must have is unknown.
        return tuple(
            Images(name, len(rows), lambda index, name=name, rows=rows: open_image(name, index, rows[index]["image"]))  # type: ignore[misc]
            for name, rows in (("train", source.train), (source.test_split, source.test))
        )
    return (
        Images("train", len(train), lambda index: train.gather([index])),
        Images(source.test_split, len(test), lambda index: test.gather([index])),
    )


def shorten_test(data: Data, config: Config, processes: Processes) -> tuple[Data, Config]:
    """The first test images, about `EVALUATED`, whose last batch is filled up as the whole split's would be."""
    size = min(config.eval_batch_size, max(1, EVALUATED // processes.count))
    every = size * processes.count
    if len(data.test) <= max(EVALUATED, every):
        return data, config
    count = len(data.test) % every + max(1, EVALUATED // every) * every
    test = copy.copy(data.test)
    test.labels, test.rows = test.labels[:count], test.rows.select(range(count))
    return replace(data, test=test), replace(config, eval_batch_size=size)


def subject_of(run: Run, images: tuple[Images, ...], folder: Path) -> Subject:
    """The run, with its own loop, hooks and writers as the callables."""
    accelerator, config = run.accelerator, run.config

    def fresh(**state: Any) -> Run:
        return replace(run, state=TrainState(loss_scale=loss_scale(accelerator), **state))

    def forward(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        images, labels = (tensor.to(accelerator.device) for tensor in batch)
        return model(run.normalize(images)), labels

    def start_epoch(epoch: int) -> None:
        HookList((SetEpoch(), SeedProcesses())).on_epoch_start(fresh(epoch=epoch))

    def train_step(batch: Batch) -> None:
        logits, labels = forward(run.model, batch)
        accelerator.backward(nn.functional.cross_entropy(logits, labels))
        optimizer_step(fresh())

    def evaluated() -> tuple[float, ...]:
        evaluation = fresh()
        evaluate(evaluation, HookList((GatherMetrics(),)))
        metrics = evaluation.state.metrics
        return round(metrics["acc1"] * metrics["samples"] / 100), metrics["samples"], metrics["loss"]

    def save(folder: Path) -> None:
        best = {"epoch": 1, "acc1": 0.0, "loss": 0.0}
        HookList((SaveOnMain(),)).on_epoch_end(replace(fresh(epoch=1, best=best), output_dir=folder))

    def seeded_by_sample(transform: Transform) -> ImageDataset:
        dataset = copy.copy(run.data.train)
        dataset.transform = transform
        return dataset

    return Subject(
        processes=run.processes,
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
        index_of=lambda key: unpack_key(key)[1],
        seeded_by_sample=seeded_by_sample,
        images=images,
        folder=folder,
        checkpoints=getattr(config, "save_total_limit", None) or 1,
    )
