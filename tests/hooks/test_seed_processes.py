"""Draws differ between ranks, workers and epochs, and repeat in the next run."""

import random
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from tests.helpers import SIDE, alone_run, make_run, needed_hooks, write_ids
from tests.ranks import Ranks
from trainer.hooks.base import Hook
from trainer.hooks.seed_processes import SeedProcesses
from trainer.loop import fit
from trainer.runtime import Processes
from trainer.state import Run


def three_draws() -> tuple[float, float, float]:
    return float(torch.rand(())), float(numpy.random.rand()), random.random()


def draws_of(processes: Processes, folder: Path) -> list[tuple[float, float, float]]:
    run = make_run(processes, folder)
    draws = []
    for epoch in (0, 1, 0):
        run.state.epoch = epoch
        SeedProcesses().on_epoch_start(run)
        draws.append(three_draws())
    return draws


def test_ranks_and_epochs_draw_differently_and_repeat(two_ranks: Ranks, tmp_path: Path) -> None:
    folder = write_ids(tmp_path / "ids", train=8)
    zero, one = two_ranks.run(draws_of, folder)
    for rank in (zero, one):
        assert rank[0] == rank[2]
    everything = [value for rank in (zero, one) for draws in rank[:2] for value in draws]
    assert len(set(everything)) == len(everything)
    assert two_ranks.run(draws_of, folder) == [zero, one]


def stamp(image: Tensor) -> Tensor:
    """An augmentation that writes its three draws into the last row."""
    image = image.clone()
    image[0, -1, :3] = torch.tensor([int(256 * value) for value in three_draws()], dtype=torch.uint8)
    return image


def stamps(processes: Processes, folder: Path, workers: int) -> list[dict[int, tuple[int, ...]]]:
    """By epoch: image id -> its three draws, on this rank."""
    run = make_run(processes, folder, transform=stamp, num_workers=workers, batch_size=4)
    epochs = []
    for epoch in (0, 1):
        run.state.epoch = epoch
        needed_hooks().on_epoch_start(run)
        epochs.append({int(i[0, 0, 0]): tuple(i[0, -1, :3].tolist()) for images, *_ in run.train_loader for i in images})
    return epochs


def test_augmentation_is_that_of_the_image_whatever_ranks_and_workers(two_ranks: Ranks, tmp_path: Path) -> None:
    folder = write_ids(tmp_path / "ids", train=32)
    with_workers = two_ranks.run(stamps, folder, 2)
    without = two_ranks.run(stamps, folder, 0)
    for epoch in (0, 1):
        both = {**with_workers[0][epoch], **with_workers[1][epoch]}
        assert both == {**without[0][epoch], **without[1][epoch]}
        assert sorted(both) == list(range(32))
        assert len(set(both.values())) == 32, "two images drew the same"
    zero = {**with_workers[0][0], **with_workers[1][0]}
    one = {**with_workers[0][1], **with_workers[1][1]}
    assert not {i for i in zero if zero[i] == one[i]}, "an image drew the same in the next epoch of a persistent worker"


class Dropped(nn.Module):
    """A linear model behind dropout, which notes its masks."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout, self.fc = nn.Dropout(0.5), nn.Linear(SIDE * SIDE, 10)
        self.masks: list[list[bool]] = []

    def forward(self, images: Tensor) -> Tensor:
        kept = self.dropout(torch.ones_like(images))
        if self.training:
            self.masks.append((kept[0] > 0).flatten().tolist())
        logits: Tensor = self.fc((images * kept).flatten(1))
        return logits


def masks(processes: Processes, folder: Path, out: Path) -> list[list[bool]]:
    model = Dropped()
    run = make_run(processes, folder, model, batch_size=8, epochs=2, output_dir=str(out))
    fit(run, needed_hooks())
    return model.masks


def test_dropout_differs_over_ranks_and_epochs_and_repeats(two_ranks: Ranks, tmp_path: Path) -> None:
    folder = write_ids(tmp_path / "ids", train=32)
    first = two_ranks.run(masks, folder, tmp_path / "first")
    every = [tuple(mask) for rank in first for mask in rank]
    assert len(every) == 8
    assert len(set(every)) == 8
    assert two_ranks.run(masks, folder, tmp_path / "second") == first


class Reads(Hook):
    def __init__(self) -> None:
        self.draws: list[Any] = []

    def on_step_end(self, run: Run) -> None:
        self.draws.append(three_draws())


def test_augmentation_does_not_touch_the_process_generators(tmp_path: Path) -> None:
    folder = write_ids(tmp_path / "ids", train=16)
    draws = []
    for transform in (None, stamp):
        reads = Reads()
        with alone_run(folder, transform=transform, batch_size=4, epochs=1, output_dir=str(tmp_path / str(transform))) as run:
            fit(run, needed_hooks(reads))
        draws.append(reads.draws)
    assert draws[0] == draws[1]
