"""Charts by matplotlib, without its global state: lines, a confusion matrix, pictures; as PNG, SVG, and SVG in a page's colours."""

import io
import math
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from itertools import count
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from PIL.Image import Image

# Name -> on light pages, on dark ones. A page's SVG names them by CSS variables, `--NAME`.
COLORS = {
    "ink": ("#1f2328", "#e8edf3"),
    "muted": ("#59636e", "#9aa4af"),
    "grid": ("#dde3e9", "#30363d"),
    "paper": ("#ffffff", "#161b22"),
    "blue": ("#0b63ce", "#539bf5"),
    "orange": ("#c2520a", "#f0883e"),
    "green": ("#1a7f37", "#4ac26b"),
    "purple": ("#8250df", "#b392f0"),
    "red": ("#cf222e", "#ff7b72"),
    "teal": ("#0e7c86", "#39c5cf"),
    "pink": ("#bf3989", "#f778ba"),
    "brown": ("#7d5a0b", "#d4a72c"),
}
# For one line after the other.
CYCLE = ("blue", "orange", "green", "purple", "red", "teal", "pink", "brown")
# Cells of a matrix are a picture, whose colours are the same on all pages: seen on light and dark ones at any opacity.
RIGHT, WRONG = (47, 129, 247), (235, 110, 30)
# A line of more points looks the same with this many: a few for each pixel.
MOST_POINTS = 2000
# Largest matrix with the number in each cell; with each class's name; that is drawn at all.
NUMBERED, NAMED, DRAWN = 12, 40, 100
INCHES = (4.8, 2.7)
SETTINGS = {
    "axes.axisbelow": True,
    "axes.facecolor": "none",
    "axes.linewidth": 0.8,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.family": "sans-serif",
    "font.size": 8.0,
    "legend.fontsize": 8.0,
    "svg.fonttype": "none",
    "svg.hashsalt": "trainer",
    # A class may be called $x$.
    "text.parse_math": False,
    "xtick.major.size": 0.0,
    "xtick.minor.size": 0.0,
    "ytick.major.size": 0.0,
    "ytick.minor.size": 0.0,
}


@dataclass(frozen=True)
class Line:
    """A series of a chart.

    Attributes:
        ys: of each x; None and NaN leave a gap.
        color: a name of COLORS.
        points: mark each of them.
        dashed: for a color that another line has.
    """

    name: str
    xs: Sequence[float]
    ys: Sequence[float | None]
    color: str
    points: bool = False
    width: float = 1.4
    dashed: bool = False

    @property
    def finite(self) -> list[float]:
        return [y for y in self.ys if y is not None and math.isfinite(y)]


@dataclass(frozen=True)
class Chart:
    """Lines over one x.

    Attributes:
        y_range: lowest and highest y shown; None: all.
        x_log, y_log: the axis is logarithmic.
        upper: marks of the upper edge, (x, text), with a thin upright line below each.
        upper_name: what they count.
        mark: an x to draw an upright dashed line at, and what is written beside it.
        best: a point to ring.
        legend: names the lines, when there are several.
    """

    title: str
    x_name: str
    lines: tuple[Line, ...]
    y_range: tuple[float, float] | None = None
    x_log: bool = False
    y_log: bool = False
    upper: tuple[tuple[float, str], ...] = ()
    upper_name: str = ""
    mark: tuple[float, str] | None = None
    best: tuple[float, float] | None = None
    legend: bool = True


def light(name: str) -> str:
    return COLORS[name][0]


@contextmanager
def drawing() -> Iterator[None]:
    """Inside, matplotlib has its own defaults and ours, whatever the user's matplotlibrc says."""
    import matplotlib

    with matplotlib.rc_context(), warnings.catch_warnings():
        # A letter that the font lacks.
        warnings.filterwarnings("ignore", message="Glyph ")
        warnings.filterwarnings("ignore", message="Matplotlib currently does not support")
        matplotlib.rcdefaults()
        settings: dict[Any, Any] = {**SETTINGS, "text.color": light("ink"), "figure.facecolor": light("paper")}
        settings |= {name: light("muted") for name in ("axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor")}
        settings |= {name: light("grid") for name in ("axes.edgecolor", "grid.color", "xtick.color", "ytick.color")}
        matplotlib.rcParams.update(settings)
        yield


def chart_figure(charts: Sequence[Chart], columns: int = 1, names: Sequence[Line] = ()) -> "Figure":
    """The charts side by side in `columns`, each of INCHES. Inside of `drawing`.

    Args:
        names: lines whose names stand above all charts, two in a row.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    columns = min(columns, len(charts))
    rows = -(-len(charts) // columns)
    above = 0.2 + 0.18 * -(-len(names) // 2) if names else 0.0
    width, height = INCHES[0] * columns, INCHES[1] * rows + above
    figure = Figure(figsize=(width, height))
    for number, chart in enumerate(charts):
        row, column = divmod(number, columns)
        left, bottom = INCHES[0] * (column + 0.115), INCHES[1] * (rows - 1 - row + 0.165)
        axes = figure.add_axes((left / width, bottom / height, 0.86 * INCHES[0] / width, _share(chart) * INCHES[1] / height))
        draw_chart(axes, chart)
    if names:
        handles = [Line2D([], [], color=light(line.color), linestyle="--" if line.dashed else "-", label=line.name) for line in names]
        figure.legend(handles=handles, loc="upper left", bbox_to_anchor=(0.0, 1.0), ncols=2, frameon=False)
    return figure


def _share(chart: Chart) -> float:
    """How much of the height is inside the axes; the rest is for the title and what stands at the edges."""
    return 0.62 if chart.upper else 0.68


def draw_chart(axes: "Axes", chart: Chart) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    for line in chart.lines:
        xs, ys = thin(line.xs, line.ys)
        marker: dict[str, Any] = {"marker": "o", "markersize": 3.2 if len(xs) <= 40 else 1.6} if line.points or len(xs) == 1 else {}
        axes.plot(xs, ys, color=light(line.color), linewidth=line.width, label=line.name, linestyle="--" if line.dashed else "-", **marker)
    if chart.x_log:
        axes.set_xscale("log")
    if chart.y_log:
        axes.set_yscale("log")
    if chart.y_range is not None:
        axes.set_ylim(*chart.y_range)
    axes.margins(x=0.015)
    if chart.upper:
        # Room for the word before the first mark.
        axes.set_xlim(left=0)
    # 7 % of the chart's height below its edge, wherever the axes end.
    head = 1 + (0.93 - 0.165 - _share(chart)) / _share(chart)
    for axis, log in ((axes.xaxis, chart.x_log), (axes.yaxis, chart.y_log)):
        axis.set_major_locator(LogLocator(numticks=6) if log else MaxNLocator(6 if axis is axes.xaxis else 5, steps=[1, 2, 2.5, 5, 10]))
        axis.set_major_formatter(FuncFormatter(lambda value, _: number_text(value)))
        axis.set_minor_locator(NullLocator())
    if chart.y_log:
        low, high = axes.get_ylim()
        # Less than two powers of ten: between them too.
        if math.log10(high / low) < 2:
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=8))
    axes.grid(axis="y", linewidth=0.6)
    axes.set_xlabel(chart.x_name, labelpad=2)
    edge = axes.get_xaxis_transform()
    if chart.upper:
        axes.vlines([x for x, _ in chart.upper], 0, 1, transform=edge, color=light("grid"), linewidth=0.6, zorder=0.5)
        for x, text in chart.upper:
            axes.text(x, 1.02, text, transform=edge, ha="center", va="bottom", color=light("muted"), fontsize=7)
        axes.text(0.0, 1.02, f"{chart.upper_name} ", transform=axes.transAxes, ha="right", va="bottom", color=light("muted"), fontsize=7)
    if chart.mark is not None:
        x, text = chart.mark
        axes.axvline(x, color=light("ink"), linewidth=1.0, linestyle=(0, (5, 4)))
        far = axes.transData.transform((x, 1.0))[0] > axes.transAxes.transform((0.5, 0))[0]
        axes.text(x, 0.96, f"{text}  " if far else f"  {text}", transform=edge, ha="right" if far else "left", va="top")
    if chart.best is not None:
        ring: dict[str, Any] = {
            "marker": "o",
            "markersize": 8,
            "markerfacecolor": "none",
            "markeredgewidth": 1.2,
            "markeredgecolor": light("ink"),
        }
        axes.plot([chart.best[0]], [chart.best[1]], linestyle="none", **ring)
    axes.text(-0.1, head, chart.title, transform=axes.transAxes, ha="left", va="center", fontsize=9.5, fontweight="bold")
    if chart.legend and len(chart.lines) > 1:
        axes.legend(
            loc="center right", bbox_to_anchor=(1.02, head), ncols=len(chart.lines), frameon=False, borderpad=0, handlelength=1.3,
            columnspacing=1.2, handletextpad=0.5,
        )  # fmt: skip


def thin(xs: Sequence[float], ys: Sequence[float | None], most: int = MOST_POINTS) -> tuple[list[float], list[float]]:
    """The points of a line that looks the same with at most `most` of them: of each stretch the first, lowest, highest and last.

    A None, or NaN, is NaN; a stretch that has one keeps one.
    """
    values = [math.nan if y is None or not math.isfinite(y) else y for y in ys]
    if len(values) <= most:
        return list(xs), values
    stretches = max(1, most // 5)
    kept: list[int] = []
    for number in range(stretches):
        part = range(number * len(values) // stretches, (number + 1) * len(values) // stretches)
        known = [place for place in part if not math.isnan(values[place])]
        gap = next((place for place in part if math.isnan(values[place])), None)
        chosen = {known[0], known[-1], min(known, key=values.__getitem__), max(known, key=values.__getitem__)} if known else set()
        kept += sorted(chosen | ({gap} if gap is not None else set()))
    return [xs[place] for place in kept], [values[place] for place in kept]


def number_text(value: float) -> str:
    """A tick's number: 12,000, 0.25, 5e-4."""
    if value and abs(value) < 1e-3:
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def confusion_figure(confusion: Sequence[Sequence[int]], classes: Sequence[str]) -> "Figure":
    """A confusion matrix of 1 to DRAWN classes; row = true class. Inside of `drawing`.

    A cell's opacity is the square root of its share of the row, so that few mistakes are seen; mistakes have a colour of their own.
    """
    import numpy
    from matplotlib.figure import Figure

    counts, classes_count = numpy.array(confusion), len(classes)
    share = counts / numpy.maximum(1, counts.sum(1, keepdims=True))
    opacity = numpy.where(counts > 0, 0.1 + 0.85 * numpy.sqrt(share), 0.0)
    pixels = numpy.empty((classes_count, classes_count, 4), dtype=numpy.uint8)
    pixels[..., :3] = numpy.where(numpy.eye(classes_count, dtype=bool)[..., None], RIGHT, WRONG)
    pixels[..., 3] = numpy.round(255 * opacity)
    names = [short(name, 16) for name in classes] if classes_count <= NAMED else []
    # A letter takes about 0.075 inches at this size; without names the classes' numbers stand there.
    label = 0.2 + 0.075 * max((len(name) for name in names), default=3)
    side = 3.9 if classes_count <= NUMBERED else 5.6
    # Names under the columns stand upright where they would touch.
    upright = bool(names) and max(map(len, names)) * 0.075 > side / classes_count
    below = 0.25 + (label if upright else 0.25)
    width, height = label + 0.25 + side + 0.1, side + below + 0.42
    figure = Figure(figsize=(width, height))
    axes = figure.add_axes(((label + 0.25) / width, below / height, side / width, side / height))
    axes.imshow(pixels, interpolation="none", aspect="auto")
    axes.spines[:].set_visible(True)
    if names:
        axes.set_xticks(range(classes_count), names, rotation=90 if upright else 0)
        axes.set_yticks(range(classes_count), names)
        axes.set_xticks([place - 0.5 for place in range(1, classes_count)], minor=True)
        axes.set_yticks([place - 0.5 for place in range(1, classes_count)], minor=True)
        axes.grid(which="minor", linewidth=0.6)
    axes.set_xlabel("predicted", labelpad=2)
    axes.set_ylabel("true", labelpad=2)
    axes.text(
        -(label + 0.15) / side, 1 + 0.24 / side, "Confusion matrix", transform=axes.transAxes, va="center", fontsize=9.5, fontweight="bold"
    )  # fmt: skip
    if classes_count <= NUMBERED:
        for row, column in zip(*counts.nonzero(), strict=True):
            color = "#ffffff" if opacity[row, column] > 0.6 else light("ink")
            size = 8 if classes_count <= 10 else 7
            axes.text(column, row, f"{counts[row, column]:,}", ha="center", va="center", color=color, fontsize=size)
    return figure


def picture_figure(pictures: Sequence[tuple["Image", str]], title: str, columns: int = 8) -> "Figure":
    """Pictures with a text of up to three lines below each. Inside of `drawing`."""
    from matplotlib.figure import Figure
    from PIL import Image

    columns = min(columns, len(pictures))
    rows = -(-len(pictures) // columns)
    # Inches; and pixels of the picture that all are put into, since axes for each would take most of the time.
    side, gap, text, top, dots = 1.04, 0.16, 0.5, 0.4, 150
    width, height = max((side + gap) * columns, 4.0), (side + text) * rows + top
    sheet = Image.new("RGB", (round(width * dots), round(height * dots)), light("paper"))
    figure = Figure(figsize=(width, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    for number, (picture, words) in enumerate(pictures):
        row, column = divmod(number, columns)
        left, above = gap / 2 + (side + gap) * column, top + (side + text) * row
        scale = side * dots / max(picture.size)
        size = (max(1, round(picture.width * scale)), max(1, round(picture.height * scale)))
        enlarged = picture.convert("RGB").resize(size, Image.Resampling.NEAREST if scale > 2 else Image.Resampling.BICUBIC)
        sheet.paste(enlarged, (round((left + side / 2) * dots - size[0] / 2), round((above + side / 2) * dots - size[1] / 2)))
        figure.text((left + side / 2) / width, 1 - (above + side + 0.05) / height, words, ha="center", va="top", fontsize=7)
    axes.imshow(sheet, aspect="auto", interpolation="nearest")
    figure.text(gap / 2 / width, 1 - 0.2 / height, title, va="center", fontsize=9.5, fontweight="bold")
    return figure


def short(text: str, most: int) -> str:
    """At most `most` letters, on one line."""
    text = " ".join(text.split())
    return text if len(text) <= most else f"{text[: most - 1]}…"


def png(figure: "Figure", dpi: int = 140) -> bytes:
    """Inside of `drawing`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    file = io.BytesIO()
    FigureCanvasAgg(figure).print_figure(file, dpi=dpi, format="png", pil_kwargs={"compress_level": 4})
    return file.getvalue()


def svg(figure: "Figure", title: str) -> str:
    """A file of its own, on light paper. Inside of `drawing`."""
    return _svg(figure, title)


_numbers = count(1)


def page_svg(figure: "Figure", title: str) -> str:
    """An element for an HTML page that has the variables of COLORS and `--font`; ids are unique in this process. Inside of `drawing`."""
    text = _svg(figure, title, transparent=True)
    for name, (color, _) in COLORS.items():
        # White letters on a coloured cell stay white.
        if name != "paper":
            text = text.replace(color, f"var(--{name})")
    prefix = f"c{next(_numbers)}-"
    used = set(re.findall(r'(?:url\(|href=")#([^)"]+)', text))
    text = re.sub(r' id="([^"]+)"', lambda found: f' id="{prefix}{found[1]}"' if found[1] in used else "", text)
    text = re.sub(r'(url\(#|href="#)', rf"\1{prefix}", text)
    # Its size is the page's matter.
    text = re.sub(r'<svg [^>]*?viewBox="([^"]+)"[^>]*>', rf'<svg viewBox="\1" role="img" aria-label="{escape(title)}">', text, count=1)
    text = re.sub(r"<(style|title).*?</\1>|<defs>\s*</defs>", "", text, flags=re.DOTALL)
    text = re.sub(r"font: ((?:\w+ )*[\d.]+px)[^;\"]*", r"font: \1 var(--font)", text)
    return text.replace("xlink:href", "href")


def _svg(figure: "Figure", title: str, transparent: bool = False) -> str:
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    file = io.StringIO()
    options: dict[str, Any] = {"facecolor": "none"} if transparent else {}
    FigureCanvasSVG(figure).print_figure(file, format="svg", metadata={"Date": None, "Title": title}, **options)
    text = file.getvalue()
    text = text[text.index("<svg") :]
    for useless in (r"<!--.*?-->\n?", r"<metadata>.*?</metadata>"):
        text = re.sub(useless, "", text, flags=re.DOTALL)
    # Places to a hundredth of a point.
    text = re.sub(r' (?:d|x|y)="[^"]*"', lambda found: re.sub(r"(\.\d\d)\d+", r"\1", found[0]), text)
    text = re.sub(r"(<svg[^>]*>)", rf"\1<title>{escape(title)}</title>", text, count=1)
    return re.sub(r"\s*\n\s*", "\n", text)
