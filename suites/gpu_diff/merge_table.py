"""The table of merges: columns of outcomes, kept as JSON, and the Markdown that is made of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from fuzz.errors import Exit, Stop

SCHEMA = 1


class Outcome(StrEnum):
    """What a cell came to."""

    PASS = "pass"
    FINDING = "finding"
    UNSUPPORTED = "unsupported"
    """it says so itself: the text is its error, or why there is no such path"""
    NO_PROMISE = "no promise"
    """wrong, and nothing says that it would not be"""


@dataclass(frozen=True)
class Cell:
    """One path with one number of states of one kind. ``known``: the ledger's entry of a finding, if it has one."""

    path: str
    kind: str
    ranks: int
    outcome: Outcome
    text: str = ""
    known: str | None = None

    @property
    def shown(self) -> str:
        """Without its place."""
        if self.outcome is Outcome.PASS:
            return "pass"
        entry = f" (`{self.known}`)" if self.known else ""
        return f"{self.outcome}{entry}: {self.text}"


@dataclass(frozen=True)
class Column:
    """All outcomes of one way of execution: ``over`` (stepped, gloo, nccl), an engine and the versions in use."""

    over: str
    engine: str
    versions: dict[str, str | None]
    cells: tuple[Cell, ...]

    @property
    def name(self) -> str:
        """As the table heads it; a column of this name is replaced."""
        where = self.versions.get("gpu") if self.engine != "emulator" else None
        how = {"stepped": "one process", "gloo": "gloo", "nccl": "NCCL"}[self.over]
        return f"{how}{', ' + where if where else ''}, sglang {self.versions.get('sglang')}"


def load(path: Path) -> list[Column]:
    """The columns of a file. Raises ``Stop`` (usage) if it is none."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["schema"] != SCHEMA:
            raise ValueError(f"schema {data['schema']}; allowed: {SCHEMA}")
        return [_column(plain) for plain in data["columns"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Stop(Exit.USAGE, f"{path}: no columns of merges: {error}") from None


def _column(plain: dict[str, Any]) -> Column:
    cells = [
        Cell(ranks=ranks, **{**group, "outcome": Outcome(group["outcome"])})
        for group in plain["cells"]
        for ranks in group.pop("ranks")
    ]
    return Column(**{**plain, "cells": tuple(cells)})


def save(path: Path, columns: Sequence[Column]) -> None:
    """Write columns, one line for all numbers of ranks that came to the same."""
    shown = []
    for column in columns:
        head = {name: value for name, value in asdict(column).items() if name != "cells"}
        groups: dict[str, list[int]] = {}
        for cell in column.cells:
            same = {name: value for name, value in asdict(cell).items() if value and name != "ranks"}
            groups.setdefault(json.dumps(same)[:-1], []).append(cell.ranks)
        cells = ",\n".join(f'{same}, "ranks": {numbers}}}' for same, numbers in groups.items())
        shown.append(f'{json.dumps(head)[:-1]}, "cells": [\n{cells}\n]}}')
    whole = ",\n".join(shown)
    path.write_text(f'{{"schema": {SCHEMA}, "columns": [\n{whole}\n]}}\n', encoding="utf-8")


def replaced(columns: Sequence[Column], new: Sequence[Column]) -> list[Column]:
    """``columns`` with those of ``new``, which take the places of their namesakes, in a fixed order."""
    by_name = {column.name: column for column in (*columns, *new)}
    order = ("stepped", "gloo", "nccl")
    return sorted(by_name.values(), key=lambda c: (c.engine != "emulator", order.index(c.over), c.name))


def markdown(columns: Sequence[Column]) -> str:
    """A table a path: a row for each kind of states, a column for each way of execution; texts below, once each."""
    notes: dict[str, int] = {}
    lines: list[str] = []
    paths = dict.fromkeys(cell.path for column in columns for cell in column.cells)
    for path in paths:
        lines += [f"## {path}", ""]
        shown: list[tuple[Column, list[Cell]]] = []
        for column in columns:
            cells = [cell for cell in column.cells if cell.path == path]
            if len({cell.shown for cell in cells}) == 1 and cells[0].outcome is Outcome.UNSUPPORTED:
                lines += [f"{column.name}: {cells[0].shown}.", ""]
            elif cells:
                shown.append((column, cells))
        if not shown:
            continue
        lines += [f"| states | {' | '.join(column.name for column, _ in shown)} |", "|---" * (len(shown) + 1) + "|"]
        for kind in dict.fromkeys(cell.kind for _, cells in shown for cell in cells):
            texts = [_ranks([cell for cell in cells if cell.kind == kind], notes) for _, cells in shown]
            lines.append(f"| {kind} | {' | '.join(texts)} |")
        lines.append("")
    return "\n".join([*lines, "## Notes", "", *(f"{number}. {text}" for text, number in notes.items()), ""])


def _ranks(cells: Sequence[Cell], notes: dict[str, int]) -> str:
    """Numbers of ranks by outcome, such as ``1 to 4: pass; 5: finding [2]``."""
    groups: dict[str, list[int]] = {}
    for cell in cells:
        if cell.outcome is Outcome.PASS:
            groups.setdefault("pass", []).append(cell.ranks)
        else:
            number = notes.setdefault(cell.shown, len(notes) + 1)
            groups.setdefault(f"{cell.outcome} [{number}]", []).append(cell.ranks)
    return "; ".join(f"{_runs(numbers)}: {words}" for words, numbers in groups.items()) or "not run"


def _runs(numbers: Sequence[int]) -> str:
    """1, 2, 3, 5 as ``1 to 3, 5``."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)
