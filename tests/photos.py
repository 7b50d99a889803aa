"""Small photos in class folders, and a model trained on them."""

import os
from pathlib import Path

import numpy
from PIL import Image

COLOURS = {"blue sky": (60, 90, 220), "grass": (70, 190, 60), "rust": (190, 80, 50)}


def photo(name: str, index: int, size: tuple[int, int] = (24, 20)) -> Image.Image:
    """A noisy one of a class; `size` is (width, height)."""
    random = numpy.random.default_rng((index, len(name)))
    pixels = random.normal(COLOURS[name], 55, (size[1], size[0], 3)).clip(0, 255).astype(numpy.uint8)
    return Image.fromarray(pixels)


def write_photos(folder: Path, **counts: int) -> Path:
    """Class folders of `counts` PNG files a class in each split."""
    for split, count in counts.items():
        for name in COLOURS:
            (folder / split / name).mkdir(parents=True, exist_ok=True)
            for index in range(count):
                photo(name, index + 1000 * (split != "train")).save(folder / split / name / f"{index:03}.png")
    return folder


def train_on_photos(folder: Path) -> Path:
    """The run's folder, `folder`/run; the data are named by a relative path, as users do, from `folder`."""
    from trainer.main import main

    write_photos(folder / "photos", train=16, val=7)
    before = Path.cwd()
    os.chdir(folder)
    try:
        flags = "--data_dir photos --image_size 16 --epochs 2 --batch_size 8 --lr 3e-3 --weight_decay 0 --cpu_threads 1 --output_dir run"
        main(flags.split())
    finally:
        os.chdir(before)
    return folder / "run"
