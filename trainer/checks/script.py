"""A hand-written script as the subject of an inspection."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from trainer.checks.base import Images, unwrap
from trainer.checks.loaders import first_batches


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


def resuming(
    model: nn.Module,
    optimizer: Any,
    train_loader: Any,
    train_step: Callable[[Any], Any],
    save: Callable[[Path], Any],
    load: Callable[[Path], Any],
) -> Callable[[Path], Iterator[dict[str, Tensor] | None]]:
    """`Subject.resumed` of a script, which cannot be built anew: instead its weights and its optimizer's state are zeroed before `load`."""
    module, plain = unwrap(model), getattr(optimizer, "optimizer", optimizer)

    def held() -> list[Tensor]:
        return [value for content in plain.state.values() for value in content.values() if isinstance(value, Tensor)]

    def train_on(batch: Any) -> dict[str, Tensor]:
        # What the script does about generators is its own affair: the same ones in both.
        torch.manual_seed(0)
        train_step(batch)
        tensors = {f"weights/{name}": tensor for name, tensor in module.state_dict().items()}
        tensors |= {f"optimizer/{number}": tensor for number, tensor in enumerate(held())}
        return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}

    def resumed(folder: Path) -> Iterator[dict[str, Tensor] | None]:
        batches = first_batches(train_loader, 2)
        yield None
        model.train()
        train_step(batches[0])
        yield None
        save(folder)
        yield None
        yield train_on(batches[-1])
        with torch.no_grad():
            for tensor in (*module.state_dict().values(), *held()):
                tensor.zero_()
        load(folder)
        yield None
        yield train_on(batches[-1])

    return resumed
