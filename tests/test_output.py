"""The run's folder: made once, complete, and never one that holds another run."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import Ranks, alone
from trainer.config import Config, parse
from trainer.output import RUN_FILES, create_output_dir, write_exit
from trainer.runtime import Processes, UserError

CLASSES = ("zero", "über", "3")


def created(processes: Processes, knobs: dict[str, Any]) -> Path:
    return create_output_dir(Config(**knobs), processes, CLASSES)


def refused(processes: Processes, knobs: dict[str, Any]) -> str:
    with pytest.raises(UserError) as raised:
        created(processes, knobs)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_the_folder_says_what_ran_and_where() -> None:
    knobs: dict[str, Any] = {"output_dir": "deep/er/out", "lr": 1e-5, "mixed_precision": "no", "sync_bn": "off", "dataset": "007"}
    folder = alone(created, knobs)
    assert folder == Path("deep/er/out")
    assert sorted(path.name for path in folder.iterdir()) == ["classes.json", "config.yaml", "env.json"]
    assert json.loads((folder / "classes.json").read_text(encoding="utf-8")) == list(CLASSES)
    environment = json.loads((folder / "env.json").read_text())
    assert environment["processes"] == 1
    assert environment["device"] == "cpu"
    assert environment["torch"].split(".")[0].isdigit()
    assert parse(["--config", str(folder / "config.yaml")]) == Config(**knobs)


def test_one_folder_for_all_ranks(two_ranks: Ranks, tmp_path: Path) -> None:
    folders = two_ranks.run(created, {"output_dir": str(tmp_path / "out")})
    assert folders == [tmp_path / "out"] * 2
    assert json.loads((tmp_path / "out" / "env.json").read_text())["processes"] == 2
    texts = two_ranks.run(refused, {"output_dir": str(tmp_path / "out")})
    assert len(set(texts)) == 1
    default = two_ranks.run(created_in, tmp_path)
    assert default[0] == default[1]
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [default[0].name]


def created_in(processes: Processes, folder: Path) -> Path:
    before = Path.cwd()
    os.chdir(folder)
    try:
        return created(processes, {})
    finally:
        os.chdir(before)


def test_a_second_run_into_it_is_refused_and_changes_nothing() -> None:
    folder = alone(created, {"output_dir": "out", "epochs": 5})
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert alone(refused, {"output_dir": "out"}) == "--output_dir out holds a run already (config.yaml): choose another --output_dir"
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("name", RUN_FILES)
def test_each_file_of_a_run_marks_the_folder(name: str) -> None:
    Path("out").mkdir()
    alone(created, {"output_dir": "empty"})
    (Path("out") / name).mkdir()
    assert f"holds a run already ({name})" in alone(refused, {"output_dir": "out"})


def test_other_files_are_left_alone() -> None:
    Path("out").mkdir()
    (Path("out") / "notes.txt").write_text("mine")
    alone(created, {"output_dir": "out"})
    assert (Path("out") / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("folder", "reason"), [("file", "File exists"), ("file/below", "Not a directory"), ("/proc/trainer-test", "No such file or directory")]
)
def test_a_place_that_cannot_hold_it_is_refused(folder: str, reason: str) -> None:
    Path("file").write_text("x")
    text = alone(refused, {"output_dir": folder})
    assert text == f"--output_dir {folder} cannot be made or written ({reason}): choose another --output_dir"


def test_the_default_folders_place_can_be_a_file_too() -> None:
    Path("runs").write_text("x")
    assert alone(refused, {}).startswith("--output_dir runs cannot be made or written (")


@pytest.mark.parametrize(
    ("dataset", "start"), [("mnist5k", "mnist5k-"), ("user/set", "user-set-"), ("/data/my set/", "data-my-set-"), ("..", "run-")]
)
def test_the_default_folder_is_named_after_data_and_time(monkeypatch: pytest.MonkeyPatch, dataset: str, start: str) -> None:
    monkeypatch.setattr(time, "strftime", lambda form: "20260102-030405")
    folders = [alone(created, {"dataset": dataset}) for _ in range(3)]
    name = f"{start}20260102-030405"
    assert [folder.name for folder in folders] == [name, f"{name}-1", f"{name}-2"]
    assert all(folder.parent == Path("runs") for folder in folders)
    assert all((folder / "config.yaml").is_file() for folder in folders)


@pytest.mark.parametrize(("code", "resumable"), [(0, True), (1, False), (2, False), (75, True)])
def test_how_it_ended(tmp_path: Path, code: int, resumable: bool) -> None:
    write_exit(tmp_path, code, "why", resumable, 12)
    assert json.loads((tmp_path / "exit.json").read_text()) == {"code": code, "reason": "why", "resumable": resumable, "step": 12}
