"""Bounds on what a correct kernel may be off by, per element."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Bounds:
    """What a kernel's result may differ from the oracle's by, before it is rounded to its output dtype.

    out: float64 [Tq, Hq, D_v], absolute; inf where nothing can be promised, 0 in rows without a visible key.
    lse: float64 [Tq, Hq], absolute, natural units.
    reach: float64 [Tq, Hq, D_v], the largest |v| over the row's visible keys: so large a bound says nothing.
    keys: int64 [Tq], how many keys each query sees.
    """

    out: Tensor
    lse: Tensor
    reach: Tensor
    keys: Tensor


@dataclass(frozen=True, eq=False)
class Budgets:
    """Two bounds on the same results. Nowhere is `probable` above `worst_case`.

    worst_case: beyond it a kernel is wrong, or its precision is described wrongly.
    probable: beyond it a kernel is wrong unless its roundings conspire: with independent roundings of mean 0, one
    element is beyond it with probability 2 exp(-confidence^2 / 2).
    """

    worst_case: Bounds
    probable: Bounds
    confidence: float
