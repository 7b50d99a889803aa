"""Streaming: each sample once an epoch from unequal files, on any number of ranks and workers, in bounded memory, exact after a resume."""

import math
import subprocess
import sys
from collections import Counter
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import numpy
import psutil
import pytest
import torch
from accelerate.data_loader import BatchSamplerShard

from tests.data.test_loaders import same, shift
from tests.helpers import ROOT, alone_run, ids_image, ids_of, make_run, write_parquet
from tests.ranks import Ranks, alone
from tests.sessions import StopAt
from tests.test_resume import check, session_with
from trainer.config import Config
from trainer.data.loaders import SAMPLE, load_data, refuse_large_blocks
from trainer.data.sampler import BatchPlan, RankBatchSampler, unpack_key
from trainer.data.sources import load_source
from trainer.data.stream import BlockSampler, StreamedRows
from trainer.runtime import Processes, UserError

# Rows of the train split's files, and of their row groups: unequal files, one smaller than a batch, 100 rows and 14 row groups in all.
FILES = ((37, 8), (5, 5), (48, 9), (10, 10))
ROWS = sum(rows for rows, _ in FILES)


def write_stream(folder: Path, files: tuple[tuple[int, int], ...] = FILES, test: int = 16) -> Path:
    """Numbered images in files of (rows, rows of a row group), labels 0..9 in turn."""
    import pyarrow.parquet

    folder.mkdir(parents=True, exist_ok=True)
    start = 0
    for number, (rows, group) in enumerate(files):
        file = folder / f"train-{number:05d}-of-{len(files):05d}.parquet"
        write_parquet(file, [ids_image(i) for i in range(start, start + rows)], [i % 10 for i in range(start, start + rows)])
        pyarrow.parquet.write_table(pyarrow.parquet.read_table(file), file, row_group_size=group)
        start += rows
    write_parquet(folder / "test.parquet", [ids_image(i) for i in range(test)], [i % 10 for i in range(test)])
    return folder


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_stream(tmp_path_factory.mktemp("stream"))


def rows_of(folder: Path) -> StreamedRows:
    rows = load_source(str(folder), streaming=True).train
    assert isinstance(rows, StreamedRows)
    return rows


# The order


def block_sampler(blocks: list[int], buffer: int, lanes: int = 8, seed: int = 0, epoch: int = 0) -> BlockSampler:
    sampler = BlockSampler(torch.tensor(blocks), seed, buffer, lanes)
    sampler.set_epoch(epoch)
    return sampler


def order(*arguments: Any, **more: Any) -> list[int]:
    return block_sampler(*arguments, **more).order()


@pytest.mark.parametrize("buffer", [1, 40, 10_000])
@pytest.mark.parametrize("blocks", [[1], [3, 1, 7], [10] * 30, [500]], ids=str)
def test_the_order_is_a_permutation_that_seed_and_epoch_rule(blocks: list[int], buffer: int) -> None:
    orders = [order(blocks, buffer, lanes, seed, epoch) for lanes in (1, 8) for seed in (0, 1) for epoch in (0, 1, 2)]
    assert all(sorted(one) == list(range(sum(blocks))) for one in orders)
    assert orders == [order(blocks, buffer, lanes, seed, epoch) for lanes in (1, 8) for seed in (0, 1) for epoch in (0, 1, 2)]
    if sum(blocks) > 100:
        assert len(set(map(tuple, orders))) == len(orders)


def test_a_row_group_is_spread_over_its_lane_and_the_buffer_only() -> None:
    """4 lanes of 25 row groups of 10: a row moves by at most the lane's part of the buffer."""
    sampler = block_sampler([10] * 100, buffer=80, lanes=4)
    found, neighbours = sampler.order(), set()
    for lane in range(4):
        rows = found[lane::4]
        for block in range(100):
            places = [place for place, row in enumerate(rows) if row // 10 == block]
            assert not places or max(places) - min(places) <= 10 + 2 * 20
            neighbours |= {(block, rows[place + 1] // 10) for place in places if place + 1 < len(rows)}
    assert len(neighbours) > 300, "neighbouring row groups do not mix"
    inside = [row for row in order([1000], 1, lanes=1)]
    assert sum(abs(one - other) == 1 for one, other in zip(inside, inside[1:], strict=False)) < 20, (
        "the rows of a row group keep their order"
    )


def dealt(sampler: BlockSampler, plan: BatchPlan) -> list[list[list[int]]]:
    """By rank, the batches that Accelerate's real shard gives it."""
    shards = [
        BatchSamplerShard(RankBatchSampler(sampler, plan), plan.processes, rank, even_batches=False) for rank in range(plan.processes)
    ]
    return [[[unpack_key(key)[1] for key in batch] for batch in shard] for shard in shards]


@pytest.mark.parametrize("processes", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_rank_reads_its_own_row_groups_once(processes: int, accumulation: int, stream: Path) -> None:
    """Apart from those that the cut into lanes divides; where the processes divide the lanes, or are a multiple of them."""
    blocks = [30, 41, 7, 22] * 100
    rows = rows_of(stream)
    rows.blocks = torch.tensor(blocks)
    capacity = rows.needed(buffer=160, processes=processes)
    sampler = block_sampler(blocks, buffer=160, epoch=1)
    block_of = torch.arange(len(blocks)).repeat_interleave(rows.blocks).tolist()
    reads = []
    for batches in dealt(sampler, BatchPlan(sum(blocks), processes, 5, accumulation)):
        kept: dict[int, int] = {}
        reads.append(0)
        for block in (block_of[row] for row in chain(*batches)):
            reads[-1] += block not in kept
            kept[block] = kept.pop(block, blocks[block])
            while sum(kept.values()) > capacity:
                del kept[next(iter(kept))]
    readers = processes if processes == 3 else max(1, processes // 8)
    assert len(blocks) * readers <= sum(reads) <= (len(blocks) + 8) * readers
    assert max(reads) - min(reads) <= 20 or processes == 3


def test_resumed_anywhere_on_other_processes_it_goes_on() -> None:
    sampler = block_sampler([8, 9, 1] * 20, buffer=50)
    whole = sampler.order()
    for consumed, processes in ((24, 1), (48, 3), (120, 4), (7, 2)):
        sampler.start = consumed
        plan = BatchPlan(sampler.samples, processes, 24 // processes, 1)
        parts = dealt(sampler, plan)
        rest = [row for micro in zip(*parts, strict=True) for turn in zip_longest(*micro) for row in turn if row is not None]
        assert rest == whole[consumed:]


# Loaders


def streamed(processes: Processes, folder: Path, knobs: dict[str, Any]) -> dict[str, Any]:
    """Two epochs and one evaluation of the prepared loaders: by epoch the batches' ids, the ids that keys and labels name."""
    run = make_run(processes, folder, batch_size=24 // processes.count, shuffle_buffer=20, **knobs)
    found: dict[str, Any] = {"dropped": run.plan.dropped}
    for epoch in (0, 1):
        run.sampler.start = 0
        run.train_loader.set_epoch(epoch)
        batches = list(run.train_loader)
        found[f"epoch {epoch}"] = [ids_of(images) for images, *_ in batches]
        for images, labels, keys in batches:
            ids = ids_of(images)
            assert [unpack_key(key) for key in keys.tolist()] == [(epoch, i) for i in ids]
            assert labels.tolist() == [i % 10 for i in ids]
    found["test"] = [i for images, *_ in run.eval_loader for i in ids_of(images)]
    run.close()
    return found


def together(ranks: list[dict[str, Any]], part: str) -> list[int]:
    """The ranks' batches, put together as they were dealt out."""
    return [i for micro in zip(*(rank[part] for rank in ranks), strict=True) for turn in zip_longest(*micro) for i in turn if i is not None]


@pytest.mark.parametrize("workers", [0, 2])
def test_each_sample_once_on_any_number_of_ranks_and_workers(stream: Path, two_ranks: Ranks, three_ranks: Ranks, workers: int) -> None:
    knobs = {"streaming": True, "num_workers": workers}
    runs = [
        [alone(streamed, stream, knobs)],
        two_ranks.run(streamed, stream, knobs),
        three_ranks.run(streamed, stream, knobs),
    ]
    blocks, lanes = rows_of(stream).blocks.tolist(), rows_of(stream).lanes
    assert len(blocks) == 14
    for epoch in (0, 1):
        expected = order(blocks, 20, lanes, 0, epoch)
        for ranks in runs:
            assert {rank["dropped"] for rank in ranks} == {0}
            assert together(ranks, f"epoch {epoch}") == expected
            counts = Counter(chain(*chain(*(rank[f"epoch {epoch}"] for rank in ranks))))
            assert counts == Counter(range(ROWS))
    for ranks in runs:
        assert set(chain(*(rank["test"] for rank in ranks))) == set(range(16))


def test_a_sample_is_what_it_is_without_streaming(stream: Path) -> None:
    """Image, label, and the augmentation that its key rules; the order alone is another."""
    found: list[dict[int, tuple[Any, ...]]] = []
    for knobs in ({"streaming": True}, {"streaming": True, "num_workers": 2}, {"streaming": False}):
        with alone_run(stream, transform=shift, batch_size=8, augment="light", **knobs) as run:
            run.train_loader.set_epoch(1)
            batches = [(run.augment(images, keys), labels, keys) for images, labels, keys in run.train_loader]
            found.append({int(key): (image, int(label)) for batch in batches for image, label, key in zip(*batch, strict=True)})
            tests = list(run.eval_loader)
            run.close()
        if len(found) > 1:
            assert same(tests, before)
        before = tests
    for other in found[1:]:
        assert found[0].keys() == other.keys()
        assert all(torch.equal(found[0][key][0], other[key][0]) and found[0][key][1] == other[key][1] for key in other)
    assert list(found[0]) == list(found[1]) != list(found[2])


# Resume

STREAMING = {"streaming": True, "shuffle_buffer": 20}


@pytest.mark.parametrize("workers", [0, 2])
def test_one_process_goes_on_to_the_bit(stream: Path, tmp_path: Path, workers: int) -> None:
    knobs, stop = STREAMING | {"num_workers": workers}, StopAt(0, 7)
    whole = alone(session_with, stream, tmp_path / "whole", None, knobs)
    first = alone(session_with, stream, tmp_path / "parts", stop, knobs)
    second = alone(session_with, stream, tmp_path / "parts", None, knobs | {"resume_from_checkpoint": "auto"})
    check(whole, first, second, stop)


def test_two_processes_go_on_to_the_bit(stream: Path, tmp_path: Path, two_ranks: Ranks) -> None:
    stop = StopAt(1, 9)
    whole = two_ranks.run(session_with, stream, tmp_path / "whole", None, STREAMING)
    first = two_ranks.run(session_with, stream, tmp_path / "parts", stop, STREAMING)
    second = two_ranks.run(session_with, stream, tmp_path / "parts", None, STREAMING | {"resume_from_checkpoint": "auto"})
    for rank in range(2):
        check(whole[rank], first[rank], second[rank], stop)


# Memory


def test_few_row_groups_are_kept_and_each_is_read_once(stream: Path) -> None:
    with alone_run(stream, streaming=True, shuffle_buffer=8, batch_size=8) as run:
        rows = run.data.train.rows
        rows.capacity = rows.needed(8, 1)
        for count, (epoch, capacity) in enumerate(((0, rows.capacity), (1, 0))):
            rows.capacity, rows.reads, most = capacity, 0, 0
            rows.kept.clear()
            run.train_loader.set_epoch(epoch)
            for _ in run.train_loader:
                most = max(most, rows.kept_rows())
            assert most <= max(capacity, int(rows.blocks.max())) or count
            assert rows.reads == 14 if capacity else rows.reads > 14
