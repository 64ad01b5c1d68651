"""Input values of a case, from its seed: the same bits on every machine.

Values come from raw Philox integers through exact arithmetic and are then rounded to the operand's dtype by
our own rounding, so that neither the random generator nor the casts of a torch version matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

from fuzz.buffers import DTYPES
from fuzz.case import Case, Probe, Sink
from oracle import philox
from oracle.rounding import round_to


class Stream(IntEnum):
    """Which counter stream of a seed each kind of value is drawn from. Numbers are part of the format."""

    PAGES = 0
    SKIP = 1
    SLOT_MAP = 2
    Q = 3
    K = 4
    V = 5
    SINKS = 6


SINK_OFFSET = {Sink.NORMAL: 0.0, Sink.DOMINANT: 60.0, Sink.NEGLIGIBLE: -60.0}
"""Added to a sink: logits of the normal probe stay within about 10 of zero, so that +-60 decides the row."""


def values(case: Case, stream: Stream, shape: Sequence[int], dtype_name: str) -> Tensor:
    """Values for one operand on the CPU, in its dtype."""
    dtype = DTYPES[dtype_name]
    if case.probe is Probe.BYTES:
        width = dtype.itemsize
        raw = philox.bytes_(case.seed, stream, (*shape[:-1], shape[-1] * width))
        return raw.contiguous().view(dtype)
    if dtype is torch.uint8:
        return philox.bytes_(case.seed, stream, tuple(shape))
    if case.probe is Probe.CONSTANT_V and stream is Stream.V:
        exact = torch.ones(tuple(shape), dtype=torch.float64)
    else:
        exact = philox.normal(case.seed, stream, tuple(shape)).double()
    return round_to(exact, dtype)


def sinks(case: Case) -> Tensor | None:
    """Sink logits [Hq], float32 on the CPU, or None."""
    if case.sinks is Sink.NONE:
        return None
    drawn = philox.normal(case.seed, Stream.SINKS, (case.num_q_heads,))
    return (drawn + SINK_OFFSET[case.sinks]).to(torch.float32)
