"""Augmentation of whole batches, on the device they are on; what a sample gets is a function of (seed, epoch, sample) alone."""

import math

import torch
from torch import Tensor

from trainer.config import Config
from trainer.seeding import derive_seed, uniform

# As He et al. 2016 shift CIFAR's images: by up to 4 of 32 pixels.
LARGEST_SHIFT = 1 / 8
SMALLEST_ERASED, LARGEST_ERASED = 0.02, 0.33
LEAST_ASPECT, MOST_ASPECT = 0.3, 3.3


class Augment:
    """uint8 (B, C, H, W) images and their keys int64 (B,) -> augmented images of the same shape.

    All kinds but 'none' mirror each image with the probability `hflip`; where the images do not come as random parts of larger ones, they
    are shifted first, by up to an eighth of their height and width, filled up with black. Random erasing comes last. The draws do not
    depend on the batch, the process or the worker.

    Args:
        config: `augment`, `hflip`, `random_erasing`, `seed`.
        mean: of each channel, pixels scaled to 0..1: what is erased becomes that, and so 0 when the images have been normalised.
        shift: whether the images are to be shifted.
    """

    def __init__(self, config: Config, mean: tuple[float, ...] = (0.0,), shift: bool = True) -> None:
        self.mirror = config.augment != "none"
        self.shift = self.mirror and shift
        self.hflip = config.hflip
        self.erasing = config.random_erasing
        self.fill = torch.tensor([round(255 * value) for value in mean], dtype=torch.uint8).view(-1, 1, 1)
        self.seed = derive_seed(config.seed, "augment batch")
        self.erasing_seed = derive_seed(config.seed, "erase")

    def __call__(self, images: Tensor, keys: Tensor) -> Tensor:
        keys = keys.to(images.device)
        if self.mirror:
            draws = uniform(self.seed, keys, 3)
            flipped = draws[:, 2] < self.hflip
            if self.shift:
                images = self._shift(images, draws, flipped)
            else:
                images = torch.where(flipped[:, None, None, None], images.flip(3), images)
        if self.erasing:
            images = torch.where(self._erased(images, keys), self.fill.to(images.device), images)
        return images

    def _shift(self, images: Tensor, draws: Tensor, flipped: Tensor) -> Tensor:
        height, width = images.shape[2:]
        rows = _shifted(draws[:, 0], height)
        columns = _shifted(draws[:, 1], width)
        columns = torch.where(flipped[:, None], columns.flip(1), columns)
        inside = ((rows >= 0) & (rows < height))[:, :, None] & ((columns >= 0) & (columns < width))[:, None, :]
        pixels = (rows.clamp(0, height - 1) * width)[:, :, None] + columns.clamp(0, width - 1)[:, None, :]
        places = pixels.flatten(1)[:, None].expand(-1, images.shape[1], -1)
        return images.flatten(2).gather(2, places).view_as(images) * inside[:, None]

    def _erased(self, images: Tensor, keys: Tensor) -> Tensor:
        """The pixels to erase, bool (B, 1, H, W): a box of 2 to 33 % of the area, 0.3 to 3.3 times as high as wide (Zhong et al. 2020).

        One that would not fit is cut off, instead of drawn again.
        """
        height, width = images.shape[2:]
        draws = uniform(self.erasing_seed, keys, 5)
        area = (SMALLEST_ERASED + (LARGEST_ERASED - SMALLEST_ERASED) * draws[:, 1]) * height * width
        aspect = torch.exp(math.log(LEAST_ASPECT) + math.log(MOST_ASPECT / LEAST_ASPECT) * draws[:, 2])
        rows = _inside((area * aspect).sqrt(), draws[:, 3], height)
        columns = _inside((area / aspect).sqrt(), draws[:, 4], width)
        return ((draws[:, 0] < self.erasing)[:, None, None] & rows[:, :, None] & columns[:, None, :])[:, None]


def _inside(lengths: Tensor, draws: Tensor, side: int) -> Tensor:
    """Lengths (B,), pixels, placed by draws (B,) -> bool (B, side): which rows or columns they cover."""
    lengths = lengths.round().clamp(1, side)
    first = (draws * (side - lengths + 1)).floor()[:, None]
    places = torch.arange(side, device=draws.device)
    return (places >= first) & (places < first + lengths[:, None])


def _shifted(draws: Tensor, side: int) -> Tensor:
    """Draws (B,) -> int64 (B, side): which row or column comes where; outside of 0..side-1 there is none."""
    limit = int(side * LARGEST_SHIFT)
    shift = (draws * (2 * limit + 1)).long() - limit
    return torch.arange(side, device=draws.device) + shift[:, None]
