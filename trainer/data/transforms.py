"""Pixels to what the model takes: whole batches, on the model's device."""

import math

import torch
from torch import Tensor, nn

from trainer.data.dataset import ImageDataset

CHUNK = 4096


class Normalize(nn.Module):
    """uint8 (B, C, H, W) -> (pixels / 255 - mean) / std, of torch's default dtype, (B, C, H, W).

    Args:
        memory_format: of the result, in which the model computes.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self, mean: tuple[float, ...], std: tuple[float, ...], memory_format: torch.memory_format = torch.contiguous_format
    ) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1))
        self.memory_format = memory_format

    def forward(self, images: Tensor) -> Tensor:
        return images.to(self.mean.dtype, memory_format=self.memory_format).div_(255).sub_(self.mean).div_(self.std)


def pixel_statistics(dataset: ImageDataset, rows: Tensor | None = None) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and population standard deviation of each channel, of pixels scaled to 0..1; of all images, or of those that `rows` numbers.

    They come from whole-number sums, so that every rank gets the same bits. A channel of one value gets the deviation 1.
    """
    channels, (height, width) = dataset.shape[0], dataset.size
    total, squares = [0] * channels, [0] * channels
    if rows is None:
        rows = torch.arange(len(dataset))
    for chunk in rows.split(CHUNK):
        images = dataset.gather(chunk)
        for channel in range(channels):
            pixels = images[:, channel].to(torch.int32)
            total[channel] += int(pixels.sum())
            squares[channel] += int(pixels.square_().sum())
    count = len(rows) * height * width
    mean = [one / count / 255 for one in total]
    # In whole numbers: a difference of two large floats would lose the digits that matter.
    std = [math.sqrt(count * square - one**2) / count / 255 or 1.0 for one, square in zip(total, squares, strict=True)]
    return tuple(mean), tuple(std)
