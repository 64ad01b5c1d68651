"""The text of a failure: everything that a reader needs to name the fault, made from plain data.

`evidence` makes the data from a judgement, `explanation` adds why the result is wrong, `render` writes both down. The
assertion, the pytest plugin and the command line print the same text.
"""

from typing import Any

from oracle.failure.errors import AttentionMismatch, BudgetSaysNothing, mismatch_type, type_named
from oracle.failure.evidence import evidence, explanation
from oracle.failure.text import Failed, by_telling, render
from oracle.failure.words import describe_problem

__all__ = [
    "AttentionMismatch",
    "BudgetSaysNothing",
    "Failed",
    "by_telling",
    "describe_problem",
    "evidence",
    "explanation",
    "mismatch_type",
    "render",
]


def __getattr__(name: str) -> Any:
    return type_named(name)
