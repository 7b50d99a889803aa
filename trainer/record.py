"""A run's folder as it can be read again, without torch: what ran, its numbers, how it ended."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from trainer.runtime import UserError

PLAN, DOCTOR, PLOTS = "plan.json", "doctor.json", "plots"
# The pictures of mistakes, PLOTS/MISTAKES/<index in the evaluation split>.png.
MISTAKES = "mistakes"


@dataclass(frozen=True)
class Record:
    """What a run's files say.

    Attributes:
        config: the settings, by flag; env: env.json.
        train, evals: the entries of metrics.jsonl, in their order.
        results: results.json; None when the training has not come to its end, or has gone on since.
        plan: the block before training, (name, value).
        doctor: doctor.json; ending: exit.json; None where there is none.
    """

    folder: Path
    config: dict[str, Any]
    env: dict[str, Any]
    classes: list[str]
    train: list[dict[str, Any]]
    evals: list[dict[str, Any]]
    results: dict[str, Any] | None
    plan: list[tuple[str, str]]
    doctor: dict[str, Any] | None
    ending: dict[str, Any] | None

    @property
    def name(self) -> str:
        """The folder's own name."""
        return self.folder.resolve().name

    @property
    def data(self) -> str:
        return str(self.config.get("data_dir") or self.config.get("dataset"))

    @property
    def status(self) -> str:
        """How the run stands, in a few words."""
        if self.results is not None:
            return "done"
        if self.ending is not None and self.ending["code"]:
            return f"{'stopped' if self.ending['code'] == 75 else 'failed'}: {self.ending['reason']}"
        return "still running, or killed"

    @property
    def images_per_second(self) -> float | None:
        """Of training alone, over all of it; without its end, the mean of the log lines."""
        if self.results is not None and self.results.get("train_seconds"):
            return float(self.results["samples"] / self.results["train_seconds"])
        speeds = [entry["images_per_second"] for entry in self.train if entry.get("images_per_second")]
        return sum(speeds) / len(speeds) if speeds else None


def read_record(folder: Path) -> Record:
    """What the files of a run's folder say.

    Raises:
        UserError: it is no run's folder, or a file of it cannot be read.
    """
    if not (folder / "config.yaml").is_file():
        what = "holds no run (no config.yaml)" if folder.is_dir() else "is not there" if not folder.exists() else "is no folder"
        raise UserError(f"{folder} {what}: give the --output_dir of a training")
    entries = _entries(folder / "metrics.jsonl")
    train = [entry for entry in entries if entry.get("event") == "train"]
    evals = [entry for entry in entries if entry.get("event") == "eval"]
    results = _json(folder / "results.json", dict)
    # After a resume that goes further they are those of an earlier end.
    last = train[-1].get("step", 0) if train else 0
    if results is not None and (last > results.get("step", last) or (evals and evals[-1]["epoch"] != results["epochs"])):
        results = None
    return Record(
        folder=folder,
        config=_config(folder / "config.yaml"),
        env=_json(folder / "env.json", dict) or {},
        classes=[str(name) for name in _json(folder / "classes.json", list) or []],
        train=train,
        evals=evals,
        results=results,
        plan=[(str(name), str(value)) for name, value in _json(folder / PLAN, list) or []],
        doctor=_json(folder / DOCTOR, dict),
        ending=_json(folder / "exit.json", dict),
    )


def _broken(path: Path, reason: object) -> UserError:
    return UserError(f"{path} cannot be read ({' '.join(str(reason).split())}): it is not as a training writes it")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _broken(path, error) from None


def _config(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(_text(path))
    except yaml.YAMLError as error:
        raise _broken(path, error) from None
    if not isinstance(content, dict):
        raise _broken(path, "no settings in it")
    return content


def _json(path: Path, kind: type) -> Any:
    if not path.exists():
        return None
    try:
        content = json.loads(_text(path))
    except ValueError as error:
        raise _broken(path, error) from None
    if not isinstance(content, kind):
        raise _broken(path, f"a {type(content).__name__} in it, not a {kind.__name__}")
    return content


def _entries(path: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; a last one that is torn, since the run was killed, or is being written, is left out."""
    entries: list[dict[str, Any]] = []
    lines = _text(path).splitlines() if path.exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
            if not isinstance(entry, dict):
                raise ValueError("no object")
            entries.append(entry)
        except ValueError as error:
            if number < len(lines):
                raise _broken(path, f"line {number}: {error}") from None
    return entries
