"""The value type: a scalar or block of every program of a batch, with its taints."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fuzz.engine.emulator.context import active
from fuzz.engine.emulator.dtypes import (
    DType,
    PointerType,
    ScalarType,
    promote,
    promote_literal,
    type_of_literal,
)
from fuzz.engine.emulator.errors import Divergence, KernelError, UnknownName
from fuzz.engine.emulator.masks import either
from fuzz.engine.emulator.sanitizer import FindingKind, report

if TYPE_CHECKING:
    from fuzz.engine.emulator.memory import Buffer

Number = bool | int | float
Bounds = tuple[int, int]


class Value:
    """A tensor of the kernel's language, for a batch of programs at once. Never changed once made.

    `data` is [P or 1, *shape]: axis 0 runs over the programs of the batch; size 1 means the same for all. Its
    torch dtype is `dtype.compute`; a pointer's data are element offsets from the first element of `buffer`.
    `undefined` (bool, broadcastable to data) marks lanes that hold no meaning: masked-off lanes of a load and
    what is computed from them. `wrapped` marks lanes that come from an int32 result that did not fit.
    `bounds`: integers that no lane exceeds, if known; may be wide.
    """

    __slots__ = ("bounds", "buffer", "data", "dtype", "undefined", "wrapped")

    def __init__(
        self,
        data: Tensor,
        dtype: ScalarType,
        *,
        buffer: Buffer | None = None,
        undefined: Tensor | None = None,
        wrapped: Tensor | None = None,
        bounds: Bounds | None = None,
    ) -> None:
        self.data = data
        self.dtype = dtype
        self.buffer = buffer
        self.undefined = undefined
        self.wrapped = wrapped
        self.bounds = bounds
        context = active()
        elements = data.numel()
        if elements > context.largest:
            context.grew(elements)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the block; () for a scalar."""
        return tuple(self.data.shape[1:])

    @property
    def numel(self) -> int:
        return self.data[:1].numel()

    @property
    def type(self) -> ValueType:
        return ValueType(self.dtype, self.shape)

    def like(self, change: Callable[[Tensor], Tensor]) -> Value:
        """A rearrangement of this value: `change` applied to data and, expanded to its shape, each taint."""
        return Value(
            change(self.data),
            self.dtype,
            buffer=self.buffer,
            undefined=None if self.undefined is None else change(self.undefined.expand(self.data.shape)),
            wrapped=None if self.wrapped is None else change(self.wrapped.expand(self.data.shape)),
            bounds=self.bounds,
        )

    def range(self) -> Bounds:
        """Least and greatest lane of an integer value or a pointer's offsets."""
        if self.bounds is None:
            if self.data.dtype is torch.bool or self.data.numel() == 0:
                self.bounds = (0, 1)
            else:
                low, high = torch.aminmax(self.data)
                self.bounds = (int(low), int(high))
        return self.bounds

    def truth(self) -> bool | Tensor:
        """Truth of a scalar in a condition; of each program [P] where those of the batch disagree."""
        if self.data.ndim != 1:
            raise KernelError("a block stands where a condition needs a scalar")
        if isinstance(self.dtype, PointerType):
            return True
        if self.undefined is not None:
            report(FindingKind.UNDEFINED_BRANCH, self.undefined, None, None)
        truth = self.data != 0
        count = int(truth.sum())
        return truth if 0 < count < len(truth) else count > 0

    def __bool__(self) -> bool:
        """Truth of a scalar in a condition. Raises Divergence where the programs of the batch disagree."""
        truth = self.truth()
        if not isinstance(truth, bool):
            raise Divergence(truth)
        return truth

    def __index__(self) -> int:
        """A scalar as a Python integer, where the interpreter needs one; all programs must agree."""
        if self.data.ndim != 1 or not self.dtype.is_int():
            raise KernelError("only an integer scalar can stand here")
        low, high = int(self.data.amin()), int(self.data.amax())  # not `range`, which may be wide
        if low != high:
            raise Divergence(self.data)
        return low

    __int__ = __index__

    def __iter__(self) -> Any:
        raise KernelError("a block cannot be iterated")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnknownName(f"tensor.{name}")

    def __repr__(self) -> str:
        return f"Value({self.dtype}, {list(self.shape)}, programs={len(self.data)})"


class ValueType:
    """What `tensor.type` offers."""

    def __init__(self, dtype: ScalarType, shape: tuple[int, ...]) -> None:
        self.scalar, self.shape = dtype, shape
        self.element_ty = dtype.element_ty

    def is_block(self) -> bool:
        return bool(self.shape)

    def is_ptr(self) -> bool:
        return not self.shape and self.scalar.is_ptr()


@lru_cache(maxsize=4096, typed=True)
def _constant(number: Number, dtype: DType, sign: float) -> Value:
    from fuzz.engine.emulator.casts import from_number

    return from_number(number, dtype)


def constant(number: Number, dtype: DType) -> Value:
    """A number as a scalar of type `dtype`, the same for all programs."""
    # The sign tells the zeros apart, which are equal as keys.
    return _constant(number, dtype, 0.0 if number else math.copysign(1.0, number))


def as_value(x: Value | Number) -> Value:
    """A value as it is; a Python number as a scalar of the type that it has on its own."""
    if isinstance(x, Value):
        return x
    if isinstance(x, (bool, int, float)):
        return constant(x, type_of_literal(x))
    raise KernelError(f"{type(x).__name__} is no tensor and no number")


def lift(data: Tensor, ndim: int) -> Tensor:
    """`data` with unit axes put after the program axis until it has `ndim` axes."""
    if data.ndim == ndim:
        return data
    return data.reshape(data.shape[0], *([1] * (ndim - data.ndim)), *data.shape[1:])


def broadcast_shapes(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    """The common shape of two of equal rank. Raises KernelError where there is none."""
    if a == b:
        return a
    for m, n in zip(a, b, strict=True):
        if m != n and m != 1 and n != 1:
            raise KernelError(f"blocks of shapes {list(a[1:])} and {list(b[1:])} do not broadcast")
    return tuple(n if m == 1 else m for m, n in zip(a, b, strict=True))


def join_taints(ndim: int, *taints: Tensor | None) -> Tensor | None:
    """Union of masks, each lifted to `ndim` axes; None if all are None."""
    joined: Tensor | None = None
    for taint in taints:
        if taint is not None:
            taint = lift(taint, ndim)
            joined = taint if joined is None else either(joined, taint)
    return joined


def common_type(a: Value | Number, b: Value | Number, *, division: bool = False) -> DType:
    """The type in which two operands of an operator meet. Raises KernelError where there is none."""
    if isinstance(a, Value) and isinstance(b, Value):
        return promote(_scalar_type(a), _scalar_type(b), division=division)
    if isinstance(a, Value):
        return promote_literal(_number(b), _scalar_type(a), division=division)
    if isinstance(b, Value):
        return promote_literal(_number(a), _scalar_type(b), division=division)
    return promote(type_of_literal(a), type_of_literal(b), division=division)


def _scalar_type(x: Value) -> DType:
    if not isinstance(x.dtype, DType):
        raise KernelError("this operator takes no pointer")
    return x.dtype


def _number(x: Value | Number) -> Number:
    if not isinstance(x, (bool, int, float)):
        raise KernelError(f"{type(x).__name__} is no tensor and no number")
    return x
