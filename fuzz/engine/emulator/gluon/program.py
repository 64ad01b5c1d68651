"""`gluon.jit`, aggregates, compile-time functions and builtins: how Gluon code is put together."""

import inspect
from collections.abc import Callable
from functools import wraps
from types import MethodType
from typing import Any

from fuzz.engine.emulator.errors import KernelError, UnknownName
from fuzz.engine.emulator.gluon import matrix
from fuzz.engine.emulator.gluon.execution import begin
from fuzz.engine.emulator.jit import CompiledKernel, JITFunction
from fuzz.engine.emulator.rewrite import Runtime
from fuzz.engine.emulator.rows import AGGREGATE
from fuzz.engine.emulator.value import Value


class GluonFunction(JITFunction):
    """A Gluon kernel or helper. In a class it is a method of the instances."""

    _warps = 4

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def run(self, *args: Any, grid: Any, **kwargs: Any) -> CompiledKernel:
        """Launch, in programs of `num_warps` warps."""
        self._warps = int(kwargs.get("num_warps", 4))
        return super().run(*args, grid=grid, **kwargs)

    def body(self, **values: Any) -> None:
        """One execution, with its own shared memory and copies."""
        begin(self._warps)
        super().body(**values)


def jit(fn: Callable[..., Any] | None = None, **_: Any) -> Any:
    """`gluon.jit`, with or without arguments."""
    return GluonFunction if fn is None else GluonFunction(fn)


def constexpr_function(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function of compile-time values: plain Python. An assertion that fails there fails the compilation."""

    @wraps(fn)
    def apply(*args: Any, **kwargs: Any) -> Any:
        try:
            return fn(*args, **kwargs)
        except AssertionError as error:
            raise KernelError(f"{fn.__name__}: compile-time assertion failed: {error}") from error

    return apply


def aggregate(cls: type) -> type:
    """A class of named fields that kernels pass around. Numbers become scalars unless the field is a constexpr.

    A class without `__init__` takes its fields in the order of their annotations.
    """
    fields = inspect.get_annotations(cls)
    plain = {name for name, kind in fields.items() if not _is_constexpr(kind)}
    given = cls.__dict__.get("__init__") or _by_field(list(fields))

    @wraps(given)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        given(self, *args, **kwargs)
        for name in fields:
            if name not in self.__dict__:
                raise KernelError(f"{cls.__name__}: its __init__ leaves out field {name}")
            if name in plain:
                self.__dict__[name] = Runtime.assigned(self.__dict__[name])

    cls.__init__ = init  # type: ignore[misc]
    setattr(cls, AGGREGATE, tuple(fields))
    return cls


def _is_constexpr(annotation: Any) -> bool:
    name = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    return name.endswith("constexpr")


def _by_field(names: list[str]) -> Callable[..., None]:
    signature = inspect.Signature([inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names])

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        self.__dict__.update(signature.bind(*args, **kwargs).arguments)

    return init


class Semantic:
    """What a builtin's `_semantic` offers: the operations that the compiler's front end is made of."""

    dot_scaled = staticmethod(matrix.dot_scaled)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnknownName(f"gl._semantic.{name}")


SEMANTIC = Semantic()


def builtin(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a function of the host language that kernels call; it is handed the front end."""

    @wraps(fn)
    def apply(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **{**kwargs, "_semantic": SEMANTIC})

    return apply


class TensorType:
    """`gl.tensor`: an annotation, and the way to make a tensor of a handle."""

    def __new__(cls, handle: Value, type: Any) -> Value:  # type: ignore[misc]
        return handle


class Stage:
    """`gl.amd.warp_pipeline_stage`: a hint to the scheduler, as a context."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass
