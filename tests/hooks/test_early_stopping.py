"""The end of a run that no longer gets better: the same on all ranks, exit code 0, and final."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers import make_run, needed_hooks, write_ids
from tests.ranks import Ranks
from trainer.hooks.base import Hook
from trainer.hooks.early_stopping import EarlyStopping
from trainer.loop import fit
from trainer.runtime import Processes
from trainer.state import Run

ACCURACIES = [10.0, 30.0, 30.0, 20.0, 40.0, 40.0, 40.0, 40.0]


class Scripted(Hook):
    """An evaluation with these accuracies."""

    def on_eval_end(self, run: Run) -> None:
        run.state.metrics["acc1"] = ACCURACIES[run.state.epoch]


@pytest.fixture(scope="module")
def ids(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_ids(tmp_path_factory.mktemp("ids"), 16, 8)


def epochs(processes: Processes, ids: Path, patience: int | None) -> tuple[int, str | None]:
    knobs: dict[str, Any] = {"batch_size": 8, "epochs": 8, "early_stopping_patience": patience}
    run = make_run(processes, ids, output_dir=str(ids.parent / "out"), **knobs)
    fit(run, needed_hooks(Scripted(), EarlyStopping()))
    return run.state.epoch, run.state.interrupted


@pytest.mark.parametrize(("patience", "expected"), [(1, 3), (2, 4), (3, 8), (None, 8)])
def test_all_ranks_end_after_the_same_epoch(two_ranks: Ranks, ids: Path, patience: int | None, expected: int) -> None:
    assert two_ranks.run(epochs, ids, patience) == [(expected, None)] * 2


def resumed(processes: Processes, ids: Path) -> int:
    run = make_run(processes, ids, output_dir=str(ids.parent / "out"), batch_size=8, epochs=8, early_stopping_patience=2)
    run.state.epoch, run.state.metrics = 4, {"acc1": 20.0, "acc5": 50.0, "loss": 1.0, "samples": 8}
    run.state.best = {**run.state.metrics, "acc1": 30.0, "epoch": 2}
    fit(run, needed_hooks(Scripted(), EarlyStopping(), Never()))
    return run.state.epoch


class Never(Hook):
    def on_eval_batch(self, run: Run, logits: Tensor, labels: Tensor, keys: Tensor) -> None:
        raise AssertionError(torch.tensor(0))


def test_a_resume_does_not_begin_again(two_ranks: Ranks, ids: Path) -> None:
    assert two_ranks.run(resumed, ids) == [4, 4]
