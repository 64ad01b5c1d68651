"""References of scans, sorts, descriptors and device libraries: more rows for `certify`, as in `references`."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from fuzz.engine.emulator import libdevice
from fuzz.engine.emulator.lang import FUNCTIONS
from fuzz.engine.emulator.operators import arithmetic
from fuzz.engine.emulator.references import Array, Row, launched, once_rounded, row, value
from fuzz.engine.emulator.value import Value

_WAVE = np.round(np.sin(np.arange(32) * 1.7) * 64).astype(np.float32).reshape(4, 8)
_KEYS = np.array([[3, 0, 2, 1], [1, 1, 3, 0]], dtype=np.int32)
_BINS = np.array([0, 3, 3, 1, 9, -1, 3, 2], dtype=np.int32)
_MASK = np.array([1, 1, 0, 1, 1, 1, 1, 1], dtype=bool)
_I = np.array([-(2**31), -100, -7, -1, 0, 1, 6, 2**31 - 1], dtype=np.int32)
_J = np.array([3, -3, 2, -2, 7, 5, -4, 10], dtype=np.int32)
_SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, 3e38, 0.5, 1.5, 2.5, -0.5, -2.5]
_X = np.array([*_SPECIAL, *np.linspace(-9, 9, 52)], dtype=np.float32)
_Y = np.roll(_X, 7) + np.float32(0.25)
_UNIT = np.linspace(-0.99, 0.99, 64, dtype=np.float32)
_POSITIVE = np.linspace(0.03, 40, 64, dtype=np.float32)


def _last_kept(a: Value, b: Value) -> Value:
    """An operation that tells the order of its operands."""
    return arithmetic("add", arithmetic("mul", a, 2), b)


def _running(x: Array) -> Array:
    """The doubling scan of `_last_kept`, whose rounding-free result depends on how lanes are paired."""
    x, step = x.copy(), 1
    while step < x.shape[-1]:
        x[..., step:] = x[..., :-step] * 2 + x[..., step:]
        step *= 2
    return x


def _cas() -> Array:
    """Two programs swap at lanes of which two share an address: the second of them finds the first's value."""

    def body(pointer: Value) -> None:
        lanes, expected = (np.array(x, dtype=np.int32) for x in ([0, 1, 1, 3], [0, 10, 77, 5]))
        new = np.array([50, 77, 78, 79], dtype=np.int32)
        FUNCTIONS["atomic_cas"](arithmetic("add", pointer, value(lanes)), value(expected), value(new))

    return launched((2, 1, 1), 4, body)


def _block(pointer: Value, column: int) -> Any:
    """A block [4, 4] of a tensor [3, 5] with rows of 6 elements."""
    return FUNCTIONS["make_block_ptr"](pointer, [3, 5], [6, 1], [0, column], [4, 4], [1, 0])


def _through_block(column: int, by: int) -> Callable[[], Array]:
    def body(pointer: Value) -> None:
        block = _block(pointer, column)
        moved = FUNCTIONS["advance"](block, [0, by]) if by else block
        loaded = FUNCTIONS["load"](moved, boundary_check=(0, 1), padding_option="zero")
        FUNCTIONS["store"](moved, arithmetic("add", loaded, FUNCTIONS["sum"](loaded)), boundary_check=(0, 1))

    return lambda: launched((1, 1, 1), 24, body)


def _after_block(column: int, limit: int = 5) -> Callable[[], Array]:
    """What `_through_block` leaves: the block's elements within 3 rows and `limit` columns gain their sum."""

    def expected() -> Array:
        memory = np.arange(0, 240, 10, dtype=np.int32).reshape(4, 6)
        memory[:3, column : min(column + 4, limit)] += memory[:3, column : min(column + 4, limit)].sum()
        return memory.reshape(-1)

    return expected


def _through_descriptor(column: int) -> Callable[[], Array]:
    def body(pointer: Value) -> None:
        made = FUNCTIONS["make_tensor_descriptor"](pointer, [3, 5], [6, 1], [4, 4])
        loaded = FUNCTIONS["load_tensor_descriptor"](made, [0, column])
        total = arithmetic("add", loaded, FUNCTIONS["sum"](loaded))
        FUNCTIONS["store_tensor_descriptor"](made, [0, column], total)

    return lambda: launched((1, 1, 1), 24, body)


def _counted(bins: Array, mask: Array) -> Array:
    kept = bins[mask & (bins >= 0) & (bins < 4)]
    return np.bincount(kept, minlength=4).astype(np.int32)


def _folded(x: Array) -> Array:
    while x.shape[0] > 1:
        half = x.shape[0] // 2
        x = x[:half] + x[half:]
    return x


def _soft(m: Array) -> Array:
    powers = np.exp((m - m.max(0)).astype(np.float64)).astype(np.float32)
    return np.asarray(powers / _folded(powers))


_DESCRIPTORS = ("make_tensor_descriptor", "load_tensor_descriptor", "store_tensor_descriptor")

_LANGUAGE = (
    row("cat", (_J, _I), lambda j, i: np.concatenate([j, i]), lambda j, i: np.concatenate([i, j])),
    row("interleave", (_J, _I), lambda j, i: np.stack([j, i], -1).reshape(-1), lambda j, i: np.concatenate([j, i])),
    row("squeeze", (_WAVE[:, None],), lambda m: m[:, 0], lambda m: m, lambda m: FUNCTIONS["squeeze"](m, 1)),
    row("unsqueeze", (_WAVE,), lambda m: m[:, None], lambda m: m[None], lambda m: FUNCTIONS["unsqueeze"](m, 1)),
    row(
        "umulhi",
        (_I, _J),
        lambda i, j: (i.view("u4").astype("u8") * j.view("u4") >> np.uint64(32)).astype("u4").view("i4"),
        lambda i, j: (i.astype("i8") * j >> 32).astype("i4"),
    ),
    row("atomic_cas", (), lambda: np.array([50, 78, 20, 30], "i4"), lambda: np.array([50, 77, 20, 30], "i4"), _cas),
    row("make_block_ptr", (), _after_block(3), _after_block(3, 6), _through_block(3, 0)),
    row("advance", (), _after_block(2), _after_block(0), _through_block(0, 2)),
    *(row(name, (), _after_block(3), _after_block(3, 6), _through_descriptor(3)) for name in _DESCRIPTORS),
    row(
        "associative_scan",
        (_WAVE,),
        _running,
        lambda m: _running(m[:, ::-1]),
        lambda m: FUNCTIONS["associative_scan"](m, 1, _last_kept),
    ),
    row(
        "cumsum",
        (_WAVE,),
        lambda m: m[:, ::-1].cumsum(1)[:, ::-1],
        lambda m: m.cumsum(1),
        lambda m: FUNCTIONS["cumsum"](m, 1, reverse=True),
    ),
    row("cumprod", (_J,), lambda j: j.cumprod().astype("i4"), lambda j: j.cumsum().astype("i4")),
    row(
        "gather",
        (_WAVE[:2], _KEYS),
        lambda m, i: np.take_along_axis(m, i, 1),
        lambda m, i: np.take_along_axis(m, 3 - i, 1),
        lambda m, i: FUNCTIONS["gather"](m, i, 1),
    ),
    row(
        "histogram",
        (_BINS, _MASK),
        _counted,
        lambda bins, mask: _counted(bins, np.ones_like(mask)),
        lambda bins, mask: FUNCTIONS["histogram"](bins, 4, mask),
    ),
    row("softmax", (_WAVE,), _soft, lambda m: _soft(m.T).T),
    row("sort", (_WAVE,), lambda m: np.sort(m, 1), lambda m: np.sort(m, 0)),
    row(
        "topk",
        (_WAVE,),
        lambda m: np.sort(m, 1)[:, :-3:-1],
        lambda m: np.sort(m, 1)[:, :2],
        lambda m: FUNCTIONS["topk"](m, 2),
    ),
)


def _away(x: Array) -> Array:
    return np.where(np.abs(x - np.trunc(x)) >= 0.5, np.trunc(x) + np.sign(x), np.trunc(x))


def _flag(function: Callable[[Array], Array]) -> Callable[[Array], Array]:
    return lambda x: function(x).astype(np.int32)


# Name -> inputs, reference, a wrong answer.
_Entry = tuple[tuple[Array, ...], Callable[..., Any], Callable[..., Any]]
_DEVICE: dict[str, _Entry] = {
    "abs": ((_X,), np.abs, np.negative),
    "acos": ((_UNIT,), once_rounded(np.arccos), once_rounded(np.arcsin)),
    "asin": ((_UNIT,), once_rounded(np.arcsin), once_rounded(np.arctan)),
    "atan": ((_X,), once_rounded(np.arctan), once_rounded(np.tanh)),
    "atan2": ((_X, _Y), once_rounded(np.arctan2), once_rounded(lambda x, y: np.arctan(x / y))),
    "ceil": ((_X,), np.ceil, np.floor),
    "copysign": ((_X, _Y), np.copysign, lambda x, y: np.copysign(y, x)),
    "cos": ((_X,), once_rounded(np.cos), once_rounded(np.sin)),
    "cosh": ((_X,), once_rounded(np.cosh), once_rounded(np.sinh)),
    "div_rn": ((_X, _Y), np.divide, lambda x, y: x * (1 / y)),
    "erf": ((_X,), once_rounded(np.vectorize(math.erf)), once_rounded(np.tanh)),
    "exp": ((_X,), once_rounded(np.exp), once_rounded(np.exp2)),
    "exp10": ((_X,), once_rounded(lambda x: np.power(10.0, x)), once_rounded(np.exp)),
    "exp2": ((_X,), once_rounded(np.exp2), once_rounded(np.exp)),
    "expm1": ((_X,), once_rounded(np.expm1), lambda x: np.exp(x) - 1),
    "fabs": ((_X,), np.abs, np.negative),
    "fast_cosf": ((_X,), once_rounded(np.cos), once_rounded(np.sin)),
    "fast_dividef": ((_X, _Y), np.divide, lambda x, y: x * (1 / y)),
    "fast_expf": ((_X,), once_rounded(np.exp), once_rounded(np.exp2)),
    "fast_log2f": ((_POSITIVE,), once_rounded(np.log2), once_rounded(np.log)),
    "fast_logf": ((_POSITIVE,), once_rounded(np.log), once_rounded(np.log2)),
    "fast_powf": ((_POSITIVE, _UNIT), once_rounded(np.power), once_rounded(lambda x, y: np.power(x, -y))),
    "fast_sinf": ((_X,), once_rounded(np.sin), once_rounded(np.cos)),
    "fast_tanhf": ((_X,), once_rounded(np.tanh), once_rounded(np.arctan)),
    "finitef": ((_X,), _flag(np.isfinite), _flag(np.isnan)),
    "floor": ((_X,), np.floor, np.trunc),
    "fma": ((_X, _Y, _X), once_rounded(lambda x, y, z: x * y + z), lambda x, y, z: x * y + z),
    "fmod": ((_X, _Y), np.fmod, np.mod),
    "hypot": ((_X, _Y), once_rounded(np.hypot), lambda x, y: np.abs(x) + np.abs(y)),
    "isinf": ((_X,), _flag(np.isinf), _flag(np.isposinf)),
    "isnan": ((_X,), _flag(np.isnan), _flag(np.isinf)),
    "log": ((_POSITIVE,), once_rounded(np.log), once_rounded(np.log2)),
    "log10": ((_POSITIVE,), once_rounded(np.log10), once_rounded(np.log)),
    "log1p": ((_POSITIVE,), once_rounded(np.log1p), lambda x: np.log(x + np.float32(1))),
    "log2": ((_POSITIVE,), once_rounded(np.log2), once_rounded(np.log)),
    "max": ((_X, _Y), np.fmax, np.maximum),
    "min": ((_X, _Y), np.fmin, np.minimum),
    "nearbyint": ((_X,), np.rint, _away),
    "pow": ((_POSITIVE, _UNIT), once_rounded(np.power), once_rounded(lambda x, y: np.power(x, -y))),
    "rint": ((_X,), np.rint, _away),
    "round": ((_X,), _away, np.rint),
    "rsqrt": ((_POSITIVE,), once_rounded(lambda x: 1 / np.sqrt(x)), np.sqrt),
    "signbit": ((_X,), _flag(np.signbit), _flag(lambda x: x < 0)),
    "sin": ((_X,), once_rounded(np.sin), once_rounded(np.cos)),
    "sinh": ((_X,), once_rounded(np.sinh), once_rounded(np.cosh)),
    "sqrt": ((_POSITIVE,), np.sqrt, np.cbrt),
    "tan": ((_X,), once_rounded(np.tan), once_rounded(np.sin)),
    "tanh": ((_X,), once_rounded(np.tanh), once_rounded(np.arctan)),
    "trunc": ((_X,), np.trunc, np.floor),
}

ROWS: tuple[Row, ...] = (
    *_LANGUAGE,
    *(row(f"libdevice.{name}", *entry, libdevice.FUNCTIONS[name]) for name, entry in _DEVICE.items()),
)
