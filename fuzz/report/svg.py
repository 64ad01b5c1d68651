"""Drawing as SVG text: elements whose text and attributes are escaped, and a few helpers for axes.

Colours are classes; the page's style sheet says what they are, light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

FONT = 11
CHARACTER = 6.4
"""Width of a character of that size, about."""


@dataclass(frozen=True)
class Markup:
    """Text that is markup already. Templates leave it as it is."""

    text: str

    def __html__(self) -> str:
        return self.text

    def __str__(self) -> str:
        return self.text


Child = Markup | str


def element(name: str, *children: Child, **attributes: object) -> Markup:
    """An element. ``class_`` stands for class, and ``_`` in other names for ``-``; attributes that are None are left
    out. Children that are plain text, and all attributes, are escaped."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_text(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    inner = "".join(child.text if isinstance(child, Markup) else escape(child) for child in children)
    return Markup(f"<{name}{written}>{inner}</{name}>" if inner else f"<{name}{written}/>")


def _text(value: object) -> str:
    return f"{round(value, 1):g}" if isinstance(value, float) else str(value)


def drawing(width: float, height: float, title: str, children: Iterable[Child]) -> Markup:
    """A whole picture; ``title`` says in a sentence what it shows."""
    box = f"0 0 {width:.0f} {height:.0f}"
    size = {"viewBox": box, "width": f"{width:.0f}", "height": f"{height:.0f}"}
    parts = [element("title", title), *children]
    return element("svg", *parts, role="img", aria_label=title, font_size=FONT, **size)


def label(x: float, y: float, text: str, *, anchor: str = "start", class_: str | None = None) -> Markup:
    """A line of text."""
    return element("text", text, x=x, y=y, text_anchor=None if anchor == "start" else anchor, class_=class_)


def box(x: float, y: float, width: float, height: float, class_: str, tip: str | None = None) -> Markup:
    """A filled rectangle; ``tip`` shows under the pointer."""
    inner = () if tip is None else (element("title", tip),)
    return element("rect", *inner, x=x, y=y, width=max(width, 0.0), height=height, class_=class_)


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Markup:
    """A straight line."""
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)


def cells(rows: Sequence[Sequence[str | None]], x: float, y: float, width: float, height: float) -> list[Markup]:
    """A grid of coloured cells, by class, as one path a class. None leaves a cell empty."""
    runs: dict[str, list[str]] = {}
    for j, row in enumerate(rows):
        start = 0
        while start < len(row):
            stop = start + 1
            while stop < len(row) and row[stop] == row[start]:
                stop += 1
            name = row[start]
            if name is not None:
                wide = f"{(stop - start) * width:g}"
                runs.setdefault(name, []).append(
                    f"M{x + start * width:g} {y + j * height:g}h{wide}v{height:g}h-{wide}z"
                )
            start = stop
    return [element("path", d="".join(parts), class_=name) for name, parts in runs.items()]


def legend(entries: Sequence[tuple[str, str]], x: float, y: float, most: float) -> tuple[list[Markup], float]:
    """Squares of a class with their meaning, wrapped at ``most``; and the height that they take."""
    parts: list[Markup] = []
    left, top = x, y
    for class_, text in entries:
        wide = 16 + len(text) * CHARACTER + 14
        if left > x and left + wide > most:
            left, top = x, top + 16
        parts += [box(left, top, 11.0, 11.0, class_), label(left + 15, top + 9.5, text)]
        left += wide
    return parts, top + 16 - y


def ticks(high: float, wanted: int = 4) -> list[float]:
    """Round numbers from 0 to the first that is no less than ``high``."""
    if not 0 < high < math.inf:
        return [0.0, 1.0]
    raw = high / wanted
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw)
    return [step * i for i in range(math.ceil(high / step - 1e-9) + 1)]


def short(value: float) -> str:
    """A number in few characters: 1234 is 1.2k."""
    if not math.isfinite(value):
        return str(value)
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"
