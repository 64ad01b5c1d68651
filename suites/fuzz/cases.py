"""Small cases for tests, by keyword."""

from __future__ import annotations

from typing import Any

from fuzz.case import Case, case_from_dict

_COPY: dict[str, Any] = {
    "schema": 1,
    "operation": "kv_gather",
    "seed": 7,
    "context_lens": [17, 3],
    "query_lens": [],
    "num_kv_heads": 2,
    "group_size": 1,
    "head_dim": 32,
    "v_head_dim": 32,
    "dtype": "bf16",
    "kv_dtype": "bf16",
    "kv_layout": "shuffle_5d",
    "v_layout": "5d",
    "page_size": 16,
    "placement": "shuffled",
    "pool": "spare",
    "index_dtype": "int64",
    "strided": False,
    "causal": True,
    "window": None,
    "sinks": "none",
    "soft_cap": None,
    "scale": None,
    "q_descale": "none",
    "k_descale": "none",
    "v_descale": "none",
    "index_form": "slot_list",
    "prefix": "inline",
    "skip": "none",
    "slot_map": "none",
    "parts": 1,
    "rank": 0,
    "states": "full",
    "index_task": "none",
    "earlier_calls": 0,
    "probe": "normal",
}


def gather_case(**changes: Any) -> Case:
    """A KV gather of two requests."""
    return case_from_dict(_COPY | changes)


def write_case(**changes: Any) -> Case:
    """A KV write of two requests."""
    return gather_case(**({"operation": "kv_write"} | changes))


def extend_case(**changes: Any) -> Case:
    """Attention of two requests, the second chunked."""
    defaults = {
        "operation": "varlen_extend",
        "kv_layout": "linear",
        "query_lens": [17, 2],
        "group_size": 2,
        "dtype": "fp32",
        "kv_dtype": "fp32",
        "pool": "tight",
        "placement": "ascending",
    }
    return gather_case(**(defaults | changes))


def decode_case(**changes: Any) -> Case:
    """Paged decode of two requests, one query each."""
    defaults = {"operation": "paged_decode", "query_lens": [1, 1], "group_size": 2, "dtype": "fp32", "kv_dtype": "fp32"}
    return gather_case(**(defaults | changes))


def backend_case(**changes: Any) -> Case:
    """A layer step of two requests, the second after a prefix."""
    defaults = {"operation": "backend", "query_lens": [17, 2], "group_size": 2, "dtype": "bf16", "kv_dtype": "bf16"}
    return gather_case(**(defaults | changes))


def merge_case(**changes: Any) -> Case:
    """An LSE merge of two states of five rows."""
    defaults = {
        "operation": "lse_merge",
        "context_lens": [5],
        "kv_layout": "linear",
        "dtype": "fp32",
        "kv_dtype": "fp32",
        "parts": 2,
        "index_dtype": "int32",
        "pool": "tight",
        "placement": "ascending",
    }
    return gather_case(**(defaults | changes))


def index_case(**changes: Any) -> Case:
    """The physical rows that rank 1 of 2 owns."""
    defaults = {
        "operation": "index_build",
        "kv_layout": "linear",
        "query_lens": [1, 1],
        "parts": 2,
        "index_dtype": "int32",
        "rank": 1,
        "index_task": "rank_slots",
    }
    return gather_case(**(defaults | changes))
