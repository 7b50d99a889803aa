"""Images in class folders: FOLDER/train/CLASS/image and another split beside train, or FOLDER/CLASS/image.

`datasets` can read them too, but takes words in file names for splits ("cat/test_1.png"), and minutes for what is listed here in a second.
"""

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.runtime import UserError

if TYPE_CHECKING:
    from datasets import Dataset

TRAIN_SPLITS = ("train", "training")
TEST_SPLITS = ("test", "validation", "valid", "val", "eval", "dev", "testing", "evaluation")


def visible(folder: str | Path) -> "list[os.DirEntry[str]]":
    """What is in a folder, sorted by name, without what programs leave behind (.DS_Store, ._x.png, .ipynb_checkpoints, __MACOSX)."""
    with os.scandir(folder) as entries:
        return sorted((entry for entry in entries if not entry.name.startswith((".", "__"))), key=lambda entry: entry.name)


@cache
def image_extensions() -> frozenset[str]:
    """Of all kinds of files that Pillow can read."""
    from PIL import Image

    return frozenset(extension for extension, kind in Image.registered_extensions().items() if kind in Image.OPEN)


def is_image(entry: "os.DirEntry[str]") -> bool:
    return os.path.splitext(entry.name)[1].lower() in image_extensions() and entry.is_file()


def _folders(folder: str | Path) -> "list[os.DirEntry[str]]":
    return [entry for entry in visible(folder) if entry.is_dir()]


def _images(folder: str | Path) -> "Iterator[os.DirEntry[str]]":
    return (entry for entry in visible(folder) if is_image(entry))


def _holds_images(folder: str | Path) -> bool:
    return any(_images(folder)) or any(_holds_images(entry.path) for entry in _folders(folder))


def images_below(folder: str | Path) -> list[str]:
    """Paths of all images in a folder, at any depth."""
    inside = [path for entry in _folders(folder) for path in images_below(entry.path)]
    return [image.path for image in _images(folder)] + inside


def holds_classes(folder: str | Path) -> bool:
    """Whether there are images in folders of it."""
    return any(_holds_images(entry.path) for entry in _folders(folder))


def find_splits(folder: str | Path) -> dict[str, str]:
    """Names and paths of the folders of class folders; the folder itself as 'train' where it holds the class folders; empty without any."""
    children = _folders(folder)
    splits = {
        entry.name.lower(): entry.path
        for entry in children
        if entry.name.lower() in TRAIN_SPLITS + TEST_SPLITS and holds_classes(entry.path)
    }
    if splits:
        return splits
    if any(any(_images(entry.path)) for entry in children):
        return {"train": str(folder)}
    # As an archive is unpacked into a folder of its name.
    return find_splits(children[0].path) if len(children) == 1 and not any(_images(folder)) else {}


def load_folders(name: str, splits: dict[str, str]) -> "dict[str, Dataset]":
    """The splits as data sets of the columns `image` (a path) and `label` (the class folder's name).

    Args:
        name: what error messages call the data set.
        splits: see `find_splits`.

    Raises:
        UserError: images lie outside of class folders, or a class folder has none.
    """
    import datasets

    loaded = {}
    for split, folder in splits.items():
        paths: list[str] = []
        labels: list[str] = []
        for entry in visible(folder):
            if not entry.is_dir():
                if is_image(entry):
                    raise UserError(f"{name}: {entry.path} is in no class folder: move it into one, or remove it")
                continue
            found = [image.path for image in _images(entry.path)]
            for inner in _folders(entry.path):
                if _holds_images(inner.path):
                    raise UserError(f"{name}: {inner.path} is a folder in a class folder: images must lie in {entry.path} itself")
            if not found and (split in TRAIN_SPLITS or any(visible(entry.path))):
                raise UserError(f"{name}: the class folder {entry.path} has no images: add some, or remove it")
            paths += found
            labels += [entry.name] * len(found)
        loaded[split] = datasets.Dataset.from_dict({"image": paths, "label": labels}).cast_column("image", datasets.Image(decode=False))
    return loaded
