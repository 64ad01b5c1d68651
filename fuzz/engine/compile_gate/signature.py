"""What Triton is told about the arguments of a specialisation: their types, constants and attributes.

The rules are those of Triton's launcher (`runtime/jit.py` and the backends' `get_tensor_specialization`),
which is not asked itself because it wants a GPU; the tests hold them against it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fuzz.engine.emulator.specialisation import Argument, Constant, Pointer, Scalar, Specialisation

Path = tuple[int, ...]
"""Where an argument is: its position, then positions within tuples."""

DIVISIBLE = ["tt.divisibility", 16]
WITHIN_2_GIB = ["tt.pointer_range", 32]


class CannotRebuild(Exception):
    """A launch that was recorded without what the real kernel wants to know. One line."""


@dataclass(frozen=True)
class Dialect:
    """What differs between backends and versions of Triton.

    ``type_names``: Triton's short names by torch's and Python's; ``pointer_range``: the backend wants to know
    which buffers end within 2 GiB; ``dtype`` and ``function`` make a compile-time type or function of a name.
    """

    type_names: dict[str, str]
    pointer_range: bool
    dtype: Callable[[str], Any]
    function: Callable[[str], Any]


@dataclass
class Signature:
    """Arguments of ``ASTSource``: types by parameter name, constants and attributes by path."""

    types: dict[str, Any] = field(default_factory=dict)
    constants: dict[Path, Any] = field(default_factory=dict)
    attributes: dict[Path, list[list[object]]] = field(default_factory=dict)


def signature(parameters: list[Any], specialisation: Specialisation, dialect: Dialect) -> Signature:
    """The signature for a kernel with these parameters (Triton's ``KernelParam``).

    Raises ``CannotRebuild`` for a compile-time value that is neither plain, a type nor a function, and for a
    parameter that the recorded launch did not have.
    """
    arguments, built = dict(specialisation.arguments), Signature()
    for position, parameter in enumerate(parameters):
        name = parameter.name
        if name not in arguments:
            raise CannotRebuild(f"the recorded launch has no argument {name}")
        argument = arguments[name]
        if parameter.is_constexpr:
            built.types[name] = "constexpr"
            built.constants[(position,)] = _value(argument, name, dialect)
            continue
        built.types[name] = _Walk(built, dialect, name).type_of(
            argument,
            (position,),
            specialise=not parameter.do_not_specialize,
            align=not parameter.do_not_specialize_on_alignment,
            const=parameter.is_const,
        )
        if parameter.annotation_type:
            _annotate(built, name, (position,), parameter.annotation_type)
    return built


def _annotate(built: Signature, name: str, path: Path, annotation: str) -> None:
    """An annotated parameter has its annotation's type: 1 and None are not compiled in."""
    built.types[name] = annotation
    built.constants.pop(path, None)
    if annotation == "u1" or annotation[:2] in ("fp", "bf"):
        built.attributes.pop(path, None)


@dataclass(frozen=True)
class _Walk:
    built: Signature
    dialect: Dialect
    name: str

    def type_of(self, argument: Argument, path: Path, *, specialise: bool, align: bool, const: bool) -> Any:
        """Triton's type of an argument; its constants and attributes go to ``built``."""
        if isinstance(argument, tuple):
            # What a parameter says of itself does not hold for the elements of a tuple.
            return tuple(
                self.type_of(item, (*path, i), specialise=True, align=True, const=False)
                for i, item in enumerate(argument)
            )
        if isinstance(argument, Constant):
            self.built.constants[path] = _value(argument, self.name, self.dialect)
            return "constexpr"
        if isinstance(argument, Scalar):
            return self._scalar(argument, path, specialise, align)
        return self._pointer(argument, path, specialise, align, const)

    def _scalar(self, scalar: Scalar, path: Path, specialise: bool, align: bool) -> str:
        if scalar.one and specialise:
            self.built.constants[path] = 1
            return "constexpr"
        if scalar.divisible and specialise and align:
            self.built.attributes[path] = [DIVISIBLE]
        return self.dialect.type_names["float32" if scalar.type == "float" else scalar.type]

    def _pointer(self, pointer: Pointer, path: Path, specialise: bool, align: bool, const: bool) -> str:
        if specialise:
            facts = [DIVISIBLE] if pointer.aligned and align else []
            facts += [WITHIN_2_GIB] if pointer.small and self.dialect.pointer_range else []
            if facts:
                self.built.attributes[path] = facts
        return f"*{'k' if const else ''}{self.dialect.type_names[pointer.dtype]}"


def _value(argument: Argument, name: str, dialect: Dialect) -> Any:
    if not isinstance(argument, Constant):
        raise CannotRebuild(f"{name} is compiled in, but was recorded as an argument of the launch")
    if argument.type in ("NoneType", "bool", "int", "float", "str"):
        return argument.value
    if argument.type == "tuple":
        return tuple(_value(item, name, dialect) for item in argument.value)
    if argument.type == "dtype":
        return dialect.dtype(argument.value)
    if argument.type == "JITFunction":
        return dialect.function(argument.value)
    raise CannotRebuild(f"{name} is a {argument.type}, of which only the name was recorded")
