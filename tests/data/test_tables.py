"""Files of rows: Parquet, Arrow, CSV and JSON, one file or several, with the image in the row or its path; and what `datasets` saves."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow  # type: ignore[import-untyped]
import pyarrow.parquet  # type: ignore[import-untyped]
import pytest

from tests.helpers import ids_image, ids_of, png, write_ids
from trainer.config import Config
from trainer.data.loaders import open_splits
from trainer.data.sources import Source, load_source
from trainer.runtime import UserError

LABELS = ["dog", "cat", "dog", "emu", "cat", "emu"]


def opened(dataset: Path | str, **knobs: Any) -> Source:
    return load_source(Config(dataset=str(dataset), **knobs))


def refusal(dataset: Path | str, **knobs: Any) -> str:
    with pytest.raises(UserError) as raised:
        opened(dataset, **knobs)
    text = str(raised.value)
    assert "\n" not in text
    return text.replace(str(dataset), "SET")


def contents(source: Source) -> list[list[tuple[int, str]]]:
    """Of both splits: the number that each image holds, and its class."""
    splits = open_splits(source, Config(dataset="x"), None)[:2]
    return [
        list(zip(ids_of(split.gather(range(len(split)))), (source.classes[label] for label in split.labels.tolist()), strict=True))
        for split in splits
    ]


def write_images(folder: Path, count: int = 6) -> list[str]:
    """Numbered images; their names."""
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(count):
        ids_image(index).save(folder / f"{index}.png")
    return [f"{index}.png" for index in range(count)]


def write_text(file: Path, columns: dict[str, list[Any]]) -> Path:
    """A table of the kind that the file's name says."""
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    with file.open("w", newline="", encoding="utf-8") as text:
        if file.suffix in (".csv", ".tsv"):
            writer = csv.DictWriter(text, list(columns), delimiter="\t" if file.suffix == ".tsv" else ",")
            writer.writeheader()
            writer.writerows(rows)
        elif file.suffix == ".json":
            json.dump(rows, text)
        else:
            text.writelines(json.dumps(row) + "\n" for row in rows)
    return file


def embedded(count: int = 6) -> list[dict[str, Any]]:
    return [{"bytes": png(ids_image(index)), "path": None} for index in range(count)]


def whole(**columns: list[Any]) -> datasets.Dataset:
    return datasets.Dataset.from_dict(columns).cast_column("image", datasets.Image())


def parquet(file: Path) -> None:
    whole(image=embedded(), label=LABELS).to_parquet(str(file))


def arrow(file: Path) -> None:
    table = whole(image=embedded(), label=LABELS).data.table
    with pyarrow.OSFile(str(file), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)


def foreign(kind: str) -> Callable[[Path], None]:
    """Parquet that knows nothing of `datasets`: images as bytes, or as pandas writes what `datasets` gave it."""

    def write(file: Path) -> None:
        images = embedded() if kind == "struct" else [image["bytes"] for image in embedded()]
        pyarrow.parquet.write_table(pyarrow.table({"image": images, "label": LABELS}), file)

    return write


def text(file: Path) -> None:
    write_text(file, {"image": write_images(file.parent), "label": LABELS})


ALL = {(index, label) for index, label in enumerate(LABELS)}
FILES: dict[str, tuple[str, Callable[[Path], None]]] = {
    "Parquet": ("pets.parquet", parquet),
    "Parquet, bytes": ("pets.parquet", foreign("binary")),
    "Parquet, bytes and path": ("pets.parquet", foreign("struct")),
    "Arrow": ("pets.arrow", arrow),
    "CSV": ("pets.csv", text),
    "TSV": ("pets.tsv", text),
    "JSON": ("pets.json", text),
    "JSON lines": ("pets.jsonl", text),
}


@pytest.mark.parametrize("name", FILES)
def test_a_single_file_is_parted(tmp_path: Path, name: str) -> None:
    file, write = FILES[name]
    write(tmp_path / file)
    source = opened(tmp_path / file, val_fraction=0.5)
    assert source.classes == ("cat", "dog", "emu")
    train, test = contents(source)
    assert (len(train), len(test)) == (3, 3)
    assert set(train) | set(test) == ALL
    assert refusal(tmp_path / file).endswith("or hold out a part of the training images by --val_fraction 0.2")


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".json", ".jsonl", ".ndjson"])
@pytest.mark.parametrize("place", ["", "pictures", "absolute"])
def test_texts_with_paths_for_each_split(tmp_path: Path, suffix: str, place: str) -> None:
    """Images lie anywhere below, and may be more than the tables."""
    folder = tmp_path / "elsewhere" if place == "absolute" else tmp_path / "set" / place
    names = write_images(folder)
    paths = [str(folder / name) if place == "absolute" else str(Path(place) / name) for name in names]
    for split, part in (("train", slice(4)), ("val", slice(4, 6))):
        write_text(tmp_path / "set" / f"{split}{suffix}", {"filename": paths[part], "class": LABELS[part]})
    source = opened(tmp_path / "set")
    assert source.test_split == "val"
    assert contents(source) == [list(enumerate(LABELS))[:4], list(enumerate(LABELS))[4:]]
    assert source.train[0]["image"] == {"bytes": None, "path": str(folder / "0.png")}


def test_paths_are_relative_to_the_folder_of_their_own_file(tmp_path: Path) -> None:
    write_images(tmp_path / "pictures")
    write_text(tmp_path / "train.csv", {"image": ["pictures/0.png"], "label": ["a"]})
    write_text(tmp_path / "train" / "more.csv", {"image": ["../pictures/1.png"], "label": ["b"]})
    write_text(tmp_path / "dev" / "labels.csv", {"image": ["../pictures/2.png"], "label": ["b"]})
    source = opened(tmp_path)
    assert source.test_split == "dev"
    assert contents(source) == [[(1, "b"), (0, "a")], [(2, "b")]]


def test_several_files_of_a_split(tmp_path: Path) -> None:
    names = write_images(tmp_path)
    for number, part in enumerate((slice(2), slice(2, 4))):
        write_text(tmp_path / f"train-0000{number}-of-00002.csv", {"image": names[part], "label": LABELS[part]})
    write_text(tmp_path / "test.csv", {"image": names[4:], "label": LABELS[1:3]})
    assert contents(opened(tmp_path)) == [list(enumerate(LABELS))[:4], [(4, "cat"), (5, "dog")]]


def test_tables_of_several_kinds_are_refused(tmp_path: Path) -> None:
    for name in ("train.csv", "test.json"):
        write_text(tmp_path / name, {"image": write_images(tmp_path), "label": LABELS})
    assert refusal(tmp_path) == "--dataset SET has tables of several kinds (.csv, .json): leave those of one kind there"


def test_a_folder_of_metadata_as_the_hub_describes_it(tmp_path: Path) -> None:
    for split in ("train", "test"):
        write_text(tmp_path / split / "metadata.csv", {"file_name": write_images(tmp_path / split), "label": LABELS})
    assert contents(opened(tmp_path)) == [list(enumerate(LABELS))] * 2


def test_a_clone_of_the_hub_with_pictures_in_its_description(tmp_path: Path) -> None:
    write_ids(tmp_path / "data", train=4, test=2)
    write_images(tmp_path / "assets")
    source = opened(tmp_path)
    assert (len(source.train), len(source.test)) == (4, 2)


@pytest.mark.parametrize("splits", [("train", "test"), ("train",)])
def test_what_datasets_has_saved(tmp_path: Path, splits: tuple[str, ...]) -> None:
    part = whole(image=embedded(), label=LABELS)
    saved = datasets.DatasetDict(dict.fromkeys(splits, part)) if len(splits) > 1 else part
    saved.save_to_disk(str(tmp_path / "saved"))
    source = opened(tmp_path / "saved", **({} if len(splits) > 1 else {"val_fraction": 0.5}))
    assert set(contents(source)[0]) <= ALL
    assert len(source.train) == (6 if len(splits) > 1 else 3)


# Columns


def test_columns_can_be_named(tmp_path: Path) -> None:
    names = write_images(tmp_path)
    columns: dict[str, list[Any]] = {"front": names, "back": names[::-1], "label": [0] * 6, "kind": LABELS, "mark": [0.5] * 6}
    write_text(tmp_path / "pets.csv", columns)
    source = opened(tmp_path / "pets.csv", image_column="back", label_column="kind", val_fraction=0.5)
    train, test = contents(source)
    assert set(train) | set(test) == {(5 - index, label) for index, label in enumerate(LABELS)}
    told = {"val_fraction": 0.5}
    assert refusal(tmp_path / "pets.csv", image_column="side", **told) == (
        "--image_column side: --dataset SET has only the columns 'front', 'back', 'label', 'kind', 'mark': name one of them"
    )
    assert refusal(tmp_path / "pets.csv", image_column="mark", **told).startswith(
        "--image_column mark: in --dataset SET it holds Value('float64'), and no images: name another one"
    )
    assert refusal(tmp_path / "pets.csv", label_column="race", image_column="front", **told).startswith("--label_column race: ")
    assert refusal(tmp_path / "pets.csv", label_column="mark", image_column="front", **told).endswith(
        "the labels are fractions (float64), which name no classes: give whole numbers or texts"
    )
    assert "has no image column" in refusal(tmp_path / "pets.csv", label_column="kind", **told)


def test_one_of_several_image_columns_can_be_named(tmp_path: Path) -> None:
    part = whole(image=embedded(), other=embedded()[::-1], label=LABELS).cast_column("other", datasets.Image())
    part.to_parquet(str(tmp_path / "pets.parquet"))
    source = opened(tmp_path / "pets.parquet", image_column="other", val_fraction=0.5)
    train, test = contents(source)
    assert set(train) | set(test) == {(5 - index, label) for index, label in enumerate(LABELS)}


def test_an_empty_cell_is_no_label(tmp_path: Path) -> None:
    for labels in ([1, 2, None, 1, 2, 1], ["a", "b", None, "a", "b", "a"]):
        write_text(tmp_path / "pets.csv", {"image": write_images(tmp_path), "label": labels})
        assert "row 2 has no label" in refusal(tmp_path / "pets.csv", val_fraction=0.5)


def test_a_row_without_an_image_is_named(tmp_path: Path) -> None:
    write_text(tmp_path / "pets.csv", {"image": [*write_images(tmp_path)[:5], None], "label": LABELS})
    source = opened(tmp_path / "pets.csv", val_fraction=0.5, seed=1)
    with pytest.raises(UserError, match=rf"^--dataset {tmp_path}/pets.csv( \(held out\))?: image 5 cannot be read \(its row has none\)"):
        contents(source)


def test_a_broken_image_is_named_by_its_row_in_the_file(tmp_path: Path) -> None:
    """Also where it has become another row of the part that was held out."""
    images = embedded(40)
    images[33]["bytes"] = images[33]["bytes"][:60]
    whole(image=images, label=[index % 2 for index in range(40)]).to_parquet(str(tmp_path / "pets.parquet"))
    for seed in range(4):
        with pytest.raises(UserError, match=r": image 33 cannot be read \(image file is truncated\)"):
            contents(opened(tmp_path / "pets.parquet", val_fraction=0.5, seed=seed))


# Configurations


def write_configurations(folder: Path) -> Path:
    for name, count in (("small", 2), ("large", 4)):
        write_ids(folder / name, train=count, test=2)
    lines = "".join(
        f"- config_name: {name}\n  data_files:\n"
        + "".join(f"  - split: {split}\n    path: {name}/{split}.parquet\n" for split in ("train", "test"))
        for name in ("small", "large")
    )
    (folder / "README.md").write_text(f"---\nconfigs:\n{lines}---\n")
    return folder


def test_a_configuration_can_be_named(tmp_path: Path) -> None:
    folder = write_configurations(tmp_path)
    assert len(opened(folder, dataset_config="large").train) == 4
    assert len(opened(folder, dataset_config="small").train) == 2
    for knobs in ({}, {"dataset_config": "medium"}):
        text = refusal(folder, **knobs)
        assert text.startswith("--dataset SET has several configurations: choose one by --dataset_config (")
        assert "large" in text
        assert "small" in text


def test_a_configuration_where_there_is_none(tmp_path: Path) -> None:
    folder = write_ids(tmp_path / "ids", train=4, test=2)
    assert "--dataset_config" in refusal(folder, dataset_config="large")
    assert refusal(folder / "train.parquet", dataset_config="large", val_fraction=0.5) == (
        "--dataset_config large: --dataset SET is a file, which has no configurations: leave it out"
    )
