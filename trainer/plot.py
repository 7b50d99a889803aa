"""Line charts as SVG, drawn with nothing but text: no plotting package, no fonts, and a background of their own for dark pages."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 720, 420
LEFT, RIGHT, TOP, BOTTOM = 72, 700, 48, 360
INK, GRID, BACKGROUND = "#1f2328", "#d8dee4", "#ffffff"


@dataclass(frozen=True)
class Line:
    """A series of a chart.

    Attributes:
        values: y of each x.
        color: of SVG.
        width: pixels.
    """

    name: str
    values: Sequence[float]
    color: str
    width: float


def chart(
    title: str, x_name: str, xs: Sequence[float], lines: Sequence[Line], y_range: tuple[float, float], mark: tuple[float, str] | None = None
) -> str:
    """An SVG document of `lines` over the logarithm of `xs`; what lies outside of `y_range` is cut off.

    Args:
        xs: above 0, rising, at least two.
        y_range: lowest and highest y.
        mark: an x to draw an upright line at, and what is written beside it.
    """
    low, high = y_range
    if not high > low:
        low, high = low - 0.5, high + 0.5
    first, last = math.log10(xs[0]), math.log10(xs[-1])

    def x_of(x: float) -> float:
        return LEFT + (math.log10(x) - first) / (last - first) * (RIGHT - LEFT)

    def y_of(y: float) -> float:
        # Far outside is as good as outside, and keeps the numbers short.
        return min(2 * HEIGHT, max(-HEIGHT, BOTTOM - (y - low) / (high - low) * (BOTTOM - TOP)))

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="sans-serif" font-size="13" fill="{INK}">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="{BACKGROUND}"/>',
        f'<clipPath id="inside"><rect x="{LEFT}" y="{TOP}" width="{RIGHT - LEFT}" height="{BOTTOM - TOP}"/></clipPath>',
        text(LEFT, 28, title, 'font-size="15" font-weight="bold"'),
        text((LEFT + RIGHT) / 2, HEIGHT - 14, x_name, 'text-anchor="middle"'),
    ]
    for exponent in range(math.ceil(first - 1e-9), math.floor(last + 1e-9) + 1):
        x = x_of(10.0**exponent)
        parts += [rule(x, TOP, x, BOTTOM), text(x, BOTTOM + 20, f"1e{exponent}", 'text-anchor="middle"')]
    for tick in ticks(low, high):
        y = y_of(tick)
        parts += [rule(LEFT, y, RIGHT, y), text(LEFT - 8, y + 4.5, f"{tick:.6g}", 'text-anchor="end"')]
    for number, line in enumerate(lines):
        points = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in zip(xs, line.values, strict=True))
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{line.color}" stroke-width="{line.width}" stroke-linejoin="round" '
            'clip-path="url(#inside)"/>'
        )
        place = RIGHT - 115 * (len(lines) - number)
        parts += [rule(place, 24, place + 20, 24, line.color, line.width), text(place + 26, 28, line.name)]
    if mark is not None:
        x = x_of(mark[0])
        side, beside = ('text-anchor="end"', x - 7) if x > (LEFT + RIGHT) / 2 else ("", x + 7)
        parts += [
            rule(x, TOP, x, BOTTOM, INK, 1.5, 'stroke-dasharray="5 4"'),
            # A wide outline in the background's colour keeps it readable on lines.
            text(beside, TOP + 16, mark[1], f'{side} stroke="{BACKGROUND}" stroke-width="5"'),
            text(beside, TOP + 16, mark[1], side),
        ]
    return "\n".join([*parts, "</svg>", ""])


def text(x: float, y: float, content: str, attributes: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {attributes}>{escape(content)}</text>'


def rule(x1: float, y1: float, x2: float, y2: float, color: str = GRID, width: float = 1, attributes: str = "") -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}" stroke-width="{width}" {attributes}/>'


def ticks(low: float, high: float) -> list[float]:
    """Four to ten round numbers, 1, 2 or 5 times a power of ten apart, from `low` to `high`."""
    raw = (high - low) / 8
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw)
    return [number * step for number in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
