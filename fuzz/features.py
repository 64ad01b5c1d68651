"""Labels that a case shows: what coverage counts and what the ledger matches on.

They are read from the case itself, so that they exist for cases that nobody drew: minimised, mutated or
written by hand.
"""

from __future__ import annotations

from collections.abc import Callable

from fuzz.case import MAX_TOKENS, Case

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
    "window-1": lambda case: None if case.window is None else case.window - 1,
    "window": lambda case: case.window,
    "window+1": lambda case: None if case.window is None else case.window + 1,
}
"""Boundary classes of a context length."""


def labels(case: Case) -> set[Feature]:
    """Every (feature, label) of ``case``. A feature can show several labels: one a request."""
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
        ("skip", case.skip.value),
        ("slot_map", case.slot_map.value),
        ("probe", case.probe.value),
        ("causal", "yes" if case.causal else "no"),
        ("window", _window_label(case)),
        ("sinks", case.sinks.value),
        ("soft_cap", "off" if case.soft_cap is None else "on"),
        ("scale", "default" if case.scale is None else "small" if abs(case.scale) < 0.1 else "large"),
    }
    for length in case.context_lens:
        found |= {("length", name) for name, boundary in LENGTHS.items() if boundary(case) == length}
    for queries, length in zip(case.query_lens, case.context_lens, strict=False):
        found.add(("query", _query_label(queries, length)))
    return found


def _window_label(case: Case) -> str:
    if case.window is None:
        return "off"
    return {1: "one", case.page_size: "page", MAX_TOKENS: "beyond"}.get(case.window, "inside")


def _query_label(queries: int, length: int) -> str:
    if length == 0 and queries:
        return "empty"
    if queries == length:
        return "full"
    return "one" if queries == 1 else "some"
