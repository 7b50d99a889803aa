"""The speed benchmark's arithmetic, its data, and two of its scripts for real; the other frameworks are not installed here."""

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy
import pytest
from torchvision.datasets import MNIST

from benchmarks import chart, report, sets
from benchmarks.runner import CONTENDERS, HERE, OPTIMIZER, PEERS, Contender, Runner, read_ours, summary
from tests.helpers import ids_image, ids_of, write_ids, write_parquet

TRAIN = {"event": "train", "epoch": 1, "loss": 1.0}


def windows(folder: Path, *events: dict[str, object], **results: float) -> Path:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events), encoding="utf-8")
    (folder / "results.json").write_text(json.dumps(results), encoding="utf-8")
    return folder


def test_the_steady_state_leaves_out_the_windows_that_begin_before_it(tmp_path: Path) -> None:
    evaluation = {"event": "eval", "acc1": 98.0, "samples": 1000, "seconds": 0.5}
    events = (
        {**TRAIN, "step": 50, "samples": 1600, "images_per_second": 100.0},  # 16 s
        {**TRAIN, "step": 100, "samples": 3200, "images_per_second": 1600.0},  # 1 s
        {**TRAIN, "step": 110, "samples": 3500, "images_per_second": 100.0},  # 3 s
        evaluation,
        {**TRAIN, "step": 160, "samples": 5100, "images_per_second": 800.0},  # 2 s
        {**evaluation, "acc1": 99.0},
    )
    folder = windows(tmp_path, *events, startup_seconds=2.5)
    found = read_ours(folder, 50, [30.0, 40.0])
    assert found["images_per_second"] == pytest.approx((1600 + 300 + 1600) / (1 + 3 + 2))
    late = read_ours(folder, 60, [30.0, 40.0])["images_per_second"]
    assert late == pytest.approx((300 + 1600) / (3 + 2)), "a window that began before is left out whole"
    assert read_ours(folder, 0, [30.0, 40.0])["images_per_second"] == pytest.approx(5100 / 22)
    assert found["evaluation_images_per_second"] == 2000
    assert (found["epochs_to_99"], found["seconds_to_99"], found["startup_seconds"]) == (2, 40.0, 2.5)
    assert found["train_seconds_to_99"] == pytest.approx(22)
    windows(tmp_path, *events)
    assert read_ours(folder, 50, [30.0, 40.0])["startup_seconds"] is None


def test_ratios_are_taken_within_a_round(tmp_path: Path) -> None:
    results = report.Results(tmp_path / "speed.json")
    speeds = [(100.0, 50.0), (10.0, 10.0), (90.0, 30.0)]
    for number, (ours, tutorial) in enumerate(speeds):
        results.add("throughput", number, "ours", {report.SPEED: ours})
        results.add("throughput", number, "tutorial", {report.SPEED: tutorial})
    results.add("throughput", 3, "ours", {report.SPEED: 1e9})
    assert results.ratio("throughput", "ours", "tutorial", report.SPEED) == 2.0
    rows = {target.what: target.row(results) for target in report.TARGETS}
    assert rows["images/s, batch 32, fp32: ours / tutorials' loop"].endswith("| ≥ 1.25 | 2.00 | reached |")
    assert rows["batch 32, fp32: ours / limit, in one process"].endswith("|  | not measured |")


@pytest.mark.parametrize(("accuracy", "end"), [(98.9, "| not reached | **not** |"), (99.0, "| 1.00 | reached |")])
def test_an_accuracy_that_is_not_reached_is_not_unmeasured(tmp_path: Path, accuracy: float, end: str) -> None:
    results = report.Results(tmp_path / "speed.json")
    one = {"acc1": accuracy, "samples": 10, "seconds": 1.0, "after_seconds": 3.0, "after_train_seconds": 2.0}
    results.add("accuracy", 0, "ours", summary(0, 0.0, None, [one]))
    (row,) = (target.row(results) for target in report.TARGETS if "epochs to 99" in target.what)
    assert row.endswith(end)


def test_parts_are_merged_into_one_file(tmp_path: Path) -> None:
    first = report.Results(tmp_path / "speed.json")
    for part, contender in (("command", "ours"), ("throughput", "ours"), ("throughput", "limit")):
        first.add(part, 0, contender, {report.SPEED: 1.0})
    first.save({})
    again = report.Results(tmp_path / "speed.json")
    again.forget("throughput", ["limit"])
    again.add("throughput", 0, "limit", {report.SPEED: 2.0})
    assert again.ratio("throughput", "ours", "limit", report.SPEED) == 0.5
    again.forget("throughput")
    assert [run["part"] for run in again.runs] == ["command"]


def test_torchvision_reads_the_images_that_the_parquet_files_hold(tmp_path: Path) -> None:
    folder = write_ids(tmp_path / "ids", train=12, test=5)
    root = sets.idx_folder(folder, tmp_path / "sets")
    for train, count in ((True, 12), (False, 5)):
        found = MNIST(root, train=train)
        assert ids_of(found.data[:, None]) == list(range(count))
        assert numpy.array_equal(found.data[3], numpy.asarray(ids_image(3)))
        assert found.targets.tolist() == [index % 10 for index in range(count)]
    assert sets.idx_folder(folder, tmp_path / "sets") == root


def test_a_set_is_cut_or_repeated_and_keeps_its_class_names(tmp_path: Path) -> None:
    import datasets

    folder = write_ids(tmp_path / "ids", train=12, test=5)
    for train, test in ((7, None), (30, 8)):
        made = sets.resized(folder, train, tmp_path / "sets", test)
        for split, count, source in (("train", train, 12), ("test", test or 5, 5)):
            rows = datasets.Dataset.from_parquet(str(made / f"{split}-00000-of-00001.parquet"), cache_dir=str(tmp_path / "cache"))
            assert rows["label"][:] == [index % source % 10 for index in range(count)]
            assert rows.features["label"].names == [str(number) for number in range(10)]


def test_the_picture_is_an_svg_of_all_figures() -> None:
    rows = [chart.Bars("this & that", "ours", (1234.0, None)), chart.Bars("limit", "limit", (2468.0, 10.0))]
    svg = ElementTree.fromstring(chart.draw("title", ("one", "two"), ("32", "256"), rows))
    texts = [element.text for element in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert {"this & that", "1,234", "2,468", "not measured"} <= set(texts)
    widths = [float(bar.attrib["width"]) for bar in svg.iter("{http://www.w3.org/2000/svg}rect")][1:]
    assert widths[1] == pytest.approx(2 * widths[0], abs=0.1)
    assert chart.PANEL / 2 < max(widths) < chart.PANEL


def test_every_contender_has_its_script_and_every_script_its_contender() -> None:
    scripts = {contender.script for contender in CONTENDERS.values() if not contender.is_ours}
    assert scripts == {path.name for path in (HERE / "contenders").glob("*.py")} - {"convnet.py", "record.py"}
    assert set(PEERS) <= CONTENDERS.keys()


def test_what_runs_measures_itself(tmp_path: Path) -> None:
    """The limit, and ours by the launcher, on 300 noisy digits: their figures are there, and so are the numbers of their tests' images."""
    images = [ids_image(index).resize((28, 28)) for index in range(300)]
    (tmp_path / "digits").mkdir()
    for split, count in (("train", 300), ("test", 100)):
        write_parquet(tmp_path / "digits" / f"{split}.parquet", images[:count], [index % 10 for index in range(count)])
    runner = Runner(Path(sys.executable), tmp_path, tmp_path / "digits")

    def run(contender: Contender, *flags: str) -> dict[str, float]:
        runner.warm.add((contender.script, runner.data))
        found = runner.run(contender, [*flags, "--max_steps", "8", "--batch_size", "32"], 2)
        assert found["seconds"] > found["startup_seconds"] if found["startup_seconds"] else True
        assert 1e8 < found["memory_bytes"] < 1e10
        assert found["evaluation_images_per_second"] > 0
        return found

    limit = run(CONTENDERS["limit_bf16"])
    assert limit["images_per_second"] > 0
    assert limit["startup_seconds"] > 0.5
    ours = run(CONTENDERS["ours"], *OPTIMIZER, "--log_interval", "2")
    assert ours["images_per_second"] > 0


def test_the_parts_of_an_update_add_up_to_it(tmp_path: Path) -> None:
    file = tmp_path / "overhead.json"
    command = [
        sys.executable,
        str(HERE / "overhead.py"),
        "--rounds",
        "1",
        "--result",
        str(file),
        "--dataset",
        str(write_ids(tmp_path / "ids", 320)),
    ]
    out = subprocess.run([*command, "--mixed_precision", "bf16"], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    found = json.loads(file.read_text(encoding="utf-8"))
    parts, bare = found["ours"][0], found["bare"][0]
    assert len(parts) == len(bare) == 8
    assert min(parts.values()) > 0, parts
    assert [part for part, spent in bare.items() if not spent] == ["normalisation"]
    whole, rest = sum(parts.values()), "hooks, log, metrics, wrappers"
    ours = sum(parts[part] for part in ("normalisation", "waiting for data", rest))
    assert found["beyond_percent"] == pytest.approx(100 * ours / whole)
    assert found["own_percent"] == pytest.approx(100 * (parts[rest] - bare[rest]) / whole)
    assert found["limit_ratio"] == pytest.approx(sum(bare.values()) / whole)
    assert found["evaluation_ratio"] == pytest.approx(found["forward"][0] / found["evaluation"][0])
    assert 0 < found["clocks_us"] < 10
    assert out.count("\n| ") == 8
