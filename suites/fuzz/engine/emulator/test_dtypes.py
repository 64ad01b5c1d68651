"""Promotion as a table of Triton's rules; casts and division against NumPy; taints through operators."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fuzz.engine.emulator import KernelError
from fuzz.engine.emulator.casts import cast, reinterpret
from fuzz.engine.emulator.dtypes import (
    DType,
    bfloat16,
    float8e4nv,
    float8e5,
    float16,
    float32,
    float64,
    int1,
    int8,
    int16,
    int32,
    int64,
    promote,
    promote_literal,
    type_of_literal,
    uint8,
    uint16,
    uint32,
    uint64,
)
from fuzz.engine.emulator.operators import arithmetic, bitwise, compare, divide, true_divide, where
from fuzz.engine.emulator.rounding import narrow
from fuzz.engine.emulator.value import Value, as_value


def vector(items: object, dtype: DType) -> Value:
    return Value(torch.tensor([items], dtype=dtype.compute), dtype)


def lanes(value: Value) -> list[object]:
    (data,) = value.data
    return data.tolist()


@pytest.mark.parametrize(
    ("a", "b", "plain", "divided"),
    [
        (float32, float64, float64, float64),
        (float32, bfloat16, float32, float32),
        (float16, bfloat16, float16, float32),
        (float16, float16, float16, float32),
        (bfloat16, bfloat16, bfloat16, float32),
        (bfloat16, int32, float32, float32),
        (float16, int64, float16, float32),
        (float8e5, float8e5, float8e5, float8e5),
        (float8e5, float8e4nv, float16, float16),
        (float8e5, float32, float32, float32),
        (int32, int64, int64, int64),
        (int8, int16, int16, int16),
        (uint8, uint32, uint32, uint32),
        (int1, int1, int1, int1),
        (uint32, int32, uint32, None),
        (uint32, int64, int64, None),
        (uint8, int32, int32, None),
        (int64, uint64, uint64, None),
        (int1, int32, int32, None),
        (float8e5, int32, None, None),
    ],
)
def test_promotion_of_tensors(a: DType, b: DType, plain: DType | None, divided: DType | None) -> None:
    for left, right in ((a, b), (b, a)):
        for division, expected in ((False, plain), (True, divided)):
            if expected is None:
                with pytest.raises(KernelError):
                    promote(left, right, division=division)
            else:
                assert promote(left, right, division=division) is expected


@pytest.mark.parametrize(
    ("literal", "tensor", "plain", "divided"),
    [
        (1, bfloat16, bfloat16, float32),
        (0.1, bfloat16, bfloat16, float32),
        (0.1, float16, float16, float32),
        (0.1, float32, float32, float32),
        (1e300, float32, float32, float32),
        (0.1, int32, float32, float32),
        (1, int8, int8, int8),
        (1, uint32, uint32, uint32),
        (1, int1, int32, None),
        (True, int8, int8, int8),
        (0.1, float8e5, float8e5, float8e5),
        (300, int8, None, None),
        (-1, uint32, None, None),
        (2**40, int32, None, None),
        (2**40, int64, int64, int64),
    ],
)
def test_literals_are_weak(literal: float, tensor: DType, plain: DType | None, divided: DType | None) -> None:
    for division, expected in ((False, plain), (True, divided)):
        if expected is None:
            with pytest.raises(KernelError):
                promote_literal(literal, tensor, division=division)
        else:
            assert promote_literal(literal, tensor, division=division) is expected


def test_types_of_literals() -> None:
    literals = {
        int1: [True, False],
        int32: [0, -(2**31), 2**31 - 1],
        uint32: [2**31, 2**32 - 1],
        int64: [2**32, -(2**63)],
        uint64: [2**63, 2**64 - 1],
        float32: [0.0, -1.5, float("inf"), float("nan"), 3.4e38],
        float64: [1e300, 1e-40],
    }
    assert {dtype: [x for x in xs if type_of_literal(x) is dtype] for dtype, xs in literals.items()} == literals
    with pytest.raises(KernelError, match="no integer type"):
        type_of_literal(2**64)


def test_literals_round_to_the_type_before_the_operation() -> None:
    operands = torch.tensor([[9.0, 13.0, 18.0]], dtype=torch.bfloat16)
    product = arithmetic("mul", Value(operands, bfloat16), 0.1)
    rounded_first = (operands.float() * torch.tensor(0.1, dtype=torch.bfloat16).float()).bfloat16()
    assert torch.equal(product.data, rounded_first)
    assert not torch.equal(product.data, operands * 0.1)


SMALL = st.integers(-(2**31), 2**31 - 1)


@given(st.lists(st.tuples(SMALL, SMALL), min_size=1, max_size=8))
def test_integer_arithmetic_wraps_and_division_truncates(pairs: list[tuple[int, int]]) -> None:
    a, b = vector([p[0] for p in pairs], int32), vector([p[1] or 1 for p in pairs], int32)
    wrap = lambda n: (n + 2**31) % 2**32 - 2**31  # noqa: E731
    for name, exact in [
        ("add", lambda x, y: x + y),
        ("sub", lambda x, y: x - y),
        ("mul", lambda x, y: x * y),
    ]:
        result = arithmetic(name, a, b)
        expected = [exact(x, y or 1) for x, y in pairs]
        assert lanes(result) == [wrap(n) for n in expected]
        overflow = [n != wrap(n) for n in expected]
        assert (result.wrapped is not None) == any(overflow)
        if result.wrapped is not None:
            assert result.wrapped[0].tolist() == overflow
        if result.bounds is not None:
            assert all(result.bounds[0] <= n <= result.bounds[1] for n in expected)
    quotient, rest = divide("div", a, b), divide("mod", a, b)
    for x, y, q, r in zip(lanes(a), lanes(b), lanes(quotient), lanes(rest), strict=True):
        magnitude = abs(x) // abs(y)  # type: ignore[arg-type]
        exact_quotient = magnitude if (x < 0) == (y < 0) else -magnitude  # type: ignore[operator]
        assert q == wrap(exact_quotient)
        assert r == x - exact_quotient * y  # type: ignore[operator]


@given(st.integers(-(2**31), 2**31 - 1), st.integers(-(2**31), 2**31 - 1), st.integers(1, 2**31 - 1))
def test_bounds_through_division_hold(low: int, high: int, divisor: int) -> None:
    ends = vector(sorted((low, high)), int32)
    for name in ("div", "mod"):
        result = divide(name, ends, divisor)
        assert result.bounds is not None
        assert all(result.bounds[0] <= int(lane) <= result.bounds[1] for lane in lanes(result))  # type: ignore[call-overload]


def test_unsigned_types_stay_in_range() -> None:
    top = vector([2**32 - 1, 1], uint32)
    assert lanes(arithmetic("add", top, 1)) == [0, 2]
    assert lanes(arithmetic("mul", top, top)) == [1, 1]
    assert lanes(bitwise("shr", top, 4)) == [2**28 - 1, 0]
    assert lanes(cast(vector([-1, 5], int32), uint16)) == [2**16 - 1, 5]
    assert lanes(cast(vector([300, -1], int32), uint8)) == [44, 255]
    big = cast(vector([-1, 1], int64), uint64)
    assert lanes(compare(torch.gt, big, vector([5, 5], uint64))) == [True, False]
    with pytest.raises(KernelError, match="uint64"):
        divide("div", big, big)


def test_true_division_of_integers_and_halves_is_in_float32() -> None:
    assert true_divide(vector([7, -7], int32), 2).data.tolist() == [[3.5, -3.5]]
    for dtype in (float16, bfloat16):
        result = true_divide(vector([1.0], dtype), vector([3.0], dtype))
        assert (result.dtype, result.data.item()) == (float32, float(np.float32(1) / np.float32(3)))
    with pytest.raises(KernelError, match="takes integers"):
        divide("div", vector([1.0], float32), 2)


def test_division_by_zero_makes_the_lane_undefined() -> None:
    result = divide("div", vector([1, 4], int32), vector([0, 2], int32))
    assert result.undefined is not None
    assert result.undefined.tolist() == [[True, False]]
    assert lanes(result)[1] == 2


@given(st.lists(st.floats(width=64), min_size=1, max_size=8))
def test_float64_rounds_once_to_sixteen_bits(values: list[float]) -> None:
    wide = torch.tensor(values, dtype=torch.float64)
    with np.errstate(over="ignore"):
        expected = wide.numpy().astype(np.float16)
    assert np.array_equal(narrow(wide, float16).numpy(), expected, equal_nan=True)


def test_double_rounding_is_avoided() -> None:
    just_above = 1 + 2.0**-8 + 2.0**-40  # above a midpoint of bf16, on it once rounded to float32
    wide = torch.tensor([just_above, -just_above], dtype=torch.float64)
    assert narrow(wide, bfloat16).tolist() == [1 + 2.0**-7, -1 - 2.0**-7]
    assert wide.bfloat16().tolist() != narrow(wide, bfloat16).tolist()


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=16))
def test_float32_rounds_to_nearest_even(codes: list[int]) -> None:
    bits = np.array(codes, dtype=np.uint32)
    source = Value(torch.from_numpy(bits.view(np.float32).copy())[None], float32)
    numbers = ~np.isnan(bits.view(np.float32))
    with np.errstate(over="ignore"):
        expected = bits.view(np.float32).astype(np.float16)
    half = cast(source, float16).data[0].numpy()
    assert np.array_equal(half[numbers], expected[numbers])
    brain = cast(source, bfloat16).data[0].view(torch.int16).numpy().view(np.uint16)
    nearest = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    assert np.array_equal(brain[numbers], nearest[numbers])


def test_bitcast_keeps_bits() -> None:
    codes = torch.arange(256, dtype=torch.uint8)[None]
    for dtype in (float8e4nv, float8e5, int8):
        there = reinterpret(Value(codes, uint8), dtype)
        assert torch.equal(reinterpret(there, uint8).data, codes)
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)[None]
    for dtype in (float16, bfloat16, uint16):
        there = reinterpret(Value(halves, int16), dtype)
        assert torch.equal(reinterpret(there, int16).data, halves)
    with pytest.raises(KernelError, match="differ in width"):
        reinterpret(Value(halves, int16), float32)


def test_undefined_and_wrapped_lanes_travel() -> None:
    taint = torch.tensor([[True, False]])
    x = Value(torch.tensor([[1, 2]], dtype=torch.int32), int32, undefined=taint, wrapped=taint)
    results = [
        arithmetic("mul", x, 0),
        arithmetic("add", 1, x),
        divide("mod", x, 7),
        bitwise("and", x, 1),
        cast(x, int64),
        where(vector([True, True], int1), x, 0),
    ]
    for result in results:
        assert result.undefined is not None
        assert result.wrapped is not None
        assert result.undefined.tolist() == result.wrapped.tolist() == [[True, False]]
    cleared = where(vector([False, True], int1), x, 0)
    assert (cleared.undefined, cleared.wrapped) == (None, None)
    assert compare(torch.lt, x, 5).wrapped is None
    assert compare(torch.lt, x, 5).undefined is not None


def test_shapes_that_do_not_broadcast_are_refused() -> None:
    with pytest.raises(KernelError, match=r"\[2\] and \[3\] do not broadcast"):
        arithmetic("add", vector([1, 2], int32), vector([1, 2, 3], int32))


def test_constants_are_told_apart() -> None:
    assert as_value(0.0).data.signbit().item() is False
    assert as_value(-0.0).data.signbit().item() is True
    assert [as_value(x).dtype for x in (True, 1, 1.0)] == [int1, int32, float32]
