"""What an assertion about attention raises: one type for each class of failure.

A search that shrinks a failing case (Hypothesis) takes two failures for the same fault if their types are the same. So
the type says what failed and why: `WindowMismatch`, `SinkMismatch`, or, where nothing explains the result,
`ValuesMismatch`. All are `AttentionMismatch`. They are attributes of `oracle.failure`, made when first asked for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from oracle.diagnose.model import Kind

_SUFFIX = "Mismatch"
_SILENT = (Kind.NONE, Kind.UNEXPLAINED)


class AttentionMismatch(AssertionError):
    """A kernel's result is not attention, or not within its budget.

    str() is the whole text; `evidence` its numbers as plain data. Remedy: read the line `diagnosis`; where the kernel
    means something else by its arguments, say so with `convention`; where it rounds more than is assumed, with
    `precision`.
    """

    def __init__(self, text: str, evidence: Mapping[str, Any] | None = None) -> None:
        super().__init__(text)
        self.evidence = dict(evidence or {})


class BudgetSaysNothing(AssertionError):
    """Most elements have a budget so wide that nearly any result would pass: nothing was shown.

    Remedy: state the kernel's `precision`, or give inputs of which few keys have most of the weight.
    """


_types: dict[str, type[AttentionMismatch]] = {}


def mismatch_type(check: str, kind: str | None = None) -> type[AttentionMismatch]:
    """The type for a failed check ("values", "crash") with a diagnosis of class `kind`, if there is one."""
    named = kind if kind is not None and kind not in _SILENT else check
    name = "".join(part.capitalize() for part in re.split(r"[^0-9A-Za-z]+", named)) + _SUFFIX
    if name not in _types:
        doc = f"A failure of the class {named!r}."
        _types[name] = type(name, (AttentionMismatch,), {"__doc__": doc, "__module__": "oracle.failure"})
    return _types[name]


def type_named(name: str) -> type[AttentionMismatch]:
    """The type of a class of diagnoses, or of values or log-sum-exps without one, by its name; else AttributeError."""
    named = [mismatch_type(kind, kind) for kind in Kind if kind not in _SILENT]
    for known in (*named, mismatch_type("values")):
        if known.__name__ == name:
            return known
    raise AttributeError(f"module 'oracle.failure' has no attribute {name!r}")
