"""Values that are drawn one by one, without regard to each other: normal numbers, bytes, constants.

They come from raw Philox integers through exact arithmetic and are then rounded to the operand's dtype by
our own rounding, so that neither the random generator nor the casts of a torch version matter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fuzz.buffers import DTYPES
from fuzz.case import Case, Probe, Sink
from fuzz.probes.stream import Stream
from oracle import philox
from oracle.convention import Granularity
from oracle.kinds import Role
from oracle.rounding import round_to

PLAIN = (Probe.NORMAL, Probe.CONSTANT_V)
"""Probes whose values are drawn one by one: a request, or a token, has them whatever comes after it."""

SINK_OFFSET = {Sink.NORMAL: 0.0, Sink.DOMINANT: 60.0, Sink.NEGLIGIBLE: -60.0}
"""Added to a sink: logits of the normal probe stay within about 10 of zero, so that +-60 decides the row."""


def values(case: Case, stream: Stream, shape: Sequence[int], dtype_name: str) -> Tensor:
    """Values for one operand on the CPU, in its dtype: bytes, ones or normal numbers, as the probe says."""
    dtype = DTYPES[dtype_name]
    if case.probe is Probe.BYTES:
        width = dtype.itemsize
        raw = philox.bytes_(case.seed, stream, (*shape[:-1], shape[-1] * width))
        return raw.contiguous().view(dtype)
    if dtype is torch.uint8:
        return philox.bytes_(case.seed, stream, tuple(shape))
    constant = case.probe is Probe.CONSTANT_V and stream is Stream.V
    return round_to(torch.ones(tuple(shape), dtype=torch.float64) if constant else normal(case, stream, shape), dtype)


def normal(case: Case, stream: Stream, shape: Sequence[int]) -> Tensor:
    """Standard normal numbers, float64."""
    return philox.normal(case.seed, stream, tuple(shape)).double()


def signs(case: Case, stream: Stream, shape: Sequence[int]) -> Tensor:
    """+1 or -1, float64."""
    return philox.uniform_int(case.seed, stream, tuple(shape), 0, 2).double() * 2 - 1


def sinks(case: Case) -> Tensor | None:
    """Sink logits [Hq], float32 on the CPU, or None."""
    if case.sinks is Sink.NONE:
        return None
    drawn = philox.normal(case.seed, Stream.SINKS, (case.num_q_heads,))
    return (drawn + SINK_OFFSET[case.sinks]).to(torch.float32)


def descale_of(case: Case, role: Role) -> Tensor | None:
    """Descale factors, float32 on the CPU; unequal and not 1.

    [1] for a tensor, [H] for heads, [T, H] for tokens: one for each key of each kv head.
    """
    granularity, stream = {
        Role.K: (case.k_descale, Stream.K_DESCALE),
        Role.V: (case.v_descale, Stream.V_DESCALE),
    }[role]
    if granularity is Granularity.NONE:
        return None
    shapes: dict[Granularity, tuple[int, ...]] = {
        Granularity.TENSOR: (1,),
        Granularity.HEAD: (case.num_kv_heads,),
        Granularity.TOKEN: (sum(case.context_lens), case.num_kv_heads),
    }
    shape = shapes[granularity]
    if case.probe is Probe.UNEQUAL_DESCALES:
        # 2**-3 to 2**3 times an odd number of eighths: neighbours are at least a factor of 4 apart.
        step = torch.arange(math.prod(shape)).view(shape) * 3 + philox.uniform_int(case.seed, stream, (1,), 0, 7)
        eighths = 9 + 2 * philox.uniform_int(case.seed, Stream.PICKS, shape, 0, 4)
        return eighths.float() / 8 * torch.tensor([2.0**e for e in range(-3, 4)], dtype=torch.float32)[step % 7]
    # 0.5 to 1.5 in steps of 1/128, never 1.
    drawn = philox.uniform_int(case.seed, stream, shape, 0, 127)
    return (64 + drawn + (drawn >= 64)).float() / 128
