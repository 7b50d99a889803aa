"""Shared fixtures: real processes, real data sets made on the spot, and no network."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

# Before datasets is imported, here and in every process that the tests start.
os.environ["HF_HOME"] = tempfile.mkdtemp(prefix="trainer-tests-")
os.environ["HF_HUB_OFFLINE"] = "1"
# Shorter than in the trainer's commands (trainer/cpu.py): the tests' processes share few cores.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "ACCELERATE_MIXED_PRECISION"):
    os.environ.pop(name, None)

import pytest

from tests.photos import train_on_photos
from tests.ranks import Ranks


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def three_ranks() -> Iterator[Ranks]:
    ranks = Ranks(3)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def photos_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on photos of three classes, in `run`, beside its data in `photos`. Not to be changed."""
    return train_on_photos(tmp_path_factory.mktemp("photos-run"))


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
