"""Making a captured call smaller while it still fails: fewer requests, fewer queries, shorter contexts, fewer pages.

What is left out of a call changes nothing of what is left: a request's rows are its own, and a query sees no key after
it. So the recorded output stays valid. Shortening a context does change the answer: that needs the target, which then
gives the output anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from fuzz.captured.call import Captured
from oracle.capture import Record, trimmed
from oracle.convention import LseLayout
from oracle.declare import Declaration
from oracle.kinds import IndexForm, Operation

Judge = Callable[[Record], bool]
"""Whether a smaller call fails as the whole does."""


def reduced(captured: Captured, declaration: Declaration, fails: Judge) -> Record:
    """The smallest part of a call that fails by what was recorded: one request and, if causal, as few queries as do."""
    best, case = captured.record, captured.case
    requests = len(case.context_lens) if declaration.operation is not Operation.LSE_MERGE else case.context_lens[0]
    order = sorted(range(requests), key=lambda r: case.context_lens[r] if case.query_lens else r)
    for chosen in _parts(order):
        smaller = _take(captured, declaration, chosen)
        if fails(smaller):
            best = smaller
            break
    return trimmed(best)


def _parts(order: Sequence[int]) -> Iterator[list[int]]:
    """Each alone, then ever larger parts for a fault that needs several."""
    if len(order) <= 64:
        yield from ([r] for r in order)
    size = len(order)
    while size > 2:
        size = -(-size // 2)
        for start in range(0, len(order), size):
            yield sorted(order[start : start + size])


def fewer_queries(captured: Captured, declaration: Declaration, fails: Judge) -> Record:
    """One request's first queries alone, with the keys that they see: the fewest, by halves, that still fail."""
    best, case = captured.record, captured.case
    if declaration.operation is not Operation.VARLEN_EXTEND or not case.causal or len(case.query_lens) != 1:
        return best
    low, high = 0, case.query_lens[0]
    while high - low > 1:
        middle = (low + high) // 2
        smaller = _first_queries(captured, declaration, middle)
        if fails(smaller):
            best, high = smaller, middle
        else:
            low = middle
    return best


def shorter(captured: Captured, declaration: Declaration, fails_anew: Callable[[Record], Record | None]) -> Record:
    """One request of a decode with ever fewer keys.

    ``fails_anew`` runs the target; it gives the record with its new output if that fails the same way, else None.
    """
    best, case = captured.record, captured.case
    if declaration.operation is not Operation.PAGED_DECODE or len(case.context_lens) != 1:
        return best
    length, least = case.context_lens[0], max(case.query_lens[0], 1)
    step = length - least
    while step >= 1:
        found = (
            fails_anew(_first_keys(best, declaration, length - step, case.page_size))
            if length - step >= least
            else None
        )
        if found is None:
            step //= 2
        else:
            best, length = found, length - step
            step = min(step, length - least)
    return trimmed(best)


# ---------------------------------------------------------------- taking parts


def _take(captured: Captured, declaration: Declaration, requests: Sequence[int]) -> Record:
    """The record of some requests alone."""
    record, case, arguments = captured.record, captured.case, dict(captured.record.arguments)
    if declaration.operation is Operation.LSE_MERGE:
        rows = torch.tensor(requests)
        for name in ("outs", "lses"):
            arguments[name] = arguments[name][:, rows]
        return _with_rows(record, arguments, rows, declaration)
    rows = _runs(case.query_lens, requests)
    arguments["q"] = arguments["q"][rows]
    if declaration.operation is Operation.PAGED_DECODE and declaration.convention.index_form is IndexForm.PAGE_TABLE:
        most = max((-(-case.context_lens[r] // case.page_size) for r in requests), default=0)
        arguments["page_table"] = arguments["page_table"][list(requests), :most]
        arguments["lengths"] = arguments["lengths"][list(requests)]
        return _with_rows(record, arguments, rows, declaration)
    listed = _listed(captured, declaration)
    kept = _runs(listed, requests)
    if declaration.operation is Operation.VARLEN_EXTEND:
        new = rows if declaration.convention.prefix_in_pool else kept
        arguments["k"], arguments["v"] = arguments["k"][new], arguments["v"][new]
        arguments["q_indptr"] = _starts([case.query_lens[r] for r in requests], arguments["q_indptr"])
    if "slots" in arguments:
        arguments["slots"] = arguments["slots"][kept]
    arguments["kv_indptr"] = _starts([listed[r] for r in requests], arguments["kv_indptr"])
    return _with_rows(record, arguments, rows, declaration)


def _listed(captured: Captured, declaration: Declaration) -> tuple[int, ...]:
    """How many keys ``kv_indptr`` counts of each request."""
    case = captured.case
    if declaration.operation is Operation.VARLEN_EXTEND and declaration.convention.prefix_in_pool:
        return tuple(n - q for n, q in zip(case.context_lens, case.query_lens, strict=True))
    return case.context_lens


def _first_queries(captured: Captured, declaration: Declaration, count: int) -> Record:
    record, case, arguments = captured.record, captured.case, dict(captured.record.arguments)
    dropped = case.query_lens[0] - count
    rows = torch.arange(count)
    arguments["q"] = arguments["q"][:count]
    keys = max(arguments["k"].shape[0] - dropped, 0)
    arguments["k"], arguments["v"] = arguments["k"][:keys], arguments["v"][:keys]
    arguments["q_indptr"] = _starts([count], arguments["q_indptr"])
    if not declaration.convention.prefix_in_pool:
        arguments["kv_indptr"] = _starts([keys], arguments["kv_indptr"])
    return _with_rows(record, arguments, rows, declaration)


def _first_keys(record: Record, declaration: Declaration, count: int, page_size: int) -> Record:
    arguments = dict(record.arguments)
    if declaration.convention.index_form is IndexForm.PAGE_TABLE:
        arguments["lengths"] = torch.full_like(arguments["lengths"], count)
        arguments["page_table"] = arguments["page_table"][:, : -(-count // page_size)]
    else:
        arguments["slots"] = arguments["slots"][:count]
        arguments["kv_indptr"] = _starts([count], arguments["kv_indptr"])
    return replace(record, arguments=arguments)


def _with_rows(record: Record, arguments: dict[str, Any], rows: Tensor, declaration: Declaration) -> Record:
    turned = declaration.convention.lse_layout is LseLayout.HEAD_TOKEN
    outputs = {
        name: value[:, rows] if name == "lse" and turned else value[rows] for name, value in record.outputs.items()
    }
    return Record(arguments, outputs, dict(record.about) | {"part_of_a_larger_call": True})


def _runs(lengths: Sequence[int], requests: Sequence[int]) -> Tensor:
    """Rows of some requests, where those of all lie one after the other."""
    starts = list(pairwise((0, *accumulate(lengths))))
    parts = [torch.arange(*starts[r]) for r in requests]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)


def _starts(lengths: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=like.dtype)
