"""Queries and keys whose logits differ by less than a nat, whatever the scale."""

from __future__ import annotations

import math

from torch import Tensor

from fuzz.probes.assemble import k_shape, q_shape
from fuzz.probes.exact import power_above
from fuzz.probes.geometry import Geometry
from fuzz.probes.plain import normal
from fuzz.probes.stream import Stream


def noise(geometry: Geometry, first: int) -> tuple[Tensor, Tensor]:
    """Normal q and k, float64, from channel ``first`` on and 0 before it; logits spread by 0.3 to 0.6 nats."""
    case = geometry.case
    q, k = normal(case, Stream.Q, q_shape(case)), normal(case, Stream.K, k_shape(case))
    spread = float(geometry.factor.abs().max()) * math.sqrt(max(case.head_dim - first, 1))
    q *= 2.0 ** -power_above(spread / 0.6) if spread else 1.0
    q[..., :first], k[..., :first] = 0.0, 0.0
    return q, k
