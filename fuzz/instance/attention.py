"""Attention: contiguous operands, a prefix in the pool, or every key in the pool."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fuzz.buffers import Buffer, Poison, empty_buffer
from fuzz.case import Case, Prefix
from fuzz.instance.model import Instance
from fuzz.instance.operands import descale, index_list, indptr, keys_and_values, operand, scale_of
from fuzz.instance.pool import cache, geometry, num_blocks, page_table, slots_of
from fuzz.probes import Stream, sinks, values
from oracle.kinds import IndexForm, Role
from oracle.layout import write_slots
from oracle.problem import Problem
from oracle.rounding import widen


def build_extend(case: Case, poison: Poison, device: str) -> Instance:
    """Queries of each request's last positions; its keys contiguous, or those before the queries in the pool."""
    linear = keys_and_values(case)
    if case.prefix is Prefix.INLINE:
        passed, before = torch.ones(sum(case.context_lens), dtype=torch.bool), case.context_lens
        new, pool = linear, dict[str, Buffer]()
    else:
        before = tuple(n - q for n, q in zip(case.context_lens, case.query_lens, strict=True))
        passed = ~_first(case.context_lens, before)
        # What is passed comes from the model, in its dtype; the pool may hold less.
        new = linear if case.kv_dtype == case.dtype else keys_and_values(replace(case, kv_dtype=case.dtype))
        pool = _pool(case, linear, ~passed, poison, device)
        pool["slots"] = index_list("slots", slots_of(case)[~passed], case.index_dtype, poison, device)
    buffers = _shared(case, poison, device) | pool
    buffers["k"] = operand("k", new[Role.K][passed], case, poison, device)
    buffers["v"] = operand("v", new[Role.V][passed], case, poison, device)
    buffers["q_indptr"] = index_list("q_indptr", indptr(case.query_lens), case.index_dtype, poison, device)
    buffers["kv_indptr"] = index_list("kv_indptr", indptr(before), case.index_dtype, poison, device)
    if new is not linear:
        pairs = {role: (widen(new[role]), widen(linear[role])) for role in Role}
        linear = {role: torch.where(passed.view(-1, 1, 1), *pair) for role, pair in pairs.items()}
    return Instance(case, device, buffers, linear=linear, problem=_problem(case, linear, ~passed, buffers, device))


def build_decode(case: Case, poison: Poison, device: str) -> Instance:
    """Queries of each request's last positions against a pool that holds every key."""
    linear = keys_and_values(case)
    buffers, held = _shared(case, poison, device), torch.ones(sum(case.context_lens), dtype=torch.bool)
    buffers |= _pool(case, linear, held, poison, device)
    if case.index_form is IndexForm.PAGE_TABLE:
        buffers["page_table"] = page_table(case, poison, device)
        lengths = torch.tensor(case.context_lens, dtype=torch.int64)
        buffers["lengths"] = index_list("lengths", lengths, case.index_dtype, poison, device)
    else:
        buffers["kv_indptr"] = index_list("kv_indptr", indptr(case.context_lens), case.index_dtype, poison, device)
        buffers["slots"] = index_list("slots", slots_of(case), case.index_dtype, poison, device)
    return Instance(case, device, buffers, linear=linear, problem=_problem(case, linear, held, buffers, device))


def _first(lengths: tuple[int, ...], counts: tuple[int, ...]) -> Tensor:
    """Which of the concatenated positions are among the first ``counts[i]`` of their request: bool [T]."""
    parts = [torch.arange(n) < count for n, count in zip(lengths, counts, strict=True)]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.bool)


def _pool(case: Case, linear: dict[Role, Tensor], held: Tensor, poison: Poison, device: str) -> dict[str, Buffer]:
    """Caches in which the positions ``held`` [T] are stored, everything else poison; and factors of each token."""
    found = {}
    slots = slots_of(case)[held]
    for role in Role:
        buffer = cache(case, role, poison, device)
        write_slots(buffer.view, slots, linear[role][held], geometry(case, role))
        found[buffer.name] = buffer
    for name, factors in _descales(case).items():
        if factors is not None and factors.dim() == 2:
            # As the cache is: a factor for each slot of each page of each head.
            shape = (num_blocks(case), case.num_kv_heads, case.page_size)
            buffer = empty_buffer(name, shape, factors.dtype, poison, device=device)
            page, slot = slots // case.page_size, slots % case.page_size
            buffer.view[page, :, slot] = factors[held].to(device)
            found[name] = buffer
    return found


def _descales(case: Case) -> dict[str, Tensor | None]:
    return {
        "k_descale": descale(case.k_descale, Stream.K_DESCALE, case),
        "v_descale": descale(case.v_descale, Stream.V_DESCALE, case),
    }


def _shared(case: Case, poison: Poison, device: str) -> dict[str, Buffer]:
    q = values(case, Stream.Q, (sum(case.query_lens), case.num_q_heads, case.head_dim), case.dtype)
    optional = {"sinks": sinks(case)} | _descales(case)
    found = {"q": operand("q", q, case, poison, device)}
    for name, data in optional.items():
        if data is not None:
            found[name] = operand(name, data, case, poison, device)
    return found


def _problem(case: Case, linear: dict[Role, Tensor], held: Tensor, buffers: dict[str, Buffer], device: str) -> Problem:
    """The problem; ``held`` [T]: which keys are in the pool, whose descales are theirs alone."""
    descales = {name: _by_key(factors, case, held, device) for name, factors in _descales(case).items()}

    return Problem(
        q=buffers["q"].view.contiguous(),
        k=linear[Role.K].to(device),
        v=linear[Role.V].to(device),
        q_lens=case.query_lens,
        kv_lens=case.context_lens,
        scale=scale_of(case),
        causal=case.causal,
        window=case.window,
        sinks=buffers["sinks"].view.clone() if "sinks" in buffers else None,
        soft_cap=case.soft_cap,
        k_descale=descales["k_descale"],
        v_descale=descales["v_descale"],
    )


def _by_key(factors: Tensor | None, case: Case, held: Tensor, device: str) -> Tensor | None:
    """Factors [1], [H] or [T, H] as the problem wants them, [1, H] or [T, H]; 1 for keys that are passed."""
    if factors is None:
        return None
    factors = factors if factors.dim() == 2 else factors.unsqueeze(0)
    if case.prefix is Prefix.POOL:
        factors = torch.where(held.unsqueeze(1), factors, 1.0)
    return factors.to(device)
