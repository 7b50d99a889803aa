"""What the user reads, and the same as numbers; once, whatever the number of processes."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import alone_run, make_run, needed_hooks, write_ids
from tests.ranks import Ranks
from trainer.hooks.base import HookList
from trainer.hooks.log import Log, describe
from trainer.hooks.set_epoch import SetEpoch
from trainer.loop import fit
from trainer.runtime import Processes

TRAIN = re.compile(r"train epoch \d+/\d+ step \d+/\d+ loss \d+\.\d{4} lr \d\.\de[+-]\d\d \d+ img/s data \d+% (norm \S+ )?eta \d+:\d\d")
EVAL = re.compile(r"eval  epoch \d+/\d+ acc1 \d+\.\d\d acc5 \d+\.\d\d loss \d+\.\d{4} samples \d+/\d+ best \d+\.\d\d \(epoch \d+\)")


def logged(processes: Processes, folder: Path, out: Path, knobs: dict[str, Any]) -> dict[str, Any]:
    out.mkdir(exist_ok=True)
    run = make_run(processes, folder, output_dir=str(out), **knobs)
    fit(run, needed_hooks(Log()))
    return {"metrics": run.state.metrics, "total": run.total_steps}


def test_lines_numbers_and_results_of_two_ranks(two_ranks: Ranks, tmp_path: Path) -> None:
    out = tmp_path / "out"
    knobs = {"batch_size": 4, "epochs": 2, "log_interval": 3, "max_grad_norm": 1.0}
    zero, one = two_ranks.run(logged, write_ids(tmp_path / "ids", train=61, test=5), out, knobs)
    assert zero == one
    assert zero["total"] == 16
    lines = (out / "train.log").read_text().splitlines()
    train = [line for line in lines if line.startswith("train")]
    evaluated = [line for line in lines if line.startswith("eval")]
    # Eight updates an epoch: lines at every third and at the epoch's end.
    assert [int(re.findall(r"step (\d+)/16", line)[0]) for line in train] == [3, 6, 8, 9, 12, 15, 16]
    assert all(TRAIN.fullmatch(line) for line in train)
    assert all(EVAL.fullmatch(line) for line in evaluated)
    assert len(evaluated) == 2
    assert "samples 5/5" in evaluated[0]
    assert lines[-1].startswith("done")

    entries = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [entry["event"] for entry in entries] == ["train"] * 3 + ["eval"] + ["train"] * 4 + ["eval"]
    assert [entry["samples"] for entry in entries if entry["event"] == "train"] == [24, 48, 61, 69, 93, 117, 122]
    results = json.loads((out / "results.json").read_text())
    assert results["acc1"] == zero["metrics"]["acc1"] == entries[-1]["acc1"]
    assert results["best_acc1"] == max(entry["acc1"] for entry in entries if entry["event"] == "eval")
    assert (results["step"], results["samples"], results["evaluated_samples"], results["epochs"]) == (16, 122, 5, 2)
    assert "'test'" in results["best_picked_on"]
    assert results["ece"] == entries[-1]["ece"] == zero["metrics"]["ece"]
    # Five images, of the first five classes.
    assert list(results["per_class"]) == [str(number) for number in range(10)]
    assert [figures["support"] for figures in results["per_class"].values()] == [1] * 5 + [0] * 5
    assert results["per_class"]["7"]["precision"] is None
    assert 100 * results["macro"]["recall"] == pytest.approx(results["acc1"]), "as many images of each class"
    assert len(results["mistakes"]) == round(5 * (1 - results["acc1"] / 100))
    assert {mistake["true"] for mistake in results["mistakes"]} == {str(mistake["index"]) for mistake in results["mistakes"]}
    assert sum(row["samples"] for row in results["calibration"]) == 5


def losses(processes: Processes, folder: Path, out: Path, accumulation: int) -> list[float]:
    out.mkdir(exist_ok=True)
    knobs: dict[str, Any] = {"lr": 1e-12, "batch_size": 4, "epochs": 1, "gradient_accumulation_steps": accumulation, "log_interval": 100}
    run = make_run(processes, folder, output_dir=str(out), sync_bn="auto", **knobs)
    run.module.eval()
    run.model.train = lambda mode=True: run.model  # type: ignore[method-assign]
    fit(run, needed_hooks(Log()))
    return [run.state.metrics["loss"]]


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_logged_loss_is_the_mean_over_all_images_of_all_ranks(two_ranks: Ranks, tmp_path: Path, accumulation: int) -> None:
    """Weights that stand still, in evaluation mode: the train split's loss is that of an evaluation of the same images."""
    folder = write_ids(tmp_path / "ids", train=27, test=27)
    out = tmp_path / "out"
    zero, one = two_ranks.run(losses, folder, out, accumulation)
    assert zero == one
    entry = json.loads((out / "metrics.jsonl").read_text().splitlines()[0])
    assert entry["samples"] == 27
    assert entry["loss"] == pytest.approx(zero[0], abs=1e-5)


def test_the_block_before_training(tmp_path: Path) -> None:
    folder = write_ids(tmp_path / "ids", train=61, test=5)
    with alone_run(folder, batch_size=4, epochs=2, gradient_accumulation_steps=2, lr=0.25, warmup_epochs=0.5, cpu_threads=2) as run:
        rows = dict(describe(run))
    assert rows["device"] == "cpu, 2 threads a process"
    assert rows["processes"] == "1"
    assert rows["precision"] == "no (no autocast, no GradScaler)"
    assert rows["sync_bn"] == "off"
    assert rows["batch"] == "4 a process x 1 processes x 2 accumulation = global batch 8"
    assert rows["updates"] == "16 (8 an epoch, 2 epochs)"
    assert rows["lr plan"] == "0 -> 0.25 over 4 updates, then cosine to 0 at update 16"
    assert "61 train / 5 test, 10 classes, images 1 x 8 x 8" in rows["data"]
    assert "note" not in rows


def block(processes: Processes, folder: Path) -> dict[str, str]:
    return dict(describe(make_run(processes, folder, batch_size=4)))


def test_the_block_of_two_ranks_says_what_is_dropped(two_ranks: Ranks, tmp_path: Path) -> None:
    rows = two_ranks.run(block, write_ids(tmp_path / "ids", train=65, test=5))[0]
    assert rows["processes"] == "2, backend gloo"
    assert rows["sync_bn"] == "on (2 layers)"
    assert rows["note"].startswith("1 images of each epoch are left out")


def test_fit_refuses_to_run_without_the_four_hooks(tmp_path: Path) -> None:
    with (
        alone_run(write_ids(tmp_path / "ids", train=8)) as run,
        pytest.raises(ValueError, match="SeedProcesses, GatherMetrics, SaveOnMain"),
    ):
        fit(run, HookList((SetEpoch(),)))
