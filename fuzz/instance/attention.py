"""Attention: contiguous operands, a prefix in the pool, or every key in the pool."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fuzz.buffers import Buffer, Poison, empty_buffer
from fuzz.case import Case, Prefix, Probe
from fuzz.instance.model import Instance
from fuzz.instance.operands import index_list, indptr, operand, scale_of
from fuzz.instance.pool import cache, geometry, num_blocks, page_table, slots_of, unused_slots
from fuzz.probes import Inputs, design, unfit
from oracle.kinds import IndexForm, Role
from oracle.layout import write_slots
from oracle.problem import Problem
from oracle.rounding import widen


def build_extend(case: Case, poison: Poison, device: str) -> Instance:
    """Queries of each request's last positions. Keys are contiguous; or those before them, or all, in the pool."""
    if case.prefix is Prefix.ALL:
        found = build_decode(case, poison, device)
        found.buffers["q_indptr"] = index_list("q_indptr", indptr(case.query_lens), case.index_dtype, poison, device)
        return found
    inputs = new = design(case)
    pool: dict[str, Buffer] = {}
    if case.prefix is Prefix.INLINE:
        passed, before = torch.ones(sum(case.context_lens), dtype=torch.bool), case.context_lens
    else:
        before = tuple(n - q for n, q in zip(case.context_lens, case.query_lens, strict=True))
        passed = ~_first(case.context_lens, before)
        pool = _pool(case, inputs, ~passed, poison, device)
        pool["slots"] = index_list("slots", slots_of(case)[~passed], case.index_dtype, poison, device)
        if case.kv_dtype != case.dtype:
            # What is passed comes from the model, in its dtype; the pool holds less.
            passes = replace(case, kv_dtype=case.dtype)
            new = design(passes if unfit(passes) is None else replace(passes, probe=Probe.NORMAL))
    buffers = _shared(case, inputs, poison, device) | pool
    buffers["k"] = operand("k", new.k[passed], case, poison, device)
    buffers["v"] = operand("v", new.v[passed], case, poison, device)
    buffers["q_indptr"] = index_list("q_indptr", indptr(case.query_lens), case.index_dtype, poison, device)
    buffers["kv_indptr"] = index_list("kv_indptr", indptr(before), case.index_dtype, poison, device)
    if new is not inputs:
        rows = passed.view(-1, 1, 1)
        k, v = (torch.where(rows, widen(a), widen(b)) for a, b in ((new.k, inputs.k), (new.v, inputs.v)))
        inputs = replace(inputs, k=k, v=v)
    return _instance(case, inputs, ~passed, buffers, device)


def build_decode(case: Case, poison: Poison, device: str) -> Instance:
    """Queries of each request's last positions against a pool that holds every key."""
    inputs, held = design(case), torch.ones(sum(case.context_lens), dtype=torch.bool)
    buffers = _shared(case, inputs, poison, device) | _pool(case, inputs, held, poison, device)
    if case.index_form is IndexForm.PAGE_TABLE:
        buffers["page_table"] = page_table(case, poison, device)
        lengths = torch.tensor(case.context_lens, dtype=torch.int64)
        buffers["lengths"] = index_list("lengths", lengths, case.index_dtype, poison, device)
    else:
        buffers["kv_indptr"] = index_list("kv_indptr", indptr(case.context_lens), case.index_dtype, poison, device)
        buffers["slots"] = index_list("slots", slots_of(case), case.index_dtype, poison, device)
    return _instance(case, inputs, held, buffers, device)


def _first(lengths: tuple[int, ...], counts: tuple[int, ...]) -> Tensor:
    """Which of the concatenated positions are among the first ``counts[i]`` of their request: bool [T]."""
    parts = [torch.arange(n) < count for n, count in zip(lengths, counts, strict=True)]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.bool)


def _pool(case: Case, inputs: Inputs, held: Tensor, poison: Poison, device: str) -> dict[str, Buffer]:
    """Caches in which the positions ``held`` [T] are stored, everything else poison; and factors of each token.

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
    for name, factors in inputs.descales.items():
        if factors is not None and factors.dim() == 2:
            # As the cache is: a factor for each slot of each page of each head.
            shape = (num_blocks(case), case.num_kv_heads, case.page_size)
            buffer = empty_buffer(name, shape, factors.dtype, poison, device=device)
            page, slot = slots // case.page_size, slots % case.page_size
            buffer.view[page, :, slot] = factors[held].to(device)
            found[name] = buffer
    return found


def _shared(case: Case, inputs: Inputs, poison: Poison, device: str) -> dict[str, Buffer]:
    optional = {"sinks": inputs.sinks, **inputs.descales}
    found = {"q": operand("q", inputs.q, case, poison, device)}
    for name, data in optional.items():
        if data is not None:
            found[name] = operand(name, data, case, poison, device)
    return found


def _instance(case: Case, inputs: Inputs, held: Tensor, buffers: dict[str, Buffer], device: str) -> Instance:
    """The instance and its problem; ``held`` [T]: which keys are in the pool, whose descales are theirs alone."""
    problem = Problem(
        q=buffers["q"].view.contiguous(),
        k=inputs.k.to(device),
        v=inputs.v.to(device),
        q_lens=case.query_lens,
        kv_lens=case.context_lens,
        scale=scale_of(case),
        causal=case.causal,
        window=case.window,
        sinks=buffers["sinks"].view.clone() if "sinks" in buffers else None,
        soft_cap=case.soft_cap,
        k_descale=_by_key(inputs.k_descale, case, held, device),
        v_descale=_by_key(inputs.v_descale, case, held, device),
    )
    return Instance(case, device, buffers, linear={Role.K: inputs.k, Role.V: inputs.v}, problem=problem)


def _by_key(factors: Tensor | None, case: Case, held: Tensor, device: str) -> Tensor | None:
    """Factors [1], [H] or [T, H] as the problem wants them, [1, H] or [T, H]; 1 for keys that are passed."""
    if factors is None:
        return None
    factors = factors if factors.dim() == 2 else factors.unsqueeze(0)
    if case.prefix is Prefix.POOL:
        factors = torch.where(held.unsqueeze(1), factors, 1.0)
    return factors.to(device)
