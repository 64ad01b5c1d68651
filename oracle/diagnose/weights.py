"""The softmax weights of some rows over all keys of their request, hidden and stale ones too.

With weights, what a change of the keys does to a row is linear: if w is the weight of what is added (or taken away) and
n its weighted values, both in units of the row's whole weight, then

    (1 + w) out' = out + n        lse' = lse + log(1 + w)

so that out' is known once w and n are, and (1 + w) * returned - out - n is the error that a hypothesis leaves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from oracle.attention import Solution
from oracle.diagnose.model import Surroundings
from oracle.diagnose.quick import capped, times
from oracle.diagnose.rows import Row, chosen_factors, describe_rows, key_index
from oracle.diagnose.subject import Subject
from oracle.problem import Descale, Problem
from oracle.rounding import widen


@dataclass(frozen=True, eq=False)
class Weights:
    """R rows that share a request and a kv head, over n keys: those of the request, then `stale` ones past its end.

    rows: query of each; heads [R] its query head. p [R, n]: exp(logit) over the row's whole weight, sink included, of
    every key, seen or not; seen bool [R, n]. v [n, D_v]: values, descaled. out [R, D_v], lse [R]: as asked for.
    returned [R, D_v], returned_lse [R] or None, natural. noise [R], lse_noise [R]: standard deviation that rounding may
    have. bare [R]: weight of the keys seen, in the same unit: less than 1 where there is a sink.
    lse_share [R]: what the unit is of the weight that the log-sum-exp is of. full [R]: logarithm of the unit.
    q [R, D_qk]: times the scale, so that a logit before the cap is q . k; largest_key: the longest k.
    """

    request: int
    kv_head: int
    rows: tuple[Row, ...]
    heads: Tensor
    p: Tensor
    seen: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    returned: Tensor
    returned_lse: Tensor | None
    noise: Tensor
    lse_noise: Tensor
    bare: Tensor
    lse_share: Tensor
    full: Tensor
    q: Tensor
    largest_key: float
    soft_cap: float | None
    stale: int

    @property
    def count(self) -> int:
        """Keys of the request."""
        return self.p.shape[1] - self.stale

    @property
    def error(self) -> Tensor:
        """[R, D_v]."""
        return self.returned - self.out

    @property
    def lse_error(self) -> Tensor | None:
        """[R]."""
        return None if self.returned_lse is None else self.returned_lse - self.lse

    @property
    def growth(self) -> Tensor | None:
        """w [R] of what was added, as the log-sum-exp says."""
        error = self.lse_error
        return None if error is None else error.expm1() / self.lse_share

    def few(self, most: int) -> Weights:
        """At most `most` of the rows, evenly spaced."""
        if len(self.rows) <= most:
            return self
        return self.at(torch.linspace(0, len(self.rows) - 1, most).long())

    def at(self, index: Tensor) -> Weights:
        """Some of the rows."""
        names = ("heads", "p", "seen", "out", "lse", "returned", "noise", "lse_noise", "bare", "lse_share", "full", "q")
        lse = None if self.returned_lse is None else self.returned_lse[index]
        rows = tuple(self.rows[i] for i in index.tolist())
        return replace(self, rows=rows, returned_lse=lse, **{n: getattr(self, n)[index] for n in names})


def with_stale(problem: Problem, around: Surroundings) -> Problem:
    """The problem with the stale keys behind each request's own, and nothing hidden: for `Hypothesis.keys`.

    Queries keep their order, not their positions: rows are to be described by the problem as it was.
    """
    if around.stale is None or problem.kv_positions is not None:
        return replace(problem, causal=False, window=None)
    parts: dict[str, list[Tensor]] = {"k": [], "v": []}
    lens = []
    for request, (k, v) in enumerate(around.stale):
        own = slice(problem.kv_starts[request], problem.kv_starts[request + 1])
        parts["k"] += [problem.k[own], k.to(problem.k.dtype)]
        parts["v"] += [problem.v[own], v.to(problem.v.dtype)]
        lens.append(problem.kv_lens[request] + len(k))
    return replace(
        problem,
        k=torch.cat(parts["k"]),
        v=torch.cat(parts["v"]),
        kv_lens=tuple(lens),
        context_lens=None,
        causal=False,
        window=None,
        k_descale=_stretched(problem, "k_descale", lens),
        v_descale=_stretched(problem, "v_descale", lens),
    )


def _stretched(problem: Problem, name: str, lens: Sequence[int]) -> Descale:
    """Descales of tokens, that of a request's last token repeated for its stale slots."""
    descale: Descale = getattr(problem, name)
    if not isinstance(descale, Tensor) or descale.numel() == 1 or descale.shape[0] == 1:
        return descale
    index = [
        torch.arange(n).clamp(max=max(own - 1, 0)) + start
        for n, own, start in zip(lens, problem.kv_lens, problem.kv_starts, strict=False)
    ]
    return descale[torch.cat(index)]


def values(posed: Problem) -> Tensor:
    """Values [Tk, Hkv, D_v], descaled."""
    return times(posed.v, posed.v_descale)


def weights(
    subject: Subject, extended: Problem, base: Solution, request: int, kv_head: int, cells: Sequence[tuple[int, int]]
) -> Weights:
    """The weights of some (token, query head) of one request and kv head.

    extended: the problem `with_stale`. base: what was asked for, all rows.
    """
    problem = subject.problem
    tokens = [token for token, _ in cells]
    heads = torch.tensor([head for _, head in cells])
    rows = describe_rows(problem, tokens)
    every = torch.arange(extended.kv_lens[request])
    index = key_index(extended, request, every)
    posed = _one_request(extended, sorted(set(tokens)), index, kv_head)
    place = {token: i for i, token in enumerate(sorted(set(tokens)))}
    members = heads - kv_head * problem.group
    q = times(posed.q, posed.q_descale)[torch.tensor([place[t] for t in tokens]), members]
    k = times(posed.k, posed.k_descale)[:, 0]
    s = capped(q @ k.t(), problem)
    own = torch.tensor(tokens)
    out, lse = base.out[own, heads], base.lse[own, heads]
    key = torch.arange(s.shape[1])
    seen = torch.stack([(key >= row.lo) & (key < row.hi) for row in rows])
    masked = s.masked_fill(~seen, -math.inf)
    bare_lse = masked.logsumexp(-1)
    sinks = None if problem.sinks is None else problem.sinks.double()[heads]
    full = bare_lse if sinks is None else torch.logaddexp(bare_lse, sinks)
    full = full.masked_fill(full == -math.inf, 0.0)
    p = (s - full.unsqueeze(-1)).exp()
    bare = (bare_lse - full).exp()
    share = torch.ones_like(bare) if subject.convention.lse_includes_sink or sinks is None else 1 / bare
    returned = widen(subject.out[own, heads])
    spacing = torch.maximum(returned.abs(), out.abs()).nan_to_num(1.0, 1.0, 1.0).amax(-1) * _unit_of(subject)
    returned_lse = None if subject.lse is None else widen(subject.lse[own, heads]) / subject.unit
    return Weights(
        request=request,
        kv_head=kv_head,
        rows=tuple(rows),
        heads=heads,
        p=p,
        seen=seen,
        v=values(posed)[:, 0],
        out=out,
        lse=lse,
        returned=returned,
        returned_lse=returned_lse,
        noise=spacing.clamp(min=1e-300),
        lse_noise=2.0**-20 * (1 + lse.nan_to_num(0.0, 0.0, 0.0).abs()),
        bare=bare,
        lse_share=share,
        full=full,
        soft_cap=problem.soft_cap,
        q=q * posed.scale,
        largest_key=float(k[: problem.kv_lens[request]].norm(dim=-1).amax()),
        stale=extended.kv_lens[request] - problem.kv_lens[request],
    )


def _unit_of(subject: Subject) -> float:
    """Rough relative size of rounding in the output."""
    dtype = subject.out.dtype
    return float(torch.finfo(dtype).eps) / 2


def _one_request(problem: Problem, tokens: Sequence[int], index: Tensor, kv_head: int) -> Problem:
    """Some queries of a request against the keys `index`, one kv head, nothing hidden."""
    group = problem.group
    members = slice(kv_head * group, (kv_head + 1) * group)
    heads = slice(kv_head, kv_head + 1)
    own = torch.tensor(list(tokens))
    return Problem(
        q=problem.q[own, members],
        k=problem.k[:, heads][index],
        v=problem.v[:, heads][index],
        q_lens=(len(own),),
        kv_lens=(len(index),),
        context_lens=(max(len(index), len(own)),),
        scale=problem.scale,
        causal=False,
        soft_cap=problem.soft_cap,
        q_descale=chosen_factors(problem.q_descale, own, members, problem.q.shape[0]),
        k_descale=chosen_factors(problem.k_descale, index, heads, problem.k.shape[0]),
        v_descale=chosen_factors(problem.v_descale, index, heads, problem.v.shape[0]),
    )
