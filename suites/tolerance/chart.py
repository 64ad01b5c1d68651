"""A grouped bar chart as SVG text: no library, the same bytes everywhere."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

COLOURS = ("#1b6ca8", "#7fb2d6", "#c6dbef", "#d98c3f", "#b0772f", "#8c6d31", "#6b6b6b", "#a3a3a3")
LEFT, TOP, HEIGHT, BAR, GAP, KEY = 40, 24, 200, 16, 36, 18


@dataclass(frozen=True)
class Chart:
    """groups: name -> one number for each of `series`, or None where there is none. top: the end of the axis."""

    title: str
    series: Sequence[str]
    groups: Mapping[str, Sequence[float | None]]
    top: float

    def svg(self) -> str:
        wide = len(self.series) * BAR + GAP
        width = max(LEFT + wide * len(self.groups) + 10, 560)
        height = TOP + HEIGHT + 30 + KEY * -(-len(self.series) // 2)
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            'font-family="sans-serif" font-size="11">',
            f'<rect width="{width}" height="{height}" fill="white"/>',
            f'<text x="{LEFT}" y="14" font-size="13">{escape(self.title)}</text>',
            *self._axis(width),
        ]
        for index, (name, values) in enumerate(self.groups.items()):
            parts += self._group(LEFT + GAP // 2 + wide * index, name, values)
        for index, name in enumerate(self.series):
            x, y = LEFT + index % 2 * 260, TOP + HEIGHT + 34 + KEY * (index // 2)
            parts.append(f'<rect x="{x}" y="{y}" width="11" height="11" fill="{self._colour(index)}"/>')
            parts.append(f'<text x="{x + 16}" y="{y + 10}">{escape(name)}</text>')
        return "\n".join([*parts, "</svg>", ""])

    def _colour(self, index: int) -> str:
        return COLOURS[index % len(COLOURS)]

    def _y(self, value: float) -> float:
        return round(TOP + HEIGHT * (1 - value / self.top), 1)

    def _axis(self, width: int) -> list[str]:
        lines = []
        for step in range(5):
            value = self.top * step / 4
            y = self._y(value)
            lines.append(f'<line x1="{LEFT}" x2="{width - 10}" y1="{y}" y2="{y}" stroke="#dddddd"/>')
            lines.append(f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{value:g}</text>')
        return lines

    def _group(self, x: int, name: str, values: Sequence[float | None]) -> list[str]:
        found = []
        for index, value in enumerate(values):
            if value is None:
                continue
            left, y = x + BAR * index, self._y(value)
            tall = round(TOP + HEIGHT - y, 1)
            found.append(f'<rect x="{left}" y="{y}" width="{BAR - 2}" height="{tall}" fill="{self._colour(index)}"/>')
            found.append(
                f'<text x="{left + BAR / 2 - 1}" y="{y - 3}" text-anchor="middle" font-size="9">{value:g}</text>'
            )
        middle = x + len(values) * BAR / 2
        found.append(f'<text x="{middle}" y="{TOP + HEIGHT + 16}" text-anchor="middle">{escape(name)}</text>')
        return found
