"""Hypotheses about places: heads, queries and kv heads read or written in another's place, or left from before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from oracle.attention import Solution
from oracle.budget import Bounds
from oracle.diagnose.hypothesis import Hypothesis
from oracle.diagnose.model import Kind
from oracle.diagnose.quick import Quick, View
from oracle.diagnose.rows import Row
from oracle.diagnose.scene import Scene
from oracle.problem import Problem
from oracle.rounding import widen

_KV_HEADS = 16


def hypotheses(scene: Scene, tokens: Sequence[int]) -> Iterator[Hypothesis]:
    """Proposals for the failing rows among `tokens`."""
    yield from _empty(scene)
    yield from _exchanged(scene)
    yield from _earlier(scene)
    yield from _lse_axes(scene)
    yield from _kv_heads(scene, tokens)
    yield from _pairing(scene.subject.problem)


def _empty(scene: Scene) -> Iterator[Hypothesis]:
    """Rows without a visible key hold something else than they must."""
    empty = scene.base.bounds.keys == 0
    rows = scene.failing.any(1)
    if not bool(rows.any()) or bool((rows & ~empty).any()):
        return
    out = scene.subject.out[rows]
    held = "NaN" if bool(widen(out).isnan().any()) else "other numbers"
    index = rows.nonzero().flatten().tolist()

    def as_returned(view: View, solution: Solution, rows: Sequence[Row]) -> Solution:
        return solution

    yield Hypothesis(
        Kind.EMPTY_ROW,
        f"empty_row: rows without a visible key hold {held}",
        {"holds": held, "tokens": index[:8]},
        after=as_returned,
        given=True,
    )


def _exchanged(scene: Scene) -> Iterator[Hypothesis]:
    """Failing rows that hold what was asked for elsewhere."""
    subject, solution = scene.subject, scene.base.solution
    cells = scene.failing.nonzero()
    out = widen(subject.out)
    if not len(cells) or solution.out.numel() > 1 << 24:
        return
    flat = solution.out.flatten(0, 1)
    heads = solution.out.shape[1]
    source = torch.arange(len(flat)).view(solution.out.shape[:2]).clone()
    for token, head in cells.tolist():
        row = out[token, head]
        if not bool(row.isfinite().all()):
            return
        distance = (flat - row).square().sum(-1)
        if subject.lse is not None:
            # An lse in its own place leaves the choice to the outputs.
            error = (solution.lse - widen(subject.lse[token, head]) / subject.unit).abs().flatten()
            distance = distance + error.nan_to_num(1e3, 1e3, 1e3).square() * 1e-3
        source[token, head] = int(distance.argmin())
    here = torch.arange(len(flat)).view(source.shape)
    if bool((source == here)[scene.failing].any()):
        return
    chosen = source[scene.failing]
    from_token, from_head = chosen // heads, chosen % heads
    to_token, to_head = cells.unbind(1)
    kind = Kind.HEAD if bool((from_token == to_token).all()) else Kind.ROW
    pairs = sorted(set(zip(to_head.tolist(), from_head.tolist(), strict=True)))
    if kind is Kind.ROW:
        pairs = sorted(set(zip(to_token.tolist(), from_token.tolist(), strict=True)))
    noun = "head" if kind is Kind.HEAD else "query"
    words = ", ".join(f"{a} holds {b}" for a, b in pairs[:4])
    yield _moved(scene, source, kind, f"{kind}: the output of another {noun}: {noun} {words}", pairs)


def _moved(scene: Scene, source: Tensor, kind: Kind, detail: str, pairs: Sequence[tuple[int, int]]) -> Hypothesis:
    solution, bounds = scene.base.solution, scene.base.bounds
    heads = solution.out.shape[1]

    def of(rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
        chosen = source[torch.tensor([row.token for row in rows])]
        return chosen // heads, chosen % heads

    def after(view: View, own: Solution, rows: Sequence[Row]) -> Solution:
        token, head = of(rows)
        return Solution(solution.out[token, head], solution.lse[token, head])

    def bounded(own: Bounds, rows: Sequence[Row]) -> Bounds:
        token, head = of(rows)
        return replace(own, out=bounds.out[token, head], lse=bounds.lse[token, head])

    return Hypothesis(kind, detail, {"holds": {str(a): b for a, b in pairs}}, after=after, bounded=bounded, whole=True)


def _earlier(scene: Scene) -> Iterator[Hypothesis]:
    """Failing rows that hold, bit for bit, what an earlier call returned there."""
    earlier, out = scene.around.earlier, scene.subject.out
    if earlier is None or earlier.shape[1:] != out.shape[1:] or earlier.dtype != out.dtype:
        return
    rows = min(len(earlier), len(out))
    same = torch.zeros_like(scene.failing)
    same[:rows] = (widen(earlier[:rows].to("cpu")) == widen(out[:rows])).all(-1)
    if bool((scene.failing & ~same).any()):
        return
    yield Hypothesis(
        Kind.ROW, "row: left from an earlier call", {"earlier": True}, after=lambda view, s, rows: s, given=True
    )


def _lse_axes(scene: Scene) -> Iterator[Hypothesis]:
    """The log-sum-exp stored with its axes exchanged."""
    solution, bounds = scene.base.solution, scene.base.bounds
    tokens, heads = solution.lse.shape
    if scene.subject.lse is None or tokens < 2 or heads < 2:
        return
    other, radius = (x.t().reshape(tokens, heads) for x in (solution.lse, bounds.lse))

    def after(view: View, own: Solution, rows: Sequence[Row]) -> Solution:
        return Solution(own.out, other[torch.tensor([row.token for row in rows])])

    def bounded(own: Bounds, rows: Sequence[Row]) -> Bounds:
        return replace(own, lse=radius[torch.tensor([row.token for row in rows])])

    yield Hypothesis(
        Kind.LSE,
        "lse: its axes, tokens and heads, are exchanged",
        {"axes": "exchanged"},
        after=after,
        bounded=bounded,
        whole=True,
    )


def _kv_heads(scene: Scene, tokens: Sequence[int]) -> Iterator[Hypothesis]:
    """Query heads that read another kv head: of K and V, or of one of them."""
    problem = scene.subject.problem
    count = problem.kv_heads
    if count < 2 or count > _KV_HEADS:
        return
    if problem.group > 1:
        yield _by_remainder(problem)
    failing = sorted({int(h) // problem.group for h in scene.failing.any(0).nonzero().flatten()})
    for names in (("k", "v"), ("k",), ("v",)):
        order = list(range(count))
        for kv_head in failing:
            order[kv_head] = _best_kv_head(scene, tokens, kv_head, names)
        moved = [(a, b) for a, b in enumerate(order) if a != b]
        if moved:
            words = ", ".join(f"{b} where {a} belongs" for a, b in moved[:4])
            yield Hypothesis(
                Kind.HEAD,
                f"head: {' and '.join(n.upper() for n in names)} of another kv head is read: {words}",
                {"read": {str(a): b for a, b in moved}, "operands": list(names)},
                alter=_reads(names, order),
                rank=1 if len(names) == 2 else 2,
            )


def _reads(names: Sequence[str], order: Sequence[int]) -> Callable[[Problem], Problem]:
    def alter(p: Problem) -> Problem:
        changed = {}
        for name in names:
            changed[name] = getattr(p, name)[:, list(order)]
            descale = getattr(p, f"{name}_descale")
            if isinstance(descale, Tensor) and descale.ndim == 2 and descale.shape[1] > 1:
                changed[f"{name}_descale"] = descale[:, list(order)]
        return replace(p, **changed)

    return alter


def _best_kv_head(scene: Scene, tokens: Sequence[int], kv_head: int, names: Sequence[str]) -> int:
    """The kv head that explains the first failing row of a kv head best; itself if it cannot be told."""
    subject, problem = scene.subject, scene.subject.problem
    heads = scene.heads(kv_head)
    rows = [t for t in tokens if bool(scene.failing[t, heads].any())]
    if not rows:
        return kv_head
    token = rows[0]
    failing = scene.failing[token, heads]
    best, least = kv_head, float("inf")
    for other in range(problem.kv_heads):
        if other == kv_head:
            continue
        order = list(range(problem.kv_heads))
        order[kv_head] = other
        h = Hypothesis(Kind.HEAD, "", alter=_reads(names, order))
        solution = h.quick(subject, Quick(), (token,), kv_head)
        error = (widen(subject.out[token, heads]) - solution.out[0])[failing].square().sum()
        if float(error) < least:
            best, least = other, float(error)
    return best


def _by_remainder(problem: Problem) -> Hypothesis:
    """Query head h reads kv head h mod Hkv."""
    head = torch.arange(problem.q_heads)
    slot = head % problem.kv_heads * problem.group + head // problem.kv_heads
    order = slot.argsort()

    def alter(p: Problem) -> Problem:
        descale = p.q_descale
        by_head = isinstance(descale, Tensor) and descale.ndim == 2 and descale.shape[1] > 1
        return replace(
            p,
            q=p.q[:, order],
            sinks=None if p.sinks is None else p.sinks[order],
            q_descale=descale[:, order] if by_head and isinstance(descale, Tensor) else descale,
        )

    return Hypothesis(
        Kind.HEAD,
        "head: query head h reads kv head h mod Hkv",
        {"map": "h % Hkv"},
        alter=alter,
        after=lambda view, s, rows: Solution(s.out[:, slot], s.lse[:, slot]),
        bounded=lambda own, rows: replace(own, out=own.out[:, slot], lse=own.lse[:, slot]),
        whole=True,
        rank=1,
    )


def _pairing(problem: Problem) -> Iterator[Hypothesis]:
    """Values paired with the keys of their neighbours."""
    for step, what in ((1, "after"), (-1, "before")):

        def alter(p: Problem, step: int = step) -> Problem:
            parts = [own.roll(step, 0) for own in p.v.split(list(p.kv_lens))]
            return replace(p, v=torch.cat(parts))

        yield Hypothesis(
            Kind.ROW,
            f"row: each value belongs to the key {what} the one that it is read for",
            {"operand": "v", "shift": step},
            alter=alter,
            rank=1,
        )
