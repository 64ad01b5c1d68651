"""Rounding is correct at every bf16 and fp16 value and midpoint; intervals are sound and tight."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oracle.fp8 import FORMATS, Overflow
from oracle.rounding import bit_equal, bits, inside, interval, round_to, widen

FP8 = [fmt.dtype for fmt in FORMATS]
HALVES = [torch.float16, torch.bfloat16]
INF, NAN = math.inf, math.nan


def f64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def half_values(dtype: torch.dtype) -> torch.Tensor:
    """Non-negative values by code, infinity replaced by the power of two that rounding sees there."""
    if dtype is torch.float16:
        values = np.arange(0x7C01, dtype=np.uint16).view(np.float16).astype(np.float64)
        values[-1] = 2.0**16
    else:
        values = (np.arange(0x7F81, dtype=np.uint32) << 16).view(np.float32).astype(np.float64)
        values[-1] = 2.0**128
    return torch.from_numpy(values)


def codes_of(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return bits(round_to(x, dtype)).long() & 0xFFFF


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("negative", [False, True])
def test_every_half_value_and_midpoint(dtype: torch.dtype, negative: bool) -> None:
    values = half_values(dtype)
    code = torch.arange(len(values) - 1)
    middle = (values[:-1] + values[1:]) / 2
    even = code + code % 2
    sign, bit = (-1.0, 0x8000) if negative else (1.0, 0)
    up, down = middle.nextafter(f64(INF)), middle.nextafter(f64(0))
    for x, expected in ((values[:-1], code), (middle, even), (up, code + 1), (down, code)):
        assert torch.equal(codes_of(x * sign, dtype), expected | bit)


@pytest.mark.parametrize(("dtype", "ulp"), [(torch.bfloat16, 2.0**-7), (torch.float16, 2.0**-10)])
def test_no_double_rounding(dtype: torch.dtype, ulp: float) -> None:
    for tiny in (2.0**-25, 2.0**-40, 2.0**-52):
        x = 1 + ulp / 2 + tiny
        assert np.float32(x) == 1 + ulp / 2 or tiny == 2.0**-25  # float32 falls on the midpoint, or next to it
        assert widen(round_to(f64(x, -x), dtype)).tolist() == [1 + ulp, -1 - ulp]
        x = 1 + 3 * ulp / 2 - tiny
        assert widen(round_to(f64(x), dtype)).tolist() == [1 + ulp]


def test_no_double_rounding_among_subnormals() -> None:
    tiny = 2.0**-133  # the smallest bf16
    x = f64(tiny * 1.5 * (1 + 2.0**-52), tiny * 2.5 * (1 - 2.0**-53), tiny * 0.5, tiny * 0.5 * (1 + 2.0**-52))
    assert (widen(round_to(x, torch.bfloat16)) / tiny).tolist() == [2, 2, 0, 1]


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32, torch.float64])
def test_special_values(dtype: torch.dtype) -> None:
    out = round_to(f64(0.0, -0.0, INF, -INF, NAN, 1e308, -1e308, 5e-324), dtype)
    assert out.dtype == dtype
    huge = [1e308, -1e308, 5e-324] if dtype is torch.float64 else [INF, -INF, 0.0]
    wide = out.double()
    assert wide[[0, 1, 2, 3, 5, 6, 7]].tolist() == [0.0, 0.0, INF, -INF, *huge]
    assert wide[4].isnan()
    assert wide.signbit().tolist()[:4] == [False, True, False, True]


@pytest.mark.parametrize("dtype", HALVES)
def test_overflow_starts_half_an_ulp_above_max(dtype: torch.dtype) -> None:
    values = half_values(dtype)
    middle = float(values[-2] + values[-1]) / 2
    out = round_to(f64(middle, math.nextafter(middle, 0)), dtype).double().tolist()
    assert out == [INF, float(values[-2])]


def test_float32_midpoints() -> None:
    codes = np.random.Generator(np.random.Philox(7)).integers(0, 0x7F7FFFFF, 20000, dtype=np.int64)
    low, high = (c.astype(np.uint32).view(np.float32).astype(np.float64) for c in (codes, codes + 1))
    middle = torch.from_numpy((low + high) / 2)
    code = torch.from_numpy(codes)
    for x, expected in (
        (middle, code + code % 2),
        (middle.nextafter(f64(INF)), code + 1),
        (middle.nextafter(f64(0)), code),
    ):
        assert torch.equal(bits(round_to(x, torch.float32)).long(), expected)


@pytest.mark.parametrize("dtype", FP8)
def test_fp8_follows_the_overflow_rule(dtype: torch.dtype) -> None:
    largest = widen(round_to(f64(1e9), dtype))
    assert largest.isfinite().all()
    assert widen(round_to(f64(1e9), dtype, Overflow.NAN)).isnan().all()
    assert round_to(f64(0.3), dtype).dtype == dtype


@settings(deadline=None)
@given(x=st.floats(width=64, allow_nan=False, allow_infinity=False), dtype=st.sampled_from(HALVES))
def test_rounding_is_nearest(x: float, dtype: torch.dtype) -> None:
    values = half_values(dtype).tolist()
    magnitude = Fraction(abs(x))
    code = int(codes_of(f64(x), dtype)) & 0x7FFF
    error = abs(Fraction(values[code]) - magnitude)
    for neighbour in (code - 1, code + 1):
        if 0 <= neighbour < len(values):
            other = abs(Fraction(values[neighbour]) - magnitude)
            assert error < other or (error == other and code % 2 == 0)


def test_results_never_alias_the_input() -> None:
    x = f64(1.0)
    round_to(x, torch.float64).zero_()
    assert x.tolist() == [1.0]


def test_refusals() -> None:
    with pytest.raises(TypeError, match=r"float64, not torch\.float32"):
        round_to(torch.zeros(1), torch.bfloat16)
    with pytest.raises(TypeError, match=r"does not know torch\.int32"):
        round_to(f64(0.0), torch.int32)
    with pytest.raises(ValueError, match=r"Overflow\.NAN"):
        interval(f64(0.0), 0.0, torch.float8_e4m3fn, Overflow.NAN)
    for bound in (-1e-30, NAN):
        with pytest.raises(ValueError, match="bound: negative or NaN"):
            interval(f64(1.0), bound, torch.bfloat16)
    with pytest.raises(TypeError, match="cannot compare"):
        inside(torch.zeros(1), *interval(f64(0.0), 0.0, torch.bfloat16))


def accepts(out: float, expected: float, bound: float, dtype: torch.dtype) -> bool:
    return bool(inside(round_to(f64(out), dtype), *interval(f64(expected), bound, dtype)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALVES, *FP8])
def test_a_zero_bound_accepts_the_rounded_value_alone(dtype: torch.dtype) -> None:
    expected = f64(0.3, -1.7, 1.0, 0.0)
    low, high = interval(expected, 0.0, dtype)
    rounded = round_to(expected, dtype)
    assert bit_equal(low, rounded).all()
    assert inside(rounded, low, high).all()
    step = f64(INF) if dtype is torch.float64 else None
    above = expected.nextafter(step) if step is not None else expected * 1.5 + 0.1
    assert not inside(round_to(above, dtype), low, high).any()


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_special_expectations(dtype: torch.dtype) -> None:
    for infinity in (INF, -INF):
        assert accepts(infinity, infinity, 0.0, dtype)
        assert accepts(infinity, infinity, 1.0, dtype)
        assert not accepts(1.0, infinity, 1.0, dtype)
        assert not accepts(-infinity, infinity, 1.0, dtype)
        assert not accepts(infinity, 1.0, 1.0, dtype)
        for anything in (-INF, -1.0, 0.0, 1.0, INF):
            assert accepts(anything, infinity, INF, dtype)
            assert accepts(anything, 1.0, INF, dtype)
    assert accepts(0.0, -0.0, 0.0, dtype)
    assert accepts(-0.0, 0.0, 0.0, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES, *FP8])
def test_nan_is_inside_only_where_it_is_expected(dtype: torch.dtype) -> None:
    for bound in (0.0, 1.0, INF, NAN):
        assert accepts(NAN, NAN, bound, dtype)
        assert not accepts(0.0, NAN, bound, dtype)
    for bound in (0.0, 1.0, INF):
        assert not accepts(NAN, 1.0, bound, dtype)


def test_an_interval_reaches_infinity_where_the_bound_does() -> None:
    assert accepts(INF, 65000.0, 600.0, torch.float16)
    assert not accepts(INF, 65000.0, 500.0, torch.float16)
    assert accepts(448.0, 500.0, 1.0, torch.float8_e4m3fn)


def test_a_small_bound_beside_a_midpoint() -> None:
    below = 1 + 2.0**-8 - 2.0**-20
    assert not accepts(1 + 2.0**-7, below, 2.0**-21, torch.bfloat16)
    assert accepts(1 + 2.0**-7, below, 2.0**-19, torch.bfloat16)
    assert accepts(1.0, below, 2.0**-19, torch.bfloat16)


finite = st.floats(-1e30, 1e30, allow_nan=False)


@settings(deadline=None)
@given(expected=finite, bound=st.floats(0, 1e30), place=st.fractions(-1, 1), dtype=st.sampled_from(HALVES))
def test_intervals_are_sound(expected: float, bound: float, place: Fraction, dtype: torch.dtype) -> None:
    """Any value within the bound, whatever float64 makes of the ends, rounds to something inside."""
    exact = Fraction(expected) + Fraction(bound) * place
    result = float(exact)
    if abs(Fraction(result) - Fraction(expected)) <= Fraction(bound):
        assert accepts(result, expected, bound, dtype)


@settings(deadline=None)
@given(expected=finite, bound=st.floats(0, 1e30))
def test_ends_are_exact_or_one_step_outward(expected: float, bound: float) -> None:
    low, high = (float(end) for end in interval(f64(expected), bound, torch.float64))
    exact_low, exact_high = Fraction(expected) - Fraction(bound), Fraction(expected) + Fraction(bound)
    assert Fraction(low) <= exact_low < Fraction(math.nextafter(low, INF))
    assert Fraction(math.nextafter(high, -INF)) < exact_high <= Fraction(high)


def test_bounds_broadcast() -> None:
    low, high = interval(torch.ones(3, 2, dtype=torch.float64), f64(0.0, 0.5), torch.float32)
    assert low.tolist() == [[1.0, 0.5]] * 3
    assert high.tolist() == [[1.0, 1.5]] * 3


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, *HALVES, *FP8, torch.bool, torch.uint8, torch.int32, torch.int64]
)
def test_bits_share_memory_and_width(dtype: torch.dtype) -> None:
    tensor = torch.zeros(4, 6).to(dtype)
    view = bits(tensor)
    assert view.element_size() == tensor.element_size()
    assert view.shape == tensor.shape
    assert view.data_ptr() == tensor.data_ptr()
    assert not view.is_floating_point()
    assert bits(tensor.t()).shape == (6, 4)


def test_bit_equal_sees_what_numbers_hide() -> None:
    payloads = torch.tensor([0x7FC0, 0x7FC1, 0, -0x8000], dtype=torch.int16).view(torch.bfloat16)
    assert bit_equal(payloads, payloads.clone()).all()
    assert not bit_equal(payloads[:1], payloads[1:2]).any()
    assert not bit_equal(payloads[2:3], payloads[3:]).any()
    with pytest.raises(TypeError, match="cannot compare the bits"):
        bit_equal(payloads, payloads.view(torch.int16))
    with pytest.raises(ValueError, match="shapes"):
        bit_equal(payloads, payloads[:1])
    with pytest.raises(TypeError, match="no integer type"):
        bits(torch.zeros(1, dtype=torch.complex128))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES, *FP8])
def test_a_gpu_rounds_alike(dtype: torch.dtype) -> None:
    values = half_values(torch.bfloat16)
    middle = (values[:-1] + values[1:]) / 2
    x = torch.cat([values, middle, middle.nextafter(f64(INF)), middle.nextafter(f64(0))])
    assert bit_equal(round_to(x.cuda(), dtype).cpu(), round_to(x, dtype)).all()
    for ours, theirs in zip(interval(x, 0.01 * x, dtype), interval(x.cuda(), 0.01 * x.cuda(), dtype), strict=True):
        assert bit_equal(ours, theirs.cpu()).all()
