"""Labels that a case shows: what coverage counts and what the ledger matches on.

They are read from the case itself, so that they exist for cases that nobody drew: minimised, mutated or
written by hand.
"""

from __future__ import annotations

from collections.abc import Callable

from fuzz.case import MAX_TOKENS, Case
from oracle.kinds import Operation

Feature = tuple[str, str]

PARTITION = 256
"""Keys in one context partition of the split decode kernels: a boundary worth visiting."""

LENGTHS: dict[str, Callable[[Case], int | None]] = {
    "one": lambda case: 1,
    "zero": lambda case: 0,
    "page-1": lambda case: case.page_size - 1,
    "page": lambda case: case.page_size,
    "page+1": lambda case: case.page_size + 1,
    "pages": lambda case: 3 * case.page_size,
    "partition-1": lambda case: PARTITION - 1,
    "partition": lambda case: PARTITION,
    "partition+1": lambda case: PARTITION + 1,
    "partitions": lambda case: 3 * PARTITION,
    "window-1": lambda case: None if case.window is None else case.window - 1,
    "window": lambda case: case.window,
    "window+1": lambda case: None if case.window is None else case.window + 1,
    "window+page": lambda case: None if case.window is None else case.window + case.page_size,
    "window+partition": lambda case: None if case.window is None else case.window + PARTITION,
    "ranks-1": lambda case: case.parts - 1,
    "ranks": lambda case: case.parts,
    "ranks+1": lambda case: case.parts + 1,
    "round-1": lambda case: case.parts * case.page_size - 1,
    "round": lambda case: case.parts * case.page_size,
    "round+1": lambda case: case.parts * case.page_size + 1,
}
"""Boundary classes of a context length. window+page, window+partition: the window begins on a page, and on a partition.
A round is one page of every rank."""

OF_RANKS = ("ranks-1", "ranks", "ranks+1", "round-1", "round", "round+1")
"""Those that say something where positions are shared among ranks."""


def labels(case: Case) -> set[Feature]:
    """Every (feature, label) of ``case``. Lengths and queries show the labels of every request."""
    return shared_labels(case).union(*request_labels(case))


def request_labels(case: Case) -> list[set[Feature]]:
    """The labels of each request: its length's boundary classes, and its queries."""
    found = []
    for request, length in enumerate(case.context_lens):
        own = {("length", name) for name, boundary in LENGTHS.items() if boundary(case) == length}
        if case.query_lens:
            own |= {("query", label) for label in _query_labels(case, case.query_lens[request], length)}
        found.append(own)
    return found


def shared_labels(case: Case) -> set[Feature]:
    """The labels that belong to the case as a whole."""
    requests = len(case.context_lens)
    found = {
        ("requests", "none" if requests == 0 else "one" if requests == 1 else "many"),
        ("dtype", case.dtype),
        ("kv_dtype", "same" if case.kv_dtype == case.dtype and not case.is_copy else case.kv_dtype),
        ("kv_heads", str(case.num_kv_heads)),
        ("group", str(case.group_size)),
        ("head_dim", str(case.head_dim)),
        ("v_head_dim", "same" if case.v_head_dim == case.head_dim else str(case.v_head_dim)),
        ("page_size", str(case.page_size)),
        ("index_dtype", case.index_dtype),
        ("strided", "yes" if case.strided else "no"),
        ("placement", case.placement.value),
        ("pool", case.pool.value),
        ("k_descale", case.k_descale.value),
        ("v_descale", case.v_descale.value),
        ("parts", str(case.parts)),
        ("states", case.states.value),
        ("earlier_calls", str(case.earlier_calls)),
        ("skip", case.skip.value),
        ("slot_map", case.slot_map.value),
        ("probe", case.probe.value),
        ("causal", "yes" if case.causal else "no"),
        ("window", _window_label(case)),
        ("sinks", case.sinks.value),
        ("soft_cap", _cap_label(case.soft_cap)),
        ("scale", "default" if case.scale is None else "small" if abs(case.scale) < 0.1 else "large"),
    }
    if case.window is not None:
        # Never drawn for themselves: they keep ledger entries about windows narrow.
        queries = max(case.query_lens, default=0)
        found.add(("window_keys", "within_queries" if case.window <= queries else "above_queries"))
        cut = {length + queries > case.window for length in case.context_lens}
        found |= {("contexts", "beyond_window" if beyond else "within_window") for beyond in cut}
    ranks = {"first": 0, "middle": case.parts // 2, "last": case.parts - 1}
    return found | {("rank", name) for name, rank in ranks.items() if rank == case.rank}


SATURATED_CAP = 0.1
"""A soft cap of less is far below any logit: every one comes out as the cap itself."""


def _cap_label(cap: float | None) -> str:
    if cap is None:
        return "off"
    return "saturated" if cap < SATURATED_CAP else "on"


def _window_label(case: Case) -> str:
    if case.window is None:
        return "off"
    if case.window == 1:
        return "one"
    return {case.page_size: "page", MAX_TOKENS: "beyond"}.get(case.window, "inside")


def _query_labels(case: Case, queries: int, length: int) -> set[str]:
    # Causal queries are the last positions of their request: where they outnumber the keys, the first see none.
    without_keys = case.is_attention and case.causal and queries > length
    if queries and (length == 0 or without_keys):
        return {"empty"}
    # A backend decodes a prompt of one token as it decodes any other.
    decodes = case.operation is Operation.PAGED_DECODE or (case.operation is Operation.BACKEND and queries == 1)
    if queries == length and not decodes:
        return {"full"}
    number = "one" if queries == 1 else "some"
    # All but one token are new: a prefix of a single key.
    return {number} if decodes or queries != length - 1 else {number, "but_one"}
