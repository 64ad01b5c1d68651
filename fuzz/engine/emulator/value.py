"""The value type: a scalar or block of every program of a batch, with its taints."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
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

    def __bool__(self) -> bool:
        """Truth of a scalar in a condition. Raises Divergence where the programs of the batch disagree."""
        if self.data.ndim != 1:
            raise KernelError("a block stands where a condition needs a scalar")
        if isinstance(self.dtype, PointerType):
            return True
        if self.undefined is not None:
            report(FindingKind.UNDEFINED_BRANCH, self.undefined, None, None)
        truth = self.data != 0
        count = int(truth.sum())
        if 0 < count < len(truth):
            raise Divergence(truth)
        return count > 0

    def __index__(self) -> int:
        """A scalar as a Python integer, where the interpreter needs one; all programs must agree."""
        if self.data.ndim != 1 or not self.dtype.is_int():
            raise KernelError("only an integer scalar can stand here")
        low, high = self.range() if len(self.data) == 1 else (int(self.data.amin()), int(self.data.amax()))
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


@cache
def _constant(key: str, kind: type, dtype: DType) -> Value:
    from fuzz.engine.emulator.casts import from_number

    number = float.fromhex(key) if kind is float else int(key)
    return from_number(number, dtype)


def constant(number: Number, dtype: DType) -> Value:
    """A number as a scalar of type `dtype`, the same for all programs. Made once for each number and type."""
    if isinstance(number, float):
        return _constant(number.hex(), float, dtype)
    return _constant(str(int(number)), int, dtype)


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


def join_taints(ndim: int, *taints: Tensor | None) -> Tensor | None:
    """Union of masks, each lifted to `ndim` axes; None if all are None."""
    joined: Tensor | None = None
    for taint in taints:
        if taint is not None:
            taint = lift(taint, ndim)
            joined = taint if joined is None else joined | taint
    return joined


def common_type(a: Value | Number, b: Value | Number, *, division: bool = False) -> DType:
    """The type in which two operands of an operator meet. Raises KernelError where there is none."""
    types = [x.dtype if isinstance(x, Value) else None for x in (a, b)]
    if any(isinstance(t, PointerType) for t in types):
        raise KernelError("this operator takes no pointer")
    left, right = types
    if isinstance(left, DType) and isinstance(right, DType):
        return promote(left, right, division=division)
    if isinstance(left, DType) and not isinstance(b, Value):
        return promote_literal(b, left, division=division)
    if isinstance(right, DType) and not isinstance(a, Value):
        return promote_literal(a, right, division=division)
    return promote(as_value(a).dtype, as_value(b).dtype, division=division)  # type: ignore[arg-type]
