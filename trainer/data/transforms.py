"""Pixels to what the model takes: whole batches, on the model's device."""

import math

import torch
from torch import Tensor, nn

from trainer.data.dataset import ImageDataset
from trainer.data.row_groups import StreamedRows
from trainer.runtime import Processes

# Images that mean and deviation are measured of, at most; and bytes of them at once.
MEASURED, CHUNK_BYTES = 5000, 1 << 18
# Of ImageNet's training images, as torchvision's ImageClassification preset has them: red, green, blue.
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


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


def normalisation(kind: str, dataset: ImageDataset, processes: Processes | None = None) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation of each channel that `--normalize` asks for; for grey images 'imagenet' takes the averages over the colours.

    A collective; see `pixel_statistics`.
    """
    channels = dataset.shape[0]
    if kind == "dataset":
        return pixel_statistics(dataset, processes)
    if kind == "imagenet":
        return (IMAGENET_MEAN, IMAGENET_STD) if channels == 3 else ((sum(IMAGENET_MEAN) / 3,), (sum(IMAGENET_STD) / 3,))
    return (0.0,) * channels, (1.0,) * channels


def spread(length: int, count: int) -> Tensor:
    """At most `count` of the numbers 0..length - 1, evenly spread, int64."""
    count = min(length, count)
    return torch.arange(count) * length // max(count, 1)


def pixel_statistics(dataset: ImageDataset, processes: Processes | None = None) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and population standard deviation of each channel, of pixels scaled to 0..1, of at most `MEASURED` images. A collective.

    Images that are spread over the split, since reading all would take as long as an epoch; whether they are kept in memory makes no
    difference. They come from whole-number sums, so that every rank gets the same bits. A channel of one value gets the deviation 1.

    Args:
        processes: that share the work; None: this one does all.

    Raises:
        UserError: an image cannot be read.
    """
    channels, (height, width) = dataset.shape[0], dataset.size
    streamed = isinstance(dataset.rows, StreamedRows)
    indices = dataset.rows.spread(MEASURED) if streamed else spread(len(dataset), MEASURED)
    if processes is None:
        parts = [_sums(dataset, indices)]
    else:
        with processes.together():
            own = _sums(dataset, indices.tensor_split(processes.count)[processes.rank])
        parts = processes.all_gather(own)
    total, squares = ([sum(part[kind][channel] for part in parts) for channel in range(channels)] for kind in (0, 1))
    count = len(indices) * height * width
    mean = [one / count / 255 for one in total]
    # In whole numbers: a difference of two large floats would lose the digits that matter.
    std = [math.sqrt(count * square - one**2) / count / 255 or 1.0 for one, square in zip(total, squares, strict=True)]
    return tuple(mean), tuple(std)


def _sums(dataset: ImageDataset, indices: Tensor) -> tuple[list[int], list[int]]:
    """Sums of the pixels of some images, and of their squares, for each channel."""
    channels = dataset.shape[0]
    total, squares = [0] * channels, [0] * channels
    for part in indices.split(max(1, CHUNK_BYTES // math.prod(dataset.shape))):
        images = dataset.gather(part)
        for channel in range(channels):
            pixels = images[:, channel].to(torch.int32)
            total[channel] += int(pixels.sum())
            squares[channel] += int(pixels.square_().sum())
    return total, squares
