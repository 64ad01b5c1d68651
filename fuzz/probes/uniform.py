"""Designs with a weight of 0 or 1 for every key: what they show depends neither on the context nor on P's dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from fuzz.probes.assemble import assemble, k_shape, loud, q_shape, silent, sinks_near, v_shape
from fuzz.probes.exact import power_above
from fuzz.probes.geometry import BLOCK, Geometry, largest
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
    channel %= case.head_dim
    q.scatter_(2, channel[:, :, None], opened)
    k = -closed * philox.uniform_int(case.seed, Stream.K, k_shape(case), 0, 2).double()
    k[boundary_keys(geometry)] = 0.0
    # The last key that a row sees is open to it: some weight is 1, and no sink lies far above all logits.
    lo, hi = geometry.ranges
    some = lo < hi
    last = (geometry.key_starts[geometry.row_request] + hi - 1)[some]
    k.transpose(1, 2)[last[:, None], channel[some]] = 0.0
    return assemble(
        geometry,
        q=q,
        k=k,
        v=signs(case, Stream.SIGNS, v_shape(case)),
        sink=sinks_near(geometry, 0.0, -(-geometry.longest // 2)),
        unused=lambda n: (silent(case, n), loud(case, n)),
    )


def value_needle(geometry: Geometry) -> Inputs:
    """Equal weights; each channel of V is one named key's: the output reads the weights of those keys."""
    case = geometry.case
    # The others whisper: a channel whose key a row does not see should still say something of the row.
    v = signs(case, Stream.SIGNS, v_shape(case)) / 8
    named = _named_keys(geometry)
    most = min(largest(case.kv_dtype), largest(case.dtype)) / 4
    for request, keys in named.items():
        # About the number of keys, so that a weight reads as a number near 1.
        loudness = 2.0 ** min(power_above(geometry.most_keys[request]), power_above(most) - 1)
        heads = torch.arange(case.num_kv_heads)[:, None]
        v[keys, heads, torch.arange(case.v_head_dim)] = loudness
    return assemble(
        geometry,
        q=torch.zeros(q_shape(case), dtype=torch.float64),
        v=v,
        sink=sinks_near(geometry, 0.0),
        unused=lambda n: (silent(case, n), loud(case, n)),
    )


def _named_keys(geometry: Geometry) -> dict[int, Tensor]:
    """The key that each channel names, for each request with keys: int64 [Hkv, D_v], through all requests.

    Those at the edges of watched rows come first, at most half of the channels; the others lie evenly over the
    context, elsewhere for each head. A short context has keys with several channels.
    """
    case = geometry.case
    boundary, request_of = boundary_keys(geometry), geometry.key_request
    offsets = philox.uniform_int(case.seed, Stream.BLOCKS, (len(case.context_lens), case.num_kv_heads, 1), 0, 1 << 30)
    found = {}
    for request, length in enumerate(case.context_lens):
        if not length:
            continue
        own = boundary[request_of[boundary] == request][: case.v_head_dim // 2]
        rest = case.v_head_dim - len(own)
        spread = (torch.arange(rest) * length // rest + offsets[request]) % length
        found[request] = torch.cat([own.expand(case.num_kv_heads, -1), geometry.key_starts[request] + spread], dim=1)
    return found


def signatures(geometry: Geometry) -> Inputs:
    """Equal weights; some channels of V spell the kv head, the others name the page; sinks tell query heads apart."""
    case = geometry.case
    spelled = head_channels(case.v_head_dim)
    page, pages = geometry.blocks(geometry.page)
    v = signs(case, Stream.SIGNS, (pages, case.num_kv_heads, case.v_head_dim))[page]
    number = torch.arange(case.num_kv_heads) + 1
    v[..., :spelled] = 1.0 - 2.0 * ((number[:, None] >> torch.arange(spelled)) & 1).double()
    return assemble(
        geometry,
        q=torch.zeros(q_shape(case), dtype=torch.float64),
        v=v,
        sink=sinks_near(geometry, 0.0),
        unused=lambda n: (silent(case, n), loud(case, n)),
    )


def head_channels(v_head_dim: int) -> int:
    """How many of the first channels of ``signatures`` spell the number of the kv head, from 1, in binary."""
    return min(10, v_head_dim // 4)


def integers(geometry: Geometry) -> Inputs:
    """Small integers whose products add up exactly, to the same logit for every key; V of small integers too."""
    case = geometry.case
    pairs = case.head_dim // 2
    q, k = torch.zeros(q_shape(case), dtype=torch.float64), torch.zeros(k_shape(case), dtype=torch.float64)
    # Two channels of a query are alike, those of a key opposite: any order of adding gives 0, through sums that
    # are not. Then one more in one channel of every key lifts the logit off 0.
    alike = philox.uniform_int(case.seed, Stream.Q, (*q.shape[:2], pairs), 1, 4).double()
    opposite = philox.uniform_int(case.seed, Stream.K, (*k.shape[:2], pairs), -4, 5).double()
    q[..., 0 : 2 * pairs : 2], q[..., 1 : 2 * pairs : 2] = alike, alike
    k[..., 0 : 2 * pairs : 2], k[..., 1 : 2 * pairs : 2] = opposite, -opposite
    k[..., 0] += 1.0
    v = philox.uniform_int(case.seed, Stream.V, v_shape(case), -8, 9).double()
    return assemble(geometry, q=q, k=k, v=v, unused=lambda n: (silent(case, n), loud(case, n)))


def no_gate(geometry: Geometry) -> str | None:
    """Why the numbers of a case leave no room for a gate, or None."""
    if geometry.amplitudes(NOTHING) is None:
        return geometry.no_amplitude(NOTHING)
    return None


def no_code(geometry: Geometry) -> str | None:
    """Why V has no room for a code, or None."""
    if geometry.case.v_head_dim < LEAST_DIM:
        return f"a code takes a v_head_dim of {LEAST_DIM}"
    return None
