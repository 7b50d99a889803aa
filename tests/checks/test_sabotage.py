"""The doctor is proved by what is forgotten on purpose: the right check fails, and no other; a right script passes them all."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.checks.tutorial import examined
from tests.helpers import make_run, write_ids
from tests.ranks import Ranks
from trainer import checkpoint
from trainer.checks import CHECKS
from trainer.checks.base import messengers
from trainer.checks.own import subject_of
from trainer.checks.report import Report, run_checks
from trainer.hooks.seed_processes import SeedProcesses
from trainer.hooks.set_epoch import SetEpoch
from trainer.runtime import Processes
from trainer.seeding import seed_process
from trainer.state import Run

FP16 = {"fp16": True}
ACCELERATE = {"accelerate": True}

# What is forgotten, the script's options, the checks that must fail and no others, a part of what they say. A checkpoint holds rank 0's
# weights: where the ranks' differ, `resume` finds that too.
SABOTAGES: list[tuple[str, dict[str, Any], set[str], str]] = [
    ("set_epoch", {}, {"order"}, "set_epoch"),
    ("no shuffle", {}, {"order"}, "shuffle"),
    ("no DistributedSampler", {}, {"shards"}, "every rank gets the same"),
    ("each rank shuffles for itself", {}, {"shards"}, "reach no rank"),
    ("a second DistributedSampler", ACCELERATE, {"shards"}, "sharded a second time"),
    ("loader not prepared", ACCELERATE, {"shards"}, "every rank gets the same"),
    ("uneven shards", {}, {"shards", "order"}, "batches"),
    ("same seed on all ranks", {"augment": "torch"}, {"augmentation"}, "torch draws the same numbers on ranks 0 and 1"),
    ("same seed on all ranks", {"augment": "torch", "workers": 1}, {"augmentation"}, "on ranks 0 and 1"),
    ("same seed on all ranks", {"augment": "numpy"}, {"augmentation"}, "numpy draws the same numbers on ranks 0 and 1"),
    ("same seed on all ranks", {"dropout": True}, {"augmentation"}, "inside the model"),
    ("same seed in all workers", {"augment": "numpy", "workers": 2}, {"augmentation"}, "numpy draws the same numbers"),
    ("BatchNorm unconverted", {}, {"SyncBN"}, "1 of 1 BatchNorm layer not converted"),
    ("model not wrapped", {}, {"DDP wrapping", "gradients", "resume"}, "not wrapped"),
    ("forward through the plain model", {}, {"gradients", "resume"}, "gradients differ between the ranks"),
    ("optimizer of another model", {}, {"DDP wrapping"}, "6 tensors that the model does not train"),
    ("one rank's weights changed", {}, {"equal weights", "resume"}, "0.weight of rank 1"),
    ("evaluation on rank 0 only", {}, {"evaluation"}, "rank 1 evaluated no image"),
    ("metrics of each rank", {}, {"evaluation"}, "rank 0 counts"),
    ("metrics reduced per rank", {}, {"evaluation"}, "not averages of ranks"),
    ("loss averaged over batches", {}, {"evaluation"}, "mean loss"),
    ("padding counted", {}, {"evaluation"}, "right of 34; one process"),
    ("gather", ACCELERATE, {"evaluation"}, "count each sample once"),
    ("saving on all ranks", {}, {"one writer"}, "ranks 0 and 1 both write model.pt"),
    ("scaler skipped", FP16, {"precision"}, "does not call scaler.scale, scaler.step, scaler.update"),
    ("scaled, but stepped without the scaler", FP16, {"precision"}, "does not call scaler.step"),
    ("fp16 without scaler", FP16, {"precision"}, "fp16 without a GradScaler"),
    ("no autocast", FP16, {"precision"}, "fp16 was asked for, but the model runs with no autocast"),
    ("optimizer not saved", {}, {"resume"}, "differ from the training that went on"),
    ("weights not loaded", {}, {"resume"}, "weights/"),
    ("the wrong rank saves", {}, {"one writer"}, "rank 1 writes, and not the main process"),
    ("an error on one rank", {}, {"one writer", "resume"}, "rank 1: OSError: no space left"),
    ("room on the disk", {}, {"free disk"}, "keep fewer of them"),
    ("broken images", {}, {"readable data"}, "picture_4.png is truncated; train: image 64: picture_64.png is truncated"),
]


def report_of(ranks: Ranks, folder: Path, forgotten: str, options: dict[str, Any], environment: dict[str, str] | None = None) -> Report:
    reports: list[Report] = ranks.run(examined, folder, forgotten, options, environment or {})
    assert all(list(report.results.items()) == list(reports[0].results.items()) for report in reports), "the ranks disagree"
    assert list(reports[0].results) == [check.name for check in CHECKS]
    assert not list(folder.iterdir()), "something is left behind"
    return reports[0]


@pytest.mark.parametrize(("forgotten", "options", "failing", "words"), SABOTAGES, ids=[f"{s[0]}, {s[1]}" for s in SABOTAGES])
def test_what_is_forgotten_is_found(
    two_ranks: Ranks, tmp_path: Path, forgotten: str, options: dict[str, Any], failing: set[str], words: str
) -> None:
    report = report_of(two_ranks, tmp_path, forgotten, options)
    assert set(report.failed) == failing, report.results
    assert words in " ".join(report.results[name].measured for name in failing)


def test_fewer_processes_than_launched(two_ranks: Ranks, tmp_path: Path) -> None:
    report = report_of(two_ranks, tmp_path, "", {}, {"WORLD_SIZE": "4"})
    assert report.failed == ["process group"]
    assert "the launcher started WORLD_SIZE=4 processes, but the group has 2" in report.results["process group"].measured


def own_run(processes: Processes, folder: Path, out: Path, forgotten: str) -> Report:
    """The trainer's own run, spoiled; its own hooks are what is examined."""
    run = make_run(processes, folder, batch_size=8, cache="none", sync_bn="off" if forgotten == "sync_bn" else "auto")
    report = Report()
    spoils: dict[str, tuple[Any, str, Any]] = {
        "SetEpoch": (SetEpoch, "on_epoch_start", lambda self, run: run.train_loader.set_epoch(0)),
        "SeedProcesses": (SeedProcesses, "on_epoch_start", lambda self, run: seed_process(run.config.seed)),
        "GatherMetrics": (run.accelerator, "gather_for_metrics", run.accelerator.gather),
        "restore": (checkpoint, "restore", lambda run, found, load_hooks: None),
        "SaveOnMain": (Run, "is_main", True),
    }
    with messengers() as own, patch.object(*spoils[forgotten]) if forgotten in spoils else nullcontext():
        subject = subject_of(run, own, (), out)
        if forgotten == "SaveOnMain":
            # What becomes of two writers in one folder is a matter of chance.
            subject.resumed = None
        run_checks(subject, CHECKS, report)
    run.close()
    return report


@pytest.mark.parametrize(
    ("forgotten", "failing", "words"),
    [
        ("sync_bn", {"SyncBN"}, "2 of 2 BatchNorm layers not converted"),
        # The keys of the samples carry the epoch, so that augmentation stands still with the order; a resume is a position in it.
        ("SetEpoch", {"order", "augmentation", "resume"}, "epoch 1 has the order of epoch 0"),
        ("SeedProcesses", {"augmentation"}, "inside the model"),
        ("GatherMetrics", {"evaluation"}, "AssertionError: (18, 17)"),
        ("restore", {"resume"}, "differ from the training that went on"),
        ("SaveOnMain", {"one writer"}, "ranks 0 and 1 both write checkpoints/step_00000000/"),
    ],
)
def test_the_trainers_own_hooks_are_what_is_examined(
    two_ranks: Ranks, tmp_path: Path, forgotten: str, failing: set[str], words: str
) -> None:
    folder = write_ids(tmp_path / "ids", train=61, test=17)
    for report in two_ranks.run(own_run, folder, tmp_path, forgotten):
        assert set(report.failed) == failing, report.results
        assert words in " ".join(report.results[name].measured for name in failing)


RIGHT: list[tuple[dict[str, Any], set[str]]] = [
    ({}, {"augmentation"}),
    ({"augment": "torch"}, set()),
    ({"augment": "random", "workers": 2}, set()),
    ({"dropout": True}, set()),
    (FP16, {"augmentation"}),
    (ACCELERATE, {"augmentation"}),
]


@pytest.mark.parametrize(("options", "skipped"), RIGHT, ids=[str(options) for options, _ in RIGHT])
def test_a_right_script_passes(two_ranks: Ranks, tmp_path: Path, options: dict[str, Any], skipped: set[str]) -> None:
    report = report_of(two_ranks, tmp_path, "", options)
    assert report.failed == [], report.results
    assert {name for name, result in report.results.items() if result.status == "SKIPPED"} == skipped
    assert all(result.measured for result in report.results.values())
