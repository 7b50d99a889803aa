"""`--on_bad_image skip`: training goes on with another image, evaluation without it, and all ranks count the same."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import ids_image, png, write_parquet
from tests.launching import ACCELERATE, CONFIGS, MAIN, finish, started
from tests.ranks import Ranks, alone
from tests.sessions import StopAt, assert_equal, session

TRAIN, TEST = 50, 13
BAD_TRAIN, BAD_TEST = (3, 20, 21, 49), (0, 5, 12)


def broken(index: int) -> bytes:
    return png(ids_image(index))[:60]


def write_set(folder: Path, train: list[tuple[Any, int]], test: list[tuple[Any, int]]) -> Path:
    folder.mkdir()
    for split, rows in (("train", train), ("test", test)):
        write_parquet(folder / f"{split}.parquet", [image for image, _ in rows], [label for _, label in rows])
    return folder


def rows(count: int, bad: tuple[int, ...] = ()) -> list[tuple[Any, int]]:
    return [(broken(index) if index in bad else ids_image(index), index % 10) for index in range(count)]


@pytest.fixture
def bad_set(tmp_path: Path) -> Path:
    return write_set(tmp_path / "bad", rows(TRAIN, BAD_TRAIN), rows(TEST, BAD_TEST))


@pytest.fixture
def good_set(tmp_path: Path) -> Path:
    """What it is to be equal to: each bad training image replaced by the next good one, the bad test images taken away."""
    train = rows(TRAIN)
    stands_in = {3: 4, 20: 22, 21: 22, 49: 0}
    test = [row for index, row in enumerate(rows(TEST)) if index not in BAD_TEST]
    return write_set(tmp_path / "good", [train[stands_in.get(index, index)] for index in range(TRAIN)], test)


def without_counts(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in entry.items() if key not in ("bad_images", "ece")} for entry in entries]


def probabilities(metrics: dict[str, Any]) -> list[float]:
    """Take out what rests on probabilities, whose last digits depend on the size of the last batch; mistakes without indices."""
    numbers = [number for mistake in metrics.pop("mistakes") for number in mistake[1:]]
    return [metrics.pop("ece"), *numbers, *(number for row in metrics.pop("calibration") for number in row)]


@pytest.mark.parametrize(("processes", "cache"), [(1, "ram"), (2, "none")])
def test_the_run_is_that_of_the_good_images(
    two_ranks: Ranks, tmp_path: Path, bad_set: Path, good_set: Path, processes: int, cache: str
) -> None:
    """To the bit: weights, optimizer, accuracy, loss and confusion; and every rank has counted what is bad."""
    found = []
    for folder in (bad_set, good_set):
        extra = {"on_bad_image": "skip", "cache": cache, "epochs": 2, "normalize": "none", "global_batch_size": 8, "batch_size": None}
        arguments = (folder, tmp_path / f"run-{folder.name}", extra)
        found.append([alone(skipping, *arguments)] if processes == 1 else two_ranks.run(skipping, *arguments))
    for one, other in zip(*found, strict=True):
        assert one.state["bad_images"] == len(BAD_TRAIN)
        assert one.state["metrics"].pop("bad_images") == one.state["best"].pop("bad_images") == len(BAD_TEST)
        assert one.state["metrics"]["samples"] == TEST - len(BAD_TEST)
        assert other.state["metrics"].pop("bad_images") == other.state["best"].pop("bad_images") == other.state["bad_images"] == 0
        one.state["bad_images"] = 0
        for kind in ("metrics", "best"):
            probable, expected = (probabilities(found_one.state[kind]) for found_one in (one, other))
            assert probable == pytest.approx(expected, abs=1e-6)
        one.metrics, other.metrics = without_counts(one.metrics), without_counts(other.metrics)
        assert_equal(one, other)
    results = json.loads((tmp_path / "run-bad" / "results.json").read_text())
    assert (results["bad_images"], results["evaluated_samples"]) == (len(BAD_TRAIN) + len(BAD_TEST), TEST - len(BAD_TEST))
    lines = (tmp_path / "run-bad" / "train.log").read_text().splitlines()
    assert [line.rpartition(" bad ")[2] for line in lines if line.startswith("eval")] == ["3", "3"]
    assert [line for line in lines if line.startswith("train")][-1].endswith(f" bad {len(BAD_TRAIN)} eta 0:00")
    assert json.loads((tmp_path / "run-good" / "results.json").read_text())["bad_images"] == 0
    assert " bad " not in (tmp_path / "run-good" / "train.log").read_text()


def skipping(processes: Any, folder: Path, output: Path, knobs: dict[str, Any], stop: StopAt | None = None) -> Any:
    return session(processes, folder, output, stop, **knobs)


def test_the_count_survives_a_resume(two_ranks: Ranks, tmp_path: Path, bad_set: Path) -> None:
    knobs = {"on_bad_image": "skip", "cache": "none", "epochs": 2, "batch_size": 4}
    whole = two_ranks.run(skipping, bad_set, tmp_path / "whole", knobs)
    stopped = two_ranks.run(skipping, bad_set, tmp_path / "parts", knobs, StopAt(1, 5))
    assert all(session.interrupted for session in stopped)
    resumed = two_ranks.run(skipping, bad_set, tmp_path / "parts", {**knobs, "resume_from_checkpoint": "auto"})
    for one, other in zip(whole, resumed, strict=True):
        assert one.state["bad_images"] == len(BAD_TRAIN)
        assert_equal(one, other)


def write_photos(folder: Path) -> None:
    """Class folders of JPEG files, of which three are broken and one has broken notes; each split has some."""
    for split in ("train", "val"):
        for name in ("cat", "dog"):
            (folder / split / name).mkdir(parents=True)
            for index in range(8):
                exif = b"Exif\0\0MM\0*\0\0\0\x08\xff\xff\x01\x12\0\x03" if (split, name, index) == ("train", "cat", 5) else b""
                ids_image(index).resize((40 + index, 32)).save(folder / split / name / f"{index}.jpg", exif=exif)
    for name in ("train/cat/2.jpg", "train/dog/7.jpg", "val/dog/0.jpg"):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: len(content) // 2])


def test_launched(tmp_path: Path) -> None:
    """With data workers, which read broken notes too, and nothing on stderr."""
    write_photos(tmp_path / "pets")
    flags = ["--data_dir", "pets", "--image_size", "24", "--augment", "light", "--batch_size", "3", "--epochs", "2", "--num_workers", "1"]
    launcher = (*ACCELERATE, "--config_file", CONFIGS / "multi_cpu.yaml")
    with started(*launcher, MAIN, *flags, "--on_bad_image", "skip", "--output_dir", "run", cwd=tmp_path) as child:
        done = finish(child, tmp_path / "run")
    assert done.code == 0, done.errors
    assert done.errors == ""
    assert [line.rpartition(" ")[2] for line in done.lines if line.startswith("eval ")] == ["1", "1"]
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert (results["bad_images"], results["evaluated_samples"]) == (3, 15)
    assert json.loads((tmp_path / "run" / "model" / "config.json").read_text())["classes"] == ["cat", "dog"]
    images = next(line for line in done.lines if line.strip().startswith("images"))
    assert "resized from 40 x 32 to 47 x 32, random parts in training, else the centre" in images
    assert images.endswith("; augmented (light); what cannot be read is skipped")
