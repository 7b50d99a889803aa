"""Augmentation of whole batches, on the device they are on; what a sample gets is a function of (seed, epoch, sample) alone."""

import torch
from torch import Tensor

from trainer.config import Config
from trainer.seeding import derive_seed

# As He et al. 2016 shift CIFAR's images: by up to 4 of 32 pixels.
LARGEST_SHIFT = 1 / 8


class Augment:
    """uint8 (B, C, H, W) images and their keys int64 (B,) -> augmented images of the same shape.

    'light' shifts each image by up to an eighth of its height and width, filling up with black, and mirrors it with the
    probability `hflip`; 'none' returns it as it is. The draws do not depend on the batch, the process or the worker.
    """

    def __init__(self, config: Config) -> None:
        self.kind = config.augment
        self.hflip = config.hflip
        self.seed = derive_seed(config.seed, "augment batch")

    def __call__(self, images: Tensor, keys: Tensor) -> Tensor:
        if self.kind == "none":
            return images
        height, width = images.shape[2:]
        draws = uniform(self.seed, keys.to(images.device), 3)
        rows = _shifted(draws[:, 0], height)
        columns = _shifted(draws[:, 1], width)
        columns = torch.where((draws[:, 2] < self.hflip)[:, None], columns.flip(1), columns)
        inside = ((rows >= 0) & (rows < height))[:, :, None] & ((columns >= 0) & (columns < width))[:, None, :]
        pixels = (rows.clamp(0, height - 1) * width)[:, :, None] + columns.clamp(0, width - 1)[:, None, :]
        places = pixels.flatten(1)[:, None].expand(-1, images.shape[1], -1)
        return images.flatten(2).gather(2, places).view_as(images) * inside[:, None]


def _shifted(draws: Tensor, side: int) -> Tensor:
    """Draws (B,) -> int64 (B, side): which row or column comes where; outside of 0..side-1 there is none."""
    limit = int(side * LARGEST_SHIFT)
    shift = (draws * (2 * limit + 1)).long() - limit
    return torch.arange(side, device=draws.device) + shift[:, None]


def uniform(seed: int, keys: Tensor, count: int) -> Tensor:
    """`count` numbers of [0, 1) for each key, float32 (B, count): the same on every device, whatever stands beside the key in the batch.

    SplitMix64 (Steele, Lea, Flood 2014), whose finalizer is applied twice: to the key, and to its sum with the draw's number; the
    upper 24 bits, all that a float32 holds, make the number.

    Args:
        seed: of the stream.
        keys: int64 (B,).
    """
    numbers = torch.arange(1, count + 1, device=keys.device) * GOLDEN
    bits = _mix(_mix(keys + seed)[:, None] + numbers)
    return _shift_right(bits, 40).float() * 2.0**-24


def _signed(number: int) -> int:
    """A 64-bit pattern as int64 holds it."""
    return number - (1 << 64) if number >> 63 else number


GOLDEN = _signed(0x9E3779B97F4A7C15)


def _shift_right(numbers: Tensor, bits: int) -> Tensor:
    """As if unsigned: int64's own shift repeats the sign."""
    return (numbers >> bits) & ((1 << (64 - bits)) - 1)


def _mix(numbers: Tensor) -> Tensor:
    numbers = (numbers ^ _shift_right(numbers, 30)) * _signed(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ _shift_right(numbers, 27)) * _signed(0x94D049BB133111EB)
    return numbers ^ _shift_right(numbers, 31)
