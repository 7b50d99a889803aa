"""Which sample is trained when, and by which process: a function of (seed, epoch) alone.

The global order is one permutation of the train split for each epoch, the same for any number of processes. It is cut into global
batches of `batch size x processes`, each of which is dealt out to the ranks one by one. A sample travels as a key that carries its
epoch, so that a persistent worker process knows the epoch without a side channel.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, Sampler

from trainer.seeding import derive_seed

EPOCH_SHIFT = 40
INDEX_MASK = (1 << EPOCH_SHIFT) - 1


def pack_key(epoch: int, index: int) -> int:
    """The key of a sample in an epoch: `epoch` in the bits above `EPOCH_SHIFT`, `index` below."""
    return (epoch << EPOCH_SHIFT) | index


def unpack_key(key: int) -> tuple[int, int]:
    """(epoch, index) of a key."""
    return key >> EPOCH_SHIFT, key & INDEX_MASK


@dataclass(frozen=True)
class BatchPlan:
    """How an epoch is cut into micro-batches, one for each forward and backward pass of all ranks, and into updates.

    The last, short micro-batch is split as evenly as possible over the ranks, instead of being filled up with repeated samples; one
    with fewer samples than processes is dropped, because every rank takes part in every collective.

    Attributes:
        samples: size of the train split.
        processes: number of ranks.
        batch_size: images of a rank in a full micro-batch.
        accumulation: micro-batches of a full update.
    """

    samples: int
    processes: int
    batch_size: int
    accumulation: int

    @cached_property
    def global_batch_size(self) -> int:
        """Images of a full update, over all ranks."""
        return self.micro_batch_size * self.accumulation

    @cached_property
    def micro_batch_size(self) -> int:
        """Images of a full micro-batch, over all ranks."""
        return self.batch_size * self.processes

    @cached_property
    def dropped(self) -> int:
        """Samples that an epoch leaves out."""
        tail = self.samples % self.micro_batch_size
        return tail if tail < self.processes else 0

    @cached_property
    def micro_batches(self) -> int:
        """Micro-batches of an epoch."""
        return -(-(self.samples - self.dropped) // self.micro_batch_size)

    @cached_property
    def updates(self) -> int:
        """Updates of an epoch."""
        return -(-self.micro_batches // self.accumulation)

    def rest(self, consumed: int) -> "BatchPlan":
        """The plan of what an epoch still has to train after its first `consumed` samples; its micro-batches count from 0 again.

        After whole updates it cuts the rest as this plan does, and so does the plan of another number of processes whose global batch is
        the same.
        """
        return replace(self, samples=self.samples - consumed)

    def size(self, micro: int) -> int:
        """Images of micro-batch `micro`, counted from 0, over all ranks."""
        return min(self.micro_batch_size, self.samples - self.dropped - micro * self.micro_batch_size)

    def share(self, micro: int, rank: int) -> int:
        """Images of `rank` in micro-batch `micro`."""
        size = self.size(micro)
        return size // self.processes + (rank < size % self.processes)

    def ends_update(self, micro: int) -> bool:
        """Whether an update follows micro-batch `micro`."""
        return (micro + 1) % self.accumulation == 0 or micro + 1 == self.micro_batches

    def update_size(self, micro: int) -> int:
        """Images of the update that micro-batch `micro` is part of, over all ranks and micro-batches."""
        first = micro - micro % self.accumulation
        return min(self.global_batch_size, self.samples - self.dropped - first * self.micro_batch_size)

    def loss_weight(self, micro: int, rank: int) -> float:
        """The factor of a rank's mean loss that makes DDP's mean over ranks the gradient of the mean over the update's images.

        DDP averages gradients over N ranks, so the sum over ranks and micro-batches of (weight / N) x (mean over n images) is the
        mean over the S images of the update when weight = n x N / S. It is exactly 1 for full batches without accumulation.
        """
        return self.share(micro, rank) * self.processes / self.update_size(micro)


class EpochSampler(Sampler[int]):
    """Keys of the training samples in the order of the epoch; `set_epoch` chooses it.

    Attributes:
        start: samples of that order which are left out, because they were trained before a resume.
    """

    def __init__(self, samples: int, seed: int) -> None:
        self.samples = samples
        self.seed = seed
        self.epoch = 0
        self.start = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.samples - self.start

    def _order(self) -> Tensor:
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "order", self.epoch))
        return torch.randperm(self.samples, generator=generator)

    def order(self) -> list[int]:
        """Sample indices in the order of this epoch, from the first one."""
        return self._order().tolist()

    def keys(self) -> Tensor:
        """int64 (samples - start,): the keys in the order of this epoch, from the position on."""
        return self._order()[self.start :] | pack_key(self.epoch, 0)

    def __iter__(self) -> Iterator[int]:
        return iter(self.keys().tolist())


class RankBatchSampler(BatchSampler):
    """The batches of all ranks in turn: rank 0's first, rank 1's first, …, as Accelerate's BatchSamplerShard deals them out.

    Its number of batches is a multiple of the number of processes, so that nothing is left for Accelerate to fill up.
    """

    sampler: EpochSampler

    def __init__(self, sampler: EpochSampler, plan: BatchPlan) -> None:
        super().__init__(sampler, plan.batch_size, drop_last=False)
        self.plan = plan

    @property
    def rest(self) -> BatchPlan:
        """The plan of what the sampler's position leaves of the epoch."""
        return self.plan.rest(self.sampler.start)

    def __len__(self) -> int:
        return self.rest.micro_batches * self.plan.processes

    def __iter__(self) -> Iterator[list[int]]:
        # A tensor: as a list, the keys of ten million samples would take 400 MB.
        keys, plan = self.sampler.keys(), self.rest
        for micro in range(plan.micro_batches):
            start = micro * plan.micro_batch_size
            batch = keys[start : start + plan.size(micro)].tolist()
            for rank in range(plan.processes):
                yield batch[rank :: plan.processes]
