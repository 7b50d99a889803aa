"""Comparing runs: what differs, what came out, and the overlaid curves."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from PIL import Image

from tests.test_record import made
from tests.test_report import Page
from trainer.compare import aligned, main


def runs(folder: Path) -> list[str]:
    """Three: two that differ by their rate, and one without an end."""
    config = "dataset: cats\nmodel: convnet\nepochs: 2\nlr: {}\noutput_dir: {}\n"
    made(folder / "a", config__yaml=config.format(0.1, "a"))
    made(folder / "b", config__yaml=config.format(0.2, "b"), env__json={"device": "cpu", "processes": 2})
    made(folder / "c", config__yaml=config.format(0.1, "c") + "mixup: 0.2\n", results__json=None)
    return [str(folder / name) for name in "abc"]


def test_the_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(runs(tmp_path))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[:4]] == [
        ["differs", "a", "b", "c"], ["lr", "0.1", "0.2", "0.1"], ["mixup", "unset", "unset", "0.2"], ["processes", "1", "2", "1"],
    ]  # fmt: skip
    assert len({len(line) for line in lines[:4]}) == 1
    table = {line[:16].strip(): line[16:].split() for line in lines[5:-2]}
    assert table["accuracy, %"] == ["50.00"] * 3
    assert table["best, % (epoch)"] == ["50.00", "(1)"] * 3
    assert table["loss"] == ["1.0000"] * 3
    assert table["training, s"] == ["1.0", "1.0", "-"]
    assert table["images/s"] == ["16", "16", "20"]
    assert lines[-3].endswith("still running, or killed")
    assert lines[-1] == "curves compare.html"
    page = Page(Path("compare.html").read_text(encoding="utf-8"))
    assert page.sections == ["settings", "results", "curves"]
    assert ["lr", "0.1", "0.2", "0.1"] in page.rows
    assert page.open == []


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_one_picture(tmp_path: Path, kind: str) -> None:
    main([*runs(tmp_path), *runs(tmp_path / "more"), *runs(tmp_path / "yet"), "--output", f"out.{kind}"])
    if kind == "png":
        with Image.open("out.png") as picture:
            assert picture.width > 1000
        return
    texts = {"".join(text.itertext()).strip() for text in ElementTree.parse("out.svg").iter("{http://www.w3.org/2000/svg}text")}
    parent = tmp_path.name
    assert {f"{parent}/a", "more/a", "yet/c", "Training loss", "Accuracy, %", "Learning rate"} <= texts
    # The ninth line has the first one's colour.
    assert "stroke-dasharray" in Path("out.svg").read_text()


def test_runs_that_do_not_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = runs(tmp_path)[0]
    main([one, one])
    assert capsys.readouterr().out.startswith("no setting differs\n")


def test_a_narrow_terminal_gets_several_tables() -> None:
    lines = aligned("differs", ["one", "two", "three"], [("lr", ["1", "2", "3"]), ("model", ["x" * 40, "y", "z"])], 50)
    assert lines == [
        "differs                               one  two",
        "lr                                      1    2",
        f"model    {'x' * 31}…    y",
        "",
        "differs  three",
        "lr           3",
        "model        z",
    ]


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["a"], "error: one run cannot be compared: give the folders of two or more\n"),
        ([], "error: the following arguments are required: RUN: see --help\n"),
        (["a", "nowhere"], "error: nowhere is not there: give the --output_dir of a training\n"),
        (["a", "empty"], "error: empty holds no run (no config.yaml): give the --output_dir of a training\n"),
        (["a", "b", "--output", "x.jpg"], "error: --output x.jpg must end in one of .html, .svg, .png\n"),
        (["a", "b", "--output", "no/x.html"], "error: --output no/x.html cannot be written (No such file or directory): choose"),
        (["a", "torn"], "error: torn/metrics.jsonl cannot be read (line 1: "),
        (["young", "young", "--output", "x.png"], "error: none of the runs has logged a line yet: there is no curve to draw\n"),
    ],
)  # fmt: skip
def test_mistakes(tmp_path: Path, argv: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    runs(tmp_path)
    (tmp_path / "empty").mkdir()
    made(tmp_path / "torn", metrics__jsonl="{\n{}\n")
    made(tmp_path / "young", metrics__jsonl=None, results__json=None)
    before: Any = sorted(tmp_path.rglob("*"))
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    errors = capsys.readouterr().err
    assert errors.startswith(sentence)
    assert errors.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_the_figures_are_those_of_the_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other, _ = runs(tmp_path)
    results = json.loads((Path(one) / "results.json").read_text())
    (Path(one) / "results.json").write_text(json.dumps({**results, "ece": 0.0123, "train_seconds": 3.2}))
    main([one, other, "--output", "x.svg"])
    out = capsys.readouterr().out
    assert "1.23" in out
    assert [line.split()[-2:] for line in out.splitlines() if line.startswith("images/s")] == [["5", "16"]]
