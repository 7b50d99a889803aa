"""Makes a small set of photo-like textures, eight kinds in class folders, to try the recipe for photos on without a download.

    python benchmarks/textures.py FOLDER
    accelerate launch trainer/main.py --config imagefolder --data_dir FOLDER

Each JPEG, about 72 to 96 pixels a side, shows one kind of texture in two random colours at a random scale, angle and contrast, under an
uneven light and noise, so that neither colour, size nor brightness tells the kind.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
from PIL import Image

Array = Any  # float64 (height, width)
Generator = numpy.random.Generator


def smooth(noise: Array, rounds: int) -> Array:
    """Repeated means over neighbours, on a torus; variance 1."""
    for _ in range(rounds):
        noise = (noise + sum(numpy.roll(noise, shift, axis) for shift in (1, -1) for axis in (0, 1))) / 5
    return (noise - noise.mean()) / noise.std()


def stripes(u: Array, v: Array, random: Generator) -> Array:
    return numpy.sin(u)


def checks(u: Array, v: Array, random: Generator) -> Array:
    return numpy.sign(numpy.sin(u) * numpy.sin(v))


def dots(u: Array, v: Array, random: Generator) -> Array:
    return numpy.cos(u) + numpy.cos(v) - 0.6


def rings(u: Array, v: Array, random: Generator) -> Array:
    return numpy.sin(numpy.hypot(u - random.uniform(-9, 9), v - random.uniform(-9, 9)))


def bricks(u: Array, v: Array, random: Generator) -> Array:
    row = numpy.floor(v / 3)
    inside = (numpy.mod(u + 3 * numpy.mod(row, 2), 6) > 0.7) & (numpy.mod(v, 3) > 0.6)
    return 2.0 * inside - 1


def waves(u: Array, v: Array, random: Generator) -> Array:
    return numpy.sin(u + 2.5 * numpy.sin(0.7 * v + random.uniform(0, 6)))


def blobs(u: Array, v: Array, random: Generator) -> Array:
    return 1.5 * smooth(random.normal(size=u.shape), 30)


def fibres(u: Array, v: Array, random: Generator) -> Array:
    """Noise that is drawn out along one direction."""
    lines = numpy.interp(numpy.mod(v + 0.15 * smooth(random.normal(size=u.shape), 20), 40), numpy.arange(41), random.normal(size=41))
    return 1.5 * lines + 0.3 * random.normal(size=u.shape)


KINDS: tuple[Callable[[Array, Array, Generator], Array], ...] = (blobs, bricks, checks, dots, fibres, rings, stripes, waves)


def texture(kind: Callable[[Array, Array, Generator], Array], random: Generator) -> Image.Image:
    height, width = random.integers(72, 97, 2)
    y, x = numpy.mgrid[:height, :width].astype(float)
    angle, scale = random.uniform(0, numpy.pi), random.uniform(0.3, 0.6)
    u = scale * (x * numpy.cos(angle) + y * numpy.sin(angle)) + random.uniform(0, 6)
    v = scale * (y * numpy.cos(angle) - x * numpy.sin(angle)) + random.uniform(0, 6)
    share = 0.5 + 0.5 * numpy.tanh(random.uniform(1, 2.5) * kind(u, v, random))
    one, other = random.uniform(0, 255, (2, 3))
    pixels = share[..., None] * one + (1 - share[..., None]) * other
    pixels *= 1 + 0.3 * smooth(random.normal(size=(height, width)), 60)[..., None] * random.uniform(0, 1)
    pixels += random.normal(scale=random.uniform(3, 12), size=pixels.shape)
    return Image.fromarray(pixels.clip(0, 255).astype(numpy.uint8))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--train", type=int, default=200, help="images of each kind")
    parser.add_argument("--test", type=int, default=50, help="images of each kind")
    arguments = parser.parse_args()
    for split, count in (("train", arguments.train), ("test", arguments.test)):
        for kind in KINDS:
            folder = arguments.folder / split / kind.__name__
            folder.mkdir(parents=True, exist_ok=True)
            for number in range(count):
                random = numpy.random.default_rng([split == "test", KINDS.index(kind), number])
                texture(kind, random).save(folder / f"{number:04d}.jpg", quality=90)


if __name__ == "__main__":
    main()
