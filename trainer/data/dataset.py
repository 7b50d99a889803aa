"""A split as a map data set of whole batches: keys in, uint8 images and labels out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from trainer.data.decode import Crop, ImageError, SizeError, decode, random_part
from trainer.data.sampler import INDEX_MASK, unpack_key
from trainer.seeding import derive_seed, seeded, uniform
from trainer.stops import leave_signals_to_trainer

# Rows that are read at once; one by one, `datasets` takes longer than decoding them.
ROWS = 1024
# Images that are worth the start of workers: they take some 50 us each, a worker some 50 ms.
MANY = 8 * ROWS
# The label of an image that is left out, which torch's cross-entropy ignores too.
LEFT_OUT = -100

# uint8 images (B, C, H, W), int64 class numbers (B,), int64 keys (B,) of the samples (sampler.py); see `ImageDataset.on_bad`.
Batch = tuple[Tensor, Tensor, Tensor]
Transform = Callable[[Tensor], Tensor]
Array = numpy.ndarray[Any, Any]
T = TypeVar("T")


@dataclass(frozen=True)
class Shape:
    """What every image becomes.

    Attributes:
        mode: 'L' (grey, C = 1) or 'RGB' (C = 3).
        size: (height, width), pixels.
        resize: images of another size are cut and resized to it; else they are refused.
    """

    mode: str
    size: tuple[int, int]
    resize: bool = False


class ImageDataset(Dataset[Batch]):
    """Images of one size, uint8 (C, H, W), with class numbers and keys; decoded once into memory by `decode_all`, else each time.

    Decoded images are cut into batches by one indexing operation; `to` moves them to a device, and batches then come from there.

    Args:
        name: what error messages call it.
        rows: a `datasets.Dataset` with the undecoded column `image`; a slice or a list of its rows is a mapping of columns.
        labels: one class number for each row.
        shape: what every image becomes.
        transform: augmentation of one uint8 (C, H, W) image, by any generator of torch (CPU), numpy or random: all three are seeded from
            (seed, epoch, sample), so that a sample's draw does not depend on processes and workers.
        seed: the run's seed.
        random_crop: another part of each image in each epoch, a function of (seed, epoch, sample); the images cannot be kept decoded then.
        on_bad: an image that cannot be read ends the run ('error'), is replaced by the next good one in the order of the rows, with that
            one's label, and its key k becomes the negative ~k ('replace'), or is black and has the label `LEFT_OUT` ('leave out').
        numbers: the numbers of the rows for error messages, where they are not 0, 1, 2, …
    """

    def __init__(
        self,
        name: str,
        rows: Any,
        labels: list[int],
        shape: Shape,
        transform: Transform | None = None,
        seed: int = 0,
        *,
        random_crop: bool = False,
        on_bad: Literal["error", "replace", "leave out"] = "error",
        numbers: list[int] | None = None,
    ) -> None:
        self.name = name
        self.rows = rows
        self.labels = torch.tensor(labels, dtype=torch.int64)
        self.mode, self.size, self.resize = shape.mode, shape.size, shape.resize
        self.transform = transform
        self.seed = seed
        self.random_crop = random_crop
        self.on_bad = on_bad
        self.numbers = numbers
        self.images: Tensor | None = None
        # Of decoded images: which row each one is read from, on their device, and which could not be read; None where all could.
        self.sources: Tensor | None = None
        self.bad: Tensor | None = None

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

    def decode_all(self, workers: int = 1) -> None:
        """Keep all images decoded in memory.

        Args:
            workers: processes that decode; what takes a moment only is decoded here.

        Raises:
            ImageError: an image is broken or has another size.
        """
        assert not self.random_crop
        images = torch.empty((len(self), *self.shape), dtype=torch.uint8)
        loader = DataLoader(
            Parts(self),
            batch_size=None,
            num_workers=workers if workers > 1 and len(self) >= MANY else 0,
            collate_fn=identity,
            worker_init_fn=leave_signals_to_trainer,
        )
        sources, bad = [], []
        parts = iter(loader)
        try:
            for place, (part, source, wrong) in zip(images.split(ROWS), parts, strict=True):
                place.copy_(torch.from_numpy(part))
                sources.append(torch.from_numpy(source))
                bad.append(torch.from_numpy(wrong))
        finally:
            # An error's frames keep the iterator, and with it workers that ignore the signal which Python ends them by.
            if loader.num_workers:
                parts._shutdown_workers()  # type: ignore[attr-defined]
        self.images = images
        self.rows = None
        if any(map(torch.any, bad)):
            self.sources, self.bad = torch.cat(sources), torch.cat(bad)

    def to(self, device: torch.device) -> None:
        """Move the decoded images, and the labels, to `device`."""
        assert self.images is not None
        self.images, self.labels = self.images.to(device), self.labels.to(device)
        if self.sources is not None:
            self.sources = self.sources.to(device)

    def open(self, index: int) -> Tensor:
        """The image of a row, uint8 (C, H, W), whatever `on_bad` says.

        Raises:
            ImageError: it is broken or has another size.
        """
        return self._decode(index, self.rows[index]["image"])

    def gather(self, indices: Tensor | Sequence[int]) -> Tensor:
        """uint8 (B, C, H, W) images of the rows `indices`, int64 (B,), without augmentation."""
        return self._gather(torch.as_tensor(indices, dtype=torch.int64))[0]

    def _gather(self, indices: Tensor, keys: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
        """The images, the rows that they are read from, and which of `indices` could not be read: None where all can.

        Args:
            keys: of the samples; cuts out of each image the part of its key's epoch, where that is wanted.
        """
        if self.images is not None:
            places = indices.to(self.images.device)
            if self.sources is None or self.bad is None:
                return self.images.index_select(0, places), places, None
            return self.images.index_select(0, places), self.sources.index_select(0, places), self.bad.index_select(0, indices)
        images = torch.empty((len(indices), *self.shape), dtype=torch.uint8)
        crops: list[Crop] | None = None
        if keys is not None and self.random_crop:
            draws = uniform(derive_seed(self.seed, "crop"), keys, 4).tolist()
            crops = [random_part(self.size, *numbers) for numbers in draws]
        sources, bad = self._read(indices.tolist(), images, crops)
        return images, sources, bad if self.on_bad != "error" else None

    def _read(self, indices: Sequence[int], images: Tensor, crops: Sequence[Crop] | None = None) -> tuple[Tensor, Tensor]:
        """Decode the rows `indices` into `images`; returns the rows that they are read from, and which of `indices` could not be read."""
        sources, bad = torch.tensor(indices), torch.zeros(len(indices), dtype=torch.bool)
        for place, (index, record) in enumerate(zip(indices, self.rows[indices]["image"], strict=True)):
            crop = crops[place] if crops is not None else None
            try:
                images[place] = self._decode(index, record, crop)
            except ImageError as error:
                if self.on_bad == "error" or isinstance(error, SizeError):
                    raise
                bad[place] = True
                sources[place], images[place] = self._stand_in(index, crop) if self.on_bad == "replace" else (index, 0)
        return sources, bad

    def _stand_in(self, index: int, crop: Crop | None) -> tuple[int, Tensor]:
        """The next good row after a bad one, and its image."""
        for other in (*range(index + 1, len(self)), *range(index)):
            try:
                return other, self._decode(other, self.rows[other]["image"], crop)
            except SizeError:
                raise
            except ImageError:
                continue
        raise ImageError(f"{self.name}: none of its {len(self)} images can be read: replace them")

    def _decode(self, index: int, record: dict[str, Any] | None, crop: Crop | None = None) -> Tensor:
        number = self.numbers[index] if self.numbers is not None else index
        return decode(self.name, number, record, self.mode, self.size, crop, self.resize)

    def __getitem__(self, key: int) -> Batch:
        images, labels, keys = self.__getitems__([key])
        return images[0], labels[0], keys[0]

    def __getitems__(self, keys: list[int]) -> Batch:
        """The samples that `keys` name (`sampler.pack_key`), as one batch."""
        numbers = torch.tensor(keys, dtype=torch.int64)
        images, sources, bad = self._gather(numbers & INDEX_MASK, numbers)
        if self.transform is not None:
            augmented = []
            for image, key in zip(images, keys, strict=True):
                with seeded(derive_seed(self.seed, "augment", *unpack_key(key))):
                    augmented.append(self.transform(image))
            images = torch.stack(augmented)
        labels = self.labels.index_select(0, sources.to(self.labels.device))
        if bad is not None:
            numbers = torch.where(bad, ~numbers, numbers)
            if self.on_bad == "leave out":
                labels = labels.masked_fill(bad.to(labels.device), LEFT_OUT)
        return images, labels, numbers


class Parts(Dataset[tuple[Array, Array, Array]]):
    """A split in parts of `ROWS` rows: images, the rows that they are read from, and which could not be read.

    As arrays, which come from a worker through a pipe: tensors would come through shared memory, of which a container has 64 MB.
    """

    def __init__(self, split: ImageDataset) -> None:
        self.split = split

    def __len__(self) -> int:
        return -(-len(self.split) // ROWS)

    def __getitem__(self, part: int) -> tuple[Array, Array, Array]:
        rows = range(part * ROWS, min((part + 1) * ROWS, len(self.split)))
        images = torch.empty((len(rows), *self.split.shape), dtype=torch.uint8)
        sources, bad = self.split._read(rows, images)
        return images.numpy(), sources.numpy(), bad.numpy()


def identity(batch: T) -> T:
    """The collate function: `__getitems__` makes whole batches already."""
    return batch
