"""Designs with a weight of 0 or 1 for every key: what they show depends neither on the context nor on P's dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from fuzz.probes.assemble import assemble, k_shape, loud, q_shape, silent, sinks_near, v_shape
from fuzz.probes.geometry import BLOCK, Geometry
from fuzz.probes.model import Inputs
from fuzz.probes.plain import signs
from fuzz.probes.stream import Stream
from fuzz.probes.watch import boundary_keys
from oracle import philox

NOTHING = 192.0
"""Nats below the largest logit at which a weight is 0: exp(-104) is 0 in float32, subnormals included."""

LEAST_DIM = 8

SIGNATURE_CHANNELS = 16
"""Channels of a code, from the end, that name the page; at most a quarter of D_v."""


def hadamard(n: int) -> Tensor:
    """Sylvester's Hadamard matrix of n rows, a power of two: float64 [n, n] of +-1, row 0 all ones."""
    index = torch.arange(n)
    bits = index[:, None] & index[None, :]
    parity = torch.zeros_like(bits)
    while bool(bits.any()):
        parity ^= bits & 1
        bits = bits >> 1
    return 1.0 - 2.0 * parity.double()


def code(geometry: Geometry) -> Inputs:
    """Equal weights; each key's V is a code of +-1 that sums to 0 over a block, with the page's name in it."""
    case = geometry.case
    return assemble(
        geometry,
        q=torch.zeros(q_shape(case), dtype=torch.float64),
        v=code_values(geometry),
        sink=sinks_near(geometry, 0.0),
        unused=lambda n: (silent(case, n), loud(case, n)),
    )


def code_values(geometry: Geometry) -> Tensor:
    """V of the code, float64 [Tk, Hkv, D_v].

    A block of 16 keys holds rows of a Hadamard matrix, other ones with other signs in every block, head and
    channel: each sums to 0, and the output is left with the few keys at the edges, whose codes stand out
    however many keys there are. The last channels are constant over a page.
    """
    case = geometry.case
    named = min(SIGNATURE_CHANNELS, case.v_head_dim // 4)
    coded = case.v_head_dim - named
    block, blocks = geometry.blocks(BLOCK)
    page, pages = geometry.blocks(geometry.page)
    # All fifteen rows but the constant one take part where there are as many channels.
    first = philox.uniform_int(case.seed, Stream.BLOCKS, (blocks, case.num_kv_heads, 1), 0, BLOCK - 1)
    rows = 1 + (first + torch.arange(coded)) % (BLOCK - 1)
    sign = signs(case, Stream.SIGNS, (blocks + pages, case.num_kv_heads, case.v_head_dim))
    matrix = hadamard(BLOCK)
    v = torch.empty(v_shape(case), dtype=torch.float64)
    v[..., :coded] = matrix[rows[block], (geometry.position % BLOCK)[:, None, None]] * sign[block][..., :coded]
    v[..., coded:] = sign[blocks + page][..., coded:]
    return v


def gate(geometry: Geometry) -> Inputs:
    """A query of one channel, which lets half of the keys through with weight 1 and stops the others; V is +-1."""
    case = geometry.case
    opened, closed = geometry.channel(NOTHING)
    q = torch.zeros(q_shape(case), dtype=torch.float64)
    channel = geometry.row_in_request[:, None] * case.group_size + torch.arange(case.num_q_heads) % case.group_size
    q.scatter_(2, (channel % case.head_dim)[:, :, None], opened)
    k = -closed * philox.uniform_int(case.seed, Stream.K, k_shape(case), 0, 2).double()
    k[boundary_keys(geometry)] = 0.0
    return assemble(
        geometry,
        q=q,
        k=k,
        v=signs(case, Stream.SIGNS, v_shape(case)),
        sink=sinks_near(geometry, 0.0, -(-geometry.longest // 2)),
        unused=lambda n: (silent(case, n), loud(case, n)),
    )


def no_gate(geometry: Geometry) -> str | None:
    """Why the numbers of a case leave no room for a gate, or None."""
    if geometry.amplitudes(NOTHING) is None:
        return f"no product of one channel reaches {NOTHING:g} nats at this scale and these dtypes"
    return None


def no_code(geometry: Geometry) -> str | None:
    """Why V has no room for a code, or None."""
    if geometry.case.v_head_dim < LEAST_DIM:
        return f"a code takes a v_head_dim of {LEAST_DIM}"
    return None
