"""A whole layer step: the keys and values of new tokens are stored, and their queries attend to everything.

Beside a plain probe the pool may be quantised. Queries, keys and values are then exact in its format, so that what is
stored, and what is cast on the way, is what the model asked for; what an implementation rounds is never a matter of
the budget.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fuzz.buffers import DTYPES, Buffer, Poison
from fuzz.case import Case, CaseError, SlotMap
from fuzz.instance.model import Instance
from fuzz.instance.operands import index_list, indptr, operand, scale_of
from fuzz.instance.pool import cache, geometry, num_blocks, slots_of
from fuzz.probes import PLAIN, Stream, design, values
from oracle import philox
from oracle.convention import Granularity
from oracle.fp8 import FORMAT_OF_NAME, decode
from oracle.kinds import Role
from oracle.layout import write_slots
from oracle.problem import Problem
from oracle.rounding import round_to

FACTORS = (0.5, 0.75, 1.25, 1.5, 1.75, 2.5, 3.0)
"""Scales of a quantised pool: of so few bits that an fp8 value times one is exact in bf16."""

DUMMY = 0
"""The slot that tokens without one map to: in the page that is reserved."""


def build_backend(case: Case, poison: Poison, device: str) -> Instance:
    """New tokens and a pool that holds those before them.

    ``slots`` lists the full pool's slot of every position of every request. Where the case has a slot map, a layer
    with a window has its keys and values in the sub-pool, which the caches then are.
    """
    if case.kv_dtype != case.dtype and case.probe not in PLAIN:
        raise CaseError(f"case.probe: {case.probe}; allowed: {', '.join(PLAIN)} beside the quantised pool of a backend")
    inputs = design(case)
    linear = {Role.K: inputs.k, Role.V: inputs.v}
    scales = {role: _scale(case, role) for role in Role}
    new = _last(case.context_lens, case.query_lens)
    listed, own, slot_map = _slots(case)
    buffers = {
        "q": operand("q", _queries(case)[new] if case.probe in PLAIN else inputs.q, case, poison, device),
        "q_indptr": index_list("q_indptr", indptr(case.query_lens), case.index_dtype, poison, device),
        "lengths": index_list("lengths", torch.tensor(case.context_lens), case.index_dtype, poison, device),
        "slots": index_list("slots", listed, case.index_dtype, poison, device),
    }
    for role in Role:
        given = _as_the_model_gives(linear[role][new], scales[role], case)
        buffers[role.value] = operand(role.value, given, case, poison, device)
        held = cache(case, role, poison, device)
        before = ~new & (own != DUMMY)
        write_slots(held.view, own[before], linear[role][before], geometry(case, role))
        buffers[held.name] = held
    optional: dict[str, Tensor | None] = {
        "sinks": inputs.sinks,
        "slot_map": slot_map,
        "k_descale": scales[Role.K],
        "v_descale": scales[Role.V],
    }
    for name, data in optional.items():
        if data is not None:
            buffers[name] = operand(name, data, case, poison, device)
    problem = _problem(case, linear, buffers, device)
    return Instance(case, device, buffers, own.masked_fill(~new, -1), linear, problem)


def _last(lengths: tuple[int, ...], counts: tuple[int, ...]) -> Tensor:
    """Which of the concatenated positions are among the last ``counts[i]`` of their request: bool [T]."""
    return torch.cat([torch.arange(n) >= n - count for n, count in zip(lengths, counts, strict=True)])


def _slots(case: Case) -> tuple[Tensor, Tensor, Tensor | None]:
    """The full pool's slot of each position, its slot in the layer's own pool, and the map from full to sub-pool."""
    full = slots_of(case)
    if case.slot_map is SlotMap.NONE:
        return full, full, None
    sub = slots_of(case, Stream.SLOT_MAP)
    if case.slot_map is SlotMap.HOLES and case.window is not None:
        sub = sub.masked_fill(_given_up(case, case.window), DUMMY)
    slot_map = torch.full((num_blocks(case) * case.page_size,), DUMMY, dtype=torch.int64)
    slot_map[full] = sub
    return full, full if case.window is None else sub, slot_map


def _given_up(case: Case, window: int) -> Tensor:
    """Positions in pages that lie wholly before the windows of their request's queries: bool [T]."""
    lost = []
    for length, queries in zip(case.context_lens, case.query_lens, strict=True):
        oldest = max(length - queries + 1 - window, 0)
        lost.append(torch.arange(length) < oldest // case.page_size * case.page_size)
    return torch.cat(lost)


def _scale(case: Case, role: Role) -> Tensor | None:
    """The layer's scale of its stored keys or values, float32 [1], or None."""
    granularity = case.k_descale if role is Role.K else case.v_descale
    if granularity is Granularity.NONE:
        return None
    stream = Stream.K_DESCALE if role is Role.K else Stream.V_DESCALE
    drawn = philox.uniform_int(case.seed, stream, (1,), 0, len(FACTORS))
    return torch.tensor(FACTORS, dtype=torch.float32)[drawn]


def _queries(case: Case) -> Tensor:
    """The query of every position, so that a step over some of them has the values of one over all."""
    shape = (sum(case.context_lens), case.num_q_heads, case.head_dim)
    return _as_the_model_gives(values(case, Stream.Q, shape, case.kv_dtype), None, case)


def _as_the_model_gives(stored: Tensor, scale: Tensor | None, case: Case) -> Tensor:
    """What the model hands over, in its own dtype, for elements that the pool holds as ``stored``."""
    if case.kv_dtype == case.dtype:
        return stored
    exact = decode(stored.view(torch.uint8), FORMAT_OF_NAME[case.kv_dtype]).double()
    return round_to(exact if scale is None else exact * scale.double(), DTYPES[case.dtype])


def _problem(case: Case, linear: dict[Role, Tensor], buffers: dict[str, Buffer], device: str) -> Problem:
    def given(name: str) -> Tensor | None:
        return buffers[name].view.clone() if name in buffers else None

    return Problem(
        q=buffers["q"].view.contiguous(),
        k=linear[Role.K].to(device),
        v=linear[Role.V].to(device),
        q_lens=case.query_lens,
        kv_lens=case.context_lens,
        scale=scale_of(case),
        causal=case.causal,
        window=case.window,
        sinks=given("sinks"),
        soft_cap=case.soft_cap,
        k_descale=given("k_descale"),
        v_descale=given("v_descale"),
    )
