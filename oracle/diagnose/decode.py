"""Which keys each row attended to, read back from an output whose values were designed as a code.

If key j has the weight p_j of a row's whole weight (for a key that the row does not see: the weight that it would
have), and the target counted it c_j times too often (-1: not at all), then

    out' (1 + sum c p) = out + sum c p v,    so that    out' - out = sum_j c_j p_j (v_j - out'):

linear in c, with everything else known. The integers c are few but for whole pages and runs, which are tried as
such; a search for the sparsest solution finds them where values are a code, as in the probes code, gate,
value_needle and signatures. Normal values of a short context do as well.

What it takes: the problem gives every key; softmax weights are exact, or so nearly that rounding them moves no
output by as much as a key does; a key counts whole. A key that moves no element by more than a few roundings (a
closed gate) is neither reported nor ruled out. A row whose output another single change would explain as well is
refused: its ``changes`` are None.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from oracle.attention import lse_with_sink, solve
from oracle.diagnose.decode_rows import Candidates, Row
from oracle.diagnose.decode_search import search
from oracle.diagnose.decoded import Change, Key, RowKeys, lines
from oracle.problem import Problem, ProblemError
from oracle.rounding import widen

__all__ = ["Change", "Key", "RowKeys", "decode", "lines"]


def decode(
    problem: Problem,
    out: Tensor,
    *,
    page_size: int | None = None,
    pages: Sequence[Sequence[int]] | None = None,
    pool_k: Tensor | None = None,
    pool_v: Tensor | None = None,
    rows: Iterable[int] | None = None,
    noise: Tensor | float = 0.0,
) -> tuple[RowKeys, ...]:
    """Decode the rows of out [Tq, Hq, D_v], in the target's dtype, that differ from the solution of ``problem``.

    page_size: keys of a page, which may be lost or exchanged as a whole. pages: physical page of each page of each
    request; pool_k [P, g, Hkv, D_qk] and pool_v [P, g, Hkv, D_v] (with pages): the pool, whose other slots a row may
    have read; they are descaled as the problem's keys are, and left out where descales are of tokens. rows: query rows
    to look at; all that differ, by default. noise: what the target's arithmetic may add to the rounding of the
    output, absolute, a number or [Tq, Hq, D_v].

    Heads that attended to the same keys are decoded together: a row comes back once, or once for each kv head or query
    head. Rows that are right do not come back. Works on the CPU. Raises ProblemError where the problem does not give
    every key.
    """
    cpu = torch.device("cpu")
    problem, out, noise = problem.to(cpu), out.to(cpu), torch.as_tensor(noise, dtype=torch.float64, device=cpu)
    pool_k, pool_v = (None if pool is None else pool.to(cpu) for pool in (pool_k, pool_v))
    if problem.kv_positions is not None:
        raise ProblemError("kv_positions: allowed is None, the decoder looks for keys among all of them")
    candidates = Candidates.of(problem, page_size, pages, pool_k, pool_v)
    solution = solve(problem)
    total = solution.lse if problem.sinks is None else lse_with_sink(solution.lse, problem.sinks)
    extra = noise.expand(out.shape)
    found: list[RowKeys] = []
    for row in range(out.shape[0]) if rows is None else rows:
        view = Row.of(candidates, row, widen(out[row]), solution.out[row], total[row], extra[row], out.dtype)
        if view is not None and not bool(view.right.all()):
            found += _decode_row(view)
    return tuple(found)


def _decode_row(row: Row) -> Iterator[RowKeys]:
    """All heads together if one set of keys explains them, else kv head by kv head, else head by head."""
    heads, group = row.out.shape[0], row.group
    splits = [[tuple(range(heads))], [tuple(range(h, h + group)) for h in range(0, heads, group)]]

    def explain(own: tuple[int, ...], level: int) -> Iterator[RowKeys]:
        if bool(row.right[list(own)].all()):
            return
        changes = search(row, own) if bool(row.out[list(own)].isfinite().all()) else None
        if changes is not None or len(own) == 1:
            yield RowKeys(row.index, row.request, own, len(own) == heads, changes)
            return
        finer = splits[level + 1] if level == 0 and group < heads else [(h,) for h in own]
        for part in finer:
            yield from explain(part, level + 1)

    yield from explain(splits[0][0], 0)
