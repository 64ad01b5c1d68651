"""A `Precision` read for some rows: formats resolved, operations counted."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from oracle.budget.formats import FP32, Format, format_named
from oracle.precision import Accumulation, Precision

_FEW_ULPS = 8 * 2.0**-23


class Arithmetic:
    """A `Precision` read for rows with `count` visible keys: formats resolved, operations counted."""

    def __init__(self, precision: Precision, input_dtype: str, count: Tensor) -> None:
        self.precision = precision
        self.q_cast = _format(precision.q_cast, input_dtype)
        self.kv_cast = _format(precision.kv_cast, input_dtype)
        self.product = _format(precision.qk_product, input_dtype)
        self.logit = format_named(precision.logit_dtype, input_dtype)
        self.p = _format(precision.p_dtype, input_dtype)
        self.partial = format_named(precision.partial_dtype, input_dtype)
        self.rank = format_named(precision.rank_dtype, input_dtype)
        self.reduce = format_named(precision.reduce_dtype, input_dtype)
        self.count = count
        self.rescales = ((count - 1) / precision.tile).ceil().clamp(min=0)
        """How often the running maximum can change: steps that n neighbouring keys can touch, less one."""
        self.exp_error = -math.log1p(-precision.exp_error) if precision.exp_error < 1 else math.inf
        self.merges = [n for n in (precision.max_splits, precision.ranks) if n > 1]
        """How many partial results are merged at each level."""
        self.tiny = FP32.absolute_error(precision.flush_subnormals)

    @property
    def exact_at_zero(self) -> bool:
        """Whether exp(0) is 1. Libraries and instructions of a few ulp say so; a coarse polynomial may miss it, as that
        of torch's vectorised exponential for bf16 does."""
        return self.precision.exp_error <= _FEW_ULPS

    @property
    def exact_integers(self) -> float:
        """Integers up to this are added without error, times weights of 1 in their format; 0 if there are none."""
        unit, scale = self.precision.pv, self.precision.p_scale
        fused = 2.0**unit.fraction_bits if unit.accumulation is Accumulation.FUSED else math.inf
        if self.precision.p_normalised or math.frexp(scale)[0] != 0.5:
            return 0.0
        return min(1 / max(unit.unit_roundoff, 2.0**-24), fused)

    def absolute(self, fmt: Format) -> float:
        return fmt.absolute_error(self.precision.flush_subnormals)

    def log_error(self, size: Tensor) -> Tensor:
        """Error of the logarithm of a sum of `count` terms at most 1, or of one with |logarithm| <= size."""
        return self.precision.log_error * torch.maximum(size, self.count.clamp(min=math.e).log())


def _format(name: str | None, input_dtype: str) -> Format | None:
    return None if name is None else format_named(name, input_dtype)
