"""Predictions as a table, JSON lines and CSV: of files and folders, in the order of their paths, whatever else is there."""

import csv
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.helpers import ROOT
from tests.photos import COLOURS, photo
from trainer import load_model
from trainer.predict import main

CLASSES = list(COLOURS)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Sound images of several kinds and sizes, hidden ones, and other files."""
    folder = tmp_path / "images"
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / ".ipynb_checkpoints").mkdir()
    photo("rust", 0).save(folder / "b.png")
    photo("grass", 1, (90, 40)).save(folder / "a.jpg", quality=95)
    photo("blue sky", 2).convert("CMYK").save(folder / "deep" / "er" / "z.tif")
    photo("grass", 3).convert("P").save(folder / "deep" / "p.gif")
    photo("rust", 4).save(folder / ".ipynb_checkpoints" / "b.png")
    photo("rust", 4).save(folder / ".hidden.png")
    (folder / "notes.txt").write_text("no image")
    return folder


ORDER = ["images/a.jpg", "images/b.png", "images/deep/er/z.tif", "images/deep/p.gif"]
LABELS = ["grass", "rust", "blue sky", "grass"]


def test_json_lines(photos_run: Path, images: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(photos_run), "images/deep", "images", "images/a.jpg", "--json", "--batch-size", "3"])
    out, errors = capsys.readouterr()
    lines = [json.loads(line) for line in out.splitlines()]
    assert errors == ""
    assert [list(line) for line in lines] == [["file", "label", "probability"]] * 4
    assert [line["file"] for line in lines] == ORDER
    assert [line["label"] for line in lines] == LABELS
    model, preprocess = load_model(photos_run)
    with torch.no_grad():
        expected = model(preprocess(ORDER)).softmax(1).max(1).values
    assert [line["probability"] for line in lines] == pytest.approx(expected.tolist(), abs=1e-6)


def test_csv_and_several_classes(photos_run: Path, images: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(photos_run), "images", "--csv", "--top_k", "2"])
    rows = list(csv.reader(io.StringIO(capsys.readouterr().out)))
    assert rows[0] == ["file", "label", "probability", "label_2", "probability_2"]
    assert [row[:2] for row in rows[1:]] == [list(pair) for pair in zip(ORDER, LABELS, strict=True)]
    main([str(photos_run), "images", "--json", "--top_k", "99"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    for row, line in zip(rows[1:], lines, strict=True):
        top = line["top"]
        assert (line["label"], line["probability"]) == (top[0]["label"], top[0]["probability"])
        assert [entry["label"] for entry in top[:2]] == row[1::2]
        assert [entry["probability"] for entry in top[:2]] == pytest.approx([float(share) for share in row[2::2]])
        assert sorted(entry["label"] for entry in top) == sorted(CLASSES)
        assert sum(entry["probability"] for entry in top) == pytest.approx(1, abs=1e-5)


def test_the_table(photos_run: Path, images: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(photos_run / "model"), *reversed(ORDER)])
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["file", "label", "probability"]
    assert [line.split()[0] for line in lines] == ORDER
    assert all(label in line for line, label in zip(lines, LABELS, strict=True))
    assert len({len(line) for line in (head, *lines)}) == 1, "the columns are not aligned"


def test_a_broken_image_is_named_and_the_others_are_printed(photos_run: Path, images: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (images / "aa.png").write_bytes((images / "b.png").read_bytes()[:100])
    (images / "c.png").write_bytes(b"")
    with pytest.raises(SystemExit) as end:
        main([str(photos_run), "images", "--json"])
    assert end.value.code == 1
    out, errors = capsys.readouterr()
    assert [json.loads(line)["file"] for line in out.splitlines()] == ORDER
    named = errors.splitlines()
    assert len(named) == 2
    assert named[0].startswith("error: images/aa.png cannot be read (")
    assert named[1] == "error: images/c.png cannot be read (it is no image of a known kind): replace or remove it"


def nothing(folder: Path) -> None:
    folder.mkdir()
    (folder / "notes.txt").write_text("x")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("RUN", "the following arguments are required: IMAGES: see --help"),
        ("RUN gone.png", "gone.png: there is no such file or folder: name images, or a folder of images"),
        ("RUN empty", "empty: there is no image in this folder: name images, or a folder of images"),
        ("gone images", "the model folder gone cannot be loaded: "),
        ("images images", "the model folder images cannot be loaded: "),
        ("RUN images --top_k 0", "argument --top_k: must be a whole number of at least 1, but is '0': see --help"),
        ("RUN images --batch_size x", "argument --batch_size: must be a whole number of at least 1, but is 'x': see --help"),
        ("RUN images --jsn", "unknown flag --jsn: did you mean --json?"),
        ("RUN images --json --csv", "argument --csv: not allowed with argument --json: see --help"),
    ],
)
def test_mistakes(photos_run: Path, images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str, sentence: str) -> None:
    nothing(tmp_path / "empty")
    with pytest.raises(SystemExit) as end:
        main([str(photos_run) if word == "RUN" else word for word in words.split()])
    out, errors = capsys.readouterr()
    assert (end.value.code, out) == (2, "")
    assert errors.startswith(f"error: {sentence}")
    assert errors.count("\n") == 1


def test_several_processes_are_refused(
    photos_run: Path, images: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, sentence in (("0", "error: predict runs in one process: start it with `python trainer/predict.py`\n"), ("1", "")):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as end:
            main([str(photos_run), "images"])
        assert (end.value.code, *capsys.readouterr()) == (2, "", sentence)


def test_the_command_itself_is_quick_to_start(photos_run: Path, images: Path) -> None:
    """From another folder, without what training alone needs; a reader that goes away is no traceback."""
    command = [sys.executable, "-X", "importtime", str(ROOT / "trainer" / "predict.py"), str(photos_run), "images", "--json"]
    done = subprocess.run(command, cwd=images.parent, capture_output=True, text=True, check=True)
    assert [json.loads(line)["label"] for line in done.stdout.splitlines()] == LABELS
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "torch" in imported
    assert not {"datasets", "accelerate", "torchvision", "pyarrow", "jsonargparse"} & imported
