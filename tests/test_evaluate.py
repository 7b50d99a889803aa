"""A trained model's figures: those of the training's own evaluation, on any number of processes, and by its own classes."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import write_ids
from tests.launching import ACCELERATE, CONFIGS, finish, started
from tests.photos import COLOURS, photo, write_photos
from tests.ranks import Ranks
from trainer import evaluate
from trainer.data.labels import encode_by
from trainer.main import main as train
from trainer.runtime import UserError

EVALUATE = Path(evaluate.__file__)
SMALL = ("--epochs", "1", "--batch_size", "8", "--image_size", "8", "--output_dir", "run")


def evaluated(folder: str, words: list[str]) -> None:
    """In `folder`, in this process, as it was joined by the launcher."""
    before = os.getcwd()
    os.chdir(folder)
    try:
        evaluate.main(words)
    finally:
        os.chdir(before)


def figures(folder: Path, *words: str) -> Any:
    evaluated(str(folder), [*words, "--output_json", "figures.json"])
    return json.loads((folder / "figures.json").read_text())


def best(run: Path) -> Any:
    """The training's own figures of the exported epoch."""
    entries = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    epoch = json.loads((run / "results.json").read_text())["best_epoch"]
    return [entry for entry in entries if entry["event"] == "eval"][epoch - 1]


def test_the_same_as_the_training_said(photos_run: Path, two_ranks: Ranks, capsys: pytest.CaptureFixture[str]) -> None:
    """On the data that it was trained on, found again; alone and on two processes, with a padded last batch."""
    place = photos_run.parent
    one = figures(place, "run")
    line, head, *rows = capsys.readouterr().out.splitlines()
    expected = best(photos_run)
    assert (one["acc1"], one["samples"], one["split"], one["data"]) == (expected["acc1"], 21, "val", "photos")
    assert one["loss"] == pytest.approx(expected["loss"], abs=1e-5)
    assert one["ece"] == pytest.approx(expected["ece"], abs=1e-5)
    assert line.startswith(f"eval  run/model acc1 {one['acc1']:.2f} acc5 100.00 loss {one['loss']:.4f} ece ")
    assert line.endswith("samples 21/21 (photos, split 'val')")
    assert head.split() == ["class", "precision", "recall", "f1", "images"]
    assert [re.split(r"\s{2,}", row)[0] for row in rows] == [*COLOURS, "macro mean"]

    (place / "figures.json").unlink()
    two_ranks.run_apart(evaluated, str(place), ["run/model", "--eval_batch_size", "4", "--output_json", "figures.json"])
    two = json.loads((place / "figures.json").read_text())
    assert two["confusion"] == one["confusion"]
    assert two["loss"] == pytest.approx(one["loss"], abs=1e-5)
    assert two["ece"] == pytest.approx(one["ece"], abs=1e-5)
    assert [mistake["index"] for mistake in two["mistakes"]] == [mistake["index"] for mistake in one["mistakes"]]


def test_other_data_and_json(photos_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder of class folders alone, of other sizes, with a class missing: its labels are the model's, by name."""
    for name in ("rust", "grass"):
        (tmp_path / "new" / name).mkdir(parents=True)
        for index in range(3):
            photo(name, 500 + index, (50 + index, 31)).save(tmp_path / "new" / name / f"{index}.jpg", quality=95)
    evaluate.main(["--json", str(photos_run), "--data_dir", "new"])
    found = json.loads(capsys.readouterr().out)
    assert (found["split"], found["samples"]) == ("train", 6)
    assert [sum(row) for row in found["confusion"]] == [0, 3, 3]
    assert found["acc1"] >= 80
    assert found["per_class"]["blue sky"] == {"precision": None, "recall": None, "f1": None, "support": 0}


def test_what_was_held_out_is_found_again(tmp_path: Path) -> None:
    folder = write_photos(tmp_path / "set", train=8)
    shutil.move(folder / "train", tmp_path / "all")
    train([*SMALL, "--data_dir", "all", "--val_fraction", "0.25", "--seed", "3"])
    found = figures(tmp_path, "run")
    assert (found["split"], found["samples"]) == ("held out", 6)
    assert found["acc1"] == best(tmp_path / "run")["acc1"]
    # Asked for by name, all of it.
    assert figures(tmp_path, "run", "--eval_split", "train")["samples"] == 24


def test_a_bad_image_is_left_out(photos_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_photos(tmp_path / "new", test=2)
    (tmp_path / "new" / "test" / "rust" / "000.png").write_bytes(b"x")
    with pytest.raises(SystemExit):
        evaluate.main([str(photos_run), "--data_dir", "new"])
    assert "000.png) cannot be read" in capsys.readouterr().err
    evaluate.main([str(photos_run), "--data_dir", "new", "--on_bad_image", "skip"])
    assert capsys.readouterr().out.splitlines()[0].endswith("samples 5/6 (new, split 'test') bad 1")


@pytest.mark.parametrize("workers", ["0", "1"])
def test_a_bad_image_on_one_of_two_ranks_is_one_sentence(photos_run: Path, tmp_path: Path, workers: str) -> None:
    """The other rank, which waits for its batch, tells no story of its own; and no data worker is waited for."""
    write_photos(tmp_path / "new", test=2)
    (tmp_path / "new" / "test" / "rust" / "001.png").write_bytes(b"x")
    launcher = (*ACCELERATE, "--config_file", CONFIGS / "multi_cpu.yaml")
    words = (photos_run, "--data_dir", "new", "--eval_batch_size", "3", "--num_workers", workers)
    with started(*launcher, EVALUATE, *words, cwd=tmp_path, variables={"TMPDIR": str(tmp_path)}) as child:
        done = finish(child, photos_run)
    assert "001.png) cannot be read" in done.errors
    # What follows is the launcher's.
    assert sum(line.startswith("error") for line in done.errors.splitlines()) == 1, done.errors
    assert ", in measure" not in done.errors
    assert not list(tmp_path.glob("evaluate-*"))


def test_launched(photos_run: Path) -> None:
    """By a real launcher, in bf16."""
    words = ("run", "--mixed_precision", "bf16", "--json")
    launcher = (*ACCELERATE, "--config_file", CONFIGS / "multi_cpu.yaml")
    with started(*launcher, EVALUATE, *words, cwd=photos_run.parent) as child:
        done = finish(child, photos_run)
    assert (done.code, done.errors) == (0, "")
    assert json.loads("\n".join(done.lines))["samples"] == 21


def names_of(values: list[Any], kind: Any) -> Any:
    import datasets

    return datasets.Dataset.from_dict({"label": values}, features=datasets.Features({"label": kind}))


def test_labels_by_the_models_classes() -> None:
    """By their names, whatever numbers these have in the data; numbers where the model was trained on numbers."""
    import datasets

    named = datasets.ClassLabel(names=["dog", "cat", "emu"])
    assert encode_by("set", "test", names_of([0, 1, 1], named), ["cat", "dog"]) == [1, 0, 0]
    assert encode_by("set", "test", names_of(["dog", "cat"], datasets.Value("string")), ["cat", "dog"]) == [1, 0]
    assert encode_by("set", "test", names_of([7, 3], datasets.Value("int64")), ["3", "5", "7"]) == [2, 0]
    assert encode_by("set", "test", names_of([2, 0], named), ["0", "1", "2"]) == [2, 0]
    with pytest.raises(UserError, match=r"^set: the split 'test' has classes that the model does not know: emu; it knows cat, dog: "):
        encode_by("set", "test", names_of([0, 2], named), ["cat", "dog"])
    with pytest.raises(UserError, match="row 1 of the split 'test' has no label"):
        encode_by("set", "test", names_of([0, -1], named), ["cat", "dog"])


def other_classes(place: Path) -> None:
    write_ids(place / "digits", 8, 8)


def without_data(place: Path) -> None:
    shutil.copytree(place / "RUN", place / "run")
    config = json.loads((place / "run" / "model" / "config.json").read_text())
    del config["data"]
    (place / "run" / "model" / "config.json").write_text(json.dumps(config))


def trained_on_a_function(place: Path) -> None:
    shutil.copytree(place / "RUN", place / "run")
    config = json.loads((place / "run" / "model" / "config.json").read_text())
    config["data"] = {"dataset": "os:abort"}
    (place / "run" / "model" / "config.json").write_text(json.dumps(config))


def two_splits(place: Path) -> None:
    write_photos(place / "set", train=1, training=1)


MISTAKES: dict[str, tuple[str, str, Callable[[Path], object]]] = {
    "no model": ("gone", "the model folder gone cannot be loaded: ", lambda place: None),
    "nothing named": ("", "the following arguments are required: MODEL", lambda place: None),
    "another model": (
        "RUN --model resnet18",
        "the model folder RUN/model is of convnet, and not of resnet18: leave --model",
        lambda place: None,
    ),
    "unknown class": (
        "RUN --dataset digits",
        "--dataset digits: the split 'test' has classes that the model does not know: 0, 1",
        other_classes,
    ),
    "data not there": ("RUN", "--data_dir photos: a local data set is a folder, and photos is not there (that is what", lambda place: None),
    "data not recorded": ("run", "the model folder run does not say what it was trained on: name data by --dataset", without_data),
    "a function recorded": (
        "run",
        "the model folder run was trained on os:abort, which is code, and a folder alone has none run: name it too (--dataset os:abort)",
        trained_on_a_function,
    ),
    "no such split": (
        "RUN --dataset set --eval_split dev",
        "--eval_split dev: --dataset set has only the splits 'train', 'training'",
        two_splits,
    ),
    "no split": (
        "RUN --dataset set",
        "--dataset set has no split to evaluate on, only the splits 'train', 'training': name one",
        two_splits,
    ),
    "both": ("RUN --dataset set --data_dir x", "--data_dir x contradicts --dataset set: leave one of them out", two_splits),
    "for training": ("RUN --epochs 3", "--epochs is for training: leave it out", lambda place: None),
    "mistyped": ("RUN --eval_batch_sise 3", "unknown flag --eval_batch_sise: did you mean --eval_batch_size?", lambda place: None),
    "out of range": ("RUN --eval_batch_size 0", "--eval_batch_size must be at least 1, but is 0", lambda place: None),
    "fp16": ("RUN --mixed_precision fp16", "fp16 needs a GPU", lambda place: None),
    "no folder": ("RUN --output_json gone/x.json", "--output_json gone/x.json: its folder is not there: make it", lambda place: None),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(photos_run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str) -> None:
    words, sentence, setup = MISTAKES[name]
    (tmp_path / "RUN").symlink_to(photos_run)
    setup(tmp_path)
    with pytest.raises(SystemExit) as end:
        evaluate.main(words.split())
    out, errors = capfd.readouterr()
    assert (end.value.code, out) == (2, "")
    lines = [line for line in errors.splitlines() if "Creating parquet" not in line]
    assert len(lines) == 1, errors
    assert lines[0].startswith(f"error: {sentence}")


def test_a_model_of_ones_own_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its folder alone has no code run."""
    (tmp_path / "nets_of_mine.py").write_text(
        "from torch import nn\n\ndef small(num_classes):\n    return nn.Sequential(nn.Flatten(), nn.LazyLinear(num_classes))\n"
    )
    write_photos(tmp_path / "set", train=4, val=2)
    own = ["--model", "nets_of_mine:small"]
    train([*own, *SMALL, "--data_dir", "set"])
    capsys.readouterr()
    with pytest.raises(SystemExit):
        evaluate.main(["run"])
    assert "is code, and a folder alone has none run: name that factory too (--model nets_of_mine:small)" in capsys.readouterr().err
    assert figures(tmp_path, "run", *own)["samples"] == 6
