"""Augmentation presets of torchvision, one image at a time; the only module that imports torchvision for data."""

from torch import Tensor
from torchvision.transforms import InterpolationMode, v2

from trainer.data.dataset import Transform


class Preset:
    """uint8 (C, H, W) -> the same: one drawn operation (TrivialAugment, Müller and Hutter 2021) or two (RandAugment, Cubuk et al. 2020).

    The draws are torch's, which `ImageDataset` seeds for each sample.

    Args:
        kind: 'trivialaugment' or 'randaugment', with torchvision's defaults; what an operation moves in from outside is black.
    """

    def __init__(self, kind: str) -> None:
        operations = v2.TrivialAugmentWide if kind == "trivialaugment" else v2.RandAugment
        self.operations = operations(interpolation=InterpolationMode.BILINEAR)

    def __call__(self, image: Tensor) -> Tensor:
        augmented: Tensor = self.operations(image)
        return augmented


class Chain:
    """Transforms one after another."""

    def __init__(self, *transforms: Transform) -> None:
        self.transforms = transforms

    def __call__(self, image: Tensor) -> Tensor:
        for transform in self.transforms:
            image = transform(image)
        return image
