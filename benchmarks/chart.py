"""The benchmark's picture: horizontal bars, one panel for each batch size, as an SVG with a background of its own."""

from dataclasses import dataclass
from html import escape

COLOURS = {"ours": "#2a62c9", "peer": "#9aa3b2", "limit": "#dfe3ea"}
INK, MUTED, PAPER, EDGE, LINE = "#1b2230", "#5a6475", "#ffffff", "#d5d9e0", "#e9ecf1"
WIDTH, LABELS, PANEL, GAP, ROW, BAR, TOP = 880, 212, 292, 32, 27, 15, 120
FONT = "-apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"


@dataclass(frozen=True)
class Bars:
    """One contender: `values` are its figures in the panels' order, None where it was not measured; `kind` is a key of COLOURS."""

    label: str
    kind: str
    values: tuple[float | None, ...]


def draw(title: str, subtitles: tuple[str, str], panels: tuple[str, ...], rows: list[Bars]) -> str:
    """The SVG. Each panel has its own scale from 0, and each bar its figure beside it."""
    height = TOP + ROW * len(rows) + 24
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img" '
        f'aria-label="{escape(title)}" font-family="{escape(FONT)}" font-size="13">',
        f"<title>{escape(title)}</title>",
        f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="10" fill="{PAPER}" stroke="{EDGE}"/>',
        text(24, 34, title, size=17, weight=600),
        *(text(24, 55 + 18 * line, subtitle, fill=MUTED, size=12.5) for line, subtitle in enumerate(subtitles)),
    ]
    for number, panel in enumerate(panels):
        left = 24 + LABELS + number * (PANEL + GAP)
        values = [row.values[number] or 0.0 for row in rows]
        # The longest bar leaves room for its figure.
        scale = (PANEL - 58) / (max(values, default=0.0) or 1.0)
        parts.append(text(left, TOP - 16, panel, fill=MUTED, weight=600))
        parts.append(f'<line x1="{left}" x2="{left}" y1="{TOP - 4}" y2="{TOP + ROW * len(rows)}" stroke="{LINE}"/>')
        for place, row in enumerate(rows):
            middle, value = TOP + ROW * place + ROW / 2, row.values[number]
            if value is not None:
                bar = f'x="{left}" y="{middle - BAR / 2:g}" width="{value * scale:.1f}" height="{BAR}" rx="2.5"'
                parts.append(f'<rect {bar} fill="{COLOURS[row.kind]}"/>')
            figure = "not measured" if value is None else f"{value:,.0f}"
            weight = 600 if row.kind == "ours" else 400
            parts.append(text(left + (value or 0.0) * scale + 7, middle + 4.5, figure, fill=MUTED if value is None else INK, weight=weight))
    for place, row in enumerate(rows):
        ink, weight = (COLOURS["ours"], 600) if row.kind == "ours" else (INK, 400)
        parts.append(text(24 + LABELS - 12, TOP + ROW * place + ROW / 2 + 4.5, row.label, fill=ink, weight=weight, anchor="end"))
    return "\n".join([*parts, "</svg>", ""])


def text(x: float, y: float, words: str, fill: str = INK, size: float = 13, weight: int = 400, anchor: str = "start") -> str:
    style = f'fill="{fill}" font-size="{size:g}" font-weight="{weight}" text-anchor="{anchor}"'
    return f'<text x="{x:.1f}" y="{y:g}" {style}>{escape(words)}</text>'
