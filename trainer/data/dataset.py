"""A split as a map data set of whole batches: keys in, uint8 images and labels out."""

import io
from collections.abc import Callable
from typing import Any

import numpy
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from trainer.data.sampler import INDEX_MASK, unpack_key
from trainer.runtime import UserError
from trainer.seeding import derive_seed, seeded

GREY_MODES = ("1", "L", "LA")
DEEP_MODES = ("I", "I;16", "I;16B", "I;16L", "F")

# Rows that are read at once; one by one, `datasets` takes longer than decoding them.
ROWS = 1024

# uint8 images (B, C, H, W), int64 class numbers (B,), int64 keys (B,) of the samples (sampler.py).
Batch = tuple[Tensor, Tensor, Tensor]
Transform = Callable[[Tensor], Tensor]


class ImageError(UserError):
    """An image that cannot be trained on. torch raises a worker's exception anew with a traceback as its text, which ends with ours."""

    def __init__(self, message: str) -> None:
        super().__init__(message.rpartition("ImageError: ")[2].strip())


class ImageDataset(Dataset[Batch]):
    """Images of one size, uint8 (C, H, W), with class numbers and keys; decoded once into memory by `decode_all`, else each time.

    Decoded images are cut into batches by one indexing operation; `to` moves them to a device, and batches then come from there.

    Args:
        name: what error messages call it.
        rows: a `datasets.Dataset` with the undecoded column `image`; a slice of it is a mapping of columns.
        labels: one class number for each row.
        mode: 'L' (grey, C = 1) or 'RGB' (C = 3): what every image is converted to.
        size: (height, width) that every image must have, pixels.
        transform: augmentation of one uint8 (C, H, W) image, by any generator of torch (CPU), numpy or random: all three are seeded from
            (seed, epoch, sample), so that a sample's draw does not depend on processes and workers.
        seed: the run's seed.
    """

    def __init__(
        self, name: str, rows: Any, labels: list[int], mode: str, size: tuple[int, int], transform: Transform | None = None, seed: int = 0
    ) -> None:
        self.name = name
        self.rows = rows
        self.labels = torch.tensor(labels, dtype=torch.int64)
        self.mode = mode
        self.size = size
        self.transform = transform
        self.seed = seed
        self.images: Tensor | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, H, W) of an image."""
        return (1 if self.mode == "L" else 3, *self.size)

    def nbytes(self) -> int:
        """Bytes of all images decoded."""
        channels, height, width = self.shape
        return len(self) * channels * height * width

    def decode_all(self) -> None:
        """Keep all images decoded in memory.

        Raises:
            ImageError: an image is broken or has another size.
        """
        images = torch.empty((len(self), *self.shape), dtype=torch.uint8)
        for start in range(0, len(self), ROWS):
            for index, record in enumerate(self.rows[start : start + ROWS]["image"], start):
                images[index] = self._decode(index, record)
        self.images = images
        self.rows = None

    def to(self, device: torch.device) -> None:
        """Move the decoded images, and the labels, to `device`."""
        assert self.images is not None
        self.images, self.labels = self.images.to(device), self.labels.to(device)

    def _decode(self, index: int, record: dict[str, Any]) -> Tensor:
        image = open_image(self.name, index, record)
        if (image.height, image.width) != self.size:
            raise ImageError(
                f"{describe(self.name, index, record)} is {image.width} x {image.height} pixels, the first one of the train split "
                f"{self.size[1]} x {self.size[0]}: all images must have one size"
            )
        pixels = torch.from_numpy(numpy.array(image.convert(self.mode), dtype=numpy.uint8))
        return pixels.reshape(*self.size, -1).permute(2, 0, 1)

    def gather(self, indices: Tensor | list[int]) -> Tensor:
        """uint8 (B, C, H, W) images of the rows `indices`, int64 (B,), without augmentation."""
        indices = torch.as_tensor(indices, dtype=torch.int64)
        if self.images is not None:
            return self.images.index_select(0, indices.to(self.images.device))
        return torch.stack([self._decode(index, self.rows[index]["image"]) for index in indices.tolist()])

    def __getitem__(self, key: int) -> Batch:
        images, labels, keys = self.__getitems__([key])
        return images[0], labels[0], keys[0]

    def __getitems__(self, keys: list[int]) -> Batch:
        """The samples that `keys` name (`sampler.pack_key`), as one batch."""
        numbers = torch.tensor(keys, dtype=torch.int64)
        indices = numbers & INDEX_MASK
        images = self.gather(indices)
        if self.transform is not None:
            augmented = []
            for image, key in zip(images, keys, strict=True):
                with seeded(derive_seed(self.seed, "augment", *unpack_key(key))):
                    augmented.append(self.transform(image))
            images = torch.stack(augmented)
        return images, self.labels.index_select(0, indices.to(self.labels.device)), numbers


def identity(batch: Batch) -> Batch:
    """The collate function: `__getitems__` makes whole batches already."""
    return batch


def describe(name: str, index: int, record: dict[str, Any]) -> str:
    path = record.get("path")
    return f"--dataset {name}: image {index}" + (f" ({path})" if path else "")


def open_image(name: str, index: int, record: dict[str, Any]) -> Image.Image:
    """The decoded image of a row.

    Raises:
        ImageError: the file is missing, empty, truncated or no image, or has more than 8 bits a channel.
    """
    try:
        content = record["bytes"]
        image = Image.open(io.BytesIO(content) if content is not None else record["path"])
        image.load()
    except Exception as error:
        raise ImageError(f"{describe(name, index, record)} cannot be read ({error}): replace or remove it") from None
    if image.mode in DEEP_MODES:
        raise ImageError(f"{describe(name, index, record)} has more than 8 bits a channel (mode {image.mode}): convert it first")
    return image
