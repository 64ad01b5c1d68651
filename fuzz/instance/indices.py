"""Index lists for decode context parallel, and what they must become.

Slots are widened: the owner of a slot is slot % N and its physical row is slot // N. A request's slots run
through the ranks, so that the slot of position p is congruent to p modulo N, and its rows fill whole pages.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fuzz.buffers import Poison, empty_buffer
from fuzz.case import Case
from fuzz.instance.model import Instance
from fuzz.instance.operands import index_list, indptr, starts
from fuzz.instance.pool import slots_of
from fuzz.probes import Stream
from oracle import philox
from oracle.kinds import IndexTask


def build_indices(case: Case, poison: Poison, device: str) -> Instance:
    """Arguments of the case's index task, and the list that it must return."""
    build = {IndexTask.RANK_SLOTS: _rank_slots, IndexTask.GATHERED: _gathered, IndexTask.LOCAL: _local}
    arguments, expected = build[case.index_task](case)
    buffers = {
        name: index_list(name, data, case.index_dtype, poison, device)
        for name, data in arguments.items()
        if name != "req_to_token"
    }
    if "req_to_token" in arguments:
        table = arguments["req_to_token"]
        buffer = empty_buffer("req_to_token", table.shape, torch.int32, poison, device=device)
        buffer.view[table >= 0] = table[table >= 0].to(buffer.view)
        buffers["req_to_token"] = buffer
    return Instance(case, device, buffers, indices=expected)


def widened_slots(case: Case) -> list[Tensor]:
    """Widened slot of each position, request by request: int64 [L]."""
    ranks = case.parts
    rows = replace(
        case, context_lens=tuple(-(-n // ranks) for n in case.context_lens), query_lens=(0,) * len(case.context_lens)
    )
    by_request = slots_of(rows).split(list(rows.context_lens)) if rows.context_lens else ()
    found = []
    for length, own in zip(case.context_lens, by_request, strict=True):
        position = torch.arange(length)
        found.append(own[position // ranks] * ranks + position % ranks)
    return found


def _cat(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)


def _rank_slots(case: Case) -> tuple[dict[str, Tensor], Tensor]:
    """Of the last ``query_lens[i]`` positions of each request, the rows of those that the rank owns."""
    slots, requests = widened_slots(case), len(case.context_lens)
    first = tuple(n - q for n, q in zip(case.context_lens, case.query_lens, strict=True))
    order = philox.permutation(case.seed, Stream.SLOT_MAP, requests + 2)[:requests]
    table = torch.full((requests + 2, max(case.context_lens, default=0)), -1, dtype=torch.int64)
    owned = []
    for row, own, start in zip(order.tolist(), slots, first, strict=True):
        table[row, : len(own)] = own
        position = torch.arange(start, len(own))
        owned.append(own[position[position % case.parts == case.rank]] // case.parts)
    local = tuple(len(part) for part in owned)
    arguments = {
        "req_to_token": table,
        "req_pool_indices": order,
        "local_lens": torch.tensor(local, dtype=torch.int64),
        "indptr": indptr(local),
    }
    if any(first):
        arguments["starts"] = torch.tensor(first, dtype=torch.int64)
    return arguments, _cat(owned)


def _gathered(case: Case) -> tuple[dict[str, Tensor], Tensor]:
    """All prefixes lie first, one after the other, then all new tokens; per request the ids of both."""
    prefix = tuple(n - q for n, q in zip(case.context_lens, case.query_lens, strict=True))
    new_start = sum(prefix)
    prefix_starts, query_starts = starts(prefix), starts(case.query_lens)
    ids = []
    for i, (before, new) in enumerate(zip(prefix, case.query_lens, strict=True)):
        ids += [prefix_starts[i] + torch.arange(before), new_start + query_starts[i] + torch.arange(new)]
    arguments = {
        "indptr": indptr(case.context_lens),
        "query_lens": torch.tensor(case.query_lens, dtype=torch.int64),
        "query_starts": query_starts,
        "prefix_lens": torch.tensor(prefix, dtype=torch.int64),
        "prefix_starts": prefix_starts,
    }
    return arguments, _cat(ids)


def _local(case: Case) -> tuple[dict[str, Tensor], Tensor]:
    """From every position's widened slot, the rows of those that the rank owns."""
    slots = widened_slots(case)
    owned = [own[case.rank :: case.parts] // case.parts for own in slots]
    local = tuple(len(part) for part in owned)
    arguments = {
        "lens": torch.tensor(case.context_lens, dtype=torch.int64),
        "kv_starts": starts(case.context_lens),
        "slots": _cat(slots),
        "local_lens": torch.tensor(local, dtype=torch.int64),
        "local_starts": starts(local),
    }
    return arguments, _cat(owned)
