"""What the assertion's arguments may be, in one line each where they are not."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import TypeVar

import torch
from torch import Tensor

from oracle.failure.words import dtype_name

Lengths = Sequence[int] | Tensor | None
E = TypeVar("E", bound=StrEnum)


class ArgumentsError(ValueError):
    """The call itself is wrong, not the kernel: the argument's name, what was given, what is allowed."""


def wrong(name: str, value: object, allowed: str) -> ArgumentsError:
    """The error for one argument."""
    return ArgumentsError(f"assert_attention_close: {name}: {shown(value)}; allowed: {allowed}")


def shown(value: object) -> str:
    """A tensor as its dtype and shape, anything else as it prints, shortened."""
    if isinstance(value, Tensor):
        return f"{dtype_name(value.dtype)} {list(value.shape)}"
    text = "missing" if value is None else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def tensor(name: str, value: object, axes: str, *shape: int | None) -> Tensor:
    """A floating tensor with these axes ("B, H, S, D"), whose sizes are `shape` where that says one."""
    sizes = ", ".join(axis if n is None else f"{axis} = {n}" for axis, n in zip(axes.split(", "), shape, strict=True))
    fits = isinstance(value, Tensor) and value.is_floating_point() and value.ndim == len(shape)
    if not isinstance(value, Tensor) or not fits:
        raise wrong(name, value, f"a floating tensor [{sizes}]")
    if any(n not in (None, got) for n, got in zip(shape, value.shape, strict=True)):
        raise wrong(name, value, f"[{sizes}]")
    return value


def one_of(name: str, value: object, kind: type[E]) -> E:
    """A member of `kind`, or its text."""
    try:
        return kind(value)  # type: ignore[arg-type]
    except ValueError:
        raise wrong(name, value, ", ".join(kind)) from None


def lengths(name: str, value: Lengths, requests: int | None, default: Sequence[int] | None) -> tuple[int, ...]:
    """One length a request, from a sequence or an integer tensor; `default` for None."""
    of = "request" if requests is None else f"request ({requests})"
    allowed = f"one length a {of}: integers from 0, as a list or a tensor"
    if value is None:
        if default is None:
            raise wrong(name, None, allowed)
        return tuple(default)
    if isinstance(value, Tensor):
        if value.ndim != 1 or value.is_floating_point() or value.dtype == torch.bool:
            raise wrong(name, value, allowed)
        value = value.tolist()
    found = tuple(value)
    if not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in found):
        raise wrong(name, value, allowed)
    if requests is not None and len(found) != requests:
        hint = "; these look cumulative: take their differences" if len(found) == requests + 1 and not found[0] else ""
        raise wrong(name, list(found), allowed + hint)
    return found


def within(name: str, value: tuple[int, ...], most: int, of: str) -> None:
    """Raises where a length is above `most`."""
    if any(n > most for n in value):
        raise wrong(name, list(value), f"at most {most}, as in {of}")
