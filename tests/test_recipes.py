"""Every recipe that is shipped runs, for a few updates, on data of its kind that are made here."""

import json
from pathlib import Path

import numpy
import pytest

from benchmarks.textures import KINDS, texture
from tests.helpers import write_parquet
from tests.ranks import alone
from trainer.config import RECIPES, parse
from trainer.main import train
from trainer.runtime import Processes


def photos(folder: Path) -> list[str]:
    for split, count in (("train", 9), ("val", 3)):
        for number, kind in enumerate(KINDS):
            place = folder / split / kind.__name__
            place.mkdir(parents=True)
            for image in range(count):
                texture(kind, numpy.random.default_rng([number, image, count])).save(place / f"{image}.jpg")
    return ["--data_dir", str(folder)]


def digits(folder: Path) -> list[str]:
    from PIL import Image

    folder.mkdir()
    random = numpy.random.default_rng(0)
    for split, count in (("train", 96), ("test", 20)):
        images = [Image.fromarray(random.integers(0, 256, (28, 28), dtype=numpy.uint8)) for _ in range(count)]
        write_parquet(folder / f"{split}.parquet", images, [number % 10 for number in range(count)])
    return ["--dataset", str(folder)]


def run(processes: Processes, arguments: list[str]) -> None:
    train(parse(arguments), processes)


@pytest.mark.parametrize("recipe", sorted(path.stem for path in RECIPES.glob("*.yaml")))
def test_it_runs(tmp_path: Path, recipe: str) -> None:
    data = [] if recipe == "mnist5k" else photos(tmp_path / "data") if recipe == "imagefolder" else digits(tmp_path / "data")
    alone(run, ["--config", recipe, *data, "--max_steps", "3", "--cpu_threads", "1", "--output_dir", str(tmp_path / "out")])
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["step"] == 3
    assert results["evaluated_samples"] == {"mnist5k": 1000, "imagefolder": 24}.get(recipe, 20)
    assert results["bad_images"] == 0
    assert (tmp_path / "out" / "model" / "model.safetensors").exists()
