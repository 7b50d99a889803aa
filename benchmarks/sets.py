"""The benchmark's data: the same images as Parquet files and as torchvision's idx files, and sets made larger or smaller by repeating."""

import hashlib
import io
import shutil
import struct
from pathlib import Path

import numpy
import pyarrow  # type: ignore[import-untyped]
import pyarrow.parquet  # type: ignore[import-untyped]
from PIL import Image

EMBEDDED = Path(__file__).resolve().parent.parent / "trainer" / "data" / "mnist5k"
FULL = {"train": 60_000, "test": 10_000}


def parquet_files(folder: Path, split: str) -> list[Path]:
    """Raises:
    SystemExit: there are none.
    """
    files = sorted(folder.glob(f"{split}*.parquet"))
    if not files:
        raise SystemExit(f"--data {folder} has no file {split}-*.parquet: give a folder as the Hub's ylecun/mnist has it")
    return files


def read(folder: Path, split: str) -> pyarrow.Table:
    """A split's rows; the schema's metadata, with the class names, stay."""
    return pyarrow.concat_tables([pyarrow.parquet.read_table(file) for file in parquet_files(folder, split)])


def full_set(data: Path | None, work: Path) -> Path:
    """The Parquet folder that is trained on: `data`, or the embedded digits repeated to the full MNIST's sizes."""
    if data is not None:
        parquet_files(data, "train"), parquet_files(data, "test")
        return data
    return resized(EMBEDDED, FULL["train"], work, FULL["test"])


def fingerprint(folder: Path) -> str:
    files = [*parquet_files(folder, "train"), *parquet_files(folder, "test")]
    return hashlib.sha256(repr([(str(file), file.stat().st_size) for file in files]).encode()).hexdigest()[:8]


def made_once(target: Path) -> Path | None:
    """A folder to fill that `finish` gives its name; None when `target` is there."""
    if target.exists():
        return None
    filling = target.with_name(f".{target.name}")
    shutil.rmtree(filling, ignore_errors=True)
    filling.mkdir(parents=True)
    return filling


def resized(source: Path, train: int, work: Path, test: int | None = None) -> Path:
    """`source` with `train` training images, and `test` test images (unset: its own), the first ones or repeated."""
    target = work / f"{fingerprint(source)}-{train}"
    filling = made_once(target)
    if filling is None:
        return target
    for split, count in (("train", train), ("test", test)):
        table = read(source, split)
        left = len(table) if count is None else count
        with pyarrow.parquet.ParquetWriter(filling / f"{split}-00000-of-00001.parquet", table.schema) as file:
            while left:
                file.write_table(table.slice(0, left))
                left -= min(left, len(table))
    return filling.rename(target)


def idx_folder(source: Path, work: Path) -> Path:
    """A root for `torchvision.datasets.MNIST(root)` with the images of `source`, as the raw files that it reads."""
    target = work / f"{fingerprint(source)}-idx"
    filling = made_once(target)
    if filling is None:
        return target
    raw = filling / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for split, name in (("train", "train"), ("test", "t10k")):
        rows = read(source, split)
        pixels = numpy.stack([numpy.asarray(Image.open(io.BytesIO(row["bytes"])).convert("L")) for row in rows["image"].to_pylist()])
        labels = numpy.array(rows["label"].to_pylist(), dtype=numpy.uint8)
        # Magic numbers: unsigned bytes (8), in 3 dimensions or 1; then the sizes, all big-endian.
        (raw / f"{name}-images-idx3-ubyte").write_bytes(struct.pack(">4i", 0x803, *pixels.shape) + pixels.tobytes())
        (raw / f"{name}-labels-idx1-ubyte").write_bytes(struct.pack(">2i", 0x801, len(labels)) + labels.tobytes())
    return filling.rename(target)
