"""The bar is drawn on a terminal, and nowhere else."""

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

from tests.launching import MAIN, environment

COMMAND = [sys.executable, str(MAIN), "--max_steps", "40", "--log_interval", "20", "--output_dir"]


def on_a_terminal(folder: Path) -> str:
    """Everything that a training writes to its terminal."""
    terminal, theirs = pty.openpty()
    child = subprocess.Popen(
        [*COMMAND, str(folder / "run")],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment({"TERM": "xterm", "COLUMNS": "60", "NO_COLOR": "1"}),
    )
    os.close(theirs)
    shown = b""
    try:
        # A terminal whose other end is closed answers with an end of file on some systems, with an error on others.
        while part := os.read(terminal, 65536):
            shown += part
    except OSError:
        pass
    finally:
        os.close(terminal)
        assert child.wait() == 0, shown
    return shown.decode()


def test_a_terminal_shows_the_bar_below_complete_log_lines(tmp_path: Path) -> None:
    shown = on_a_terminal(tmp_path)
    assert "40/40" in shown
    assert "━" in shown
    plain = [line.strip() for line in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown).replace("\r", "\n").splitlines()]
    for line in (tmp_path / "run" / "train.log").read_text(encoding="utf-8").splitlines():
        assert plain.count(line.strip()) == 1, line


def test_a_pipe_shows_the_log_lines_only(tmp_path: Path) -> None:
    done = subprocess.run([*COMMAND, str(tmp_path / "run")], env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout == (tmp_path / "run" / "train.log").read_text(encoding="utf-8")
    assert done.stderr == ""
