"""Evaluation counts each image once, whatever the number of processes and the batch size."""

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
from trainer.metrics import Totals
from trainer.models.convnet import ConvNet
from trainer.runtime import Processes, RunError
from trainer.state import Run


class Ids(Hook):
    """The ids of the images that gather_for_metrics leaves."""

    def __init__(self) -> None:
        self.ids: list[int] = []

    def on_eval_batch(self, run: Run, logits: Tensor, labels: Tensor) -> None:
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


def test_metrics_of_known_predictions() -> None:
    """Nine images in batches of five and four, and one left out: 8/9 right, and the mean loss is that of all nine."""
    totals = Totals.zeros(3, torch.device("cpu"))
    labels = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2])
    predictions = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 0])
    losses = torch.arange(9).float()
    in_top5 = torch.tensor([True] * 7 + [False] * 2)
    for part in (slice(0, 5), slice(5, 9)):
        totals.add(labels[part], predictions[part], in_top5[part], losses[part])
    totals.add(torch.tensor([LEFT_OUT]), torch.tensor([2]), torch.tensor([False]), torch.tensor([0.0]))
    assert totals.metrics() == {
        "acc1": 100 * 8 / 9,
        "acc5": 100 * 7 / 9,
        "loss": 4.0,
        "samples": 9,
        "confusion": [[3, 0, 0], [0, 3, 0], [1, 0, 2]],
        "bad_images": 1,
    }
    with pytest.raises(RunError, match="none of the 0 images to evaluate on can be read"):
        Totals.zeros(3, torch.device("cpu")).metrics()


def test_a_wrong_count_is_an_error(tmp_path: Path) -> None:
    folder = write_ids(tmp_path / "ids", train=8, test=5)
    with pytest.raises(AssertionError):
        alone(counts_twice, folder)


class Twice(GatherMetrics):
    """Counts every batch twice."""

    def on_eval_batch(self, run: Run, logits: Tensor, labels: Tensor) -> None:
        super().on_eval_batch(run, logits, labels)
        super().on_eval_batch(run, logits, labels)


def counts_twice(processes: Processes, folder: Path) -> None:
    evaluate(make_run(processes, folder), HookList((Twice(),)))
