"""A case in one line, for people: what it is of, and what of it is out of the ordinary."""

from __future__ import annotations

from collections.abc import Iterator

from fuzz.case import Case, Placement, Pool, Prefix, Sink, Skip, SlotMap, States
from oracle.convention import Granularity
from oracle.failure.words import count, describe_dims, describe_heads, describe_lengths
from oracle.kinds import IndexTask, KVLayout, Operation, VLayout

_POOLED = (Operation.PAGED_DECODE, Operation.KV_WRITE, Operation.KV_GATHER, Operation.BACKEND)


def describe(case: Case) -> str:
    """The case in one line. Fields that have their plain value are left out."""
    return f"{case.operation} of {', '.join(_parts(case))}"


def _parts(case: Case) -> Iterator[str]:
    if case.is_attention:
        yield describe_lengths(case.query_lens, case.context_lens)
        yield describe_heads(case.num_kv_heads, case.group_size)
        yield describe_dims(case.head_dim, case.v_head_dim)
    else:
        tokens, requests = sum(case.context_lens), len(case.context_lens)
        yield f"{count(tokens, 'token')} of {count(requests, 'request')}"
        if case.operation is not Operation.INDEX_BUILD:
            yield count(case.num_kv_heads, "head")
            yield describe_dims(case.head_dim, case.v_head_dim)
    yield case.dtype if case.kv_dtype == case.dtype else f"{case.dtype} over {case.kv_dtype}"
    if case.operation in _POOLED or case.prefix is not Prefix.INLINE:
        yield from _pool(case)
    yield from _options(case)
    yield f"values {case.probe}, seed {case.seed}"


def _pool(case: Case) -> Iterator[str]:
    layout = str(case.kv_layout)
    if case.kv_layout is KVLayout.SHUFFLE_5D and case.v_layout is VLayout.V4D:
        layout += " with V in 4d"
    yield f"{layout} cache" + (f", page {case.page_size}" if case.page_size > 1 else "")
    if case.placement is not Placement.ASCENDING:
        yield f"{case.placement} pages"
    if case.pool is not Pool.TIGHT:
        yield f"{case.pool} pool"


def _options(case: Case) -> Iterator[str]:
    if case.operation is Operation.VARLEN_EXTEND:
        yield "causal" if case.causal else "not causal"
    if case.window is not None:
        yield f"window {case.window}"
    if case.sinks is not Sink.NONE:
        yield f"{case.sinks} sinks"
    for name, value in (("soft cap", case.soft_cap), ("scale", case.scale)):
        if value is not None:
            yield f"{name} {value:g}"
    for name in ("q_descale", "k_descale", "v_descale"):
        if getattr(case, name) is not Granularity.NONE:
            yield f"{name} of {getattr(case, name)}"
    if case.prefix is not Prefix.INLINE:
        yield "every key in the pool" if case.prefix is Prefix.ALL else "prefix in the pool"
    if case.index_task is not IndexTask.NONE:
        yield f"{case.index_task} for rank {case.rank} of {case.parts}"
    elif case.parts > 1:
        yield count(case.parts, "part")
    if case.states is not States.FULL:
        yield f"states {case.states}"
    if case.skip is not Skip.NONE:
        yield f"{case.skip} slots negative"
    if case.slot_map is not SlotMap.NONE:
        yield f"slot map {case.slot_map}"
    if case.earlier_calls:
        yield f"after {count(case.earlier_calls, 'call')}"
    if case.strided:
        yield "strided"
