"""The language's table: every name of `triton.language` that kernels may use, and `triton` itself.

To add a function, write it over `Value` in one of the modules beside this one and enter it here; `certify`
asks for a reference of every function entered.
"""

from collections.abc import Callable
from enum import StrEnum
from types import ModuleType
from typing import Any

from fuzz.engine.emulator import blocks, dtypes, mathematics, reductions
from fuzz.engine.emulator.atomics import atomic
from fuzz.engine.emulator.casts import cast
from fuzz.engine.emulator.context import active
from fuzz.engine.emulator.dtypes import DType, PointerType
from fuzz.engine.emulator.errors import KernelError, UnknownName
from fuzz.engine.emulator.jit import Config, JITFunction, autotune, constexpr, heuristics, jit
from fuzz.engine.emulator.memory import load, store
from fuzz.engine.emulator.operators import arithmetic, bitwise, to, where
from fuzz.engine.emulator.rewrite import Runtime
from fuzz.engine.emulator.value import Value


class PropagateNan(StrEnum):
    """Argument of `maximum` and `minimum`."""

    NONE = "none"
    ALL = "all"


def _load(pointer: Value, mask: Any = None, other: Any = None, boundary_check: Any = (), *_: Any, **__: Any) -> Value:
    """Elements behind pointers; cache hints mean nothing here."""
    _no_block_pointer(boundary_check)
    return load(pointer, mask, other)


def _store(pointer: Value, value: Any, mask: Any = None, boundary_check: Any = (), *_: Any, **__: Any) -> None:
    """Write elements behind pointers."""
    _no_block_pointer(boundary_check)
    store(pointer, value, mask)


def _no_block_pointer(boundary_check: Any) -> None:
    if boundary_check:
        raise KernelError("block pointers are not covered by the emulator yet")


def _cast(x: Any, dtype: Any, fp_downcast_rounding: str | None = None, bitcast: bool = False, **_: Any) -> Value:
    """Conversion of a tensor or number."""
    return to(x if isinstance(x, Value) else Runtime.assigned(x), dtype, fp_downcast_rounding, bitcast)


def _static_assert(condition: Any, message: str = "", **_: Any) -> None:
    """A check at compile time."""
    if not bool(condition):
        raise KernelError(f"static_assert failed: {message}")


def _static_range(*bounds: Any, **_: Any) -> range:
    """A loop unrolled at compile time: its index is a Python integer."""
    return range(*(int(bound) for bound in bounds))


def _hint(x: Any, *_: Any, **__: Any) -> Any:
    """What a compiler may assume of `x`; changes nothing."""
    return x


def _nothing(*_: Any, **__: Any) -> None:
    """Debug aids and assumptions have no effect on results."""


def _exchange(old: Value, value: Value) -> Value:
    return cast(value, old.dtype)


def _select(function: Callable[..., Value]) -> Callable[[Value, Value], Value]:
    return lambda old, value: cast(function(old, value), old.dtype)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    # blocks and the grid
    "arange": blocks.arange,
    "broadcast": blocks.broadcast,
    "broadcast_to": blocks.broadcast_to,
    "expand_dims": blocks.expand_dims,
    "flip": blocks.flip,
    "full": blocks.full,
    "join": blocks.join,
    "num_programs": blocks.num_programs,
    "permute": blocks.trans,
    "program_id": blocks.program_id,
    "ravel": blocks.ravel,
    "reshape": blocks.reshape,
    "split": blocks.split,
    "trans": blocks.trans,
    "view": blocks.reshape,
    "zeros": blocks.zeros,
    "zeros_like": blocks.zeros_like,
    # memory
    "load": _load,
    "store": _store,
    "atomic_add": atomic(lambda old, value: arithmetic("add", old, value)),
    "atomic_and": atomic(lambda old, value: bitwise("and", old, value)),
    "atomic_max": atomic(_select(mathematics.maximum)),
    "atomic_min": atomic(_select(mathematics.minimum)),
    "atomic_or": atomic(lambda old, value: bitwise("or", old, value)),
    "atomic_xchg": atomic(_exchange),
    "atomic_xor": atomic(lambda old, value: bitwise("xor", old, value)),
    # lane by lane
    "abs": mathematics.absolute,
    "cast": _cast,
    "cdiv": mathematics.cdiv,
    "ceil": mathematics.ceil,
    "clamp": mathematics.clamp,
    "cos": mathematics.cos,
    "div_rn": mathematics.fdiv,
    "erf": mathematics.erf,
    "exp": mathematics.exp,
    "exp2": mathematics.exp2,
    "fdiv": mathematics.fdiv,
    "floor": mathematics.floor,
    "fma": mathematics.fma,
    "log": mathematics.log,
    "log2": mathematics.log2,
    "maximum": mathematics.maximum,
    "minimum": mathematics.minimum,
    "rsqrt": mathematics.rsqrt,
    "sigmoid": mathematics.sigmoid,
    "sin": mathematics.sin,
    "sqrt": mathematics.sqrt,
    "sqrt_rn": mathematics.sqrt,
    "where": where,
    # over an axis
    "argmax": reductions.argmax,
    "argmin": reductions.argmin,
    "dot": mathematics.dot,
    "max": reductions.max,
    "min": reductions.min,
    "reduce": reductions.reduce,
    "sum": reductions.sum,
    "xor_sum": reductions.xor_sum,
    # compile time
    "assume": _nothing,
    "debug_barrier": _nothing,
    "device_assert": _nothing,
    "device_print": _nothing,
    "max_constancy": _hint,
    "max_contiguous": _hint,
    "multiple_of": _hint,
    "range": Runtime.language_range,
    "static_assert": _static_assert,
    "static_print": _nothing,
    "static_range": _static_range,
}

TYPES: dict[str, DType] = {
    **{dtype.name: dtype for dtype in dtypes.INTEGERS},
    "float16": dtypes.float16,
    "bfloat16": dtypes.bfloat16,
    "float32": dtypes.float32,
    "float64": dtypes.float64,
    **{dtype.name.replace("fp8", "float8"): dtype for dtype in dtypes.FLOATS if dtype.is_fp8()},
}

_NAMES: dict[str, Any] = {
    "PropagateNan": PropagateNan,
    "constexpr": constexpr,
    "dtype": DType,
    "pointer_type": lambda element, *_: PointerType(element),
    "tensor": Value,
}

_METHODS = (
    *("abs", "argmax", "argmin", "broadcast_to", "cast", "cdiv", "ceil", "cos", "exp", "exp2", "expand_dims"),
    *(
        "floor",
        "log",
        "log2",
        "max",
        "min",
        "permute",
        "ravel",
        "reshape",
        "rsqrt",
        "sigmoid",
        "sin",
        "split",
    ),
    *("sqrt", "sum", "trans", "view", "xor_sum"),
)
for _name in _METHODS:
    setattr(Value, _name, blocks.as_method(FUNCTIONS[_name]))
setattr(Value, "__getitem__", blocks.subscript)  # noqa: B010 - the class is completed here, not declared
setattr(Value, "T", property(blocks.trans))  # noqa: B010

RUNTIME = Runtime(mathematics.minimum, mathematics.maximum)


class _Missing:
    """An unknown name met outside a kernel, at import perhaps: it complains only when it is used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise UnknownName(self._name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self._name}.{name}")


class SubstituteModule(ModuleType):
    """A module of the language. A name that it lacks is an UnknownName where a kernel uses it."""

    def __init__(self, name: str, alias: str, names: dict[str, Any]) -> None:
        super().__init__(name)
        self.__dict__.update(names, __path__=[], _alias=alias)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        missing = f"{self._alias}.{name}"
        if active().running:
            raise UnknownName(missing)
        return _Missing(missing)


def cdiv(x: int, y: int) -> int:
    """`triton.cdiv`: quotient rounded up."""
    return -(-x // y)


def next_power_of_2(n: int) -> int:
    """`triton.next_power_of_2`: the least power of two that is not below n; 0 stays 0."""
    return 1 << (n - 1).bit_length() if n > 0 else 0


def modules() -> dict[str, ModuleType]:
    """Fresh substitutes for `triton` and its submodules, by full name."""
    math = SubstituteModule("triton.language.math", "tl.math", FUNCTIONS)
    libdevice_names: dict[str, Any] = {
        **{name: FUNCTIONS[name] for name in ("abs", "ceil", "cos", "erf", "exp", "exp2", "floor", "fma")},
        **{name: FUNCTIONS[name] for name in ("log", "log2", "rsqrt", "sin", "sqrt")},
        "tanh": mathematics.tanh,
    }
    libdevice = SubstituteModule("triton.language.extra.libdevice", "libdevice", libdevice_names)
    vendors = {
        vendor: SubstituteModule(f"triton.language.extra.{vendor}", f"tl.extra.{vendor}", {"libdevice": libdevice})
        for vendor in ("cuda", "hip")
    }
    extra = SubstituteModule("triton.language.extra", "tl.extra", {"libdevice": libdevice, **vendors})
    language = SubstituteModule("triton.language", "tl", {**FUNCTIONS, **TYPES, **_NAMES, "math": math, "extra": extra})
    top = SubstituteModule(
        "triton",
        "triton",
        {
            "Config": Config,
            "JITFunction": JITFunction,
            "autotune": autotune,
            "cdiv": cdiv,
            "heuristics": heuristics,
            "jit": jit,
            "language": language,
            "next_power_of_2": next_power_of_2,
        },
    )
    by_vendor: dict[str, ModuleType] = {f"{module.__name__}.libdevice": libdevice for module in vendors.values()}
    named = (top, language, math, extra, libdevice, *vendors.values())
    return {**by_vendor, **{module.__name__: module for module in named}}
