"""Trainings started as a user starts them, by a real launcher, and Accelerate's wizard answered in a terminal."""

import json
import os
import pty
import re
import select
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.helpers import ROOT

MAIN = ROOT / "trainer" / "main.py"
CONFIGS = ROOT / "accelerate_configs"
TIMEOUT = 150.0
# Free ports, so that launches of other programs on this machine cannot disturb these.
ACCELERATE = ("accelerate", "launch", "--main_process_port", "0")


@dataclass(frozen=True)
class Launch:
    """What a launch left behind.

    Attributes:
        code: the launcher's exit code.
        lines: its stdout.
        errors: its stderr.
        output_dir: the training's folder.
    """

    code: int
    lines: list[str]
    errors: str
    output_dir: Path

    def row(self, name: str) -> str:
        """The value of a line of the block before training, which must be there once."""
        rows = [line.strip().removeprefix(name + " ") for line in self.lines if line.strip().startswith(name + " ")]
        assert len(rows) == 1, (name, self.lines, self.errors)
        return rows[0]

    def block(self) -> list[str]:
        """The block before training."""
        return self.lines[: next(number for number, line in enumerate(self.lines) if line.startswith("train "))]

    def sentences(self) -> list[str]:
        """The trainer's own error messages, whoever's output they are mixed with."""
        return re.findall(r"\berror(?: on rank \d+)?: .*", self.errors)

    def frames(self) -> list[str]:
        """The trainer's own lines in tracebacks."""
        return re.findall(rf'File "(?:{re.escape(str(ROOT))}/)?trainer/.*', self.errors)

    def json(self, name: str) -> Any:
        return json.loads((self.output_dir / name).read_text(encoding="utf-8"))


def environment(variables: dict[str, str] | None = None) -> dict[str, str]:
    """This process's, with this Python's scripts first on PATH and no GPU: the tests' answers are those of a machine without one."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "CUDA_VISIBLE_DEVICES": "", **(variables or {})}


def popen(*command: str | Path, cwd: Path, variables: dict[str, str] | None = None) -> "subprocess.Popen[str]":
    """A command that runs from now on, and reads nothing."""
    return subprocess.Popen(
        [str(word) for word in command],
        cwd=cwd,
        env=environment(variables),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@contextmanager
def started(*command: str | Path, cwd: Path, variables: dict[str, str] | None = None) -> Iterator["subprocess.Popen[str]"]:
    """A running command; it and whatever it started do not outlive a failing test."""
    child = popen(*command, cwd=cwd, variables=variables)
    try:
        yield child
    except BaseException:
        if child.poll() is None:
            # torchrun puts its workers into sessions of their own, where no signal to a group reaches them.
            workers = psutil.Process(child.pid).children(recursive=True)
            child.kill()
            child.wait()
            for worker in workers:
                with suppress(psutil.NoSuchProcess):
                    worker.kill()
        raise


def finish(child: "subprocess.Popen[str]", output_dir: Path) -> Launch:
    """The end of a launch; a hang is a failure."""
    out, errors = child.communicate(timeout=TIMEOUT)
    return Launch(child.returncode, out.splitlines(), errors, output_dir)


def launch(folder: Path, *command: str | Path, cwd: Path | None = None, variables: dict[str, str] | None = None) -> Launch:
    """Run `command` in `folder` or in `cwd`, with `--output_dir` after it: as `run` inside `folder`, so that config.yaml is comparable."""
    output_dir = "run" if cwd is None else str(folder / "run")
    with started(*command, "--output_dir", output_dir, cwd=cwd or folder, variables=variables) as child:
        return finish(child, folder / "run")


def script(folder: Path, text: str) -> Path:
    """A user's program that imports the package; `launch` it with ROOT on PYTHONPATH, since that need not be installed."""
    file = folder / "program.py"
    file.write_text(text, encoding="utf-8")
    return file


@dataclass(frozen=True)
class Pick:
    """An entry of a menu.

    Attributes:
        text: the entry.
        key: the key that moves the cursor to it; empty where the cursor is on it already.
    """

    text: str
    key: str = ""


def answer_wizard(home: Path, answers: Sequence[tuple[str, str | Pick]]) -> Path:
    """The file that `accelerate config` writes when it asks these questions, in this order, and is answered so.

    Args:
        home: HF_HOME.
        answers: part of a question, and the text to type (empty: the default) or the menu's entry to pick.
    """
    terminal, theirs = pty.openpty()
    child = subprocess.Popen(
        ["accelerate", "config"],
        env=environment({"HF_HOME": str(home)}),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    deadline = time.monotonic() + TIMEOUT
    shown = b""

    def read(seconds: float) -> bool:
        """Take in what is shown within `seconds`; False when the wizard has ended."""
        nonlocal shown
        assert time.monotonic() < deadline, shown.decode(errors="replace")
        if select.select([terminal], [], [], seconds)[0]:
            try:
                more = os.read(terminal, 65536)
            except OSError:
                more = b""
            shown += more
            return bool(more)
        return True

    def read_until(text: str) -> None:
        """Read on to `text`, and forget what stands before it."""
        nonlocal shown
        while text.encode() not in shown:
            assert read(1.0), f"the wizard did not show {text!r}, but {shown.decode(errors='replace')!r}"
        shown = shown.partition(text.encode())[2]

    def press(key: str) -> None:
        """A key for a menu, which throws away what was typed before it turned the terminal's line mode off."""
        while termios.tcgetattr(terminal)[3] & termios.ICANON:
            assert read(0.01), "the wizard ended"
        os.write(terminal, key.encode())

    try:
        for question, answer in answers:
            read_until(question)
            if isinstance(answer, str):
                os.write(terminal, f"{answer}\n".encode())
                continue
            if answer.key:
                press(answer.key)
                # The entry under the cursor is green.
                read_until(f"\x1b[32m{answer.text}\x1b")
            press("\r")
        while read(1.0):
            pass
        assert child.wait(TIMEOUT) == 0, shown.decode(errors="replace")
    finally:
        child.kill()
        child.wait()
        os.close(terminal)
    return home / "accelerate" / "default_config.yaml"
