"""Random draws of augmentation, and of dropout, differ over ranks, workers and epochs."""

import random
from functools import partial
from itertools import chain
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.data import Dataset, get_worker_info

from trainer.checks.base import Result, Subject, quantity
from trainer.checks.loaders import base, first_batches, is_iterable, keys, length, swapped
from trainer.checks.preserve import random_states, restore_random

LIBRARIES = ("torch", "numpy", "random")
# (worker, torch's draw, numpy's, random's)
Draw = tuple[int, float, float, float]


class Draws(Dataset[list[float]]):
    """A data set whose samples are what the three libraries draw where the sample is read."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, key: Any) -> list[float]:
        return draw()


def draw(image: Tensor | None = None) -> list[float]:
    info = get_worker_info()
    return [float(info.id if info is not None else 0), float(torch.rand(())), float(numpy.random.rand()), random.random()]


def draw_tensor(image: Tensor) -> Tensor:
    """As an augmentation: uint8 (C, H, W) -> float64 (4,)."""
    return torch.tensor(draw(), dtype=torch.float64)


def check(subject: Subject) -> Result:
    """Draws where the images are read, through the real loader and its workers; compared are the libraries that reading an image uses."""
    loader = subject.train_loader
    if is_iterable(loader):
        return Result("SKIPPED", "an iterable data set is not read here")
    by_sample = subject.seeded_by_sample is not None
    used = set(LIBRARIES) if by_sample else set(chain(*subject.each(lambda: _used(subject))))
    dropout = (
        any(isinstance(layer, _DropoutNd) and layer.p > 0 for layer in subject.module.modules()) if subject.model is not None else False
    )
    if not used and not dropout:
        return Result("SKIPPED", "reading an image draws from no global generator of torch, numpy or random: no augmentation to compare")
    epochs: list[list[list[Draw]]] = []
    inside: list[list[float]] = []
    for epoch in (0, 1):
        epochs.append(subject.each(partial(_read, subject, epoch)))
        inside.append(subject.each(lambda: float(torch.rand((), device=subject.device))))
    for number, library in enumerate(LIBRARIES, start=1):
        if library in used:
            fault = _repeated(epochs, number)
            if fault:
                return Result("FAIL", f"{library} draws the same numbers {fault}")
    if (dropout or by_sample) and len(set(chain(*inside))) < len(inside) * subject.count:
        return Result(
            "FAIL", "torch draws the same numbers inside the model on two ranks or in two epochs: seed each rank by (seed, epoch, rank)"
        )
    workers = len({(rank, one[0]) for rank, draws in enumerate(epochs[0]) for one in draws})
    sources = f"{quantity(subject.count, 'rank')}, {quantity(workers, 'loading process', 'loading processes')} and 2 epochs"
    names = f"of {', '.join(library for library in LIBRARIES if library in used)}" if used else "inside the model"
    return Result("PASS", f"draws {names} differ over {sources}{', by (seed, epoch, sample)' * by_sample}")


def _used(subject: Subject) -> set[str]:
    """Libraries whose global generator moves when this process reads a sample."""
    data, states = subject.train_loader.dataset, random_states()
    key = keys(subject.train_loader)[0][0]
    restore_random(states)
    data[key]
    after = random_states()
    restore_random(states)
    moved = {"torch": not torch.equal(states[0], after[0]), "random": states[3] != after[3]}
    moved["numpy"] = any(not numpy.array_equal(one, other) for one, other in zip(states[2], after[2], strict=True))
    return {library for library, has_moved in moved.items() if has_moved}


def _read(subject: Subject, epoch: int) -> list[Draw]:
    """This rank's draws in the first batch of each worker."""
    if subject.start_epoch is not None:
        subject.start_epoch(epoch)
    loader = subject.train_loader
    batches = max(1, base(loader).num_workers)
    if subject.seeded_by_sample is None:
        with swapped(loader, dataset=Draws(length(loader)), collate_fn=list):
            rows: list[list[float]] = list(chain(*first_batches(loader, batches)))
    else:
        with swapped(loader, dataset=subject.seeded_by_sample(draw_tensor)):
            rows = list(chain(*(images.tolist() for images, *_ in first_batches(loader, batches))))
    return [(int(row[0]), row[1], row[2], row[3]) for row in rows]


def _repeated(epochs: list[list[list[Draw]]], library: int) -> str:
    """Where a library's draw comes twice, and what to do; empty when it does not."""
    seen: dict[float, tuple[int, int, int]] = {}
    for epoch, ranks in enumerate(epochs):
        for rank, draws in enumerate(ranks):
            for one in draws:
                place = (epoch, rank, one[0])
                other = seen.setdefault(one[library], place)
                if other == place:
                    continue
                if other[1] != rank:
                    return (
                        f"on ranks {other[1]} and {rank}: seed each process differently, for example by seed + 1000 x rank, and hand the "
                        "DataLoader no generator that Accelerate would synchronise"
                    )
                if other[2] != one[0]:
                    return f"in workers {other[2]} and {one[0]} of rank {rank}: seed in worker_init_fn by the worker, or not at all"
                return f"in epochs {other[0]} and {epoch} of rank {rank}: do not seed anew with the same number before each epoch"
    return ""
