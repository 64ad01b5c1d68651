"""Attention: contiguous operands, a prefix in the pool, or every key in the pool."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fuzz.buffers import Buffer, Poison
from fuzz.case import Case, Prefix
from fuzz.instance.model import Instance
from fuzz.instance.operands import index_list, indptr, operand, scale_of
from fuzz.instance.pool import cache, geometry, page_table, slots_of, unused_slots
from fuzz.probes import Inputs, design
from oracle.kinds import IndexForm, Role
from oracle.layout import write_slots
from oracle.problem import Problem


def build_extend(case: Case, poison: Poison, device: str) -> Instance:
    """Queries of each request's last positions; its keys contiguous, or those before the queries in the pool."""
    inputs = design(case)
    linear = {Role.K: inputs.k, Role.V: inputs.v}
    if case.prefix is Prefix.INLINE:
        passed, before = torch.ones(sum(case.context_lens), dtype=torch.bool), case.context_lens
        pool: dict[str, Buffer] = {}
    else:
        before = tuple(n - q for n, q in zip(case.context_lens, case.query_lens, strict=True))
        passed = ~_first(case.context_lens, before)
        pool = _pool(case, inputs, ~passed, poison, device)
        pool["slots"] = index_list("slots", slots_of(case)[~passed], case.index_dtype, poison, device)
    buffers = _shared(case, inputs, poison, device) | pool
    buffers["k"] = operand("k", linear[Role.K][passed], case, poison, device)
    buffers["v"] = operand("v", linear[Role.V][passed], case, poison, device)
    buffers["q_indptr"] = index_list("q_indptr", indptr(case.query_lens), case.index_dtype, poison, device)
    buffers["kv_indptr"] = index_list("kv_indptr", indptr(before), case.index_dtype, poison, device)
    return Instance(case, device, buffers, linear=linear, problem=_problem(case, linear, buffers, device))


def build_decode(case: Case, poison: Poison, device: str) -> Instance:
    """Queries of each request's last positions against a pool that holds every key."""
    inputs = design(case)
    linear = {Role.K: inputs.k, Role.V: inputs.v}
    buffers = _shared(case, inputs, poison, device)
    buffers |= _pool(case, inputs, torch.ones(sum(case.context_lens), dtype=torch.bool), poison, device)
    if case.index_form is IndexForm.PAGE_TABLE:
        buffers["page_table"] = page_table(case, poison, device)
        lengths = torch.tensor(case.context_lens, dtype=torch.int64)
        buffers["lengths"] = index_list("lengths", lengths, case.index_dtype, poison, device)
    else:
        buffers["kv_indptr"] = index_list("kv_indptr", indptr(case.context_lens), case.index_dtype, poison, device)
        buffers["slots"] = index_list("slots", slots_of(case), case.index_dtype, poison, device)
    return Instance(case, device, buffers, linear=linear, problem=_problem(case, linear, buffers, device))


def _first(lengths: tuple[int, ...], counts: tuple[int, ...]) -> Tensor:
    """Which of the concatenated positions are among the first ``counts[i]`` of their request: bool [T]."""
    parts = [torch.arange(n) < count for n, count in zip(lengths, counts, strict=True)]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.bool)


def _pool(case: Case, inputs: Inputs, held: Tensor, poison: Poison, device: str) -> dict[str, Buffer]:
    """Caches in which the positions ``held`` [T] are stored, everything else poison.

    Under the positive poison, unused slots hold what the probe's design puts there, if it cares: decodable, and
    with a logit of the design's choice. The other poisons stay, so that the two still tell of any influence.
    """
    found = {}
    slots, linear = slots_of(case)[held], {Role.K: inputs.k, Role.V: inputs.v}
    unused = unused_slots(case, slots) if inputs.unused is not None and poison is Poison.POSITIVE else slots[:0]
    planted = inputs.unused(len(unused)) if inputs.unused is not None and len(unused) else {}
    for role in Role:
        buffer = cache(case, role, poison, device)
        write_slots(buffer.view, slots, linear[role][held], geometry(case, role))
        if role in planted:
            write_slots(buffer.view, unused, planted[role], geometry(case, role))
        found[buffer.name] = buffer
    return found


def _shared(case: Case, inputs: Inputs, poison: Poison, device: str) -> dict[str, Buffer]:
    optional = {"sinks": inputs.sinks, "k_descale": inputs.k_descale, "v_descale": inputs.v_descale}
    found = {"q": operand("q", inputs.q, case, poison, device)}
    for name, data in optional.items():
        if data is not None:
            found[name] = operand(name, data, case, poison, device)
    return found


def _problem(case: Case, linear: dict[Role, Tensor], buffers: dict[str, Buffer], device: str) -> Problem:
    def given(name: str) -> Any:
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
        k_descale=_by_head(given("k_descale")),
        v_descale=_by_head(given("v_descale")),
    )


def _by_head(factors: Tensor | None) -> Tensor | None:
    """Factors [1] or [H] as the problem wants them: [1, H]."""
    return None if factors is None else factors.unsqueeze(0)
