"""Ranks that drift apart are found, with the tensor and the rank."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers import make_run, needed_hooks, write_ids
from tests.ranks import Ranks
from trainer.hooks.audit import Audit, hashes, outliers
from trainer.hooks.base import Hook
from trainer.loop import fit
from trainer.runtime import Processes, RunError
from trainer.state import Run


@pytest.fixture(scope="module")
def ids(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_ids(tmp_path_factory.mktemp("ids"), 64, 8)


class Spoil(Hook):
    """Changes something on one rank, after the update `step`."""

    def __init__(self, change: Callable[[Run], None], rank: int, step: int = 3) -> None:
        self.change, self.rank, self.step = change, rank, step

    def on_step_end(self, run: Run) -> None:
        if run.processes.rank == self.rank and run.state.step == self.step:
            self.change(run)


def one_bit_of_a_weight(run: Run) -> None:
    weight = run.module.get_parameter("layer2.0.weight")
    with torch.no_grad():
        weight[-1, -1, -1, -1:].view(torch.int32).bitwise_xor_(1)


def a_weight(run: Run) -> None:
    with torch.no_grad():
        run.module.get_parameter("layer2.0.weight")[-1, -1] += 1e-3


def an_average(run: Run) -> None:
    assert run.ema is not None
    run.ema.averages["fc.bias"][3] += 1e-3


def a_statistic(run: Run) -> None:
    run.module.get_buffer("layer1.1.running_mean")[2] += 1e-3


def the_rate(run: Run) -> None:
    run.optimizer.param_groups[0]["lr"] *= 1.0001


def the_scale(run: Run) -> None:
    run.accelerator.scaler.update(1024.0)
    run.state.loss_scale = 1024.0


def train(processes: Processes, ids: Path, change: Any, rank: int, knobs: dict[str, Any]) -> str:
    run = make_run(processes, ids, output_dir=str(ids.parent / "out"), **{"batch_size": 4, "epochs": 1, **knobs})
    try:
        fit(run, needed_hooks(Spoil(change, rank), Audit()))
    except RunError as error:
        return f"{run.state.step}: {error}" if error.agreed else "the ranks are not known to agree"
    return ""


@pytest.mark.parametrize(
    ("change", "rank", "name"),
    [
        (one_bit_of_a_weight, 1, "layer2.0.weight on rank 1 differs from rank 0"),
        (one_bit_of_a_weight, 0, "layer2.0.weight on rank 1 differs from rank 0"),
        (an_average, 1, "the average of fc.bias on rank 1 differs from rank 0"),
        (a_statistic, 1, "layer1.1.running_mean on rank 1 differs from rank 0"),
        (the_rate, 1, "the learning rate on rank 1 differs from rank 0"),
    ],
)
def test_two_ranks(two_ranks: Ranks, ids: Path, change: Any, rank: int, name: str) -> None:
    ends = two_ranks.run(train, ids, change, rank, {"audit_interval": 3, "broadcast_buffers": False, "ema_decay": 0.9})
    assert ends[0] == ends[1]
    assert ends[0].startswith(f"3: the ranks have drifted apart at update 3: {name}")


def test_the_loss_scale(two_ranks: Ranks, ids: Path) -> None:
    knobs = {"audit_interval": 3, "mixed_precision": "fp16"}
    ends = two_ranks.run(train, ids, the_scale, 1, knobs, environment={"TRAINER_FP16_ON_CPU": "1"})
    assert ends[0].startswith("3: the ranks have drifted apart at update 3: the loss scale on rank 1 differs")


def test_the_odd_one_of_three(three_ranks: Ranks, ids: Path) -> None:
    ends = three_ranks.run(train, ids, one_bit_of_a_weight, 0, {"audit_interval": 3, "batch_size": 3})
    assert set(ends) == {ends[0]}
    assert "layer2.0.weight on rank 0 differs from the others" in ends[0]


def test_an_epochs_end_is_one_more_time(two_ranks: Ranks, ids: Path) -> None:
    """Five updates later, in which the rounding of a single bit may have come right again."""
    ends = two_ranks.run(train, ids, a_weight, 1, {})
    assert ends[0].startswith("8: the ranks have drifted apart at update 8: ")


def test_equal_ranks_pass_and_zero_is_never(two_ranks: Ranks, ids: Path) -> None:
    assert two_ranks.run(train, ids, one_bit_of_a_weight, 7, {"audit_interval": 1}) == ["", ""]
    assert two_ranks.run(train, ids, one_bit_of_a_weight, 1, {"audit_interval": 0}) == ["", ""]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.uint8])
def test_any_bit_changes_the_hash(dtype: torch.dtype) -> None:
    tensor = torch.rand(3, 5).mul(100).to(dtype).t()
    before = hashes({"x": tensor})
    assert hashes({"x": tensor.clone()}) == before
    for element in range(15):
        other = tensor.contiguous().clone()
        other.view(-1)[element] = not other.view(-1)[element] if dtype is torch.bool else other.view(-1)[element] + 1
        assert hashes({"x": other}) != before
    swapped = tensor.contiguous().clone()
    swapped.view(-1)[[0, 1]] = torch.tensor([1, 0]).to(dtype)
    back = swapped.clone()
    back.view(-1)[[0, 1]] = torch.tensor([0, 1]).to(dtype)
    assert hashes({"x": swapped}) != hashes({"x": back}), "places count"


def test_outliers() -> None:
    assert outliers([5, 5, 5]) == []
    assert outliers([5, 6]) == [1]
    assert outliers([6, 5, 5, 5]) == [0]
    assert outliers([5, 6, 5, 7]) == [1, 3]


def test_no_tensors() -> None:
    nothing: dict[str, Tensor] = {}
    assert hashes(nothing) == []
