"""Normal numbers, and normal numbers with one thing changed: scales, outliers, ties, pairs that cancel."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fuzz.buffers import DTYPES
from fuzz.case import Case
from fuzz.probes.assemble import assemble, k_shape, q_shape, sinks_near, v_shape
from fuzz.probes.exact import power_above
from fuzz.probes.geometry import Geometry, largest, smallest_normal
from fuzz.probes.model import Inputs
from fuzz.probes.noise import noise
from fuzz.probes.plain import descale_of, normal, signs
from fuzz.probes.stream import Stream
from oracle import philox
from oracle.bits import bits
from oracle.fp8 import FORMAT_OF_DTYPE, Fp8Format
from oracle.kinds import Role
from oracle.rounding import round_to, widen

MODERATE = 60
"""Exponents beyond +-60 are left alone: the squares of such values leave float32."""


def normal_values(geometry: Geometry) -> Inputs:
    """Normal numbers everywhere; unused slots hold the harness's poison, which is louder than any number here."""
    return assemble(geometry)


def constant_v(geometry: Geometry) -> Inputs:
    """Normal q and k, V = 1: the output shows the normalisation alone."""
    return assemble(geometry, v=torch.ones(v_shape(geometry.case), dtype=torch.float64))


def sink_near_lse(geometry: Geometry) -> Inputs:
    """Nearly equal weights, and sinks that weigh about as much as all keys together."""
    q, k = noise(geometry, 0)
    return assemble(geometry, q=q, k=k, sink=sinks_near(geometry, 0.0))


def ramp(geometry: Geometry) -> Inputs:
    """Logits that rise by 22 nats over the context, and fall for every other kv head: every tile moves the maximum."""
    case = geometry.case
    q, k = noise(geometry, 1)
    top = RAMP_TOP if case.soft_cap is None else min(RAMP_TOP, 2 * case.soft_cap)
    level_q, _ = geometry.channel(top)
    lens = torch.tensor(case.context_lens, dtype=torch.int64)[geometry.key_request]
    along = (2 * geometry.position - (lens - 1)).double() / (lens - 1).clamp(min=1)
    direction = 1.0 - 2.0 * (torch.arange(case.num_kv_heads) % 2)
    q[..., 0], k[..., 0] = level_q, along[:, None] * direction * top / (level_q * geometry.factor)
    # Keys within a nat of the top are about one in 22; they decide the log-sum-exp.
    end = top if case.soft_cap is None else min(top, case.soft_cap)
    return assemble(geometry, q=q, k=k, sink=sinks_near(geometry, end, -(-geometry.longest // 22)))


RAMP_TOP = 11.0


def no_ramp(geometry: Geometry) -> str | None:
    """Why the numbers of a case leave no room for a ramp, or None."""
    return None if geometry.amplitudes(RAMP_TOP) else geometry.no_amplitude(RAMP_TOP)


def outliers(geometry: Geometry) -> Inputs:
    """Two channels of K that are large in every key, as models have them, and two of V."""
    case = geometry.case
    q, k = noise(geometry, 0)
    v = normal(case, Stream.V, v_shape(case))
    picks = philox.uniform_int(case.seed, Stream.PICKS, (4,), 0, 1 << 30).tolist()
    for pick in picks[:2]:
        channel = pick % case.head_dim
        k[..., channel] += 16.0 * signs(case, Stream.SIGNS, (case.num_kv_heads,))
        q[..., channel] /= 16.0
    for pick in picks[2:]:
        v[..., pick % case.v_head_dim] *= 32.0
    return assemble(geometry, q=q, k=k, v=v)


def near_ties(geometry: Geometry) -> Inputs:
    """Keys of a request that differ by a unit in the last place in some channels; values of one sign."""
    case = geometry.case
    base = round_to(normal(case, Stream.K, (len(case.context_lens), *k_shape(case)[1:])), DTYPES[case.kv_dtype])
    above = base.clone()
    bits(above).add_(1)
    moved = philox.uniform_int(case.seed, Stream.PICKS, k_shape(case), 0, 8) == 0
    k = torch.where(moved, widen(above)[geometry.key_request], widen(base)[geometry.key_request])
    return assemble(geometry, k=k, v=1.0 + normal(case, Stream.V, v_shape(case)) / 8)


def cancelling(geometry: Geometry) -> Inputs:
    """Neighbouring keys are alike, and in every other channel their values are large and opposite."""
    case = geometry.case
    pair, pairs = geometry.blocks(2)
    v = normal(case, Stream.V, v_shape(case))
    large = 32.0 * normal(case, Stream.UNUSED_V, (pairs, *v.shape[1:]))[pair]
    large *= (1.0 - 2.0 * (geometry.position % 2).double())[:, None, None]
    v[..., ::2] = large[..., ::2]
    return assemble(geometry, k=normal(case, Stream.K, (pairs, *k_shape(case)[1:]))[pair], v=v)


def huge_scale(geometry: Geometry) -> Inputs:
    """Values near the end of the narrowest format's range, large keys and small queries."""
    case = geometry.case
    # Twice four standard deviations, and a descale of 1.5, fit.
    end = min(largest(case.kv_dtype), largest(case.dtype)) / 16.0
    return _scaled(geometry, min(power_above(end) - 1, MODERATE), 3)


def tiny_scale(geometry: Geometry) -> Inputs:
    """Values around the smallest normal number of the narrowest format, small keys and large queries."""
    case = geometry.case
    start = max(smallest_normal(case.kv_dtype), smallest_normal(case.dtype))
    return _scaled(geometry, max(power_above(start), -MODERATE), -3)


def _scaled(geometry: Geometry, v_exponent: int, k_exponent: int) -> Inputs:
    case = geometry.case
    return assemble(
        geometry,
        q=normal(case, Stream.Q, q_shape(case)) * 2.0**-k_exponent,
        k=normal(case, Stream.K, k_shape(case)) * 2.0**k_exponent,
        v=normal(case, Stream.V, v_shape(case)) * 2.0**v_exponent,
    )


def unequal_descales(geometry: Geometry) -> Inputs:
    """Descales far apart from each other and from 1, made up for by the stored numbers."""
    case = geometry.case

    def stored(stream: Stream, role: Role, shape: tuple[int, int, int]) -> Tensor:
        factors = descale_of(case, role)
        drawn = normal(case, stream, shape)
        return drawn if factors is None else drawn / factors.double()[..., None]

    return assemble(geometry, k=stored(Stream.K, Role.K, k_shape(case)), v=stored(Stream.V, Role.V, v_shape(case)))


def fp8_edges(geometry: Geometry) -> Inputs:
    """Keys and values at the edges of an fp8 format: zeros, subnormals, the smallest normal, the largest number."""
    case = geometry.case
    fmt = FORMAT_OF_DTYPE[DTYPES[case.kv_dtype]]
    edges = _edges(fmt)
    k = _pick(case, Stream.K, edges, k_shape(case))
    rms = math.sqrt(float((edges * edges).mean()))
    spread = rms * math.sqrt(case.head_dim) * float(geometry.factor.abs().max())
    q = normal(case, Stream.Q, q_shape(case))
    q *= 2.0 ** -power_above(spread / 0.6) if spread else 1.0
    # The output, after a descale, must fit the query's dtype.
    fitting = edges[edges.abs() <= largest(case.dtype) / 4]
    return assemble(geometry, q=q, k=k, v=_pick(case, Stream.V, fitting, v_shape(case)))


def _edges(fmt: Fp8Format) -> Tensor:
    one = next(code for code, value in enumerate(fmt.values) if value == 1.0)
    step = 1 << fmt.mantissa_bits
    codes = [0, 1, step - 1, step, step + 1, one - 1, one, one + 1, fmt.max_code - 1, fmt.max_code]
    codes += [0x80 | code for code in codes if code or fmt.has_negative_zero]
    return torch.tensor([fmt.values[code] for code in codes], dtype=torch.float64)


def _pick(case: Case, stream: Stream, choices: Tensor, shape: tuple[int, int, int]) -> Tensor:
    return choices[philox.uniform_int(case.seed, stream, shape, 0, len(choices))]
