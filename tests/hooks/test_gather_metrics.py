"""Evaluation counts each image once, whatever the number of processes and the batch size."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers import ids_of, make_run, needed_hooks, write_ids
from tests.ranks import Ranks, alone
from trainer.data.dataset import LEFT_OUT
from trainer.hooks.base import Hook, HookList
from trainer.hooks.gather_metrics import GatherMetrics
from trainer.loop import evaluate
from trainer.metrics import MISTAKES, Totals, macro, per_class
from trainer.models.convnet import ConvNet
from trainer.runtime import Processes, RunError
from trainer.state import Run


class Ids(Hook):
    """The ids of the images that gather_for_metrics leaves."""

    def __init__(self) -> None:
        self.ids: list[int] = []

    def on_eval_batch(self, run: Run, logits: Tensor, labels: Tensor, keys: Tensor) -> None:
        self.ids += run.accelerator.gather_for_metrics(self.batch_ids).tolist()

    def watch(self, run: Run) -> None:
        run.normalize.register_forward_pre_hook(self.note)

    def note(self, module: Any, inputs: tuple[Tensor, ...]) -> None:
        self.batch_ids = torch.tensor(ids_of(inputs[0]))


def evaluated(processes: Processes, folder: Path, eval_batch_size: int) -> dict[str, Any]:
    torch.manual_seed(0)
    run = make_run(processes, folder, ConvNet(1, (8, 8), 10), eval_batch_size=eval_batch_size)
    ids = Ids()
    ids.watch(run)
    evaluate(run, needed_hooks(ids))
    first = run.state.metrics
    evaluate(run, needed_hooks(ids))
    assert run.state.metrics == first, "a second evaluation differs"
    return {"ids": ids.ids[: len(ids.ids) // 2], **run.state.metrics}


@pytest.mark.parametrize("size", [1, 5, 16, 17])
def test_each_image_once_on_one_two_and_three_processes(two_ranks: Ranks, three_ranks: Ranks, tmp_path: Path, size: int) -> None:
    folder = write_ids(tmp_path / "ids", train=8, test=size)
    expected = alone(evaluated, folder, 500)
    assert sorted(expected["ids"]) == list(range(size))
    assert expected["samples"] == size
    for batch in (1, 4):
        results = [alone(evaluated, folder, batch), *two_ranks.run(evaluated, folder, batch), *three_ranks.run(evaluated, folder, batch)]
        for result in results:
            assert sorted(result["ids"]) == list(range(size))
            assert result["confusion"] == expected["confusion"]
            assert (result["acc1"], result["acc5"], result["samples"]) == (expected["acc1"], expected["acc5"], size)
            assert result["loss"] == pytest.approx(expected["loss"], abs=1e-6)
            assert result["ece"] == pytest.approx(expected["ece"], abs=1e-6)
            assert [row[:2] for row in result["calibration"]] == [row[:2] for row in expected["calibration"]]
            assert [row[:3] for row in result["mistakes"]] == [row[:3] for row in expected["mistakes"]]
            assert {row[0] for row in result["mistakes"]} <= set(range(size))


# label, prediction, among the five, loss, probability, index
KNOWN = [
    (0, 0, 1, 0.0, 0.95, 0),
    (0, 0, 1, 1.0, 0.95, 1),
    (0, 0, 1, 2.0, 0.19, 2),
    (1, 1, 1, 3.0, 1.0, 3),
    (1, 1, 1, 4.0, 0.97, 4),
    (1, 1, 1, 5.0, 0.55, 5),
    (2, 2, 1, 6.0, 0.39, 6),
    (2, 0, 0, 7.0, 0.39, 7),
    (2, 1, 0, 8.0, 0.96, 8),
    (LEFT_OUT, 2, 0, 0.0, 0.99, ~9),
]


def totals_of(rows: Sequence[tuple[float, ...]], batch: int, classes: int = 3) -> Totals:
    totals = Totals.zeros(classes, torch.device("cpu"))
    table = torch.tensor(rows, dtype=torch.float64)
    table[:, 4].log_()
    for part in table.split(batch):
        totals.add(part)
    return totals


@pytest.mark.parametrize(("batch", "counted"), [(1, 1), (1, 3), (4, 8192), (10, 8192)])
def test_metrics_of_known_predictions(monkeypatch: pytest.MonkeyPatch, batch: int, counted: int) -> None:
    """Nine images and one left out: 7/9 right, and the mean loss is that of all nine."""
    monkeypatch.setattr("trainer.metrics.COUNTED", counted)
    metrics = totals_of(KNOWN, batch).metrics()
    calibration = metrics.pop("calibration")
    ece = metrics.pop("ece")
    assert metrics == {
        "acc1": 100 * 7 / 9,
        "acc5": 100 * 7 / 9,
        "loss": 4.0,
        "samples": 9,
        "confusion": [[3, 0, 0], [0, 3, 0], [1, 1, 1]],
        "mistakes": [[8, 2, 1, pytest.approx(0.96)], [7, 2, 0, pytest.approx(0.39)]],
        "bad_images": 1,
    }
    # Bins of 1/15: 0.95 and more are in the last one.
    assert {number: row[:2] for number, row in enumerate(calibration) if row[0]} == {2: [1, 1], 5: [2, 1], 8: [1, 1], 14: [5, 4]}
    assert ece == pytest.approx((0.81 + 0.22 + 0.45 + abs(4 - 4.83)) / 9, abs=1e-7)
    assert calibration[14][2] == pytest.approx(4.83, abs=1e-7)


def test_no_image_is_an_error() -> None:
    with pytest.raises(RunError, match="none of the 0 images to evaluate on can be read"):
        Totals.zeros(3, torch.device("cpu")).metrics()


@pytest.mark.parametrize("batch", [3, 50])
def test_the_mistakes_are_the_likeliest_ones_and_of_equals_the_first(monkeypatch: pytest.MonkeyPatch, batch: int) -> None:
    monkeypatch.setattr("trainer.metrics.COUNTED", 1)
    sure = [(0, 1, 1, 1.0, 1.0, index) for index in range(20)]
    unsure = [(0, 1, 1, 1.0, 0.6, index) for index in range(20, 40)]
    found = totals_of([*unsure, *sure], batch, 2).metrics()["mistakes"]
    assert found == [[index, 0, 1, 1.0] for index in range(MISTAKES)]
    assert totals_of([*unsure[:1], *sure[:2]], batch, 2).metrics()["mistakes"] == [
        [0, 0, 1, 1.0],
        [1, 0, 1, 1.0],
        [20, 0, 1, pytest.approx(0.6)],
    ]


def test_a_probability_that_is_no_number_is_no_figure() -> None:
    metrics = totals_of([(0, 1, 1, math.nan, math.nan, 0), (1, 1, 1, 1.0, 0.9, 1)], 2, 2).metrics()
    assert math.isnan(metrics["ece"])
    assert metrics["acc1"] == 50


def test_figures_of_classes() -> None:
    """By hand; the second class has no image, the third is never predicted."""
    rows = per_class([[3, 1, 0], [0, 0, 0], [2, 0, 0]])
    assert rows[0] == {"precision": 3 / 5, "recall": 3 / 4, "f1": 2 * 3 / (4 + 5), "support": 4}
    assert rows[1] == {"precision": None, "recall": None, "f1": None, "support": 0}
    assert rows[2] == {"precision": 0.0, "recall": 0.0, "f1": 0.0, "support": 2}
    assert macro([[3, 1, 0], [0, 0, 0], [2, 0, 0]]) == {"precision": 3 / 10, "recall": 3 / 8, "f1": 1 / 3}


def test_a_wrong_count_is_an_error(tmp_path: Path) -> None:
    folder = write_ids(tmp_path / "ids", train=8, test=5)
    with pytest.raises(AssertionError):
        alone(counts_twice, folder)


class Twice(GatherMetrics):
    """Counts every batch twice."""

    def on_eval_batch(self, run: Run, logits: Tensor, labels: Tensor, keys: Tensor) -> None:
        super().on_eval_batch(run, logits, labels, keys)
        super().on_eval_batch(run, logits, labels, keys)


def counts_twice(processes: Processes, folder: Path) -> None:
    evaluate(make_run(processes, folder), HookList((Twice(),)))
