"""The data of a run: decoded, measured, cut into batches, ready for `Accelerator.prepare`."""

import hashlib
import math
import tempfile
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from trainer.config import SMALLEST_SIDE, Config
from trainer.cpu import cores
from trainer.data.dataset import Batch, ImageDataset, Shape, Transform, identity
from trainer.data.decode import GREY_MODES, ImageError, describe, open_image, true_size
from trainer.data.row_groups import StreamedRows
from trainer.data.sampler import BatchPlan, EpochSampler, RankBatchSampler
from trainer.data.sources import Source, load_eval_source, load_source
from trainer.data.stream import BlockSampler, StreamedImages, lanes_of, plan_reading
from trainer.data.transforms import normalisation, spread
from trainer.runtime import Processes, UserError
from trainer.stops import leave_signals_to_trainer

DEFAULT_BATCH_SIZE = 32
# The values of --cache, the fastest first.
CACHES = ("device", "ram", "none")
# The values of --augment that torchvision does.
PRESETS = ("trivialaugment", "randaugment")
# Training images whose headers tell the channels, and the size.
LOOKED_AT = 64

# 107 characters, unix(7), less the 32 that Python adds.
LONGEST_TEMPORARY = 75
# Pixels of an image, at most.
SMALL_IMAGE = 32 * 32


@dataclass(frozen=True)
class Data:
    """Both splits and what is known of them.

    Attributes:
        train, test: the splits.
        test_split: the test split's name in the data set.
        classes: class names in the order of their numbers.
        mean, std: what `Normalize` subtracts and divides by, for each channel, pixels scaled to 0..1.
        plan: how an epoch is cut into batches.
        held_out: rows of the data set's train split that are not trained on but evaluated on; None where it has a split for that.
        about: what was found out about the images, in words.
        fitted: how `--auto_batch_size` has changed the plan, in words; None when it has not.
    """

    train: ImageDataset
    test: ImageDataset
    test_split: str
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    plan: BatchPlan
    held_out: list[int] | None = None
    about: str = ""
    fitted: str | None = None

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
            "labels": _digest(self.train.labels),
            **({"held_out": _digest(torch.tensor(self.held_out))} if self.held_out is not None else {}),
        }


def _digest(numbers: Tensor) -> str:
    return hashlib.sha256(numbers.cpu().numpy().tobytes()).hexdigest()[:12]


def load_data(config: Config, processes: Processes, transform: Transform | None = None) -> Data:
    """Find, open, decode and measure the data; local rank 0 of each host first. A collective.

    Args:
        config: its first section rules.
        processes: all of them take part and fail together.
        transform: augmentation of training images, see `ImageDataset`.

    Raises:
        UserError: the data set, an image, a batch size or the cache is not as it must be.
    """
    check_workers(config, processes)
    source = find_source(config, processes)
    refuse_unequal(config, processes, source.classes, source.train_labels, source.test_labels)
    with processes.together():
        plan = plan_batches(config, len(source.train_labels), processes.count)
        if config.augment in PRESETS:
            from trainer.data.presets import Chain, Preset

            transform = Preset(config.augment) if transform is None else Chain(Preset(config.augment), transform)
        train, test, about = open_splits(source, config, transform)
        if train.random_crop and config.cache in ("device", "ram"):
            raise UserError(
                f"--cache {config.cache} keeps each image at its final size, but --augment {config.augment} takes another part of it in "
                "each epoch: leave --cache out"
            )
        if config.streaming:
            plan_reading(train.rows, test.rows, config, processes)
        kept = [split for split in (train, test) if not split.random_crop]
        fits = places(sum(split.nbytes() for split in kept), config, processes, transform)
    common = set.intersection(*processes.all_gather(fits))
    cache = next(place for place in CACHES if place in common) if config.cache == "auto" else config.cache
    with processes.together():
        for split in kept:
            if cache != "none":
                # This process's share of the cores; its threads have nothing to do yet.
                split.decode_all(min(torch.get_num_threads(), cores()))
            if cache == "device":
                split.to(processes.state.device)
    mean, std = normalisation(config.normalize, train, processes)
    return Data(train, test, source.test_split, source.classes, mean, std, plan, source.test_numbers, about)


def check_workers(config: Config, processes: Processes) -> None:
    """Refuse data workers whose socket, TEMPORARY/pymp-xxxxxxxx/listener-xxxxxxxx, would have a path that the kernel does not take.

    Raises:
        UserError: it would be too long; the run would wait for them for ever.
    """
    with processes.together():
        if config.num_workers and len(tempfile.gettempdir()) > LONGEST_TEMPORARY:
            raise UserError(
                f"--num_workers {config.num_workers}: the path of the temporary folder, {tempfile.gettempdir()}, is too long for workers' "
                f"sockets: set TMPDIR to one of {LONGEST_TEMPORARY} characters at most"
            )


def load_eval_data(config: Config, processes: Processes, classes: tuple[str, ...], shape: Shape) -> Data:
    """The split that a trained model is evaluated on; the train split of the result is the same one, and not for training. A collective.

    Args:
        config: its first section rules.
        classes, shape: the model's.

    Raises:
        UserError: the data set is not as it must be, or has a class that the model does not know.
    """
    check_workers(config, processes)
    source = processes.local_main_first(lambda: load_eval_source(config, classes))
    refuse_unequal(config, processes, classes, source.labels)
    split = ImageDataset(
        f"{source.name} ({source.split})",
        source.rows,
        source.labels,
        shape,
        on_bad="leave out" if config.on_bad_image == "skip" else "error",
        numbers=source.numbers,
    )
    plan = BatchPlan(len(split), processes.count, 1, 1)
    return Data(split, split, source.split, classes, (), (), plan, source.numbers)


def find_source(config: Config, processes: Processes) -> Source:
    """Find and open the data set. A collective.

    Raises:
        UserError: as `load_source`.
    """
    if not config.streaming:
        return processes.local_main_first(lambda: load_source(config))
    # Nothing is kept on the disk for the other ranks to find; all of them at once, they would ask the Hub for each footer and label.
    found: list[Source | None] = [None]
    with processes.together():
        if processes.is_main:
            found = [load_source(config)]
    source = processes.broadcast(found[0])
    assert source is not None
    return source


def refuse_unequal(config: Config, processes: Processes, classes: tuple[str, ...], *labels: list[int]) -> None:
    """Refuse splits that are not the same on all ranks, as another host's copy or a function of one's own can make them. A collective.

    Raises:
        UserError: naming a rank; the same on all of them.
    """
    own = (classes, [(len(split), _digest(torch.tensor(split))) for split in labels])
    everyone = processes.all_gather(own)
    other = next((rank for rank, theirs in enumerate(everyone) if theirs != everyone[0]), None)
    if other is not None:
        sizes = (" and ".join(f"{size}" for size, _ in everyone[rank][1]) for rank in (0, other))
        raise UserError(
            f"{config.data_flag} is not the same on all processes (rank 0 has {next(sizes)} images, rank {other} {next(sizes)}; their "
            "labels differ): give all hosts the same files, and let a function of your own draw nothing that is not seeded",
            agreed=True,
        )


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


def open_splits(source: Source, config: Config, transform: Transform | None) -> tuple[ImageDataset, ImageDataset, str]:
    """Train and test split, undecoded, and what was found out about the images; from the headers of `LOOKED_AT` training images.

    Raises:
        UserError: they have several sizes while none is asked for, are too small, or one of them is broken.
    """
    skip = config.on_bad_image == "skip"
    colours, looked_at = 0, 0
    sizes: dict[tuple[int, int], str] = {}
    # Of a stream, those that one reading brings.
    rows = source.train.sizes[0] if isinstance(source.train, StreamedRows) else len(source.train)
    indices = spread(rows, LOOKED_AT).tolist()
    for index in indices:
        number = source.train_numbers[index] if source.train_numbers is not None else index
        record = source.train[index]["image"]
        try:
            image = open_image(source.name, number, record)
        except ImageError:
            if not skip:
                raise
            continue
        looked_at += 1
        colours += image.mode not in GREY_MODES
        sizes.setdefault(true_size(image), describe(source.name, number, record))
    if not looked_at:
        raise UserError(f"{source.name}: none of {len(indices)} training images that were looked at can be read: replace them")
    mode = {"auto": "RGB" if colours else "L", "1": "L", "3": "RGB"}[config.channels]
    (height, width), first = next(iter(sizes.items()))
    if config.size is None:
        if len(sizes) > 1:
            (other_height, other_width), other = list(sizes.items())[1]
            raise UserError(
                f"{other} is {other_width} x {other_height} pixels, {first} {width} x {height}: say by --image_size which size all are "
                "to get"
            )
        if min(height, width) < SMALLEST_SIDE:
            raise UserError(
                f"{source.name}: images are {width} x {height} pixels, at least {SMALLEST_SIDE} are needed: enlarge them by --image_size"
            )
    shape = Shape(mode, config.size or (height, width), resize=config.size is not None)
    crop = config.augment != "none" and sizes.keys() != {shape.size}
    train = (StreamedImages if config.streaming else ImageDataset)(
        source.name,
        source.train,
        source.train_labels,
        shape,
        transform,
        config.seed,
        random_crop=crop,
        on_bad="replace" if skip else "error",
        numbers=source.train_numbers,
    )
    test = ImageDataset(
        f"{source.name} ({source.test_split})",
        source.test,
        source.test_labels,
        shape,
        on_bad="leave out" if skip else "error",
        numbers=source.test_numbers,
    )
    found = f"{colours} of {looked_at} images looked at have colours" if colours else f"{looked_at} images looked at are grey"
    about = f"{'colour' if mode == 'RGB' else 'grey'} ({'--channels, ' if config.channels != 'auto' else ''}{found})"
    if sizes.keys() != {shape.size}:
        smallest, largest = min(sizes, key=math.prod), max(sizes, key=math.prod)
        span = " to ".join(f"{width} x {height}" for height, width in dict.fromkeys((smallest, largest)))
        about += f", resized from {span}, {'random parts in training, else ' if crop else ''}the centre"
    return train, test, about


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


def eval_batch_size(config: Config, data: Data, autocast: bool) -> int:
    """`--eval_batch_size`, or what was fastest on a CPU with 28 x 28 images (benchmarks/speed.py); large images need the memory."""
    if config.eval_batch_size is not None:
        return config.eval_batch_size
    _, height, width = data.test.shape
    return 125 if height * width > SMALL_IMAGE else 1000 if autocast else 250


def build_loaders(
    data: Data, config: Config, device: torch.device, autocast: bool = False
) -> tuple[DataLoader[Batch], DataLoader[Batch], EpochSampler]:
    """Train loader and evaluation loader, still to be prepared, with even_batches=False and True; the train loader's sampler."""

    def loader(split: ImageDataset, **batches: Any) -> DataLoader[Batch]:
        return DataLoader(
            split,
            collate_fn=identity,
            num_workers=config.num_workers,
            persistent_workers=config.num_workers > 0,
            worker_init_fn=leave_signals_to_trainer,
            # What is on the device already cannot be pinned.
            pin_memory=device.type == "cuda" and split.labels.device.type == "cpu",
            **batches,
        )

    sampler = EpochSampler(len(data.train), config.seed)
    if isinstance(data.train.rows, StreamedRows):
        sampler = BlockSampler(data.train.rows.blocks, config.seed, config.shuffle_buffer, lanes_of(data.train.rows))
    train = loader(data.train, batch_sampler=RankBatchSampler(sampler, data.plan))
    largest_share = -(-len(data.test) // data.plan.processes)
    return train, loader(data.test, batch_size=min(eval_batch_size(config, data, autocast), largest_share)), sampler
