"""Hypotheses about precision: an intermediate result held in a narrower dtype than the target's precision says.

Rounding is worked out step by step, with the tiles and parts of `oracle.diagnose.parts`: a hypothesis is named only if
the very numbers that it gives come back. A kernel that rounds in another order gives others: `allowances` are the
precisions by whose budgets errors of that size are no more than roundings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from oracle.attention import Solution
from oracle.budget.formats import FORMATS, format_named
from oracle.diagnose.hypothesis import Hypothesis
from oracle.diagnose.model import Kind
from oracle.diagnose.parts import row_by_row, seen_cuts, with_sink
from oracle.diagnose.quick import times, weighted
from oracle.diagnose.rows import Row
from oracle.diagnose.scene import Scene
from oracle.diagnose.subject import Subject
from oracle.precision import Precision
from oracle.problem import Problem
from oracle.rounding import round_to, widen

_CHUNK = 16
"""Keys that one matrix instruction takes."""


def hypotheses(scene: Scene) -> Iterator[Hypothesis]:
    """All of them; none depends on what was returned."""
    yield from _queries(scene)
    yield from _logits(scene)
    yield from _steps(scene)


@dataclass(frozen=True)
class Allowance:
    """A precision in which one stage is narrower than the target's precision says."""

    stage: str
    dtype: str
    precision: Precision

    @property
    def detail(self) -> str:
        """In words."""
        return f"precision: errors as large as those of {self.stage} in {self.dtype}"


def allowances(subject: Subject) -> Iterator[Allowance]:
    """Narrower precisions, in the dtype of the query, or, where that is no such one, in those of 16 bits."""
    own, precision = subject.input_dtype, subject.precision
    split = precision.max_splits > 1 or precision.ranks > 1
    for dtype in (own,) if own in ("bf16", "fp16") else ("fp16", "bf16"):
        if narrower(dtype, precision.logit_dtype, own):
            yield Allowance("logits", dtype, replace(precision, logit_dtype=dtype))
        if narrower(dtype, precision.p_dtype, own):
            yield Allowance("weights", dtype, replace(precision, p_dtype=dtype))
        if split and narrower(dtype, precision.partial_dtype, own):
            yield Allowance("partial results", dtype, replace(precision, partial_dtype=dtype))


def cast(x: Tensor, dtype: str | None) -> Tensor:
    """Float64 x rounded once to a dtype, and back."""
    return x if dtype is None or dtype == "fp32" else widen(round_to(x, FORMATS[dtype].dtype))


def narrower(dtype: str, than: str | None, input_dtype: str) -> bool:
    """Whether a dtype has fewer digits than the one allowed (None: float32)."""
    allowed = format_named(than or "fp32", input_dtype)
    return FORMATS[dtype].unit_roundoff > allowed.unit_roundoff


def _queries(scene: Scene) -> Iterator[Hypothesis]:
    """The scaled query in the dtype of a matrix unit."""
    problem = scene.subject.problem

    def scaled(dtype: str, factor: float) -> Callable[[Problem], Problem]:
        to = FORMATS[dtype].dtype
        return lambda p: replace(
            p, q=round_to(times(p.q, p.q_descale) * (p.scale * factor), to), q_descale=None, scale=1 / factor
        )

    for dtype in ("bf16", "fp16"):
        for rank, (factor, what) in enumerate(((1.0, "scale"), (math.log2(math.e), "scale times log2(e)"))):
            if problem.scale:
                yield Hypothesis(
                    Kind.PRECISION,
                    f"precision: the query times the {what} is rounded to {dtype}",
                    {"stage": "scaled query", "dtype": dtype},
                    alter=scaled(dtype, factor),
                    rank=rank,
                )


def _logits(scene: Scene) -> Iterator[Hypothesis]:
    """Scores or logits in a narrower dtype."""
    subject = scene.subject
    includes = subject.convention.lse_includes_sink
    for dtype in ("bf16", "fp16"):
        if not narrower(dtype, subject.precision.logit_dtype, subject.input_dtype):
            continue
        for rank, stage in enumerate(("scores", "scaled logits", "capped logits")):
            if stage == "capped logits" and subject.problem.soft_cap is None:
                continue

            def one(
                row: Row,
                s: Tensor,
                v: Tensor,
                own: Solution,
                sinks: Tensor | None,
                dtype: str = dtype,
                stage: str = stage,
            ) -> tuple[Tensor, Tensor]:
                rounded = _rounded(subject.problem, s, dtype, stage)
                lse = rounded.logsumexp(-1)
                whole = with_sink(lse, sinks, True)
                weight = (rounded - whole.masked_fill(whole == -math.inf, 0.0).unsqueeze(-1)).exp()
                return weighted(weight, v), with_sink(lse, sinks, includes)

            yield Hypothesis(
                Kind.PRECISION,
                f"precision: {stage} are held in {dtype}",
                {"stage": stage, "dtype": dtype},
                after=row_by_row(one),
                rank=rank,
            )


def _rounded(problem: Problem, s: Tensor, dtype: str, stage: str) -> Tensor:
    """Logits [H, n] of which one stage was rounded."""
    cap = problem.soft_cap
    if stage == "capped logits":
        return cast(s, dtype)
    raw = s if cap is None else torch.atanh((s / cap).clamp(-1, 1)) * cap
    # Where the cap saturates in float64 the raw logit is lost, and its rounding with it.
    raw = raw.masked_fill(raw.isinf(), math.nan)
    factor = problem.scale if stage == "scores" else 1.0
    if not factor:
        return s
    rounded = cast(raw / factor, dtype) * factor
    capped = rounded if cap is None else (rounded / cap).tanh() * cap
    return torch.where(raw.isnan(), s, capped)


@dataclass(frozen=True, kw_only=True)
class Steps:
    """The dtypes of the online softmax. acc: of the accumulator, rounded after every `_CHUNK` keys."""

    p: str | None
    p_scale: float
    acc: str | None = None
    partial: str | None = None


def _steps(scene: Scene) -> Iterator[Hypothesis]:
    subject = scene.subject
    precision = subject.precision
    allowed = Steps(
        p=None if precision.p_dtype is None else format_named(precision.p_dtype, subject.input_dtype).name,
        p_scale=precision.p_scale,
        partial=format_named(precision.partial_dtype, subject.input_dtype).name,
    )
    for dtype in ("bf16", "fp16", "e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz"):
        if narrower(dtype, allowed.p, subject.input_dtype):
            yield _stepwise(scene, replace(allowed, p=dtype), f"weights are cast to {dtype}", "weights", dtype, 0)
    if allowed.p is not None and allowed.p.startswith("e") and allowed.p_scale != 1:
        changed = replace(allowed, p_scale=1.0)
        yield _stepwise(scene, changed, f"weights are cast to {allowed.p} without their scale", "weights", allowed.p, 0)
    for dtype in ("bf16", "fp16"):
        if narrower(dtype, allowed.partial, subject.input_dtype):
            what = f"partial results are stored in {dtype}"
            yield _stepwise(scene, replace(allowed, partial=dtype), what, "partials", dtype, 1)
        changed, what = replace(allowed, acc=dtype), f"values are accumulated in {dtype}"
        yield _stepwise(scene, changed, what, "accumulator", dtype, 2)


def _stepwise(scene: Scene, steps: Steps, what: str, stage: str, dtype: str, rank: int) -> Hypothesis:
    includes = scene.subject.convention.lse_includes_sink
    size = scene.around.tile or scene.subject.precision.tile

    def one(row: Row, s: Tensor, v: Tensor, own: Solution, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        cuts = sorted(set(seen_cuts(scene, row)))
        if len(cuts) < 2:
            return own.out, own.lse
        parts, states = online(s, v, row.lo, cuts, size, steps)
        if len(parts) > 1:
            states = cast(states, steps.partial)
        lse = parts.logsumexp(0)
        share = (parts - with_sink(lse, sinks, True)).exp()
        return (share.unsqueeze(-1) * states).sum(0), with_sink(lse, sinks, includes)

    return Hypothesis(
        Kind.PRECISION,
        f"precision: {what}",
        {"stage": stage, "dtype": dtype},
        after=row_by_row(one),
        rank=3 + rank,
    )


def online(s: Tensor, v: Tensor, first: int, cuts: Sequence[int], size: int, steps: Steps) -> tuple[Tensor, Tensor]:
    """Log-sum-exp [N, H] and output [N, H, D_v] of N parts of a row's keys, each in tiles of `size`.

    first: position of the first key, tiles begin at multiples of their size. cuts: where parts begin, and their end.
    """
    position = torch.arange(first, first + s.shape[1])
    tiles, tile = _runs(position // size, cuts)
    part_of = torch.bucketize(torch.tensor(tiles[:-1]), torch.tensor(cuts), right=True) - 1
    largest = torch.stack([s[:, a:b].amax(-1) for a, b in pairwise(tiles)], 1)
    # A tile's weights are formed against the largest logit so far, and lose what later tiles raise it by.
    tops = torch.cat([own.cummax(1).values for own in largest.split(torch.bincount(part_of).tolist(), 1)], 1)
    last = torch.bincount(part_of).cumsum(0) - 1
    lost = (tops - tops[:, last[part_of]]).exp()[:, tile]
    weight = (s - tops[:, tile]).exp()
    total = torch.stack([x.sum(-1) for x in (weight * lost).split(_sizes(cuts), 1)])
    rounded = cast(weight * steps.p_scale, steps.p)
    if steps.acc is None:
        acc = torch.stack([weighted((rounded * lost)[:, a:b], v[a:b]) for a, b in pairwise(cuts)])
    else:
        raised = torch.cat([tops[:, :1] * 0, tops[:, :-1] - tops[:, 1:]], 1).exp()
        acc = _accumulated(rounded, v, _runs(position // _CHUNK, tiles)[0], cuts, (tiles, raised), steps.acc)
    return tops[:, last].t() + total.log(), acc / (total * steps.p_scale).unsqueeze(-1)


def _sizes(cuts: Sequence[int]) -> list[int]:
    return [b - a for a, b in pairwise(cuts)]


def _runs(label: Tensor, cuts: Sequence[int]) -> tuple[list[int], Tensor]:
    """Where the label [n] changes or a cut lies, with both ends, and which of these runs each index is in."""
    changes = (label[1:] != label[:-1]).nonzero().flatten() + 1
    ends = sorted({*cuts, *changes.tolist()})
    return ends, torch.repeat_interleave(torch.arange(len(ends) - 1), torch.tensor(_sizes(ends)))


def _accumulated(
    p: Tensor, v: Tensor, chunks: Sequence[int], cuts: Sequence[int], tiles: tuple[Sequence[int], Tensor], dtype: str
) -> Tensor:
    """Sums [N, H, D_v] of the values of each part with weights p [H, n], rounded after every chunk.

    tiles: where they begin, and what each one's maximum leaves of the sum so far [H, tiles]. Parts go side by side; one
    that has fewer chunks adds zeros at its end, which change nothing.
    """
    starts, keep = {a: i for i, a in enumerate(tiles[0][:-1])}, tiles[1]
    by_part = [[(a, b) for a, b in pairwise(chunks) if c <= a < d] for c, d in pairwise(cuts)]
    acc = v.new_zeros(len(by_part), p.shape[0], v.shape[2])
    for step in range(max(map(len, by_part))):
        added, kept = torch.zeros_like(acc), p.new_ones(len(by_part), p.shape[0])
        for i, own in enumerate(by_part):
            if step < len(own):
                a, b = own[step]
                added[i] = weighted(p[:, a:b], v[a:b])
                if step and a in starts:
                    kept[i] = keep[:, starts[a]]
        acc = cast(acc * kept.unsqueeze(-1) + added, dtype)
    return acc
