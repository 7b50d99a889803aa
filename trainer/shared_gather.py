"""all_gather of small tensors between the processes of one host, through memory that they share.

gloo hands each message through four threads, which have to be woken one after the other; the statistics of a small model's SyncBatchNorm
and its gradients take it a third of an update. Here a process writes its numbers where the others read them. benchmarks/speed.py measures
it (`two`); above some 100,000 numbers gloo is faster, since here each takes twice its bytes.

The protocol is NCCL's LL: each 4 bytes of data are written together with the number of the exchange, as one aligned word of 8 bytes, which
no 64-bit machine tears. A reader that finds the number in every word has all the data: nothing rests on the order of writes.
"""

import mmap
import os
import secrets
import time
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.constants import default_pg_timeout

from trainer.process import find_process

# Words of 8 bytes that each process may write at once: 256 KB of data.
CAPACITY = 1 << 16
# Words of each process before the data: a name of the memory (rank 0's), and whether the process has left.
HEADER = 2
# Seconds of looking without pause, which is as long as updates of small models differ; of a pause after them; between looks at the others.
EAGER, PAUSE, LOOK = 2e-3, 2e-4, 0.2
# Exchanges until their numbers come again. Even: two in a row lie in different halves of the memory.
NUMBERS = 1 << 30


class SharedGather:
    """The memory of one process group.

    It has two halves, which exchanges use in turn: a process that writes exchange n + 2 has read n + 1, which all wrote after reading n.
    """

    def __init__(self, memory: mmap.mmap, rank: int, others: list[tuple[int, float]]) -> None:
        """
        Args:
            others: the other ranks' processes: their pids, and when they started.
        """
        count = len(others) + 1
        words = np.frombuffer(memory, np.int64)
        self._left = words[1 : HEADER * count : HEADER]
        # Before the data of each exchange stands how many words they are.
        self._halves = words[HEADER * count :].reshape(2, count, 1 + CAPACITY)
        self._rank, self._others, self._number = rank, others, 0

    def all_gather(self, tensor: Tensor) -> Tensor:
        """(ranks, ...): the CPU tensors (...), of one shape and dtype, of all ranks. A collective.

        Raises:
            RuntimeError: a process has left the group, or ended, or does not come, or comes with another number of bytes.
        """
        if torch.autograd.profiler._is_profiler_enabled:
            with torch.profiler.record_function("shared_gather: all_gather"):
                return self._all_gather(tensor)
        return self._all_gather(tensor)

    def _all_gather(self, tensor: Tensor) -> Tensor:
        self._number = self._number % NUMBERS + 1
        values = tensor.detach().contiguous().numpy().reshape(-1).view(np.int32)
        own = np.empty((1 + len(values), 2), np.int32)
        own[0, 0], own[1:, 0], own[:, 1] = len(values), values, self._number
        half = self._halves[self._number % 2, :, : len(own)]
        half[self._rank] = own.view(np.int64)[:, 0]
        sizes = half[:, :1].view(np.int32)
        start = looked = time.perf_counter()
        failure = None
        while True:
            # The first word of each says that it is worth looking at the others.
            if (sizes[:, 1] == self._number).all():
                found = half.copy().view(np.int32).reshape(*half.shape, 2)
                if (found[:, 0, 0] != len(values)).any():
                    raise RuntimeError(f"shared_gather: the ranks bring {found[:, 0, 0].tolist()} words: they do not do the same")
                if (found[..., 1] == self._number).all():
                    return torch.from_numpy(found[:, 1:, 0].copy()).view(tensor.dtype).view(len(half), *tensor.shape)
            if failure is not None:
                raise RuntimeError(f"shared_gather: {failure}")
            now = time.perf_counter()
            if now - looked > LOOK:
                looked = now
                # What one wrote before it left is there by now.
                failure = self._failure(now - start)
            if now - start < EAGER:
                # Not sleep(0), which takes 70 µs.
                os.sched_yield()
            else:
                time.sleep(PAUSE)

    def _failure(self, waited: float) -> str | None:
        """Why the others can no longer come."""
        if self._left.any() or not all(find_process(*other) for other in self._others):
            return "connection closed by peer"
        return f"another rank did not come within {waited:.0f} s" if waited > default_pg_timeout.total_seconds() else None

    def close(self) -> None:
        """Let the others no longer wait for this process."""
        self._left[self._rank] = 1


def nbytes(count: int) -> int:
    """Of the memory of `count` processes."""
    return 8 * count * (HEADER + 2 * (1 + CAPACITY))


_opened: WeakKeyDictionary[Any, SharedGather | None] = WeakKeyDictionary()


def memory_for(tensor: Tensor, group: Any = None) -> SharedGather | None:
    """What such a tensor can go through: None where it is large or not on the CPU, or the group's processes are not on one host.

    A collective, as all that follows from it: tensors of one shape and dtype on all ranks. None is the default group.
    """
    # torch.compile knows the backend's collectives, and nothing of this memory.
    if tensor.device.type != "cpu" or tensor.element_size() % 4 or tensor.nbytes > 4 * CAPACITY or torch.compiler.is_compiling():
        return None
    group = group if group is not None else dist.group.WORLD
    if group not in _opened:
        _opened[group] = _open(group)
    return _opened[group]


def all_gather(tensor: Tensor, group: Any = None) -> Tensor:
    """(ranks, ...): the tensors (...), of one shape and dtype, of the group's ranks; None is the default group. A collective.

    Through shared memory where that is possible (`memory_for`), else as the group's backend does it.
    """
    memory = memory_for(tensor, group)
    if memory is not None:
        return memory.all_gather(tensor)
    gathered = tensor.new_empty(dist.get_world_size(group), *tensor.shape)
    dist.all_gather(list(gathered), tensor, group=group)
    return gathered


def close() -> None:
    """Leave the memory of every group; before the process group is destroyed."""
    for shared in _opened.values():
        if shared is not None:
            shared.close()
    _opened.clear()


def _open(group: Any) -> SharedGather | None:
    """Memory that is in no file system: rank 0's process holds it open until all have it. None where not all can have it. A collective."""
    rank, count = dist.get_rank(group), dist.get_world_size(group)
    if count == 1:
        return None
    name, descriptor = secrets.randbits(62), None
    if rank == 0 and hasattr(os, "memfd_create"):
        with suppress(OSError):
            descriptor = os.memfd_create("shared_gather")
            os.ftruncate(descriptor, nbytes(count))
            os.pwrite(descriptor, name.to_bytes(8, "little"), 0)
    this = psutil.Process()
    places: list[Any] = [None] * count
    dist.all_gather_object(places, (this.pid, this.create_time(), descriptor, name), group=group)
    shared = None
    with suppress(OSError, ValueError):
        shared = _attach(rank, places)
    have: list[Any] = [None] * count
    dist.all_gather_object(have, shared is not None, group=group)
    if descriptor is not None:
        os.close(descriptor)
    return shared if all(have) else None


def _attach(rank: int, places: list[tuple[int, float, int | None, int]]) -> SharedGather | None:
    """
    Args:
        places: each rank's pid, when its process started, and, of rank 0, the descriptor and the name of the memory.

    Raises:
        OSError, ValueError: rank 0's process cannot be looked into.
    """
    pid, _, descriptor, name = places[0]
    others = [(other, born) for number, (other, born, *_) in enumerate(places) if number != rank]
    if descriptor is None or not all(find_process(*other) for other in others):
        return None
    file = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR)
    try:
        memory = mmap.mmap(file, 0)
    finally:
        os.close(file)
    # Another container, or host, can have the same pids.
    return SharedGather(memory, rank, others) if int.from_bytes(memory[:8], "little") == name else None
