"""report.html and plots/: from a run's files alone, after a training, whatever the classes are called, and when it cannot be made."""

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tests.helpers import ROOT, alone_run, ids_image, needed_hooks, write_ids, write_parquet
from tests.ranks import Ranks
from tests.test_record import made
from trainer import main
from trainer.data.dataset import ImageDataset
from trainer.data.decode import ImageError
from trainer.hooks.log import Log
from trainer.hooks.report import SIDE, Report, save_mistakes
from trainer.html_report import write_report
from trainer.loop import fit
from trainer.metrics import macro, per_class
from trainer.record import MISTAKES, PLOTS
from trainer.report import main as report
from trainer.runtime import Processes


class Page(HTMLParser):
    """A page's sections, words, links to other files, and whether all that was opened was closed."""

    VOID = {"meta", "link", "img", "br"}

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.sections: list[str] = []
        self.rows: list[list[str]] = []
        self.images: list[dict[str, str | None]] = []
        self.words = ""
        self.ids: list[str] = []
        self.sources: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        assert tag not in ("script", "iframe", "object")
        self.ids += [str(given["id"])] if "id" in given else []
        self.sources += [str(given[name]) for name in ("src", "href", "srcset", "data") if name in given]
        if tag == "section":
            self.sections.append(str(given["id"]))
        elif tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
        elif tag == "img":
            self.images.append(given)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["style"]:
            assert not re.search(r"@import|url\((?!#)", data)
            return
        self.words += data
        if self.rows and {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data


def page_of(folder: Path) -> Page:
    page = Page((folder / "report.html").read_text(encoding="utf-8"))
    assert len(page.ids) == len(set(page.ids))
    for source in page.sources:
        assert source.startswith("data:") or source[1:] in page.ids, f"{source}: needs another file"
    return page


def results(classes: list[str], confusion: list[list[int]], mistakes: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "epochs": 2, "samples": 16, "seconds": 75.0, "train_seconds": 1.0, "ece": 0.125, "macro": macro(confusion),
        "per_class": dict(zip(classes, per_class(confusion), strict=True)), "confusion": confusion, "mistakes": mistakes,
        "calibration": [{"samples": 4, "accuracy": 0.5, "probability": 0.6}, {"samples": 0, "accuracy": None, "probability": None}],
    }  # fmt: skip


HOSTILE = ["<script>alert(1)</script>", '"quoted" & $x$ \u732b']


def test_all_that_a_run_says_is_on_the_page(tmp_path: Path) -> None:
    wrong = {"index": 3, "true": HOSTILE[1], "predicted": HOSTILE[0], "probability": 0.987}
    gone = {**wrong, "index": 4}
    doctor = {
        "time": "2026-01-02 03:04",
        "summary": "doctor: 1 passed",
        "checks": [{"name": "order", "status": "FAIL", "measured": "a < b"}],
    }
    folder = made(
        tmp_path / "run & <i>", results__json=results(HOSTILE, [[2, 0], [1, 1]], [wrong, gone]), classes__json=HOSTILE, doctor__json=doctor
    )
    pictures = folder / PLOTS / MISTAKES
    pictures.mkdir(parents=True)
    Image.new("L", (28, 28), 200).save(pictures / "3.png")
    write_report(folder)
    page = page_of(folder)
    assert page.sections == ["curves", "confusion", "mistakes", "classes", "plan", "settings", "environment", "doctor"]
    for said in ("50.00 %", "1.0000", "12.50 %", "2 of 2", "1:15 min", "run & <i>", "4 a process", "--strange", "98.7 %", "cats · convnet"):
        assert said in page.words, said
    assert ["order", "FAIL", "a < b"] in page.rows
    assert [HOSTILE[1], "50.0", "100.0", "66.7", "2", f"{HOSTILE[0]} (1)"] in page.rows
    (image,) = page.images
    assert image["alt"] == f"image 3: {HOSTILE[1]}, taken for {HOSTILE[0]}"
    plots = {path.name for path in (folder / PLOTS).glob("*.png")}
    assert plots == {f"{name}.png" for name in ("loss", "accuracy", "lr", "speed", "confusion", "calibration", "mistakes")}
    for path in plots:
        with Image.open(folder / PLOTS / path) as picture:
            picture.load()
            assert picture.width > 400
    (folder / PLOTS / "scale.png").write_bytes(b"of an earlier report")
    before = (folder / "report.html").read_text(encoding="utf-8")
    write_report(folder)
    assert {path.name for path in (folder / PLOTS).glob("*.png")} == plots
    assert len((folder / "report.html").read_text(encoding="utf-8")) == pytest.approx(len(before), abs=200)


@pytest.mark.parametrize("classes", [2, 30, 100, 1000])
def test_many_classes(tmp_path: Path, classes: int) -> None:
    names = [f"class {number}" for number in range(classes)]
    confusion = [[5 * (row == column) for column in range(classes)] for row in range(classes)]
    confusion[1][0], confusion[0][1], confusion[1][1] = 7, 3, 4
    write_report(made(tmp_path / "run", results__json=results(names, confusion, []), classes__json=names))
    page = page_of(tmp_path / "run")
    assert (tmp_path / "run" / PLOTS / "confusion.png").exists() == (classes <= 100)
    pairs = [row for row in page.rows if len(row) == 4]
    assert pairs[1:] == ([["class 1", "class 0", "7", "63.6 %"], ["class 0", "class 1", "3", "37.5 %"]] if classes > 2 else [])
    figures = [row[0] for row in page.rows if len(row) == 6]
    assert len(figures) == classes + 1
    assert figures[1:3] == (["class 1", "class 0"] if classes > 20 else ["class 0", "class 1"]), "the worst first, of many"
    assert "Every image of the evaluation was classified right." in page.words
    assert (tmp_path / "run" / "report.html").stat().st_size < 800_000


def test_a_run_that_has_not_ended_has_its_curves(tmp_path: Path) -> None:
    folder = made(tmp_path / "run", results__json=None, plan__json=None, env__json=None, exit__json={"code": 75, "reason": "SIGTERM"})
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"event": "train", "step": 5, "loss": 1.0, "lr": 0.1, "images_per_second": 1.0, "scale": 1024.0}\n')
    write_report(folder)
    page = page_of(folder)
    assert page.sections == ["curves", "settings", "doctor"]
    assert "stopped: SIGTERM" in page.words
    assert (folder / PLOTS / "scale.png").exists(), "with a scaler"
    for name in ("metrics.jsonl", "exit.json"):
        (folder / name).unlink()
    write_report(folder)
    assert "No line has been logged yet." in page_of(folder).words


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made(tmp_path / "run")
    report(["run", str(tmp_path / "run")])
    assert capsys.readouterr().out == f"report run/report.html\nreport {tmp_path / 'run'}/report.html\n"
    for argv, code, sentence in (
        (["nowhere"], 2, "error: nowhere is not there: give the --output_dir of a training\n"),
        ([], 2, "error: the following arguments are required: RUN: see --help\n"),
        (["run", "--colour"], 2, "error: unknown flag --colour: see --help\n"),
    ):
        with pytest.raises(SystemExit) as ended:
            report(argv)
        assert ended.value.code == code
        assert capsys.readouterr().err == sentence
    (tmp_path / "run" / "report.html").unlink()
    (tmp_path / "run" / "report.html").mkdir()
    with pytest.raises(SystemExit) as ended:
        report(["run"])
    assert ended.value.code == 1
    assert re.fullmatch(r"error: .*Is a directory.*\n", capsys.readouterr().err)


def test_report_and_compare_load_no_torch(tmp_path: Path) -> None:
    made(tmp_path / "run")
    for command in (["report", "run"], ["compare", "run", "run"]):
        code = f"import sys; from trainer.{command[0]} import main; main({command[1:]}); print('torch' in sys.modules)"
        run = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
        )
        assert (run.returncode, run.stderr) == (0, "")
        assert run.stdout.splitlines()[-1] == "False"


def trained(processes: Processes, folder: Path, out: Path) -> None:
    from tests.helpers import make_run

    out.mkdir(exist_ok=True)
    run = make_run(processes, folder, batch_size=8, epochs=1, output_dir=str(out))
    fit(run, needed_hooks(Log(), Report()))


def test_a_training_on_two_ranks_leaves_one_with_pictures_of_its_mistakes(two_ranks: Ranks, tmp_path: Path) -> None:
    """The images tell their own numbers, so that the pictures must be those of the mistakes."""
    out = tmp_path / "out"
    two_ranks.run(trained, write_ids(tmp_path / "ids", train=32, test=13), out)
    (out / "config.yaml").write_text("dataset: ids\n")
    mistakes = json.loads((out / "results.json").read_text())["mistakes"]
    assert mistakes
    files = {path.name for path in (out / PLOTS / MISTAKES).iterdir()}
    assert files == {f"{mistake['index']}.png" for mistake in mistakes}
    for mistake in mistakes:
        with Image.open(out / PLOTS / MISTAKES / f"{mistake['index']}.png") as picture:
            assert (torch.tensor(list(picture.tobytes())) == torch.tensor(list(ids_image(mistake["index"]).tobytes()))).all()


@pytest.mark.parametrize(
    "knobs", [{"cache": "ram"}, {"cache": "none"}, {"streaming": True}], ids=["in memory", "decoded each time", "streamed"]
)
def test_pictures_of_large_images_are_small_and_one_that_cannot_be_read_is_left_out(
    tmp_path: Path, knobs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for split in ("train", "test"):
        write_parquet(
            tmp_path / f"{split}.parquet", [Image.new("RGB", (300, 200), (number, 0, 0)) for number in range(8)], [n % 2 for n in range(8)]
        )
    whole = ImageDataset.gather

    def gather(self: ImageDataset, indices: Any) -> torch.Tensor:
        if list(indices) == [5]:
            raise ImageError("image 5 cannot be read")
        return whole(self, indices)

    with alone_run(tmp_path, **knobs, output_dir=str(tmp_path / "out"), augment="none", channels="3") as run:
        run.state.metrics["mistakes"] = [(4, 0, 1, 0.9), (5, 1, 0, 0.8), (6, 0, 1, 0.7)]
        stale = run.output_dir / PLOTS / MISTAKES / "1.png"
        stale.parent.mkdir(parents=True)
        stale.write_bytes(b"")
        monkeypatch.setattr(ImageDataset, "gather", gather)
        save_mistakes(run)
    assert sorted(path.name for path in stale.parent.iterdir()) == ["4.png", "6.png"]
    with Image.open(stale.parent / "6.png") as picture:
        assert (picture.size, picture.getpixel((80, 50))) == ((SIDE, 107), (6, 0, 0))


def test_a_report_that_cannot_be_made_costs_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ids = write_ids(tmp_path / "ids")
    out = tmp_path / "out"
    out.mkdir()
    (out / "plots").write_text("a file in the way")
    main.main(["--dataset", str(ids), "--max_steps", "2", "--output_dir", str(out)])
    shown = capsys.readouterr()
    assert re.search(
        rf"^the report cannot be made \(.*\), all else of the run is whole: .*`python trainer/report.py {out}`$", shown.err, re.M
    )
    assert "Traceback" not in shown.err
    assert json.loads((out / "exit.json").read_text())["code"] == 0
    assert not (out / "report.html").exists()
    (out / "plots").unlink()
    report([str(out)])
    assert "pictures are not in the run's folder" in page_of(out).words


def test_a_resumed_run_has_one_of_all_of_it_and_the_flag_turns_it_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ids = write_ids(tmp_path / "ids")
    flags = ["--dataset", str(ids), "--batch_size", "16", "--output_dir", str(tmp_path / "out"), "--resume", "auto"]
    main.main([*flags, "--epochs", "1", "--report", "false"])
    assert not (tmp_path / "out" / "report.html").exists()
    main.main([*flags, "--epochs", "2"])
    assert f", report in {tmp_path / 'out' / 'report.html'}\n" in capsys.readouterr().out
    page = page_of(tmp_path / "out")
    assert "2 of 2" in page.words
    assert "12 updates" in page.words
    plan = dict(json.loads((tmp_path / "out" / "plan.json").read_text()))
    assert plan["updates"] == "12 (6 an epoch, 2 epochs)"
    assert plan["updates"] in page.words
