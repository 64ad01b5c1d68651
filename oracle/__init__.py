"""What attention over a paged KV cache must return, and how a kernel's answer is judged.

Declarations need the standard library only; the mathematics is loaded, with torch, when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from oracle import declare
from oracle.convention import Convention
from oracle.declare import Supports
from oracle.precision import Precision
from oracle.verdict import Verdict

if TYPE_CHECKING:
    from oracle.assertion import assert_attention_close
    from oracle.attention import Solution, solve
    from oracle.capture import record
    from oracle.problem import Problem

_LAZY = {
    "Problem": "oracle.problem",
    "Solution": "oracle.attention",
    "assert_attention_close": "oracle.assertion",
    "record": "oracle.capture",
    "solve": "oracle.attention",
}

__all__ = [
    "Convention",
    "Precision",
    "Problem",
    "Solution",
    "Supports",
    "Verdict",
    "assert_attention_close",
    "declare",
    "record",
    "solve",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'oracle' has no attribute {name!r}")
