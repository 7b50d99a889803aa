"""Which charts a run's numbers make: of one run for its report, or of several to compare them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from trainer.plot import CYCLE, Chart, Line
from trainer.record import Record

Entry = dict[str, Any]
# A loss that falls by more than this is drawn over its logarithm.
LOG_FROM = 30.0
MOST_UPPER = 10


def curves(record: Record) -> dict[str, Chart]:
    """The charts of one run, by their files' names: loss, accuracy, lr, scale (with a GradScaler), speed; none that would be empty."""
    test = _test_name(record)

    def line(name: str, entries: Sequence[Entry], key: str, color: str, points: bool = False) -> Line:
        return Line(name, *_points(entries, key), color, points)

    losses = (line("train", record.train, "loss", "blue"), line(test, record.evals, "loss", "orange", points=True))
    accuracies = [line("accuracy", record.evals, "acc1", "blue", points=True)]
    if len(record.classes) > 5:
        accuracies.append(line("among the top 5", record.evals, "acc5", "teal", points=True))
    best = max((entry for entry in record.evals if entry.get("acc1") is not None), key=lambda entry: entry["acc1"], default=None)
    charts = {
        "loss": Chart("Loss", "update", losses, y_log=_falls_far(losses)),
        "accuracy": Chart(
            f"Accuracy on {test}, %", "update", tuple(accuracies), best=(best["step"], best["acc1"]) if best is not None else None
        ),
        "lr": Chart("Learning rate", "update", (line("lr", record.train, "lr", "green"),)),
        "scale": Chart("Loss scale", "update", (line("scale", record.train, "scale", "purple"),), y_log=True),
        "speed": Chart("Training speed, images/s", "update", (line("images/s", record.train, "images_per_second", "brown"),)),
    }
    upper = _epochs(record)
    return {
        name: replace(chart, upper=upper, upper_name="epoch") for name, chart in charts.items() if any(line.finite for line in chart.lines)
    }


def overlaid(records: Sequence[Record], names: Sequence[str]) -> dict[str, Chart]:
    """The charts of several runs, a line for each in its own colour, over updates."""

    def chart(title: str, of: Callable[[Record], Sequence[Entry]], key: str, points: bool = False) -> Chart:
        lines = tuple(
            Line(name, *_points(of(record), key), color_of(number), points, dashed=is_dashed(number))
            for number, (record, name) in enumerate(zip(records, names, strict=True))
        )
        lines = tuple(line for line in lines if line.finite)
        return Chart(title, "update", lines, y_log=key == "loss" and _falls_far(lines), legend=False)

    charts = {
        "train_loss": chart("Training loss", lambda record: record.train, "loss"),
        "loss": chart("Loss of the evaluation", lambda record: record.evals, "loss", points=True),
        "accuracy": chart("Accuracy, %", lambda record: record.evals, "acc1", points=True),
        "lr": chart("Learning rate", lambda record: record.train, "lr"),
        "scale": chart("Loss scale", lambda record: record.train, "scale"),
        "speed": chart("Training speed, images/s", lambda record: record.train, "images_per_second"),
    }
    return {name: drawn for name, drawn in charts.items() if drawn.lines}


def color_of(number: int) -> str:
    """Of the run with this number, from 0."""
    return CYCLE[number % len(CYCLE)]


def is_dashed(number: int) -> bool:
    """Where the colours begin again."""
    return number // len(CYCLE) % 2 == 1


def calibration(results: dict[str, Any]) -> Chart | None:
    """Accuracy over the predictions' probability, in the bins of results.json; None where they are not there."""
    bins = [entry for entry in results.get("calibration") or [] if entry["samples"]]
    if not bins:
        return None
    even = Line("as sure as right", (0, 100), (0, 100), "muted", width=0.8)
    own = Line("measured", [100 * entry["probability"] for entry in bins], [100 * entry["accuracy"] for entry in bins], "blue", points=True)
    return Chart("Calibration: accuracy, %", "probability of the prediction, %", (own, even), y_range=(-3, 103))


def _test_name(record: Record) -> str:
    return str(record.config.get("eval_split") or "test")


def _points(entries: Sequence[Entry], key: str) -> tuple[list[float], list[float | None]]:
    return [entry["step"] for entry in entries], [entry.get(key) for entry in entries]


def _falls_far(lines: Sequence[Line]) -> bool:
    values = [y for line in lines for y in line.finite]
    return bool(values) and min(values) > 0 and max(values) > LOG_FROM * min(values)


def _epochs(record: Record) -> tuple[tuple[float, str], ...]:
    """Marks at the ends of evenly chosen epochs."""
    every = next(stride * 10**power for power in range(9) for stride in (1, 2, 5) if len(record.evals) <= MOST_UPPER * stride * 10**power)
    return tuple((entry["step"], str(entry["epoch"])) for entry in record.evals if entry["epoch"] % every == 0)


def confused(confusion: Sequence[Sequence[int]], classes: Sequence[str], most: int) -> list[tuple[str, str, int, float]]:
    """The most frequent mistakes, at first: (true class, predicted class, images, share of the true class's images within 0..1)."""
    pairs = [(count, row, column) for row, counts in enumerate(confusion) for column, count in enumerate(counts) if count and row != column]
    pairs.sort(key=lambda pair: (-pair[0], pair[1], pair[2]))
    return [(classes[row], classes[column], count, count / sum(confusion[row])) for count, row, column in pairs[:most]]
