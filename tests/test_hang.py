"""No silent hang, through the real command: the verdict comes in seconds, names the right rank, and nothing is left running."""

import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.helpers import write_ids
from tests.test_stops import ENDLESS, TWO, stopped_launch

FLAGS = (*ENDLESS, "--hang_timeout", "3")


@pytest.fixture(scope="module")
def ids(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_ids(tmp_path_factory.mktemp("ids"), 64, 16)


def verdict(tmp_path: Path, ids: Path, strike: Any, flags: tuple[str, ...] = FLAGS) -> tuple[dict[str, Any], str, float]:
    struck: list[float] = []

    def timed(launcher: Any, workers: list[psutil.Process]) -> None:
        struck.append(time.monotonic())
        strike(launcher, workers)

    code, end, _, errors = stopped_launch(tmp_path, TWO, ids, 2, timed, flags=flags)
    assert code != 0
    assert end["code"] == 1
    assert f"{Path('trainer', 'loop.py')}" not in errors.partition("error: ")[0], "a traceback before the sentence"
    return end, errors, time.monotonic() - struck[0]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_rank(tmp_path: Path, ids: Path, rank: int) -> None:
    end, errors, seconds = verdict(tmp_path, ids, lambda launcher, workers: workers[rank].suspend())
    assert end["reason"] == f"no progress for 3 s (--hang_timeout): rank {rank} did not arrive"
    assert errors.count(f"error: {end['reason']}\n") == 1
    assert f"rank {rank} is missing: last seen in " in errors
    assert f"rank {1 - rank} waits in " in errors
    assert f"error: {end['reason']}" in (tmp_path / "run" / "train.log").read_text()
    assert all("in fit" in (tmp_path / "run" / "logs" / f"rank_{r}.log").read_text() for r in range(2))
    assert seconds < 20


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank(tmp_path: Path, ids: Path, rank: int) -> None:
    folder = tmp_path / "run"
    flags = (*FLAGS, "--num_workers", "1")
    end, errors, seconds = verdict(tmp_path, ids, lambda launcher, workers: workers[rank].kill(), flags)
    assert f"rank {rank} was killed" in end["reason"]
    assert errors.count("error: rank") == 1
    assert "last seen in " in errors
    assert seconds < 20
    assert not (folder / "results.json").exists()
