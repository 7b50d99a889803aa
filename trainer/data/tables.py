"""Local files with one row an image: Parquet, Arrow, CSV, JSON; the image in the row, or a path relative to the file's folder."""

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.data.columns import IMAGE_COLUMNS, is_image_column
from trainer.data.folders import TEST_SPLITS, TRAIN_SPLITS, holds_classes, visible

if TYPE_CHECKING:
    from datasets import Dataset

# How `datasets` calls each kind of file, and reads it.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    ".parquet": ("parquet", {}),
    ".arrow": ("arrow", {}),
    ".csv": ("csv", {}),
    ".tsv": ("csv", {"sep": "\t"}),
    ".json": ("json", {}),
    ".jsonl": ("json", {}),
    ".ndjson": ("json", {}),
}
METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
PATH_COLUMNS = ("file_name", "filename", "file", "filepath", "file_path", "path", "image_path", "img_path", "image_file")


def kind_of(file: str | Path) -> tuple[str, dict[str, Any]] | None:
    """What `datasets` calls a file, and the options to read it; None for one that is no table."""
    return KINDS.get(Path(file).suffix.lower())


def find_texts(folder: str) -> dict[str, list[str]]:
    """CSV and JSON files with a split in their name, or in a folder of a split that holds no class folders; by split.

    Images may lie beside them. Not the metadata files that `datasets` reads.
    """
    found: dict[str, list[str]] = {}
    for entry in visible(folder):
        split = next((word for word in re.split(r"[\W_]+", entry.name.lower()) if word in TRAIN_SPLITS + TEST_SPLITS), None)
        if split is None:
            continue
        files = [entry] if not entry.is_dir() else [] if holds_classes(entry.path) else visible(entry.path)
        texts = [file.path for file in files if file.is_file() and (kind_of(file.path) or ("",))[0] in ("csv", "json")]
        texts = [path for path in texts if os.path.basename(path) not in METADATA]
        if texts:
            found.setdefault(split, []).extend(texts)
    return found


def load_tables(kind: str, options: dict[str, Any], files: dict[str, list[str]], image_column: str | None) -> "dict[str, Dataset]":
    """The splits as `datasets` reads them, one by one: together it would read the test split by the train split's class names.

    A column of paths becomes one of images, undecoded.

    Args:
        kind, options: see `kind_of`.
        files: of each split.
        image_column: its name; None: found among the usual ones.
    """
    import datasets

    loaded = {}
    for split, paths in files.items():
        table: Dataset = datasets.load_dataset(kind, data_files={split: paths}, split=split, **options)
        column = _path_column(table, image_column)
        if column is not None:
            parts = []
            for path in paths:
                part: Dataset = table
                if len(paths) > 1:
                    part = datasets.load_dataset(kind, data_files={split: [path]}, split=split, features=table.features, **options)
                folder = os.path.dirname(os.path.abspath(path))
                found = [None if value is None else os.path.join(folder, value) for value in part[column]]
                parts.append(part.remove_columns(column).add_column(column, found))
            table = datasets.concatenate_datasets(parts).cast_column(column, datasets.Image(decode=False))
        loaded[split] = table
    return loaded


def _path_column(table: "Dataset", image_column: str | None) -> str | None:
    import datasets

    texts = [name for name, feature in table.features.items() if isinstance(feature, datasets.Value) and "string" in feature.dtype]
    if image_column is not None:
        return image_column if image_column in texts else None
    if any(is_image_column(feature) for feature in table.features.values()):
        return None
    return next((name for name in IMAGE_COLUMNS + PATH_COLUMNS if name in texts), None)
