"""A run's folder as it is read again: whole, torn, stopped, gone on with, or none."""

import json
from pathlib import Path
from typing import Any

import pytest

from trainer.record import read_record
from trainer.runtime import UserError


def made(folder: Path, **files: Any) -> Path:
    """A folder of a run of two epochs, without what is None."""
    folder.mkdir(parents=True, exist_ok=True)
    epoch = {"event": "eval", "acc1": 50.0, "acc5": 90.0, "loss": 1.0, "samples": 4, "best_acc1": 50.0, "best_epoch": 1}
    entries = [
        {"event": "train", "epoch": 1, "step": 2, "loss": 2.0, "lr": 0.1, "images_per_second": 10.0, "scale": None},
        {**epoch, "epoch": 1, "step": 2},
        {"event": "train", "epoch": 2, "step": 4, "loss": None, "lr": 0.05, "images_per_second": 30.0, "scale": None},
        {**epoch, "epoch": 2, "step": 4},
    ]
    content: dict[str, Any] = {
        "config.yaml": "dataset: cats\nmodel: convnet\nepochs: 2\nlr: 0.1\nstrange: 1\n",
        "metrics.jsonl": "".join(json.dumps(entry) + "\n" for entry in entries),
        "results.json": {"epochs": 2, "samples": 16, "seconds": 2.0, "train_seconds": 1.0, "acc1": 50.0, "confusion": [[2, 0], [2, 0]]},
        "classes.json": ["cat", "<b>dog</b>"],
        "env.json": {"device": "cpu", "processes": 1},
        "plan.json": [["batch", "4 a process"]],
        **{name.replace("__", "."): value for name, value in files.items()},
    }  # fmt: skip
    for name, value in content.items():
        if value is not None:
            (folder / name).write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")
    return folder


def test_a_whole_run(tmp_path: Path) -> None:
    record = read_record(made(tmp_path / "run"))
    assert record.status == "done"
    assert (len(record.train), len(record.evals)) == (2, 2)
    assert record.images_per_second == 16.0
    assert record.plan == [("batch", "4 a process")]
    assert (record.name, record.data) == ("run", "cats")
    assert record.doctor is None


def test_a_run_that_has_gone_on_after_its_end_is_not_done(tmp_path: Path) -> None:
    record = read_record(made(tmp_path / "run", results__json={"epochs": 1, "samples": 8, "train_seconds": 1.0}))
    assert record.results is None
    assert record.status == "still running, or killed"
    assert record.images_per_second == 20.0


@pytest.mark.parametrize(
    ("ending", "status"),
    [
        ({"code": 75, "reason": "SIGTERM at update 3"}, "stopped: SIGTERM at update 3"),
        ({"code": 1, "reason": "no space"}, "failed: no space"),
    ],
)
def test_how_it_ended(tmp_path: Path, ending: dict[str, Any], status: str) -> None:
    assert read_record(made(tmp_path / "run", results__json=None, exit__json=ending)).status == status


def test_a_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    folder = made(tmp_path / "run")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"event": "train", "epo')
    assert len(read_record(folder).train) == 2


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({"config__yaml": None}, "run holds no run (no config.yaml): give the --output_dir of a training"),
        ({"config__yaml": "a: [1"}, "run/config.yaml cannot be read (while parsing"),
        ({"config__yaml": "text"}, "run/config.yaml cannot be read (no settings in it): it is not as a training writes it"),
        ({"metrics__jsonl": "{}\n{oh\n{}\n"}, "run/metrics.jsonl cannot be read (line 2: "),
        ({"metrics__jsonl": "1\n{}\n"}, "run/metrics.jsonl cannot be read (line 1: no object)"),
        ({"results__json": "{"}, "run/results.json cannot be read ("),
        ({"classes__json": "{}"}, "run/classes.json cannot be read (a dict in it, not a list)"),
    ],
)
def test_what_is_no_run(tmp_path: Path, files: dict[str, Any], sentence: str) -> None:
    made(tmp_path / "run", **files)
    with pytest.raises(UserError) as raised:
        read_record(Path("run"))
    assert str(raised.value).startswith(sentence)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("place", "what"), [("nowhere", "is not there"), ("file", "is no folder")])
def test_what_is_no_folder(place: str, what: str) -> None:
    Path("file").write_text("x")
    with pytest.raises(UserError, match=f"^{place} {what}: give"):
        read_record(Path(place))
