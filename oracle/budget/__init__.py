"""Budgets: how far a correct kernel of a given precision may be from the oracle, per element, and how it is judged."""

from oracle.budget.bound import budgets, confidence_for, probable, worst_case
from oracle.budget.bounds import Bounds, Budgets
from oracle.budget.judge import Element, Judgement, Tally, judge
from oracle.budget.stages import explain

__all__ = [
    "Bounds",
    "Budgets",
    "Element",
    "Judgement",
    "Tally",
    "budgets",
    "confidence_for",
    "explain",
    "judge",
    "probable",
    "worst_case",
]
