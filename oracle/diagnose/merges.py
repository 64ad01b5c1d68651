"""Why a merge of partial states is wrong: counterfactual merges, each tried on every row."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from oracle.budget import Bounds
from oracle.budget.bound import CONFIDENCE
from oracle.budget.formats import FORMAT_OF_DTYPE
from oracle.budget.merge import merge_bounds
from oracle.diagnose.model import Diagnosis, Kind
from oracle.diagnose.subject import Compared, Fit
from oracle.kinds import LseBase
from oracle.merge import merge_states
from oracle.precision import Precision, Rounding
from oracle.rounding import widen

DECISIVE = 14.0
"""As in `oracle.diagnose.search`."""
RUNNERS_UP = 3

States = tuple[Tensor, Tensor]
"""outs [N, T, H, D] and lses [N, T, H], float64."""


@dataclass(frozen=True, eq=False)
class _Merge:
    """Another merge: what became of the states, and of the result."""

    kind: Kind
    detail: str
    states: Callable[[States], States] = lambda states: states
    result: Callable[[States, States], States] = lambda states, merged: merged
    larger: float = 1.0
    """How many times as large outputs may come out, and their errors with them."""


def diagnose_merge(
    outs: Tensor, lses: Tensor, out: Tensor, lse: Tensor, *, precision: Precision, base: LseBase = LseBase.NATURAL
) -> Diagnosis:
    """Say which change makes `merge_states` of outs [N, T, H, D] and lses [N, T, H] give out [T, H, D] and lse [T, H].

    A change holds of every row, or of the failing ones alone.
    """
    states = outs.to("cpu").double(), lses.to("cpu").double()
    returned = out.to("cpu"), lse.to("cpu")
    empty = (states[1] == -math.inf).all(0)
    asked = merge_states(*states, base)
    asked_bounds = _bounds(states, asked, precision, base)
    own = _fit(returned, asked, asked_bounds, precision)
    worst = float(own.ratio.max()) if own.ratio.numel() else 0.0
    failing = ~own.passes
    if not bool(failing.any()):
        return Diagnosis(Kind.NONE, "none needed: every element is within its budget", ratio=worst)
    if not bool((failing & ~empty).any()):
        held = "NaN" if bool(widen(returned[0])[failing].isnan().any()) else "other numbers"
        return Diagnosis(Kind.EMPTY_ROW, f"empty_row: rows of empty states alone hold {held}", {"holds": held}, worst)
    found = []
    for merge in _merges(states[0].shape[0], base):
        changed = merge.states(states)
        merged = merge_states(*changed, base)
        bounds = _bounds(changed, merged, precision, base)
        # The log-sum-exp returned may be of another base, or that of the states as they are.
        bounds = replace(
            bounds,
            out=bounds.out * merge.larger,
            lse=torch.maximum(bounds.lse, asked_bounds.lse) * max(1.0, _base_change(base)),
        )
        fit = _fit(returned, merge.result(states, merged), bounds, precision)
        if not bool(fit.passes[failing].all()):
            continue
        everywhere = bool(fit.passes.all())
        detail = (
            merge.detail if everywhere else f"{merge.detail}, only in {int(failing.sum())} of {failing.numel()} rows"
        )
        fit = fit if everywhere else fit.where(failing, own)
        found.append(Diagnosis(merge.kind, detail, {}, float(fit.ratio.max()), sum(fit.misfit(out.shape[-1]))))
    if not found:
        return Diagnosis(Kind.UNEXPLAINED, "no hypothesis explains it", ratio=worst)
    best = min(d.misfit for d in found)
    near = sorted((d for d in found if d.misfit <= best + DECISIVE), key=lambda d: d.kind.size)
    return replace(near[0], runners_up=tuple(near[1 : 1 + RUNNERS_UP]))


def _bounds(states: States, merged: States, precision: Precision, base: LseBase) -> Bounds:
    return merge_bounds(*states, *merged, precision, base)


def _fit(returned: States, expected: States, bounds: Bounds, precision: Precision) -> Fit:
    (out, lse), (expected_out, expected_lse) = returned, expected
    values = Compared.of(out, expected_out, bounds.out, FORMAT_OF_DTYPE[out.dtype], precision.out_rounding, CONFIDENCE)
    sums = Compared.of(lse, expected_lse, bounds.lse, FORMAT_OF_DTYPE[lse.dtype], Rounding.NEAREST_EVEN, CONFIDENCE)
    passes = values.passes.all(-1) & sums.passes
    return Fit(
        passes,
        torch.maximum(values.ratio.amax(-1), sums.ratio),
        values.square.sum(-1),
        sums.square,
        expected_out.isnan().any(-1),
    )


def _base_change(base: LseBase) -> float:
    """A log-sum-exp of the other base over the same one of this base."""
    return math.log2(math.e) if base is LseBase.NATURAL else math.log(2.0)


def _merges(count: int, base: LseBase) -> Iterator[_Merge]:
    factor = _base_change(base)
    asked, other = ("natural", "2") if base is LseBase.NATURAL else ("2", "natural")
    yield _Merge(
        Kind.LSE_BASE,
        f"lse_base: the result is of base {other} where {asked} is asked for",
        result=lambda states, merged: (merged[0], merged[1] * factor),
    )
    # exp2(x) for exp(x) is exp(x ln 2): the states' weights are those of other log-sum-exps.
    yield _Merge(
        Kind.LSE_BASE,
        f"lse_base: states are read as of base {other} where {asked} is asked for",
        states=lambda states: (states[0], states[1] / factor),
        result=lambda states, merged: (merged[0], merged[1] * factor),
    )
    yield _Merge(
        Kind.MERGE,
        f"merge: states are weighted in base {other} where {asked} is asked for",
        states=lambda states: (states[0], states[1] / factor),
        result=lambda states, merged: (merged[0], merge_states(*states, base)[1]),
    )
    yield _Merge(
        Kind.MERGE,
        "merge: states are averaged, whatever their weights",
        states=lambda states: (states[0], torch.zeros_like(states[1])),
        result=lambda states, merged: (merged[0], merge_states(*states, base)[1]),
    )
    yield _Merge(
        Kind.MERGE,
        f"merge: weights are summed in base {other} where {asked} is asked for, and do not sum to 1",
        result=lambda states, merged: _unequal(merged, _summed(states, base, factor), base),
        larger=float(count),
    )
    yield _Merge(
        Kind.MERGE,
        f"merge: weights, and their sum, are in base {other} where {asked} is asked for",
        states=lambda states: (states[0], states[1] / factor),
        result=lambda states, merged: (merged[0], _summed(states, base, factor)),
    )
    yield from _axes(count)
    for step in (1, -1) if count > 1 else ():
        yield _Merge(
            Kind.MERGE,
            f"merge: each state has the weight of the one {'before' if step > 0 else 'after'} it",
            states=_weights_of(step),
        )
    for i in range(count if count > 1 else 0):
        yield _Merge(Kind.SPLIT, f"split: state {i} is lost", states=_chosen([j for j in range(count) if j != i]))
        yield _Merge(Kind.SPLIT, f"split: state {i} counts twice", states=_chosen([*range(count), i]))
    for i in range(1, count - 1):
        yield _Merge(Kind.SPLIT, f"split: only the first {i} of {count} states count", states=_chosen(list(range(i))))


def _weights_of(step: int) -> Callable[[States], States]:
    return lambda states: (states[0], states[1].roll(step, 0))


def _chosen(index: list[int]) -> Callable[[States], States]:
    return lambda states: (states[0][index], states[1][index])


def _summed(states: States, base: LseBase, factor: float) -> Tensor:
    """The log-sum-exp [T, H] of this base, of which the powers that are summed are of the other one."""
    top = states[1].amax(0)
    top = top.masked_fill(top == -math.inf, 0.0)
    below = (states[0], (states[1] - top) / factor)
    return top + merge_states(*below, base)[1]


def _unequal(merged: States, lse: Tensor, base: LseBase) -> States:
    """Outputs whose weights are right powers over a wrong log-sum-exp."""
    excess = (merged[1] - lse).masked_fill(lse == -math.inf, 0.0)
    grown = excess.exp2() if base is LseBase.TWO else excess.exp()
    return merged[0] * grown.unsqueeze(-1), lse


def _axes(count: int) -> Iterator[_Merge]:
    """Log-sum-exps [T, H] read as if they lay heads first, or the other way round: of all states, or of one."""

    def heads_first(lse: Tensor) -> Tensor:
        return lse.reshape(lse.shape[::-1]).t()

    def tokens_first(lse: Tensor) -> Tensor:
        return lse.t().reshape(lse.shape)

    def exchanged(which: Sequence[int], read: Callable[[Tensor], Tensor]) -> Callable[[States], States]:
        return lambda states: (
            states[0],
            torch.stack([read(lse) if i in which else lse for i, lse in enumerate(states[1])]),
        )

    for which in (range(count), *([i] for i in range(count if count > 1 else 0))):
        whose = f"state {which[0]}" if len(which) == 1 else "the states"
        for read, how in ((heads_first, "heads first"), (tokens_first, "tokens first")):
            yield _Merge(
                Kind.LSE,
                f"lse: the log-sum-exps of {whose} are read with their axes exchanged, as if they lay {how}",
                states=exchanged(which, read),
            )
