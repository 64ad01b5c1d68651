"""A backend's steps one after the other over one pool, as a server takes them.

Two requests of other tokens fill the pages and end. Their pages, old keys and values in them, go to the case's first
request and to its twin, a second request of the same tokens. The first is given what comes before its new tokens in two
chunks; the twin shares the pages that those fill, and has pages of its own for the rest. Both then take the case's step
together, and must get what the first request got in the case.

What is stored is what the steps stored: nothing is put into the pool from outside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fuzz.buffers import Poison
from fuzz.call import arguments
from fuzz.case import Case, SlotMap
from fuzz.check.execute import Progress
from fuzz.instance import Instance, build
from fuzz.instance.operands import indptr
from fuzz.instance.pool import own_pages
from fuzz.probes import PLAIN
from oracle.declare import Declaration
from oracle.kinds import Operation

ONE_IN = 3
"""Of so many cases, by their seeds, one is asked: a session has half a dozen steps."""

OPERANDS = ("q", "k", "v")


def in_session(case: Case) -> bool:
    """Whether the case's first request can be served step by step, with the same values."""
    plain = case.operation is Operation.BACKEND and case.probe in PLAIN and case.slot_map is not SlotMap.HOLES
    return plain and case.causal and case.seed % ONE_IN == 0


def extender(declaration: Declaration) -> Declaration | None:
    """The target that takes any tokens of a request, over the same kind of pool; None: none is named."""
    return declaration if declaration.supports.max_query_len is None else declaration.agrees_with


@dataclass(frozen=True, eq=False)
class _Request:
    """Queries, keys and values of every position, and the slots of those positions."""

    operands: dict[str, Tensor]
    slots: Tensor


def serve(
    declaration: Declaration, extend: Declaration, case: Case, poison: Poison, device: str, progress: Progress
) -> list[Tensor]:
    """What the first request of ``case`` and its twin get from the last step: each [Tq, Hq, D_v]."""
    progress("generate")
    length, new = case.context_lens[0], case.query_lens[0]
    # Every token is new to this pool: it holds nothing yet.
    two = replace(case, context_lens=(length, length), query_lens=(length, length))
    pool = build(two, poison, device)
    prompt, tenants, twin = _requests(case, two, poison, device)
    before, half = length - new, (length - new + 1) // 2
    shared = before // case.page_size * case.page_size
    progress("kernel")
    _step(extend, pool, [(tenant, 0, len(tenant.slots)) for tenant in tenants])
    for request, first, last in ((prompt, 0, half), (prompt, half, before), (twin, shared, before)):
        if first < last:
            _step(extend, pool, [(request, first, last)])
    out = _step(declaration, pool, [(prompt, before, length), (twin, before, length)])
    progress("checks")
    return [out[:new], out[new:]]


def _requests(
    case: Case, two: Case, poison: Poison, device: str
) -> tuple[_Request, tuple[_Request, _Request], _Request]:
    """The case's first request, those that had its pages before, and its twin."""
    length, new, size = case.context_lens[0], case.query_lens[0], case.page_size
    offsets = torch.arange(size)
    pages = [(torch.tensor(listed)[:, None] * size + offsets).flatten().to(device) for listed in own_pages(two)]
    # A map to a sub-pool knows the slots of the case's own positions alone.
    filled = [slots if case.slot_map is SlotMap.NONE else slots[:length] for slots in pages]
    count = len(filled[0])
    whole = build(replace(case, context_lens=(length,), query_lens=(length,)), poison, device)
    old = build(replace(two, context_lens=(count,) * 2, query_lens=(count,) * 2, seed=case.seed + 1), poison, device)
    shared = (length - new) // size * size
    both = [torch.cat([pages[0][:shared], pages[1][shared:length]]), pages[0][:length]]
    tenants = [
        _Request({name: old.buffers[name].view[i * count : (i + 1) * count] for name in OPERANDS}, slots)
        for i, slots in enumerate(filled)
    ]
    twin, prompt = (_Request({name: whole.buffers[name].view for name in OPERANDS}, slots) for slots in both)
    return prompt, (tenants[0], tenants[1]), twin


def _step(declaration: Declaration, pool: Instance, batch: Sequence[tuple[_Request, int, int]]) -> Tensor:
    """One call: of each request the tokens from one position to another are new, and all before them are stored."""
    given = arguments(declaration, pool)
    for name in OPERANDS:
        # Copies: an implementation may change what the model gave.
        given[name] = torch.cat([request.operands[name][first:last] for request, first, last in batch])
    device = given["q"].device
    lists = {
        "q_indptr": indptr(tuple(last - first for _, first, last in batch)),
        "lengths": torch.tensor([last for _, _, last in batch]),
        "slots": torch.cat([request.slots[:last] for request, _, last in batch]),
    }
    given |= {name: values.to(device, given[name].dtype) for name, values in lists.items()}
    out: Tensor = declaration.function(**given)
    return out
