"""Rows of Parquet files, local or of the Hub, read by row groups when they are needed."""

import math
import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainer.data.decode import ImageError
from trainer.data.spool import Spool
from trainer.runtime import RunError, UserError

if TYPE_CHECKING:
    from datasets import DatasetBuilder, Features

# Requests to the Hub at once.
CONNECTIONS = 16
# Row groups that a sample of the split is taken from.
RUNS = 50


class FetchError(RunError):
    """A file of the Hub that cannot be read. A worker's comes with a traceback as its text, see `ImageError`."""

    def __init__(self, message: str) -> None:
        super().__init__(message.rpartition("FetchError: ")[2].strip())


@dataclass(frozen=True)
class File:
    """A Parquet file.

    Attributes:
        path: on this machine, or of the Hub (hf://…).
        size: bytes.
        metadata: its footer, `pyarrow.parquet.FileMetaData`.
    """

    path: str
    size: int
    metadata: Any

    @property
    def remote(self) -> bool:
        return is_remote(self.path)

    @cached_property
    def features(self) -> "Features":
        """The types of its columns."""
        import datasets

        return datasets.Features.from_arrow_schema(self.metadata.schema.to_arrow_schema())

    def image_bytes(self, group: int, image: str) -> int:
        """Bytes that the column `image` of a row group takes in memory."""
        content = self.metadata.row_group(group)
        leaves = [content.column(number) for number in range(content.num_columns)]
        return sum(leaf.total_uncompressed_size for leaf in leaves if f"{leaf.path_in_schema}.".startswith(f"{image}."))


class StreamedRows:
    """The rows of a split in Parquet files; of the interface of `datasets.Dataset`, what the trainer uses.

    An image is read with its row group, of which the newest are kept; those that will be needed next are read meanwhile, where `follow`
    has told which ones they are. The column of the labels is read as a whole.

    Args:
        name: the data set's, for error messages.
        features: types of the columns.
        columns: the stored names of the columns `image` and `label`.

    Attributes:
        blocks: int64 (row groups,), rows of each; empty ones are left out.
        capacity: rows that may be in memory, but at least one row group.
        ahead: row groups that are read ahead of each one that is begun.
        spool: where the row groups go that several processes fetch for each other.
        reads: row groups that this process has read.
    """

    builder_name = "parquet"

    def __init__(self, name: str, files: list[File], features: "Features", columns: tuple[str, str] = ("image", "label")) -> None:
        self.name = name
        self.files = files
        self.features = features
        self.image, self.label = columns
        self.groups = [(file, group) for file in files for group in range(file.metadata.num_row_groups) if rows_of(file, group)]
        self.blocks = torch.tensor([rows_of(*group) for group in self.groups], dtype=torch.int64)
        self.sizes: list[int] = self.blocks.tolist()
        self.starts = (self.blocks.cumsum(0) - self.blocks).tolist()
        self.capacity = self.ahead = 0
        self.spool: Spool | None = None
        self.reads = 0
        self.following: dict[int, int] = {}
        self._forget()

    def _forget(self) -> None:
        self.process = os.getpid()
        self.kept: OrderedDict[int, Any] = OrderedDict()
        self.coming: OrderedDict[int, Future[Any]] = OrderedDict()
        self.readers: ThreadPoolExecutor | None = None

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"kept": OrderedDict(), "coming": OrderedDict(), "readers": None}

    def __len__(self) -> int:
        return sum(self.sizes)

    @property
    def remote(self) -> bool:
        return any(file.remote for file in self.files)

    @property
    def column_names(self) -> list[str]:
        return list(self.features)

    def with_columns(self, image: str, label: str) -> "StreamedRows":
        """These two columns only, as `image` and `label`.

        Raises:
            UserError: they are not of the same type in all files.
        """
        import datasets

        first = self.files[0]
        for file in self.files:
            if any(file.features.get(column) != first.features.get(column) for column in (image, label)):
                raise UserError(
                    f"{self.name}: the columns '{image}' and '{label}' of {file.path} are not of the same types, or class names, "
                    f"as those of {first.path}: save the files alike"
                )
        features = datasets.Features({"image": datasets.Image(decode=False), "label": self.features[label]})
        return StreamedRows(self.name, self.files, features, (image, label))

    def __getitem__(self, place: Any) -> Any:
        """Row number `place` as {"image": {"bytes", "path"}}, of a list or range of rows that column; for 'label', that column of all rows.

        Raises:
            ImageError, FetchError: the file cannot be read.
        """
        if place == "label":
            with ThreadPoolExecutor(CONNECTIONS) as pool:
                return [value for values in pool.map(self._labels, self.files) for value in values]
        if not isinstance(place, int):
            return {"image": [self[index]["image"] for index in place]}
        block = bisect_right(self.starts, place) - 1
        value = self._block(block)[place - self.starts[block]].as_py()
        if isinstance(value, dict):
            return {"image": value}
        return {"image": {"bytes": value if isinstance(value, bytes) else None, "path": value if isinstance(value, str) else None}}

    def _labels(self, file: File) -> list[Any]:
        with self._opened(file) as parquet:
            values: list[Any] = parquet.read([self.label], use_threads=False).column(0).to_pylist()
            return values

    def follow(self, order: Tensor, breaks: Tensor) -> None:
        """Read ahead in this order from now on.

        Args:
            order: int64 (row groups,), their numbers.
            breaks: bool (row groups - 1,), where the next one is not needed by who needs this one.
        """
        self.coming.clear()
        self.following = {
            one: other for (one, other), is_break in zip(pairwise(order.tolist()), breaks.tolist(), strict=True) if not is_break
        }

    def _block(self, block: int) -> Any:
        """The images of a row group, a `pyarrow.ChunkedArray`."""
        if self.process != os.getpid():
            # A fork has taken over what was read, but not the threads that read.
            self._forget()
        if block not in self.kept:
            coming = self.coming.pop(block, None)
            self._read_ahead(block)
            self.kept[block] = self._read(block) if coming is None else coming.result()
            while len(self.kept) > 1 and self.kept_rows() > self.capacity:
                self.kept.popitem(last=False)
        self.kept.move_to_end(block)
        return self.kept[block]

    def _read_ahead(self, block: int) -> None:
        for _ in range(self.ahead):
            if block not in self.following:
                return
            block = self.following[block]
            if block not in self.kept and block not in self.coming:
                self.readers = self.readers or ThreadPoolExecutor(CONNECTIONS)
                self.coming[block] = self.readers.submit(self._read, block)
                # Of what the workers fetch for each other, one may need nothing.
                if self.spool is not None and len(self.coming) > CONNECTIONS:
                    self.coming.popitem(last=False)

    def _read(self, block: int) -> Any:
        if self.spool is None:
            return self._fetch(block).column(0)
        try:
            return self.spool.table(block, lambda: self._fetch(block)).column(0)
        except OSError as error:
            raise ImageError(
                f"{self.name}: what is fetched cannot be kept in {self.spool.folder} ({error}): free some of that disk, or set "
                "TMPDIR to a folder of a larger one"
            ) from None

    def _fetch(self, block: int) -> Any:
        file, group = self.groups[block]
        self.reads += 1
        with self._opened(file) as parquet:
            return parquet.read_row_group(group, [self.image], use_threads=False)

    def kept_rows(self) -> int:
        """Rows that are in this process's memory, or on their way."""
        return sum(self.sizes[block] for block in (*self.kept, *self.coming))

    @contextmanager
    def _opened(self, file: File) -> Iterator[Any]:
        import pyarrow.parquet  # type: ignore[import-untyped]

        try:
            with opened(file.path) as (source, size):
                if size != file.size:
                    raise OSError(f"it has {size} bytes, {file.size} when the run began")
                # The footer is known already. A column's pieces that lie side by side are fetched by one request.
                with pyarrow.parquet.ParquetFile(source, metadata=file.metadata, pre_buffer=file.remote) as parquet:
                    yield parquet
        except Exception as error:
            raise (FetchError if file.remote else ImageError)(unreadable(self.name, file.path, error)) from None

    @cached_property
    def largest(self) -> int:
        """Bytes of the largest row group, undecoded."""
        return max(file.image_bytes(group, self.image) for file, group in self.groups)

    def nbytes(self, rows: int) -> int:
        """Bytes of so many rows, undecoded."""
        total = sum(file.image_bytes(group, self.image) for file, group in self.groups)
        return min(rows, len(self)) * total // len(self)

    def spread(self, count: int) -> Tensor:
        """About `count` row numbers, int64, in runs that are spread evenly over the row groups, so that few of them are read."""
        blocks = torch.linspace(0, len(self.blocks) - 1, min(len(self.blocks), RUNS)).long()
        each = math.ceil(count / len(blocks))
        runs = [torch.linspace(0, rows - 1, min(rows, each)).long() for rows in self.blocks[blocks].tolist()]
        return torch.cat([run + self.starts[block] for run, block in zip(runs, blocks.tolist(), strict=True)])


def rows_of(file: File, group: int) -> int:
    return int(file.metadata.row_group(group).num_rows)


def is_remote(path: str) -> bool:
    return "://" in path


@contextmanager
def opened(path: str) -> Iterator[tuple[Any, int]]:
    """What pyarrow reads a file from, and its size in bytes."""
    if not is_remote(path):
        yield path, os.stat(path).st_size
        return
    import fsspec  # type: ignore[import-untyped]

    files, place = fsspec.url_to_fs(path)
    # pyarrow knows which bytes it wants; a cache of fsspec's would fetch more.
    with files.open(place, "rb", cache_type="none") as file:
        yield file, file.size


def unreadable(name: str, path: str, error: Exception) -> str:
    reason = " ".join(str(error).split()) or type(error).__name__
    mend = "check the network and start again, where there is a checkpoint with --resume" if is_remote(path) else "replace or remove it"
    return f"{name}: the Parquet file {path} cannot be read ({reason[:200]}): {mend}"


def open_streams(name: str, builder: "DatasetBuilder") -> dict[str, StreamedRows]:
    """The splits of a data set that `datasets` has found; of its files, only the footers are read.

    Raises:
        UserError: its files are not Parquet files, or one of them cannot be read.
    """
    if builder.name != "parquet" or not builder.config.data_files:
        raise UserError(
            f"{name}: --streaming reads Parquet files, but this data set is kept as '{builder.name}': leave --streaming out "
            "(files of single images are read one by one anyway), or save it as Parquet (`to_parquet` of datasets)"
        )

    def open_file(path: str) -> File:
        import pyarrow.parquet

        try:
            with opened(path) as (source, size):
                return File(path, size, pyarrow.parquet.read_metadata(source))
        except Exception as error:
            raise UserError(unreadable(name, path, error)) from None

    with ThreadPoolExecutor(CONNECTIONS) as pool:
        files = {str(split): list(pool.map(open_file, map(str, paths))) for split, paths in builder.config.data_files.items()}
    return {split: StreamedRows(name, found, builder.info.features or found[0].features) for split, found in files.items()}
