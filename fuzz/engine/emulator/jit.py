"""`triton.jit` and what wraps it: kernels as objects that a grid indexes and arguments launch."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from numbers import Integral, Real
from typing import Any

import torch

from fuzz.engine.emulator.casts import cast
from fuzz.engine.emulator.context import active
from fuzz.engine.emulator.dtypes import DType, PointerType, float32
from fuzz.engine.emulator.errors import KernelError
from fuzz.engine.emulator.launch import Experience, Grid, launch
from fuzz.engine.emulator.memory import Buffer
from fuzz.engine.emulator.value import Value, as_value, constant

# Launch options of compilers: they change speed, not meaning.
_COMPILER_OPTIONS = frozenset(
    (
        *("num_warps", "num_stages", "num_ctas", "maxnreg", "debug", "warmup", "stream", "enable_fp_fusion"),
        *("launch_pdl", "launch_cooperative_grid", "sanitize_overflow", "waves_per_eu", "kpack"),
        *("matrix_instr_nonkdim", "instruction_sched_variant"),
    )
)


class constexpr:
    """Marks a parameter or a variable as known at compile time. Calling it gives back the plain value."""

    def __new__(cls, value: Any) -> Any:
        return value


def _is_constexpr(annotation: Any) -> bool:
    return annotation is constexpr or (isinstance(annotation, str) and annotation.endswith("constexpr"))


class JITFunction:
    """A kernel, or a helper that kernels call. `kernel[grid](*args, **meta)` launches it."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn
        self.__name__ = fn.__name__
        self.signature = inspect.signature(fn)
        self.arg_names = list(self.signature.parameters)
        self.constexprs = frozenset(
            name for name, p in self.signature.parameters.items() if _is_constexpr(p.annotation)
        )
        self._experience: dict[tuple[object, ...], Experience] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not active().running:
            raise KernelError(f"{self.__name__} is a jitted function: only a kernel calls it, a grid launches it")
        return self.fn(*args, **kwargs)

    def __getitem__(self, grid: Any) -> Callable[..., "CompiledKernel"]:
        return partial(self.run, grid=grid)

    def run(self, *args: Any, grid: Any, **kwargs: Any) -> "CompiledKernel":
        """Launch. `grid`: one to three integers, or a function of the bound arguments that returns them."""
        unknown = kwargs.keys() - self.signature.parameters.keys() - _COMPILER_OPTIONS
        if unknown:
            raise TypeError(f"kernel {self.__name__} has no parameter {', '.join(sorted(unknown))}")
        known = {name: value for name, value in kwargs.items() if name in self.signature.parameters}
        bound = self.signature.bind(*args, **known)
        bound.apply_defaults()
        return self.launch(dict(bound.arguments), grid, {})

    def launch(self, bound: dict[str, Any], grid: Any, elements: Mapping[str, DType]) -> "CompiledKernel":
        """Launch with bound arguments; `elements` overrides the element types of pointer arguments."""
        size = grid(bound) if callable(grid) else grid
        values = {
            name: value if name in self.constexprs else argument(value, name, elements.get(name))
            for name, value in bound.items()
        }
        key = tuple(repr(bound[name]) for name in self.arg_names if name in self.constexprs)
        experience = self._experience.setdefault(key, Experience())
        launch(self.__name__, partial(self.fn, **values), three(size), experience)
        return CompiledKernel(self, bound, values)


class CompiledKernel:
    """What a launch returns. Launched again it keeps what compilation fixed: compile-time constants, integer
    arguments that were 1 (Triton compiles them in), None arguments, and the types of pointers.
    """

    def __init__(self, function: JITFunction, bound: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        self.function = function
        self.fixed = {
            name: value
            for name, value in bound.items()
            if name in function.constexprs or value is None or (type(value) is int and value == 1)
        }
        self.elements = {
            name: value.dtype.element_ty
            for name, value in values.items()
            if isinstance(value, Value) and isinstance(value.dtype, PointerType)
        }

    def __getitem__(self, grid: Any) -> Callable[..., "CompiledKernel"]:
        return partial(self._run, grid)

    def _run(self, grid: Any, *args: Any) -> "CompiledKernel":
        names = self.function.arg_names
        if len(args) != len(names):
            names = [name for name in names if name not in self.function.constexprs]
        if len(args) != len(names):
            raise TypeError(f"kernel {self.function.__name__} takes {len(names)} arguments, got {len(args)}")
        given = {**dict(zip(names, args, strict=True)), **self.fixed}
        ordered = {name: given[name] for name in self.function.arg_names}
        self.function.launch(ordered, grid, self.elements)
        return self


def argument(value: Any, name: str, element: DType | None = None) -> Any:
    """A host value as a kernel sees it: tensors become pointers, numbers scalars (floats are float32)."""
    if isinstance(value, torch.Tensor):
        pointer = Buffer.of(value, name).pointer()
        return pointer if element is None else cast(pointer, PointerType(element))
    if isinstance(value, bool):
        return as_value(value)
    if isinstance(value, Integral):
        return as_value(int(value))
    if isinstance(value, Real):
        return constant(float(value), float32)
    if isinstance(value, (tuple, list)):
        return tuple(argument(item, f"{name}[{i}]") for i, item in enumerate(value))
    return value


def three(size: int | Sequence[int]) -> Grid:
    """A grid of three axes. Raises ValueError for a negative axis or more than three."""
    axes = [size] if isinstance(size, int) else [int(axis) for axis in size]
    if not 1 <= len(axes) <= 3 or min(axes) < 0:
        raise ValueError(f"a grid has one to three axes that are not negative, not {size}")
    x, y, z = (*axes, 1, 1)[:3]
    return x, y, z


def jit(fn: Callable[..., Any] | None = None, **_: Any) -> Any:
    """`triton.jit`, with or without arguments."""
    return JITFunction if fn is None else JITFunction(fn)


class Config:
    """A configuration of `triton.autotune`."""

    def __init__(self, kwargs: Mapping[str, Any], **_: Any) -> None:
        self.kwargs = dict(kwargs)


class _Preset:
    """A kernel with arguments supplied by a decorator, unless the caller gives them."""

    def __init__(self, kernel: Any, supply: Callable[[dict[str, Any]], Mapping[str, Any]]) -> None:
        self.kernel, self.supply = kernel, supply
        self.arg_names: list[str] = kernel.arg_names

    def __getitem__(self, grid: Any) -> Callable[..., CompiledKernel]:
        return partial(self.run, grid=grid)

    def run(self, *args: Any, grid: Any, **kwargs: Any) -> CompiledKernel:
        given = {**dict(zip(self.arg_names, args, strict=False)), **kwargs}
        result: CompiledKernel = self.kernel.run(grid=grid, **{**self.supply(given), **given})
        return result


def autotune(configs: Sequence[Config], **_: Any) -> Callable[[Any], _Preset]:
    """`triton.autotune`, tuned to its first configuration."""
    return lambda kernel: _Preset(kernel, lambda given: configs[0].kwargs)


def heuristics(values: Mapping[str, Callable[[dict[str, Any]], Any]]) -> Callable[[Any], _Preset]:
    """`triton.heuristics`: arguments computed from the others."""
    return lambda kernel: _Preset(kernel, lambda given: {name: rule(given) for name, rule in values.items()})
