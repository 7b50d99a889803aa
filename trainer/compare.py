"""Comparing runs: `python trainer/compare.py RUN RUN …` prints what differs in their settings and results, and overlays their curves."""

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ == "__main__" and not __package__:
    # A script's own folder heads sys.path, where trainer/data would be found as `data`; the clone's root belongs there.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from trainer.commands import Arguments, run_alone
from trainer.curves import color_of, is_dashed, overlaid
from trainer.files import write_text
from trainer.page import Html, document, figure, html, section, table
from trainer.plot import Line, chart_figure, drawing, page_svg, png, short, svg
from trainer.record import Record, read_record
from trainer.runtime import UserError

if TYPE_CHECKING:
    from trainer.plot import Chart

# Settings that say where a run is, not what it is.
PLACES = ("output_dir", "resume_from_checkpoint", "report")
# Of env.json; what it runs on matters as a setting does.
ENVIRONMENT = ("device", "processes", "threads", "torch")
FORMATS = (".html", ".svg", ".png")
WIDEST = 32

# Name, one text for each run.
Row = tuple[str, list[str]]


def main(argv: Sequence[str] | None = None) -> None:
    """Compare the runs that the arguments name.

    Args:
        argv: the runs' folders, and `--output FILE`; None takes the command line's.

    Raises:
        SystemExit: 2 for a user's mistake, 1 for a file that cannot be written.
    """
    run_alone("compare", lambda: compare(argv))


def compare(argv: Sequence[str] | None) -> int:
    parser = Arguments(
        "python trainer/compare.py RUN RUN [RUN ...] [options]",
        "Print what differs between runs, in settings and results, and overlay their curves.",
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="folder of a training (its --output_dir)")
    parser.add_argument(
        "--output", type=Path, default=Path("compare.html"), metavar="FILE",
        help="the overlaid curves: .html (with the tables), .svg or .png; unset: compare.html",
    )  # fmt: skip
    given = parser.read(argv)
    if len(given.runs) < 2:
        raise UserError("one run cannot be compared: give the folders of two or more")
    if given.output.suffix not in FORMATS:
        raise UserError(f"--output {given.output} must end in one of {', '.join(FORMATS)}")
    records = [read_record(run) for run in given.runs]
    names = names_of(records)
    settings, results = differing(records), results_of(records)
    width = shutil.get_terminal_size((120, 24)).columns
    for title, rows in (("differs", settings), ("result", results)):
        if rows:
            print("\n".join([*aligned(title, names, rows, width), ""]))
        else:
            print("no setting differs\n")
    try:
        write(given.output, records, names, settings, results)
    except OSError as error:
        raise UserError(f"--output {given.output} cannot be written ({error.strerror}): choose another file") from None
    print(f"curves {given.output}", flush=True)
    return 0


def names_of(records: Sequence[Record]) -> list[str]:
    """The folders' names, with as much of the path before as tells them apart."""
    paths = [record.folder.resolve().parts for record in records]
    for length in range(1, max(map(len, paths)) + 1):
        names = [os.path.join(*path[-length:]) for path in paths]
        if len(set(names)) == len(set(paths)):
            break
    return names


def differing(records: Sequence[Record]) -> list[Row]:
    """The settings, and what of the environment matters, that are not the same for all runs."""
    keys = dict.fromkeys(key for record in records for key in record.config if key not in PLACES)
    rows = [(key, [_text(record.config.get(key)) for record in records]) for key in keys]
    rows += [(key, [_text(record.env.get(key)) for record in records]) for key in ENVIRONMENT]
    return [row for row in rows if len(set(row[1])) > 1]


def results_of(records: Sequence[Record]) -> list[Row]:
    """What the runs came to; of one that has not come to its end, what it had come to last."""
    rows: list[Row] = []

    def row(name: str, texts: Sequence[str | None]) -> None:
        if any(texts):
            rows.append((name, [text or "-" for text in texts]))

    last = [record.evals[-1] if record.evals else {} for record in records]
    done = [record.results or {} for record in records]
    row("accuracy, %", [_number(entry.get("acc1"), ".2f") for entry in last])
    row("best, % (epoch)", [f"{entry['best_acc1']:.2f} ({entry['best_epoch']})" if entry else None for entry in last])
    row("loss", [_number(entry.get("loss"), ".4f") for entry in last])
    row("calibration error, %", [_number(100 * of["ece"] if of.get("ece") is not None else None, ".2f") for of in done])
    row("epochs", [_number(entry.get("epoch"), "d") for entry in last])
    row("updates", [_number(record.train[-1]["step"] if record.train else None, ",d") for record in records])
    row("training, s", [_number(of.get("train_seconds"), ".1f") for of in done])
    row("in all, s", [_number(of.get("seconds"), ".1f") for of in done])
    row("images/s", [_number(record.images_per_second, ",.0f") for record in records])
    row("end", [short(record.status, WIDEST) for record in records])
    return rows


def _text(value: object) -> str:
    return "unset" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _number(value: float | None, form: str) -> str | None:
    return format(value, form) if value is not None else None


def aligned(title: str, names: Sequence[str], rows: Sequence[Row], width: int) -> list[str]:
    """Lines of a table, a column for each run; columns that do not fit into `width` go into another table below."""
    head = max(len(title), *(len(name) for name, _ in rows))
    columns = [[short(text, WIDEST) for text in (name, *(texts[number] for _, texts in rows))] for number, name in enumerate(names)]
    widths = [max(map(len, column)) for column in columns]
    lines: list[str] = []
    while columns:
        fitting = 1
        while fitting < len(columns) and head + sum(widths[: fitting + 1]) + 2 * (fitting + 1) <= width:
            fitting += 1
        lines += [""] if lines else []
        for place, name in enumerate((title, *(name for name, _ in rows))):
            cells = (f"{column[place]:>{wide}}" for column, wide in zip(columns[:fitting], widths, strict=False))
            lines.append("  ".join([f"{name:{head}}", *cells]))
        columns, widths = columns[fitting:], widths[fitting:]
    return lines


def write(path: Path, records: Sequence[Record], names: Sequence[str], settings: Sequence[Row], results: Sequence[Row]) -> None:
    """The overlaid curves as a page with the tables, or as one picture."""
    charts = overlaid(records, [short(name, 24) for name in names])
    if path.suffix != ".html" and not charts:
        raise UserError("none of the runs has logged a line yet: there is no curve to draw")
    title = f"{len(records)} runs compared"
    with drawing():
        if path.suffix == ".html":
            write_text(path, page(title, charts, records, names, settings, results))
            return
        lines = [Line(short(name, 60), (), (), color_of(number), dashed=is_dashed(number)) for number, name in enumerate(names)]
        drawn = chart_figure(list(charts.values()), columns=2, names=lines)
        if path.suffix == ".svg":
            write_text(path, svg(drawn, title))
        else:
            path.write_bytes(png(drawn))


def page(
    title: str, charts: "dict[str, Chart]", records: Sequence[Record], names: Sequence[str], settings: Sequence[Row], results: Sequence[Row]
) -> str:
    heads = [_swatch(number, name) for number, name in enumerate(names)]
    numbers = range(1, len(names) + 1)
    parts = [f"<header><h1>{html(title)}</h1><p>{html(', '.join(dict.fromkeys(record.data for record in records)))}</p></header>"]
    if settings:
        parts.append(section("settings", "What differs", table(("setting", *heads), [(n, *v) for n, v in settings], numbers, "Settings")))
    else:
        parts.append(section("settings", "What differs", "", "No setting differs."))
    parts.append(section("results", "Results", table(("", *heads), [(n, *v) for n, v in results], numbers, "Results")))
    if charts:
        legend = "".join(f"<li>{head}</li>" for head in heads)
        drawn = "".join(figure(page_svg(chart_figure([chart]), chart.title)) for chart in charts.values())
        body = f'<ul class="swatches">{legend}</ul><div class="charts">{drawn}</div>'
        parts.append(section("curves", "Curves", body))
    return document(title, "\n".join(parts))


def _swatch(number: int, name: str) -> Html:
    kind = "dashed" if is_dashed(number) else "solid"
    return Html(f'<i class="swatch" style="border-top: 3px {kind} var(--{color_of(number)})"></i>{html(name)}')


if __name__ == "__main__":
    main()
