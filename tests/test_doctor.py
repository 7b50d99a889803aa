"""The command, launched as a user launches it; and a hang, which ends with a row and with where each rank stands."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import ROOT, ids_image, ids_of, png, write_ids, write_parquet
from tests.launching import ACCELERATE, CONFIGS, Launch, finish, script, started
from tests.ranks import Ranks
from trainer.accelerator import FP16_ON_CPU
from trainer.checks import CHECKS
from trainer.checks.leaving import NAME
from trainer.checks.own import shorten_test
from trainer.checks.report import NAME_WIDTH, Report, row
from trainer.config import Config
from trainer.data.loaders import load_data
from trainer.doctor import inspect_run
from trainer.runtime import Processes

DOCTOR = ROOT / "trainer" / "doctor.py"
TORCHRUN = ("torchrun", "--nproc_per_node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0")
ROWS = [*(check.name for check in CHECKS), NAME]


def run(folder: Path, *command: str | Path, variables: dict[str, str] | None = None) -> Launch:
    with started(*command, cwd=folder, variables=variables) as child:
        return finish(child, folder)


def rows(done: Launch) -> dict[str, tuple[str, str]]:
    """Status and text of each row, by the check's name, once each."""
    table: dict[str, tuple[str, str]] = {}
    name = ""
    for line in done.lines:
        found = re.match(rf"(\S.{{{NAME_WIDTH - 1}}})(PASS|FAIL|SKIPPED) +(.*)", line)
        if found:
            name = found[1].strip()
            assert name not in table
            table[name] = (found[2], found[3])
        elif line.startswith("   ") and name:
            table[name] = (table[name][0], f"{table[name][1]} {line.strip()}")
    return table


def statuses(done: Launch, status: str) -> set[str]:
    return {name for name, (own, _) in rows(done).items() if own == status}


@pytest.mark.parametrize(("config", "processes"), [("multi_cpu", 2), ("cpu", 1)])
def test_a_healthy_machine_passes(tmp_path: Path, config: str, processes: int) -> None:
    write_ids(tmp_path / "ids", train=61, test=17)
    launcher = (*ACCELERATE, "--config_file", CONFIGS / f"{config}.yaml")
    done = run(tmp_path, *launcher, DOCTOR, "--dataset", "./ids", "--batch_size", "8", "--output_dir", "out", "--num_workers", "1")
    table = rows(done)
    assert done.code == 0, done.lines
    assert list(table) == ROWS
    assert statuses(done, "FAIL") == set()
    alone = {"DDP wrapping", "SyncBN", "equal weights", "gradients", "collectives", "clean end"}
    assert statuses(done, "SKIPPED") == (alone if processes == 1 else set())
    assert all("one process" in table[name][1] for name in statuses(done, "SKIPPED"))
    assert table["readable data"][1] == "78 images opened (train 61, test 17)"
    assert table["evaluation"][1].startswith("17 of 17 images counted")
    assert re.fullmatch(r"doctor: \d+ passed, 0 failed, \d+ skipped in \d+\.\d s", done.lines[-1])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ids", "out"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["doctor.json"], "all that it leaves"
    kept = json.loads((tmp_path / "out" / "doctor.json").read_text(encoding="utf-8"))
    assert {check["name"]: (check["status"], check["measured"]) for check in kept["checks"]} == table
    assert kept["summary"] == done.lines[-1]
    if processes == 2:
        assert table["process group"][1] == "gloo, 2 processes = WORLD_SIZE, on the CPU"
        assert "Warning" not in done.errors


def test_a_failure_is_the_exit_code_and_fp16_is_seen_to_go_through_its_scaler(tmp_path: Path) -> None:
    write_ids(tmp_path / "ids", train=32, test=17)
    flags = ("--dataset", "./ids", "--batch_size", "8", "--sync_bn", "off", "--mixed_precision", "fp16")
    done = run(tmp_path, *TORCHRUN, DOCTOR, *flags, variables={FP16_ON_CPU: "1"})
    assert done.code == 1
    assert statuses(done, "FAIL") == {"SyncBN"}
    assert rows(done)["precision"] == ("PASS", "fp16: autocast float16, GradScaler on, used by an update")
    assert done.lines[-1].startswith("doctor: 15 passed, 1 failed, 0 skipped")
    assert not done.frames()


def inspected(processes: Processes, folder: Path) -> Report:
    report = Report()
    assert inspect_run(Config(dataset=str(folder)), processes, report) is None
    return report


@pytest.mark.parametrize("first", [0, 5], ids=["the first image too", "later images"])
def test_all_broken_images_are_named_and_the_rest_is_skipped(two_ranks: Ranks, tmp_path: Path, first: int) -> None:
    images = [b"" if index in (first, 20) else png(ids_image(index))[: -30 if index == 21 else None] for index in range(32)]
    write_parquet(tmp_path / "train.parquet", images, [index % 10 for index in range(32)])
    write_parquet(tmp_path / "test.parquet", [ids_image(index) for index in range(16)], [index % 10 for index in range(16)])
    for report in two_ranks.run(inspected, tmp_path):
        assert list(report.results) == [check.name for check in CHECKS]
        assert report.failed == ["readable data"]
        text = report.results["readable data"].measured
        assert "3 images of 48 cannot be used" in text
        for index in (first, 20, 21):
            assert f"image {index} cannot be read" in text
        assert report.results["gradients"].measured == "model, train_loader not built, since there are images that cannot be used"
        assert {name for name, result in report.results.items() if result.status == "PASS"} == {"process group", "collectives"}


def inspected_skipping(processes: Processes, folder: Path, knobs: dict[str, Any]) -> Report:
    report = Report()
    inspect_run(Config(dataset=str(folder), on_bad_image="skip", batch_size=4, **knobs), processes, report)
    return report


def test_bad_images_that_are_skipped_are_a_warning(two_ranks: Ranks, tmp_path: Path) -> None:
    """Also at the first place, whose header is looked at; all else is checked, and passes; the test split without its bad image too."""
    for split, bad in (("train", (0, 20)), ("test", (5,))):
        images = [b"" if index in bad else ids_image(index) for index in range(32)]
        write_parquet(tmp_path / f"{split}.parquet", images, [index % 10 for index in range(32)])
    for report in two_ranks.run(inspected_skipping, tmp_path, {}):
        assert report.failed == []
        assert {name for name, result in report.results.items() if result.status == "WARN"} == {"readable data"}
        text = report.results["readable data"].measured
        assert text.startswith("--on_bad_image skip leaves out: 3 images of 64 cannot be used: ")
        assert text.count("cannot be read") == 3
        assert report.results["evaluation"].measured.startswith("31 of 31 images counted")
        assert ", 1 warned, 0 failed, " in report.summary()
    sizes = [ids_image(index).resize((9, 9)) if index == 7 else ids_image(index) for index in range(200)]
    write_parquet(tmp_path / "test.parquet", sizes, [index % 10 for index in range(200)])
    for report in two_ranks.run(inspected_skipping, tmp_path, {}):
        assert report.failed == ["readable data"]
        assert "image 7 is 9 x 9 pixels" in report.results["readable data"].measured
    for report in two_ranks.run(inspected_skipping, tmp_path, {"image_size": "6", "augment": "light"}):
        assert report.failed == []


def shortened(processes: Processes, folder: Path, eval_batch_size: int) -> tuple[int, int, int]:
    config = Config(dataset=str(folder), eval_batch_size=eval_batch_size, cache="none", normalize="none")
    data, config = shorten_test(load_data(config, processes), config, processes)
    images, *_ = data.test[len(data.test) - 1]
    return len(data.test), config.eval_batch_size or 0, ids_of(images[None])[0]


def test_a_large_test_split_is_cut_with_the_tail_that_it_has(two_ranks: Ranks, tmp_path: Path) -> None:
    """3001 images on 2 x 500 end in a batch of one image; so do 2001."""
    write_ids(tmp_path, train=16, test=3001)
    assert two_ranks.run(shortened, tmp_path, 500) == [(2001, 500, 2000)] * 2
    assert two_ranks.run(shortened, tmp_path, 5000) == [(953 + 2048, 1024, 3000)] * 2
    write_ids(tmp_path, train=16, test=17)
    assert two_ranks.run(shortened, tmp_path, 500) == [(17, 500, 16)] * 2


def test_a_users_mistake_is_one_sentence(tmp_path: Path) -> None:
    done = run(tmp_path, "python", DOCTOR, "--dataset", "./nowhere")
    assert done.code == 2
    assert done.sentences() == ["error: --dataset ./nowhere: a local data set is a folder or a file, and ./nowhere is not there"]
    assert not done.frames()
    assert run(tmp_path, "python", DOCTOR, "--epoch", "3").errors == "error: unknown flag --epoch: did you mean --epochs?\n"


HANGING = """
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tests.checks.tutorial import Script
from trainer.doctor import inspect
from trainer.runtime import join

if __name__ == "__main__":
    processes = join()
    script = Script(processes, Path("."), "")

    def evaluate():
        if processes.rank == 0 and sys.argv[1] == "hang":
            script.model.eval()(script.eval_loader.dataset[0][0][None])
        if processes.rank == 0 and sys.argv[1] == "step":
            dist.all_reduce(torch.ones(1), async_op=True)
        if processes.rank == 1 and sys.argv[1] == "error":
            raise ValueError("no such image")
        if processes.rank == 0 and sys.argv[1] == "error":
            dist.barrier()

    inspect(**{**script.arguments, "evaluate": evaluate}, patience=5.0)
    if processes.is_main:
        print("inspected", flush=True)
    processes.all_gather(None)
    import os
    os._exit(0)
"""


def test_a_hang_becomes_a_row(tmp_path: Path) -> None:
    """Rank 0 evaluates alone through DDP, which waits for rank 1 to take its buffers."""
    program = script(tmp_path, HANGING)
    done = run(tmp_path, *TORCHRUN, program, "hang", variables={"PYTHONPATH": str(ROOT)})
    assert done.code == 1
    assert rows(done)["evaluation"] == ("FAIL", "not done after 5 s: a rank waits for one that never comes; stderr says where each stands")
    line = next(number for number, text in enumerate(HANGING.splitlines(), start=1) if "script.model.eval()" in text)
    assert f"doctor: rank 0 stands in {program}:{line} (evaluate)" in done.errors
    assert "doctor: rank 1 waits for the other ranks" in done.errors
    assert "inspected" not in done.lines


def test_an_error_behind_a_hang_is_told(tmp_path: Path) -> None:
    done = run(tmp_path, *TORCHRUN, script(tmp_path, HANGING), "error", variables={"PYTHONPATH": str(ROOT)})
    assert done.code == 1
    assert rows(done)["evaluation"][0] == "FAIL"
    assert "doctor: rank 1 failed (ValueError: no such image)" in done.errors


def test_ranks_out_of_step_are_noticed_before_they_hang(tmp_path: Path) -> None:
    done = run(tmp_path, *TORCHRUN, script(tmp_path, HANGING), "step", variables={"PYTHONPATH": str(ROOT)})
    table = rows(done)
    assert table["evaluation"][0] == "FAIL"
    assert "different numbers of collectives behind (more than the others: rank 0 1, rank 1 0)" in table["evaluation"][1]
    for name in ("one writer", "collectives", "free disk"):
        assert table[name] == ("SKIPPED", "the ranks are out of step since 'evaluation'")
    assert done.lines[-1] == "inspected"


@pytest.mark.parametrize("width", [80, 120])
def test_rows_fit_the_terminal(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    text = row("augmentation", "PASS", "draws of torch, numpy and random differ " * 6)
    lines = text.splitlines()
    assert len(lines) > 2
    assert max(map(len, lines)) <= width
    assert lines[0].startswith("augmentation   PASS     draws")
    assert all(line.startswith(" " * 24) for line in lines[1:])
    long = "/a/very/long/path" * 10
    assert long in row("free disk", "PASS", f"free at {long}"), "a path is not broken"
