"""How far rounding errors of a sum or a chain of operations can grow, whatever the data."""

import torch
from torch import Tensor

from oracle.precision import Accumulation, MatrixUnit

UNIT = 2.0**-24
"""Unit roundoff of float32."""

_TRUNCATED = 2.0**-23
"""Relative error of truncating to float32: the least that a unit which rounds toward zero commits."""


def gamma(count: Tensor, unit: float = UNIT) -> Tensor:
    """Relative error of `count` chained roundings: n u / (1 - n u), infinite from n u = 1.

    Higham, Accuracy and Stability of Numerical Algorithms (2002), lemma 3.1.
    """
    total = count * unit
    return torch.where(total < 1, total / (1 - total), torch.inf)


def compound(*errors: Tensor | float) -> Tensor | float:
    """The relative error of a product whose factors have these relative errors: prod(1 + e) - 1."""
    total: Tensor | float = 0.0
    for error in errors:
        if isinstance(total, float) and total == 0:
            total = error
        elif isinstance(error, Tensor) or error:
            total = total + error + total * error
    return total


def contraction(unit: MatrixUnit, terms: Tensor, steps: Tensor | float = 0) -> Tensor:
    """Error of summing `terms` products on `unit`, relative to the sum of their magnitudes.

    steps: calls of the unit that the terms are spread over unevenly, the accumulator passed on; each may
    leave one block partly filled.

    ANY: a term meets one rounding as a product and at most terms - 1 in sums. BLOCK: its block, then the
    chain of blocks. FUSED: every block truncates its products and the accumulator at `fraction_bits` below
    the largest of them, at most the sum of magnitudes, and rounds the result (MMA-Sim, arXiv 2511.10909).
    """
    u = max(unit.unit_roundoff, _TRUNCATED) if unit.toward_zero else unit.unit_roundoff
    if unit.accumulation is Accumulation.ANY:
        return gamma(terms, u)
    blocks = (terms / unit.block).ceil() + steps
    if unit.accumulation is Accumulation.BLOCK:
        return gamma(blocks + unit.block, u)
    return gamma(blocks, (unit.block + 1) * 2.0**-unit.fraction_bits + u)


def scatter(unit: MatrixUnit, terms: Tensor, steps: Tensor | float = 0) -> tuple[Tensor, Tensor]:
    """How the error of such a sum spreads if its roundings are independent: (width, bias), both relative to the
    largest partial sum or term.

    The error less its mean is a sum of independent roundings, each uniform on an interval about 0; `width` is the root
    of their summed squared half-widths, `bias` bounds the mean. To nearest, a rounding of a number up to m lies within
    u m and has mean 0; toward zero it lies between 0 and 2 u m and has mean u m. Truncating the terms of a fused block
    leaves up to 2^-F m of each (MMA-Sim, arXiv 2511.10909).
    """
    u = max(unit.unit_roundoff, _TRUNCATED) if unit.toward_zero else unit.unit_roundoff
    half, mean = (u / 2, u / 2) if unit.toward_zero else (u, 0.0)
    if unit.accumulation is Accumulation.ANY:
        # Each product, and each sum of two.
        return (2 * terms).sqrt() * half, 2 * terms * mean
    blocks = (terms / unit.block).ceil() + steps
    if unit.accumulation is Accumulation.BLOCK:
        return (blocks + unit.block).sqrt() * half, (blocks + unit.block) * mean
    cut, truncations = 2.0**-unit.fraction_bits / 2, blocks * (unit.block + 1)
    return truncations.sqrt() * cut + blocks.sqrt() * half, truncations * cut + blocks * mean
