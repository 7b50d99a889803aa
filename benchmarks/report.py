"""What speed.py measured, kept as JSON; the issue's targets; the tables and the picture."""

import json
import math
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks import chart
from benchmarks.runner import CONTENDERS, PEERS, TWO, Figures

# batch size of a process: (steps of the part 'throughput', of which the first so many are not measured)
STEPS = {32: (500, 100), 256: (150, 50)}
GROWTH = (5_000, 60_000, 600_000)
SPEED, EVALUATION = "images_per_second", "evaluation_images_per_second"


class Results:
    """All runs so far; each is (part, round, contender, batch size of a process) and its figures. Kept in `file`."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.runs: list[Figures] = json.loads(file.read_text(encoding="utf-8"))["runs"] if file.exists() else []

    def forget(self, part: str, names: list[str] | None = None) -> None:
        """Drop a part's runs, or those of the contenders `names`, since they are measured again."""
        self.runs = [run for run in self.runs if run["part"] != part or (names is not None and run["contender"] not in names)]

    def add(self, part: str, number: int, contender: str, figures: Figures, batch_size: int = 32) -> None:
        self.runs.append({"part": part, "round": number, "contender": contender, "batch_size": batch_size, **figures})
        shown = [f"{key} {value:.5g}" for key, value in figures.items() if isinstance(value, float)]
        accuracy = [f"acc1 {figures['acc1']}"] if "acc1" in figures else []
        print(f"{part} {number + 1}: {contender}, batch {batch_size}: {', '.join(shown + accuracy)}", file=sys.stderr, flush=True)

    def save(self, settings: Figures) -> None:
        content = {"machine": machine(), "settings": settings, "runs": self.runs}
        self.file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    def values(self, part: str, contender: str, figure: str, batch_size: int = 32) -> dict[int, float]:
        """A figure by round, where it was measured; infinity for an accuracy that was not reached."""
        found: dict[int, float] = {}
        for run in self.runs:
            if (run["part"], run["contender"], run["batch_size"]) == (part, contender, batch_size) and figure in run:
                value = run[figure]
                if value is not None or figure.endswith("_to_99"):
                    found[run["round"]] = math.inf if value is None else value
        return found

    def median(self, part: str, contender: str, figure: str, batch_size: int = 32) -> float | None:
        return median(self.values(part, contender, figure, batch_size).values())

    def ratio(self, part: str, one: str, other: str, figure: str, batch_size: int = 32) -> float | None:
        """Median over the rounds of `one` / `other` within a round."""
        below = self.values(part, other, figure, batch_size)
        return median(value / below[number] for number, value in self.values(part, one, figure, batch_size).items() if number in below)

    def beyond_imports(self) -> float | None:
        """Seconds from process start to the end of the first update that importing alone does not explain."""
        imports = self.values("startup", "imports", "startup_seconds")
        ours = self.values("startup", "ours", "startup_seconds")
        return median(value - imports[number] for number, value in ours.items() if number in imports)

    def fastest_peer(self) -> str:
        return max(PEERS, key=lambda name: self.median("throughput", name, SPEED) or 0.0)


def median(values: Any) -> float | None:
    listed = list(values)
    return statistics.median(listed) if listed else None


def machine() -> Figures:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    versions = {name: version(name) for name in ("torch", "accelerate", "datasets")}
    return {"cpu": cpu, "cores": len(os.sched_getaffinity(0)), "python": platform.python_version(), **versions}


@dataclass(frozen=True)
class Target:
    """`bound` is the least value that is asked for, or with `at_most` the greatest."""

    what: str
    bound: float
    value: Callable[[Results], float | None]
    at_most: bool = False

    def row(self, results: Results) -> str:
        value = self.value(results)
        reached = value is not None and (value <= self.bound if self.at_most else value >= self.bound)
        verdict = "not measured" if value is None else "reached" if reached else "**not**"
        return f"| {self.what} | {'≤' if self.at_most else '≥'} {self.bound:g} | {cell(value, 2)} | {verdict} |"


TARGETS = (
    Target("images/s, batch 32, fp32: ours / limit", 0.95, lambda r: r.ratio("throughput", "ours", "limit", SPEED)),
    Target("images/s, batch 32, bf16: ours / limit", 0.90, lambda r: r.ratio("throughput", "ours_bf16", "limit_bf16", SPEED)),
    Target("batch 32, fp32: ours / limit, in one process", 0.95, lambda r: r.median("overhead", "ours", "limit_ratio")),
    Target("batch 32, bf16: ours / limit, in one process", 0.90, lambda r: r.median("overhead", "ours_bf16", "limit_ratio")),
    Target("images/s, batch 32, fp32: ours / tutorials' loop", 1.25, lambda r: r.ratio("throughput", "ours", "tutorial", SPEED)),
    Target("images/s, batch 32, fp32: ours / fastest framework", 1.20, lambda r: r.ratio("throughput", "ours", r.fastest_peer(), SPEED)),
    Target("images/s, batch 256: ours bf16 / tutorials' loop", 1.8, lambda r: r.ratio("throughput", "ours_bf16", "tutorial", SPEED, 256)),
    Target("whole command: tutorials' loop / ours fp32", 1.25, lambda r: r.ratio("command", "tutorial", "ours", "seconds")),
    Target("whole command: tutorials' loop / ours bf16", 1.7, lambda r: r.ratio("command", "tutorial", "ours_bf16", "seconds")),
    Target("recipe mnist: epochs to 99 %", 1, lambda r: r.median("accuracy", "ours", "epochs_to_99"), at_most=True),
    Target("start-up beyond the imports, s", 1.0, Results.beyond_imports, at_most=True),
    Target("evaluation, fp32: ours / forward pass alone", 0.90, lambda r: r.ratio("throughput", "ours", "limit", EVALUATION)),
    Target("evaluation, bf16: ours / forward pass alone", 0.90, lambda r: r.ratio("throughput", "ours_bf16", "limit_bf16", EVALUATION)),
    Target("evaluation, fp32: ours / forward pass alone, in one process", 0.90, lambda r: r.median("overhead", "ours", "evaluation_ratio")),
    Target(
        "evaluation, bf16: ours / forward pass alone, in one process", 0.90, lambda r: r.median("overhead", "ours_bf16", "evaluation_ratio")
    ),
    Target("peak memory: ours / tutorials' loop", 1.2, lambda r: r.ratio("command", "ours", "tutorial", "memory_bytes"), at_most=True),
    Target("2 processes x 1 thread / 1 x 2, SyncBN off", 0.90, lambda r: r.ratio("two", "ours_2x1_off", "ours_1x2", SPEED)),
    Target("2 processes x 1 thread / 1 x 2, SyncBN on", 0.80, lambda r: r.ratio("two", "ours_2x1_on", "ours_1x2", SPEED)),
    Target(
        "hooks, log, metrics, wrappers, beyond the bare loop, % of a step", 3, lambda r: r.median("overhead", "ours", "own_percent"), True
    ),
)

COLUMNS = (
    "contender",
    "images/s, batch 32",
    "of its limit",
    "images/s, batch 256",
    "of its limit",
    "whole command, s",
    "99 % after, s",
    "largest process, MB",
    "start-up, s",
    "evaluation, images/s",
)


def cell(value: float | None, digits: int = 0) -> str:
    return "" if value is None else "not reached" if math.isinf(value) else f"{value:,.{digits}f}"


def tables(results: Results) -> str:
    """Markdown: contenders, targets, and what belongs to neither."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|", *contenders(results)]
    lines += ["", "| target | | measured | |", "|---|---|---|---|", *(target.row(results) for target in TARGETS)]
    rest = [f"| {what} | {cell(value, digits)} |" for what, value, digits in more(results) if value is not None]
    lines += ["", "| more | |", "|---|---|", *rest] if rest else []
    return "\n".join(lines)


def contenders(results: Results) -> Iterator[str]:
    def either(name: str, figure: str) -> float | None:
        return next((m for part in ("command", "throughput") if (m := results.median(part, name, figure)) is not None), None)

    for name, contender in CONTENDERS.items():
        limit = "limit_bf16" if contender.bf16 else "limit"
        cells = []
        for batch_size in STEPS:
            cells.append(cell(results.median("throughput", name, SPEED, batch_size)))
            cells.append(cell(results.ratio("throughput", name, limit, SPEED, batch_size), 2))
        memory = either(name, "memory_bytes")
        cells += [cell(results.median("command", name, "seconds"), 1), cell(results.median("command", name, "seconds_to_99"), 1)]
        cells += [cell(memory and memory / 1e6), cell(either(name, "startup_seconds"), 2), cell(either(name, EVALUATION))]
        if any(cells):
            yield f"| {contender.label} | {' | '.join(cells)} |"


def more(results: Results) -> Iterator[tuple[str, float | None, int]]:
    """(what, value, digits)"""
    yield "recipe mnist: seconds of the whole command to 99 %", results.median("accuracy", "ours", "seconds_to_99"), 1
    yield "recipe mnist: seconds of training to 99 %", results.median("accuracy", "ours", "train_seconds_to_99"), 1
    yield "start-up: ours, s", results.median("startup", "ours", "startup_seconds"), 2
    yield "start-up: the imports alone, s", results.median("startup", "imports", "startup_seconds"), 2
    yield (
        "hooks, log, metrics and wrappers, with what the bare loop has too, % of a step",
        results.median("overhead", "ours", "rest_percent"),
        1,
    )
    yield "all beyond forward, backward and optimizer, % of a step", results.median("overhead", "ours", "beyond_percent"), 1
    for contender in TWO:
        yield f"{contender.label}: images/s in all", results.median("two", contender.name, SPEED), 0
    smaller: tuple[int, float] | None = None
    for images in GROWTH:
        memory, speed = (results.median("growth", f"ours_{images}", figure) for figure in ("memory_bytes", SPEED))
        if memory is None or speed is None:
            continue
        yield f"{images:,} images in memory: largest process, MB", memory / 1e6, 0
        if smaller is not None:
            yield f"{images:,} images in memory: bytes for an image more", (memory - smaller[1]) / (images - smaller[0]), 0
        yield f"{images:,} images in memory: µs an image", 1e6 / speed, 1
        smaller = images, memory


def picture(results: Results) -> str:
    """The SVG of the part 'throughput', fastest first."""
    rows = []
    for name, contender in CONTENDERS.items():
        values = tuple(results.median("throughput", name, SPEED, batch_size) for batch_size in STEPS)
        if any(values):
            rows.append(chart.Bars(contender.label, contender.kind, values))
    rows.sort(key=lambda row: -(row.values[0] or 0.0))
    rounds = len({run["round"] for run in results.runs if run["part"] == "throughput"})
    subtitles = (
        f"Images per second, more is better; median of {rounds} interleaved rounds.",
        f"MNIST, the DDP tutorials' ConvNet, AdamW, on {machine()['cores']} CPU cores; fp32 where it does not say bf16.",
    )
    return chart.draw("Training speed, side by side", subtitles, tuple(f"Batch {size} a process" for size in STEPS), rows)
