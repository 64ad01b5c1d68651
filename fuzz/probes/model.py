"""What a probe is: a design of input values, as data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from torch import Tensor

from fuzz.case import Probe
from fuzz.probes.geometry import Geometry
from oracle.kinds import Role


class Fault(StrEnum):
    """Classes of faults that a probe can be aimed at."""

    WINDOW = "window"
    """a window that is off by some keys, or ignored"""
    CAUSAL = "causal"
    """a diagonal that is off by some keys"""
    KEY_SET = "key_set"
    """a key lost, counted twice, or of someone else"""
    STALE_SLOT = "stale_slot"
    """a slot read that holds no key of the request: past its length, or in an unused page"""
    WRONG_PAGE = "wrong_page"
    SPLIT_EDGE = "split_edge"
    """a gap or an overlap between the parts of a split context"""
    MERGE = "merge"
    """parts merged with wrong weights, or in a wrong base"""
    PAIRING = "pairing"
    """the K of one key used with the V of another"""
    HEAD_MAP = "head_map"
    """heads permuted, or the wrong kv head of a group"""
    CHANNELS = "channels"
    """channels of V shifted or permuted"""
    SINK = "sink"
    SCALE = "scale"
    SOFT_CAP = "soft_cap"
    MASK_ORDER = "mask_order"
    """a mask before the soft cap, or filled with a finite number that is not small enough"""
    MAX_START = "max_start"
    """a running maximum that does not start at minus infinity"""
    RESCALE = "rescale"
    """an online rescale that is missing or incomplete"""
    LOGIT_PRECISION = "logit_precision"
    WEIGHT_PRECISION = "weight_precision"
    ACCUMULATION = "accumulation"
    """partial sums held in too narrow a format"""
    NORMALISATION = "normalisation"
    DESCALE = "descale"
    FP8_FORMAT = "fp8_format"
    OVERFLOW = "overflow"
    UNDERFLOW = "underflow"
    COPY = "copy"
    """bits changed on the way"""


@dataclass(frozen=True, eq=False)
class Inputs:
    """Values of every operand of an attention case, on the CPU.

    q [Tq, Hq, D] in the case's dtype; k [Tk, Hkv, D] and v [Tk, Hkv, D_v] in its storage dtype; sinks [Hq],
    k_descale and v_descale ([1], [Hkv] or [Tk, Hkv]) float32 or None. ``unused(n)``: what n pool slots hold that belong
    to no key, [n, Hkv, D] and [n, Hkv, D_v] in the storage dtype; None: nothing that the design cares about.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None
    k_descale: Tensor | None
    v_descale: Tensor | None
    unused: Callable[[int], dict[Role, Tensor]] | None = None

    @property
    def descales(self) -> dict[str, Tensor | None]:
        """By the name of the operand."""
        return {"k_descale": self.k_descale, "v_descale": self.v_descale}


def _anything(geometry: Geometry) -> str | None:
    return None


@dataclass(frozen=True)
class Design:
    """A probe and how it is built.

    aims: the faults that it makes visible. needs: labels (``fuzz.features``) that a case must show, any one of
    those listed for each feature; a feature that is not listed may be anything. refuses: why numbers of a
    case leave no room for the design, or None. exact_weights: softmax weights before normalisation are 0 or
    1, so that every format holds them and what the design shows does not fade with the context. pool: the
    design also says what unused slots hold. The first line of the builder's docstring describes the probe.
    """

    probe: Probe
    build: Callable[[Geometry], Inputs]
    aims: tuple[Fault, ...]
    needs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    refuses: Callable[[Geometry], str | None] = _anything
    exact_weights: bool = False

    @property
    def summary(self) -> str:
        """One line."""
        return (self.build.__doc__ or "").strip().splitlines()[0]
