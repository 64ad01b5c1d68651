"""Needles at the boundaries of what a row sees, poison on every key that it may not see."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from fuzz.probes.assemble import assemble, loud, sinks_near, v_shape
from fuzz.probes.exact import log, uncapped
from fuzz.probes.geometry import Geometry
from fuzz.probes.model import Inputs
from fuzz.probes.noise import noise
from fuzz.probes.plain import normal, signs
from fuzz.probes.stream import Stream
from fuzz.probes.watch import WATCHED, Edges, watched

POISON_ALL = 0
"""Channel of the rows that are not watched: keys that no row of their request sees are high in it."""
POISON = 1
"""First channel of the watched rows: keys that the row may not see are high in it."""
NEEDLE = POISON + WATCHED
"""First channel of the needles, one for each class of boundary."""
CLASSES = 4
BASE = NEEDLE + CLASSES
"""Channel that sets the level of all keys."""
NOISE = BASE + 1
"""First channel of the noise."""

LEAST_DIM = 16

POISON_LOGIT = 22.0
"""Nats: a key that may not be seen outweighs all others, in any context."""
REACH = 0.9
"""Share of a soft cap that levels go down to, and up to."""


@dataclass(frozen=True)
class _Levels:
    """Logits before the soft cap: of all keys, and of the needles of each request. ``sink``: a key's after it."""

    bottom: float
    needles: tuple[float, ...]
    sink: float


def needle_poison(geometry: Geometry) -> Inputs:
    """Half of a row's weight on one boundary key; keys and slots that it may not see would outweigh all others."""
    case, rows = geometry.case, watched(geometry)
    needles = _needles(rows)
    levels = _levels(geometry, needles)
    poison_q, poison_k = geometry.channel(POISON_LOGIT)
    level_q, _ = geometry.channel(max(abs(levels.bottom), *levels.needles, 1.0))
    per_nat = 1.0 / (level_q * geometry.factor)
    starts = geometry.key_starts.tolist()

    q, k = noise(geometry, NOISE)
    q[..., POISON_ALL] = poison_q
    k[..., POISON_ALL] = poison_k * geometry.seen_by_none[:, None]
    for row in rows:
        q[row.row, :, POISON_ALL], q[row.row, :, POISON + row.which] = 0.0, poison_q
        first, last = starts[row.request], starts[row.request] + case.context_lens[row.request]
        k[first : first + row.lo, :, POISON + row.which] = poison_k
        k[first + row.hi : last, :, POISON + row.which] = poison_k
    q[..., BASE], k[..., BASE] = level_q, levels.bottom * per_nat
    heads = torch.arange(case.num_q_heads)
    q[:, heads, NEEDLE + heads % CLASSES] = level_q
    for request, kind, at in needles:
        key = starts[request] + at
        own = per_nat[key if len(per_nat) > 1 else 0]
        k[key, :, NEEDLE + kind] = (levels.needles[request] - levels.bottom) * own

    def unused(count: int) -> tuple[Tensor, Tensor]:
        poison = torch.zeros(count, case.num_kv_heads, case.head_dim, dtype=torch.float64)
        poison[..., :NEEDLE] = poison_k
        return poison, loud(case, count)

    return assemble(
        geometry,
        q=q,
        k=k,
        v=_values(geometry, [starts[request] + at for request, _, at in needles]),
        sink=sinks_near(geometry, levels.sink),
        unused=unused,
    )


def no_needle_poison(geometry: Geometry) -> str | None:
    """Why the numbers of a case leave no room for this design, or None."""
    if geometry.case.head_dim < LEAST_DIM:
        return f"its channels take a head_dim of {LEAST_DIM}"
    if geometry.amplitudes(POISON_LOGIT) is None:
        return geometry.no_amplitude(POISON_LOGIT)
    return None


def _needles(rows: list[Edges]) -> list[tuple[int, int, int]]:
    """(request, class, position): the first key seen, the last, the first of a part, and the one before it."""
    found = {
        (row.request, kind, at)
        for row in rows
        for kind, at in enumerate((row.lo, row.hi - 1, row.inner, max(row.inner - 1, row.lo)))
    }
    return sorted(found)


def _levels(geometry: Geometry, needles: list[tuple[int, int, int]]) -> _Levels:
    """Needles of a class weigh together about as much as all other keys, as far as a soft cap lets them."""
    cap = geometry.case.soft_cap
    count = Counter((request, kind) for request, kind, _ in needles)
    gaps = []
    for request, keys in enumerate(geometry.most_keys):
        most = max((count[request, kind] for kind in range(CLASSES)), default=0)
        gaps.append(log(max(Fraction(keys, max(most, 1)), Fraction(1))) + 0.3)
    if cap is None:
        return _Levels(0.0, tuple(gaps), 0.0)
    gaps = [min(gap, 2 * REACH * cap) for gap in gaps]
    low = -max(gaps, default=0.0) / 2
    return _Levels(uncapped(low, cap), tuple(uncapped(low + gap, cap) for gap in gaps), low)


def _values(geometry: Geometry, needles: list[int]) -> Tensor:
    """Normal V; +-2 on the needles, +-8 on what only some rows see, +-64 on what no row sees."""
    case = geometry.case
    v = normal(case, Stream.V, v_shape(case))
    loudness = torch.zeros(v.shape[0], dtype=torch.float64)
    if max(case.query_lens, default=0) <= 2 * WATCHED:
        loudness[~geometry.seen_by_all] = 8.0
    loudness[torch.tensor(needles, dtype=torch.int64)] = 2.0
    loudness[geometry.seen_by_none] = 64.0
    return torch.where(loudness[:, None, None] > 0, loudness[:, None, None] * signs(case, Stream.SIGNS, v.shape), v)
