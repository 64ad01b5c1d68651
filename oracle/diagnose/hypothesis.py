"""A hypothesis: what a target may have done instead of what it was asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from oracle.attention import Solution
from oracle.budget import Bounds
from oracle.diagnose.model import Kind
from oracle.diagnose.quick import Quick, View, view_of
from oracle.diagnose.rows import Keys, Row, describe_rows, rows_of, visible
from oracle.diagnose.subject import Answer, Subject
from oracle.problem import Problem

Alter = Callable[[Problem], Problem]
After = Callable[[View, Solution, Sequence[Row]], Solution]
Bounded = Callable[[Bounds, Sequence[Row]], Bounds]


def unchanged(problem: Problem) -> Problem:
    """The problem itself."""
    return problem


@dataclass(frozen=True, eq=False)
class Hypothesis:
    """One change of convention or input.

    alter: the problem that was solved instead; it has the same queries. keys: the keys that each row attended to,
    where that is not what the altered problem says. after: what became of the solution of some rows, given a view of
    them. bounded: what becomes of their bounds.
    given: it was found to hold without a solve. lse_fitted: the log-sum-exp is explained by construction.
    fitted: how many numbers were fitted to what was returned. whole: needs all heads of a row, so that it cannot be
    tried on one kv head. uniform: a number that all query heads of a kv head share. rank: order among hypotheses of one
    kind, the smaller change first.
    """

    kind: Kind
    detail: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    alter: Alter = unchanged
    keys: Keys = visible
    after: After | None = None
    bounded: Bounded | None = None
    fitted: int = 0
    whole: bool = False
    given: bool = False
    lse_fitted: bool = False
    uniform: bool = False
    rank: int = 0

    def answer(
        self, subject: Subject, tokens: Sequence[int], kv_head: int | None = None, asked: Answer | None = None
    ) -> Answer:
        """What the target would have returned for some rows, as `solve` says, with bounds of its own.

        kv_head: only the query heads that read it. asked: the answer of these rows to the problem as it was posed, so
        that it need not be worked out again where the hypothesis changes only what becomes of it.
        """
        rows = describe_rows(subject.problem, tokens)
        if self.keys is visible and self.after is None and kv_head is None and len(tokens) == len(subject.out):
            own = subject.answer(self.alter(subject.problem))
        else:
            posed = rows_of(self.alter(subject.problem), tokens, self.keys, kv_head)
            as_asked = self.alter is unchanged and self.keys is visible
            own = asked if asked is not None and as_asked else subject.answer(posed)
            if self.after is not None:
                own = replace(own, solution=self.after(view_of(posed), own.solution, rows))
        return own if self.bounded is None else replace(own, bounds=self.bounded(own.bounds, rows))

    def quick(self, subject: Subject, quick: Quick, tokens: Sequence[int], kv_head: int | None = None) -> Solution:
        """The solution alone, without `solve`."""
        solution, view = quick.solution(self.alter(subject.problem), tokens, self.keys, kv_head)
        solution = subject.in_convention(solution, view.sinks)
        return solution if self.after is None else self.after(view, solution, describe_rows(subject.problem, tokens))
