"""Elements of SVG drawings and HTML pages: rectangles, text, lines, paths, tables, and the page around a drawing.

All pictures and reports of this package are made of these. Numbers: integers and text stand as they are, floats are
rounded to two decimals. Attributes: `text_anchor` stands for text-anchor, `class_` for class, which comes first; None
is left out. title: shown under the pointer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape
from typing import Any

SOFT = "#555555"  # of captions and axes
LETTER, LINE = 6.2, 18  # px: about the width of a letter in the mean, and the height of a line of a legend
XMLNS = "http://www.w3.org/2000/svg"
Number = float | str


def element(name: str, content: str | None = None, /, **attributes: object) -> str:
    """Return an element with markup inside."""
    words = [name]
    for key, value in sorted(attributes.items(), key=lambda attribute: attribute[0] != "class_"):
        if value is not None:
            shown = f"{value:.2f}" if isinstance(value, float) else escape(str(value))
            words.append(f'{key.rstrip("_").replace("_", "-")}="{shown}"')
    opened = " ".join(words)
    return f"<{opened}/>" if content is None else f"<{opened}>{content}</{name}>"


def rect(x: Number, y: Number, width: Number, height: Number, title: str | None = None, **attributes: object) -> str:
    return element("rect", titled(title) or None, x=x, y=y, width=width, height=height, **attributes)


def text(x: Number, y: Number, words: str, title: str | None = None, **attributes: object) -> str:
    return element("text", escape(words) + titled(title), x=x, y=y, **attributes)


def line(x1: Number, y1: Number, x2: Number, y2: Number, title: str | None = None, **attributes: object) -> str:
    return element("line", titled(title) or None, x1=x1, y1=y1, x2=x2, y2=y2, **attributes)


def titled(words: str | None) -> str:
    """Return the title of an element, which browsers show under the pointer; '' for None."""
    return "" if words is None else element("title", escape(words))


def swatch(x: Number, y: int, colour: str) -> str:
    """Return a square of a legend whose text has the baseline y."""
    return rect(x, y - 10, 12, 12, fill=colour)


def squares(*colours: str) -> tuple[str, int]:
    """Return the sample of an `entry`, a square of each colour."""
    return "".join(swatch(14 * place, 0, colour) for place, colour in enumerate(colours)), 14 * len(colours)


def entry(words: str, sample: str = "", size: int = 0, **style: Any) -> tuple[float, str]:
    """Return an entry of a `legend`, a sample of `size` px and words, with its width."""
    start = size + 4 if sample else 0
    return start + LETTER * len(words), sample + text(start, 0, words, **style)


def legend(entries: Iterable[tuple[float, str]], left: int, right: float, y: int) -> tuple[list[str], int]:
    """Place entries from left to right, in as many lines as they need, the first at the baseline y.

    entries: width, and markup at the origin. Returns the elements and the baseline of the last line.
    """
    placed, x = [], float(left)
    for width, markup in entries:
        if x > left and x + width > right:
            x, y = float(left), y + LINE
        placed.append(element("g", markup, transform=f"translate({x:g} {y})"))
        x += width + LINE
    return placed, y


def merged(boxes: Iterable[tuple[str, float, float, float, float]], **attributes: object) -> Iterator[str]:
    """Yield all boxes of a colour as one path, for each colour. boxes: (colour, x, y, width, height)."""
    paths: dict[str, list[str]] = {}
    for colour, x, y, width, height in boxes:
        paths.setdefault(colour, []).append(f"M{x:.1f} {y:g}h{width:.1f}v{height:g}h{-width:.1f}z")
    for colour, parts in paths.items():
        yield element("path", fill=colour, **attributes, d="".join(parts))


def document(width: int, height: int, parts: Iterable[str], **attributes: object) -> str:
    """Return an SVG file with one element per line."""
    content = "\n".join(["", *parts, ""])
    size = {"width": width, "height": height, "viewBox": f"0 0 {width} {height}"}
    return element("svg", content, xmlns=XMLNS, **size, **attributes) + "\n"


def paper(width: int, height: int, parts: Iterable[str]) -> str:
    """Return an SVG file on white paper with a font of its own."""
    background = element("rect", width=width, height=height, fill="#ffffff")
    font = {"font_family": "DejaVu Sans, Helvetica, Arial, sans-serif", "font_size": 11}
    return document(width, height, [background, *parts], **font)


def table_html(rows: Iterable[str], kind: str | None = None) -> str:
    """Return a table of rows made by `table_row`. kind: its class."""
    return element("table", "".join(rows), class_=kind)


def table_row(cells: Iterable[str], tag: str = "td") -> str:
    """Return a row of a table. cells: each a <th> or <td>, or the content of a `tag`."""
    whole = (cell if cell.startswith("<t") else element(tag, cell) for cell in cells)
    return element("tr", "".join(whole))


def tiles_html(tiles: Iterable[tuple[str, ...]]) -> str:
    """Return a row of figures. tiles: (name, value, meaning), or (name, value, meaning, text beside the value)."""
    drawn = ""
    for name, value, meaning, *beside in tiles:
        more = "".join(f' <span class="beside">{each}</span>' for each in beside)
        drawn += f'<div class="tile"><b>{name}</b><span class="big">{value}</span>{more}<small>{meaning}</small></div>'
    return element("div", drawn, class_="tiles")


def round_step(value: float) -> float:
    """Return the smallest of 1, 2, 5 x 10^n that is at least `value`, which is positive."""
    power = 1e-12
    while power * 10 < value:
        power *= 10
    return next(float(f"{step * power:.6g}") for step in (1, 2, 5, 10, 20) if step * power >= value * (1 - 1e-9))
