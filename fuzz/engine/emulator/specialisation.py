"""What a compiler would compile a launch for: the facts of its arguments that it looks at, and no more.

Which of the facts a compiler uses is the kernel's and the backend's choice (`do_not_specialize`, annotations);
here are all of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import torch

from fuzz.engine.emulator.dtypes import DType

_INT32 = range(-(1 << 31), 1 << 31)
_UINT64_ONLY = range(1 << 63, 1 << 64)


@dataclass(frozen=True)
class Pointer:
    """A tensor: torch's name of its dtype, whether its address is a multiple of 16, whether its storage ends
    within 2**31 - 1 bytes.
    """

    dtype: str
    aligned: bool
    small: bool


@dataclass(frozen=True)
class Scalar:
    """A number: `bool`, `float`, or an integer of the type `int32`, `int64` or `uint64` that holds it."""

    type: str
    one: bool = False
    divisible: bool = False
    """by 16; 0 is."""


@dataclass(frozen=True)
class Constant:
    """A value that is compiled in. `type` keeps apart what compares equal: True, 1 and 1.0.

    `value` is JSON's for `NoneType`, `bool`, `int`, `float` and `str`, the name for `dtype`, a tuple of
    Constants for `tuple`; of anything else, such as a function, it is the name, or the type's if it has none.
    """

    type: str
    value: Any


Argument = Pointer | Scalar | Constant | tuple["Argument", ...]


@dataclass(frozen=True)
class Specialisation:
    """One kernel, by file and name, for arguments of one kind and one choice of launch options (`num_warps`)."""

    file: str
    kernel: str
    arguments: tuple[tuple[str, Argument], ...]
    options: tuple[tuple[str, Any], ...] = ()


def constant(value: Any) -> Constant:
    """A value known at compile time."""
    if isinstance(value, DType):
        return Constant("dtype", value.name)
    if isinstance(value, (tuple, list)):
        return Constant("tuple", tuple(constant(item) for item in value))
    for plain in (bool, int, float, str):
        if isinstance(value, plain):
            return Constant(plain.__name__, plain(value))
    if value is None:
        return Constant("NoneType", None)
    kind = type(value).__name__
    return Constant(kind, str(getattr(value, "__name__", kind)))


def argument(value: Any) -> Argument:
    """A value known at the launch. None and whatever is no number, tensor or tuple of them is compiled in."""
    if isinstance(value, torch.Tensor):
        small = value.untyped_storage().nbytes() <= _INT32[-1]
        return Pointer(str(value.dtype).removeprefix("torch."), value.data_ptr() % 16 == 0, small)
    if isinstance(value, bool):
        return Scalar("bool")
    if isinstance(value, Integral):
        number = int(value)
        width = "int32" if number in _INT32 else "uint64" if number in _UINT64_ONLY else "int64"
        return Scalar(width, number == 1, number % 16 == 0)
    if isinstance(value, Real):
        return Scalar("float")
    if isinstance(value, (tuple, list)):
        return tuple(argument(item) for item in value)
    return constant(value)


def specialise(
    file: str, kernel: str, bound: Mapping[str, Any], constexprs: frozenset[str], options: Mapping[str, Any]
) -> Specialisation:
    """The specialisation of a launch with `bound` arguments, of which `constexprs` are declared so."""
    arguments = ((name, constant(v) if name in constexprs else argument(v)) for name, v in bound.items())
    return Specialisation(file, kernel, tuple(arguments), tuple(sorted(options.items())))
