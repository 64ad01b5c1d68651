"""Some rows of a problem, with the keys that each attends to made explicit."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from oracle.masking import key_order, key_ranges
from oracle.problem import Descale, Problem


@dataclass(frozen=True, eq=False)
class Row:
    """One query of a problem.

    token: its place among all queries; index: among those of its request. position: of the query.
    count: keys of the request, whose indices 0 .. count - 1 are in order of position.
    It sees lo <= j < hi.
    """

    token: int
    request: int
    index: int
    queries: int
    position: int
    count: int
    lo: int
    hi: int


Keys = Callable[[Row], Tensor]
"""Which keys a row attends to, int64, in any order, repeated if they count twice; indices as in `Row`."""


def request_of(problem: Problem, token: int) -> int:
    """The request that owns a query."""
    return bisect_right(problem.q_starts, token) - 1


def describe_rows(problem: Problem, tokens: Sequence[int]) -> list[Row]:
    """The rows of some queries."""
    shape = (problem.q_lens, problem.kv_lens, problem.contexts, problem.causal, problem.window)
    if problem.kv_positions is None:
        return list(_described_before(*shape, None, tuple(tokens)))
    positions = problem.positions()
    own = tuple(positions[a:b].sort().values for a, b in pairwise(problem.kv_starts))
    return list(_described(*shape, own, tuple(tokens)))


def _described(
    q_lens: tuple[int, ...],
    kv_lens: tuple[int, ...],
    contexts: tuple[int, ...],
    causal: bool,
    window: int | None,
    positions: tuple[Tensor, ...] | None,
    tokens: tuple[int, ...],
) -> tuple[Row, ...]:
    found = []
    starts = (0, *accumulate(q_lens))
    ranges = {}
    for token in tokens:
        request = bisect_right(starts, token) - 1
        if request not in ranges:
            ranges[request] = key_ranges(
                [q_lens[request]],
                [kv_lens[request]],
                [contexts[request]],
                causal=causal,
                window=window,
                positions=None if positions is None else [positions[request]],
            )
        index = token - starts[request]
        found.append(
            Row(
                token=token,
                request=request,
                index=index,
                queries=q_lens[request],
                position=contexts[request] - q_lens[request] + index,
                count=kv_lens[request],
                lo=int(ranges[request].lo[0, index]),
                hi=int(ranges[request].hi[0, index]),
            )
        )
    return tuple(found)


_described_before = lru_cache(maxsize=64)(_described)
"""Hypotheses ask for the rows of few shapes again and again. Not for given positions: tensors are no keys."""


def visible(row: Row) -> Tensor:
    """The keys that a row is to see."""
    return torch.arange(row.lo, row.hi)


def key_index(problem: Problem, request: int, keys: Tensor) -> Tensor:
    """Where keys of a request, in order of position, lie among all keys of the problem."""
    start = problem.kv_starts[request]
    if problem.kv_positions is not None:
        order = key_order(problem.positions()[start : problem.kv_starts[request + 1]], [problem.kv_lens[request]])
        if order is not None:
            keys = order[keys]
    return keys + start


def rows_of(problem: Problem, tokens: Sequence[int], keys: Keys = visible, kv_head: int | None = None) -> Problem:
    """A problem whose requests are single queries, each with the keys it attends to and no mask.

    kv_head: only the query heads that read this kv head.
    """
    rows = describe_rows(problem, tokens)
    chosen = [keys(row) for row in rows]
    counts = tuple(len(x) for x in chosen)
    index = torch.cat([key_index(problem, row.request, x) for row, x in zip(rows, chosen, strict=True)])
    heads = slice(0, problem.kv_heads) if kv_head is None else slice(kv_head, kv_head + 1)
    members = slice(heads.start * problem.group, heads.stop * problem.group)
    token_index = torch.tensor(list(tokens), dtype=torch.int64)
    return Problem(
        q=problem.q[token_index, members],
        k=problem.k[:, heads][index],
        v=problem.v[:, heads][index],
        q_lens=(1,) * len(rows),
        kv_lens=counts,
        scale=problem.scale,
        causal=False,
        window=None,
        sinks=None if problem.sinks is None else problem.sinks[members],
        soft_cap=problem.soft_cap,
        q_descale=chosen_factors(problem.q_descale, token_index, members, problem.q.shape[0]),
        k_descale=chosen_factors(problem.k_descale, index, heads, problem.k.shape[0]),
        v_descale=chosen_factors(problem.v_descale, index, heads, problem.v.shape[0]),
    )


def chosen_factors(descale: Descale, tokens: Tensor, heads: slice, count: int) -> Descale:
    """The descale factors of some tokens and heads. count: of all tokens."""
    if not isinstance(descale, Tensor) or descale.numel() == 1:
        return descale
    own = descale if descale.shape[1] == 1 else descale[:, heads]
    return own if own.shape[0] == 1 and count != 1 else own[tokens] if own.shape[0] == count else own
