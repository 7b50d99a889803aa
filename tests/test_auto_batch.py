"""--auto_batch_size against a real limit of memory: the kernel refuses what goes beyond it."""

import importlib
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import write_ids
from tests.ranks import Ranks, alone
from trainer.accelerator import build_accelerator
from trainer.auto_batch import fit_batch, fits
from trainer.config import Config
from trainer.data.loaders import load_data
from trainer.hooks.log import describe
from trainer.runtime import Processes, UserError
from trainer.state import build_run

MEGABYTE = 1 << 20


@contextmanager
def limited(megabytes: int | None) -> Iterator[None]:
    """This process may take so much more address space than it has."""
    if megabytes is None:
        yield
        return
    # An optimizer imports it: half-imported, for want of memory, it would be broken for good.
    importlib.import_module("torch._dynamo")
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + megabytes * MEGABYTE, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def fitted(processes: Processes, folder: Path, limits: list[int | None], knobs: dict[str, Any]) -> tuple[int, int, int, str | None]:
    """Batch, accumulation and updates of the run that results, and its row in the block before training."""
    knobs = {"model": "tests.test_auto_batch:hungry"} | knobs
    config = Config(dataset=str(folder), auto_batch_size=True, cpu_threads=1, **knobs)
    accelerator = build_accelerator(config, processes)
    data = load_data(config, processes)
    with limited(limits[processes.rank]):
        config, data = fit_batch(config, processes, accelerator, data)
    run = build_run(config, processes, data, accelerator)
    assert run.plan.batch_size == config.batch_size or data.fitted is None
    assert run.plan.accumulation == config.gradient_accumulation_steps
    return run.plan.batch_size, run.plan.accumulation, run.plan.updates, dict(describe(run)).get("auto batch")


class Hungry(torch.nn.Module):
    """Keeps 16 MB of activations an image for the backward pass; little in evaluation."""

    def __init__(self, num_classes: int, numbers: int = 4 * MEGABYTE) -> None:
        super().__init__()
        self.numbers = numbers
        self.linear = torch.nn.Linear(64, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.linear(images.flatten(1))
        if not self.training:
            return logits
        wide = logits.repeat(1, self.numbers // self.linear.out_features)
        return logits + wide.square().mean(1, keepdim=True)


def hungry(num_classes: int) -> Hungry:
    return Hungry(num_classes)


def insatiable(num_classes: int) -> Hungry:
    """4 GB: more than what earlier tests have left free in this process."""
    return Hungry(num_classes, 1024 * MEGABYTE)


def test_what_does_not_fit_is_accumulated(tmp_path: Path) -> None:
    folder = write_ids(tmp_path / "ids", train=96)
    whole = alone(fitted, folder, [None], {"batch_size": 24})
    assert whole == (24, 1, 4, None)
    size, accumulation, updates, row = alone(fitted, folder, [600], {"batch_size": 24})
    assert 1 <= size <= 12
    assert (size * accumulation, updates) == (24, 4), "an update has the same images"
    assert row == f"batch 24 -> {size} a process, accumulation 1 -> {accumulation}: that fits into memory"


def test_one_ranks_limit_binds_both(two_ranks: Ranks, tmp_path: Path) -> None:
    folder = write_ids(tmp_path / "ids", train=96)
    one, other = two_ranks.run(fitted, folder, [None, 600], {"global_batch_size": 48, "gradient_accumulation_steps": 2})
    assert one == other
    assert one[0] * one[1] * 2 == 48
    one, other = two_ranks.run(fitted, folder, [600, None], {"global_batch_size": 48})
    assert one == other
    assert one[0] <= 12
    assert one[0] * one[1] * 2 == 48
    assert one[2] == 2


def test_nothing_fits(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not even a batch of one image fits into memory"):
        alone(fitted, write_ids(tmp_path / "ids", train=96), [24], {"batch_size": 8, "model": "tests.test_auto_batch:insatiable"})


def test_another_error_is_none_of_memory(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="mine"):
        alone(broken, write_ids(tmp_path / "ids", train=96))


def broken(processes: Processes, folder: Path) -> bool:
    config = Config(dataset=str(folder), auto_batch_size=True)
    data = load_data(config, processes)
    return fits(replace_size(config), build_accelerator(config, processes), data, 4)


def replace_size(config: Config) -> Config:
    from dataclasses import replace

    return replace(config, model="tests.test_auto_batch:failing")


class Failing(Hungry):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.training:
            raise RuntimeError("mine")
        return super().forward(images)


def failing(num_classes: int) -> Failing:
    return Failing(num_classes)
