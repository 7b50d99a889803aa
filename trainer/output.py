"""The run's folder: made by the main process, agreed by all, never one that holds another run."""

import os
import platform
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from trainer.checkpoint import CHECKPOINTS, Checkpoint, has_checkpoint
from trainer.config import Config
from trainer.export import MODEL, MODEL_FILES
from trainer.files import write_json, write_text
from trainer.runtime import EXIT_FAILURE, Processes, UserError, disk_full, say
from trainer.state import Run

RUN_FILES = ("config.yaml", "metrics.jsonl", "results.json", "exit.json", MODEL, CHECKPOINTS)


def create_output_dir(
    config: Config,
    processes: Processes,
    classes: tuple[str, ...],
    checkpoint: Checkpoint | None = None,
    begin: Callable[[Path], None] = lambda folder: None,
) -> Path:
    """Make the folder, with config.yaml, classes.json and env.json in it. A collective.

    Args:
        checkpoint: what the run goes on with; its run's folder is used again, unless `output_dir` is another one.
        begin: called with it on the main process; where that raises a user's mistake, what was made is removed again.

    Raises:
        UserError: it holds another run already, or cannot be written; or `begin`'s.
    """
    folder: list[Path] = []
    with processes.together():
        if processes.is_main:
            made: list[Path] = []
            with _undone(made, config.output_dir or (checkpoint.run_folder if checkpoint is not None else "runs")):
                folder.append(_create(config, checkpoint, made))
                _describe(folder[0], config, processes, classes, made)
                begin(folder[0])
    return processes.broadcast(folder[0] if folder else Path())


def create_folder(config: Config, processes: Processes) -> Path:
    """`--output_dir`, whatever is in it, or a new folder, for files that are not a run's. A collective.

    Raises:
        UserError: it cannot be written.
    """
    folder: list[Path] = []
    with processes.together():
        if processes.is_main:
            made: list[Path] = []
            with _undone(made, config.output_dir or "runs"):
                folder.append(_use(Path(config.output_dir), made) if config.output_dir is not None else _new(config, made))
    return processes.broadcast(folder[0] if folder else Path())


@contextmanager
def _undone(made: list[Path], place: str | Path | None) -> Iterator[None]:
    """After an operating system's error or a user's mistake, remove what was `made`; name `place` in a sentence for the first."""
    try:
        yield
    except (OSError, UserError) as error:
        for path in reversed(made):
            with suppress(OSError):
                path.rmdir() if path.is_dir() else path.unlink()
        if isinstance(error, UserError) or disk_full(error):
            raise
        raise UserError(f"--output_dir {place} cannot be made or written ({error.strerror}): choose another --output_dir") from None


def _create(config: Config, checkpoint: Checkpoint | None, made: list[Path]) -> Path:
    """The run's folder; `made` gets it and the folders above it that were not there."""
    before = checkpoint.run_folder if checkpoint is not None else None
    folder = Path(config.output_dir) if config.output_dir is not None else before
    if folder is not None:
        if before is None or folder.resolve() != before.resolve():
            _refuse_held(folder, config)
        return _use(folder, made)
    return _new(config, made)


def _use(folder: Path, made: list[Path]) -> Path:
    _make(folder, made)
    if not os.access(folder, os.W_OK):
        raise PermissionError(13, os.strerror(13))
    return folder


def _new(config: Config, made: list[Path]) -> Path:
    dataset = slug(config.data_name)
    name = f"{dataset}-{time.strftime('%Y%m%d-%H%M%S')}"
    for number in range(1000):
        folder = Path("runs", name if number == 0 else f"{name}-{number}")
        _make(folder, made)
        if folder in made:
            return folder
    raise FileExistsError(17, os.strerror(17))


def _make(folder: Path, made: list[Path]) -> None:
    for path in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
        # Another run may be making the same ones.
        with suppress(FileExistsError):
            path.mkdir()
            made.append(path)
    folder.mkdir(exist_ok=True)


def _describe(folder: Path, config: Config, processes: Processes, classes: tuple[str, ...], made: list[Path]) -> None:
    made += [file for name in ("config.yaml", "classes.json", "env.json") if not (file := folder / name).exists()]
    write_text(folder / "config.yaml", yaml.safe_dump(asdict(config), sort_keys=False))
    write_json(folder / "classes.json", list(classes))
    write_json(folder / "env.json", environment(processes))
    # It tells how an earlier attempt ended.
    (folder / "exit.json").unlink(missing_ok=True)


def _refuse_held(folder: Path, config: Config) -> None:
    """Refuse a folder that holds a run; not one that `--resume auto` goes on with, killed before its first checkpoint."""
    held = [name for name in RUN_FILES if (folder / name).exists()]
    if not held:
        return
    begun = (folder / "config.yaml").exists() and not (folder / "results.json").exists() and not has_checkpoint(folder)
    theirs = {path.name for path in (folder / MODEL).glob("*")} - set(MODEL_FILES)
    if config.resume_from_checkpoint == "auto" and begun and not theirs:
        (folder / "metrics.jsonl").unlink(missing_ok=True)
        shutil.rmtree(folder / MODEL, ignore_errors=True)
        return
    go_on = "go on with it by --resume auto, or " if has_checkpoint(folder) else ""
    raise UserError(f"--output_dir {folder} holds a run already ({held[0]}): {go_on}choose another --output_dir")


def environment(processes: Processes) -> dict[str, Any]:
    """What the run ran on, for env.json."""
    import torch

    device = processes.state.device
    return {
        "command": sys.argv,
        "python": platform.python_version(),
        "platform": platform.platform(),
        **{package: version(package) for package in ("torch", "accelerate", "datasets", "safetensors", "numpy")},
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "cuda": torch.version.cuda if device.type == "cuda" else None,
        "processes": processes.count,
        "backend": processes.state.backend,
        "threads": torch.get_num_threads(),
    }


def write_exit(folder: Path, code: int, reason: str, resumable: bool, step: int) -> None:
    """exit.json: how the run ended; launchers turn every failure into 1.

    Args:
        resumable: `--resume auto` goes on, since there is a whole checkpoint.
    """
    try:
        write_json(folder / "exit.json", {"code": code, "reason": reason, "resumable": resumable, "step": step})
    except OSError as error:
        say(f"exit.json cannot be written: {error}")


def report_end(run: Run, exit_file: bool = True) -> None:
    """Have exit.json written whatever ends the run, if it is one with such a file, and another rank's failure named, by one rank."""
    watch, processes = run.watch, run.processes

    def write(code: int, reason: str) -> None:
        # The main process may have written it before it was gone.
        if exit_file and (run.is_main or not (run.output_dir / "exit.json").exists()):
            write_exit(run.output_dir, code, reason, has_checkpoint(run.output_dir), run.state.step)

    def leave(code: int, reason: str) -> None:
        if not processes.in_haste:
            run.close()
            # After an error, what was begun is still finished; a failure of its own comes second.
            with suppress(Exception):
                run.writer.wait()
        # The main process; another one when that was killed.
        if run.is_main or (code and watch.speaks):
            write(code, reason)

    def blame(error: BaseException) -> tuple[int, str, bool] | None:
        sentence = watch.explain(error)
        if sentence is None:
            if isinstance(error, UserError):
                watch.failed(str(error), told=error.code)
            else:
                watch.failed(f"{type(error).__name__}: {error}")
            return None
        return watch.told or EXIT_FAILURE, sentence, watch.speaks and not watch.told

    def on_verdict(reason: str) -> None:
        if watch.speaks:
            write(watch.told or EXIT_FAILURE, reason)

    watch.on_verdict = on_verdict
    # Before those that may take their time.
    processes.at_exit.insert(0, leave)
    processes.at_failure.append(blame)
    processes.at_last.append(watch.close)


def slug(name: str) -> str:
    """`name` as a folder, and a project of every tracker, can be called."""
    return re.sub(r"[^\w.-]+", "-", name).strip("-.") or "run"
