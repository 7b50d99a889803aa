"""What a sample's augmentation is: the hash against whole numbers of Python, the pixels against slices of numpy."""

from pathlib import Path

import numpy
import pytest
import torch
from torch import Tensor

from tests.helpers import make_run, write_ids
from tests.ranks import Ranks
from trainer.config import Config
from trainer.data.augment import Augment, uniform
from trainer.data.sampler import pack_key
from trainer.runtime import Processes

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


def test_none_changes_nothing() -> None:
    images = torch.randint(0, 256, (4, 1, 8, 8), dtype=torch.uint8)
    assert Augment(Config())(images, torch.arange(4)) is images


def augmented(processes: Processes, folder: Path, workers: int, batch_size: int) -> dict[int, list[int]]:
    """Key of each sample of two epochs -> its augmented pixels, of the batches that the loop sees."""
    run = make_run(processes, folder, augment="light", num_workers=workers, batch_size=batch_size, seed=3)
    found = {}
    for epoch in (0, 1):
        run.train_loader.set_epoch(epoch)
        for images, _, keys in run.train_loader:
            for key, image in zip(keys.tolist(), run.augment(images, keys), strict=True):
                found[key] = image.flatten().tolist()
    run.close()
    return found


def test_a_samples_augmentation_depends_on_seed_epoch_and_sample_alone(two_ranks: Ranks, tmp_path: Path) -> None:
    folder = write_ids(tmp_path, train=24)
    one, other = two_ranks.run(augmented, folder, 0, 4)
    assert len(one) == len(other) == 24
    assert not one.keys() & other.keys()
    again = two_ranks.run(augmented, folder, 2, 3)
    assert one | other == again[0] | again[1]
    assert any((one | other)[pack_key(0, i)] != (one | other)[pack_key(1, i)] for i in range(24))
