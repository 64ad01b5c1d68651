"""Every code, every midpoint and every overflow boundary of the four fp8 formats."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oracle.fp8 import (
    E4M3FN,
    E4M3FNUZ,
    E5M2,
    E5M2FNUZ,
    FORMAT_OF_DTYPE,
    FORMAT_OF_NAME,
    FORMATS,
    Fp8Format,
    Overflow,
    decode,
    encode,
)

every_format = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)

# Max, smallest normal, smallest subnormal and the would-be successor of max, as published for each format.
PUBLISHED = {
    "e4m3fn": (448.0, 2.0**-6, 2.0**-9, 480.0),
    "e4m3fnuz": (240.0, 2.0**-7, 2.0**-10, 256.0),
    "e5m2": (57344.0, 2.0**-14, 2.0**-16, 65536.0),
    "e5m2fnuz": (57344.0, 2.0**-15, 2.0**-17, 65536.0),
}
NAN_CODES = {
    "e4m3fn": {0x7F, 0xFF},
    "e4m3fnuz": {0x80},
    "e5m2": {0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF},
    "e5m2fnuz": {0x80},
}


def all_codes() -> torch.Tensor:
    return torch.arange(256, dtype=torch.int32).to(torch.uint8)


def encode_one(x: float, fmt: Fp8Format, overflow: Overflow = Overflow.SATURATE) -> int:
    return int(encode(torch.tensor(x, dtype=torch.float64), fmt, overflow))


def ladder(fmt: Fp8Format) -> list[float]:
    """Finite non-negative values in order of code, and the successor that the format has no code for."""
    return [fmt.values[code] for code in range(fmt.max_code + 1)] + [PUBLISHED[fmt.name][3]]


def nearest_code(x: float, fmt: Fp8Format) -> int:
    """Slow reference: magnitude code of finite `x` by exact distance; max_code + 1 is overflow."""
    magnitude, steps = Fraction(abs(x)), ladder(fmt)
    distances = [(abs(Fraction(value) - magnitude), code % 2, code) for code, value in enumerate(steps)]
    return len(steps) - 1 if magnitude > steps[-1] else min(distances)[2]


@every_format
def test_limits_are_the_published_ones(fmt: Fp8Format) -> None:
    largest, normal, subnormal, successor = PUBLISHED[fmt.name]
    assert (fmt.max, fmt.smallest_normal, fmt.smallest_subnormal) == (largest, normal, subnormal)
    assert fmt.values[1] == subnormal
    assert fmt.values[1 << fmt.mantissa_bits] == normal
    assert successor - largest == largest - fmt.values[fmt.max_code - 1]


@every_format
def test_special_codes(fmt: Fp8Format) -> None:
    assert {code for code, value in enumerate(fmt.values) if math.isnan(value)} == NAN_CODES[fmt.name]
    infinite = {code: value for code, value in enumerate(fmt.values) if math.isinf(value)}
    assert infinite == ({0x7C: math.inf, 0xFC: -math.inf} if fmt is E5M2 else {})
    zeros = {code: math.copysign(1, value) for code, value in enumerate(fmt.values) if value == 0}
    assert zeros == ({0x00: 1.0, 0x80: -1.0} if fmt in (E4M3FN, E5M2) else {0x00: 1.0})


def test_the_same_byte_is_half_the_value_in_fnuz() -> None:
    for fn, fnuz in ((E4M3FN, E4M3FNUZ), (E5M2, E5M2FNUZ)):
        for code in range(1, fn.max_code + 1):
            assert fnuz.values[code] == fn.values[code] / 2


@every_format
def test_decode_agrees_with_torch_on_every_code(fmt: Fp8Format) -> None:
    codes = all_codes()
    ours, theirs = decode(codes, fmt), codes.view(fmt.dtype).to(torch.float64)
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(ours.nan_to_num(), theirs.nan_to_num())
    assert torch.equal(ours.signbit()[~ours.isnan()], theirs.signbit()[~theirs.isnan()])
    assert torch.equal(decode(codes.view(fmt.dtype), fmt).nan_to_num(), ours.nan_to_num())


@every_format
@pytest.mark.parametrize("overflow", Overflow)
def test_every_code_round_trips(fmt: Fp8Format, overflow: Overflow) -> None:
    if overflow is Overflow.INF and not fmt.has_inf:
        pytest.skip("the format has no infinity")
    codes = all_codes()
    finite = decode(codes, fmt).isfinite()
    assert torch.equal(encode(decode(codes, fmt), fmt, overflow)[finite], codes[finite])
    nan_codes = torch.tensor(sorted(NAN_CODES[fmt.name]), dtype=torch.uint8)
    assert (encode(decode(nan_codes, fmt), fmt, overflow) == fmt.nan_code).all()


@every_format
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_every_midpoint_and_its_float64_neighbours(fmt: Fp8Format, sign: float) -> None:
    steps = ladder(fmt)
    for code in range(fmt.max_code):
        middle = (steps[code] + steps[code + 1]) / 2
        assert Fraction(middle) * 2 == Fraction(steps[code]) + Fraction(steps[code + 1])
        even = code if code % 2 == 0 else code + 1
        cases = ((math.nextafter(middle, 0), code), (middle, even), (math.nextafter(middle, 1e9), code + 1))
        for x, magnitude_code in cases:
            negative_zero_lost = magnitude_code == 0 and not fmt.has_negative_zero
            expected = magnitude_code | (0x80 if sign < 0 and not negative_zero_lost else 0)
            assert encode_one(sign * x, fmt) == expected, (x, code)


@every_format
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_overflow_boundary_under_every_policy(fmt: Fp8Format, sign: float) -> None:
    largest, _, _, successor = PUBLISHED[fmt.name]
    middle = (largest + successor) / 2
    tie_stays = fmt.max_code % 2 == 0
    stays = [largest, math.nextafter(middle, 0)] + [middle] * tie_stays
    leaves = [math.nextafter(middle, math.inf), successor, 1e300, math.inf] + [middle] * (not tie_stays)
    bit = 0x80 if sign < 0 else 0
    for overflow in Overflow:
        if overflow is Overflow.INF and not fmt.has_inf:
            continue
        beyond = {
            Overflow.SATURATE: fmt.max_code | bit,
            Overflow.NAN: fmt.nan_code,
            Overflow.INF: 0x7C | bit,
        }[overflow]
        assert {encode_one(sign * x, fmt, overflow) for x in stays} == {fmt.max_code | bit}
        assert {encode_one(sign * x, fmt, overflow) for x in leaves} == {beyond}


def test_the_overflow_ties_are_where_the_formats_put_them() -> None:
    assert encode_one(464.0, E4M3FN, Overflow.NAN) == 0x7E
    assert encode_one(248.0, E4M3FNUZ, Overflow.NAN) == 0x80
    assert encode_one(61440.0, E5M2, Overflow.INF) == 0x7C
    assert encode_one(61440.0, E5M2FNUZ, Overflow.NAN) == 0x80


@every_format
def test_zeros_underflow_and_nan(fmt: Fp8Format) -> None:
    negative_zero = 0x80 if fmt.has_negative_zero else 0x00
    assert encode_one(0.0, fmt) == 0x00
    assert encode_one(-0.0, fmt) == negative_zero
    assert encode_one(5e-324, fmt) == 0x00
    assert encode_one(-5e-324, fmt) == negative_zero
    assert encode_one(-fmt.smallest_subnormal / 2, fmt) == negative_zero
    for nan in (math.nan, -math.nan):
        for overflow in (Overflow.SATURATE, Overflow.NAN):
            assert encode_one(nan, fmt, overflow) == fmt.nan_code


@every_format
@settings(deadline=None)
@given(x=st.floats(allow_nan=False, allow_infinity=False, width=64) | st.floats(-600, 600))
def test_encode_agrees_with_exact_distances(fmt: Fp8Format, x: float) -> None:
    code = nearest_code(x, fmt)
    negative = math.copysign(1, x) < 0 and (code != 0 or fmt.has_negative_zero)
    expected = min(code, fmt.max_code) | (0x80 if negative else 0)
    assert encode_one(x, fmt) == expected


def test_the_reference_is_able_to_disagree() -> None:
    assert nearest_code(464.0, E4M3FN) == 0x7E
    assert nearest_code(math.nextafter(464.0, 1e9), E4M3FN) == 0x7F
    assert nearest_code(E5M2.smallest_subnormal * 1.5, E5M2) == 2


def test_shapes_and_strides_are_kept() -> None:
    x = torch.linspace(-500, 500, 24, dtype=torch.float64).reshape(2, 3, 4)
    for view in (x, x.transpose(0, 2), x[:, ::2], x[:0], x[0, 0, 0]):
        codes = encode(view, E4M3FN, Overflow.SATURATE)
        assert codes.shape == view.shape
        assert torch.equal(codes, encode(view.clone().contiguous(), E4M3FN, Overflow.SATURATE))
        assert torch.equal(decode(codes, E4M3FN), decode(codes.contiguous(), E4M3FN))


def test_misuse_is_refused() -> None:
    with pytest.raises(ValueError, match="e4m3fn has no infinity"):
        encode_one(1.0, E4M3FN, Overflow.INF)
    with pytest.raises(TypeError, match=r"float64, not torch\.float32"):
        encode(torch.zeros(1), E4M3FN, Overflow.SATURATE)
    with pytest.raises(TypeError, match="e4m3fn come as"):
        decode(torch.zeros(1, dtype=torch.uint8).view(torch.float8_e5m2), E4M3FN)


def test_formats_are_found_by_dtype_and_name() -> None:
    assert FORMAT_OF_DTYPE[torch.float8_e4m3fnuz] is E4M3FNUZ
    assert FORMAT_OF_NAME["e5m2"] is E5M2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@every_format
def test_a_gpu_gives_the_same_codes(fmt: Fp8Format) -> None:
    steps = torch.tensor(ladder(fmt), dtype=torch.float64)
    middles = (steps[1:] + steps[:-1]) / 2
    infinity = torch.full_like(middles, math.inf)
    x = torch.cat([middles, middles.nextafter(infinity), middles.nextafter(-infinity), steps, infinity[:1]])
    x = torch.cat([x, -x, torch.tensor([math.nan], dtype=torch.float64)])
    for overflow in (Overflow.SATURATE, Overflow.NAN):
        assert torch.equal(encode(x.cuda(), fmt, overflow).cpu(), encode(x, fmt, overflow))
    decoded = decode(all_codes().cuda(), fmt).cpu()
    assert torch.equal(decoded.view(torch.int64), decode(all_codes(), fmt).view(torch.int64))
