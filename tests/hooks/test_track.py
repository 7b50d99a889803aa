"""Trackers get what metrics.jsonl has: each number once, at its update, whatever stops and resumes; and never end a training."""

import io
import json
import sqlite3
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
from PIL import Image

from tests.helpers import alone_run, needed_hooks, write_ids
from tests.ranks import Ranks
from trainer.config import TRACKERS, Config
from trainer.hooks.log import Log
from trainer.hooks.track import Track, draw_confusion, flatten
from trainer.loop import fit
from trainer.main import main
from trainer.state import Run

FLAGS = ["--epochs", "2", "--batch_size", "8", "--eval_batch_size", "5", "--log_interval", "2", "--cpu_threads", "1"]
# (tag, step) -> values, in the order in which they were sent.
Points = dict[tuple[str, int], list[float]]


@pytest.fixture(scope="module")
def trackio_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """trackio reads its folder's name when it is imported."""
    return tmp_path_factory.mktemp("trackio")


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch, trackio_folder: Path) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("TRACKIO_DIR", str(trackio_folder))


def recorded(folder: Path) -> Points:
    """What metrics.jsonl says that a tracker should have."""
    points: Points = {}
    for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        event, step = entry.pop("event"), entry.pop("step")
        for name, value in entry.items():
            if value is not None:
                points.setdefault((f"{event}/{name}", step), []).append(value)
    assert len(points) > 20
    return points


def in_tensorboard(folder: Path, project: str = "ids") -> Points:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    # A folder with the hyperparameters lies beside.
    (file,) = (folder / "trackers" / "tensorboard" / project).glob("events.*")
    events = EventAccumulator(str(file), size_guidance={"scalars": 0})
    events.Reload()
    (picture,) = events.Images("eval/confusion")
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    shown = numpy.asarray(Image.open(io.BytesIO(picture.encoded_image_string)).convert("RGB"))
    assert numpy.array_equal(shown, draw_confusion(results["confusion"], list(results["per_class"])))
    points: Points = {}
    for tag in events.Tags()["scalars"]:
        for event in events.Scalars(tag):
            points.setdefault((tag, event.step), []).append(event.value)
    return points


def wandb_records(file: Path) -> Iterator[Any]:
    """The records of a .wandb file, which is a LevelDB log behind seven bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, at, record = file.read_bytes(), 7, b""
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", content[at : at + 7])
        record += content[at + 7 : at + 7 + length]
        at += 7 + length
        # 1: whole, 4: the last part of one.
        if kind in (1, 4):
            yield Record.FromString(record)
            record = b""


def in_wandb(folder: Path) -> Points:
    """The newest file's."""
    file = sorted((folder / "trackers" / "wandb").glob("offline-run-*/run-*.wandb"))[-1]
    points: Points = {}
    for record in wandb_records(file):
        for item in record.history.item:
            name, step = item.key or "/".join(item.nested_key), record.history.step.num
            if not name.startswith(("_", "eval/confusion")):
                points.setdefault((name, step), []).append(json.loads(item.value_json))
    return points


def in_trackio(place: Path, name: str, project: str = "ids") -> Points:
    points: Points = {}
    with sqlite3.connect(place / f"{project}.db") as database:
        for step, text in database.execute("SELECT step, metrics FROM metrics WHERE run_name = ?", (name,)):
            for key, value in json.loads(text).items():
                if isinstance(value, (int, float)):
                    points.setdefault((key, step), []).append(value)
    return points


def rounded(points: Points) -> Points:
    """As TensorBoard keeps numbers, in float32."""
    return {key: [float(numpy.float32(value)) for value in values] for key, values in points.items()}


def test_two_processes_report_each_number_once(two_ranks: Ranks, tmp_path: Path, trackio_folder: Path) -> None:
    out = tmp_path / "two"
    flags = [*FLAGS, "--dataset", str(write_ids(tmp_path / "ids")), "--output_dir", str(out), "--report_to", "tensorboard,wandb,trackio"]
    environment = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "TRACKIO_DIR": str(trackio_folder)}
    two_ranks.run_apart(main, flags, environment=environment)
    points = recorded(out)
    assert {len(values) for values in points.values()} == {1}
    assert in_tensorboard(out) == rounded(points)
    assert in_wandb(out) == points
    assert in_trackio(trackio_folder, "two") == points
    assert len(list((out / "trackers" / "wandb").glob("offline-run-*"))) == 1
    config = next(record.config for record in wandb_records(next(out.rglob("*.wandb"))) if len(record.config.update) > 20)
    sent = {item.key: json.loads(item.value_json) for item in config.update}
    assert sent | {"batch_size": 8, "report_to": "tensorboard,wandb,trackio", "optimizer": "adamw"} == sent
    assert "max_grad_norm" not in sent
    assert not list(tmp_path.glob("wandb")), "only into the output folder"


def test_a_resume_leaves_no_point_twice_and_none_of_the_way_not_taken(tmp_path: Path, trackio_folder: Path) -> None:
    out, ids = tmp_path / "resumed", write_ids(tmp_path / "ids")
    flags = [*FLAGS, "--dataset", str(ids), "--output_dir", str(out), "--report_to", "tensorboard,wandb,trackio"]
    main([*flags, "--checkpointing_steps", "5", "--save_total_limit", "9", "--log_interval", "1"])
    later = recorded(out)
    assert ("train/loss", 7) in later
    main([*flags, "--resume", str(out / "checkpoints" / "step_00000005")])
    points = recorded(out)
    assert ("train/loss", 5) in points
    assert ("train/loss", 7) not in points
    assert {len(values) for values in points.values()} == {1}
    assert in_tensorboard(out) == rounded(points)
    assert in_wandb(out) == points
    assert in_trackio(trackio_folder, "resumed") == points
    runs = {file.name for file in out.rglob("*.wandb")}
    assert len(runs) == 1, "the same run's number"
    with sqlite3.connect(trackio_folder / "ids.db") as database:
        assert len(database.execute("SELECT DISTINCT run_id FROM metrics WHERE run_name = 'resumed'").fetchall()) == 1


def test_mlflow_goes_on_with_its_run(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    out = tmp_path / "out"
    flags = [*FLAGS, "--dataset", str(write_ids(tmp_path / "ids")), "--output_dir", str(out), "--report_to", "mlflow"]
    main([*flags, "--checkpointing_steps", "5", "--save_total_limit", "9"])
    main([*flags, "--resume", str(out / "checkpoints" / "step_00000005"), "--epochs", "3"])
    client = mlflow.MlflowClient(f"sqlite:///{out}/trackers/mlflow.db")
    (experiment,) = client.search_experiments(filter_string="name = 'ids'")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == "out"
    assert run.info.status == "FINISHED"
    assert run.data.params["epochs"] == "2"
    steps = [point.step for point in client.get_metric_history(run.info.run_id, "train/loss")]
    assert sorted(steps) == sorted(step for name, step in recorded(out) if name == "train/loss")
    assert [artifact.path for artifact in client.list_artifacts(run.info.run_id, "eval")] == ["eval/confusion.png"]


def test_a_stop_ends_the_trackers_with_its_code(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(SystemExit) as ended:
        main(
            [
                *FLAGS,
                *("--dataset", str(write_ids(tmp_path / "ids")), "--output_dir", str(out), "--max_time", "0.001"),
                *("--report_to", "wandb,tensorboard", "--log_interval", "1"),
            ]
        )
    assert ended.value.code == 75
    records = list(wandb_records(next(out.rglob("*.wandb"))))
    assert [record.exit.exit_code for record in records if record.HasField("exit")] == [75]
    assert in_wandb(out).keys() == {(f"train/{name}", 1) for name in json.loads((out / "metrics.jsonl").read_text()) if name != "step"} - {
        (f"train/{name}", 1) for name in ("event", "grad_norm", "scale")
    }


def test_a_tracker_that_fails_is_named_and_left_out_and_the_training_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    knobs: dict[str, Any] = {"epochs": 2, "batch_size": 8, "log_interval": 2, "report_to": "tensorboard,wandb"}
    track = Track()
    with alone_run(write_ids(tmp_path / "ids"), output_dir=str(out), **knobs) as run:
        track.start(run, out, resumed=False)
        assert json.loads((out / "trackers" / "ids.json").read_text()).keys() == {"wandb"}
        fit(run, needed_hooks(Breaker(), track, Log()))
        track.finish(0, in_haste=False)
    lines = (out / "train.log").read_text().splitlines()
    assert [line for line in lines if line.startswith("track ")] == [
        "track wandb has failed at update 6 (ConnectionError: the network is gone); the training goes on without it, and metrics.jsonl has "
        "all numbers"
    ]
    assert lines[-1].startswith("done  2 epochs, 24 updates")
    assert in_tensorboard(out) == rounded(recorded(out))
    assert max(step for _, step in in_wandb(out)) == 4
    assert json.loads((out / "trackers" / "ids.json").read_text()) == {}, "a resume begins a new run, with everything"


class Breaker(Track):
    """Takes wandb's network away."""

    def on_step_end(self, run: Run) -> None:
        def fail(values: dict[str, float], step: int) -> None:
            raise ConnectionError("the network is gone")

        if run.state.step == 6:
            run.accelerator.get_tracker("wandb").log = fail


def test_configs_are_flat_numbers_and_texts() -> None:
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    assert flatten({"a": [1, "b"], "c": None, "d": 0.5, "e": True, "f": ("x",)}) == {"a": "1, b", "d": 0.5, "e": True, "f": "x"}
    assert set(TRACKERS) == set(LOGGER_TYPE_TO_CLASS)
    assert Config(report_to="wandb, TensorBoard,wandb").trackers == ("wandb", "tensorboard")
    assert Config().trackers == ()


def test_the_picture_of_more_classes_than_the_report_draws_is_darkest_where_images_are() -> None:
    confusion = [[0] * 200 for _ in range(200)]
    confusion[0][:2] = [3, 1]
    picture = draw_confusion(confusion, [str(number) for number in range(200)])
    assert picture.shape == (400, 400, 3)
    assert picture.dtype == numpy.uint8
    cells = picture[::2, ::2][:2, :2].tolist()
    # 3/4 of the way from white to dark blue, 1/4, and none, also where a class has no images.
    assert cells == [[[70, 100, 144], [193, 203, 218]], [[255, 255, 255]] * 2]
