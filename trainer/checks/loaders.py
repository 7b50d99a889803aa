"""What a loader deals out, asked of the loader itself, with only the reading of images left out."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import Dataset, IterableDataset


class Keys(Dataset[Any]):
    """A data set of `length` samples, each of which is the key that the sampler asked for."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, key: Any) -> Any:
        return key


def is_iterable(loader: Any) -> bool:
    return isinstance(loader.dataset, IterableDataset)


def base(loader: Any) -> Any:
    """torch's DataLoader inside Accelerate's."""
    return getattr(loader, "base_dataloader", loader)


def length(loader: Any) -> int:
    """Samples of the loader's data set."""
    return len(loader.dataset)


@contextmanager
def swapped(loader: Any, **attributes: Any) -> Iterator[None]:
    """The loader with other attributes inside the block; torch forbids to set them, and what they rule is read when an iterator is made."""
    inside = vars(base(loader))
    before = dict(inside)
    inside.update(attributes, _iterator=None, pin_memory=False)
    try:
        yield
    finally:
        inside.clear()
        inside.update(before)


def keys(loader: Any) -> list[list[Any]]:
    """What the sampler yields for each batch of this rank in the epoch that comes next. A collective where Accelerate synchronises."""
    quick = {"num_workers": 0, "prefetch_factor": None, "persistent_workers": False, "worker_init_fn": None, "timeout": 0}
    with swapped(loader, dataset=Keys(length(loader)), collate_fn=list, **quick):
        return list(loader)


def first_batches(loader: Any, number: int) -> list[Any]:
    """The first batches of this rank, at most `number`. A collective where Accelerate synchronises."""
    batches = []
    for batch in loader:
        batches.append(batch)
        if len(batches) == number:
            break
    if hasattr(loader, "end"):
        # Accelerate would keep a loader that is left early on its stack of active ones.
        loader.end()
    return batches
