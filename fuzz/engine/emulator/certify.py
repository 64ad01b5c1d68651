"""Self-check of the emulator: every function of the language and every cast, against references.

An engine is certified before its verdicts count. The check takes about a second.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fuzz.engine.emulator.casts import cast, to_bits
from fuzz.engine.emulator.context import Context, activate
from fuzz.engine.emulator.dtypes import (
    FLOATS,
    DType,
    bfloat16,
    float16,
    float32,
    float64,
    int8,
    int32,
    int64,
    uint8,
    uint32,
)
from fuzz.engine.emulator.errors import KernelError
from fuzz.engine.emulator.lang import FUNCTIONS
from fuzz.engine.emulator.operators import METHODS
from fuzz.engine.emulator.options import Fp8Overflow, Options
from fuzz.engine.emulator.references import ROWS, Array, Row, value
from fuzz.engine.emulator.session import session
from fuzz.engine.emulator.value import Value


@dataclass(frozen=True)
class Check:
    """One property; `detail` says in a line what was compared, or what differs."""

    name: str
    passed: bool
    detail: str


def certify() -> list[Check]:
    """Run every check. A check passes only if its counter-example is rejected as well."""
    with session():  # apart from whatever session is open
        checks = [_function(row) for row in ROWS]
    missing = ", ".join(sorted(FUNCTIONS.keys() - {row.name for row in ROWS}))
    checks.append(Check("table", not missing, f"without reference: {missing or 'none'}"))
    checks += [_operator(*row) for row in _OPERATORS]
    with np.errstate(all="ignore"):
        checks += [check for source in (bfloat16, float16) for check in _casts(source)]
    return checks


@np.errstate(all="ignore")
def _function(row: Row) -> Check:
    name = f"function {row.name}"
    try:
        result = _plain(row.call(*(value(array) for array in row.inputs)))
    except KernelError as error:
        return Check(name, False, str(error))
    return _judge(name, result, row.reference(*row.inputs), row.wrong(*row.inputs))


def _judge(name: str, result: Any, expected: Any, wrong: Any) -> Check:
    if not _equal(result, expected):
        return Check(name, False, f"got {result!r}, expected {expected!r}".replace("\n", ""))
    if _equal(result, wrong):
        return Check(name, False, "the counter-example was not told apart")
    return Check(name, True, "equal to its reference, counter-example rejected")


def _plain(result: Any) -> Any:
    if isinstance(result, Value):
        (data,) = result.data
        return data.numpy()
    return result


def _equal(a: Any, b: Any) -> bool:
    """Same type, shape and bits; a NaN equals any NaN."""
    if not isinstance(a, (np.ndarray, np.generic)) or not isinstance(b, (np.ndarray, np.generic)):
        return type(a) is type(b) and bool(a == b)
    x, y = np.asarray(a), np.asarray(b)
    if x.dtype != y.dtype or x.shape != y.shape:
        return False
    if x.dtype.kind != "f":
        return bool(np.array_equal(x, y))
    same = (x == y) & (np.signbit(x) == np.signbit(y))
    return bool((same | (np.isnan(x) & np.isnan(y))).all())


_A = np.array([-(2**31), -100, -7, -1, 0, 1, 6, 2**31 - 1], dtype=np.int32)
_B = np.array([-1, 3, 2, -2, 7, 5, -4, 10], dtype=np.int32)
_S = np.array([1, 2, 3, 4, 5, 6, 7, 8], dtype=np.int32)
_F = np.array([-7.5, -0.0, np.inf, np.nan, 0.1, 3e38, 1e-40, 0.0], dtype=np.float32)
_G = np.array([2.0, 3.0, np.inf, 1.0, 0.3, 10.0, 0.5, -2.0], dtype=np.float32)


def _truncated(a: Array, b: Array) -> Array:
    return np.trunc(a.astype(np.float64) / b).astype(np.int64).astype(np.int32)


def _remainder(a: Array, b: Array) -> Array:
    return (a - _truncated(a, b).astype(np.int64) * b).astype(np.int32)


_Operator = tuple[str, tuple[Array, ...], Callable[..., Array], Callable[..., Array]]
_OPERATORS: tuple[_Operator, ...] = (
    (
        "__add__",
        (_A, _B),
        np.add,
        lambda a, b: np.clip(a.astype(np.int64) + b, -(2**31), 2**31 - 1).astype("i4"),
    ),
    ("__sub__", (_A, _B), np.subtract, lambda a, b: b - a),
    ("__mul__", (_A, _B), np.multiply, lambda a, b: (a.astype(np.float64) * b).astype(np.float32)),
    ("__floordiv__", (_A, _B), _truncated, lambda a, b: a // b),
    ("__mod__", (_A, _B), _remainder, lambda a, b: a % b),
    ("__truediv__", (_A, _B), lambda a, b: a.astype("f4") / b.astype("f4"), lambda a, b: a / b),
    ("__and__", (_A, _B), np.bitwise_and, np.bitwise_or),
    ("__or__", (_A, _B), np.bitwise_or, np.bitwise_xor),
    ("__xor__", (_A, _B), np.bitwise_xor, np.bitwise_or),
    ("__lshift__", (_A, _S), np.left_shift, np.right_shift),
    ("__rshift__", (_A, _S), np.right_shift, lambda a, s: (a.view("u4") >> s.view("u4")).view("i4")),
    ("__invert__", (_A,), np.invert, np.negative),
    ("__neg__", (_F,), lambda f: np.float32(0) - f, np.negative),
    ("__add__", (_F, _G), np.add, lambda f, g: np.nextafter(f + g, np.float32(9))),
    ("__mul__", (_F, _G), np.multiply, lambda f, g: f.astype("f8") * g),
    ("__truediv__", (_F, _G), np.divide, lambda f, g: f * (1 / g)),
    ("__mod__", (_F, _G), np.fmod, np.mod),
    ("__lt__", (_F, _G), np.less, lambda f, g: ~(f >= g)),
    ("__le__", (_F, _G), np.less_equal, np.less),
    ("__gt__", (_F, _G), np.greater, lambda f, g: ~(f <= g)),
    ("__ge__", (_F, _G), np.greater_equal, np.greater),
    ("__eq__", (_F, _G), np.equal, lambda f, g: f.view("i4") != g.view("i4")),
    ("__ne__", (_F, _F), np.not_equal, lambda f, g: f.view("i4") != g.view("i4")),
)


@np.errstate(all="ignore")
def _operator(name: str, inputs: tuple[Array, ...], reference: Any, wrong: Any) -> Check:
    result = _plain(METHODS[name](*(value(array) for array in inputs)))
    kind = "float" if inputs[0].dtype.kind == "f" else "int"
    return _judge(f"operator {name} of {kind}", result, reference(*inputs), wrong(*inputs))


def _casts(source: DType) -> Iterator[Check]:
    """All 65,536 codes of a 16-bit type through the casts to every other type."""
    codes = np.arange(65536, dtype=np.uint16)
    # The type's values, decoded without torch: bf16 is the upper half of a float32.
    reals = (codes.astype(np.uint32) << 16).view(np.float32) if source is bfloat16 else codes.view(np.float16)
    wide = reals.astype(np.float64)
    start = Value(torch.from_numpy(codes.view(np.int16)).view(source.memory)[None], source)
    for target in (float32, float64):
        result = _plain(cast(start, target))
        expected = wide.astype(np.float32 if target is float32 else np.float64)
        yield _judge(f"cast {source} to {target}", result, expected, np.nextafter(expected, np.inf))
        back = to_bits(cast(cast(start, target), source).data[0], source).numpy().view(np.uint16)
        numbers = ~np.isnan(wide)
        yield _judge(f"cast {source} to {target} and back", back[numbers], codes[numbers], codes[numbers] ^ 1)
    for target in (int8, uint8, int32, uint32, int64):
        result = cast(start, target).data[0].numpy().astype(np.int64)
        low, high = target.minimum, target.maximum
        exact = [0 if x != x else int(min(max(x, low), high)) for x in np.trunc(wide).tolist()]
        rounded = np.rint(np.nan_to_num(np.clip(wide, low, min(high, 2**62)))).astype(np.int64)
        yield _judge(f"cast {source} to {target}", result, np.array(exact, dtype=np.int64), rounded)
    for target in FLOATS:
        if target.bits == 8:
            yield from (_fp8(start, wide, target, overflow) for overflow in Fp8Overflow)
    other = float16 if source is bfloat16 else bfloat16
    result = to_bits(cast(start, other).data[0], other).numpy().view(np.uint16)
    expected = _nearest(wide, other)
    numbers = ~np.isnan(wide)
    yield _judge(f"cast {source} to {other}", result[numbers], expected[numbers], (expected - 1)[numbers])


def _nearest(wide: Array, target: DType) -> Array:
    """Codes of float64 values in fp16 (by NumPy) or bf16 (by rounding the bits of their exact float32)."""
    if target is float16:
        return wide.astype(np.float16).view(np.uint16)
    bits = wide.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _fp8(start: Value, wide: Array, target: DType, overflow: Fp8Overflow) -> Check:
    """Against a search of the nearest value among all codes, as torch decodes them."""
    table = torch.arange(256, dtype=torch.uint8).view(target.memory).double().numpy()
    positive = table[:128][np.isfinite(table[:128])]
    spacing = positive[-1] - positive[-2]
    grid = np.append(positive, positive[-1] + spacing)
    magnitude = np.minimum(np.nan_to_num(np.abs(wide), nan=0.0), grid[-1])
    above = np.searchsorted(grid, magnitude).clip(1)
    low, high = magnitude - grid[above - 1], grid[above] - magnitude
    up = (high < low) | ((high == low) & (above % 2 == 0))
    code = np.where(up, above, above - 1)
    too_large = code >= len(positive)
    code = np.minimum(code, len(positive) - 1)
    expected = np.copysign(positive[code], wide)
    undefined = np.isnan(wide) | (too_large & (overflow is Fp8Overflow.NAN))
    expected[undefined] = np.nan
    if not np.signbit(table[128]) or np.isnan(table[128]):
        expected[expected == 0] = 0.0
    previous = activate(Context(options=Options(fp8_overflow=overflow)))
    try:
        codes = cast(start, target).data[0]
    finally:
        activate(previous)
    result = codes.view(target.memory).double().numpy()
    truncated = np.where(undefined, np.nan, np.copysign(positive[np.minimum(above - 1, code)], wide))
    return _judge(f"cast {start.dtype} to {target}, {overflow}", result, expected, truncated)
