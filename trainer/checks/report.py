"""The checks in turn, each row printed as soon as it is known, and a hang turned into a row."""

import os
import shutil
import sys
import sysconfig
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from trainer.checks.base import Check, Result, Subject, examine
from trainer.checks.preserve import Snapshot

PATIENCE = 60.0
NAME_WIDTH = 15
STATUS_WIDTH = 9
FALLBACK_WIDTH = 120


@dataclass
class Report:
    """What the doctor found; the same on every rank.

    Attributes:
        results: by the check's name, in the order of the table.
    """

    results: dict[str, Result] = field(default_factory=dict)
    start: float = field(default_factory=time.perf_counter)

    @property
    def failed(self) -> list[str]:
        """Names of the checks that failed."""
        return [name for name, result in self.results.items() if result.status == "FAIL"]

    def summary(self) -> str:
        counts = Counter(result.status for result in self.results.values())
        seconds = time.perf_counter() - self.start
        warned = f"{counts['WARN']} warned, " if counts["WARN"] else ""
        return f"doctor: {counts['PASS']} passed, {warned}{counts['FAIL']} failed, {counts['SKIPPED']} skipped in {seconds:.1f} s"


def row(name: str, status: str, measured: str) -> str:
    """One row, wrapped to the terminal."""
    width = shutil.get_terminal_size((FALLBACK_WIDTH, 24)).columns
    indent = NAME_WIDTH + STATUS_WIDTH
    head = f"{name:{NAME_WIDTH}}{status:{STATUS_WIDTH}}"
    lines = textwrap.wrap(measured, max(20, width - indent), break_on_hyphens=False, break_long_words=False) or [""]
    return "\n".join([head + lines[0], *(" " * indent + line for line in lines[1:])])


def run_checks(subject: Subject, checks: Sequence[Check], report: Report, patience: float = PATIENCE) -> None:
    """Add a row for each check. A collective.

    A check that some rank does not end within `patience` seconds ends the processes with code 1, after each has said where it stands.
    """
    loaders = tuple(loader for loader in (subject.train_loader, subject.eval_loader) if loader is not None)
    before = Snapshot(subject.model, subject.optimizer, subject.scaler, subject.accelerator, loaders)
    for check in checks:
        with watched(check.name, patience, subject.rank, lambda: subject.failure):
            result = examine(check, subject, before)
        add(report, check.name, result, subject.rank)


def add(report: Report, name: str, result: Result, rank: int) -> None:
    report.results[name] = result
    if rank == 0:
        print(row(name, result.status, result.measured), flush=True)


@contextmanager
def watched(name: str, patience: float, rank: int, failure: Callable[[], str | None] = lambda: None) -> Iterator[None]:
    """End this process, with the row of a hang, when the block takes longer than `patience` seconds.

    Args:
        failure: what failed on this rank, while the others may wait for it in a collective, where no exception reaches them.
    """
    thread = threading.get_ident()

    def give_up() -> None:
        failed = failure()
        place = f"failed ({failed})" if failed is not None else standing(sys._current_frames().get(thread))
        print(f"doctor: rank {rank} {place}", file=sys.stderr, flush=True)
        if rank == 0:
            # A launcher ends the whole group as soon as one process leaves: let the others speak first.
            time.sleep(2)
            print(
                row(name, "FAIL", f"not done after {patience:g} s: a rank waits for one that never comes; stderr says where each stands"),
                flush=True,
            )
        else:
            time.sleep(4)
        os._exit(1)

    timer = threading.Timer(patience, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        # Until its thread has ended, it holds on to the model, and so to the process group.
        timer.join()


def standing(frame: FrameType | None) -> str:
    """Where a thread stands: its innermost line outside of the installed packages and of the doctor."""
    library = tuple(str(Path(path)) for path in sysconfig.get_paths().values())
    here = Path(__file__).resolve().parent
    own = (*map(str, here.glob("*.py")), str(here.parent / "runtime.py"))
    while frame is not None:
        file = frame.f_code.co_filename
        if file.endswith(own):
            return "waits for the other ranks"
        if not file.startswith(library) and not file.startswith("<"):
            return f"stands in {file}:{frame.f_lineno} ({frame.f_code.co_name})"
        frame = frame.f_back
    return "stands in a library"
