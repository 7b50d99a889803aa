"""Pixels to what the model takes: whole batches, on the model's device."""

import torch
from torch import Tensor, nn

from trainer.data.dataset import ImageDataset

CHUNK = 4096
# Of ImageNet's training images, as torchvision's ImageClassification preset has them: red, green, blue.
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Normalize(nn.Module):
    """uint8 (B, C, H, W) -> (pixels / 255 - mean) / std, of torch's default dtype, (B, C, H, W)."""

    mean: Tensor
    std: Tensor

    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        return (images.to(self.mean.dtype) / 255 - self.mean) / self.std


def normalisation(kind: str, dataset: ImageDataset) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation of each channel that `--normalize` asks for; for grey images 'imagenet' takes the averages over the colours."""
    channels = dataset.shape[0]
    if kind == "dataset":
        return pixel_statistics(dataset)
    if kind == "imagenet":
        return (IMAGENET_MEAN, IMAGENET_STD) if channels == 3 else ((sum(IMAGENET_MEAN) / 3,), (sum(IMAGENET_STD) / 3,))
    return (0.0,) * channels, (1.0,) * channels


def pixel_statistics(dataset: ImageDataset) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and population standard deviation of each channel, of pixels scaled to 0..1.

    They come from whole-number histograms, so that every rank gets the same bits. A channel of one value gets the deviation 1.
    """
    channels = dataset.shape[0]
    counts = torch.zeros(channels, 256, dtype=torch.int64)
    for start in range(0, len(dataset), CHUNK):
        images = dataset.gather(list(range(start, min(start + CHUNK, len(dataset)))))
        for channel in range(channels):
            counts[channel] += torch.bincount(images[:, channel].flatten().int(), minlength=256)
    values = torch.arange(256, dtype=torch.float64) / 255
    weights = counts.double() / counts.sum(1, keepdim=True)
    mean = (weights * values).sum(1)
    std = (weights * (values - mean[:, None]) ** 2).sum(1).sqrt()
    std[std == 0] = 1
    return tuple(mean.tolist()), tuple(std.tolist())
