"""Where a result is wrong, small enough to be kept with every finding: grids of error/budget, and decoded keys."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from fuzz.case import Probe
from fuzz.check.execute import Execution
from oracle.diagnose.decode import RowKeys, decode
from oracle.diagnose.rows import describe_rows
from oracle.problem import Problem

SIDE = 64
"""Rows and columns of a grid, at most: of more, neighbours share a cell, which shows the worst of them."""
PER_OCTAVE = 4
"""A cell's level: this many times the binary logarithm of error/budget. 0 and below passes."""
LEVELS = (-40, 400)
INFINITE = 999
"""The level of a NaN, and of whatever else is beyond every budget."""
NOT_JUDGED = "."

ROWS = 16
"""Rows whose keys are decoded."""
_KEYS = 1024
_PLAIN_KEYS = 64
_CODES = (Probe.CODE, Probe.GATE, Probe.VALUE_NEEDLE, Probe.SIGNATURES)
_RUNS = 24


def ratio_map(ratios: Tensor) -> dict[str, Any]:
    """Plain data of ratios [Tq, Hq, D_v] or [Tq, Hq], negative where nothing is judged.

    ``by_head`` has the worst ratio of each row and head, ``by_dim`` that of each row and dimension of the output: a
    text a row, with levels between spaces and ``.`` where nothing is judged. ``shape`` is that of the ratios.
    """
    grids = {"by_head": ratios.flatten(2).amax(-1) if ratios.ndim == 3 else ratios}
    if ratios.ndim == 3:
        grids["by_dim"] = ratios.amax(1)
    return {"shape": list(ratios.shape)} | {name: _levels(_pooled(grid)) for name, grid in grids.items()}


def _pooled(grid: Tensor) -> Tensor:
    """The worst of every cell: axes longer than ``SIDE`` are cut into as many nearly equal parts."""
    for axis, size in enumerate(grid.shape):
        if size > SIDE:
            ends = [size * i // SIDE for i in range(SIDE + 1)]
            parts = [grid.narrow(axis, low, high - low).amax(axis) for low, high in pairwise(ends)]
            grid = torch.stack(parts, axis)
    return grid


def _levels(grid: Tensor) -> list[str]:
    return [" ".join(map(_level, row)) for row in grid.tolist()]


def _level(ratio: float) -> str:
    if ratio < 0:
        return NOT_JUDGED
    if not math.isfinite(ratio):
        return str(INFINITE)
    low, high = LEVELS
    if ratio == 0:
        return str(low)
    level = PER_OCTAVE * math.log2(ratio)
    # Rounded away from the border: what fails stays above 0.
    return str(min(max(math.ceil(level) if ratio > 1 else math.floor(level), low), high))


def decoded_keys(run: Execution, ratios: Tensor, noise: Tensor) -> list[dict[str, Any]]:
    """The keys that failing rows attended to, where the values of the case are a code of its keys; else nothing.

    ratios [Tq, Hq, D_v]: error over budget. noise [Tq, Hq, D_v]: what rounding may add, absolute. For each row (and
    some of its heads) ``visible``, the first key that it sees and the one after the last, and runs ``[first, count]``
    of its own request's keys: ``missing`` and ``extra``, which it counted though it may not, or twice;
    ``foreign`` counts keys of other requests. ``told`` is false where it cannot be told.
    """
    problem, case = run.instance.problem, run.instance.case
    if problem is None or problem.kv_positions is not None:
        return []
    most = _KEYS if case.probe in _CODES else _PLAIN_KEYS
    rows = (ratios.flatten(1) > 1).any(-1).nonzero().flatten().tolist()[:ROWS]
    if sum(problem.kv_lens) > most or not rows:
        return []
    noise = noise.nan_to_num(posinf=1e300)
    found = decode(problem, run.outputs["out"], page_size=case.page_size, rows=rows, noise=noise)
    return [_plain(problem, row) for row in found]


def _plain(problem: Problem, row: RowKeys) -> dict[str, Any]:
    seen = describe_rows(problem, (row.row,))[0]
    own = [[k.position for k in keys if k.request == row.request] for keys in (row.missing, row.extra)]
    return {
        "row": row.row,
        "request": row.request,
        "heads": [] if row.all_heads else list(row.heads),
        "keys": problem.kv_lens[row.request],
        "visible": [seen.lo, seen.hi],
        "missing": _runs(own[0]),
        "extra": _runs(own[1]),
        "foreign": len(row.extra) - len(own[1]),
        "told": row.changes is not None,
    }


def _runs(positions: list[int]) -> list[list[int]]:
    """Neighbours together, as [first, count]; the first ``_RUNS`` of them."""
    runs: list[list[int]] = []
    for position in sorted(positions):
        if runs and position == sum(runs[-1]):
            runs[-1][1] += 1
        else:
            runs.append([position, 1])
    return runs[:_RUNS]
