"""`--streaming`: images read from Parquet files, local or of the Hub, by row groups, when they are needed; nothing is copied first.

A streamed split is still a map data set, whose rows have numbers, so that shards, workers, batches, resume and augmentation are those
of any other. What makes it a stream is its order: a function of (seed, epoch) in which the rows of a row group come near each other,
so that a process reads each row group once an epoch and holds few of them.

    row groups in a new order      | 7 7 7 7 | 2 2 2 2 | 5 5 5 5 | 0 0 0 0 | 4 4 4 4 | 1 1 1 1 | …   and the rows inside of each
    cut into lanes of equal size   | 7 7 7 7   2 2 2 2   5 5 | 5 5   0 0 0 0   4 4 4 4 | …
    each lane mixed as it goes     | 7 2 7 7   2 5 2 7   2 5 | …                                     over its part of --shuffle_buffer
    one row of each lane in turn   lane 0, lane 1, …, lane 7, lane 0, …                              the order of the epoch

Batches are dealt out to N ranks one by one (sampler.py), so that a rank reads the lanes of its own only, whenever N divides the number
of lanes, and the order does not depend on N. Lanes are cut by rows, not by files: they end together, however unequal the files.
"""

import math

import psutil
import torch
from torch import Tensor

from trainer.config import Config
from trainer.data.dataset import Batch, ImageDataset
from trainer.data.row_groups import StreamedRows
from trainer.data.sampler import EpochSampler, unpack_key
from trainer.data.spool import Spool
from trainer.runtime import Processes, UserError
from trainer.seeding import derive_seed

# Enough to be dealt out to 1, 2, 4 or 8 processes, and for a batch to come from so many places.
LANES = 8
# Two row groups of each lane may be needed at once; of larger ones there are fewer lanes.
LANE_BYTES = 1 << 30
# Row groups that a process reads ahead, over all of its lanes.
READ_AHEAD = 8


class BlockSampler(EpochSampler):
    """The order of a streamed epoch, as this module's head draws it.

    Args:
        blocks: int64 (row groups,), rows of each.
        buffer: rows that are mixed with each other, over all lanes.
        lanes: see `lanes_of`.
    """

    def __init__(self, blocks: Tensor, seed: int, buffer: int, lanes: int) -> None:
        super().__init__(int(blocks.sum()), seed)
        self.blocks = blocks
        self.lanes = lanes
        self.reach = reach(buffer, lanes)

    def _order(self) -> Tensor:
        place = block_places(len(self.blocks), self.seed, self.epoch).repeat_interleave(self.blocks)
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "order", self.epoch))
        inside, delay = torch.rand((2, self.samples), dtype=torch.float64, generator=generator)
        sequence = torch.argsort(place + inside, stable=True)
        order, start = torch.empty_like(sequence), 0
        for lane, size in enumerate(lane_sizes(self.samples, self.lanes)):
            rows = slice(start, start + size)
            # A shuffle buffer without a state, for any position to be computed: a row moves by up to `reach` rows.
            late = torch.arange(size) + self.reach * delay[rows]
            order[lane :: self.lanes] = sequence[rows][torch.argsort(late, stable=True)]
            start += size
        return order


class StreamedImages(ImageDataset):
    """A train split that reads ahead in the order of the epoch which its keys name."""

    followed: int | None = None

    def __getitems__(self, keys: list[int]) -> Batch:
        epoch, _ = unpack_key(keys[0])
        if epoch != self.followed:
            self.followed = epoch
            follow(self.rows, self.seed, epoch)
        return super().__getitems__(keys)


def follow(rows: StreamedRows, seed: int, epoch: int) -> None:
    """Let the rows read ahead in the order of the epoch, up to the end of a lane."""
    order = block_places(len(rows.blocks), seed, epoch).argsort()
    starts = rows.blocks[order].cumsum(0) - rows.blocks[order]
    lane_ends = torch.tensor(lane_sizes(len(rows), lanes_of(rows))).cumsum(0)
    # Another rank, as a rule, reads on where a lane has ended.
    rows.follow(order, torch.searchsorted(lane_ends, starts, right=True).diff() != 0)


def block_places(blocks: int, seed: int, epoch: int) -> Tensor:
    """int64 (blocks,): where each row group comes in an epoch."""
    return torch.randperm(blocks, generator=torch.Generator().manual_seed(derive_seed(seed, "row groups", epoch)))


def lanes_of(rows: StreamedRows) -> int:
    """Places of the split that the order goes through at once; a function of the files alone, the same for any number of processes."""
    lanes = LANES
    while lanes > 1 and 2 * lanes * rows.largest > LANE_BYTES:
        lanes //= 2
    return lanes


def lane_sizes(samples: int, lanes: int) -> list[int]:
    """Rows of each lane: one of each in turn are the whole epoch."""
    return [len(range(lane, samples, lanes)) for lane in range(lanes)]


def reach(buffer: int, lanes: int) -> int:
    """Rows of a lane that are mixed with each other."""
    return math.ceil(buffer / lanes)


def plan_reading(train: StreamedRows, test: StreamedRows, config: Config, processes: Processes) -> None:
    """Decide how many rows a process keeps, and let a rank's workers fetch for each other what comes from the Hub.

    (Of files on this machine, the operating system keeps what one worker has read for the others.)

    Raises:
        UserError: what is kept does not fit into half of the host's free memory.
    """
    lanes = lanes_of(train)
    # All of them where the number of processes has no common divisor with theirs.
    own = lanes // math.gcd(lanes, processes.count)
    # Several workers read at once anyway, each for batches of its own; only what they fetch for each other is worth it.
    train.ahead = 0 if config.num_workers > 1 and not train.remote else max(1, READ_AHEAD // own)
    # Between two rows of a row group a lane has rows of its neighbours, up to `reach` before and behind it: to read it once, those are
    # kept, the outermost as a whole. Fewer would only cost time.
    train.capacity = own * (2 * reach(config.shuffle_buffer, lanes) + (3 + train.ahead) * max(train.sizes))
    # It is read from one end to the other.
    test.capacity = 2 * max(test.sizes)
    loading = processes.local_count * max(1, config.num_workers)
    kept, free = loading * sum(rows.nbytes(rows.capacity) for rows in (train, test)), psutil.virtual_memory().available
    if kept > free / 2:
        raise UserError(
            f"{config.data_flag}: with --streaming, the {loading} loading processes of this host keep {kept / 1e9:.3g} GB, and "
            f"{free / 1e9:.3g} GB are free: lower --num_workers or --shuffle_buffer ({config.shuffle_buffer}), or save the files with "
            f"smaller row groups (the largest has {max(train.sizes + test.sizes)} images)"
        )
    for rows in (train, test):
        if config.num_workers > 1 and rows.remote:
            # Twice: not all workers are at the same place of the epoch.
            rows.spool = spool = Spool(2 * rows.nbytes(rows.capacity))
            # At a sudden end too, which Python's own clearing up is not part of.
            processes.at_exit.append(lambda code, reason, spool=spool: spool.remove())  # type: ignore[misc]
