"""A hand-written script as the subject of an inspection."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from trainer.checks.base import Images
from trainer.runtime import CONTROL_TIMEOUT, Processes


@contextmanager
def script_processes() -> Iterator[Processes]:
    """The processes that the script has joined, whoever joined them, with a gloo group for messages inside the block. A collective."""
    joined = dist.is_initialized()
    state: Any = SimpleNamespace(process_index=dist.get_rank() if joined else 0, num_processes=dist.get_world_size() if joined else 1)
    control = dist.new_group(backend="gloo", timeout=CONTROL_TIMEOUT) if joined else None
    try:
        yield Processes(state, control)
    finally:
        if control is not None:
            dist.destroy_process_group(control)


def device_of(model: nn.Module | None, accelerator: Any) -> torch.device:
    parameter = next(model.parameters(), None) if model is not None else None
    if parameter is not None:
        return parameter.device
    return torch.device(accelerator.device) if accelerator is not None else torch.device("cpu")


def forward(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """Of a batch (images, labels), on the model's device."""
    device = next(model.parameters()).device
    images, labels = batch
    return model(images.to(device)), labels.to(device)


def images_of(**loaders: Any) -> tuple[Images, ...] | None:
    """The map data sets of the loaders."""
    found = tuple(
        Images(name, len(loader.dataset), loader.dataset.__getitem__)
        for name, loader in loaders.items()
        if loader is not None and not isinstance(loader.dataset, IterableDataset)
    )
    return found or None
