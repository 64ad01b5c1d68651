"""Hypotheses with a number of their own that is fitted: a factor of scale or values, a sink."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from oracle.attention import Solution
from oracle.budget import Bounds
from oracle.diagnose.hypothesis import Hypothesis
from oracle.diagnose.model import Kind
from oracle.diagnose.quick import View
from oracle.diagnose.rows import Row
from oracle.diagnose.scene import Scene
from oracle.problem import Problem
from oracle.rounding import widen

_STEPS = 6
_LARGEST = 1e4
"""Factors beyond it, or below its inverse, are no scales or descales."""
_SMALLEST = 1e-5
"""The least deviation of a factor from 1 that is spoken of."""


def hypotheses(scene: Scene, screen: tuple[int, int], tokens: Sequence[int]) -> Iterator[Hypothesis]:
    """screen: the token and kv head that numbers of a whole call are fitted to. tokens: for those of heads."""
    yield from _scale(scene, screen)
    yield from _values(scene, tokens)
    yield from _sinks(scene, tokens)


def _scale(scene: Scene, screen: tuple[int, int]) -> Iterator[Hypothesis]:
    problem = scene.subject.problem
    given = problem.scale
    kind = Kind.SCALE if problem.k_descale is None else Kind.K_DESCALE

    def make(factor: float) -> Hypothesis:
        return Hypothesis(
            kind,
            f"{kind}: logits are {factor:.5g} times those asked for",
            {"factor": factor},
            alter=lambda p: replace(p, scale=given * factor),
            fitted=1,
            uniform=True,
            rank=20,
        )

    factor = _fit_factor(scene, screen, make)
    if factor is not None and abs(factor - 1) > _SMALLEST and _LARGEST > abs(factor) > 1 / _LARGEST:
        yield make(factor)


def _fit_factor(scene: Scene, screen: tuple[int, int], make: Callable[[float], Hypothesis]) -> float | None:
    """Gauss-Newton over the failing rows of one query and kv head, by their errors over the bounds."""
    token, kv_head = screen
    subject, heads = scene.subject, scene.heads(kv_head)
    failing = scene.failing[token, heads]
    bounds = scene.part((token,), kv_head).bounds
    returned = widen(subject.out[token, heads])[failing]
    wide_lse = None if subject.lse is None else widen(subject.lse[token, heads])[failing] / subject.unit
    if not bool(returned.isfinite().all()) or (wide_lse is not None and not bool(wide_lse.isfinite().all())):
        return None
    spacing = returned.abs().amax().clamp(min=1e-30) * float(torch.finfo(subject.out.dtype).eps)
    noise = torch.sqrt(bounds.out[0][failing].clamp(max=1e30).square() + spacing.square())

    def residual(factor: float) -> Tensor:
        solution = make(factor).quick(subject, scene.quick, (token,), kv_head)
        parts = [((returned - solution.out[0][failing]) / noise).flatten()]
        if wide_lse is not None:
            parts.append((wide_lse - solution.lse[0][failing]) / bounds.lse[0][failing].clamp(min=1e-12, max=1e30))
        return torch.cat(parts).nan_to_num(0.0, 0.0, 0.0)

    factor = 1.0
    for _ in range(_STEPS):
        here, step = residual(factor), 1e-4 * max(abs(factor), 1e-3)
        slope = (residual(factor + step) - here) / step
        square = float(slope.square().sum())
        if square == 0 or not math.isfinite(square):
            return None
        move = -float(slope @ here) / square
        factor += max(-0.5, min(0.5, move))
        if abs(move) < 1e-7:
            break
    return factor


def _values(scene: Scene, tokens: Sequence[int]) -> Iterator[Hypothesis]:
    """Outputs times a factor, one for all or one for each kv head."""
    subject, problem = scene.subject, scene.subject.problem
    index = torch.tensor(list(tokens))
    returned, out = widen(subject.out[index]), scene.base.solution.out[index]
    usable = scene.failing[index] & returned.isfinite().all(-1) & (out.square().sum(-1) > 0)
    if not bool(usable.any()):
        return
    weight = usable.double() / out.square().sum(-1).clamp(min=1e-300)
    by_head = (len(tokens), problem.kv_heads, problem.group)
    top = ((returned.nan_to_num(0, 0, 0) * out).sum(-1) * weight).view(by_head).sum((0, 2))
    bottom = (out.square().sum(-1) * weight).view(by_head).sum((0, 2))
    failing = bottom > 0
    factors = torch.where(failing, top / bottom.clamp(min=1e-300), 1.0)
    common = float(top.sum() / bottom.sum())
    if abs(common - 1) > _SMALLEST and _LARGEST > abs(common) > 1 / _LARGEST:
        yield _valued(
            problem, f"v_descale: values are {common:.4g} times those asked for", torch.full_like(factors, common), 1
        )
    heads = failing.nonzero().flatten().tolist()
    usual = (factors.abs() < _LARGEST) & (factors.abs() > 1 / _LARGEST)
    if len(heads) > 1 and bool(usual.all()):
        words = ", ".join(f"{float(factors[h]):.4g} of kv head {h}" for h in heads[:4])
        yield _valued(problem, f"v_descale: values are times those asked for: {words}", factors, len(heads))


def _valued(problem: Problem, detail: str, factors: Tensor, fitted: int) -> Hypothesis:
    """Outputs times a factor for each kv head. As a descale it would widen the budget by a cast of the values."""
    by_head = factors.repeat_interleave(problem.group).unsqueeze(-1)

    def after(view: View, solution: Solution, rows: Sequence[Row]) -> Solution:
        return Solution(solution.out * by_head, solution.lse)

    def bounded(own: Bounds, rows: Sequence[Row]) -> Bounds:
        return replace(own, out=own.out * by_head.abs())

    return Hypothesis(
        Kind.V_DESCALE,
        detail,
        {"factors": factors.tolist()},
        after=after,
        bounded=bounded,
        whole=True,
        fitted=fitted,
        rank=20 + fitted,
    )


def _sinks(scene: Scene, tokens: Sequence[int]) -> Iterator[Hypothesis]:
    """Other sinks, one for each head, as its rows' outputs say: each is the one without a sink times a factor."""
    subject, problem = scene.subject, scene.subject.problem
    if problem.sinks is None:
        return
    sinks = problem.sinks.double()
    index = torch.tensor(list(tokens))
    out, lse = scene.base.solution.out[index], scene.base.solution.lse[index]
    if subject.convention.lse_includes_sink:
        lse = lse + torch.log1p(-(sinks - lse).clamp(max=-(2.0**-52)).exp())
    bare = out / torch.sigmoid(lse - sinks).unsqueeze(-1).clamp(min=1e-300)
    returned = widen(subject.out[index])
    usable = scene.failing[index] & returned.isfinite().all(-1) & (bare.square().sum(-1) > 0)
    share = (returned.nan_to_num(0, 0, 0) * bare).sum(-1) / bare.square().sum(-1).clamp(min=1e-300)
    usable &= (share > 0) & (share < 1) & lse.isfinite()
    counts = usable.sum(0)
    if not bool(counts.any()):
        return
    # share = sigmoid(lse - sink)
    found = torch.where(usable, lse - torch.logit(share.clamp(1e-12, 1 - 1e-12)), 0.0).sum(0) / counts.clamp(min=1)
    other = torch.where(counts > 0, found, sinks)
    heads = counts.nonzero().flatten().tolist()
    words = ", ".join(f"{float(other[h]):.4g} for {float(sinks[h]):.4g} (head {h})" for h in heads[:3])
    yield Hypothesis(
        Kind.SINK,
        f"sink: others than those given: {words}{', ...' if len(heads) > 3 else ''}",
        {"sinks": {str(h): float(other[h]) for h in heads}},
        alter=lambda p: replace(p, sinks=other),
        fitted=len(heads),
        rank=20,
    )
