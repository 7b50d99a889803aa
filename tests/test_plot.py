"""Charts: what is in them, that many points and gaps survive thinning, and that a page's SVG follows its colours."""

import io
import math
import re
from xml.etree import ElementTree

import numpy
import pytest
from PIL import Image

from trainer.plot import (
    COLORS,
    DRAWN,
    MOST_POINTS,
    RIGHT,
    WRONG,
    Chart,
    Line,
    chart_figure,
    confusion_figure,
    drawing,
    number_text,
    page_svg,
    picture_figure,
    png,
    svg,
    thin,
)

SPACE = "{http://www.w3.org/2000/svg}"
TWO = Chart("a < b", "update", (Line("one & two", [1, 2, 3], [1.0, None, 3.0], "blue"), Line("$x$", [1, 2], [3.0, math.nan], "orange")))


def texts(document: str) -> list[str]:
    return ["".join(element.itertext()).strip() for element in ElementTree.fromstring(document).iter(f"{SPACE}text")]


def test_a_file_of_its_own_says_what_is_drawn() -> None:
    with drawing():
        text = svg(chart_figure([TWO]), "a < b")
    assert {"a < b", "update", "one & two", "$x$"} <= set(texts(text))
    assert COLORS["blue"][0] in text
    assert "var(" not in text


def test_a_pages_picture_takes_its_colours_and_ids_from_the_page() -> None:
    with drawing():
        first, second = (page_svg(chart_figure([TWO]), 'say "so"') for _ in range(2))
    assert 'aria-label="say &quot;so&quot;"' in first
    for name in ("blue", "orange", "ink", "muted", "grid"):
        assert f"var(--{name})" in first
        assert COLORS[name][0] not in first
    ids = [re.findall(r' id="([^"]+)"', text) for text in (first, second)]
    assert len(ids[0]) > 0
    assert len({*ids[0], *ids[1]}) == len(ids[0]) + len(ids[1])
    for text, own in zip((first, second), ids, strict=True):
        assert set(re.findall(r'(?:url\(#|href="#)([^)"]+)', text)) == set(own)
    assert not re.search(r"<style|<!--|<metadata|https?://(?!www\.w3\.org)", first)


def test_the_users_own_style_of_matplotlib_changes_nothing() -> None:
    import matplotlib

    with drawing():
        before = png(chart_figure([TWO]))
    with matplotlib.rc_context({"lines.linewidth": 9.0, "axes.grid": True, "font.size": 20.0, "figure.facecolor": "red"}):
        with drawing():
            after = png(chart_figure([TWO]))
        assert matplotlib.rcParams["font.size"] == 20.0, "it is given back"
    assert before == after


def test_thinning_keeps_ends_extremes_and_gaps() -> None:
    random = numpy.random.default_rng(0)
    values: list[float | None] = [float(value) for value in random.normal(size=100_000)]
    values[12_345], values[77_777] = 50.0, -60.0
    values[50_000] = None
    values[60_000:70_000] = [math.nan] * 10_000
    xs, ys = thin(range(100_000), values)
    assert len(xs) == len(ys) <= MOST_POINTS
    assert (xs[0], ys[0], xs[-1], ys[-1]) == (0, values[0], 99_999, values[-1])
    assert (12_345, 50.0) in zip(xs, ys, strict=True)
    assert (77_777, -60.0) in zip(xs, ys, strict=True)
    assert xs == sorted(set(xs))
    assert not any(x for x, y in zip(xs, ys, strict=True) if 60_000 <= x < 70_000 and not math.isnan(y))
    near = min((x for x, y in zip(xs, ys, strict=True) if math.isnan(y)), key=lambda x: abs(x - 50_000))
    assert near == 50_000
    assert thin([1, 2], [None, 2.0])[0] == [1, 2]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.25, "0.25"), (12_000, "12,000"), (5e-4, "5e-4"), (1.5e-7, "1.5e-7"), (0.001, "0.001"), (65536, "65,536")],
)
def test_numbers_of_ticks(value: float, text: str) -> None:
    assert number_text(value) == text


def cells(document: str, classes: int) -> "numpy.ndarray[tuple[int, ...], numpy.dtype[numpy.uint8]]":
    """The picture inside the SVG, uint8 (classes, classes, 4)."""
    import base64

    (data,) = re.findall(r'href="data:image/png;base64,([^"]+)"', document)
    picture = numpy.array(Image.open(io.BytesIO(base64.b64decode(data))).convert("RGBA"))
    assert picture.shape == (classes, classes, 4), "a pixel for each cell"
    return picture


@pytest.mark.parametrize("classes", [2, 10, 12, 13, 40, 41, DRAWN])
def test_a_confusion_matrix(classes: int) -> None:
    confusion = [[9 if row == column else 0 for column in range(classes)] for row in range(classes)]
    confusion[1][0] = 3
    names = [f"class {number}" for number in range(classes)]
    with drawing():
        text = page_svg(confusion_figure(confusion, names), "matrix")
        assert Image.open(io.BytesIO(png(confusion_figure(confusion, names), dpi=50))).width > 100
    said = texts(text.replace("<svg ", f'<svg xmlns="{SPACE[1:-1]}" ', 1))
    assert {"true", "predicted"} <= set(said)
    assert said.count("9") == (classes if classes <= 12 else 0)
    assert ("class 1" in said) == (classes <= 40)
    found = cells(text, classes)
    # An SVG's first row of pixels is on top, as the matrix's.
    seen = found if found[1, 0, 3] else found[::-1]
    assert tuple(seen[1, 0, :3]) == pytest.approx(WRONG, abs=3)
    assert tuple(seen[0, 0, :3]) == pytest.approx(RIGHT, abs=3)
    assert seen[0, 0, 3] > seen[1, 1, 3] > seen[1, 0, 3] > 0
    assert seen[0, 1, 3] == 0


def test_pictures_side_by_side() -> None:
    pictures = [(Image.new("L", (8 + number, 8), 20 + 10 * number), f"a $ b\n{number}") for number in range(9)]
    with drawing():
        sheet = Image.open(io.BytesIO(png(picture_figure(pictures, "nine"), dpi=100))).convert("L")
    assert sheet.width == round(100 * 1.2 * 8)
    # The middle of each, eight in a row.
    middles = [sheet.getpixel((round(100 * (0.6 + 1.2 * (number % 8))), round(100 * (0.92 + 1.54 * (number // 8))))) for number in range(9)]
    assert middles == [20 + 10 * number for number in range(9)]
