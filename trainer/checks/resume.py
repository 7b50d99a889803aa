"""A checkpoint holds all that training on depends on: loaded into freshly built objects, it leads to the same weights."""

from collections.abc import Iterator

import torch
from torch import Tensor

from trainer.checks.base import Result, Subject, quantity, temporary_folder

# Kernels on a GPU may add in another order each time.
TOLERANCE = {"cpu": 0.0, "cuda": 1e-3}


def check(subject: Subject) -> Result:
    """Train, save, train on; build anew in the same processes, load, train on. (Real kills are the tests' affair.)"""
    assert subject.resumed is not None
    resumed = subject.resumed
    states: list[dict[str, Tensor]] = []

    def step(steps: Iterator[dict[str, Tensor] | None]) -> bool:
        state = next(steps)
        if state is not None:
            states.append(state)
        return len(states) == 2

    with temporary_folder(subject) as own:
        steps = resumed(subject.processes.broadcast(own))
        while not all(subject.each(lambda: step(steps))):
            pass
    compared = subject.each(lambda: _compare(*states))
    for rank, (different, _) in enumerate(compared):
        allowed = TOLERANCE.get(subject.device.type, 0.0)
        worst = max(different, key=lambda name: different[name], default=None)
        if worst is not None and not different[worst] <= allowed:
            return Result(
                "FAIL",
                f"after the resume {quantity(len(different), 'tensor')} of rank {rank} differ from the training that went on, {worst} by "
                f"{different[worst]:.1g}: save and load weights, optimizer and GradScaler",
            )
    return Result("PASS", f"saved, built anew, loaded, trained on: {quantity(compared[0][1], 'tensor')} as without the break")


def _compare(one: dict[str, Tensor], other: dict[str, Tensor]) -> tuple[dict[str, float], int]:
    """Relative distance of the tensors that differ, by name, and the number of all."""
    different = {name: float("inf") for name in one.keys() ^ other.keys()}
    for name in one.keys() & other.keys():
        a, b = one[name].double(), other[name].double()
        # A NaN stands for "none" in a generator's state.
        if not torch.allclose(a, b, rtol=0.0, atol=0.0, equal_nan=True):
            different[name] = float((a - b).norm() / (b.norm() or 1.0))
    return different, len(one)
