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
    "skip": "none",
    "slot_map": "none",
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
