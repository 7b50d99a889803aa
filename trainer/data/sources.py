"""A name, a folder or a file -> a split to train on and one to evaluate on, image and label column, class names; all through `datasets`."""

import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from trainer.config import Config
from trainer.data.columns import find_columns, names, undecoded
from trainer.data.folders import TEST_SPLITS, TRAIN_SPLITS, find_splits, load_folders, visible
from trainer.data.labels import encode, encode_by, hold_out
from trainer.data.row_groups import StreamedRows, open_streams
from trainer.data.tables import KINDS, METADATA, find_texts, kind_of, load_tables
from trainer.named import NAME, find, reason
from trainer.runtime import UserError, env_int

if TYPE_CHECKING:
    from datasets import Dataset

    Rows: TypeAlias = Dataset | StreamedRows

EMBEDDED = Path(__file__).parent / "mnist5k"
ALIASES = {"mnist5k": str(EMBEDDED), "mnist": "ylecun/mnist"}
HELD_OUT = "held out"


@dataclass(frozen=True)
class Source:
    """A data set found and opened, nothing decoded yet.

    Attributes:
        name: the flag that named it, as the user gave it: what error messages begin with.
        train, test: the two splits, of columns `image` (undecoded: {"bytes", "path"}) and `label`.
        test_split: the name that the test split has in the data set, or `HELD_OUT`.
        classes: the class names, in the order of the label numbers; the train split's.
        train_labels, test_labels: class numbers, one for each row.
        train_numbers, test_numbers: rows of the data set's train split that the two are made of; None where nothing was held out.
    """

    name: str
    train: "Rows"
    test: "Rows"
    test_split: str
    classes: tuple[str, ...]
    train_labels: list[int]
    test_labels: list[int]
    train_numbers: list[int] | None = None
    test_numbers: list[int] | None = None


def load_source(config: Config) -> Source:
    """Open the data set that `--dataset` or `--data_dir` names.

    Args:
        config: those two, `dataset_config`, `train_split`, `eval_split`, `image_column`, `label_column`, `val_fraction` and, with the
            last, `seed`; `streaming` leaves the files where they are, see stream.py.

    Raises:
        UserError: it cannot be found, reached or read, or lacks a split, an image column, a label column or a second class.
    """
    name = config.data_flag
    splits = _load_splits(config)
    train_split, test_split = _choose_splits(name, splits, config)
    image, label = find_columns(name, splits[train_split], config.image_column, config.label_column)
    parts = []
    for split in (train_split, test_split):
        if split is None:
            continue
        part = splits[split]
        if image not in part.column_names or label not in part.column_names:
            raise UserError(f"{name}: the split '{split}' lacks the column '{image}' or '{label}'; it has {names(part)}")
        if len(part) == 0:
            raise UserError(f"{name}: the split '{split}' is empty")
        parts.append(undecoded(part, image, label))
    classes, labels = encode(name, parts)
    if test_split is not None:
        return Source(name, parts[0], parts[1], test_split, classes, labels[0], labels[1])
    assert config.val_fraction is not None
    rows = hold_out(name, labels[0], config.val_fraction, config.seed)
    train, test = (parts[0].select(part) for part in rows)
    train_labels, test_labels = ([labels[0][row] for row in part] for part in rows)
    return Source(name, train, test, HELD_OUT, classes, train_labels, test_labels, *rows)


@dataclass(frozen=True)
class EvalSource:
    """The split to evaluate a trained model on, opened, nothing decoded yet.

    Attributes:
        name, rows, split, labels, numbers: as `Source` has them for its test split; labels by the model's classes.
    """

    name: str
    rows: "Rows"
    split: str
    labels: list[int]
    numbers: list[int] | None = None


def load_eval_source(config: Config, classes: Sequence[str]) -> EvalSource:
    """Open what `--eval_split` of the data set says; unset: its split for that, else its only one.

    With `val_fraction`, what a training with the same labels and `seed` held out.

    Args:
        config: see `load_source`.
        classes: the model's.

    Raises:
        UserError: as `load_source`; and for a class that the model does not know.
    """
    name = config.data_flag
    if config.val_fraction is not None:
        source = load_source(config)
        unknown = sorted(set(source.classes) - set(classes))
        if unknown:
            raise UserError(f"{name} has classes that the model does not know: {', '.join(unknown[:10])}: name other data")
        labels = [classes.index(source.classes[label]) for label in source.test_labels]
        return EvalSource(name, source.test, source.test_split, labels, source.test_numbers)
    splits = _load_splits(config)
    split = config.eval_split or next((split for split in TEST_SPLITS if split in splits), None)
    if split is None and len(splits) == 1:
        split = next(iter(splits))
    if split is None or split not in splits:
        what = f"--eval_split {split}: {name} has" if split is not None else f"{name} has no split to evaluate on,"
        raise UserError(f"{what} only the splits {names(splits)}: name one of them by --eval_split")
    image, label = find_columns(name, splits[split], config.image_column, config.label_column)
    rows = undecoded(splits[split], image, label)
    if len(rows) == 0:
        raise UserError(f"{name}: the split '{split}' is empty")
    return EvalSource(name, rows, split, encode_by(name, split, rows, classes))


def _choose_splits(name: str, splits: "dict[str, Rows]", config: Config) -> tuple[str, str | None]:
    """The split to train on, and the one to evaluate on; None where that is to be held out."""
    for flag, split in (("--train_split", config.train_split), ("--eval_split", config.eval_split)):
        if split is not None and split not in splits:
            raise UserError(f"{flag} {split}: {name} has only the splits {names(splits)}: name one of them")
    train = config.train_split or next((split for split in TRAIN_SPLITS if split in splits), None)
    if train is None:
        raise UserError(f"{name} has no split 'train', only {names(splits)}: name one by --train_split")
    if config.eval_split == train:
        raise UserError(f"--eval_split {train} is what is trained on: name another one, or hold out a part of it by --val_fraction")
    test = config.eval_split or next((split for split in TEST_SPLITS if split in splits and split != train), None)
    if test is not None and config.val_fraction is not None:
        raise UserError(f"--val_fraction {config.val_fraction:g}: {name} has the split '{test}' to evaluate on: leave --val_fraction out")
    if test is None and config.val_fraction is None:
        raise UserError(
            f"{name} has no split to evaluate on ({', '.join(TEST_SPLITS)}), only {names(splits)}: name one by --eval_split, or hold out a "
            "part of the training images by --val_fraction 0.2"
        )
    return train, test


def _load_splits(config: Config) -> "dict[str, Rows]":
    import datasets

    if not (sys.stderr.isatty() and env_int("RANK", 0) == 0):
        datasets.disable_progress_bars()
    # What its readers of files log as an error they raise too.
    logging.getLogger("datasets.packaged_modules").setLevel(logging.CRITICAL)
    name = config.data_flag
    if config.data_dir is None and NAME.fullmatch(config.dataset) and not os.path.exists(config.dataset):
        return _call(config)
    place = config.data_dir or ALIASES.get(config.dataset, config.dataset)
    local = config.data_dir is not None or place.startswith((".", "/", "~")) or place.count("/") > 1 or os.path.exists(place)
    place = os.path.expanduser(place)
    if local:
        _check_place(name, place, config.data_dir is not None)
    try:
        if config.streaming:
            return dict(open_streams(name, datasets.load_dataset_builder(place, config.dataset_config)))
        if local:
            return _load_local(name, place, config)
        loaded: dict[str, Dataset] = datasets.load_dataset(place, config.dataset_config)
        return loaded
    except UserError:
        raise
    except Exception as error:
        # `datasets` raises many kinds, from network libraries too; whichever it is, the user can only choose another way out.
        cause = error.__cause__ if isinstance(error, datasets.exceptions.DatasetGenerationError) else None
        reason = " ".join(str(cause or error).split()) or type(error).__name__
        if len(reason) > 200:
            reason = f"{reason[:100]} … {reason[-100:]}"
        if "onfig name is missing" in reason or "BuilderConfig" in reason:
            raise UserError(f"{name} has several configurations: choose one by --dataset_config ({reason})") from None
        if local:
            broken = _broken_file(place)
            mend = f": replace or remove {broken}" if broken is not None else ""
            raise UserError(
                f"{name} cannot be read as class folders of images, Parquet, Arrow, CSV or JSON files: {reason}{mend}"
            ) from None
        raise UserError(
            f"{name}: the data set '{place}' of the Hub cannot be loaded ({reason}); check the name and the network, set "
            "HF_ENDPOINT to a mirror of the Hub, give a local folder, or use the embedded --dataset mnist5k"
        ) from None


def _call(config: Config) -> "dict[str, Rows]":
    """The splits that a function of the user's own returns."""
    import datasets

    name, function = config.data_flag, find("--dataset", config.dataset)
    for flag, given in (("--dataset_config", config.dataset_config is not None), ("--streaming", config.streaming)):
        if given:
            raise UserError(f"{flag} is not for {name}, a function that takes no arguments: leave it out")
    try:
        splits = function()
    except Exception as error:
        raise UserError(f"{name} fails ({reason(error)}): correct it") from None
    if not isinstance(splits, dict) or not splits or not all(isinstance(split, datasets.Dataset) for split in splits.values()):
        kinds = ", ".join(sorted({type(split).__name__ for split in splits.values()})) if isinstance(splits, dict) else ""
        raise UserError(
            f"{name} returns a {type(splits).__name__}{f' of {kinds}' if kinds else ''}: let it return a dict of datasets.Dataset, as "
            "{'train': ..., 'test': ...}; `datasets.Dataset.from_dict({'image': images, 'label': labels})` makes one"
        )
    return dict(splits)


def _check_place(name: str, place: str, folder: bool) -> None:
    if not os.path.exists(place):
        raise UserError(f"{name}: a local data set is a folder{'' if folder else ' or a file'}, and {place} is not there")
    if os.path.isdir(place):
        return
    if folder:
        raise UserError(f"{name}: {place} is a file: give the folder that holds the class folders, or the file by --dataset")
    if kind_of(place) is None:
        raise UserError(f"{name}: {place} is a file of another kind than {', '.join(KINDS)}: give one of these, or a folder")


def _broken_file(place: str) -> Path | None:
    """The first file of rows that cannot be read; `datasets` does not name it."""
    for file in [Path(place)] if os.path.isfile(place) else sorted(Path(place).rglob("[!.]*")):
        kind = kind_of(file)
        if kind is None or not file.is_file():
            continue
        try:
            load_tables(*kind, {"train": [str(file)]}, None)
        except Exception:
            return file
    return None


def _load_local(name: str, place: str, config: Config) -> "dict[str, Rows]":
    import datasets

    if config.data_dir is not None:
        splits = find_splits(place)
        if not splits:
            raise UserError(f"{name}: there are no class folders of images, as {place}/train/CLASS or {place}/CLASS: name their folder")
        return load_folders(name, splits)
    kind = kind_of(place)
    if os.path.isfile(place):
        assert kind is not None
        if config.dataset_config is not None:
            raise UserError(f"--dataset_config {config.dataset_config}: {name} is a file, which has no configurations: leave it out")
        return load_tables(*kind, {"train": [place]}, config.image_column)
    if config.dataset_config is None and (found := _load_plain(name, place, config.image_column)):
        return found
    builder = datasets.load_dataset_builder(place, config.dataset_config)
    if builder.name in ("parquet", "arrow", "csv", "json") and builder.info.features is None:
        files = {str(split): list(paths) for split, paths in builder.config.data_files.items()}
        return load_tables(builder.name, {"sep": builder.config.sep} if builder.name == "csv" else {}, files, config.image_column)
    loaded: dict[str, Dataset] = datasets.load_dataset(place, config.dataset_config)
    return loaded


def _load_plain(name: str, place: str, image_column: str | None) -> "dict[str, Dataset] | None":
    """A folder that needs none of `datasets`' guesses: saved by it, with a CSV or JSON file for each split, or of class folders."""
    import datasets

    if {"dataset_dict.json", "state.json"} & set(os.listdir(place)):
        saved = datasets.load_from_disk(place)
        return saved if isinstance(saved, datasets.DatasetDict) else {"train": saved}
    texts = find_texts(place)
    if texts.keys() & set(TRAIN_SPLITS):
        suffixes = {Path(path).suffix.lower() for paths in texts.values() for path in paths}
        if len(suffixes) > 1:
            raise UserError(f"{name} has tables of several kinds ({', '.join(sorted(suffixes))}): leave those of one kind there")
        return load_tables(*KINDS[suffixes.pop()], texts, image_column)
    near = [entry.name for folder in (place, *(entry.path for entry in visible(place) if entry.is_dir())) for entry in visible(folder)]
    if any(file in METADATA or file.endswith((".parquet", ".arrow")) for file in near):
        return None
    splits = find_splits(place)
    return load_folders(name, splits) if splits else None
