"""Names and folders: what is found, what is refused with one sentence, and whose class numbers rule."""

import hashlib
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import pytest

from tests.helpers import ROOT, ids_image, write_ids, write_parquet
from trainer.config import Config
from trainer.data.folders import TEST_SPLITS
from trainer.data.sources import Source, load_source
from trainer.runtime import UserError

MNIST = ROOT.parent / "shared" / "data" / "mnist"
IMAGE = datasets.Image()
MEND = ": remove them, or add images of them to the train split"
TEXT, NUMBER, TRUTH, FRACTION = (datasets.Value(dtype) for dtype in ("string", "int64", "bool", "float64"))


def named(*names: str) -> Any:
    return datasets.ClassLabel(names=list(names))


def write_labels(
    folder: Path, train: list[Any], test: list[Any], kinds: tuple[Any, Any], image: str = "image", label: str = "label"
) -> str:
    """A folder of two Parquet files with these labels; `kinds` are the label columns' types in train and test."""
    folder.mkdir()
    for split, labels, kind in (("train", train, kinds[0]), ("test", test, kinds[1])):
        write_parquet(folder / f"{split}.parquet", [ids_image(i) for i in range(len(labels))], labels, **{image: IMAGE, label: kind})
    return str(folder)


def opened(name: str, **knobs: Any) -> Source:
    return load_source(Config(dataset=name, **knobs))


def refusal(name: str, **knobs: Any) -> str:
    with pytest.raises(UserError) as raised:
        opened(name, **knobs)
    text = str(raised.value)
    assert "\n" not in text
    assert text.startswith(f"--dataset {name}")
    return text


def test_the_embedded_digits() -> None:
    source = opened("mnist5k")
    assert source.classes == tuple("0123456789")
    assert source.test_split == "test"
    assert Counter(source.train_labels) == dict.fromkeys(range(10), 400)
    assert Counter(source.test_labels) == dict.fromkeys(range(10), 100)
    train, test = ([hashlib.sha256(row["bytes"]).hexdigest() for row in part["image"]] for part in (source.train, source.test))
    assert (len(train), len(test)) == (4000, 1000)
    assert not set(train) & set(test)
    assert source.train_labels[:50] != sorted(source.train_labels[:50]), "not sorted by class"


@pytest.mark.skipif(not MNIST.is_dir(), reason=f"full MNIST is not at {MNIST}")
def test_full_mnist() -> None:
    source = opened(str(MNIST))
    assert (len(source.train), len(source.test)) == (60_000, 10_000)
    assert source.classes == tuple("0123456789")
    assert Counter(source.train_labels)[1] == 6742
    assert Counter(source.test_labels)[9] == 1009


def test_a_folder_of_parquet_files(tmp_path: Path) -> None:
    source = opened(str(write_ids(tmp_path / "ids", train=12, test=5)))
    assert (len(source.train), len(source.test)) == (12, 5)
    assert source.train_labels == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
    assert source.train.column_names == ["image", "label"]
    assert set(source.train[0]["image"]) == {"bytes", "path"}, "nothing is decoded yet"


def test_paths_are_relative_or_below_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_ids(tmp_path / "ids", train=3, test=2)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("ids", "./ids", "~/ids"):
        assert len(opened(name).train) == 3


def test_parts_of_a_split_are_put_together(tmp_path: Path) -> None:
    folder = write_ids(tmp_path / "ids", train=4, test=2)
    (folder / "train.parquet").rename(folder / "train-00000-of-00002.parquet")
    write_parquet(folder / "train-00001-of-00002.parquet", [ids_image(9)] * 3, [7, 8, 9])
    assert opened(str(folder)).train_labels == [0, 1, 2, 3, 7, 8, 9]


@pytest.mark.parametrize("split", TEST_SPLITS)
def test_the_test_split_has_many_names(tmp_path: Path, split: str) -> None:
    folder = write_ids(tmp_path / "ids", train=4, test=2)
    (folder / "test.parquet").rename(folder / f"{split}.parquet")
    source = opened(str(folder))
    # `datasets` itself renames val, valid, dev and eval.
    assert source.test_split in TEST_SPLITS
    assert len(source.test) == 2


@pytest.mark.parametrize("name", ["nowhere", "someone/nothing", "mnist"])
def test_an_unreachable_name_of_the_hub_names_the_ways_out(name: str) -> None:
    text = refusal(name)
    assert ("ylecun/mnist" if name == "mnist" else name) in text
    assert all(way in text for way in ("HF_ENDPOINT", "--dataset mnist5k", "a local folder", "the network"))


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("./nowhere", "a local data set is a folder or a file, and ./nowhere is not there"),
        ("/no/where", "a local data set is a folder or a file, and /no/where is not there"),
        ("a/b/c", "a local data set is a folder or a file, and a/b/c is not there"),
        (
            "file.txt",
            "file.txt is a file of another kind than .parquet, .arrow, .csv, .tsv, .json, .jsonl, .ndjson: give one of these, or a folder",
        ),
        ("empty", "empty doesn't contain any data files"),
        (
            "texts",
            "texts has no image column (image, img, pixel_values, picture, jpg, png); its columns are 'text': name it by --image_column",
        ),
    ],
)
def test_what_is_no_data_set(name: str, end: str) -> None:
    Path("file.txt").write_text("x")
    Path("empty").mkdir()
    Path("texts").mkdir()
    for split in ("train", "test"):
        (Path("texts") / f"{split}.txt").write_text("x")
    assert refusal(name).endswith(end)


@pytest.mark.parametrize(
    ("present", "absent", "end"),
    [
        (
            "train",
            "test",
            "has no split to evaluate on (test, validation, valid, val, eval, dev, testing, evaluation), only 'train': name one by "
            "--eval_split, or hold out a part of the training images by --val_fraction 0.2",
        ),
        ("test", "train", "has no split 'train', only 'test': name one by --train_split"),
    ],
)
def test_a_missing_split_names_those_that_exist(tmp_path: Path, present: str, absent: str, end: str) -> None:
    folder = write_ids(tmp_path / "ids", train=4, test=2)
    (folder / f"{absent}.parquet").unlink()
    assert refusal(str(folder)).endswith(end)


def test_an_empty_split_is_refused(tmp_path: Path) -> None:
    folder = write_ids(tmp_path / "ids", train=4)
    features = datasets.Features({"image": IMAGE, "label": named("a", "b")})
    datasets.Dataset.from_dict({"image": [], "label": []}, features=features).to_parquet(str(folder / "test.parquet"))
    assert "test" in refusal(str(folder)).split("JSON files:")[1]


def test_a_broken_file_is_refused(tmp_path: Path) -> None:
    folder = write_ids(tmp_path / "ids", train=4, test=2)
    content = (folder / "train.parquet").read_bytes()
    (folder / "train.parquet").write_bytes(content[: len(content) // 2])
    text = refusal(str(folder))
    assert "cannot be read as class folders of images, Parquet, Arrow, CSV or JSON files: Parquet magic bytes not found" in text
    assert text.endswith(f": replace or remove {folder / 'train.parquet'}")


def test_parts_with_different_columns_are_refused_with_the_cause(tmp_path: Path) -> None:
    folder = write_ids(tmp_path / "ids", train=4, test=2)
    (folder / "train.parquet").rename(folder / "train-00000-of-00002.parquet")
    write_parquet(folder / "train-00001-of-00002.parquet", [ids_image(9)], [0], image=IMAGE, kind=NUMBER)
    assert refusal(str(folder)).endswith("because column names don't match")


@pytest.mark.parametrize(
    ("image", "label"), [("img", "label"), ("image", "fine_label"), ("img", "fine_label"), ("picture", "cls"), ("photo", "species")]
)
def test_columns_are_found_under_their_usual_names_or_by_type(tmp_path: Path, image: str, label: str) -> None:
    source = opened(write_labels(tmp_path / "set", [1, 0], [1], (named("a", "b"), named("a", "b")), image, label))
    assert (source.classes, source.train_labels, source.test_labels) == (("a", "b"), [1, 0], [1])
    assert source.train.column_names == ["image", "label"]


def test_fine_label_comes_before_another_class_label(tmp_path: Path) -> None:
    features = datasets.Features({"img": IMAGE, "coarse_label": named("x", "y", "z"), "fine_label": named("a", "b")})
    for split in ("train", "test"):
        rows = [{"img": ids_image(i), "coarse_label": 2, "fine_label": i} for i in range(2)]
        datasets.Dataset.from_list(rows, features=features).to_parquet(str(tmp_path / f"{split}.parquet"))
    source = opened(str(tmp_path))
    assert (source.classes, source.train_labels) == (("a", "b"), [0, 1])


def test_a_missing_column_lists_those_that_exist(tmp_path: Path) -> None:
    labels = write_labels(tmp_path / "no_label", [0, 1], [1], (NUMBER, NUMBER), label="score")
    assert refusal(labels).endswith(
        "has no label column (label, labels, fine_label, class, target, cls); its columns are 'image', 'score': name it by --label_column"
    )
    images = tmp_path / "no_image"
    images.mkdir()
    for split in ("train", "test"):
        datasets.Dataset.from_dict({"text": ["a"], "label": [0]}).to_parquet(str(images / f"{split}.parquet"))
    assert refusal(str(images)).endswith("its columns are 'text', 'label': name it by --image_column")


def test_a_column_missing_in_the_test_split_is_refused(tmp_path: Path) -> None:
    folder = write_ids(tmp_path / "ids", train=4)
    write_parquet(folder / "test.parquet", [ids_image(0)], [1], image=IMAGE, kind=named("a", "b"))
    assert refusal(str(folder)).endswith("the split 'test' lacks the column 'image' or 'label'; it has 'image', 'kind'")


@pytest.mark.parametrize(
    ("train", "test", "kinds", "expected"),
    [
        pytest.param(["b", "a", "c"], ["c", "a"], (TEXT, TEXT), ("a b c", [1, 0, 2], [2, 0]), id="texts"),
        pytest.param([5, 1, 9], [9, 1], (NUMBER, NUMBER), ("1 5 9", [1, 0, 2], [2, 0]), id="numbers"),
        pytest.param([0, 1, 2], [0, 1, 2], (named("a", "b", "c"), named("c", "a", "b")), ("a b c", [0, 1, 2], [2, 0, 1]), id="other order"),
        pytest.param([2, 1, 0], [1, 0], (named("a", "b", "c"), named("a", "c")), ("a b c", [2, 1, 0], [2, 0]), id="test lacks a class"),
        pytest.param([2, 0], [1], (named("a", "b", "c"), named("a", "b", "c")), ("a b c", [2, 0], [1]), id="declared without an image"),
        pytest.param([1, 0], ["b"], (named("a", "b"), TEXT), ("a b", [1, 0], [1]), id="names and texts"),
        pytest.param(["b", "a"], [0, 1], (TEXT, named("b", "a")), ("a b", [1, 0], [1, 0]), id="texts and names"),
        pytest.param([100, -5, 7], [7, -5], (NUMBER, NUMBER), ("-5 7 100", [2, 0, 1], [1, 0]), id="numbers of any values"),
        pytest.param([3, 0], [3], (datasets.Value("uint8"), NUMBER), ("0 3", [1, 0], [1]), id="numbers of several types"),
        pytest.param([True, False], [True], (TRUTH, TRUTH), ("False True", [1, 0], [1]), id="true and false"),
        pytest.param([True, False], [1], (TRUTH, NUMBER), ("False True", [1, 0], [1]), id="true and 1"),
        pytest.param(["2", "1", "x"], [1, 2], (TEXT, NUMBER), ("1 2 x", [1, 0, 2], [0, 1]), id="texts that look like numbers"),
        pytest.param([1, 0], [1], (named("a", "b"), NUMBER), ("a b", [1, 0], [1]), id="names and numbers"),
        pytest.param([1, 0], [1], (NUMBER, named("b", "a")), ("0 1", [1, 0], [1]), id="numbers and names"),
    ],
)
def test_the_train_splits_classes_rule(
    tmp_path: Path, train: list[Any], test: list[Any], kinds: tuple[Any, Any], expected: tuple[str, list[int], list[int]]
) -> None:
    source = opened(write_labels(tmp_path / "set", train, test, kinds))
    assert (" ".join(source.classes), source.train_labels, source.test_labels) == expected


@pytest.mark.parametrize(
    ("train", "test", "kinds", "end"),
    [
        pytest.param([0, 1], [0, 1], (named("a", "b"), named("a", "z")), f"has classes that the train split lacks: z{MEND}", id="name"),
        pytest.param(["a", "b"], ["q", "a", "p"], (TEXT, TEXT), f"has classes that the train split lacks: p, q{MEND}", id="texts"),
        pytest.param([0, 1], [2], (named("a", "b"), NUMBER), f"has classes that the train split lacks: 2{MEND}", id="number"),
        pytest.param([0, None], [0], (named("a", "b"),) * 2, "row 1 has no label; every image of both splits needs one", id="no label"),
        pytest.param([0, 1], [1, 1, -1], (named("a", "b"),) * 2, "row 2 has no label; every image of both splits needs one", id="-1"),
        pytest.param(["a", None], ["a"], (TEXT, TEXT), "row 1 has no label; every image of both splits needs one", id="no text"),
        pytest.param(
            [0.0, 1.0],
            [0.0],
            (FRACTION, FRACTION),
            "the labels are fractions (float64), which name no classes: give whole numbers or texts",
            id="fractions",
        ),
        pytest.param([0.0, None], [0.0], (FRACTION,) * 2, "row 1 has no label; every image of both splits needs one", id="no number"),
        pytest.param([4, 4], [4], (NUMBER, NUMBER), "all images are of the class '4': add images of another one", id="one class"),
        pytest.param(
            [[0], [1]],
            [[0]],
            (datasets.List(NUMBER),) * 2,
            "must hold one class for each image, but holds List(Value('int64'))",
            id="lists",
        ),
    ],
)
def test_labels_refused(tmp_path: Path, train: list[Any], test: list[Any], kinds: tuple[Any, Any], end: str) -> None:
    assert refusal(write_labels(tmp_path / "set", train, test, kinds)).endswith(end)


def test_features_declared_in_the_readme_are_kept(tmp_path: Path) -> None:
    """As in the clone of a repository of the Hub, whose Parquet files hold plain numbers."""
    folder = Path(write_labels(tmp_path / "set", [1, 0], [1], (NUMBER, NUMBER)))
    names = "".join(f"          '{number}': {name}\n" for number, name in enumerate(("cat", "dog")))
    (folder / "README.md").write_text(
        "---\ndataset_info:\n  features:\n  - name: image\n    dtype: image\n  - name: label\n    dtype:\n      class_label:\n"
        f"        names:\n{names}  splits:\n  - name: train\n    num_examples: 2\n  - name: test\n    num_examples: 1\n---\n"
    )
    source = opened(str(folder))
    assert (source.classes, source.train_labels, source.test_labels) == (("cat", "dog"), [1, 0], [1])


def test_a_changed_file_is_read_anew(tmp_path: Path) -> None:
    folder = write_ids(tmp_path / "ids", train=4, test=2)
    assert len(opened(str(folder)).train) == 4
    shutil.rmtree(folder)
    write_ids(folder, train=6, test=2)
    assert len(opened(str(folder)).train) == 6
