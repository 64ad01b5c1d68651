"""The measurement of matrix units recovers units whose arithmetic is known."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from suites.oracle.budget.kernels import multiply
from suites.tolerance.matrix_units import Measured, measure


def modelled(unit: str) -> Measured:
    def product(a: Tensor, b: Tensor) -> Tensor:
        return multiply(a.float().unsqueeze(-2), b.float().unsqueeze(-1), unit).flatten().double()

    return measure(product)


@pytest.mark.parametrize(
    ("unit", "expected"),
    [
        ("fused", Measured(25, 16, 23, "toward zero", "toward zero")),
        ("short_fused", Measured(13, 32, 13, "toward zero", "toward zero")),
    ],
)
def test_a_known_unit_is_recovered(unit: str, expected: Measured) -> None:
    assert modelled(unit) == expected


def test_a_chain_of_float32_sums_adds_one_term_at_a_time() -> None:
    found = modelled("chain")
    assert found.kept_bits == 23
    assert found.rounding == "nearest"


def test_terms_truncated_downwards_are_told_from_those_toward_zero() -> None:
    def product(a: Tensor, b: Tensor) -> Tensor:
        total = torch.zeros(len(a), dtype=torch.float64)
        for start in range(0, a.shape[1], 8):
            terms = torch.cat([a[:, start : start + 8] * b[:, start : start + 8], total[:, None]], 1)
            largest = torch.frexp(terms.abs().amax(1)).exponent - 1
            step = torch.exp2((largest - 24).double()).unsqueeze(1)
            total = ((terms / step).floor() * step).sum(1).float().double()
        return total

    assert measure(product) == Measured(24, 8, 23, "nearest", "down")


def test_an_exact_sum_shows_nothing() -> None:
    assert measure(lambda a, b: (a * b).sum(1)) == Measured(None, None, None, None, None)
