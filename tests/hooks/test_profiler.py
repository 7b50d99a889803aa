"""--profile: a trace of so many updates, and a table that tells the phases of the loop apart."""

import json
import re
from pathlib import Path

import pytest

from tests.helpers import alone_run, needed_hooks, write_ids
from trainer.hooks.log import Log
from trainer.hooks.profiler import WARM_UP, Profiler
from trainer.loop import fit


def profiled(folder: Path, capsys: pytest.CaptureFixture[str], **knobs: int) -> str:
    """What a run prints that has 24 updates an epoch."""
    (folder / "out").mkdir(exist_ok=True)
    ids = write_ids(folder / "ids", train=96)
    with alone_run(ids, batch_size=4, output_dir=str(folder / "out"), cpu_threads=1, **knobs) as run:
        log = Log()
        fit(run, needed_hooks(Profiler(), log))
        log.close(0, "")
        assert run.on_phase is None
    return capsys.readouterr().out


def test_so_many_updates_are_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = profiled(tmp_path, capsys, profile=5, epochs=1)
    lines = [line for line in out.splitlines() if line.startswith("profile")]
    assert len(lines) == 1
    shares = dict(re.findall(r"([a-z]+) (\d+)%", lines[0]))
    assert lines[0].startswith("profile 5 updates, ")
    assert {"data", "forward", "backward", "update", "agree"} <= shares.keys()
    assert 80 <= sum(map(int, shares.values())) <= 105, "the phases make up the time of an update"
    events = json.loads((tmp_path / "out" / "profile" / "trace.json").read_text())["traceEvents"]
    names = [event.get("name") for event in events]
    assert names.count("phase: forward") == names.count("phase: backward") == 5
    assert "aten::convolution_backward" in names
    table = (tmp_path / "out" / "profile" / "table.txt").read_text()
    assert "aten::mkldnn_convolution" in table
    assert "phase: backward" in table


def test_an_evaluation_ends_the_recording(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = profiled(tmp_path, capsys, profile=100, epochs=2)
    assert f"profile {24 - WARM_UP} updates" in out
    names = [event.get("name") for event in json.loads((tmp_path / "out" / "profile" / "trace.json").read_text())["traceEvents"]]
    assert "phase: evaluation forward" not in names


def test_a_run_that_is_too_short_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = profiled(tmp_path, capsys, profile=5, epochs=1, max_steps=WARM_UP - 1)
    assert "profile: nothing was recorded, the run ended within its first 10 updates" in out
    assert not (tmp_path / "out" / "profile").exists()


def test_nothing_is_recorded_unasked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "profile" not in profiled(tmp_path, capsys, epochs=1)
    assert not (tmp_path / "out" / "profile").exists()
