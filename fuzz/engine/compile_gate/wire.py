"""Specialisations as JSON: they travel from the process that records to the one that compiles."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fuzz.engine.emulator.specialisation import Argument, Constant, Pointer, Scalar, Specialisation


def to_dict(specialisation: Specialisation) -> dict[str, Any]:
    """Plain data; equal for equal specialisations only."""
    return {
        "file": specialisation.file,
        "kernel": specialisation.kernel,
        "arguments": [[name, _plain(argument)] for name, argument in specialisation.arguments],
        "options": [list(option) for option in specialisation.options],
    }


def from_dict(data: dict[str, Any]) -> Specialisation:
    """The inverse of ``to_dict``."""
    return Specialisation(
        file=data["file"],
        kernel=data["kernel"],
        arguments=tuple((name, _argument(plain)) for name, plain in data["arguments"]),
        options=tuple((name, value) for name, value in data["options"]),
    )


def _plain(argument: Argument) -> dict[str, Any]:
    if isinstance(argument, tuple):
        return {"is": "tuple", "items": [_plain(item) for item in argument]}
    if isinstance(argument, Constant) and argument.type == "tuple":
        return {"is": "constants", "items": [_plain(item) for item in argument.value]}
    return {"is": type(argument).__name__, **asdict(argument)}


def _argument(plain: dict[str, Any]) -> Argument:
    kind, rest = plain["is"], {name: value for name, value in plain.items() if name != "is"}
    if kind in ("tuple", "constants"):
        items = tuple(_argument(item) for item in rest["items"])
        return items if kind == "tuple" else Constant("tuple", items)
    made: dict[str, type[Pointer] | type[Scalar] | type[Constant]] = {
        known.__name__: known for known in (Pointer, Scalar, Constant)
    }
    return made[kind](**rest)


def words(specialisation: Specialisation) -> str:
    """In one line: `x *bfloat16:16, n int32:16, BLOCK=128`; `:16` means divisible by 16, `:big` 2 GiB or more."""
    shown = []
    for name, argument in (*specialisation.arguments, *specialisation.options):
        if isinstance(argument, Constant):
            shown.append(f"{name}={_constant_words(argument)}")
        elif isinstance(argument, (Pointer, Scalar, tuple)):
            shown.append(f"{name} {_words(argument)}")
        else:
            shown.append(f"{name}={argument}")
    return ", ".join(shown)


def _words(argument: Argument) -> str:
    if isinstance(argument, Pointer):
        return f"*{argument.dtype}{':16' if argument.aligned else ''}{'' if argument.small else ':big'}"
    if isinstance(argument, Scalar):
        return "1" if argument.one else f"{argument.type}{':16' if argument.divisible else ''}"
    if isinstance(argument, Constant):
        return _constant_words(argument)
    return f"({', '.join(_words(item) for item in argument)})"


def _constant_words(constant: Constant) -> str:
    if constant.type == "tuple":
        return f"({', '.join(_constant_words(item) for item in constant.value)})"
    return str(constant.value)
