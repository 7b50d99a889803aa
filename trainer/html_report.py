"""A run's report, made of the files in its folder alone: report.html, which needs no other file, and plots/*.png with the same charts."""

import base64
import io
import shlex
import time
from dataclasses import MISSING, fields
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.config import Config
from trainer.curves import calibration, confused, curves
from trainer.files import write_text
from trainer.page import Html, document, figure, html, pairs, section, table, tiles
from trainer.plot import DRAWN, NUMBERED, chart_figure, confusion_figure, drawing, page_svg, picture_figure, png, short
from trainer.record import MISTAKES, PLOTS, Record, read_record

if TYPE_CHECKING:
    from matplotlib.figure import Figure

REPORT = "report.html"
# Pairs of classes in the table of the most frequent mistakes.
PAIRS = 20
STATUS_CLASS = {"PASS": "good", "WARN": "fair", "FAIL": "bad", "SKIPPED": "dim"}


def write_report(folder: Path) -> Path:
    """Make report.html and plots/*.png of a run's folder, anew if they are there; returns the page's path.

    Raises:
        UserError: it is no run's folder, or a file of it cannot be read.
        OSError: a file cannot be written.
    """
    record = read_record(folder)
    plots = folder / PLOTS
    plots.mkdir(exist_ok=True)
    for old in plots.glob("*.png"):
        old.unlink()
    with drawing():
        page = _page(record, _Plots(plots))
    write_text(folder / REPORT, page)
    return folder / REPORT


class _Plots:
    """Draws a figure once for the page, and once as plots/NAME.png."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, name: str, drawn: "Figure") -> None:
        (self.folder / f"{name}.png").write_bytes(png(drawn))

    def __call__(self, name: str, drawn: "Figure", title: str) -> str:
        self.save(name, drawn)
        return page_svg(drawn, title)


def _page(record: Record, plot: _Plots) -> str:
    sections = [
        ("curves", "Curves", _curves(record, plot)),
        ("confusion", "Confusion", _confusion(record, plot)),
        ("mistakes", "Most confident mistakes", _mistakes(record, plot)),
        ("classes", "Classes", _classes(record)),
        ("plan", "Plan", _plan(record)),
        ("settings", "Settings", _settings(record)),
        ("environment", "Environment", _environment(record)),
        ("doctor", "Doctor", _doctor(record)),
    ]
    there = [(name, title, *content) for name, title, content in sections if content is not None]
    links = "".join(f'<a href="#{name}">{escape(title)}</a>' for name, title, *_ in there)
    again = f"python trainer/report.py {shlex.quote(str(record.folder))}"
    body = [
        _header(record),
        f'<nav aria-label="Sections">{links}</nav>',
        *(section(name, title, body, about) for name, title, about, body in there),
        f"<footer>Made of the files in <code>{escape(str(record.folder))}</code>; <code>{escape(again)}</code> makes it again.</footer>",
    ]
    return document(f"{record.data}, {record.config.get('model')}: {record.name}", "\n".join(body))


def _header(record: Record) -> str:
    good = record.results is not None
    color = "good" if good else "bad" if record.status.startswith("failed") else "fair"
    files = [file for name in ("results.json", "metrics.jsonl", "config.yaml") if (file := record.folder / name).exists()]
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(files[0].stat().st_mtime))
    badge = f'<span class="badge {color}">{escape(short(record.status, 160))}</span>'
    return (
        f"<header><h1>{escape(record.data)} · {escape(str(record.config.get('model')))}{badge if good else ''}</h1>\n"
        + ("" if good else f'<p class="{color}"><b>{escape(record.status)}</b></p>\n')
        + f"<p>{escape(record.name)} · {when}</p>\n{tiles(_summary(record))}</header>"
    )


def _summary(record: Record) -> list[tuple[str, object, object]]:
    results, last = record.results, record.evals[-1] if record.evals else None
    entries: list[tuple[str, object, object]] = []
    if last is not None:
        entries += [
            ("Accuracy", f"{last['acc1']:.2f} %", f"best {last['best_acc1']:.2f} % in epoch {last['best_epoch']}"),
            ("Loss", _figure(last["loss"]), f"on {last['samples']:,} images"),
        ]
    if results is not None and results.get("ece") is not None:
        entries.append(("Calibration error", f"{100 * results['ece']:.2f} %", "expected (ECE)"))
    done = f"{record.train[-1]['step']:,} updates" if record.train else "no update logged"
    entries.append(("Epochs", f"{last['epoch'] if last else 0} of {record.config.get('epochs')}", done))
    if results is not None:
        entries.append(("Time", _duration(results["seconds"]), f"training alone {_duration(results['train_seconds'])}"))
    if record.images_per_second is not None:
        entries.append(("Speed", f"{record.images_per_second:,.0f}", "training images a second"))
    processes = record.env.get("processes", 1)
    count = f"{processes} process" + ("es" if processes != 1 else "")
    precision = dict(record.plan).get("precision", "").partition(" (")[0]
    below = f"{count}, precision {'fp32' if precision == 'no' else precision}" if precision else count
    entries.append(("Device", str(record.env.get("device", "unknown")), below))
    return entries


def _figure(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d} min" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d} h"


Content = tuple[str, str] | None


def _curves(record: Record, plot: _Plots) -> Content:
    charts = curves(record)
    if not charts:
        return "", _nothing("No line has been logged yet.")
    drawn = [figure(plot(name, chart_figure([chart]), chart.title)) for name, chart in charts.items()]
    ring = "The ring marks the best epoch; the scale above counts epochs." if "accuracy" in charts else ""
    return ring, f'<div class="charts">{"".join(drawn)}</div>'


def _confusion(record: Record, plot: _Plots) -> Content:
    results = record.results
    if results is None or not results.get("confusion"):
        return None
    confusion, classes = results["confusion"], record.classes
    about, matrix, more = "Rows are the true classes, columns what was predicted.", "", ""
    if len(classes) <= DRAWN:
        drawn = confusion_figure(confusion, classes)
        # On a phone it scrolls sideways rather than to shrink out of sight.
        width = round(72 * drawn.get_figwidth())
        least = min(width, 320) if len(classes) <= NUMBERED else width
        size = f'style="min-width: {least}px; max-width: {round(1.5 * width)}px"'
        picture = plot("confusion", drawn, f"Confusion matrix of {len(classes)} classes").replace("<svg ", f"<svg {size} ", 1)
        matrix = f'<figure class="card matrix" tabindex="0">{picture}</figure>'
    else:
        about = f"{len(classes):,} classes are too many for a matrix: these are the most frequent mistakes."
    found = confused(confusion, classes, PAIRS)
    if len(classes) > NUMBERED and found:
        rows = [(true, predicted, f"{count:,}", f"{100 * share:.1f} %") for true, predicted, count, share in found]
        listed = table(("true class", "taken for", "images", "of the class"), rows, (2, 3), "Most frequent mistakes")
        more = listed if len(classes) > DRAWN else f"<h3>Most frequent mistakes</h3>\n{listed}"
    chart = calibration(results)
    sure = figure(plot("calibration", chart_figure([chart]), chart.title)) if chart is not None else ""
    if len(classes) <= NUMBERED:
        return about, f'<div class="charts">{matrix}{sure}</div>'
    return about, f'<div class="stack">{matrix}{more}<div class="charts">{sure}</div></div>'


def _mistakes(record: Record, plot: _Plots) -> Content:
    from PIL import Image

    results = record.results
    if results is None or "mistakes" not in results:
        return None
    if not results["mistakes"]:
        return "", _nothing("Every image of the evaluation was classified right.")
    items, shown = [], []
    for mistake in results["mistakes"]:
        file = record.folder / PLOTS / MISTAKES / f"{mistake['index']}.png"
        if not file.is_file():
            continue
        content = file.read_bytes()
        picture = Image.open(io.BytesIO(content))
        true, predicted, sure = mistake["true"], mistake["predicted"], f"{100 * mistake['probability']:.1f} %"
        words = f"image {mistake['index']}: {true}, taken for {predicted}"
        pixels = " class=pixels" if max(picture.size) <= 64 else ""
        items.append(
            f'<li class="card"><img{pixels} src="data:image/png;base64,{base64.b64encode(content).decode()}" alt="{escape(words)}" '
            f'width="{picture.width}" height="{picture.height}"><p><b>{escape(short(true, 40))}</b>, taken for '
            f"<b>{escape(short(predicted, 40))}</b> <span>{sure}, image\u00a0{mistake['index']}</span></p></li>"
        )
        short_names = len(true) + len(predicted) <= 8
        shown.append((picture, f"{short(true, 16)}{', ' if short_names else chr(10)}taken for {short(predicted, 12)}\n{sure}"))
    if not items:
        return "", _nothing("The pictures are not in the run's folder.")
    plot.save(MISTAKES, picture_figure(shown, "Most confident mistakes"))
    about = "The images whose wrong class got the highest probability, the surest first; numbers count the evaluation split from 0."
    return about, f'<ul class="mistakes">{"".join(items)}</ul>'


def _classes(record: Record) -> Content:
    results = record.results
    if results is None or not results.get("per_class"):
        return None
    figures = results["per_class"]
    taken: dict[str, str] = {}
    for true, predicted, count, _ in reversed(confused(results["confusion"], record.classes, len(record.classes) ** 2)):
        taken[true] = f"{predicted} ({count:,})"
    names = list(figures)
    if len(names) > PAIRS:
        names.sort(key=lambda name: (figures[name]["f1"] is None, figures[name]["f1"] or 0.0))
    rows = []
    for name in names:
        of = figures[name]
        numbers = [f"{100 * of[key]:.1f}" if of[key] is not None else "none" for key in ("precision", "f1")]
        rows.append((name, _bar(of["recall"]), *numbers, f"{of['support']:,}", taken.get(name, "")))
    about = "In percent. Recall: of the class's images, those found. Precision: of the images taken for the class, those that are it."
    about += " The classes with the lowest F1 come first." if len(names) > PAIRS else ""
    if results.get("macro"):
        about += (
            f" Means over classes: recall {100 * results['macro']['recall']:.1f}, precision {100 * results['macro']['precision']:.1f}, "
        )
        about += f"F1 {100 * results['macro']['f1']:.1f}."
    return about, table(
        ("class", "recall", "precision", "F1", "images", "most often taken for"), rows, (1, 2, 3, 4), "Figures of each class"
    )


def _bar(share: float | None) -> Html:
    if share is None:
        return Html("none")
    return Html(
        f'<span class="bar" aria-hidden="true"><i style="width: {100 * share:.1f}%"></i></span><span class="share">{100 * share:.1f}</span>'
    )


def _plan(record: Record) -> Content:
    if not record.plan:
        return None
    return "What the run said, before training, it would do.", pairs(record.plan)


def _settings(record: Record) -> Content:
    known = {field.name: field.default for field in fields(Config) if field.default is not MISSING}
    changed: list[tuple[str, str]] = []
    others: list[tuple[str, str]] = []
    for name, value in record.config.items():
        own = name in known and value == known[name]
        (others if own else changed).append((f"--{name}", _value(value)))
    body = pairs(changed) if changed else _nothing("All settings are the defaults.")
    command = record.env.get("command")
    if command:
        body = Html(pairs([("command", Html(f"<code>{escape(shlex.join(map(str, command)))}</code>"))]) + f"<br>\n{body}")
    rest = f"<details><summary>{len(others)} more, as they are by default</summary>{pairs(others)}</details>"
    return "What differs from the trainer's defaults, by a recipe or a flag.", f"{body}\n{rest}"


def _value(value: object) -> str:
    return "unset" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _environment(record: Record) -> Content:
    entries = [(name, value) for name, value in record.env.items() if name != "command" and value is not None]
    return ("", pairs(entries)) if entries else None


def _doctor(record: Record) -> Content:
    if record.doctor is None:
        config, folder = shlex.quote(str(record.folder / "config.yaml")), shlex.quote(str(record.folder))
        command = f"accelerate launch trainer/doctor.py --config {config} --output_dir {folder}"
        return "", f'<p class="about">Not asked. <code>{escape(command)}</code> leaves its table for the next report.</p>'
    rows = [
        (check["name"], Html(f'<b class="{STATUS_CLASS.get(check["status"], "dim")}">{escape(check["status"])}</b>'), check["measured"])
        for check in record.doctor["checks"]
    ]
    return f"{record.doctor['summary']}, {record.doctor['time']}", table(("check", "result", "measured"), rows, (), "The doctor's table")


def _nothing(text: str) -> Html:
    return Html(f'<p class="about">{html(text)}</p>')
