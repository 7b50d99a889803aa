"""Streaming: each sample once an epoch from unequal files, on any number of ranks and workers, in bounded memory, exact after a resume."""

import gc
import multiprocessing
import os
import pickle
import re
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from itertools import chain, pairwise, zip_longest
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import psutil
import pytest
import torch
from accelerate.data_loader import BatchSamplerShard

from tests.data.test_loaders import same, shift
from tests.helpers import alone_run, ids_image, ids_of, make_run, write_ids, write_parquet
from tests.hub import Hub
from tests.launching import MAIN, finish, started
from tests.ranks import Ranks, alone
from tests.sessions import StopAt
from tests.test_resume import check, session_with
from trainer.config import Config
from trainer.data import stream, transforms
from trainer.data.decode import ImageError
from trainer.data.loaders import load_data
from trainer.data.row_groups import CONNECTIONS, StreamedRows
from trainer.data.sampler import BatchPlan, RankBatchSampler, unpack_key
from trainer.data.sources import load_source
from trainer.data.spool import Spool
from trainer.data.stream import LANES, BlockSampler, follow, lanes_of, plan_reading
from trainer.doctor import inspect_run
from trainer.runtime import Processes, UserError

# Rows of the train split's files, and of their row groups: unequal files, one smaller than a batch, 100 rows and 13 row groups in all.
FILES = ((37, 8), (5, 5), (48, 9), (10, 10))
ROWS = sum(rows for rows, _ in FILES)


def write_stream(folder: Path, files: tuple[tuple[int, int], ...] = FILES, test: int = 16) -> Path:
    """Numbered images in files of (rows, rows of a row group), labels 0..9 in turn."""
    import pyarrow.parquet  # type: ignore[import-untyped]

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
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_stream(tmp_path_factory.mktemp("shards"))


def rows_of(folder: Path) -> StreamedRows:
    rows = load_source(Config(dataset=str(folder), streaming=True)).train
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
    if buffer == 1 and len(blocks) == 30:
        of_blocks = [tuple(dict.fromkeys(row // 10 for row in order(blocks, 1, 1, seed, epoch))) for seed in (0, 1) for epoch in (0, 1)]
        assert all(sorted(one) == list(range(30)) for one in of_blocks)
        assert len(set(of_blocks)) == 4


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
    neighbouring = sum(abs(one - other) == 1 for one, other in pairwise(order([1000], 1, lanes=1)))
    assert neighbouring < 20, "the rows of a row group keep their order"


def dealt(sampler: BlockSampler, plan: BatchPlan) -> list[list[list[int]]]:
    """By rank, the batches that Accelerate's real shard gives it."""
    shards = [
        BatchSamplerShard(RankBatchSampler(sampler, plan), plan.processes, rank, even_batches=False) for rank in range(plan.processes)
    ]
    return [[[unpack_key(key)[1] for key in batch] for batch in shard] for shard in shards]


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
def test_each_sample_once_on_any_number_of_ranks_and_workers(shards: Path, two_ranks: Ranks, three_ranks: Ranks, workers: int) -> None:
    knobs = {"streaming": True, "num_workers": workers}
    runs = [
        [alone(streamed, shards, knobs)],
        two_ranks.run(streamed, shards, knobs),
        three_ranks.run(streamed, shards, knobs),
    ]
    blocks = rows_of(shards).sizes
    assert len(blocks) == 13
    for epoch in (0, 1):
        expected = order(blocks, 20, LANES, 0, epoch)
        for ranks in runs:
            assert {rank["dropped"] for rank in ranks} == {0}
            assert together(ranks, f"epoch {epoch}") == expected
            counts = Counter(chain(*chain(*(rank[f"epoch {epoch}"] for rank in ranks))))
            assert counts == Counter(range(ROWS))
    for ranks in runs:
        assert set(chain(*(rank["test"] for rank in ranks))) == set(range(16))


def test_a_sample_is_what_it_is_without_streaming(shards: Path) -> None:
    """Image, label, and the augmentation that its key rules; the order alone is another."""
    found: list[dict[int, tuple[Any, ...]]] = []
    tests: list[Any] = []
    for knobs in ({"streaming": True}, {"streaming": True, "num_workers": 2}, {"streaming": False}):
        with alone_run(shards, transform=shift, batch_size=8, augment="light", **knobs) as run:
            run.train_loader.set_epoch(1)
            batches = [(run.augment(images, keys), labels, keys) for images, labels, keys in run.train_loader]
            found.append({int(key): (image, int(label)) for batch in batches for image, label, key in zip(*batch, strict=True)})
            tests.append(list(run.eval_loader))
            run.close()
    assert same(tests[0], tests[1])
    assert same(tests[0], tests[2])
    for other in found[1:]:
        assert found[0].keys() == other.keys()
        assert all(torch.equal(found[0][key][0], other[key][0]) and found[0][key][1] == other[key][1] for key in other)
    assert list(found[0]) == list(found[1]) != list(found[2])


# Resume

STREAMING = {"streaming": True, "shuffle_buffer": 20}


@pytest.mark.parametrize("workers", [0, 2])
def test_one_process_goes_on_to_the_bit(shards: Path, tmp_path: Path, workers: int) -> None:
    knobs, stop = STREAMING | {"num_workers": workers}, StopAt(0, 7)
    whole = alone(session_with, shards, tmp_path / "whole", None, knobs)
    first = alone(session_with, shards, tmp_path / "parts", stop, knobs)
    second = alone(session_with, shards, tmp_path / "parts", None, knobs | {"resume_from_checkpoint": "auto"})
    check(whole, first, second, stop)


def test_two_processes_go_on_to_the_bit(shards: Path, tmp_path: Path, two_ranks: Ranks) -> None:
    stop = StopAt(1, 9)
    whole = two_ranks.run(session_with, shards, tmp_path / "whole", None, STREAMING)
    first = two_ranks.run(session_with, shards, tmp_path / "parts", stop, STREAMING)
    second = two_ranks.run(session_with, shards, tmp_path / "parts", None, STREAMING | {"resume_from_checkpoint": "auto"})
    for rank in range(2):
        check(whole[rank], first[rank], second[rank], stop)


# Reading, memory


Splits = tuple[StreamedRows, StreamedRows]


def write_rows(folder: Path, blocks: list[int], nbytes: int) -> Splits:
    """A train split of one file with these row groups, of rows that are no images, but their number and `nbytes`; and a test split."""
    import datasets
    import pyarrow.parquet

    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=[str(n) for n in range(10)])})
    write_ids(folder, train=1)
    start = 0
    with pyarrow.parquet.ParquetWriter(folder / "train.parquet", features.arrow_schema, use_dictionary=False) as writer:
        for rows in blocks:
            contents = [f"{row} ".encode() + os.urandom(nbytes) for row in range(start, start + rows)]
            columns = {"image": [{"bytes": content, "path": None} for content in contents], "label": [0] * rows}
            writer.write_table(pyarrow.Table.from_pydict(columns, schema=features.arrow_schema))
            start += rows
    source: Any = load_source(Config(dataset=str(folder), streaming=True))
    return source.train, source.test


def processes_of(count: int) -> Processes:
    state: Any = SimpleNamespace(process_index=0, num_processes=count)
    return Processes(state)


def read_epoch(rows: StreamedRows, sampler: BlockSampler, plan: BatchPlan, rank: int) -> Iterator[int]:
    """Read a rank's share of an epoch; yields the rows kept after each."""
    follow(rows, sampler.seed, sampler.epoch)
    for row in chain(*dealt(sampler, plan)[rank]):
        content = rows[row]["image"]["bytes"]
        assert int(content.split(b" ")[0]) == row
        yield rows.kept_rows()


@pytest.fixture(scope="module")
def many_blocks(tmp_path_factory: pytest.TempPathFactory) -> Splits:
    return write_rows(tmp_path_factory.mktemp("blocks"), [30, 41, 7, 22] * 75, 10)


@pytest.mark.parametrize(("processes", "accumulation"), [(1, 1), (2, 3), (3, 1), (8, 2), (16, 1)])
def test_a_rank_reads_its_own_row_groups_once_and_keeps_few(many_blocks: Splits, processes: int, accumulation: int) -> None:
    """Its own where the number of ranks divides that of the lanes, or is a multiple of it; apart from those that the lanes' ends divide."""
    rows, _ = many_blocks
    plan_reading(*many_blocks, Config(shuffle_buffer=160), processes_of(processes))
    sampler = block_sampler(rows.sizes, buffer=160, epoch=1)
    reads = []
    for rank in range(min(processes, LANES)):
        rows.kept.clear()
        rows.reads = 0
        kept = list(read_epoch(rows, sampler, BatchPlan(len(rows), processes, 5, accumulation), rank))
        assert max(kept) <= rows.capacity < len(rows) * (0.6 if processes in (1, 3) else 0.3)
        reads.append(rows.reads)
    readers = 3 if processes == 3 else 1
    assert len(rows.sizes) * readers <= sum(reads) <= (len(rows.sizes) + LANES) * readers
    assert max(reads) - min(reads) <= 16


def test_without_room_they_are_read_again_and_again(many_blocks: Splits) -> None:
    """The count above counts, and what does not fit is right all the same."""
    rows, _ = many_blocks
    plan_reading(*many_blocks, Config(shuffle_buffer=160), processes_of(8))
    rows.kept.clear()
    rows.capacity = rows.ahead = rows.reads = 0
    kept = list(read_epoch(rows, block_sampler(rows.sizes, buffer=160), BatchPlan(len(rows), 8, 5, 1), 0))
    assert max(kept) == 41
    assert rows.reads > 150, "45 are needed"


def test_what_comes_next_is_read_ahead(shards: Path) -> None:
    """As far as the lane goes; the copies of a worker, forked or pickled, begin anew."""
    rows = rows_of(shards)
    rows.ahead, rows.capacity = 2, 1000
    rows.follow(torch.tensor([3, 1, 7, 0, 5, 4, 2, 6, 8, 9, 10, 11, 12]), torch.tensor([False, False, True] + [False] * 9))
    for block, coming in ((3, [1, 7]), (7, [1]), (1, []), (5, [4, 2])):
        assert rows[rows.starts[block]]["image"]["bytes"]
        assert list(rows.coming) == coming
    # All threads are there and wait for work: a child that took them for its own would leave it to them.
    assert rows.readers is not None
    for future in [rows.readers.submit(time.sleep, 0.1) for _ in range(CONNECTIONS)]:
        future.result()
    for copied in (rows, pickle.loads(pickle.dumps(rows))):
        here, there = multiprocessing.get_context("fork").Pipe()
        child = multiprocessing.get_context("fork").Process(target=send_rows, args=(copied, (4, 2, 6), there), daemon=True)
        child.start()
        assert here.poll(30), "it waits for a thread that it has not"
        assert here.recv() == ([rows[rows.starts[block]] for block in (4, 2, 6)], [8, 9])
        child.join()


def send_rows(rows: StreamedRows, blocks: tuple[int, ...], there: Connection) -> None:
    there.send(([rows[rows.starts[block]] for block in blocks], list(rows.coming)))


def test_the_loader_reads_ahead_in_the_order_of_each_epoch(shards: Path) -> None:
    with alone_run(shards, streaming=True, shuffle_buffer=1, batch_size=8) as run:
        for epoch in (0, 1):
            run.train_loader.set_epoch(epoch)
            assert len(list(run.train_loader)) == 13
            found = run.data.train.rows.following
            follow(run.data.train.rows, run.config.seed, epoch)
            assert found == run.data.train.rows.following
            assert len(found) > 3
        follow(run.data.train.rows, run.config.seed, 0)
        assert found != run.data.train.rows.following


def test_memory_is_flat(tmp_path: Path) -> None:
    """120 MB in 2,000 row groups, of which a process keeps 4."""
    rows, _ = splits = write_rows(tmp_path / "rows", [8] * 2000, 7_500)
    plan_reading(*splits, Config(shuffle_buffer=64), processes_of(1))
    assert rows.nbytes(rows.capacity) < 4e6
    sampler, memory = block_sampler(rows.sizes, buffer=64), []
    for number, _ in enumerate(read_epoch(rows, sampler, BatchPlan(len(rows), 1, 32, 1), 0)):
        if number in (1_600, len(rows) - 1):
            memory.append(psutil.Process().memory_info().rss)
    assert memory[1] - memory[0] < 20e6


def test_fewer_lanes_for_large_row_groups_and_none_that_memory_cannot_hold(many_blocks: Splits, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, _ = many_blocks
    assert lanes_of(rows) == 8
    for lanes, room in ((8, 16), (4, 15.9), (1, 2), (1, 0)):
        monkeypatch.setattr(stream, "LANE_BYTES", room * rows.largest)
        assert lanes_of(rows) == lanes
    monkeypatch.undo()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=100_000))
    with pytest.raises(UserError) as raised:
        plan_reading(*many_blocks, Config(dataset="some", num_workers=3), processes_of(1))
    assert str(raised.value).startswith("--dataset some: with --streaming, the 3 loading processes of this host keep 0.000")
    assert str(raised.value).endswith(
        "and 0.0001 GB are free: lower --num_workers or --shuffle_buffer (1000), or save the files with "
        "smaller row groups (the largest has 41 images)"
    )


def test_a_file_that_changes_or_goes_while_it_is_read(tmp_path: Path) -> None:
    folder = write_stream(tmp_path / "data", ((6, 3),))
    file = next(folder.glob("train-*"))
    rows = rows_of(folder)
    assert rows[2]["image"]["bytes"]
    file.write_bytes(file.read_bytes() + b"more")
    with pytest.raises(
        ImageError, match=rf"^--dataset {folder}: the Parquet file {file} cannot be read \(it has \d+ bytes, \d+ when .* began\)"
    ):
        rows[5]
    file.unlink()
    with pytest.raises(ImageError, match=r"No such file or directory.*: replace or remove it$"):
        rows[5]
    assert rows[2]["image"]["bytes"], "what was read is still there"


def test_statistics_are_those_of_a_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """50 row groups at most, and evenly spaced rows of each."""
    folder = write_stream(tmp_path / "data", ((300, 3), (60, 30)))
    monkeypatch.setattr(transforms, "MEASURED", 150)
    sample = rows_of(folder).spread(150).tolist()
    assert len(set(sample)) == len(sample) == 150
    assert (sample[0], sample[-1]) == (0, 359)
    data = alone(loaded, folder, {"streaming": True})
    pixels = numpy.stack([numpy.asarray(ids_image(i)) for i in sample]) / 255
    assert data.mean == (pytest.approx(pixels.mean(), abs=1e-12),)
    assert data.std == (pytest.approx(pixels.std(), abs=1e-12),)
    everything = alone(loaded, folder, {"streaming": False})
    assert abs(everything.mean[0] - data.mean[0]) < 0.01


def test_other_row_groups_are_other_data(tmp_path: Path) -> None:
    """For a resume: the order is made of them."""
    one = alone(loaded, write_stream(tmp_path / "one", ((20, 5),)), {"streaming": True}).fingerprint
    other = alone(loaded, write_stream(tmp_path / "other", ((20, 4),)), {"streaming": True}).fingerprint
    assert {name for name in one if one[name] != other[name]} == {"row groups"}


def loaded(processes: Processes, folder: Path, knobs: dict[str, Any]) -> Any:
    return load_data(Config(dataset=str(folder), **knobs), processes)


def inspected(processes: Processes, folder: Path) -> dict[str, str]:
    from trainer.checks.report import Report

    report = Report()
    config = Config(dataset=str(folder), streaming=True, shuffle_buffer=20, batch_size=8, num_workers=1, output_dir="out")
    inspect_run(config, processes, report)
    return {name: f"{result.status} {result.measured}" for name, result in report.results.items()}


def test_the_doctor_passes_a_stream(two_ranks: Ranks, shards: Path) -> None:
    for table in two_ranks.run(inspected, shards):
        assert not [row for row in table.values() if not row.startswith("PASS")], table
        assert table["readable data"] == "PASS 116 images opened (train 100, test 16)"
        assert table["shards"] == "PASS 100 samples dealt out to 2 ranks, 50 each; none twice"


# The Hub


def test_from_a_hub_each_row_group_is_fetched_once_for_all_workers(shards: Path, tmp_path: Path) -> None:
    """By the Hub's real client; nothing is copied to the disk, and nothing is left behind."""
    folder = Path(shutil.copytree(shards, tmp_path / "hub"))
    hub = Hub(folder, delay=0.01)
    # A short path: that of a socket, which a data worker makes there, has 107 characters at most.
    home, temporary = tmp_path / "home", Path(tempfile.mkdtemp(prefix="hub", dir="/tmp"))
    variables = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(home), "TMPDIR": str(temporary), "HF_HUB_DISABLE_XET": "1"}
    flags = ("--streaming", "--normalize", "none", "--num_workers", "2", "--epochs", "2", "--batch_size", "8", "--output_dir", "out")
    with started("python", MAIN, "--dataset", "some/digits", *flags, cwd=tmp_path, variables=variables) as child:
        done = finish(child, tmp_path / "out")
    assert done.code == 0, done.errors
    assert done.json("results.json")["samples"] == 200
    assert done.row("data").endswith("100 train / 16 test, 10 classes, images 1 x 8 x 8, streamed")
    assert re.fullmatch(r"4 files, 13 row groups; a loading process keeps at most 100 images \(0 MB\)", done.row("streaming"))
    asked = Counter(hub.ranges)
    for number, (file, group) in enumerate(rows_of(folder).groups):
        bytes_and_path = [file.metadata.row_group(group).column(leaf) for leaf in (0, 1)]
        first = bytes_and_path[0].dictionary_page_offset or bytes_and_path[0].data_page_offset
        last = first + sum(leaf.total_compressed_size for leaf in bytes_and_path) - 1
        # The very first image has told the size, before.
        assert asked[Path(file.path).name, first, last] == 1 + (number == 0), hub.ranges
    assert not [*home.rglob("*.parquet"), *home.rglob("*.arrow")]
    assert not list(temporary.glob("trainer-stream-*"))


def test_the_spool_fetches_once_and_keeps_few(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    fetched = []

    def fetch(number: int) -> Any:
        fetched.append(number)
        return pyarrow.table({"image": [bytes(1000 + number)] * 8})

    spool = Spool(nbytes=30_000)
    for number in (0, 1, 0, 1, 2, 0, 3, 0):
        table = spool.table(number, lambda number=number: fetch(number))  # type: ignore[misc]
        assert table.column(0)[7].as_py() == bytes(1000 + number)
    assert fetched == [0, 1, 2, 3], "the one asked for the longest ago goes first"
    assert sorted(file.stem for file in spool.folder.glob("*.arrow")) == ["0", "2", "3"]
    spool.table(1, lambda: fetch(1))
    assert fetched == [0, 1, 2, 3, 1]
    rows = rows_of(shards)
    rows.spool = spool
    assert rows[0]["image"]["bytes"]
    folder = spool.folder
    spool.remove()
    assert list(tmp_path.iterdir()) == []
    folder.write_text("in the way")
    with pytest.raises(ImageError, match=f"cannot be kept in {folder} .*set TMPDIR to a folder of a larger one$"):
        rows[99]
    folder.unlink()
    folder.mkdir()
    del spool
    rows.spool = None
    gc.collect()
    assert list(tmp_path.iterdir()) == []
