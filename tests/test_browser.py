"""The report in a real browser: Debian's chromium, without a head."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest
from PIL import Image

from tests.test_record import made
from tests.test_report import HOSTILE, results
from trainer.compare import main as compare
from trainer.html_report import write_report
from trainer.record import MISTAKES, PLOTS

if TYPE_CHECKING:
    from playwright.sync_api import Browser

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
QUIET = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
PHONE, DESKTOP = (390, 844), (1280, 900)

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    driver = pytest.importorskip("playwright.sync_api", reason="no playwright here: pip install playwright")
    with driver.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(QUIET))
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Reports of runs with a few and with very many classes, with long names and hostile ones, and a comparison."""
    folder = tmp_path_factory.mktemp("runs")
    made_of = {
        "few": HOSTILE,
        "matrix": [f"{'long-name-' * 6}{number}" for number in range(60)],
        "many": [f"n{number:08d}" for number in range(1000)],
    }
    for name, classes in made_of.items():
        confusion = [
            [5 if row == column else int((row * column) % 7 == 3) for column in range(len(classes))] for row in range(len(classes))
        ]
        wrong = [{"index": number, "true": classes[1], "predicted": classes[0], "probability": 0.9} for number in range(16)]
        doctor = {"time": "now", "summary": "doctor: 1 passed", "checks": [{"name": "order", "status": "PASS", "measured": "x" * 300}]}
        plan = [["output", "/a/very/long/path" * 12], ["data", "cats"]]
        run = made(
            folder / name, results__json=results(classes, confusion, wrong), classes__json=classes, doctor__json=doctor, plan__json=plan
        )
        (run / PLOTS / MISTAKES).mkdir(parents=True)
        for number in range(16):
            Image.new("L", (28, 28), 10 * number).save(run / PLOTS / MISTAKES / f"{number}.png")
        write_report(run)
    compare([str(folder / name) for name in (*made_of, *made_of)] + ["--output", str(folder / "compare.html")])
    return {**{name: folder / name / "report.html" for name in made_of}, "compare": folder / "compare.html"}


LOOK = """() => {
  const ink = getComputedStyle(document.body);
  const line = [...document.querySelectorAll('svg path')].map(path => getComputedStyle(path).stroke);
  const texts = [...document.querySelectorAll('svg text')].map(text => text.getBoundingClientRect().height);
  return {
    overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
    images: [...document.images].map(image => image.naturalWidth),
    cells: [...document.querySelectorAll('svg image')].map(image => image.getBoundingClientRect().width),
    background: ink.backgroundColor, ink: ink.color, strokes: [...new Set(line)], charts: document.querySelectorAll('svg').length,
    smallest: Math.min(...texts),
  };
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [PHONE, DESKTOP], ids=["phone", "desktop"])
@pytest.mark.parametrize("name", ["few", "matrix", "many", "compare"])
def test_it_looks_right(
    browser: "Browser", pages: dict[str, Path], name: str, size: tuple[int, int], scheme: Literal["light", "dark"], tmp_path: Path
) -> None:
    context = browser.new_context(viewport={"width": size[0], "height": size[1]}, color_scheme=scheme)
    page = context.new_page()
    # Milliseconds; on a busy machine chromium alone can take half a minute to come up.
    page.set_default_timeout(120_000)
    heard: list[str] = []
    page.on("console", lambda message: heard.append(message.text))
    page.on("pageerror", lambda error: heard.append(str(error)))
    page.on("request", lambda request: heard.append(request.url) if not request.url.startswith("data:") else None)
    page.goto(pages[name].as_uri())
    seen: dict[str, Any] = page.evaluate(LOOK)
    page.screenshot(path=tmp_path / "page.png", full_page=True)
    context.close()
    assert heard == [pages[name].as_uri()], "one file, no errors"
    assert seen["overflow"] == 0, "the page does not scroll sideways"
    assert len(seen["images"]) == (0 if name == "compare" else 16)
    assert all(seen["images"]), "pictures are there"
    assert seen["charts"] >= 5
    if name in ("few", "matrix"):
        assert seen["cells"]
        assert min(seen["cells"]) > 200
    assert seen["smallest"] > 7, "writing on charts can be read"
    dark = scheme == "dark"
    assert brightness(seen["background"]) < 60 if dark else brightness(seen["background"]) > 200
    assert brightness(seen["ink"]) > 200 if dark else brightness(seen["ink"]) < 60
    blue = "rgb(83, 155, 245)" if dark else "rgb(11, 99, 206)"
    assert blue in seen["strokes"], f"lines follow the page: {json.dumps(seen['strokes'])}"
    with Image.open(tmp_path / "page.png") as picture:
        assert picture.width == size[0]
        corner = picture.convert("L").getpixel((2, 2))
        assert isinstance(corner, int | float)
        assert (corner < 60) == dark


def brightness(color: str) -> float:
    return sum(map(float, color.removeprefix("rgb(").rstrip(")").split(","))) / 3
