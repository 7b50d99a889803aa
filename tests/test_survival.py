"""Nothing is lost: killed workers, a full disk, a truncated checkpoint; the end equals that of an undisturbed training, to the bit."""

import json
import os
import random
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from tests.helpers import write_ids
from tests.launching import MAIN, Launch, finish, started
from tests.test_stops import TWO, wait_for, workers_of
from trainer.checkpoint import listed
from trainer.files import problem

FLAGS = ("--epochs", "20", "--batch_size", "4", "--eval_batch_size", "8", "--log_interval", "5", "--checkpointing_steps", "5")


@pytest.fixture(scope="module")
def ids(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_ids(tmp_path_factory.mktemp("ids"), 160, 16)


def flags(ids: Path, folder: Path) -> tuple[str | Path, ...]:
    return (MAIN, "--dataset", ids, "--output_dir", folder, *FLAGS, "--resume", "auto")


def train(ids: Path, folder: Path, *options: str) -> Launch:
    with started(*TWO, *options, *flags(ids, folder), cwd=folder.parent) as child:
        return finish(child, folder)


def last_state(folder: Path) -> dict[str, Any]:
    """Everything that must be equal at the end."""
    last = listed(folder / "checkpoints")[-1]
    assert problem(last) is None
    state = json.loads((last / "state.json").read_text())
    state["hooks"]["Log"] = state["hooks"]["Log"]["entries"]
    state["config"].pop("output_dir")
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for entry in metrics:
        for name in ("seconds", "images_per_second", "data_fraction"):
            entry.pop(name, None)
    files = [*sorted(last.glob("*.safetensors")), folder / "model" / "model.safetensors"]
    tensors = {f"{file.parent.name}/{file.name}/{name}": bits(tensor) for file in files for name, tensor in load_file(file).items()}
    return {"state": state, "metrics": metrics, "tensors": tensors}


def bits(tensor: Tensor) -> str:
    return tensor.numpy().tobytes().hex()


@pytest.fixture(scope="module")
def undisturbed(ids: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    result = train(ids, folder)
    assert result.code == 0, result.errors
    assert result.row("resume") == f"there is no checkpoint in {folder}: the training starts anew"
    state = last_state(folder)
    assert state["state"]["train"]["step"] == 400
    return state


def test_a_killed_worker_is_started_again(ids: Path, tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    folder = tmp_path / "run"
    with started(*TWO, "--max_restarts", "2", *flags(ids, folder), cwd=tmp_path) as child:
        wait_for("a checkpoint", lambda: listed(folder / "checkpoints"))
        workers_of(child)[1].kill()
        result = finish(child, folder)
    assert result.code == 0, result.errors
    assert len([line for line in result.lines if "resume from" in line]) == 1
    assert last_state(folder) == undisturbed


def test_killed_at_a_random_moment_and_relaunched(ids: Path, tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    """benchmarks/kills.py does it twenty times."""
    folder = tmp_path / "run"
    assert killed_until_done(ids, folder, kills=2, seed=0) == 2
    assert last_state(folder) == undisturbed


def kill(launcher: "subprocess.Popen[str]") -> None:
    """`kill -9` to the launcher and its workers, at once."""
    workers = workers_of(launcher)
    launcher.kill()
    for worker in workers:
        worker.kill()


def killed_until_done(ids: Path, folder: Path, kills: int, seed: int) -> int:
    """Launch, `kill -9` all processes at a random moment after the first log line, `kills` times, then let it end; the number of kills."""
    generator = random.Random(seed)
    done = 0
    for _ in range(kills):
        log = folder / "train.log"
        before = log.stat().st_size if log.exists() else 0
        with started(*TWO, *flags(ids, folder), cwd=folder.parent) as child:
            wait_for("training", lambda: (log.exists() and log.stat().st_size > before + 1500) or child.poll() is not None)  # noqa: B023
            time.sleep(generator.random())
            if child.poll() is None:
                kill(child)
                done += 1
            child.communicate()
    result = train(ids, folder)
    assert result.code == 0, result.errors
    return done


def test_a_truncated_newest_checkpoint_is_passed_over(ids: Path, tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    folder = tmp_path / "run"
    with started(*TWO, *flags(ids, folder), cwd=tmp_path) as child:
        wait_for("checkpoints", lambda: len(listed(folder / "checkpoints")) >= 2)
        kill(child)
        child.communicate()
    newest = listed(folder / "checkpoints")[-1]
    os.truncate(newest / "optimizer.safetensors", 100)
    result = train(ids, folder)
    assert result.code == 0, result.errors
    assert f"{newest.name} is passed over: optimizer.safetensors has 100 bytes instead of " in "\n".join(result.lines)
    assert last_state(folder) == undisturbed


@pytest.fixture
def small_disk(tmp_path: Path) -> Any:
    """A disk of 3 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.getuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", disk], check=False).returncode:
        pytest.skip("mounting a small tmpfs needs root")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def test_a_full_disk(ids: Path, small_disk: Path, undisturbed: dict[str, Any]) -> None:
    folder = small_disk / "run"
    ballast = small_disk / "ballast"
    with started(*TWO, *flags(ids, folder), cwd=small_disk.parent) as child:
        wait_for("a checkpoint", lambda: listed(folder / "checkpoints"))
        with ballast.open("wb", buffering=0) as file, suppress(OSError):
            while file.write(b"0" * 4096):
                pass
        result = finish(child, folder)
    assert result.code != 0
    sentences = result.sentences()
    assert len(sentences) == 1, result.errors
    assert "no space left on" in sentences[0]
    assert str(small_disk) in sentences[0]
    assert not result.frames()
    assert [problem(path) for path in listed(folder / "checkpoints")] == [None] * len(listed(folder / "checkpoints"))
    ballast.unlink()
    result = train(ids, folder)
    assert result.code == 0, result.errors
    assert last_state(folder) == undisturbed
