"""Atomic functions of the language, over loads and stores."""

from collections.abc import Callable
from typing import Any

import torch

from fuzz.engine.emulator.casts import cast
from fuzz.engine.emulator.context import active
from fuzz.engine.emulator.errors import Divergence
from fuzz.engine.emulator.memory import load, store, target
from fuzz.engine.emulator.value import Number, Value, as_value, lift

Update = Callable[[Value, Value], Value]


def atomic(update: Update) -> Callable[..., Value]:
    """A read-modify-write function of the language: `update(old, value)` gives the new element.

    Lanes of one program that meet at an address take turns in lane order, which takes the program out of its
    batch; programs that meet make the launch run one by one. Returns the old elements.
    """

    def apply(pointer: Value, val: Value | Number, mask: Value | Number | None = None, **_: Any) -> Value:
        value = cast(as_value(val), target(pointer)[1])
        if pointer.numel > 1 and _repeats(pointer):
            programs = active().programs
            if len(programs) > 1:
                raise Divergence(torch.arange(len(programs)))
            return _in_turn(pointer, value, mask, update)
        old = load(pointer, mask, None)
        store(pointer, update(old, value), mask)
        return old

    return apply


def _repeats(pointer: Value) -> bool:
    """Whether lanes of one program share an address."""
    ordered = pointer.data.reshape(len(pointer.data), -1).sort(1).values
    return bool((ordered[:, 1:] == ordered[:, :-1]).any())


def _in_turn(pointer: Value, value: Value, mask: Value | Number | None, update: Update) -> Value:
    """A block of atomics of one program whose lanes share addresses: lane by lane."""
    shape = pointer.data.shape
    switch = None if mask is None else as_value(mask)
    olds = []
    for lane in range(pointer.numel):

        def one(x: Value, lane: int = lane) -> Value:
            return x.like(lambda data: lift(data, len(shape)).expand(shape).reshape(1, -1)[:, lane])

        old = load(one(pointer), None if switch is None else one(switch), None)
        store(one(pointer), update(old, one(value)), None if switch is None else one(switch))
        olds.append(old)
    return Value(torch.stack([old.data for old in olds], 1).reshape(shape), value.dtype)
