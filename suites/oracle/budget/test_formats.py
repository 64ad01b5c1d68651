"""Formats and growth of errors, against arithmetic in exact fractions."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oracle.budget.casts import _turning_point
from oracle.budget.formats import FORMATS, INPUT, Format, format_named
from oracle.budget.growth import compound, contraction, gamma
from oracle.precision import _NAMES, Accumulation, MatrixUnit
from oracle.rounding import round_to, widen
from suites.tolerance.variants import cast


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda fmt: fmt.name)
@given(x=st.floats(-1e5, 1e5), exponent=st.integers(-160, 0))
def test_rounding_errs_by_no_more_than_the_format_says(fmt: Format, x: float, exponent: int) -> None:
    value = torch.tensor(x * 2.0**exponent, dtype=torch.float64)
    if float(value.abs()) > fmt.max:
        return
    error = abs(Fraction(float(widen(round_to(value, fmt.dtype)))) - Fraction(float(value)))
    assert error <= max(Fraction(fmt.unit_roundoff) * abs(Fraction(float(value))), Fraction(fmt.half_subnormal))


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda fmt: fmt.name)
def test_the_errors_of_a_format_are_reached(fmt: Format) -> None:
    middle = torch.tensor([1 + fmt.unit_roundoff, fmt.half_subnormal], dtype=torch.float64)
    error = (widen(round_to(middle, fmt.dtype)) - middle).abs()
    assert error.tolist() == [fmt.unit_roundoff, fmt.half_subnormal]
    assert float(widen(round_to(torch.tensor(fmt.max, dtype=torch.float64), fmt.dtype))) == fmt.max


def test_input_stands_for_the_dtype_of_the_query() -> None:
    assert format_named("input", "fp16") is FORMATS["fp16"]
    assert format_named("bf16", "fp16") is FORMATS["bf16"]
    with pytest.raises(ValueError, match="known are fp32"):
        format_named("input")


def test_flushing_concerns_the_range_of_float32() -> None:
    assert FORMATS["bf16"].absolute_error(True) == 2.0**-126
    assert FORMATS["bf16"].absolute_error(False) == 2.0**-134
    assert FORMATS["fp16"].absolute_error(True) == FORMATS["fp16"].absolute_error(False) == 2.0**-25


@given(n=st.integers(0, 5000))
def test_gamma_bounds_the_product_of_factors(n: int) -> None:
    unit = Fraction(2) ** -12
    bound = float(gamma(torch.tensor(float(n), dtype=torch.float64), 2.0**-12))
    assert n >= 4096 or float((1 + unit) ** n - 1) <= bound * (1 + 1e-12)
    assert (bound == float("inf")) == (n >= 4096)


@given(errors=st.lists(st.floats(0, 0.5), max_size=5))
def test_compound_is_the_error_of_a_product(errors: list[float]) -> None:
    exact = Fraction(1)
    for error in errors:
        exact *= 1 + Fraction(error)
    assert float(compound(*errors)) == pytest.approx(float(exact - 1), rel=1e-12)


@pytest.mark.parametrize(
    ("unit", "terms", "steps", "expected"),
    [
        (MatrixUnit(), 100, 7, 100 * 2.0**-24),
        (MatrixUnit(toward_zero=True), 100, 0, 100 * 2.0**-23),
        (MatrixUnit(accumulation=Accumulation.BLOCK, block=16), 100, 2, (7 + 2 + 16) * 2.0**-24),
        (
            MatrixUnit(accumulation=Accumulation.FUSED, block=32, fraction_bits=13, unit_roundoff=2.0**-13),
            64,
            1,
            3 * 34 * 2.0**-13,
        ),
    ],
)
def test_contraction(unit: MatrixUnit, terms: int, steps: int, expected: float) -> None:
    n = torch.tensor(float(terms), dtype=torch.float64)
    assert float(contraction(unit, n, steps)) == pytest.approx(expected / (1 - expected), rel=1e-12)


def test_what_a_precision_may_name_are_the_formats() -> None:
    assert set(_NAMES) == {INPUT, *FORMATS}


@pytest.mark.parametrize("toward_zero", [False, True])
@pytest.mark.parametrize("name", ["bf16", "fp16", "e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz"])
def test_rounding_changes_at_the_turning_point_and_not_on_the_way_there(name: str, toward_zero: bool) -> None:
    fmt = format_named(name)
    x = torch.logspace(-24 if name == "fp16" else -14, 7, 5000, base=2.0, dtype=torch.float64).float()
    turn = _turning_point(x, fmt, toward_zero)

    def rounded(numbers: torch.Tensor) -> torch.Tensor:
        return cast(numbers, name, truncate=toward_zero)

    assert bool((rounded(turn * (1 + 2.0**-20)) > rounded(turn * (1 - 2.0**-20))).all())
    nearly = x.double() + (turn.double() - x) * (1 - 2.0**-10)
    assert bool((rounded(nearly) == rounded(x)).all())
