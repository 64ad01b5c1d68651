"""Some programs of a batch: what a kernel's variables hold for them, and that of several such groups as one again."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor

from fuzz.engine.emulator.dtypes import DType, PointerType
from fuzz.engine.emulator.gluon.layouts import Layout
from fuzz.engine.emulator.jit import JITFunction
from fuzz.engine.emulator.provenance import rows_of, united_masks
from fuzz.engine.emulator.value import Value

Part = tuple[Tensor, Any]
"""Rows of a batch, int64, and what they hold."""

AGGREGATE = "_emulated_fields"
"""Attribute of classes whose instances kernels pass around: names of the fields."""


class Apart(Exception):
    """A variable that cannot be cut or put together: the programs have to run apart. Internal."""


class Unbound:
    """Stands for a variable that has no value."""


UNBOUND = Unbound()
_SIMPLE = (
    *(int, float, str, bool, type(None), Unbound, DType, PointerType, torch.dtype),
    *(type, FunctionType, ModuleType, JITFunction, Layout),
)


def taken(x: Any, rows: Tensor, other: Callable[[Any], Any]) -> Any:
    """What `x` is for the programs in `rows`. `other` answers for types that are not known here, or raises Apart."""
    if isinstance(x, Value):
        return _taken_value(x, rows)
    if isinstance(x, _SIMPLE):
        return x
    if type(x) is tuple:
        return tuple(taken(item, rows, other) for item in x)
    names = _names(x)
    if names is None:
        return other(x)
    changed = {name: taken(getattr(x, name), rows, other) for name in names}
    return _with(x, changed)


def united(parts: Sequence[Part], count: int, other: Callable[[Sequence[Part]], Any]) -> Any:
    """Inverse of `taken`: one variable for a batch of `count` programs. Raises Apart where its parts do not fit."""
    first = parts[0][1]
    if isinstance(first, Value):
        if all(x is first for _, x in parts) and len(first.data) == 1 and first.undefined is None:
            return first
        return _united_values(parts, count)
    if any(type(x) is not type(first) for _, x in parts):
        raise Apart
    if isinstance(first, _SIMPLE):
        if any(x is not first and x != first for _, x in parts):
            raise Apart
        return first
    if type(first) is tuple:
        if any(len(x) != len(first) for _, x in parts):
            raise Apart
        return tuple(united([(rows, x[i]) for rows, x in parts], count, other) for i in range(len(first)))
    names = _names(first)
    if names is None:
        return other(parts)
    changed = {name: united([(rows, getattr(x, name)) for rows, x in parts], count, other) for name in names}
    return _with(first, changed)


def _names(x: Any) -> tuple[str, ...] | None:
    """Fields of block pointers and the like, and of a kernel's own classes."""
    if hasattr(type(x), AGGREGATE):
        own: tuple[str, ...] = getattr(type(x), AGGREGATE)
        return own
    if is_dataclass(x) and type(x).__module__.startswith(__package__):
        return tuple(field.name for field in fields(x))
    return None


def _with(x: Any, changed: dict[str, Any]) -> Any:
    if not hasattr(type(x), AGGREGATE):
        return replace(x, **changed)
    twin = copy.copy(x)
    twin.__dict__.update(changed)
    return twin


def _taken_value(x: Value, rows: Tensor) -> Value:
    undefined, wrapped = (None if taint is None else rows_of(taint, rows) for taint in (x.undefined, x.wrapped))
    if len(x.data) == 1 and undefined is x.undefined and wrapped is x.wrapped:
        return x
    data = rows_of(x.data, rows)
    return Value(data, x.dtype, buffer=x.buffer, undefined=undefined, wrapped=wrapped, bounds=x.bounds)


def _united_values(parts: Sequence[Part], count: int) -> Value:
    first: Value = parts[0][1]
    for _, x in parts:
        if not isinstance(x, Value) or x.dtype != first.dtype or x.buffer is not first.buffer or x.shape != first.shape:
            raise Apart
    data = first.data.new_empty(count, *first.shape)
    for rows, x in parts:
        data[rows] = x.data
    known = [x.bounds for _, x in parts if x.bounds is not None]
    bounds = None
    if len(known) == len(parts):
        bounds = min(low for low, _ in known), max(high for _, high in known)
    undefined, wrapped = (
        united_masks([(rows, getattr(x, name)) for rows, x in parts], (count, *first.shape))
        for name in ("undefined", "wrapped")
    )
    return Value(data, first.dtype, buffer=first.buffer, undefined=undefined, wrapped=wrapped, bounds=bounds)


def aggregates(values: Iterable[Any]) -> Iterator[Any]:
    """Instances of the kernel's own classes among values, and in their fields."""
    for x in values:
        if type(x) is tuple:
            yield from aggregates(x)
        elif hasattr(type(x), AGGREGATE):
            yield x
            yield from aggregates(vars(x).values())
