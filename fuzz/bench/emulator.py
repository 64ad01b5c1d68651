"""What batching the programs of a grid gains, and how the emulator compares with Triton's interpreter."""

from __future__ import annotations

import importlib.util

from fuzz import registry
from fuzz.bench.alone import GATHER, PAIRS, alone, batched_and_serial, interpreter_and_emulator
from fuzz.bench.report import BATCHED, INTERPRETER, Figure, NotMeasured
from fuzz.bench.timing import ratio, shown
from oracle.kinds import Engine


def batched_vs_serial() -> Figure:
    """Time of the gather emulated one program after the other, over that in batches."""
    reason = registry.why_not(registry.load()[GATHER], Engine.EMULATOR)
    if reason is not None:
        raise NotMeasured(reason)
    found = alone(batched_and_serial.__name__)
    return Figure(
        BATCHED,
        ratio(found, "serial", "batched"),
        "times",
        f"one program after the other, {GATHER}, 64 tokens x 8 heads x 128, 1 thread",
        True,
        shown(found),
    )


def vs_interpreter() -> Figure:
    """Time of Triton's interpreter over that of the emulator, on a kernel of ours."""
    if importlib.util.find_spec("triton") is None:
        raise NotMeasured("triton is not installed, and its interpreter comes with it")
    found = alone(interpreter_and_emulator.__name__, TRITON_INTERPRET="1")
    return Figure(
        INTERPRETER,
        ratio(found, "interpreter", "emulator"),
        "times",
        f"TRITON_INTERPRET=1, our division kernel on {PAIRS} pairs of integers, 1 thread",
        True,
        shown(found),
    )
