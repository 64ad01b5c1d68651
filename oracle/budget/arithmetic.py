"""A `Precision` read for some rows: formats resolved, operations counted."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from oracle.budget.formats import FP32, Format, format_named
from oracle.budget.growth import UNIT, compound, contraction, gamma, scatter
from oracle.precision import Accumulation, KeyOrder, Precision

DIVISION = 10
"""Roundings of the final division or multiplication by a reciprocal, and of descales of the values."""
MERGE = 4
"""Roundings of weighting one partial result and normalising."""
_FEW_ULPS = 8 * 2.0**-23
_ON_HOST = 1 << 14
"""Rows about which as much is cheaper computed on the CPU, and copied to the device at once."""


class Arithmetic:
    """A `Precision` read for rows with `count` visible keys: formats resolved, operations counted.

    count: float64 [m, r, 1]. device: where what follows from it is wanted, by default where it is.
    """

    def __init__(
        self, precision: Precision, input_dtype: str, count: Tensor, device: torch.device | None = None
    ) -> None:
        self.precision = precision
        self.q_cast = _format(precision.q_cast, input_dtype)
        self.kv_cast = _format(precision.kv_cast, input_dtype)
        self.product = _format(precision.qk_product, input_dtype)
        self.logit = format_named(precision.logit_dtype, input_dtype)
        self.p = _format(precision.p_dtype, input_dtype)
        self.partial = format_named(precision.partial_dtype, input_dtype)
        self.rank = format_named(precision.rank_dtype, input_dtype)
        self.reduce = format_named(precision.reduce_dtype, input_dtype)
        self.exp_error = -math.log1p(-precision.exp_error) if precision.exp_error < 1 else math.inf
        self.merges = [n for n in (precision.max_splits, precision.ranks) if n > 1]
        """How many partial results are merged at each level."""
        self.biased = precision.pv.toward_zero or precision.pv.accumulation is Accumulation.FUSED
        """Whether sums of the second product err one way on average."""
        self.tiny = FP32.absolute_error(precision.flush_subnormals)
        device = device or count.device
        columns = self._columns(count if count.numel() <= _ON_HOST else count.to(device))
        table = torch.stack(list(columns.values())).to(device, non_blocking=True)
        self._of_rows = dict(zip(columns, table.unbind(), strict=True))

    def _columns(self, count: Tensor) -> dict[str, Tensor]:
        """What follows from the count of keys alone, as the properties below say."""
        p, levels = self.precision, sum(self.merges) + MERGE * len(self.merges)
        none = torch.zeros_like(count)
        rescales = ((count - 1) / p.tile).ceil().clamp(min=0)
        values, row_sum = contraction(p.pv, count, rescales + 1), gamma(count)
        if p.row_sum_of_rounded_p is not False:
            # Rounded weights may be summed by the matrix unit, as one more column of the values.
            row_sum = torch.maximum(row_sum, values)
        width, bias = scatter(p.pv, count, rescales + 1)
        return {
            "count": count,
            "rescales": rescales,
            "log_count": count.clamp(min=math.e).log(),
            "underflow": (count * (rescales + 2) + (sum(self.merges) + 8)) * self.tiny,
            "row_sum_underflow": count * (rescales + 2) * self.tiny,
            "rescaling": rescales * self.exp_error,
            "numerator": torch.as_tensor(compound(values, gamma(2 * rescales + 1 + DIVISION + levels))),
            "exact_numerator": gamma(none + 1 + DIVISION + levels),
            "denominator": torch.as_tensor(compound(row_sum, gamma(2 * rescales + MERGE + levels))),
            "exact_denominator": gamma(none + MERGE + levels),
            "nearly_equal": (count * (2 * UNIT)).square(),
            "records": random_records(rescales + 1),
            "width": width,
            "bias": bias,
        }

    @property
    def count(self) -> Tensor:
        return self._of_rows["count"]

    @property
    def rescales(self) -> Tensor:
        """How often the running maximum can change: steps that n neighbouring keys can touch, less one."""
        return self._of_rows["rescales"]

    @property
    def nearly_equal(self) -> Tensor:
        """Weights whose squared deviation, in means, is below this differ by less than the last place of their sum."""
        return self._of_rows["nearly_equal"]

    @property
    def records(self) -> Tensor:
        """A bound on the rises of the running maximum in random orders of tiles."""
        return self._of_rows["records"]

    @property
    def rescaling(self) -> Tensor:
        """Error of the logarithm of a weight that all rescales together make."""
        return self._of_rows["rescaling"]

    @property
    def underflow(self) -> Tensor:
        """What underflow of every term of the numerator costs, for values of size 1."""
        return self._of_rows["underflow"]

    @property
    def row_sum_underflow(self) -> Tensor:
        """What underflow of every term of the row sum costs."""
        return self._of_rows["row_sum_underflow"]

    def sum_errors(self, exact: Tensor | None) -> tuple[Tensor, Tensor]:
        """Relative errors [m, r, 1] of accumulating numerators, and of the row sum. exact: bool, of rows that are added
        without error; None: there are none.
        """
        of = self._of_rows
        if exact is None:
            return of["numerator"], of["denominator"]
        return (
            torch.where(exact, of["exact_numerator"], of["numerator"]),
            torch.where(exact, of["exact_denominator"], of["denominator"]),
        )

    def scatter(self, exact: Tensor | None) -> tuple[Tensor, Tensor]:
        """`growth.scatter` of the second product. exact: as above."""
        if exact is None:
            return self._of_rows["width"], self._of_rows["bias"]
        return self._of_rows["width"].masked_fill(exact, 0.0), self._of_rows["bias"].masked_fill(exact, 0.0)

    @property
    def coarse_logits(self) -> bool:
        """Whether logits may err by a step of a narrow format: inputs, products or they are rounded to one."""
        return self.logit is not FP32 or any(x is not None for x in (self.q_cast, self.kv_cast, self.product))

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
        return self.precision.log_error * torch.maximum(size, self._of_rows["log_count"])


def random_records(n: Tensor) -> Tensor:
    """A bound on the number of records in a random order of n: their mean and variance are at most ln n + 1."""
    return n.log() + 4 * n.log().sqrt() + 1


def ways(a: Arithmetic) -> tuple[bool, ...]:
    """Whether keys come backwards: the orders of positions that a kernel may visit them in."""
    ways = {KeyOrder.ASCENDING: (False,), KeyOrder.DESCENDING: (True,)}
    return ways.get(a.precision.key_order, (False, True))


def _format(name: str | None, input_dtype: str) -> Format | None:
    return None if name is None else format_named(name, input_dtype)
