"""Class folders of every shape, with what programs leave behind in them, and shares held out for evaluation."""

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import ids_image, write_parquet
from tests.ranks import Ranks
from trainer.config import Config
from trainer.data.folders import TEST_SPLITS
from trainer.data.labels import hold_out
from trainer.data.sources import Source, load_source
from trainer.runtime import Processes, UserError

PETS = ("cat", "dog", "emu")


def write_classes(folder: Path, classes: tuple[str, ...] = PETS, count: int = 2, suffix: str = ".png") -> Path:
    """FOLDER/CLASS/0.png …; the images of a class have the same numbers."""
    for name in classes:
        (folder / name).mkdir(parents=True)
        for index in range(count):
            ids_image(index).save(folder / name / f"{index}{suffix}")
    return folder


def opened(folder: Path | str, flag: str = "data_dir", **knobs: Any) -> Source:
    named: dict[str, Any] = {flag: str(folder)}
    return load_source(Config(**named, **knobs))


def refusal(folder: Path | str, flag: str = "data_dir", **knobs: Any) -> str:
    with pytest.raises(UserError) as raised:
        opened(folder, flag, **knobs)
    text = str(raised.value)
    assert "\n" not in text
    return text.replace(f"--{flag} {folder}", "PETS").replace(str(folder), "FOLDER")


def paths(source: Source) -> list[list[str]]:
    return [[record["path"] for record in part["image"]] for part in (source.train, source.test)]


@pytest.mark.parametrize("flag", ["data_dir", "dataset"])
@pytest.mark.parametrize("split", TEST_SPLITS)
def test_a_folder_for_each_split(tmp_path: Path, split: str, flag: str) -> None:
    write_classes(tmp_path / "train")
    write_classes(tmp_path / split, ("emu", "cat"), count=1)
    source = opened(tmp_path, flag)
    assert (source.classes, source.test_split) == (PETS, split)
    assert (source.train_labels, source.test_labels) == ([0, 0, 1, 1, 2, 2], [0, 2])
    assert paths(source)[1] == [str(tmp_path / split / name / "0.png") for name in ("cat", "emu")]
    assert source.name == f"--{flag} {tmp_path}"


@pytest.mark.parametrize("flag", ["data_dir", "dataset"])
@pytest.mark.parametrize(
    "inner", ["", "train", "pets", "pets/train", "Train"], ids=["plain", "train", "wrapped", "wrapped train", "capital"]
)
def test_train_alone_is_parted(tmp_path: Path, inner: str, flag: str) -> None:
    write_classes(tmp_path / inner, count=10)
    source = opened(tmp_path, flag, val_fraction=0.3)
    assert (source.classes, source.test_split) == (PETS, "held out")
    assert Counter(source.train_labels) == {0: 7, 1: 7, 2: 7}
    assert Counter(source.test_labels) == {0: 3, 1: 3, 2: 3}
    train, test = paths(source)
    assert not set(train) & set(test)
    assert len(set(train) | set(test)) == 30
    for part, labels in ((train, source.train_labels), (test, source.test_labels)):
        assert [PETS.index(Path(path).parent.name) for path in part] == labels


def test_a_class_may_be_called_like_a_split(tmp_path: Path) -> None:
    """Bus, car and train; and file names with such words, which `datasets` takes for splits."""
    write_classes(tmp_path, ("bus", "test", "train"), count=4)
    (tmp_path / "bus" / "0.png").rename(tmp_path / "bus" / "val_0.png")
    source = opened(tmp_path, "dataset", val_fraction=0.25)
    assert source.classes == ("bus", "test", "train")
    assert len(source.train) + len(source.test) == 12


JUNK = (
    ".ipynb_checkpoints/0.png",
    "train/.ipynb_checkpoints/0.png",
    "train/cat/.ipynb_checkpoints/0.png",
    "train/._cat/0.png",
    "train/cat/._0.png",
    "train/cat/.hidden.png",
    "test/cat/._0.png",
    ".cache/train/fox/0.png",
    "__MACOSX/train/cat/0.png",
    "__MACOSX/train/cat/._0.png",
    "train/__MACOSX/0.png",
    "train/cat/__MACOSX/0.png",
    ".DS_Store",
    "train/.DS_Store",
    "train/cat/.DS_Store",
    "train/Thumbs.db",
    "train/cat/Thumbs.db",
    "train/cat/desktop.ini",
    "README.md",
    "train/labels.txt",
    "train/cat/0.xml",
)


@pytest.mark.parametrize("flag", ["data_dir", "dataset"])
@pytest.mark.parametrize("junk", JUNK)
def test_what_programs_leave_behind_is_ignored(tmp_path: Path, junk: str, flag: str) -> None:
    for split in ("train", "test"):
        write_classes(tmp_path / split)
    expected = paths(opened(tmp_path, flag))
    (tmp_path / junk).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / junk).write_bytes(b"\0\5\x16\7 no image")
    source = opened(tmp_path, flag)
    assert (source.classes, paths(source)) == (PETS, expected)


def test_hidden_parquet_files_are_ignored(tmp_path: Path) -> None:
    for split in ("train", "test"):
        write_parquet(tmp_path / f"{split}.parquet", [ids_image(i) for i in range(2)], [0, 1])
        (tmp_path / f"._{split}.parquet").write_bytes(b"\0\5\x16\7")
    (tmp_path / "__MACOSX").mkdir()
    (tmp_path / "__MACOSX" / "train.parquet").write_bytes(b"\0\5\x16\7")
    assert len(opened(tmp_path, "dataset").train) == 2


def test_links_are_followed_and_kinds_of_files_are_mixed(tmp_path: Path) -> None:
    write_classes(tmp_path / "store", ("cat",), suffix=".JPEG")
    write_classes(tmp_path / "pets" / "train", ("dog",), suffix=".tiff")
    write_classes(tmp_path / "pets" / "val", ("dog",), suffix=".webp")
    (tmp_path / "pets" / "train" / "cat").symlink_to(tmp_path / "store" / "cat")
    (tmp_path / "pets" / "train" / "dog" / "2.bmp").symlink_to(tmp_path / "store" / "cat" / "0.JPEG")
    source = opened(tmp_path / "pets")
    assert (source.train_labels, source.test_labels) == ([0, 0, 1, 1, 1], [1, 1])


def test_names_may_be_of_any_letters(tmp_path: Path) -> None:
    names = ("Größe 1", "[a]*?", "犬")
    write_classes(tmp_path / "d[1]*" / "train", names)
    write_classes(tmp_path / "d[1]*" / "val", names)
    assert opened(tmp_path / "d[1]*").classes == names


def test_class_folders_missing_in_test_do_not_shift_the_numbers(tmp_path: Path) -> None:
    write_classes(tmp_path / "train")
    write_classes(tmp_path / "test", ("emu",))
    (tmp_path / "test" / "cat").mkdir()
    source = opened(tmp_path)
    assert (source.classes, source.test_labels) == (PETS, [2, 2])


def in_train(name: str, content: str = "") -> Any:
    def change(folder: Path) -> None:
        path = folder / "train" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith("/"):
            path.mkdir()
        elif content:
            path.write_text(content)
        else:
            ids_image(0).save(path)

    return change


def without(*names: str) -> Any:
    def change(folder: Path) -> None:
        for name in names:
            shutil.rmtree(folder / name)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(
            lambda folder: write_classes(folder / "test", ("ant",)),
            "PETS: the test split has classes that the train split lacks: ant: remove them, or add images of them to the train split",
            id="a class of the test split only",
        ),
        pytest.param(in_train("0.png"), "PETS: FOLDER/train/0.png is in no class folder: move it into one, or remove it", id="no class"),
        pytest.param(
            in_train("cat/persian/0.png"),
            "PETS: FOLDER/train/cat/persian is a folder in a class folder: images must lie in FOLDER/train/cat itself",
            id="deeper",
        ),
        pytest.param(in_train("fox/"), "PETS: the class folder FOLDER/train/fox has no images: add some, or remove it", id="empty"),
        pytest.param(
            in_train("fox/0.heic", "x"), "PETS: the class folder FOLDER/train/fox has no images: add some, or remove it", id="unknown kind"
        ),
        pytest.param(
            without("test"),
            f"PETS has no split to evaluate on ({', '.join(TEST_SPLITS)}), only 'train': name one by --eval_split, or hold out a "
            "part of the training images by --val_fraction 0.2",
            id="no test split",
        ),
        pytest.param(without("train"), "PETS has no split 'train', only 'test': name one by", id="no train"),
        pytest.param(
            without("train/cat", "train/dog"),
            "PETS: the test split has classes that the train split lacks: cat, dog",
            id="one class",
        ),
        pytest.param(
            without("train", "test"),
            "PETS: there are no class folders of images, as FOLDER/train/CLASS or FOLDER/CLASS: name their folder",
            id="nothing",
        ),
        pytest.param(shutil.rmtree, "PETS: a local data set is a folder, and FOLDER is not there", id="no folder"),
    ],
)
def test_folders_refused(tmp_path: Path, change: Any, message: str) -> None:
    for split in ("train", "test"):
        write_classes(tmp_path / "pets" / split)
    change(tmp_path / "pets")
    assert refusal(tmp_path / "pets").startswith(message)


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x")
    assert refusal(tmp_path / "a.csv").endswith("is a file: give the folder that holds the class folders, or the file by --dataset")


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"val_fraction": 0.2}, "--val_fraction 0.2: PETS has the split 'test' to evaluate on: leave --val_fraction out"),
        ({"eval_split": "val"}, "--eval_split val: PETS has only the splits 'test', 'train': name one of them"),
        ({"train_split": "all"}, "--train_split all: PETS has only the splits 'test', 'train': name one of them"),
        ({"eval_split": "train"}, "--eval_split train is what is trained on: name another one, or hold out a part of it by --val_fraction"),
    ],
)
def test_splits_refused(tmp_path: Path, knobs: dict[str, Any], message: str) -> None:
    for split in ("train", "test"):
        write_classes(tmp_path / split)
    assert refusal(tmp_path, **knobs) == message


def test_splits_can_be_named(tmp_path: Path) -> None:
    for number, split in enumerate(("train", "val", "test"), start=1):
        write_classes(tmp_path / split, count=number)
    source = opened(tmp_path, train_split="test", eval_split="val")
    assert (len(source.train), len(source.test), source.test_split) == (9, 6, "val")
    assert len(opened(tmp_path, train_split="test").test) == 6, "what is trained on is not found as the split to evaluate on"


# Shares held out


def test_each_class_gives_its_share_and_keeps_one_image() -> None:
    labels = [0] * 10 + [2] * 1 + [3] * 5 + [1] * 2 + [0] * 30
    train, test = hold_out("some", labels, 0.3, seed=0)
    assert sorted(train + test) == list(range(48))
    assert (train, test) == (sorted(train), sorted(test))
    assert Counter(labels[row] for row in test) == {0: 12, 1: 1, 3: 2}
    train, test = hold_out("some", labels, 0.999, seed=0)
    assert Counter(labels[row] for row in train) == {0: 1, 1: 1, 2: 1, 3: 1}


def test_the_seed_and_nothing_else_draws_them() -> None:
    labels = [0, 1] * 50
    one = hold_out("some", labels, 0.2, seed=0)
    assert hold_out("some", labels, 0.2, seed=0) == one
    others = [hold_out("some", labels, 0.2, seed=seed)[1] for seed in range(200)]
    assert len({tuple(test) for test in others}) == 200
    drawn = Counter(row for test in others for row in test)
    assert len(drawn) == 100
    # 200 draws of a share of 0.2: mean 40, deviation 5.7.
    assert 18 < min(drawn.values()) <= max(drawn.values()) < 65


def test_a_share_of_nothing_is_refused() -> None:
    with pytest.raises(UserError, match=r"^--val_fraction 0.1 of some holds out none of its 4 images: give a larger one$"):
        hold_out("some", [0, 1, 0, 1], 0.1, seed=0)


def parted(processes: Processes, folder: Path) -> tuple[list[int] | None, list[int], list[list[str]]]:
    source = processes.local_main_first(lambda: opened(folder, val_fraction=0.3, seed=3))
    return source.test_numbers, source.test_labels, paths(source)


def test_two_processes_hold_out_what_one_does(two_ranks: Ranks, tmp_path: Path) -> None:
    from tests.ranks import alone

    write_classes(tmp_path, count=10)
    expected = alone(parted, tmp_path)
    assert two_ranks.run(parted, tmp_path) == [expected] * 2
    assert expected[0] is not None
    assert len(expected[0]) == 9
