"""From float64 values to the operands of a case."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fuzz.buffers import DTYPES
from fuzz.case import Case, Sink
from fuzz.probes.exact import log
from fuzz.probes.geometry import Geometry
from fuzz.probes.model import Inputs
from fuzz.probes.plain import descale_of, normal, signs, sinks
from fuzz.probes.stream import Stream
from oracle.kinds import Role
from oracle.rounding import round_to

DESIGNED_SINKS = {"sinks": (Sink.NONE.value, Sink.NORMAL.value)}
"""What a design needs that sets the sinks itself where the case has any."""


def q_shape(case: Case) -> tuple[int, int, int]:
    """Shape of the queries."""
    return sum(case.query_lens), case.num_q_heads, case.head_dim


def k_shape(case: Case) -> tuple[int, int, int]:
    """Shape of the keys."""
    return sum(case.context_lens), case.num_kv_heads, case.head_dim


def v_shape(case: Case) -> tuple[int, int, int]:
    """Shape of the values."""
    return sum(case.context_lens), case.num_kv_heads, case.v_head_dim


def assemble(
    geometry: Geometry,
    *,
    q: Tensor | None = None,
    k: Tensor | None = None,
    v: Tensor | None = None,
    sink: Tensor | None = None,
    unused: Callable[[int], tuple[Tensor, Tensor]] | None = None,
) -> Inputs:
    """Round float64 operands to the case's dtypes; what is not given is normal, as is a sink that is not given.

    sink: [Hq], used where the case has sinks. unused: float64 K [n, Hkv, D] and V [n, Hkv, D_v] of n slots.
    """
    case = geometry.case
    q = normal(case, Stream.Q, q_shape(case)) if q is None else q
    k = normal(case, Stream.K, k_shape(case)) if k is None else k
    v = normal(case, Stream.V, v_shape(case)) if v is None else v
    stored = DTYPES[case.kv_dtype]
    own_sinks = sinks(case)
    if own_sinks is not None and sink is not None:
        own_sinks = sink.to(torch.float32)

    def rounded_unused(count: int) -> dict[Role, Tensor]:
        pair = unused(count) if unused is not None else ()
        return {role: round_to(data, stored) for role, data in zip(Role, pair, strict=True)}

    return Inputs(
        q=round_to(q, DTYPES[case.dtype]),
        k=round_to(k, stored),
        v=round_to(v, stored),
        sinks=own_sinks,
        k_descale=descale_of(case, Role.K),
        v_descale=descale_of(case, Role.V),
        unused=None if unused is None else rounded_unused,
    )


def sinks_near(geometry: Geometry, logit: float, mass: int | None = None) -> Tensor:
    """Sinks [Hq], float64, about as heavy as the keys of the longest row, which have ``logit`` each.

    Heads differ by steps of a tenth, so that no two of sixteen are alike. mass: count that many keys instead.
    """
    case = geometry.case
    middle = logit + log(max(mass or geometry.longest, 1))
    steps = torch.arange(case.num_q_heads, dtype=torch.float64) % 16
    return middle + (steps - 10.0) / 10.0


def loud(case: Case, count: int) -> Tensor:
    """Values +-64 for ``count`` slots that nobody may read, [count, Hkv, D_v]."""
    return 64.0 * signs(case, Stream.UNUSED_V, (count, case.num_kv_heads, case.v_head_dim))


def silent(case: Case, count: int) -> Tensor:
    """Keys of zero for ``count`` slots, [count, Hkv, D]: their logit is 0, whatever the query."""
    return torch.zeros(count, case.num_kv_heads, case.head_dim, dtype=torch.float64)
