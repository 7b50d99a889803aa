"""Small data sets whose images say which one they are, and runs built on them."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import torch
from PIL import Image
from torch import Tensor, nn

from trainer.accelerator import build_accelerator
from trainer.config import Config
from trainer.data.dataset import Transform
from trainer.data.loaders import load_data
from trainer.hooks.base import Hook, HookList
from trainer.hooks.gather_metrics import GatherMetrics
from trainer.hooks.save_on_main import SaveOnMain
from trainer.hooks.seed_processes import SeedProcesses
from trainer.hooks.set_epoch import SetEpoch
from trainer.runtime import Processes, join, leave_group
from trainer.state import Run, build_run

ROOT = Path(__file__).resolve().parent.parent
SIDE = 8


def ids_image(index: int) -> Image.Image:
    """Grey, 8 x 8; the first two pixels hold `index`, the others noise that depends on it."""
    pixels = numpy.random.default_rng(index).integers(0, 256, (SIDE, SIDE), dtype=numpy.uint8)
    pixels[0, 0], pixels[0, 1] = index % 256, index // 256
    return Image.fromarray(pixels)


def ids_of(images: Tensor) -> list[int]:
    """The indices that uint8 (B, 1, 8, 8) images hold."""
    return (images[:, 0, 0, 0].int() + 256 * images[:, 0, 0, 1].int()).tolist()


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def write_parquet(file: Path, images: list[Any], labels: list[Any], **features: Any) -> None:
    """A Parquet file in the Hub's image format; `features` names columns and their types, by default image and ClassLabel."""
    import datasets

    image, label = list(features) or ["image", "label"]
    types = features or {"image": datasets.Image(), "label": datasets.ClassLabel(names=[str(n) for n in range(10)])}
    records = [
        {image: {"bytes": content if isinstance(content, bytes) else png(content), "path": None}, label: value}
        for content, value in zip(images, labels, strict=True)
    ]
    datasets.Dataset.from_list(records, features=datasets.Features(types)).to_parquet(str(file))


def write_ids(folder: Path, train: int = 96, test: int = 16) -> Path:
    """A data set of `train` + `test` numbered images, labels 0..9 in turn."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", train), ("test", test)):
        write_parquet(folder / f"{split}.parquet", [ids_image(i) for i in range(count)], [i % 10 for i in range(count)])
    return folder


def make_run(
    processes: Processes, dataset: Path | str, module: nn.Module | None = None, transform: Transform | None = None, **knobs: Any
) -> Run:
    """A run as main.py builds it, without an output folder of its own unless `output_dir` is among the knobs."""
    config = Config(dataset=str(dataset), **knobs)
    accelerator = build_accelerator(config, processes)
    data = load_data(config, processes, transform)
    run = build_run(config, processes, data, accelerator, module)
    run.output_dir = Path(config.output_dir or "unused")
    return run


def needed_hooks(*more: Hook) -> HookList:
    return HookList((SetEpoch(), SeedProcesses(), GatherMetrics(), SaveOnMain(), *more))


def tensors(module: nn.Module) -> dict[str, Tensor]:
    """Weights and buffers, copied."""
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def largest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """max over tensors of ||a - b|| / ||b||."""
    assert one.keys() == other.keys()
    return max(
        float(torch.linalg.vector_norm((one[k] - other[k]).double()) / (torch.linalg.vector_norm(other[k].double()) or 1)) for k in one
    )


@contextmanager
def alone_run(dataset: Path | str, **arguments: Any) -> Iterator[Run]:
    """`make_run` in this process, as the only one."""
    processes = join()
    try:
        yield make_run(processes, dataset, **arguments)
    finally:
        leave_group(processes)


class Rows(list[dict[str, Any]]):
    """Rows as a `datasets.Dataset` gives them: one by its number, several as a mapping of columns."""

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, int):
            return super().__getitem__(place)
        rows = super().__getitem__(place) if isinstance(place, slice) else [super(Rows, self).__getitem__(number) for number in place]
        return {name: [row[name] for row in rows] for name in self[0]}
