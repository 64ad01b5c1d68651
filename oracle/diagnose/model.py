"""What a diagnosis says, and what is known of a call beside its problem."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from torch import Tensor


class Kind(StrEnum):
    """The class of a fault. The order is that of `size`: of two that explain equally well, the earlier is named."""

    NONE = "none needed"
    EMPTY_ROW = "empty_row"
    """what a row without a visible key must hold"""
    LSE_BASE = "lse_base"
    LSE = "lse"
    """its axes, or that it is one of another row"""
    MAXIMUM = "maximum"
    """the running maximum started at a number instead of -inf, which few calls show"""
    NO_KEY = "no_key"
    """rows hold what one without a visible key must: none counted, or nothing was worked out"""
    WINDOW = "window"
    CAUSAL = "causal"
    SINK = "sink"
    SCALE = "scale"
    SOFT_CAP = "soft_cap"
    Q_DESCALE = "q_descale"
    K_DESCALE = "k_descale"
    V_DESCALE = "v_descale"
    FP8_FLAVOUR = "fp8_flavour"
    HEAD = "head"
    """a query head used another's kv head, or came out in another's place"""
    ROW = "row"
    """a query came out in another's place, or is left from an earlier call"""
    DIMS = "dims"
    """dims left out of q . k, or values at other dims"""
    RESCALE = "rescale"
    """a step of the online softmax did not rescale what came before"""
    MASK = "mask"
    """hidden keys have a finite logit"""
    MERGE = "merge"
    """parts were merged with wrong weights"""
    SPLIT = "split"
    """a part of the keys was lost or counted twice"""
    MISSING_KEY = "missing_key"
    EXTRA_KEY = "extra_key"
    """a key that is hidden, or past the end, was seen, or one was seen twice"""
    PAGE = "page"
    STALE_KEY = "stale_key"
    """a key or value other than the one given"""
    PRECISION = "precision"
    """an intermediate result in a narrower dtype than the target's precision says"""
    UNEXPLAINED = "unexplained"

    @property
    def size(self) -> int:
        """How large a change of convention or input the class is: its place in the order above."""
        return list(Kind).index(self)


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """The smallest change with which the oracle reproduces what a target returned.

    kind: the class, without numbers. detail: one plain line with numbers. ratio: the worst error over its budget
    under the hypothesis (of the problem as it was posed, for `none needed` and `unexplained`).
    misfit: twice the negative log-likelihood, up to a constant of the call: smaller fits better.
    everywhere: said of rows that pass as well. fitted: how many numbers were fitted to what was returned.
    runners_up: other hypotheses that explain the rows that were looked at, in order.
    """

    kind: Kind
    detail: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    ratio: float = math.nan
    misfit: float = math.nan
    everywhere: bool = True
    fitted: int = 0
    runners_up: tuple[Diagnosis, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data. Numbers that JSON does not have become text."""
        return {
            "kind": self.kind.value,
            "detail": self.detail,
            "parameters": dict(self.parameters),
            "ratio": self.ratio if math.isfinite(self.ratio) else repr(self.ratio),
            "runners_up": [other.to_dict() for other in self.runners_up],
        }


@dataclass(frozen=True, eq=False, kw_only=True)
class Surroundings:
    """What lies around the operands of a call. Every field may be left out: then nothing is supposed about it.

    page_size: keys of a page; a request's first page starts at its key 0.
    stale: for each request, keys [m, Hkv, D_qk] and values [m, Hkv, D_v] of the slots right after its last key.
    pages: physical page of each page of each request. pool_k [P, g, Hkv, D_qk], pool_v [P, g, Hkv, D_v]: the pool.
    splits: first key of each part of each request, ascending, 0 first.
    tile: keys of one step of the online softmax.
    earlier: what an earlier call returned, of any shape [tokens, Hq, D_v].
    """

    page_size: int | None = None
    stale: tuple[tuple[Tensor, Tensor], ...] | None = None
    pages: tuple[tuple[int, ...], ...] | None = None
    pool_k: Tensor | None = None
    pool_v: Tensor | None = None
    splits: tuple[tuple[int, ...], ...] | None = None
    tile: int | None = None
    earlier: Tensor | None = None
