"""Numbers that go from process to process through shared memory: what gloo would bring, never half of it, and no waiting for the gone."""

import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.helpers import ROOT
from tests.ranks import Ranks, free_port
from trainer import shared_gather
from trainer.runtime import Processes
from trainer.shared_gather import CAPACITY, NUMBERS, SharedGather, all_gather, nbytes

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="only Linux has memory without a name")


def by_backend(tensor: Tensor) -> Tensor:
    gathered = tensor.new_empty(dist.get_world_size(), *tensor.shape)
    dist.all_gather(list(gathered), tensor)
    return gathered


def shared() -> SharedGather | None:
    return shared_gather._opened[dist.group.WORLD]


def many(processes: Processes) -> None:
    """Sizes that change, and one rank or another that comes late; past the point where the numbers begin again."""
    generator = torch.Generator().manual_seed(processes.rank)
    common = torch.Generator().manual_seed(9)
    for exchange in range(400):
        size = int(torch.randint(0, 300, (), generator=common))
        dtype = (torch.float32, torch.float64, torch.int64, torch.int32)[exchange % 4]
        tensor = (torch.randn(3, size, generator=generator) * 1000).to(dtype)
        if exchange % 50 == processes.rank:
            time.sleep(0.01)
        found = all_gather(tensor if exchange % 3 else tensor.t().contiguous().t())
        assert found.dtype == dtype
        assert torch.equal(found, by_backend(tensor)), exchange
        if exchange == 100:
            memory = shared()
            assert memory is not None, "it did not go through the memory"
            memory._number = NUMBERS - 50


def test_all_ranks_get_what_the_backend_would_bring(two_ranks: Ranks, three_ranks: Ranks) -> None:
    two_ranks.run(many)
    three_ranks.run(many)


def other_tensors(processes: Processes) -> None:
    all_gather(torch.zeros(1))
    memory = shared()
    assert memory is not None
    before = memory._number
    for tensor in (torch.randn(CAPACITY + 1), torch.randn(5).bfloat16(), torch.arange(7, dtype=torch.uint8)):
        assert torch.equal(all_gather(tensor), by_backend(tensor))
    assert memory._number == before
    assert torch.equal(all_gather(torch.full((CAPACITY,), float(processes.rank))), torch.arange(2.0)[:, None].expand(2, CAPACITY))
    assert memory._number == before + 1


def test_what_does_not_fit_goes_through_the_backend(two_ranks: Ranks) -> None:
    two_ranks.run(other_tensors)


def one_cannot(processes: Processes, fault: str) -> bool:
    attach = shared_gather._attach

    def failing(rank: int, places: list[Any]) -> SharedGather | None:
        if rank == 1 and fault == "closed":
            raise PermissionError("/proc/1/fd/3")
        if rank == 1 and fault == "other pids":
            places = [(places[0][0], places[0][1] + 10, *places[0][2:]), places[1]]
        if rank == 1 and fault == "clock":
            places = [(places[0][0], places[0][1] + 1, *places[0][2:]), places[1]]
        if rank == 1 and fault == "other memory":
            places = [(*places[0][:3], places[0][3] + 1), places[1]]
        return attach(rank, places)

    shared_gather._attach = failing
    try:
        mine = torch.full((3,), float(processes.rank))
        assert torch.equal(all_gather(mine), by_backend(mine))
        return shared() is not None
    finally:
        shared_gather._attach = attach


@pytest.mark.parametrize(
    ("fault", "opened"), [("closed", False), ("other pids", False), ("other memory", False), ("clock", True), ("none", True)]
)
def test_all_use_the_backend_where_one_cannot_see_the_memory(two_ranks: Ranks, fault: str, opened: bool) -> None:
    """As another host's process, or another container's, cannot."""
    assert two_ranks.run(one_cannot, fault) == [opened, opened]


def in_group_of_one(processes: Processes) -> None:
    group = [dist.new_group([rank]) for rank in range(processes.count)][processes.rank]
    assert all_gather(torch.tensor([7.0]), group).tolist() == [[7.0]]


def test_a_group_of_one(two_ranks: Ranks) -> None:
    two_ranks.run(in_group_of_one)


def pair() -> tuple[SharedGather, SharedGather]:
    """Two ranks' ends, in this process."""
    memory = mmap.mmap(-1, nbytes(2))
    this = psutil.Process()
    others = [(this.pid, this.create_time())]
    return SharedGather(memory, 0, others), SharedGather(memory, 1, others)


def started(work: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    results: list[object] = []

    def run() -> None:
        try:
            results.append(work())
        except RuntimeError as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, results


def test_half_of_the_data_is_waited_for() -> None:
    """The other rank's words arrive in any order, the last one first; each of them is missed while it is missing."""
    one, other = pair()
    values = torch.arange(1.0, 9.0)
    thread, results = started(lambda: one.all_gather(values))
    sent = torch.arange(8.0).neg()
    words = [8, *sent.numpy().view(np.int32)]
    for place in (8, 0, 3, 1, 2, 6, 7, 5, 4):
        time.sleep(0.02)
        assert not results
        other._halves[1, 1, place] = np.array([[words[place], 1]], np.int32).view(np.int64)[0, 0]
    thread.join()
    assert torch.equal(torch.as_tensor(results[0]), torch.stack([values, sent]))


def test_ranks_that_do_not_do_the_same_are_told() -> None:
    one, other = pair()
    thread, results = started(lambda: one.all_gather(torch.ones(3)))
    with pytest.raises(RuntimeError, match=r"the ranks bring \[3, 4\] words"):
        other.all_gather(torch.ones(2, dtype=torch.float64))
    thread.join()
    assert str(results[0]) == "shared_gather: the ranks bring [3, 4] words: they do not do the same"


def test_a_rank_that_has_left_is_not_waited_for() -> None:
    one, other = pair()
    thread, results = started(lambda: one.all_gather(torch.ones(2)))
    time.sleep(0.05)
    other.close()
    thread.join(10)
    assert str(results[0]) == "shared_gather: connection closed by peer"


def test_what_a_rank_wrote_before_it_left_counts() -> None:
    one, other = pair()
    thread, results = started(lambda: one.all_gather(torch.zeros(2)))
    started(lambda: other.all_gather(torch.ones(2)))
    thread.join(10)
    other.close()
    assert torch.equal(torch.as_tensor(results[0]), torch.tensor([[0.0, 0.0], [1.0, 1.0]]))


def test_the_wait_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    from datetime import timedelta

    monkeypatch.setattr(shared_gather, "default_pg_timeout", timedelta(seconds=0.3))
    one, _ = pair()
    with pytest.raises(RuntimeError, match="another rank did not come within"):
        one.all_gather(torch.ones(2))


def test_a_killed_rank_ends_the_wait() -> None:
    code = (
        "import os, signal, sys, time, torch, torch.distributed as dist\n"
        "from trainer.shared_gather import all_gather\n"
        "rank = int(sys.argv[1])\n"
        f"dist.init_process_group('gloo', init_method='tcp://127.0.0.1:{free_port()}', rank=rank, world_size=2)\n"
        "all_gather(torch.ones(3))\n"
        "print('ready', flush=True)\n"
        "time.sleep(60) if rank else all_gather(torch.ones(3))\n"
    )
    ranks = [
        subprocess.Popen([sys.executable, "-c", code, str(rank)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in (0, 1)
    ]
    try:
        for rank in ranks:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "ready\n"
        time.sleep(0.3)
        assert ranks[0].poll() is None
        # Not waited for: it stays behind as a zombie.
        os.kill(ranks[1].pid, signal.SIGKILL)
        _, error = ranks[0].communicate(timeout=20)
        assert "shared_gather: connection closed by peer" in error
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
