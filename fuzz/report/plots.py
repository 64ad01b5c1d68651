"""The pictures of a report: error over budget, decoded keys, margins, coverage, throughput, nights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

from fuzz.check.picture import INFINITE, PER_OCTAVE
from fuzz.report.model import Grid, KeysOfRow, RunView, TargetView
from fuzz.report.svg import CHARACTER, Markup, box, cells, drawing, element, label, legend, line, short, ticks

_WIDE = 760.0

# ------------------------------------------------------- error over budget

_SCALE = (
    (-4 * PER_OCTAVE, "ok0", "under 1/16"),
    (-2 * PER_OCTAVE, "ok1", "1/16 to 1/4"),
    (-1 * PER_OCTAVE, "ok2", "1/4 to 1/2"),
    (0, "ok3", "1/2 to 1"),
    (1 * PER_OCTAVE, "bad0", "1 to 2"),
    (3 * PER_OCTAVE, "bad1", "2 to 8"),
    (6 * PER_OCTAVE, "bad2", "8 to 64"),
    (10 * PER_OCTAVE, "bad3", "64 to 1024"),
    (INFINITE - 1, "bad4", "over 1024"),
    (INFINITE, "inf", "not a number, or without a budget"),
)


def _class(level: int | None) -> str:
    if level is None:
        return "none"
    return next(name for top, name, _ in _SCALE if level <= top)


def grid(of: Grid) -> Markup:
    """Error over budget by row and head, or by row and dimension."""
    rows, columns = len(of.levels), len(of.levels[0])
    high = max(4.0, min(14.0, 320.0 / rows))
    wide = max(5.0, min(22.0, 480.0 / columns))
    left, top = 64.0, 18.0
    classes = [[_class(level) for level in row] for row in of.levels]
    used = {name for row in classes for name in row}
    parts = [label(left, 12, f"{of.column} 0 to {of.columns - 1}"), label(left - 6, top + 9, "row 0", anchor="end")]
    if rows > 1:
        parts.append(label(left - 6, top + rows * high, str(of.tokens - 1), anchor="end"))
    parts += cells(classes, left, top, wide, high)
    parts.append(element("rect", x=left, y=top, width=columns * wide, height=rows * high, class_="frame"))
    entries = [(name, text) for _, name, text in _SCALE]
    shown = [entry for entry in [*entries, ("none", "not judged")] if entry[0] in used]
    keys, below = legend(shown, left, top + rows * high + 8, left + 560)
    failing = sum(level is not None and level > 0 for row in of.levels for level in row)
    title = f"Error over budget by row and {of.column}: {failing} of {rows * columns} cells beyond the budget"
    return drawing(left + max(columns * wide, 560.0) + 8, top + rows * high + below + 12, title, [*parts, *keys])


# ------------------------------------------------------------- decoded keys

_KEY_CLASSES = (("seen", "counted"), ("missing", "missing"), ("extra", "counted, but not to be seen, or twice"))


def keys(rows: Sequence[KeysOfRow]) -> Markup:
    """Which keys each row attended to: a line a row, a place a key."""
    most = max((row.keys for row in rows), default=0) or 1
    left, top, high = 150.0, 20.0, 13.0
    scale = (_WIDE - left - 10) / most
    parts = [label(left, 12, "key 0"), label(_WIDE - 10, 12, f"{most - 1}", anchor="end")]
    for index, row in enumerate(rows):
        y = top + index * (high + 4)
        who = f"row {row.row}" + (f", heads {row.heads[0]}..{row.heads[-1]}" if len(row.heads) > 1 else "")
        who += f", head {row.heads[0]}" if len(row.heads) == 1 else ""
        parts.append(label(left - 8, y + 10, who, anchor="end"))
        parts += _row_of_keys(row, partial(_run, left, scale, y, high))
    shown, below = legend(_KEY_CLASSES, left, top + len(rows) * (high + 4) + 6, _WIDE)
    title = f"Decoded keys of {len(rows)} failing rows: " + "; ".join(said(row) for row in rows[:3])
    return drawing(_WIDE, top + len(rows) * (high + 4) + below + 10, title, [*parts, *shown])


def _run(left: float, scale: float, y: float, high: float, first: int, count: int, class_: str, tip: str) -> Markup:
    # A single key among many still shows.
    return box(left + first * scale, y, max(count * scale, 1.5), high, class_, tip)


def _row_of_keys(row: KeysOfRow, run: partial[Markup]) -> list[Markup]:
    low, high = row.visible
    parts = [run(0, row.keys, "unseen", f"keys 0 to {row.keys - 1} of request {row.request}")]
    if not row.told:
        return [*parts, run(low, high - low, "none", "what was attended to cannot be told")]
    parts.append(run(low, high - low, "seen", f"keys {low} to {high - 1} are to be counted"))
    for runs, class_, verb in ((row.missing, "missing", "missing"), (row.extra, "extra", "counted, not to be")):
        parts += [run(first, count, class_, f"{verb}: {_keys_said(first, count)}") for first, count in runs]
    return parts


def _keys_said(first: int, count: int) -> str:
    return f"key {first}" if count == 1 else f"keys {first} to {first + count - 1}"


def said(row: KeysOfRow) -> str:
    """A row's keys in words."""
    if not row.told:
        return f"row {row.row}: what it attended to cannot be told"
    found = [f"misses {_keys_said(*run)}" for run in row.missing[:3]]
    found += [f"counts {_keys_said(*run)}" for run in row.extra[:3]]
    found += [f"counts {row.foreign} keys of other requests"] if row.foreign else []
    return f"row {row.row} " + ", ".join(found or ["counts its keys"])


# ------------------------------------------------------------------- targets


def margins(targets: Sequence[TargetView]) -> Markup | None:
    """The worst error over budget of each target and dtype, on a logarithmic axis; None where nothing was judged."""
    rows = [
        (target.name, dtype, ratio)
        for target in targets
        for dtype, ratio in (target.margins or _one(target)).items()
        if math.isfinite(ratio)
    ]
    if not rows:
        return None
    names = CHARACTER * max(len(name) for name, *_ in rows)
    dtypes = CHARACTER * max(len(dtype) for _, dtype, _ in rows)
    left, top, high = min(names, 260.0) + dtypes + 22, 22.0, 16.0
    low, end = -3, 3
    scale = (_WIDE - left - 60) / (end - low)
    parts: list[Markup] = []
    for power in range(low, end + 1):
        x, border = left + (power - low) * scale, power == 0
        parts.append(line(x, top - 6, x, top + len(rows) * high + 2, "border" if border else "rule"))
        text = "1: the budget" if border else f"{10.0**power:g}"
        parts.append(label(x, 12, text, anchor="middle", class_="strong" if border else None))
    for index, (name, dtype, ratio) in enumerate(rows):
        y = top + index * high
        length = (min(max(math.log10(ratio), low), end) - low) * scale if ratio > 0 else 0.0
        tip = f"{name}, {dtype}: worst error/budget {ratio:.3g}"
        if not index or rows[index - 1][0] != name:
            parts.append(label(0, y + 11, _clipped(name, left - dtypes - 16)))
        parts.append(label(left - 6, y + 11, dtype, anchor="end"))
        parts.append(box(left, y + 2, max(length, 1.0), high - 5, _margin_class(ratio), tip))
        parts.append(label(left + length + 5, y + 11, f"{ratio:.2g}"))
    title = f"Worst error over budget by target and dtype, {len(rows)} of them; above 1 is beyond the budget"
    return drawing(_WIDE, top + len(rows) * high + 8, title, parts)


def _one(target: TargetView) -> Mapping[str, float]:
    return {} if target.worst_ratio is None else {"all dtypes": target.worst_ratio}


def _margin_class(ratio: float) -> str:
    return "bad2" if ratio > 1 else "ok3" if ratio > 0.5 else "ok2"


def _clipped(text: str, width: float) -> str:
    most = max(int(width / CHARACTER), 4)
    return text if len(text) <= most else text[: most - 1] + "…"


_PHASES = ("generate", "kernel", "oracle", "checks", "other")


def throughput(targets: Sequence[TargetView]) -> Markup | None:
    """Seconds of the workers on each target, by phase, with cases a second; None where nothing was timed."""
    rows = [target for target in targets if target.seconds > 0]
    if not rows:
        return None
    left = min(8 + CHARACTER * max(len(t.name) for t in rows), 300.0)
    axis = ticks(max(t.seconds for t in rows))
    scale = (_WIDE - left - 120) / axis[-1]
    keys_, below = legend([(f"phase{i}", name) for i, name in enumerate(_PHASES)], left, 2, _WIDE)
    top, high = below + 22.0, 17.0
    parts = [*keys_]
    for value in axis:
        x = left + value * scale
        parts += [
            line(x, top - 4, x, top + len(rows) * high, "rule"),
            label(x, top - 8, f"{value:g} s", anchor="middle"),
        ]
    for index, target in enumerate(rows):
        x, y = left, top + index * high
        parts.append(label(left - 6, y + 11, _clipped(target.name, left - 10), anchor="end"))
        for i, name in enumerate(_PHASES):
            spent = target.time.get(name, 0.0)
            tip = f"{target.name}: {name} {spent:.2f} s of {target.seconds:.2f} s"
            parts.append(box(x, y + 2, spent * scale, high - 5, f"phase{i}", tip))
            x += spent * scale
        if target.rate is not None:
            parts.append(label(x + 5, y + 11, f"{short(target.rate)} cases/s"))
    title = "Seconds of the workers on each target, by phase, and cases per second of a worker"
    return drawing(_WIDE, top + len(rows) * high + 6, title, parts)


def verdicts(counts: Mapping[str, int]) -> Markup | None:
    """Cases by verdict as one bar; None where there are none."""
    total = sum(counts.values())
    if not total:
        return None
    parts, x, width = [], 0.0, 160.0
    for name in ("pass", "vacuous", "unsupported", "suspect", "fail", "crash", "hang"):
        if count := counts.get(name, 0):
            parts.append(box(x, 0, width * count / total, 10, f"v-{name}", f"{name}: {count} of {total}"))
            x += width * count / total
    said_ = ", ".join(f"{name} {count}" for name, count in counts.items() if count)
    return drawing(width, 10, f"Cases by verdict: {said_}", parts)


_SHARES = (("share0", "none tried"), ("share1", "under half"), ("share2", "half or more"), ("share3", "all tried"))


def coverage(target: TargetView) -> Markup | None:
    """Pairs of features tried, as a triangle of cells: dark is all; None where the run does not say."""
    if not target.matrix:
        return None
    names = sorted({name for a, b, *_ in target.matrix for name in (a, b)})
    place = {name: index for index, name in enumerate(names)}
    left, top, side = 10 + CHARACTER * max(len(name) for name in names), 20.0, 20.0
    parts: list[Markup] = []
    for a, b, seen, declared in target.matrix:
        row, column = sorted((place[a], place[b]), reverse=True)
        x, y = left + column * side, top + (row - 1) * side
        tip = f"{names[column]} & {names[row]}: {seen} of {declared} pairs"
        parts.append(box(x, y, side - 1, side - 1, _share(seen, declared), tip))
    for name, index in place.items():
        if index:
            parts.append(label(left - 5, top + (index - 1) * side + 13, name, anchor="end"))
        if index < len(names) - 1:
            # Above the column's first cell, where the triangle leaves room.
            parts.append(label(left + index * side + 2, top + index * side - 6, name, class_="column"))
    below = top + (len(names) - 1) * side + 8
    shown, high = legend(_SHARES, left, below, left + 420)
    title = f"Pairs of features tried: {target.pairs} of {target.pairs_declared}"
    width = left + len(names) * side + CHARACTER * max(len(name) for name in names)
    return drawing(max(width, left + 430), below + high + 2, title, [*parts, *shown])


def _share(seen: int, declared: int) -> str:
    if not seen:
        return "share0"
    return "share3" if seen == declared else "share2" if 2 * seen >= declared else "share1"


# -------------------------------------------------------------------- nights


def trend(nights: Sequence[RunView]) -> Markup | None:
    """New and known findings, cases, and cases a second of past nights and this one; None if there is one alone."""
    if len(nights) < 2:
        return None
    new, known = ([night.findings(state) for night in nights] for state in ("new", "known"))
    rates = [night.cases / night.seconds if night.seconds > 0 else 0.0 for night in nights]
    panels: tuple[tuple[str, Sequence[tuple[str, str, Sequence[float]]]], ...] = (
        ("findings", (("new", "trend-new", new), ("known", "trend-known", known))),
        ("cases", (("cases", "trend-cases", [night.cases for night in nights]),)),
        ("cases per second of a worker", (("cases/s", "trend-cases", rates),)),
    )
    wide, high = 240.0, 120.0
    parts: list[Markup] = []
    for index, (name, series) in enumerate(panels):
        parts += _panel(index * (wide + 14), wide, high, name, series, nights)
    title = f"{len(nights)} nights: new findings {', '.join(map(str, new))}"
    return drawing(3 * wide + 2 * 14, high + 44, title, parts)


def _panel(
    x: float,
    wide: float,
    high: float,
    name: str,
    series: Sequence[tuple[str, str, Sequence[float]]],
    nights: Sequence[RunView],
) -> list[Markup]:
    left, top = x + 40, 22.0
    axis = ticks(max(max(values) for *_, values in series), 3)
    step = (wide - 56) / max(len(nights) - 1, 1)
    parts = [label(x, 12, name, class_="strong")]
    for value in axis:
        y = top + high - value / axis[-1] * high
        parts += [line(left, y, left + wide - 50, y, "rule"), label(left - 5, y + 4, short(value), anchor="end")]
    for said_, class_, values in series:
        points = [(left + i * step, top + high - value / axis[-1] * high) for i, value in enumerate(values)]
        parts.append(element("polyline", points=" ".join(f"{a:.1f},{b:.1f}" for a, b in points), class_=class_))
        for (a, b), value, night in zip(points, values, nights, strict=True):
            when = night.ended or ("this run" if night is nights[-1] else "an earlier run")
            tip = f"{when}: {said_} {short(value)}"
            parts.append(element("circle", element("title", tip), cx=a, cy=b, r=3.0, class_=class_))
        if len(series) > 1:
            parts.append(label(points[-1][0] + 5, points[-1][1] + 4, said_, class_=class_))
    first, last = nights[0].ended or f"{len(nights) - 1} runs ago", nights[-1].ended or "this run"
    parts.append(label(left, top + high + 16, first[:16]))
    return [*parts, label(left + wide - 50, top + high + 16, last[:16], anchor="end")]
