"""A small map of the rows that are wrong, in text: requests and rows down, heads across."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from oracle.budget.judge import Mark
from oracle.failure.words import runs

COLUMNS = 64
"""Characters of a line: of more heads, several share one."""
LINES = 16
"""The most lines. Neighbouring rows that look the same share one."""

SIGNS = ".?XN"
"""Of each `Mark`."""
LEGEND = ". within budget"
_LEGENDS = {"?": "? within the worst case only", "X": "X beyond it", "N": "N not finite"}


def grid(marks: Tensor, q_lens: Sequence[int]) -> list[str]:
    """Lines of the map. marks: `Mark`s [tokens, heads], of requests of `q_lens` tokens each."""
    heads = marks.shape[1]
    share = -(-heads // COLUMNS)
    padded = torch.nn.functional.pad(marks, (0, -heads % share)).view(marks.shape[0], -1, share).amax(-1)
    signs = ["".join(SIGNS[m] for m in row) for row in padded.tolist()]
    body = _decode(signs) if all(n == 1 for n in q_lens) else _ragged(signs, q_lens)
    width = max((len(label) for label, _ in body), default=0)
    across = "head 0" if heads == 1 else f"heads 0 to {heads - 1} across"
    shared = "" if share == 1 else f", {share} a column"
    found = {sign for row in signs for sign in row}
    legend = [LEGEND, *(text for sign, text in _LEGENDS.items() if sign in found)]
    lines = [f"{label:<{width}}  {row}" for label, row in body[:LINES]]
    if len(body) > LINES:
        lines.append(f"... and {len(body) - LINES} more")
    return [f"{across}{shared}; {', '.join(legend)}", *lines]


def _decode(signs: Sequence[str]) -> list[tuple[str, str]]:
    """One row a request: neighbouring requests that look the same together."""
    return [(_label("request", own), row) for own, row in _same(signs)]


def _ragged(signs: Sequence[str], q_lens: Sequence[int]) -> list[tuple[str, str]]:
    """Rows of one request that look the same together; requests of which no row is wrong, too."""
    found: list[tuple[str, str]] = []
    right: list[int] = []

    def flush() -> None:
        if right:
            found.append((_label("request", right), "all within budget"))
            right.clear()

    start = 0
    for request, queries in enumerate(q_lens):
        own = signs[start : start + queries]
        start += queries
        if not any(set(row) - {SIGNS[Mark.WITHIN]} for row in own):
            right.append(request)
            continue
        flush()
        of = f"request {request}, " if len(q_lens) > 1 else ""
        found += [(f"{of}{_label('row', rows)}", row) for rows, row in _same(own)]
    flush()
    return found


def _same(signs: Sequence[str]) -> list[tuple[list[int], str]]:
    return [([i for i, _ in members], row) for row, members in groupby(enumerate(signs), lambda pair: pair[1])]


def _label(noun: str, numbers: Sequence[int]) -> str:
    return f"{noun}{'' if len(numbers) == 1 else 's'} {runs(numbers)}"
