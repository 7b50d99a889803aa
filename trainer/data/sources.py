"""A name or a folder -> train and test split, image and label column, class names; all through `datasets`, one code path."""

import logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from trainer.data.row_groups import StreamedRows, open_streams
from trainer.runtime import UserError, env_int

if TYPE_CHECKING:
    from datasets import Dataset

    Rows: TypeAlias = Dataset | StreamedRows

EMBEDDED = Path(__file__).parent / "mnist5k"
ALIASES = {"mnist5k": str(EMBEDDED), "mnist": "ylecun/mnist"}
TEST_SPLITS = ("test", "validation", "valid", "val", "eval", "dev")
IMAGE_COLUMNS = ("image", "img", "pixel_values", "picture", "jpg", "png")
LABEL_COLUMNS = ("label", "labels", "fine_label", "class", "target", "cls")


@dataclass(frozen=True)
class Source:
    """A data set found and opened, nothing decoded yet.

    Attributes:
        name: as the user gave it.
        train, test: the two splits, of columns `image` (undecoded: {"bytes", "path"}) and `label`.
        test_split: the name that the test split has in the data set.
        classes: the class names, in the order of the label numbers; the train split's.
        train_labels, test_labels: class numbers, one for each row.
    """

    name: str
    train: "Rows"
    test: "Rows"
    test_split: str
    classes: tuple[str, ...]
    train_labels: list[int]
    test_labels: list[int]


def load_source(name: str, streaming: bool = False) -> Source:
    """Open the data set that `--dataset` names.

    Args:
        streaming: leave the files where they are, see stream.py.

    Raises:
        UserError: it cannot be found, reached or read, or lacks a split, an image column or a label column.
    """
    splits = _load_splits(name, streaming)
    if "train" not in splits:
        raise UserError(f"--dataset {name} has no split 'train', only {_names(splits)}")
    test_split = next((split for split in TEST_SPLITS if split in splits), None)
    if test_split is None:
        raise UserError(f"--dataset {name} has no split to evaluate on ({', '.join(TEST_SPLITS)}), only {_names(splits)}")
    image, label = _columns(name, splits["train"])
    parts = []
    for split in ("train", test_split):
        part = splits[split]
        if image not in part.column_names or label not in part.column_names:
            raise UserError(f"--dataset {name}: the split '{split}' lacks the column '{image}' or '{label}'; it has {_names(part)}")
        if len(part) == 0:
            raise UserError(f"--dataset {name}: the split '{split}' is empty")
        parts.append(_undecoded(part, image, label))
    classes, train_labels, test_labels = _encode(name, parts[0], parts[1])
    return Source(name, parts[0], parts[1], test_split, classes, train_labels, test_labels)


def _names(splits: "dict[str, Rows] | Rows") -> str:
    return ", ".join(f"'{name}'" for name in (splits if isinstance(splits, dict) else splits.column_names))


def _load_splits(name: str, streaming: bool) -> "dict[str, Rows]":
    import datasets

    if not (sys.stderr.isatty() and env_int("RANK", 0) == 0):
        datasets.disable_progress_bars()
    # What its readers of files log as an error they raise too.
    logging.getLogger("datasets.packaged_modules").setLevel(logging.CRITICAL)
    place = ALIASES.get(name, name)
    looks_like_path = place.startswith((".", "/", "~")) or place.count("/") > 1 or os.path.exists(place)
    place = os.path.expanduser(place)
    if looks_like_path and not os.path.isdir(place):
        kind = "a file; give the folder that holds the files of the train and test split" if os.path.exists(place) else "not there"
        raise UserError(f"--dataset {name}: a local data set is a folder, and {place} is {kind}")
    try:
        if streaming:
            return open_streams(name, datasets.load_dataset_builder(place))
        return _load(place, looks_like_path)
    except UserError:
        raise
    except Exception as error:
        # `datasets` raises many kinds, from network libraries too; whichever it is, the user can only choose another way out.
        cause = error.__cause__ if isinstance(error, datasets.exceptions.DatasetGenerationError) else None
        reason = " ".join(str(cause or error).split()) or type(error).__name__
        if len(reason) > 200:
            reason = f"{reason[:100]} … {reason[-100:]}"
        if looks_like_path:
            broken = _broken_file(place)
            mend = f": replace or remove {broken}" if broken is not None else ""
            raise UserError(f"--dataset {name} cannot be read as a folder of images or Parquet files: {reason}{mend}") from None
        raise UserError(
            f"--dataset {name}: the data set '{place}' of the Hub cannot be loaded ({reason}); check the name and the network, set "
            "HF_ENDPOINT to a mirror of the Hub, give a local folder, or use the embedded --dataset mnist5k"
        ) from None


def _broken_file(folder: str) -> Path | None:
    """The first Parquet file that is none; `datasets` does not name it."""
    import pyarrow.parquet  # type: ignore[import-untyped]

    for file in sorted(Path(folder).rglob("*.parquet")):
        try:
            pyarrow.parquet.read_metadata(file)
        except Exception:
            return file
    return None


def _load(place: str, local: bool) -> "dict[str, Dataset]":
    import datasets

    if local:
        builder = datasets.load_dataset_builder(place)
        if builder.name == "parquet" and builder.info.features is None:
            # Together, `datasets` would read the test split by the train split's class names, and so mislabel another order of names.
            files = builder.config.data_files
            return {str(split): datasets.load_dataset("parquet", data_files={split: files[split]}, split=split) for split in files}
    loaded: dict[str, Dataset] = datasets.load_dataset(place)
    return loaded


def _columns(name: str, train: "Rows") -> tuple[str, str]:
    import datasets

    features = train.features
    images = [column for column, feature in features.items() if isinstance(feature, datasets.Image)]
    labels = [column for column, feature in features.items() if isinstance(feature, datasets.ClassLabel)]
    image = next((column for column in IMAGE_COLUMNS if column in images), images[0] if len(images) == 1 else None)
    label = next((column for column in LABEL_COLUMNS if column in features), labels[0] if len(labels) == 1 else None)
    if image is None:
        raise UserError(f"--dataset {name} has no image column ({', '.join(IMAGE_COLUMNS)}); its columns are {_names(train)}")
    if label is None:
        raise UserError(f"--dataset {name} has no label column ({', '.join(LABEL_COLUMNS)}); its columns are {_names(train)}")
    return image, label


def _undecoded(part: "Rows", image: str, label: str) -> "Rows":
    if isinstance(part, StreamedRows):
        return part.with_columns(image, label)
    import datasets

    part = part.select_columns([image, label]).rename_columns({old: new for old, new in ((image, "image"), (label, "label")) if old != new})
    return part.cast_column("image", datasets.Image(decode=False))


def _encode(name: str, train: "Rows", test: "Rows") -> tuple[tuple[str, ...], list[int], list[int]]:
    """Class names and numbers; the train split's mapping rules both splits, whatever each split's own order is."""
    import datasets

    features = [part.features["label"] for part in (train, test)]
    for feature in features:
        if not isinstance(feature, (datasets.ClassLabel, datasets.Value)):
            raise UserError(f"--dataset {name}: the label column must hold one class for each image, but holds {feature}")
    # Whole numbers without names, in either split, are the numbers of the other one's classes.
    by_number = any(isinstance(feature, datasets.Value) and "int" in feature.dtype for feature in features)
    found: list[list[Any]] = []
    for part, feature in zip((train, test), features, strict=True):
        values = list(part["label"])
        if isinstance(feature, datasets.ClassLabel):
            values = [None if v is None or v < 0 else v if by_number else feature.names[v] for v in values]
        if None in values:
            raise UserError(f"--dataset {name}: row {values.index(None)} has no label; every image of both splits needs one")
        found.append(values)
    known: list[Any] = sorted(set(found[0]))
    classes = [str(value) for value in known]
    # The names of an image folder are the folders of all splits; those of the train split alone rule.
    if isinstance(features[0], datasets.ClassLabel) and train.builder_name != "imagefolder":
        classes = list(features[0].names)
        known = list(range(len(classes))) if by_number else classes
    number = {value: index for index, value in enumerate(known)}
    unknown = sorted({str(value) for value in found[1] if value not in number})
    if unknown:
        raise UserError(
            f"--dataset {name}: the test split has classes that the train split lacks: {', '.join(unknown[:10])}: remove them, or add "
            "images of them to the train split"
        )
    return tuple(classes), [number[v] for v in found[0]], [number[v] for v in found[1]]
