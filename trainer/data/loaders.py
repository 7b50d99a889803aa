"""The data of a run: decoded, measured, cut into batches, ready for `Accelerator.prepare`."""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import psutil
import torch
from torch.utils.data import DataLoader

from trainer.config import Config
from trainer.data.dataset import GREY_MODES, Batch, ImageDataset, Transform, identity, open_image
from trainer.data.row_groups import StreamedRows
from trainer.data.sampler import BatchPlan, EpochSampler, RankBatchSampler
from trainer.data.sources import Source, load_source
from trainer.data.stream import BlockSampler, StreamedImages, lanes_of, plan_reading
from trainer.data.transforms import pixel_statistics
from trainer.runtime import Processes, UserError
from trainer.stops import leave_signals_to_trainer

DEFAULT_BATCH_SIZE = 32
# The values of --cache, the fastest first.
CACHES = ("device", "ram", "none")
# Two BatchNorm layers after two poolings need at least two values for each channel, also in a batch of one image.
SMALLEST_SIDE = 4
# Images of a streamed train split that tell its mean and deviation.
SAMPLE = 5000


@dataclass(frozen=True)
class Data:
    """Both splits and what is known of them.

    Attributes:
        train, test: the splits.
        test_split: the test split's name in the data set.
        classes: class names in the order of their numbers.
        mean, std: what `Normalize` subtracts and divides by, for each channel, pixels scaled to 0..1.
        plan: how an epoch is cut into batches.
    """

    train: ImageDataset
    test: ImageDataset
    test_split: str
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    plan: BatchPlan

    @cached_property
    def fingerprint(self) -> dict[str, Any]:
        """What the positions in an epoch refer to, for a resume to compare; made once."""
        blocks = {}
        if isinstance(self.train.rows, StreamedRows):
            blocks = {"row groups": hashlib.sha256(self.train.rows.blocks.numpy().tobytes()).hexdigest()[:12]}
        return blocks | {
            "train": len(self.train),
            "test": len(self.test),
            "classes": list(self.classes),
            "shape": list(self.train.shape),
            "labels": hashlib.sha256(self.train.labels.numpy().tobytes()).hexdigest()[:12],
        }


def load_data(config: Config, processes: Processes, transform: Transform | None = None) -> Data:
    """Find, open, decode and measure the data; local rank 0 of each host first. A collective.

    Args:
        config: `dataset`, `cache`, `num_workers`, `normalize` and the batch sizes rule.
        processes: all of them take part and fail together.
        transform: augmentation of training images, see `ImageDataset`.

    Raises:
        UserError: the data set, an image, a batch size or the cache is not as it must be.
    """
    source = find_source(config, processes)
    with processes.together():
        plan = plan_batches(config, len(source.train_labels), processes.count)
        train, test = open_splits(source, config, transform)
        fits = places(train.nbytes() + test.nbytes(), config, processes, transform)
        if config.streaming:
            plan_reading(train.rows, test.rows, config, processes)
    common = set.intersection(*processes.all_gather(fits))
    cache = next(place for place in CACHES if place in common) if config.cache == "auto" else config.cache
    with processes.together():
        if cache != "none":
            train.decode_all()
            test.decode_all()
        if cache == "device":
            train.to(processes.state.device)
            test.to(processes.state.device)
        mean, std = (0.0,) * train.shape[0], (1.0,) * train.shape[0]
        sample = train.rows.spread(SAMPLE) if isinstance(train.rows, StreamedRows) else None
        if config.normalize == "dataset" and (sample is None or processes.is_main):
            mean, std = pixel_statistics(train, sample)
    if sample is not None:
        # One rank alone has read them.
        mean, std = processes.broadcast((mean, std))
    return Data(train, test, source.test_split, source.classes, mean, std, plan)


def find_source(config: Config, processes: Processes) -> Source:
    """Find and open the data set. A collective.

    Raises:
        UserError: as `load_source`.
    """
    if not config.streaming:
        return processes.local_main_first(lambda: load_source(config.dataset))
    # Nothing is kept on the disk for the other ranks to find; all of them at once, they would ask the Hub for each footer and label.
    found: list[Source | None] = [None]
    with processes.together():
        if processes.is_main:
            found = [load_source(config.dataset, streaming=True)]
    source = processes.broadcast(found[0])
    assert source is not None
    return source


def places(nbytes: int, config: Config, processes: Processes, transform: Transform | None) -> set[str]:
    """Where this rank can keep `nbytes` of decoded images.

    Raises:
        UserError: `--cache device` contradicts another flag.
    """
    device = processes.state.device
    # Images are augmented one by one on the CPU, and a worker that was forked cannot use CUDA.
    bound = "--num_workers" if config.num_workers else "an augmentation that works on single images" if transform is not None else None
    if config.cache == "device" and device.type != "cpu" and bound is not None:
        raise UserError(f"--cache device keeps the images where {bound} cannot reach them: use --cache ram")
    found = {"none"}
    if config.streaming:
        return found
    if nbytes * processes.local_count <= psutil.virtual_memory().available / 2:
        found.add("ram")
    if device.type == "cuda" and bound is None and nbytes <= torch.cuda.mem_get_info(device)[0] / 4:
        found.add("device")
    return found


def open_splits(source: Source, config: Config, transform: Transform | None) -> tuple[ImageDataset, ImageDataset]:
    """Train and test split, undecoded; the first training image tells the size and whether all are grey or colour.

    Raises:
        UserError: that image is broken or too small.
    """
    first = open_image(source.name, 0, source.train[0]["image"])
    if min(first.size) < SMALLEST_SIDE:
        raise UserError(f"--dataset {source.name}: images are {first.width} x {first.height} pixels, at least {SMALLEST_SIDE} are needed")
    mode, size = "L" if first.mode in GREY_MODES else "RGB", (first.height, first.width)
    kind = StreamedImages if config.streaming else ImageDataset
    train = kind(source.name, source.train, source.train_labels, mode, size, transform, config.seed)
    test = ImageDataset(f"{source.name} ({source.test_split})", source.test, source.test_labels, mode, size)
    return train, test


def plan_batches(config: Config, samples: int, processes: int) -> BatchPlan:
    """The batch size of a process, from --batch_size or --global_batch_size.

    Raises:
        UserError: the global batch cannot be divided, the two contradict each other, or there are fewer images than processes.
    """
    accumulation = config.gradient_accumulation_steps
    batch_size = config.batch_size or DEFAULT_BATCH_SIZE
    if config.global_batch_size is not None:
        batch_size, rest = divmod(config.global_batch_size, processes * accumulation)
        if rest or batch_size == 0:
            raise UserError(
                f"--global_batch_size {config.global_batch_size} cannot be divided by {processes} processes x {accumulation} "
                f"accumulation steps: choose a multiple of {processes * accumulation}"
            )
        if config.batch_size not in (None, batch_size):
            raise UserError(
                f"--batch_size {config.batch_size} x {processes} processes x {accumulation} accumulation steps is not "
                f"--global_batch_size {config.global_batch_size}: leave one of them out"
            )
    if samples < processes:
        raise UserError(f"the train split has {samples} images, fewer than the {processes} processes: use fewer processes")
    return BatchPlan(samples, processes, batch_size, accumulation)


def build_loaders(data: Data, config: Config, device: torch.device) -> tuple[DataLoader[Batch], DataLoader[Batch], EpochSampler]:
    """Train loader and evaluation loader, still to be prepared, with even_batches=False and True; the train loader's sampler."""
    options: dict[str, Any] = {
        "collate_fn": identity,
        "num_workers": config.num_workers,
        "persistent_workers": config.num_workers > 0,
        "worker_init_fn": leave_signals_to_trainer,
        # What is on the device already cannot be pinned.
        "pin_memory": device.type == "cuda" and data.train.labels.device.type == "cpu",
    }
    sampler = EpochSampler(len(data.train), config.seed)
    if isinstance(data.train.rows, StreamedRows):
        sampler = BlockSampler(data.train.rows.blocks, config.seed, config.shuffle_buffer, lanes_of(data.train.rows))
    train = DataLoader(data.train, batch_sampler=RankBatchSampler(sampler, data.plan), **options)
    largest_share = -(-len(data.test) // data.plan.processes)
    test = DataLoader(data.test, batch_size=min(config.eval_batch_size, largest_share), **options)
    return train, test, sampler
