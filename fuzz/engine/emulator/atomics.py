"""Atomic functions of the language, over loads and stores."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fuzz.engine.emulator.casts import cast, to_bits
from fuzz.engine.emulator.context import active
from fuzz.engine.emulator.dtypes import int1
from fuzz.engine.emulator.errors import Divergence
from fuzz.engine.emulator.memory import load, store, synchronise, target
from fuzz.engine.emulator.operators import where
from fuzz.engine.emulator.value import Number, Value, as_value, lift

Update = Callable[..., Value]


def atomic(update: Update) -> Callable[..., Value]:
    """A read-modify-write function of the language: `update(old, value)` gives the new element.

    Lanes of one program that meet at an address take turns in lane order, which takes the program out of its
    batch; programs that meet make the launch run one by one. A scalar one orders programs, as `sem` says.
    Returns the old elements.
    """

    def apply(
        pointer: Value,
        val: Value | Number,
        mask: Value | Number | None = None,
        sem: str | None = None,
        scope: str | None = None,
        **_: Any,
    ) -> Value:
        return _modify(pointer, (val,), mask, update, sem)

    return apply


def atomic_cas(
    pointer: Value,
    cmp: Value | Number,
    val: Value | Number,
    sem: str | None = None,
    scope: str | None = None,
    **_: Any,
) -> Value:
    """Write `val` where memory holds the bits of `cmp`. Returns the old elements."""

    def update(old: Value, expected: Value, new: Value) -> Value:
        bits = to_bits(old.data, old.dtype), to_bits(expected.data, old.dtype)  # type: ignore[arg-type]
        same = Value(bits[0] == bits[1], int1, undefined=old.undefined)
        return where(same, new, old)

    return _modify(pointer, (cmp, val), None, update, sem)


def _modify(
    pointer: Value, given: Sequence[Value | Number], mask: Value | Number | None, update: Update, sem: str | None
) -> Value:
    operands = [cast(as_value(operand), target(pointer)[1]) for operand in given]
    if pointer.numel > 1 and _repeats(pointer):
        programs = active().programs
        if len(programs) > 1:
            raise Divergence(torch.arange(len(programs)))
        return _in_turn(pointer, operands, mask, update)
    old = load(pointer, mask, None, atomic=True)
    store(pointer, update(old, *operands), mask, atomic=True)
    synchronise(pointer, mask, sem)
    return old


def _repeats(pointer: Value) -> bool:
    """Whether lanes of one program share an address."""
    ordered = pointer.data.reshape(len(pointer.data), -1).sort(1).values
    return bool((ordered[:, 1:] == ordered[:, :-1]).any())


def _in_turn(pointer: Value, operands: Sequence[Value], mask: Value | Number | None, update: Update) -> Value:
    """A block of atomics of one program whose lanes share addresses: lane by lane."""
    shape = pointer.data.shape
    switch = None if mask is None else as_value(mask)
    olds = []
    for lane in range(pointer.numel):

        def one(x: Value, lane: int = lane) -> Value:
            return x.like(lambda data: lift(data, len(shape)).expand(shape).reshape(1, -1)[:, lane])

        old = load(one(pointer), None if switch is None else one(switch), None, atomic=True)
        new = update(old, *(one(operand) for operand in operands))
        store(one(pointer), new, None if switch is None else one(switch), atomic=True)
        olds.append(old)
    return Value(torch.stack([old.data for old in olds], 1).reshape(shape), target(pointer)[1])
