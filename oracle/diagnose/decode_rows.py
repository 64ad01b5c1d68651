"""A query row, every key that it may have read, and what reading one more of each would do to its output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from oracle.budget.formats import FORMAT_OF_DTYPE
from oracle.diagnose.decoded import Key
from oracle.masking import key_ranges
from oracle.problem import Descale, Problem
from oracle.rounding import widen

ARITHMETIC = 2.0**-20
"""What a target's float32 arithmetic may add to the rounding of its output, relative to sum p |v|."""


@dataclass(frozen=True, eq=False)
class Candidates:
    """Every key that a row may have read: those of all requests in order, then slots that hold none, ascending."""

    problem: Problem
    k: Tensor
    v: Tensor
    q: Tensor
    identity: tuple[Key, ...]
    page_size: int | None
    lo: Tensor
    hi: Tensor
    by_page: dict[int, list[tuple[int, int]]]
    """Candidates of each page, as ranges in the order of their place in the page. Pages are physical ones where they
    are known, else counted through all requests."""
    page_of: tuple[tuple[int, ...], ...]
    """Page of each page of each request."""

    @staticmethod
    def of(
        problem: Problem,
        page_size: int | None,
        pages: Sequence[Sequence[int]] | None,
        pool_k: Tensor | None,
        pool_v: Tensor | None,
    ) -> Candidates:
        g = page_size
        k, v = _descaled(problem.k, problem.k_descale), _descaled(problem.v, problem.v_descale)
        identity = []
        for request, length in enumerate(problem.kv_lens):
            for position in range(length):
                slot = -1 if g is None or pages is None else pages[request][position // g] * g + position % g
                identity.append(Key(request, position, slot))
        uniform = _uniform(problem.k_descale) and _uniform(problem.v_descale)
        if g is not None and pages is not None and pool_k is not None and pool_v is not None and uniform:
            held = torch.tensor([key.slot for key in identity], dtype=torch.int64)
            free = torch.ones(pool_k.shape[0] * pool_k.shape[1], dtype=torch.bool)
            free[held] = False
            slots = free.nonzero().squeeze(1)
            k = torch.cat([k, _descaled(pool_k.flatten(0, 1)[slots], problem.k_descale)])
            v = torch.cat([v, _descaled(pool_v.flatten(0, 1)[slots], problem.v_descale)])
            identity += [Key(-1, -1, slot) for slot in slots.tolist()]
        page_of = _page_numbers(problem, g, pages)
        lens = problem.q_lens, problem.kv_lens, problem.contexts
        ranges = key_ranges(*lens, causal=problem.causal, window=problem.window)
        return Candidates(
            problem,
            k,
            v,
            _descaled(problem.q, problem.q_descale),
            tuple(identity),
            g,
            ranges.lo,
            ranges.hi,
            _by_page(problem, g, page_of, identity),
            page_of,
        )


def _page_numbers(
    problem: Problem, g: int | None, pages: Sequence[Sequence[int]] | None
) -> tuple[tuple[int, ...], ...]:
    if g is None:
        return tuple(() for _ in problem.kv_lens)
    if pages is not None:
        return tuple(tuple(own) for own in pages)
    counts = [-(-n // g) for n in problem.kv_lens]
    starts = [sum(counts[:i]) for i in range(len(counts))]
    return tuple(tuple(range(start, start + count)) for start, count in zip(starts, counts, strict=True))


def _by_page(
    problem: Problem, g: int | None, page_of: tuple[tuple[int, ...], ...], identity: Sequence[Key]
) -> dict[int, list[tuple[int, int]]]:
    if g is None:
        return {}
    found: dict[int, list[tuple[int, int]]] = {}
    for request, own in enumerate(page_of):
        start, length = problem.kv_starts[request], problem.kv_lens[request]
        for i, page in enumerate(own):
            found.setdefault(page, []).append((start + i * g, start + min((i + 1) * g, length)))
    at = problem.kv_starts[-1]
    while at < len(identity):
        page, first = identity[at].slot // g, at
        while at < len(identity) and identity[at].slot // g == page:
            at += 1
        found.setdefault(page, []).append((first, at))
    return found


def _descaled(x: Tensor, factor: Descale) -> Tensor:
    values = widen(x)
    if factor is None:
        return values
    if isinstance(factor, Tensor) and factor.numel() > 1:
        return values * factor.double()[..., None]
    return values * float(factor)


def _uniform(factor: Descale) -> bool:
    return not isinstance(factor, Tensor) or factor.numel() == 1 or factor.shape[0] == 1


@dataclass(frozen=True, eq=False)
class Row:
    """A query row, which sees the candidates first .. last - 1.

    out, wanted [Hq, D_v]: what was returned, and what was asked for. p [Hq, N]: weight of each candidate, seen or not,
    in units of the row's whole weight. tolerance [Hq, D_v]: what rounding may do.
    """

    candidates: Candidates
    index: int
    request: int
    first: int
    last: int
    out: Tensor
    wanted: Tensor
    p: Tensor
    tolerance: Tensor

    @staticmethod
    def of(
        candidates: Candidates,
        index: int,
        out: Tensor,
        wanted: Tensor,
        total: Tensor,
        noise: Tensor,
        dtype: torch.dtype,
    ) -> Row | None:
        """None for a row without a visible key."""
        problem = candidates.problem
        request = next(r for r, (a, b) in enumerate(pairwise(problem.q_starts)) if a <= index < b)
        within, start = index - problem.q_starts[request], problem.kv_starts[request]
        lo, hi = int(candidates.lo[request, within]), int(candidates.hi[request, within])
        if lo == hi:
            return None
        q = candidates.q[index].unflatten(0, (problem.kv_heads, problem.group))
        s = torch.einsum("hgd,nhd->hgn", q, candidates.k).flatten(0, 1) * problem.scale
        if problem.soft_cap is not None:
            s = problem.soft_cap * torch.tanh(s / problem.soft_cap)
        p = (s - total[:, None]).exp()
        seen = slice(start + lo, start + hi)
        size = torch.einsum("hgn,nhd->hgd", p[:, seen].unflatten(0, q.shape[:2]), candidates.v[seen].abs())
        fmt = FORMAT_OF_DTYPE[dtype]
        rounding = torch.clamp(out.abs() * fmt.unit_roundoff, min=fmt.half_subnormal)
        tolerance = rounding + ARITHMETIC * size.flatten(0, 1) + noise
        return Row(candidates, index, request, start + lo, start + hi, out, wanted, p, tolerance)

    @property
    def group(self) -> int:
        """Query heads to a kv head."""
        return self.candidates.problem.group

    @cached_property
    def right(self) -> Tensor:
        """Heads whose output is what was asked for, as far as rounding lets one tell: bool [Hq]."""
        return ((self.out - self.wanted).abs() <= self.tolerance).all(1)

    def moves(self, heads: Sequence[int]) -> tuple[Tensor, Tensor]:
        """What one more of each candidate does to elements of some heads [N, heads * D_v], and how far off they are.

        In units of the tolerance, or of an eighth of what a key that the row sees does, where that is more: an element
        that rounding leaves nearly exact shall not outvote the others.
        """
        moves, goals = [], []
        for head in heads:
            move = self.p[head, :, None] * (self.candidates.v[:, head // self.group] - self.out[head])
            unit = torch.maximum(self.tolerance[head], move[self.first : self.last].abs().mean(0) / 8)
            moves.append(move / unit)
            goals.append((self.out[head] - self.wanted[head]) / unit)
        return torch.cat(moves, 1), torch.cat(goals)

    def fits(self, counts: dict[int, int], heads: Sequence[int]) -> bool:
        """Whether counting candidates so many times more than asked for gives what was returned."""
        index = torch.tensor(list(counts), dtype=torch.int64)
        times = torch.tensor([counts[i] for i in index.tolist()], dtype=torch.float64)
        own = list(heads)
        p = self.p[own][:, index] * times
        v = self.candidates.v[index][:, [head // self.group for head in own]]
        predicted = (self.wanted[own] + torch.einsum("hn,nhd->hd", p, v)) / (1 + p.sum(1, keepdim=True))
        return bool(((predicted - self.out[own]).abs() <= self.tolerance[own]).all())
