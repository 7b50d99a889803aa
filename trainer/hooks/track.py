"""Trackers: what Log records, to TensorBoard, Weights & Biases and the others of Accelerate."""

import io
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy
import torch
from PIL import Image

from trainer.files import write_json
from trainer.hooks.base import Hook
from trainer.output import slug
from trainer.plot import DRAWN, confusion_figure, drawing, png
from trainer.runtime import EXIT_DONE, EXIT_STOPPED, UserError, say
from trainer.state import Run

TRACKERS, IDS = "trackers", "ids.json"
# Seconds and attempts of what would hold up the training (mlflow), or its end (wandb), where the network is gone; the user's own rule.
PATIENCE = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "WANDB_FINISH_TIMEOUT": "60"}
PICTURE = "eval/confusion"
PIXELS = 400


class Track(Hook):
    """Sends each entry of metrics.jsonl to the trackers of `--report_to`, at its update; the config first, the confusion matrix at the end.

    All from the main process, and into output_dir/trackers where a tracker writes files of its own. One that fails in training is named
    in the log and left out from there on. After a resume wandb (online) and mlflow go on with the same run, and get the entries that it
    does not have yet; all others are given a new one, with all entries from the beginning: TensorBoard and trackio in place of the one
    before.

    Accelerate's `end_training` is not used: it destroys the process group too, and one tracker that fails would leave the others open.
    """

    def __init__(self) -> None:
        self.trackers: list[Any] = []
        # Of a tracker that goes on: the last update of each kind of entry that it has.
        self.sent: dict[str, dict[str, int]] = {}
        self.ids: dict[str, str] = {}
        self.folder = Path()

    def start(self, run: Run, folder: Path, resumed: bool) -> None:
        """Start the trackers, on the main process; they end with the run, whatever ends it.

        Args:
            folder: the output folder; not yet in `run`.
            resumed: it goes on with a checkpoint, written in this folder or another.

        Raises:
            UserError: one does not start.
        """
        names, self.folder = run.config.trackers, folder / TRACKERS
        known = self.folder / IDS
        if resumed and known.exists():
            self.ids = {name: id for name, id in json.loads(known.read_text(encoding="utf-8")).items() if name in names}
        known.unlink(missing_ok=True)
        if not names:
            return
        project, accelerator = run.config.tracker_project_name or slug(Path(run.config.data_name).name), run.accelerator
        for name, value in PATIENCE.items():
            os.environ.setdefault(name, value)
        logging_dir = self.folder / "tensorboard"
        accelerator.project_configuration.logging_dir = str(logging_dir)
        shutil.rmtree(logging_dir / project, ignore_errors=True)
        logging_dir.mkdir(parents=True, exist_ok=True)
        try:
            accelerator.init_trackers(project, init_kwargs=self.arguments(names, project, folder.resolve().name))
            for tracker in accelerator.trackers:
                # mlflow refuses another value in a run that it goes on with; what it is now stands in config.yaml.
                if not (tracker.name == "mlflow" and tracker.name in self.ids):
                    tracker.store_init_configuration(flatten(asdict(run.config)))
        except (Exception, SystemExit) as error:
            other = ", or set WANDB_MODE=offline" if "wandb" in names else ""
            for tracker in accelerator.trackers:
                # Those behind the one that failed have nothing to end.
                with suppress(Exception):
                    tracker.finish()
            if not resumed:
                shutil.rmtree(self.folder, ignore_errors=True)
            raise UserError(
                f"--report_to {run.config.report_to}: a tracker does not start ({type(error).__module__}.{type(error).__qualname__}: "
                f"{' '.join(str(error).split())}): correct it, or leave it out{other}"
            ) from None
        self.trackers = list(accelerator.trackers)
        for tracker in self.trackers:
            self.take_id(tracker, folder / "metrics.jsonl")
        write_json(known, self.ids)
        run.on_entry = lambda entry: self.send(run, entry)
        run.processes.at_exit.append(lambda code, reason: self.finish(code, run.processes.in_haste))

    def arguments(self, names: tuple[str, ...], project: str, name: str) -> dict[str, dict[str, Any]]:
        """What each tracker is started with: the run's name, its folder, and the run to go on with."""
        arguments: dict[str, dict[str, Any]] = {
            "wandb": {"name": name, "id": self.ids.get("wandb"), "resume": "allow"},
            "trackio": {"name": name, "embed": False},
            "mlflow": {"run_name": name, "run_id": self.ids.get("mlflow"), "logging_dir": str((self.folder / "mlflow").resolve())},
            "clearml": {"task_name": name},
            "dvclive": {"dir": str(self.folder / "dvclive")},
            "swanlab": {"experiment_name": name, "logdir": str(self.folder / "swanlab")},
        }
        if "WANDB_DIR" not in os.environ:
            arguments["wandb"]["dir"] = str(self.folder)
        if "mlflow" in names and "MLFLOW_TRACKING_URI" not in os.environ:
            import mlflow

            mlflow.set_tracking_uri(f"sqlite:///{(self.folder / 'mlflow.db').resolve()}")
        if "trackio" in names and "trackio" in self.ids:
            import trackio

            for before in trackio.Api().runs(project):
                if before.id == self.ids["trackio"]:
                    before.delete()
        return arguments

    def take_id(self, tracker: Any, metrics: Path) -> None:
        """Note what a resume needs of a tracker that has started, and what one that goes on has got already."""
        name, before = tracker.name, self.ids.get(tracker.name)
        if name == "wandb" and not tracker.tracker.disabled:
            self.ids[name] = tracker.tracker.id
            # A file that cannot be written on: the new one gets all.
            before = None if tracker.tracker.offline else before
        elif name == "mlflow":
            self.ids[name] = tracker.tracker.info.run_id
        elif name == "trackio":
            self.ids[name], before = tracker.tracker.id, None
        self.sent[name] = last_steps(metrics) if before is not None and before == self.ids[name] else {}

    def send(self, run: Run, entry: dict[str, Any]) -> None:
        """An entry of metrics.jsonl, also one from before a resume."""
        event, step = entry["event"], entry["step"]
        values = {f"{event}/{name}": value for name, value in entry.items() if name != "step" and isinstance(value, (int, float))}
        for tracker in tuple(self.trackers):
            if step > self.sent[tracker.name].get(event, -1):
                with self.guarded(run, tracker):
                    tracker.log(values, step=step)

    def on_fit_end(self, run: Run) -> None:
        for tracker in tuple(self.trackers):
            with self.guarded(run, tracker):
                log_picture(tracker, draw_confusion(run.state.metrics["confusion"], run.data.classes), run.state.step)

    @contextmanager
    def guarded(self, run: Run, tracker: Any) -> Iterator[None]:
        """Inside, what a tracker raises does not end the training, which it only watches; it is dropped, and that is said."""
        try:
            yield
        except Exception as error:
            self.drop(run, tracker, error)

    def drop(self, run: Run, tracker: Any, error: Exception) -> None:
        """Go on without a tracker; a resume gives it a new run, with everything."""
        run.notes.append(
            f"track {tracker.name} has failed at update {run.state.step} ({type(error).__name__}: {' '.join(str(error).split())}); the "
            "training goes on without it, and metrics.jsonl has all numbers"
        )
        self.trackers.remove(tracker)
        self.ids.pop(tracker.name, None)
        with suppress(OSError):
            write_json(self.folder / IDS, self.ids)
        with suppress(Exception):
            tracker.finish()

    def finish(self, code: int, in_haste: bool) -> None:
        """End each tracker, which writes or sends what it still holds; at the run's end."""
        for tracker in () if in_haste else self.trackers:
            try:
                end_tracker(tracker, code)
            except Exception as error:
                say(f"track {tracker.name} cannot be ended ({type(error).__name__}: {' '.join(str(error).split())})")
        self.trackers = []


def end_tracker(tracker: Any, code: int) -> None:
    """Accelerate's `finish`, which calls every run a success, unless the tracker can be told otherwise."""
    if tracker.name == "wandb":
        tracker.tracker.finish(exit_code=code)
    elif tracker.name == "mlflow":
        import mlflow

        mlflow.end_run({EXIT_DONE: "FINISHED", EXIT_STOPPED: "KILLED"}.get(code, "FAILED"))
    else:
        tracker.finish()


def log_picture(tracker: Any, picture: "numpy.ndarray[Any, Any]", step: int) -> None:
    """A uint8 (H, W, 3) picture, in the form that each of Accelerate's trackers takes, or its library where Accelerate has none."""
    if tracker.name == "tensorboard":
        tracker.log_images({PICTURE: picture[None]}, step=step, dataformats="NHWC")
    elif tracker.name in ("wandb", "swanlab"):
        tracker.log_images({PICTURE: [picture]}, step=step)
    elif tracker.name in ("aim", "clearml"):
        tracker.log_images({PICTURE: picture}, step=step)
    elif tracker.name == "trackio":
        import trackio

        tracker.log({PICTURE: trackio.Image(picture)}, step=step)
    elif tracker.name == "mlflow":
        import mlflow

        mlflow.log_image(picture, f"{PICTURE}.png")
    elif tracker.name == "comet_ml":
        tracker.tracker.log_image(picture, name=PICTURE, step=step)
    elif tracker.name == "dvclive":
        tracker.tracker.log_image(f"{PICTURE}.png", picture)


def draw_confusion(confusion: list[list[int]], classes: Sequence[str]) -> "numpy.ndarray[Any, Any]":
    """The report's confusion matrix, uint8 (H, W, 3).

    Of more classes than the report draws, the cells alone: a row is a true class, from the top; white is none of its images, dark blue all.
    """
    if len(classes) <= DRAWN:
        with drawing():
            return numpy.asarray(Image.open(io.BytesIO(png(confusion_figure(confusion, classes)))).convert("RGB"))
    counts = torch.tensor(confusion, dtype=torch.float64)
    share = counts / counts.sum(1, keepdim=True).clamp(min=1)
    white, blue = torch.tensor([255.0, 255.0, 255.0]), torch.tensor([8.0, 48.0, 107.0])
    cells = (white + share[..., None] * (blue - white)).round().to(torch.uint8).numpy()
    side = max(1, PIXELS // len(confusion))
    return numpy.asarray(cells.repeat(side, 0).repeat(side, 1))


def flatten(values: dict[str, Any]) -> dict[str, bool | int | float | str]:
    """Numbers and texts only, as every tracker takes them: lists joined by commas, what is None left out."""
    return {
        name: value if isinstance(value, (bool, int, float, str)) else ", ".join(map(str, value))
        for name, value in values.items()
        if value is not None
    }


def last_steps(metrics: Path) -> dict[str, int]:
    """The update of the last entry of each kind in a metrics.jsonl, whose last line may be torn."""
    steps: dict[str, int] = {}
    for line in metrics.read_text(encoding="utf-8").splitlines() if metrics.exists() else ():
        with suppress(ValueError):
            entry = json.loads(line)
            steps[entry["event"]] = entry["step"]
    return steps
