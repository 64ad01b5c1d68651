"""Every visible logit far below zero: what a mask, a maximum or an exponential does wrong down there shows."""

from __future__ import annotations

from torch import Tensor

from fuzz.buffers import DTYPES
from fuzz.probes.assemble import assemble, k_shape, loud, q_shape, silent, sinks_near, v_shape
from fuzz.probes.exact import power_above
from fuzz.probes.geometry import Geometry
from fuzz.probes.model import Inputs
from fuzz.probes.noise import noise
from fuzz.probes.plain import normal
from fuzz.probes.stream import Stream
from oracle.rounding import round_to, widen

SATURATED = 4.0
"""Logits before the soft cap, in caps, on average at least: tanh(4) = 0.9993."""
MEAN = 3.0
"""Below the mean product of two channels of (abs(z) + 1), 1.798 ** 2."""
DEPTH = 130.0
"""Nats below zero without a cap: exp(-130) is 0 in float32."""
DEEPEST = 70000.0
"""The same for every fourth seed, where the dtypes can: below what kernels take for minus infinity, such as -10000,
-50000 or the lowest fp16. float32 has few places left after so many nats, so that many a budget says nothing there."""
LEVEL = 0
"""Channel that carries the depth."""


def deep_negative(geometry: Geometry) -> Inputs:
    """Every visible logit saturates at minus the soft cap; V is 64 wherever nobody may look."""
    case = geometry.case
    cap = case.soft_cap or 1.0
    q = normal(case, Stream.Q, q_shape(case)).abs() + 1.0
    k = normal(case, Stream.K, k_shape(case)).abs() + 1.0
    k *= -geometry.sign * 2.0 ** max(_exponent(geometry), -4)

    def unused(count: int) -> tuple[Tensor, Tensor]:
        return silent(case, count), loud(case, count)

    return assemble(geometry, q=q, k=k, v=_loud_where_unseen(geometry), sink=sinks_near(geometry, -cap), unused=unused)


def deep_negative_uncapped(geometry: Geometry) -> Inputs:
    """Every visible logit is near -130 or -70000, and there is no cap: exp of it is 0 in float32."""
    case = geometry.case
    q, k = noise(geometry, LEVEL + 1)
    deeper = case.seed % 4 == 0 and geometry.amplitudes(DEEPEST) is not None
    nats = DEEPEST if deeper else DEPTH
    level_q, _ = geometry.channel(nats)
    level_k = round_to(-nats / (level_q * geometry.factor), DTYPES[case.kv_dtype])
    q[..., LEVEL], k[..., LEVEL] = level_q, widen(level_k).double()
    # The sink lies where rounding has put the keys of its head, on the average.
    reached = widen(level_k).double() * level_q * geometry.factor
    depth = reached.mean(0).repeat_interleave(case.group_size)

    def unused(count: int) -> tuple[Tensor, Tensor]:
        return silent(case, count), loud(case, count)

    sink = sinks_near(geometry, 0.0) + depth
    return assemble(geometry, q=q, k=k, v=_loud_where_unseen(geometry), sink=sink, unused=unused)


def _loud_where_unseen(geometry: Geometry) -> Tensor:
    case = geometry.case
    v = normal(case, Stream.V, v_shape(case))
    unseen = geometry.seen_by_none
    v[unseen] = loud(case, int(unseen.sum()))
    return v


def _exponent(geometry: Geometry) -> int:
    """Power of two for k that saturates the cap."""
    cap = geometry.case.soft_cap or 1.0
    one = float(geometry.factor.abs().min()) * geometry.case.head_dim * MEAN
    return power_above(SATURATED * cap / one)


def no_deep_negative(geometry: Geometry) -> str | None:
    """Why the numbers of a case leave no room for saturated logits, or None."""
    if float(geometry.factor.abs().min()) == 0.0:
        return "the scale is 0"
    if geometry.amplitudes(SATURATED * (geometry.case.soft_cap or 1.0)) is None or _exponent(geometry) > 5:
        return "the scale lets normal numbers not saturate the soft cap"
    return None


def no_depth(geometry: Geometry) -> str | None:
    """Why the numbers of a case leave no room for logits of -130, or None."""
    if geometry.amplitudes(DEPTH) is None:
        return geometry.no_amplitude(DEPTH)
    return None
