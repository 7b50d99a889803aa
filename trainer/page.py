"""HTML pages of one file: no script, no network, light and dark, wide and narrow, on paper."""

from collections.abc import Sequence
from html import escape

from trainer.plot import COLORS


class Html(str):
    """Text that is HTML already; anything else is escaped."""


def html(value: object) -> Html:
    return value if isinstance(value, Html) else Html(escape(str(value)))


def document(title: str, body: str) -> str:
    """A whole page."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        # Without one a browser asks the server for favicon.ico.
        '<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)}</title>\n<style>\n{_variables(0)}\n"
        f"@media (prefers-color-scheme: dark) {{ @media not print {{ {_variables(1)} }} }}\n{CSS}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _variables(scheme: int) -> str:
    colors = "; ".join(f"--{name}: {pair[scheme]}" for name, pair in COLORS.items())
    return f":root {{ {colors}; --page: {('#f6f8fa', '#0d1117')[scheme]} }}"


def section(name: str, title: str, body: str, about: str = "") -> Html:
    """Args: name: the anchor; about: a sentence below the title."""
    about = f'<p class="about">{html(about)}</p>\n' if about else ""
    return Html(f'<section id="{name}">\n<h2>{escape(title)}</h2>\n{about}{body}\n</section>')


def figure(picture: str) -> Html:
    return Html(f'<figure class="card">{picture}</figure>')


def tiles(entries: Sequence[tuple[str, object, object]]) -> Html:
    """Large numbers: (what, number, a line below)."""
    parts = [f"<div><dt>{html(name)}</dt><dd><b>{html(value)}</b><span>{html(below)}</span></dd></div>" for name, value, below in entries]
    return Html(f'<dl class="tiles">{"".join(parts)}</dl>')


def pairs(entries: Sequence[tuple[object, object]]) -> Html:
    """Names and values, below one another."""
    parts = [f"<div><dt>{html(name)}</dt><dd>{html(value)}</dd></div>" for name, value in entries]
    return Html(f'<dl class="pairs card">{"".join(parts)}</dl>')


def table(head: Sequence[object], rows: Sequence[Sequence[object]], numbers: Sequence[int] = (), label: str = "") -> Html:
    """A table that scrolls inside its own box; the first column heads the rows.

    Args:
        numbers: columns that are aligned to the right.
        label: what it is, for who cannot see it.
    """

    def cell(tag: str, column: int, value: object, scope: str = "") -> str:
        return f"<{tag}{scope}{' class=number' if column in numbers else ''}>{html(value)}</{tag}>"

    top = "".join(cell("th", column, value, ' scope="col"') for column, value in enumerate(head))
    lines = [
        "".join(cell("td" if column else "th", column, value, "" if column else ' scope="row"') for column, value in enumerate(row))
        for row in rows
    ]
    body = "".join(f"<tr>{line}</tr>\n" for line in lines)
    return Html(
        f'<div class="scroll card" tabindex="0" role="region" aria-label="{escape(label)}">'
        f"<table><thead><tr>{top}</tr></thead>\n<tbody>\n{body}</tbody></table></div>"
    )


CSS = """
:root { --font: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Noto Sans", "Liberation Sans", Arial, sans-serif; }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 var(--font); }
main { max-width: 1080px; margin: 0 auto; padding: 32px 24px 48px; }
header h1 { margin: 0; font-size: 26px; line-height: 1.25; font-weight: 650; letter-spacing: -0.01em; overflow-wrap: anywhere; }
header p { margin: 4px 0 0; color: var(--muted); overflow-wrap: anywhere; }
h2 { margin: 44px 0 12px; font-size: 18px; line-height: 1.3; font-weight: 650; }
.about { margin: -6px 0 12px; color: var(--muted); max-width: 46em; }
a { color: var(--blue); text-decoration: none; }
a:hover { text-decoration: underline; }
a:focus-visible, .scroll:focus-visible, summary:focus-visible { outline: 2px solid var(--blue); outline-offset: 2px; }
nav { margin: 18px 0 0; display: flex; flex-wrap: wrap; gap: 4px 18px; font-size: 14px; }
.badge { display: inline-block; margin-left: 10px; padding: 2px 10px; border-radius: 99px; border: 1px solid currentColor;
  font-size: 13px; font-weight: 600; line-height: 1.4; vertical-align: 4px; letter-spacing: 0; }
.good { color: var(--green); } .bad { color: var(--red); } .fair { color: var(--orange); } .dim { color: var(--muted); }
.card { background: var(--paper); border: 1px solid var(--grid); border-radius: 10px; }
figure { margin: 0; padding: 8px; }
svg { display: block; width: 100%; height: auto; stroke-linejoin: round; stroke-linecap: butt; }
code { font: 13px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, "Liberation Mono", monospace; overflow-wrap: anywhere; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 420px), 1fr)); gap: 14px; align-items: start; }
.stack > * + * { margin-top: 14px; }
h3 { margin: 24px 0 10px; font-size: 15px; font-weight: 600; }
.charts svg { max-width: 560px; margin: 0 auto; }
.matrix { overflow-x: auto; }
.matrix svg { margin: 0 auto; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(128px, 1fr)); gap: 10px; margin: 22px 0 0; }
.tiles div { background: var(--paper); border: 1px solid var(--grid); border-radius: 10px; padding: 12px 14px; min-width: 0; }
.tiles dt { color: var(--muted); font-size: 13px; }
.tiles dd { margin: 0; }
.tiles b { display: block; font-size: 22px; line-height: 1.3; font-weight: 650; font-variant-numeric: tabular-nums;
  overflow-wrap: anywhere; }
.tiles span { display: block; color: var(--muted); font-size: 13px; line-height: 1.4; overflow-wrap: anywhere; }
.pairs { margin: 0; padding: 4px 16px; }
.pairs div { display: grid; grid-template-columns: 170px 1fr; gap: 12px; padding: 7px 0; border-top: 1px solid var(--grid); }
.pairs div:first-child { border-top: 0; }
.pairs dt { color: var(--muted); overflow-wrap: anywhere; }
.pairs dd { margin: 0; min-width: 0; overflow-wrap: anywhere; }
.scroll { overflow: auto; max-height: 46rem; }
table { border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums; }
th, td { padding: 7px 14px; text-align: left; vertical-align: top; border-top: 1px solid var(--grid); font-weight: 400; }
tbody th { white-space: nowrap; max-width: 22em; overflow: hidden; text-overflow: ellipsis; }
thead th { position: sticky; top: 0; background: var(--paper); color: var(--muted); font-size: 13px; white-space: nowrap; border-top: 0;
  box-shadow: inset 0 -1px var(--grid); }
tbody tr:first-child > * { border-top: 0; }
.number { text-align: right; white-space: nowrap; }
.bar { display: inline-block; width: 72px; height: 8px; margin-right: 8px; border-radius: 4px; background: var(--grid); overflow: hidden; }
.share { display: inline-block; min-width: 2.8em; }
.bar i { display: block; height: 100%; background: var(--blue); }
.mistakes { display: grid; grid-template-columns: repeat(auto-fill, minmax(116px, 1fr)); gap: 12px; margin: 0; padding: 0;
  list-style: none; }
.mistakes li { padding: 8px; min-width: 0; }
.mistakes img { display: block; width: 100%; height: auto; aspect-ratio: 1; object-fit: contain; border-radius: 6px;
  background: var(--page); }
.mistakes .pixels { image-rendering: pixelated; }
.mistakes p { margin: 6px 0 0; font-size: 13px; line-height: 1.4; overflow-wrap: anywhere; }
.mistakes p span { color: var(--muted); }
.swatches { display: flex; flex-wrap: wrap; gap: 4px 20px; margin: 0 0 12px; padding: 0; list-style: none; }
.swatch { display: inline-block; width: 20px; margin-right: 8px; vertical-align: 3px; }
details summary { cursor: pointer; margin: 12px 0; color: var(--blue); }
footer { margin-top: 44px; color: var(--muted); font-size: 13px; overflow-wrap: anywhere; }
@media (max-width: 600px) {
  main { padding: 20px 14px 36px; }
  header h1 { font-size: 22px; }
  h2 { margin-top: 34px; }
  figure { padding: 4px; }
  .tiles { grid-template-columns: 1fr 1fr; gap: 10px; }
  .tiles div { padding: 10px 12px; }
  .tiles div:last-child:nth-child(odd) { grid-column: 1 / -1; }
  .tiles b { font-size: 20px; }
  .pairs div { grid-template-columns: 1fr; gap: 0; }
  .mistakes { grid-template-columns: repeat(3, 1fr); gap: 8px; }
  th, td { padding: 6px 10px; }
  td:not(.number) { min-width: 9em; }
  tbody th { white-space: normal; overflow: visible; overflow-wrap: anywhere; min-width: 3em; max-width: 10em; }
  .bar { display: none; }
}
@media print {
  body { background: none; font-size: 12px; }
  main { max-width: none; padding: 0; }
  nav { display: none; }
  .scroll { max-height: none; overflow: visible; }
  figure, .tiles div, .mistakes li, tr { break-inside: avoid; }
  h2 { break-after: avoid; }
}
"""
