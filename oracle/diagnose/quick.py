"""Solutions of some rows under many hypotheses, quickly: what these have in common is worked out once.

For screening alone. A diagnosis is verified by `oracle.attention.solve`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from oracle.attention import Solution
from oracle.diagnose.rows import Row, chosen_factors, describe_rows, key_index, visible
from oracle.problem import Descale, Problem
from oracle.rounding import widen

T = TypeVar("T")
_Kept = dict[tuple[object, ...], tuple[object, T]]
"""By what it was made of: the owners of the ids among that, and what was made."""


@dataclass(frozen=True, eq=False)
class View:
    """What a hypothesis may look at to say what became of a solution of some rows.

    sinks [H] or None and group: of the rows' heads. logits(i) [H, n] natural and capped, values(i) [n, Hkv, D_v]
    descaled: of the keys that row i attends to.
    """

    sinks: Tensor | None
    group: int
    logits: Callable[[int], Tensor]
    values: Callable[[int], Tensor]


def times(x: Tensor, descale: Descale) -> Tensor:
    """An operand [T, H, D] in float64 with its descale."""
    wide = widen(x)
    if descale is None:
        return wide
    factor = torch.as_tensor(descale, dtype=torch.float64)
    return wide * (factor if factor.numel() == 1 else factor.unsqueeze(-1))


def capped(raw: Tensor, problem: Problem) -> Tensor:
    """Logits of products q . k."""
    s = raw * problem.scale
    return s if problem.soft_cap is None else (s / problem.soft_cap).tanh_().mul_(problem.soft_cap)


def weighted(p: Tensor, v: Tensor) -> Tensor:
    """Sums [H, D_v] of values v [n, Hkv, D_v] with weights p [H, n]."""
    by_kv_head = p.view(v.shape[1], p.shape[0] // v.shape[1], p.shape[1])
    return (by_kv_head @ v.transpose(0, 1)).flatten(0, 1)


def view_of(posed: Problem) -> View:
    """The view of a problem of rows, as `rows.rows_of` makes it."""
    q, k, v = times(posed.q, posed.q_descale), times(posed.k, posed.k_descale), times(posed.v, posed.v_descale)

    def logits(i: int) -> Tensor:
        keys = slice(posed.kv_starts[i], posed.kv_starts[i + 1])
        raw = q[i].view(posed.kv_heads, posed.group, -1) @ k[keys].permute(1, 2, 0)
        return capped(raw, posed).flatten(0, 1)

    return View(posed.sinks, posed.group, logits, lambda i: v[posed.kv_starts[i] : posed.kv_starts[i + 1]])


@dataclass(eq=False)
class Quick:
    """Keeps what hypotheses have in common: of the operands met last, keys and values [Hkv, n, D], products q . k and
    logits [Hkv, group, n], and what single rows come to, out [H, D_v] and log-sum-exp [H], over runs of keys."""

    _kept: _Kept[Tensor] = field(default_factory=dict)
    _attended: _Kept[tuple[Tensor, Tensor]] = field(default_factory=dict)

    def solution(
        self, problem: Problem, tokens: Sequence[int], keys: Callable[[Row], Tensor], kv_head: int | None
    ) -> tuple[Solution, View]:
        """As `solve` of the rows, sink excluded from the log-sum-exp, and their view. kv_head: only its query heads."""
        kv = slice(0, problem.kv_heads) if kv_head is None else slice(kv_head, kv_head + 1)
        members = slice(kv.start * problem.group, kv.stop * problem.group)
        sinks = None if problem.sinks is None else problem.sinks[members].double()
        rows = describe_rows(problem, tokens)
        chosen = [slice(row.lo, max(row.lo, row.hi)) if keys is visible else _run(keys(row)) for row in rows]
        outs, lses, all_logits, all_values = [], [], [], []
        for row, place in zip(rows, chosen, strict=True):
            s = self._logits(problem, row, kv)
            v = self._operand(problem, row.request, "v", kv)
            out, lse = self._row(s, v, place)
            if sinks is not None:
                out = out * torch.sigmoid(lse - sinks).unsqueeze(-1)
            outs.append(out)
            lses.append(lse)
            all_logits.append(s)
            all_values.append(v)

        def logits(i: int) -> Tensor:
            return all_logits[i].flatten(0, 1)[:, chosen[i]]

        def values(i: int) -> Tensor:
            return all_values[i][:, chosen[i]].transpose(0, 1)

        return Solution(torch.stack(outs), torch.stack(lses)), View(sinks, problem.group, logits, values)

    def _row(self, s: Tensor, v: Tensor, place: slice | Tensor) -> tuple[Tensor, Tensor]:
        """`_attend`. A run of keys is what many hypotheses have in common, which change what becomes of it."""
        if isinstance(place, Tensor):
            return _attend(s, v, place)
        key = (id(s), id(v), place.start, place.stop)
        return _keep(self._attended, key, (s, v), lambda: _attend(s, v, place))

    def _logits(self, problem: Problem, row: Row, kv: slice) -> Tensor:
        raw = self._products(problem, row, kv)
        key = (2, id(raw), problem.scale, problem.soft_cap)
        return _keep(self._kept, key, raw, lambda: capped(raw, problem))

    def _products(self, problem: Problem, row: Row, kv: slice) -> Tensor:
        """q . k [Hkv, group, n] with their descales."""
        operands = (problem.q, problem.k, problem.q_descale, problem.k_descale)
        key = (0, *map(id, operands), row.token, kv.start, kv.stop, problem.kv_lens[row.request])

        def make() -> Tensor:
            token, heads = torch.tensor([row.token]), slice(kv.start * problem.group, kv.stop * problem.group)
            factor = chosen_factors(problem.q_descale, token, heads, problem.q.shape[0])
            q = times(problem.q[row.token : row.token + 1, heads], factor).view(kv.stop - kv.start, problem.group, -1)
            return q @ self._operand(problem, row.request, "k", kv).transpose(1, 2)

        return _keep(self._kept, key, operands, make)

    def _operand(self, problem: Problem, request: int, name: str, kv: slice) -> Tensor:
        """K or V of a request, descaled [Hkv, n, D]."""
        x, descale = getattr(problem, name), getattr(problem, f"{name}_descale")
        key = (1, id(x), id(descale), request, problem.kv_lens[request], kv.start, kv.stop)

        def make() -> Tensor:
            index = key_index(problem, request, torch.arange(problem.kv_lens[request]))
            factor = chosen_factors(descale, index, kv, x.shape[0])
            return times(x[_run(index)][:, kv], factor).transpose(0, 1).contiguous()

        return _keep(self._kept, key, (x, descale), make)


_KEPT = 48
"""How many of each kind are kept; the one asked for longest ago goes first."""


def _keep(kept: _Kept[T], key: tuple[object, ...], owners: object, make: Callable[[], T]) -> T:
    """What was made for this key before, else what `make` makes. owners: held, so that their ids stay theirs."""
    if key in kept:
        kept[key] = kept.pop(key)
        return kept[key][1]
    made = make()
    while len(kept) >= _KEPT:
        del kept[next(iter(kept))]
    kept[key] = (owners, made)
    return made


def _run(index: Tensor) -> Tensor | slice:
    """An index as a slice, if it is one run."""
    if not len(index):
        return slice(0, 0)
    first, last = int(index[0]), int(index[-1])
    if last - first + 1 == len(index) and bool((index[1:] - index[:-1] == 1).all()):
        return slice(first, last + 1)
    return index


def _attend(s: Tensor, v: Tensor, place: slice | Tensor) -> tuple[Tensor, Tensor]:
    """out [H, D_v], lse [H] of logits s [Hkv, group, n] over some of the keys, repeated ones counting again."""
    if isinstance(place, slice):
        s, v, often = s[..., place], v[:, place], None
    else:
        often = torch.bincount(place, minlength=s.shape[-1]).double()
        s = s.masked_fill(often == 0, -math.inf)
    if not s.shape[-1]:
        return v.new_zeros(s.shape[0] * s.shape[1], v.shape[2]), s.new_full((s.shape[0] * s.shape[1],), -math.inf)
    top = s.amax(-1, keepdim=True)
    top = top.masked_fill(~top.isfinite(), 0.0)
    p = (s - top).exp_()
    if often is not None:
        p *= often
    total = p.sum(-1, keepdim=True)
    out = (p @ v) / total.masked_fill(total == 0, 1.0)
    return out.flatten(0, 1), (total.log() + top).flatten()
