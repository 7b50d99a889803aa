"""What a sample's augmentation is: the hash against whole numbers of Python, the pixels against slices of numpy."""

import itertools
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import InterpolationMode, v2

from tests.helpers import ids_image, make_run, png, write_ids, write_parquet
from tests.ranks import Ranks, alone
from trainer.config import Config
from trainer.data.augment import Augment
from trainer.data.loaders import load_data
from trainer.data.sampler import pack_key
from trainer.runtime import Processes
from trainer.seeding import derive_seed, seeded, uniform

MASK = (1 << 64) - 1


def mix(number: int) -> int:
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & MASK
    return number ^ (number >> 31)


def test_the_hash_equals_pythons_whole_numbers() -> None:
    keys = [0, 1, 59_999, pack_key(3, 7), pack_key(10**6, 2**39)]
    for seed in (0, 1, 2**63 - 1):
        expected = [
            [(mix(mix((key + seed) & MASK) + draw * 0x9E3779B97F4A7C15 & MASK) >> 40) / 2**24 for draw in (1, 2, 3)] for key in keys
        ]
        assert uniform(seed, torch.tensor(keys), 3).tolist() == expected


def test_the_numbers_are_uniform_and_unrelated() -> None:
    """Of 120,000: mean, variance, and the correlation of neighbouring draws, samples and epochs, within five standard errors."""
    numbers = torch.cat([uniform(7, torch.arange(20_000) + pack_key(epoch, 0), 3) for epoch in (0, 1)]).double()
    assert 0 <= float(numbers.min()) < 1e-3
    assert 1 - 1e-3 < float(numbers.max()) < 1
    assert abs(float(numbers.mean()) - 0.5) < 5 / (12 * numbers.numel()) ** 0.5
    assert abs(float(numbers.var()) - 1 / 12) < 5 * (1 / 180 / numbers.numel()) ** 0.5
    for one, other in ((numbers[:, 0], numbers[:, 1]), (numbers[:-1, 2], numbers[1:, 2]), (numbers[:20_000, 0], numbers[20_000:, 0])):
        assert abs(float(torch.corrcoef(torch.stack([one, other]))[0, 1])) < 5 / len(one) ** 0.5


def shifted(image: "numpy.ndarray[tuple[int, ...], numpy.dtype[numpy.uint8]]", down: int, right: int, mirrored: bool) -> Tensor:
    """(C, H, W) moved by whole pixels over black, then mirrored."""
    height, width = image.shape[1:]
    result = numpy.zeros_like(image)
    for y in range(height):
        for x in range(width):
            if 0 <= y + down < height and 0 <= x + right < width:
                result[:, y, x] = image[:, y + down, x + right]
    return torch.from_numpy(result[:, :, ::-1].copy() if mirrored else result)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("hflip", [0.0, 0.5, 1.0])
def test_light_shifts_and_mirrors(channels: int, hflip: float) -> None:
    pixels = numpy.random.default_rng(0).integers(1, 256, (64, channels, 16, 24), dtype=numpy.uint8)
    augment = Augment(Config(augment="light", hflip=hflip))
    keys = torch.arange(64) + pack_key(2, 100)
    output = augment(torch.from_numpy(pixels), keys)
    draws = uniform(augment.seed, keys, 3).tolist()
    seen = set()
    for image, result, (down, right, flip) in zip(pixels, output, draws, strict=True):
        move = (int(down * 5) - 2, int(right * 7) - 3, flip < hflip)
        seen.add(move)
        assert torch.equal(result, shifted(image, *move)), move
    assert output.dtype == torch.uint8
    assert {move[0] for move in seen} == {-2, -1, 0, 1, 2}
    assert {move[1] for move in seen} == {-3, -2, -1, 0, 1, 2, 3}
    assert {move[2] for move in seen} == {0.0: {False}, 0.5: {False, True}, 1.0: {True}}[hflip]


def test_parts_of_larger_images_are_mirrored_only() -> None:
    images = torch.randint(0, 256, (64, 3, 8, 12), dtype=torch.uint8)
    keys = torch.arange(64)
    augment = Augment(Config(augment="trivialaugment", hflip=0.3), shift=False)
    flipped = uniform(augment.seed, keys, 3)[:, 2] < 0.3
    assert 8 < int(flipped.sum()) < 32
    assert torch.equal(augment(images, keys), torch.stack([i.flip(2) if f else i for i, f in zip(images, flipped, strict=True)]))


def holes(probability: float, size: tuple[int, int], count: int = 1500, **knobs: Any) -> tuple[Tensor, Tensor]:
    """(top, bottom, left, right) of what is erased of each image, its ends excluded, of those that are; and which are."""
    images = torch.full((count, 2, *size), 200, dtype=torch.uint8)
    augment = Augment(Config(random_erasing=probability, **knobs), (0.0, 0.5))
    erased = augment(images, torch.arange(count))
    assert erased.unique().tolist() == [0, 128, 200]
    changed = erased != images
    assert torch.equal(changed[:, 0], changed[:, 1])
    assert set(erased[:, 1][changed[:, 1]].tolist()) == {128}, "the mean, which normalisation makes 0"
    rows, columns = changed[:, 0].any(2), changed[:, 0].any(1)
    assert torch.equal(changed[:, 0], rows[:, :, None] & columns[:, None, :]), "a box"
    there = changed.flatten(1).any(1)
    ends = [end for line in (rows, columns) for end in (line.int().argmax(1), line.shape[1] - line.flip(1).int().argmax(1))]
    return torch.stack(ends, 1)[there], there


def test_random_erasing() -> None:
    """2 to 33 % of the area, 0.3 to 3.3 times as high as wide, anywhere, with the probability that is asked for."""
    boxes, there = holes(0.25, (64, 64))
    assert abs(len(boxes) / 1500 - 0.25) < 5 * (0.25 * 0.75 / 1500) ** 0.5
    top, bottom, left, right = boxes.double().T
    height, width = bottom - top, right - left
    area = height * width / 64**2
    assert 0.017 < float(area.min()) < 0.03
    assert 0.31 < float(area.max()) < 0.35
    assert abs(float(area.mean()) - 0.175) < 0.02
    ratio = height / width
    assert 0.27 < float(ratio.min()) < 0.36
    assert 2.8 < float(ratio.max()) < 3.7
    assert abs(float(ratio.log().mean())) < 0.1
    for first, last in ((top, bottom), (left, right)):
        assert (int(first.min()), int(last.max())) == (0, 64)
        assert abs(float((first + last).mean()) / 2 - 32) < 2
    again = holes(0.25, (64, 64))
    assert torch.equal(again[0], boxes)
    assert not torch.equal(holes(0.25, (64, 64), seed=1)[1], there)


def test_what_is_erased_stays_inside_of_small_images() -> None:
    boxes, there = holes(1.0, (4, 20))
    assert there.all()
    assert int(boxes.min()) >= 0
    assert int((boxes[:, 1] - boxes[:, 0]).max()) == 4
    assert int(boxes[:, 3].max()) == 20


def test_erasing_comes_after_the_shift() -> None:
    images = torch.randint(1, 256, (64, 1, 16, 16), dtype=torch.uint8)
    keys = torch.arange(64)
    erase, shift, both = (
        Augment(Config(**knobs), (0.0,))
        for knobs in ({"random_erasing": 1.0}, {"augment": "light"}, {"augment": "light", "random_erasing": 1.0})
    )
    assert torch.equal(both(images, keys), erase(shift(images, keys), keys))


def test_none_changes_nothing() -> None:
    images = torch.randint(0, 256, (4, 1, 8, 8), dtype=torch.uint8)
    assert Augment(Config())(images, torch.arange(4)) is images


def augmented(processes: Processes, folder: Path, **knobs: Any) -> dict[int, list[int]]:
    """Key of each sample of two epochs -> its augmented pixels, of the batches that the loop sees."""
    run = make_run(processes, folder, random_erasing=0.5, seed=3, **knobs)
    found = {}
    for epoch in (0, 1):
        run.train_loader.set_epoch(epoch)
        for images, _, keys in run.train_loader:
            for key, image in zip(keys.tolist(), run.augment(images, keys), strict=True):
                found[key] = image.flatten().tolist()
    run.close()
    return found


def augmented_in_all_ways(processes: Processes, folder: Path, ways: list[dict[str, Any]]) -> list[dict[int, list[int]]]:
    return [augmented(processes, folder, **knobs) for knobs in ways]


@pytest.mark.parametrize(("kind", "resized"), [("light", False), ("trivialaugment", False), ("light", True), ("randaugment", True)])
def test_a_samples_augmentation_depends_on_seed_epoch_and_sample_alone(two_ranks: Ranks, tmp_path: Path, kind: str, resized: bool) -> None:
    """Not on processes, workers, the batch or where decoded images are kept; a bad image is replaced alike too."""
    train: list[Any] = [ids_image(index).resize((24, 24)) for index in range(12)]
    train[7] = png(train[7])[:60]
    for split, images in (("train", train), ("test", train[:2])):
        write_parquet(tmp_path / f"{split}.parquet", images, [index % 10 for index in range(len(images))])
    common = {"augment": kind, "on_bad_image": "skip", **({"image_size": "16"} if resized else {})}
    ways: list[dict[str, Any]] = [
        {"batch_size": 4},
        {"batch_size": 3, "num_workers": 2},
        {"batch_size": 5, "cache": "none"},
        {"batch_size": 2, "cache": "none", "num_workers": 2},
    ]
    ways = [{**common, **way} for way in ways]
    expected = alone(augmented, tmp_path, batch_size=4, **common)
    assert len(expected) == 24
    assert {~key for key in expected if key < 0} == {pack_key(0, 7), pack_key(1, 7)}
    for one, other in zip(*two_ranks.run(augmented_in_all_ways, tmp_path, ways), strict=True):
        assert not one.keys() & other.keys()
        assert one | other == expected
    assert alone(augmented, tmp_path, **ways[3]) == expected
    assert any(expected[pack_key(0, i)] != expected[pack_key(1, i)] for i in range(7))


def test_presets_differ_from_light_and_from_each_other(tmp_path: Path) -> None:
    folder = write_ids(tmp_path, train=16)
    found = [alone(augmented, folder, augment=kind) for kind in ("none", "light", "trivialaugment", "randaugment")]
    for one, other in itertools.combinations(found, 2):
        assert sum(one[key] != other[key] for key in one) > 8


def test_presets_are_torchvisions(tmp_path: Path) -> None:
    """Of colour images, in the order of the samples, seeded as `ImageDataset` says."""
    images = [Image.fromarray(numpy.random.default_rng(i).integers(0, 256, (9, 11, 3), dtype=numpy.uint8)) for i in range(12)]
    for split in ("train", "test"):
        write_parquet(tmp_path / f"{split}.parquet", images, [0] * 12)
    for kind, operation in (("trivialaugment", v2.TrivialAugmentWide), ("randaugment", v2.RandAugment)):
        config = Config(dataset=str(tmp_path), augment=kind, seed=4)  # type: ignore[arg-type]
        data = alone(lambda processes, config=config: load_data(config, processes))
        found = data.train.__getitems__([pack_key(2, index) for index in range(12)])[0]
        for index, (image, result) in enumerate(zip(images, found, strict=True)):
            with seeded(derive_seed(4, "augment", 2, index)):
                expected = operation(interpolation=InterpolationMode.BILINEAR)(torch.from_numpy(numpy.array(image)).permute(2, 0, 1))
            assert torch.equal(result, expected)
