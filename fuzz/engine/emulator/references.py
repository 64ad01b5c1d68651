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


def _row(
    name: str,
    inputs: tuple[Array, ...],
    reference: Callable[..., Any],
    wrong: Callable[..., Any],
    call: Callable[..., Any] | None = None,
) -> Row:
    return Row(name, inputs, call or FUNCTIONS[name], reference, wrong)


def _f32(function: Callable[..., Any]) -> Callable[..., Array]:
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


def _run(grid: tuple[int, int, int], size: int, body: Callable[[Value], None]) -> Array:
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

    return lambda: _run((3, 2, 1), 6, body)


def _update(name: str) -> Callable[..., Array]:
    """An atomic on lanes of which two share an address, by two programs."""

    def body(pointer: Value) -> None:
        lanes = value(np.array([0, 1, 1, 3], dtype=np.int32))
        FUNCTIONS[name](arithmetic("add", pointer, lanes), value(np.array([7, 9, 12, 29], dtype=np.int32)))

    return lambda: _run((2, 1, 1), 4, body)


def _updated(function: Callable[[int, int], int], lanes: tuple[int, ...] = (0, 1, 1, 3)) -> Callable[..., Array]:
    def expected() -> Array:
        memory = [0, 10, 20, 30]
        for place, operand in 2 * list(zip(lanes, (7, 9, 12, 29), strict=True)):
            memory[place] = function(memory[place], operand)
        return np.array(memory, dtype=np.int32)

    return expected


def _atomic(name: str, function: Callable[[int, int], int], wrong: Callable[[int, int], int]) -> Row:
    return _row(name, (), _updated(function), _updated(wrong), _update(name))


def _load(mask: Value, other: int) -> Array:
    loaded: list[Value] = []

    def body(pointer: Value) -> None:
        loaded.append(FUNCTIONS["load"](arithmetic("add", pointer, value(_LANES)), mask, other))

    _run((1, 1, 1), 8, body)
    return loaded[0].data[0].numpy()


def _store(lanes: Value, mask: Value) -> Array:
    return _run((1, 1, 1), 8, lambda p: FUNCTIONS["store"](arithmetic("add", p, lanes), lanes, mask))


def _range_total() -> int:
    def body(pointer: Value) -> None:
        total = sum(int(i) for i in FUNCTIONS["range"](FUNCTIONS["load"](arithmetic("add", pointer, 1)), 2, -3))
        FUNCTIONS["store"](pointer, total)

    return int(_run((1, 1, 1), 2, body)[0])


def _refuses(function: Callable[..., Any]) -> bool:
    try:
        function(False, "reason")
    except KernelError:
        return True
    return False


def _no_effect(name: str) -> Row:
    return _row(name, (_I,), lambda i: None, lambda i: i)


def _same(name: str) -> Row:
    return _row(name, (_I,), lambda i: i, lambda i: i + 1, lambda i: FUNCTIONS[name](i, 16))


_EVEN = _LANES % 2 == 0

ROWS: tuple[Row, ...] = (
    _row(
        "arange",
        (),
        lambda: np.arange(3, 11, dtype=np.int32),
        lambda: _LANES,
        lambda: FUNCTIONS["arange"](3, 11),
    ),
    _row(
        "broadcast",
        (_M[:, :1], _M[:1]),
        lambda a, b: np.broadcast_to(a, (4, 8)),
        lambda a, b: np.broadcast_to(b, (4, 8)),
        lambda a, b: FUNCTIONS["broadcast"](a, b)[0],
    ),
    _row(
        "broadcast_to",
        (_I,),
        lambda i: np.broadcast_to(i, (4, 8)),
        lambda i: np.broadcast_to(i[:4, None], (4, 8)),
        lambda i: FUNCTIONS["broadcast_to"](i, [4, 8]),
    ),
    _row(
        "expand_dims",
        (_M,),
        lambda m: m[:, None],
        lambda m: m[None],
        lambda m: FUNCTIONS["expand_dims"](m, 1),
    ),
    _row("flip", (_M,), lambda m: m[:, ::-1], lambda m: m[::-1]),
    _row(
        "full",
        (),
        lambda: np.full((2, 4), 2.5, np.float16),
        lambda: np.full((2, 4), 2.5, np.float32),
        lambda: FUNCTIONS["full"]([2, 4], 2.5, float16),
    ),
    _row("join", (_X, _Y), lambda x, y: np.stack([x, y], -1), lambda x, y: np.stack([x, y])),
    _row(
        "num_programs",
        (),
        lambda: np.full(6, 23, np.int32),
        lambda: np.full(6, 32, np.int32),
        _ids(FUNCTIONS["num_programs"]),
    ),
    _row("permute", (_M,), lambda m: m.T, lambda m: m, lambda m: FUNCTIONS["permute"](m, [1, 0])),
    _row(
        "program_id",
        (),
        lambda: np.array([0, 1, 2, 10, 11, 12], np.int32),
        lambda: np.array([0, 10, 1, 11, 2, 12], np.int32),
        _ids(FUNCTIONS["program_id"]),
    ),
    _row("ravel", (_M,), lambda m: m.reshape(-1), lambda m: m.T.reshape(-1)),
    _row("reshape", (_M,), lambda m: m.reshape(8, 4), lambda m: m.T, lambda m: FUNCTIONS["reshape"](m, 8, 4)),
    _row(
        "split",
        (_M.reshape(16, 2),),
        lambda m: m[:, 1],
        lambda m: m[:, 0],
        lambda m: FUNCTIONS["split"](m)[1],
    ),
    _row("trans", (_M,), lambda m: m.T, lambda m: m),
    _row("view", (_M,), lambda m: m.reshape(2, 16), lambda m: m, lambda m: FUNCTIONS["view"](m, [2, 16])),
    _row(
        "zeros",
        (),
        lambda: np.zeros((2, 2), np.int32),
        lambda: np.ones((2, 2), np.int32),
        lambda: FUNCTIONS["zeros"]([2, 2], int32),
    ),
    _row("zeros_like", (_M,), np.zeros_like, np.ones_like),
    _row(
        "load",
        (_EVEN,),
        lambda even: np.where(even, 10 * _LANES, -5).astype(np.int32),
        lambda even: np.where(even, 10 * _LANES, 0).astype(np.int32),
        lambda even: _load(even, -5),
    ),
    _row(
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
    _row("abs", (_X,), np.abs, np.negative),
    _row(
        "cast",
        (_X[11:],),
        lambda x: np.trunc(x).astype(np.int32),
        lambda x: np.floor(x).astype(np.int32),
        lambda x: FUNCTIONS["cast"](x, int32),
    ),
    _row(
        "cdiv",
        (_I[1:6], _J[1:6]),
        lambda i, j: np.trunc((i + (j - 1)) / j).astype(np.int32),
        lambda i, j: np.ceil(i / j).astype(np.int32),
    ),
    _row("ceil", (_X,), np.ceil, np.round),
    _row(
        "clamp",
        (_X, np.full_like(_X, -1), np.full_like(_X, 2)),
        lambda x, low, high: np.fmin(np.fmax(x, low), high),
        lambda x, low, high: np.clip(x, low, high),
    ),
    _row("cos", (_X,), _f32(np.cos), _f32(np.sin)),
    _row("div_rn", (_X, _Y), np.divide, lambda x, y: x * (1 / y)),
    _row("erf", (_X,), _f32(np.vectorize(math.erf)), _f32(np.tanh)),
    _row("exp", (_X,), _f32(np.exp), _f32(np.exp2)),
    _row("exp2", (_X,), _f32(np.exp2), _f32(np.exp)),
    _row("fdiv", (_X, _Y), np.divide, lambda x, y: x * (1 / y)),
    _row("floor", (_X,), np.floor, np.trunc),
    _row("fma", (_X, _Y, _X), _f32(lambda x, y, z: x * y + z), lambda x, y, z: x * y + z),
    _row("log", (_POSITIVE,), _f32(np.log), _f32(np.log2)),
    _row("log2", (_POSITIVE,), _f32(np.log2), _f32(np.log10)),
    _row("maximum", (_X, _Y), np.fmax, np.maximum),
    _row(
        "minimum",
        (_X, _Y),
        np.minimum,
        np.fmin,
        lambda x, y: FUNCTIONS["minimum"](x, y, propagate_nan=PropagateNan.ALL),
    ),
    _row(
        "rsqrt",
        (_POSITIVE,),
        _f32(lambda x: 1 / np.sqrt(x)),
        lambda x: (1 / np.sqrt(x)) * np.float32(1.0000001),
    ),
    _row(
        "sigmoid",
        (_X,),
        lambda x: np.float32(1) / (np.float32(1) + _f32(lambda z: np.exp(-z))(x)),
        _f32(np.tanh),
    ),
    _row("sin", (_X,), _f32(np.sin), _f32(np.cos)),
    _row("sqrt", (_POSITIVE,), np.sqrt, np.cbrt),
    _row("sqrt_rn", (_POSITIVE,), np.sqrt, np.cbrt),
    _row("where", (_X > 0, _X, _Y), np.where, lambda c, x, y: np.where(c, y, x)),
    _row(
        "argmax",
        (_M,),
        lambda m: m.argmax(1).astype(np.int32),
        lambda m: m.argmin(1).astype(np.int32),
        lambda m: FUNCTIONS["argmax"](m, 1),
    ),
    _row(
        "argmin",
        (_M % 5,),
        lambda m: m.argmin(1).astype(np.int32),
        lambda m: (7 - m[:, ::-1].argmin(1)).astype(np.int32),
        lambda m: FUNCTIONS["argmin"](m, 1),
    ),
    _row(
        "dot",
        (_M, _M),
        lambda a, b: a @ b.T,
        lambda a, b: (a @ b.T).T + 1,
        lambda a, b: FUNCTIONS["dot"](a, FUNCTIONS["trans"](b)),
    ),
    _row("max", (_X,), lambda x: np.float32(np.inf), lambda x: np.float32(np.nan)),
    _row("min", (_M,), lambda m: m.min(0), lambda m: m.max(0), lambda m: FUNCTIONS["min"](m, 0)),
    _row(
        "reduce",
        (_WAVE,),
        _folded,
        _in_order,
        lambda m: FUNCTIONS["reduce"](m, 1, lambda a, b: arithmetic("add", a, b)),
    ),
    _row("sum", (_WAVE,), _folded, _in_order, lambda m: FUNCTIONS["sum"](m, 1)),
    _row(
        "xor_sum",
        (_I,),
        lambda i: np.bitwise_xor.reduce(i),
        lambda i: np.bitwise_or.reduce(i),
        lambda i: FUNCTIONS["xor_sum"](i, 0),
    ),
    *(_no_effect(name) for name in ("assume", "debug_barrier", "device_assert", "device_print", "static_print")),
    *(_same(name) for name in ("max_constancy", "max_contiguous", "multiple_of")),
    _row("range", (), lambda: 10 + 7 + 4, lambda: 10 + 7 + 4 + 1, _range_total),
    _row("static_assert", (), lambda: True, lambda: False, lambda: _refuses(FUNCTIONS["static_assert"])),
    _row(
        "static_range",
        (),
        lambda: [1, 4],
        lambda: [1, 4, 7],
        lambda: list(FUNCTIONS["static_range"](1, 7, 3)),
    ),
)
