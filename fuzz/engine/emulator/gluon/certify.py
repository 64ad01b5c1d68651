"""A reference in NumPy for every function that Gluon adds, with one wrong answer each (see `references`)."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from fuzz.engine.emulator.dtypes import bfloat16, float16, float32, int8, int16, int32
from fuzz.engine.emulator.errors import KernelError
from fuzz.engine.emulator.gluon import layouts
from fuzz.engine.emulator.gluon.execution import begin
from fuzz.engine.emulator.gluon.shared import SharedMemory
from fuzz.engine.emulator.gluon.table import FUNCTIONS
from fuzz.engine.emulator.operators import arithmetic
from fuzz.engine.emulator.references import Array, Row, launched, value
from fuzz.engine.emulator.value import Value

_LANES = np.arange(8, dtype=np.int32)
_EVEN = _LANES % 2 == 0
_M = ((np.arange(32) * 7) % 13).astype(np.float32).reshape(4, 8)
_N = ((np.arange(32) * 5) % 11).astype(np.float32).reshape(8, 4)
_ACC = np.arange(16, dtype=np.float32).reshape(4, 4)
_X = np.linspace(-6, 6, 64, dtype=np.float32)
_Y = np.linspace(0.3, 5, 64, dtype=np.float32)
_BLOCKED = layouts.BlockedLayout([1, 1], [8, 8], [4, 1], [1, 0])
_LINE = layouts.SliceLayout(0, _BLOCKED)
_SHARED = layouts.SwizzledSharedLayout(1, 1, 1, order=[1, 0])


def _row(name: str, inputs: tuple[Array, ...], reference: Any, wrong: Any, call: Callable[..., Any]) -> Row:
    return Row(f"gl.{name}", inputs, call, reference, wrong)


def _within(size: int, body: Callable[[Value], None], programs: int = 1) -> Array:
    """What a kernel leaves in a buffer of int32 elements 0, 10, 20, ..."""

    def fresh(pointer: Value) -> None:
        begin(4)
        body(pointer)

    return launched((programs, 1, 1), size, fresh)


def _loaded(function: Callable[[Value], Value]) -> Array:
    """What `function` of a pointer to 0, 10, 20, ... 70 returns in a kernel."""
    kept: list[Value] = []
    _within(8, lambda pointer: kept.append(function(pointer)))
    return _plain(kept[0])


def _plain(x: Value) -> Array:
    (data,) = x.data
    plain: Array = data.numpy()
    return plain


def _buffer_rows(arch: str) -> tuple[Row, ...]:
    def atomic(name: str, function: Callable[[Array, Array], Array], wrong: Callable[[Array, Array], Array]) -> Row:
        operand = np.array([7, 9, 12, 29, 33, 41, 64, 5], dtype=np.int32)

        def call(lanes: Value, even: Value) -> Array:
            path = f"{arch}.{name}"
            return _within(8, lambda p: FUNCTIONS[path](p, lanes, value(operand), even), programs=2)

        def expected(update: Callable[[Array, Array], Array]) -> Callable[..., Array]:
            def twice(lanes: Array, even: Array) -> Array:
                memory = 10 * lanes
                for _ in range(2):
                    memory = np.where(even, update(memory, operand), memory).astype(np.int32)
                return memory

            return twice

        return _row(f"{arch}.{name}", (_LANES, _EVEN), expected(function), expected(wrong), call)

    def load(lanes: Value, even: Value) -> Array:
        return _loaded(lambda p: FUNCTIONS[f"{arch}.buffer_load"](p, lanes, even))

    def store(lanes: Value, even: Value) -> Array:
        return _within(8, lambda p: FUNCTIONS[f"{arch}.buffer_store"](lanes, p, lanes, even))

    return (
        atomic("buffer_atomic_add", np.add, lambda a, b: b),
        atomic("buffer_atomic_and", np.bitwise_and, np.bitwise_or),
        atomic("buffer_atomic_max", np.maximum, np.minimum),
        atomic("buffer_atomic_min", np.minimum, np.maximum),
        atomic("buffer_atomic_or", np.bitwise_or, np.bitwise_xor),
        atomic("buffer_atomic_xchg", lambda a, b: b, lambda a, b: a),
        atomic("buffer_atomic_xor", np.bitwise_xor, np.bitwise_or),
        _row(
            f"{arch}.buffer_load",
            (_LANES, _EVEN),
            lambda i, even: np.where(even, 10 * i, 0).astype(np.int32),
            lambda i, even: (10 * i).astype(np.int32),
            load,
        ),
        _row(
            f"{arch}.buffer_store",
            (_LANES, _EVEN),
            lambda i, even: np.where(even, i, 10 * i).astype(np.int32),
            lambda i, even: i,
            store,
        ),
        _row(
            f"{arch}.mfma",
            (_M, _N, _ACC),
            lambda a, b, acc: a @ b + acc,
            lambda a, b, acc: a @ b,
            lambda a, b, acc: FUNCTIONS[f"{arch}.mfma"](a, b, acc),
        ),
    )


def _memory(x: Value) -> SharedMemory:
    begin(4)
    memory: SharedMemory = FUNCTIONS["allocate_shared_memory"](x.dtype, list(x.shape), _SHARED, x)
    return memory


def _shared(change: Callable[[SharedMemory], SharedMemory]) -> Callable[[Value], Value]:
    return lambda x: change(_memory(x)).load(None)


def _stored_slice(x: Value) -> Value:
    """A block whose columns 4 to 7 were replaced by columns 0 to 3, through a view."""
    memory = _memory(x)
    memory.slice(4, 4, 1).store(memory.slice(0, 4, 1).load(None))
    return memory.load(None)


def _ring(x: Value) -> Value:
    """The second of two buffers of int32, after both were stored to."""
    begin(4)
    ring = FUNCTIONS["allocate_shared_memory"](x.dtype, [2, *x.shape], _SHARED)
    ring.index(0).store(arithmetic("add", x, 1.0))
    ring.index(1).store(x)
    loaded: Value = ring.index(1).load(_BLOCKED)
    return loaded


_ASYNC = "amd.cdna4.async_copy"
_ROW = layouts.SwizzledSharedLayout(1, 1, 1, order=[0])


def _copied(issue: Callable[[SharedMemory, Value], None], relaxed: bool = False) -> Array:
    """Shared memory of eight -1 after a copy into it was started and waited for."""

    def body(pointer: Value) -> Value:
        memory: SharedMemory = FUNCTIONS["allocate_shared_memory"](int32, [8], _ROW, value(0 * _LANES - 1))
        issue(memory, pointer)
        FUNCTIONS[f"{_ASYNC}.commit_group"]()
        FUNCTIONS[f"{_ASYNC}.wait_group"](0)
        return FUNCTIONS[f"{_ASYNC}.load_shared_relaxed"](memory, None) if relaxed else memory.load(None)

    return _loaded(body)


def _first_of_two_groups() -> Array:
    """What the first of two copies brought, when one may be outstanding still."""

    def body(pointer: Value) -> Value:
        first, second = (FUNCTIONS["allocate_shared_memory"](int32, [8], _ROW) for _ in range(2))
        for memory in (first, second):
            FUNCTIONS[f"{_ASYNC}.buffer_load_to_shared"](memory, pointer, value(_LANES))
            FUNCTIONS[f"{_ASYNC}.commit_group"]()
        FUNCTIONS[f"{_ASYNC}.wait_group"](1)
        landed = bool((second.state != 0).any())
        return arithmetic("add", first.load(None), 1000 if landed else 0)

    return _loaded(body)


_E4M3 = np.array([[0x38, 0xC0, 0x7E, 0x01] * 16] * 4, dtype=np.uint8)  # 1, -2, 448, 2^-9
_VALUES = np.array([[1.0, -2.0, 448.0, 2.0**-9] * 16] * 4, dtype=np.float32)
_CODES = np.array([[127, 130], [126, 127], [127, 127], [120, 121]], dtype=np.uint8)
_FP4 = np.array([[0x21, 0xF7] * 16] * 4, dtype=np.uint8)  # 0.5, 1, 6, -6
_FP4_VALUES = np.array([[0.5, 1.0, 6.0, -6.0] * 16] * 4, dtype=np.float32)
_FACTORS = np.repeat(2.0 ** (_CODES.astype(np.float32) - 127), 32, axis=1)


def _scaled(a: Value, scale: Value, b: Value) -> Array:
    packed = b.like(lambda data: data.transpose(-1, -2))
    acc = Value(torch.ones(1, 4, 4), float32)
    return _plain(FUNCTIONS["amd.cdna4.mfma_scaled"](a, scale, "e4m3", packed, scale, "e2m1", acc))


def _scaled_reference() -> Array:
    left, right = (_VALUES * _FACTORS).astype(np.float64), (_FP4_VALUES * _FACTORS).astype(np.float64)
    return np.asarray(left @ right.T + 1.0)


def _refuses(function: Callable[[], Any]) -> bool:
    try:
        function()
    except KernelError:
        return True
    return False


def _warps() -> Any:
    begin(2)
    return FUNCTIONS["num_warps"]()


def _no_effect(name: str) -> Row:
    return _row(name, (_M,), lambda m: None, lambda m: m, FUNCTIONS[name])


def _same(name: str) -> Row:
    return _row(name, (_M,), lambda m: m, lambda m: m.T, lambda m: FUNCTIONS[name](m, _BLOCKED))


def _async_rows() -> tuple[Row, ...]:
    buffered, from_pointers = FUNCTIONS[f"{_ASYNC}.buffer_load_to_shared"], FUNCTIONS[f"{_ASYNC}.global_load_to_shared"]

    def pointers(pointer: Value, lanes: Value) -> Value:
        return arithmetic("add", pointer, lanes)

    return (
        _row(
            f"{_ASYNC}.buffer_load_to_shared",
            (_LANES, _EVEN),
            lambda i, even: np.where(even, 10 * i, 0).astype(np.int32),
            lambda i, even: np.where(even, 10 * i, -1).astype(np.int32),
            lambda i, even: _copied(lambda memory, p: buffered(memory, p, i, even)),
        ),
        _row(
            f"{_ASYNC}.global_load_to_shared",
            (_LANES, _EVEN),
            lambda i, even: np.where(even, 10 * i, -1).astype(np.int32),
            lambda i, even: np.where(even, 10 * i, 0).astype(np.int32),
            lambda i, even: _copied(lambda memory, p: from_pointers(memory, pointers(p, i), even)),
        ),
        _row(
            f"{_ASYNC}.load_shared_relaxed",
            (_LANES,),
            lambda i: 10 * i,
            lambda i: 0 * i - 1,
            lambda i: _copied(lambda memory, p: buffered(memory, p, i), relaxed=True),
        ),
        _row(f"{_ASYNC}.commit_group", (), lambda: 10 * _LANES, lambda: 10 * _LANES + 1000, _first_of_two_groups),
        _row(f"{_ASYNC}.wait_group", (), lambda: 10 * _LANES, lambda: 0 * _LANES, _first_of_two_groups),
    )


def _halves(x: Array, kind: Any) -> Array:
    return np.ascontiguousarray(x.reshape(-1).view(kind)[:32].reshape(4, 8))


ROWS: tuple[Row, ...] = (
    _row("allocate_shared_memory", (_M,), lambda m: m, lambda m: m.T, _shared(lambda memory: memory)),
    _row("shared.permute", (_M,), lambda m: m.T, lambda m: m, _shared(lambda memory: memory.permute([1, 0]))),
    _row("shared.slice", (_M,), lambda m: m[2:4], lambda m: m[:2], _shared(lambda memory: memory.slice(2, 2))),
    _row(
        "shared.store through a slice",
        (_M,),
        lambda m: np.concatenate([m[:, :4], m[:, :4]], 1),
        lambda m: m,
        _stored_slice,
    ),
    _row("shared.index", (_M,), lambda m: m, lambda m: m + 1, _ring),
    _row(
        "shared.reshape",
        (_M,),
        lambda m: m.reshape(8, 4),
        lambda m: m.T,
        _shared(lambda memory: memory.reshape([8, 4])),
    ),
    _row(
        "shared._reinterpret",
        (_M,),
        lambda m: _halves(m, np.int16),
        lambda m: m.astype(np.int16),
        _shared(lambda memory: memory._reinterpret(int16, [4, 8], _SHARED)),
    ),
    _row(
        "arange",
        (),
        lambda: np.arange(3, 11, dtype=np.int32),
        lambda: _LANES,
        lambda: FUNCTIONS["arange"](3, 11, _LINE),
    ),
    _no_effect("barrier"),
    _no_effect("thread_barrier"),
    _same("convert_layout"),
    _same("set_auto_layout"),
    _row(
        "to_linear_layout",
        (),
        lambda: True,
        lambda: False,
        lambda: _refuses(lambda: FUNCTIONS["to_linear_layout"](_BLOCKED, [4])),
    ),
    _row(
        "dot_fma",
        (_M, _N, _ACC),
        lambda a, b, acc: a @ b + acc,
        lambda a, b, acc: acc,
        FUNCTIONS["dot_fma"],
    ),
    _row(
        "full",
        (),
        lambda: np.full((2, 4), 2.5, np.float16),
        lambda: np.full((2, 4), 2.5, np.float32),
        lambda: FUNCTIONS["full"]([2, 4], 2.5, float16, _BLOCKED),
    ),
    _row(
        "zeros",
        (),
        lambda: np.zeros((2, 2), np.int32),
        lambda: np.ones((2, 2), np.int32),
        lambda: FUNCTIONS["zeros"]([2, 2], int32, layout=_BLOCKED),
    ),
    _row("num_warps", (), lambda: 2, lambda: 4, _warps),
    *_buffer_rows("amd.cdna3"),
    *_buffer_rows("amd.cdna4"),
    _row(
        "amd.cdna4.mfma_scaled",
        (_E4M3, _CODES, _FP4),
        lambda a, scale, b: np.asarray(_scaled_reference(), dtype=np.float32),
        lambda a, scale, b: (_VALUES @ _FP4_VALUES.T + 1).astype(np.float32),
        _scaled,
    ),
    _row(
        "amd.cdna4.compute_efficient_padded_shared_layout",
        (),
        lambda: [[64, 8], [64, 16]],
        lambda: [[64, 16], [64, 8]],
        lambda: [
            list(
                FUNCTIONS["amd.cdna4.compute_efficient_padded_shared_layout"](
                    None, [32, 64], kind
                ).interval_padding_pairs[0]
            )
            for kind in (bfloat16, int8)
        ],
    ),
    _row(
        "amd.cdna4.get_mfma_scale_layout",
        (),
        lambda: True,
        lambda: False,
        lambda: _refuses(lambda: FUNCTIONS["amd.cdna4.get_mfma_scale_layout"](None, [4, 2], 16)),
    ),
    *_async_rows(),
)


def names() -> set[str]:
    """Functions that must have a row."""
    return {f"gl.{name}" for name in FUNCTIONS}
