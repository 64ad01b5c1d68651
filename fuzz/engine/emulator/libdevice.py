"""`triton.language.extra.libdevice`: functions of the vendors' device libraries.

The accurate ones are rounded once from float64; the fast ones are taken to be as good.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fuzz.engine.emulator import mathematics
from fuzz.engine.emulator.dtypes import float32, float64, int32
from fuzz.engine.emulator.errors import KernelError
from fuzz.engine.emulator.mathematics import elementwise, rounded_once, steady
from fuzz.engine.emulator.operators import Operand, level, operands
from fuzz.engine.emulator.value import Value, as_value, join_taints


def _pair(name: str, function: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Value]:
    """A function of two floats, computed in float64 and rounded once."""

    def apply(x: Operand, y: Operand, **_: Any) -> Value:
        left, right, dtype = operands(as_value(x), as_value(y))
        if dtype not in (float32, float64):
            raise KernelError(f"{name} takes fp32 or fp64, not {dtype}")
        a, b, ndim = level(left, right)
        a, b = torch.broadcast_tensors(a, b)
        halves = torch.stack([a, b], -1)
        data = steady(lambda flat: function(*flat.reshape(-1, 2).unbind(1)), halves, results=a.numel()).reshape(a.shape)
        return Value(data, dtype, undefined=join_taints(ndim, left.undefined, right.undefined))

    apply.__doc__ = f"{name} of each pair of lanes."
    return apply


def _test(name: str, function: Callable[[Tensor], Tensor]) -> Callable[..., Value]:
    """A predicate: int32, 0 or 1, as the libraries give it."""

    def apply(x: Operand, **_: Any) -> Value:
        value = as_value(x)
        if value.dtype not in (float32, float64):
            raise KernelError(f"{name} takes fp32 or fp64, not {value.dtype}")
        return Value(function(value.data).int(), int32, undefined=value.undefined)

    apply.__doc__ = f"{name} of each lane."
    return apply


def _away(x: Tensor) -> Tensor:
    """To the nearest integer, ties away from zero."""
    whole = x.trunc()
    return torch.where((x - whole).abs() >= 0.5, whole + x.sign(), whole)


_EXACT: dict[str, Callable[[Tensor], Tensor]] = {
    "nearbyint": torch.round,
    "rint": torch.round,
    "round": _away,
    "trunc": torch.trunc,
}
_ROUNDED: dict[str, Callable[[Tensor], Tensor]] = {
    "acos": torch.acos,
    "asin": torch.asin,
    "atan": torch.atan,
    "cosh": torch.cosh,
    "exp10": lambda x: torch.pow(10.0, x),
    "expm1": torch.expm1,
    "log10": torch.log10,
    "log1p": torch.log1p,
    "sinh": torch.sinh,
    "tan": torch.tan,
}
_FAST = {
    "fast_cosf": "cos",
    "fast_expf": "exp",
    "fast_log2f": "log2",
    "fast_logf": "log",
    "fast_sinf": "sin",
    "fast_tanhf": "tanh",
}
_SHARED = {
    **{name: getattr(mathematics, name) for name in ("ceil", "cos", "erf", "exp", "exp2", "floor", "fma", "log")},
    **{name: getattr(mathematics, name) for name in ("log2", "rsqrt", "sin", "sqrt", "tanh")},
    "abs": mathematics.absolute,
    "fabs": mathematics.absolute,
    "div_rn": mathematics.fdiv,
    "fast_dividef": mathematics.fdiv,
    "max": mathematics.maximum,
    "min": mathematics.minimum,
}

FUNCTIONS: dict[str, Callable[..., Any]] = {
    **_SHARED,
    **{fast: getattr(mathematics, name) for fast, name in _FAST.items()},
    **{name: elementwise(name, function) for name, function in _EXACT.items()},
    **{name: rounded_once(name, function) for name, function in _ROUNDED.items()},
    "atan2": _pair("atan2", torch.atan2),
    "copysign": _pair("copysign", torch.copysign),
    "fast_powf": _pair("fast_powf", torch.pow),
    "fmod": _pair("fmod", torch.fmod),
    "hypot": _pair("hypot", torch.hypot),
    "pow": _pair("pow", torch.pow),
    "finitef": _test("finitef", torch.isfinite),
    "isinf": _test("isinf", torch.isinf),
    "isnan": _test("isnan", torch.isnan),
    "signbit": _test("signbit", torch.signbit),
}
