"""A reference in NumPy for every function of the language, with fixed inputs and one wrong answer each.

The wrong answer is a plausible mistake (floor for truncation, another base, a lane order): `certify` demands
that the function equals the reference bit for bit and that the mistake is told apart from it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fuzz.engine.emulator.dtypes import FROM_TORCH, float16, int32
from fuzz.engine.emulator.errors import KernelError
from fuzz.engine.emulator.lang import FUNCTIONS, PropagateNan
from fuzz.engine.emulator.launch import Experience, launch
from fuzz.engine.emulator.memory import Buffer
from fuzz.engine.emulator.operators import arithmetic
from fuzz.engine.emulator.value import Value

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Row:
    """`call` of the inputs as values must equal `reference` of the arrays, and not `wrong` of them."""

    name: str
    inputs: tuple[Array, ...]
    call: Callable[..., Any]
    reference: Callable[..., Any]
    wrong: Callable[..., Any]


def value(array: Array) -> Value:
    """An array as a value that all programs share."""
    data = torch.from_numpy(array.copy())[None]
    return Value(data, FROM_TORCH[data.dtype])


def row(
    name: str,
    inputs: tuple[Array, ...],
    reference: Callable[..., Any],
    wrong: Callable[..., Any],
    call: Callable[..., Any] | None = None,
) -> Row:
    """A row; without `call`, of the function of that name as it is."""
    return Row(name, inputs, call or FUNCTIONS[name], reference, wrong)


def once_rounded(function: Callable[..., Any]) -> Callable[..., Array]:
    """A float64 function of float32 arrays, rounded once."""
    return lambda *arrays: np.asarray(function(*(a.astype(np.float64) for a in arrays))).astype(np.float32)


_SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, 3e38, 0.5, 1.5, 2.5, -0.5, -2.5]
_X = np.array([*_SPECIAL, *np.linspace(-9, 9, 52)], dtype=np.float32)
_Y = np.roll(_X, 7) + np.float32(0.25)
_POSITIVE = np.linspace(0.03, 40, 64, dtype=np.float32)
_I = np.array([-(2**31), -100, -7, -1, 0, 1, 6, 2**31 - 1], dtype=np.int32)
_J = np.array([3, -3, 2, -2, 7, 5, -4, 10], dtype=np.int32)
_M = ((np.arange(32) * 7) % 13).astype(np.float32).reshape(4, 8)
_WAVE = np.sin(np.arange(32) * 1.7).astype(np.float32).reshape(4, 8)
_LANES = np.arange(8, dtype=np.int32)


def _folded(x: Array) -> Array:
    """Sum over the last axis, first half onto second half."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x[..., 0]


def _in_order(x: Array) -> Array:
    return np.add.accumulate(x, axis=-1, dtype=np.float32)[..., -1]


def launched(grid: tuple[int, int, int], size: int, body: Callable[[Value], None]) -> Array:
    """What a kernel leaves in a buffer of `size` int32 elements 0, 10, 20, ..."""
    memory = torch.arange(0, 10 * size, 10, dtype=torch.int32)
    pointer = Buffer.of(memory, "memory").pointer()
    launch("certify", lambda: body(pointer), grid, Experience())
    return memory.numpy()


def _ids(function: Callable[..., Value]) -> Callable[..., Array]:
    def body(pointer: Value) -> None:
        x, y = FUNCTIONS["program_id"](0), FUNCTIONS["program_id"](1)
        place = arithmetic("add", x, arithmetic("mul", y, 3))
        total = arithmetic("add", function(0), arithmetic("mul", function(1), 10))
        FUNCTIONS["store"](arithmetic("add", pointer, place), total)

    return lambda: launched((3, 2, 1), 6, body)


def _update(name: str) -> Callable[..., Array]:
    """An atomic on lanes of which two share an address, by two programs."""

    def body(pointer: Value) -> None:
        lanes = value(np.array([0, 1, 1, 3], dtype=np.int32))
        FUNCTIONS[name](arithmetic("add", pointer, lanes), value(np.array([7, 9, 12, 29], dtype=np.int32)))

    return lambda: launched((2, 1, 1), 4, body)


def _updated(function: Callable[[int, int], int], lanes: tuple[int, ...] = (0, 1, 1, 3)) -> Callable[..., Array]:
    def expected() -> Array:
        memory = [0, 10, 20, 30]
        for place, operand in 2 * list(zip(lanes, (7, 9, 12, 29), strict=True)):
            memory[place] = function(memory[place], operand)
        return np.array(memory, dtype=np.int32)

    return expected


def _atomic(name: str, function: Callable[[int, int], int], wrong: Callable[[int, int], int]) -> Row:
    return row(name, (), _updated(function), _updated(wrong), _update(name))


def _load(mask: Value, other: int) -> Array:
    loaded: list[Value] = []

    def body(pointer: Value) -> None:
        loaded.append(FUNCTIONS["load"](arithmetic("add", pointer, value(_LANES)), mask, other))

    launched((1, 1, 1), 8, body)
    return loaded[0].data[0].numpy()


def _store(lanes: Value, mask: Value) -> Array:
    return launched((1, 1, 1), 8, lambda p: FUNCTIONS["store"](arithmetic("add", p, lanes), lanes, mask))


def _range_total() -> int:
    def body(pointer: Value) -> None:
        total = sum(int(i) for i in FUNCTIONS["range"](FUNCTIONS["load"](arithmetic("add", pointer, 1)), 2, -3))
        FUNCTIONS["store"](pointer, total)

    return int(launched((1, 1, 1), 2, body)[0])


def _refuses(function: Callable[..., Any]) -> bool:
    try:
        function(False, "reason")
    except KernelError:
        return True
    return False


def _no_effect(name: str) -> Row:
    return row(name, (_I,), lambda i: None, lambda i: i)


def _same(name: str) -> Row:
    return row(name, (_I,), lambda i: i, lambda i: i + 1, lambda i: FUNCTIONS[name](i, 16))


_EVEN = _LANES % 2 == 0

ROWS: tuple[Row, ...] = (
    row(
        "arange",
        (),
        lambda: np.arange(3, 11, dtype=np.int32),
        lambda: _LANES,
        lambda: FUNCTIONS["arange"](3, 11),
    ),
    row(
        "broadcast",
        (_M[:, :1], _M[:1]),
        lambda a, b: np.broadcast_to(a, (4, 8)),
        lambda a, b: np.broadcast_to(b, (4, 8)),
        lambda a, b: FUNCTIONS["broadcast"](a, b)[0],
    ),
    row(
        "broadcast_to",
        (_I,),
        lambda i: np.broadcast_to(i, (4, 8)),
        lambda i: np.broadcast_to(i[:4, None], (4, 8)),
        lambda i: FUNCTIONS["broadcast_to"](i, [4, 8]),
    ),
    row(
        "expand_dims",
        (_M,),
        lambda m: m[:, None],
        lambda m: m[None],
        lambda m: FUNCTIONS["expand_dims"](m, 1),
    ),
    row("flip", (_M,), lambda m: m[:, ::-1], lambda m: m[::-1]),
    row(
        "full",
        (),
        lambda: np.full((2, 4), 2.5, np.float16),
        lambda: np.full((2, 4), 2.5, np.float32),
        lambda: FUNCTIONS["full"]([2, 4], 2.5, float16),
    ),
    row("join", (_X, _Y), lambda x, y: np.stack([x, y], -1), lambda x, y: np.stack([x, y])),
    row(
        "num_programs",
        (),
        lambda: np.full(6, 23, np.int32),
        lambda: np.full(6, 32, np.int32),
        _ids(FUNCTIONS["num_programs"]),
    ),
    row("permute", (_M,), lambda m: m.T, lambda m: m, lambda m: FUNCTIONS["permute"](m, [1, 0])),
    row(
        "program_id",
        (),
        lambda: np.array([0, 1, 2, 10, 11, 12], np.int32),
        lambda: np.array([0, 10, 1, 11, 2, 12], np.int32),
        _ids(FUNCTIONS["program_id"]),
    ),
    row("ravel", (_M,), lambda m: m.reshape(-1), lambda m: m.T.reshape(-1)),
    row("reshape", (_M,), lambda m: m.reshape(8, 4), lambda m: m.T, lambda m: FUNCTIONS["reshape"](m, 8, 4)),
    row(
        "split",
        (_M.reshape(16, 2),),
        lambda m: m[:, 1],
        lambda m: m[:, 0],
        lambda m: FUNCTIONS["split"](m)[1],
    ),
    row("trans", (_M,), lambda m: m.T, lambda m: m),
    row("view", (_M,), lambda m: m.reshape(2, 16), lambda m: m, lambda m: FUNCTIONS["view"](m, [2, 16])),
    row(
        "zeros",
        (),
        lambda: np.zeros((2, 2), np.int32),
        lambda: np.ones((2, 2), np.int32),
        lambda: FUNCTIONS["zeros"]([2, 2], int32),
    ),
    row("zeros_like", (_M,), np.zeros_like, np.ones_like),
    row(
        "load",
        (_EVEN,),
        lambda even: np.where(even, 10 * _LANES, -5).astype(np.int32),
        lambda even: np.where(even, 10 * _LANES, 0).astype(np.int32),
        lambda even: _load(even, -5),
    ),
    row(
        "store",
        (_LANES, _EVEN),
        lambda i, even: np.where(even, i, 10 * i).astype(np.int32),
        lambda i, even: i,
        _store,
    ),
    _atomic("atomic_add", lambda a, b: a + b, lambda a, b: b),
    _atomic("atomic_and", lambda a, b: a & b, lambda a, b: a | b),
    _atomic("atomic_max", max, min),
    _atomic("atomic_min", min, max),
    _atomic("atomic_or", lambda a, b: a | b, lambda a, b: a ^ b),
    _atomic("atomic_xchg", lambda a, b: b, lambda a, b: a),
    _atomic("atomic_xor", lambda a, b: a ^ b, lambda a, b: a | b),
    row("abs", (_X,), np.abs, np.negative),
    row(
        "cast",
        (_X[11:],),
        lambda x: np.trunc(x).astype(np.int32),
        lambda x: np.floor(x).astype(np.int32),
        lambda x: FUNCTIONS["cast"](x, int32),
    ),
    row(
        "cdiv",
        (_I[1:6], _J[1:6]),
        lambda i, j: np.trunc((i + (j - 1)) / j).astype(np.int32),
        lambda i, j: np.ceil(i / j).astype(np.int32),
    ),
    row("ceil", (_X,), np.ceil, np.round),
    row(
        "clamp",
        (_X, np.full_like(_X, -1), np.full_like(_X, 2)),
        lambda x, low, high: np.fmin(np.fmax(x, low), high),
        lambda x, low, high: np.clip(x, low, high),
    ),
    row("cos", (_X,), once_rounded(np.cos), once_rounded(np.sin)),
    row("div_rn", (_X, _Y), np.divide, lambda x, y: x * (1 / y)),
    row("erf", (_X,), once_rounded(np.vectorize(math.erf)), once_rounded(np.tanh)),
    row("exp", (_X,), once_rounded(np.exp), once_rounded(np.exp2)),
    row("exp2", (_X,), once_rounded(np.exp2), once_rounded(np.exp)),
    row("fdiv", (_X, _Y), np.divide, lambda x, y: x * (1 / y)),
    row("floor", (_X,), np.floor, np.trunc),
    row("fma", (_X, _Y, _X), once_rounded(lambda x, y, z: x * y + z), lambda x, y, z: x * y + z),
    row("log", (_POSITIVE,), once_rounded(np.log), once_rounded(np.log2)),
    row("log2", (_POSITIVE,), once_rounded(np.log2), once_rounded(np.log10)),
    row("maximum", (_X, _Y), np.fmax, np.maximum),
    row(
        "minimum",
        (_X, _Y),
        np.minimum,
        np.fmin,
        lambda x, y: FUNCTIONS["minimum"](x, y, propagate_nan=PropagateNan.ALL),
    ),
    row(
        "rsqrt",
        (_POSITIVE,),
        once_rounded(lambda x: 1 / np.sqrt(x)),
        lambda x: (1 / np.sqrt(x)) * np.float32(1.0000001),
    ),
    row(
        "sigmoid",
        (_X,),
        lambda x: np.float32(1) / (np.float32(1) + once_rounded(lambda z: np.exp(-z))(x)),
        once_rounded(np.tanh),
    ),
    row("sin", (_X,), once_rounded(np.sin), once_rounded(np.cos)),
    row("sqrt", (_POSITIVE,), np.sqrt, np.cbrt),
    row("sqrt_rn", (_POSITIVE,), np.sqrt, np.cbrt),
    row("where", (_X > 0, _X, _Y), np.where, lambda c, x, y: np.where(c, y, x)),
    row(
        "argmax",
        (_M,),
        lambda m: m.argmax(1).astype(np.int32),
        lambda m: m.argmin(1).astype(np.int32),
        lambda m: FUNCTIONS["argmax"](m, 1),
    ),
    row(
        "argmin",
        (_M % 5,),
        lambda m: m.argmin(1).astype(np.int32),
        lambda m: (7 - m[:, ::-1].argmin(1)).astype(np.int32),
        lambda m: FUNCTIONS["argmin"](m, 1),
    ),
    row(
        "dot",
        (_M, _M),
        lambda a, b: a @ b.T,
        lambda a, b: (a @ b.T).T + 1,
        lambda a, b: FUNCTIONS["dot"](a, FUNCTIONS["trans"](b)),
    ),
    row("max", (_X,), lambda x: np.float32(np.inf), lambda x: np.float32(np.nan)),
    row("min", (_M,), lambda m: m.min(0), lambda m: m.max(0), lambda m: FUNCTIONS["min"](m, 0)),
    row(
        "reduce",
        (_WAVE,),
        _folded,
        _in_order,
        lambda m: FUNCTIONS["reduce"](m, 1, lambda a, b: arithmetic("add", a, b)),
    ),
    row("sum", (_WAVE,), _folded, _in_order, lambda m: FUNCTIONS["sum"](m, 1)),
    row(
        "xor_sum",
        (_I,),
        lambda i: np.bitwise_xor.reduce(i),
        lambda i: np.bitwise_or.reduce(i),
        lambda i: FUNCTIONS["xor_sum"](i, 0),
    ),
    *(_no_effect(name) for name in ("assume", "debug_barrier", "device_assert", "device_print", "static_print")),
    *(_same(name) for name in ("max_constancy", "max_contiguous", "multiple_of")),
    row("range", (), lambda: 10 + 7 + 4, lambda: 10 + 7 + 4 + 1, _range_total),
    row("static_assert", (), lambda: True, lambda: False, lambda: _refuses(FUNCTIONS["static_assert"])),
    row(
        "static_range",
        (),
        lambda: [1, 4],
        lambda: [1, 4, 7],
        lambda: list(FUNCTIONS["static_range"](1, 7, 3)),
    ),
)
