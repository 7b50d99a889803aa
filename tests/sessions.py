"""Trainings that are stopped and gone on with, assembled as main.py does it, in processes that live on."""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from tests.helpers import ids_of, tensors
from trainer.accelerator import build_accelerator
from trainer.checkpoint import find, optimizer_tensors, restore, restore_folder
from trainer.config import Config
from trainer.data.loaders import load_data
from trainer.hooks.audit import Audit
from trainer.hooks.base import Hook, HookList
from trainer.hooks.checkpoints import Checkpoints
from trainer.hooks.early_stopping import EarlyStopping
from trainer.hooks.gather_metrics import GatherMetrics
from trainer.hooks.log import Log
from trainer.hooks.max_time import MaxTime
from trainer.hooks.save_on_main import SaveOnMain
from trainer.hooks.seed_processes import SeedProcesses
from trainer.hooks.set_epoch import SetEpoch
from trainer.loop import fit
from trainer.models.convnet import ConvNet
from trainer.output import create_output_dir
from trainer.runtime import Processes
from trainer.state import Run, build_run

TIMES = ("seconds", "images_per_second", "data_fraction")


class StopAt(Hook):
    """Asks for a stop as a signal would, on one rank only, at a step or in the evaluation after it."""

    def __init__(self, rank: int, step: int, evaluation: bool = False) -> None:
        self.rank, self.step, self.evaluation = rank, step, evaluation

    def on_step_end(self, run: Run) -> None:
        self.ask(run, not self.evaluation)

    def on_eval_batch(self, run: Run, logits: Tensor, labels: Tensor, keys: Tensor) -> None:
        self.ask(run, self.evaluation)

    def ask(self, run: Run, now: bool) -> None:
        if now and run.state.step == self.step and run.processes.rank == self.rank:
            run.processes.stops.request("SIGTERM")


@dataclass
class Session:
    """What a training left: everything that must not depend on stops, of one rank."""

    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    averages: dict[str, Tensor]
    scaler: dict[str, Any] | None
    state: dict[str, Any]
    order: list[tuple[int, list[int]]]
    metrics: list[dict[str, Any]]
    notes: list[str]
    interrupted: str | None


class Dropout(nn.Module):
    """A ConvNet that draws from the process's generators: torch's, numpy's and random's."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.dropout = ConvNet(1, (8, 8), 10), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            x = x * (1 + 0.1 * numpy.random.normal()) + 0.1 * random.gauss(0, 1)
        output: Tensor = self.dropout(self.net(x))
        return output


def shake(image: Tensor) -> Tensor:
    """Augmentation that leaves the two pixels alone that hold the index."""
    shaken = image.clone()
    shaken[:, 1:] = torch.randint(0, 256, shaken[:, 1:].shape, dtype=torch.uint8)
    return shaken


def session(
    processes: Processes, dataset: Path, folder: Path, stop: StopAt | None = None, more: tuple[Hook, ...] = (), **knobs: Any
) -> Session:
    """Train into `folder`, as long as nothing stops it; with `resume_from_checkpoint="auto"` go on there."""
    knobs = {
        "epochs": 3,
        "batch_size": 8,
        "eval_batch_size": 3,
        "log_interval": 4,
        "lr": 1e-2,
        "weight_decay": 0.1,
        "cpu_threads": 1,
    } | knobs
    config = Config(dataset=str(dataset), output_dir=str(folder), **knobs)
    accelerator = build_accelerator(config, processes)
    checkpoint = find(config, processes)
    data = load_data(config, processes, shake)
    torch.manual_seed(1)
    run = build_run(config, processes, data, accelerator, Dropout())
    order: list[tuple[int, list[int]]] = []
    augment = run.augment

    def record(images: Tensor, keys: Tensor) -> Tensor:
        order.append((run.state.epoch, ids_of(images)))
        return augment(images, keys)

    run.augment = record  # type: ignore[assignment]
    log = Log()
    hooks: tuple[Hook, ...] = (SetEpoch(), SeedProcesses(), GatherMetrics(), SaveOnMain(), log, Audit(), MaxTime(), EarlyStopping())
    if checkpoint is not None:
        restore(run, checkpoint, HookList(hooks).load_state_dict)
    run.output_dir = create_output_dir(config, processes, data.classes, checkpoint)
    if checkpoint is not None:
        restore_folder(run, checkpoint)
    fit(run, HookList((*hooks, *((stop,) if stop else ()), *more, Checkpoints(hooks))))
    run.close()
    if run.is_main:
        log.close(0, "")
    metrics = folder / "metrics.jsonl"
    entries = [json.loads(line) for line in metrics.read_text().splitlines()] if run.is_main else []
    scaler = accelerator.scaler
    state = vars(run.state).copy()
    return Session(
        tensors(run.module),
        optimizer_tensors(run),
        {name: average.clone() for name, average in run.ema.averages.items()} if run.ema is not None else {},
        scaler.state_dict() if scaler is not None else None,
        state,
        order,
        [{key: value for key, value in entry.items() if key not in TIMES} for entry in entries],
        run.resume_notes,
        run.state.interrupted,
    )


def assert_equal(one: Session, other: Session) -> None:
    """To the bit."""
    for mine, theirs in ((one.weights, other.weights), (one.optimizer, other.optimizer), (one.averages, other.averages)):
        assert mine.keys() == theirs.keys()
        for name in mine:
            assert torch.equal(mine[name], theirs[name]), name
    assert one.scaler == other.scaler
    assert one.state == other.state
    assert one.metrics == other.metrics
