"""A hypothesis: what a target may have done instead of what it was asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from oracle.attention import Solution
from oracle.budget.worst_case import Bounds
from oracle.diagnose.model import Kind
from oracle.diagnose.rows import Keys, Row, describe_rows, rows_of, visible
from oracle.diagnose.subject import Answer, Subject
from oracle.problem import Problem

Alter = Callable[[Problem], Problem]
After = Callable[[Problem, Solution, Sequence[Row]], Solution]
Bounded = Callable[[Bounds, Sequence[Row]], Bounds]


def unchanged(problem: Problem) -> Problem:
    """The problem itself."""
    return problem


@dataclass(frozen=True, eq=False)
class Hypothesis:
    """One change of convention or input.

    alter: the problem that was solved instead; it has the same queries. keys: the keys that each row attended to,
    where that is not what the altered problem says. after: what became of the solution of some rows, given the problem
    of those rows alone, as `rows.rows_of` makes it. bounded: what becomes of their bounds.
    given: it was found to hold without a solve. lse_fitted: the log-sum-exp is explained by construction.
    fitted: how many numbers were fitted to what was returned. whole: needs all heads of a row, so that it cannot be
    tried on one kv head. rank: order among hypotheses of one kind, the smaller change first.
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
    rank: int = 0

    def rows(self, problem: Problem, tokens: Sequence[int], kv_head: int | None = None) -> Problem:
        """The problem that was solved for some rows."""
        return rows_of(self.alter(problem), tokens, self.keys, kv_head)

    def solution(self, subject: Subject, posed: Problem, tokens: Sequence[int], kv_head: int | None = None) -> Solution:
        """What the target would have returned for some rows. posed: `rows` of the same arguments."""
        solution = subject.solution(posed)
        if self.after is None:
            return solution
        return self.after(posed, solution, describe_rows(subject.problem, tokens))

    def answer(self, subject: Subject, tokens: Sequence[int], kv_head: int | None = None) -> Answer:
        """What the target would have returned for some rows, with bounds of its own.

        A row without a key is judged by its bounds, which are 0, and not by what the convention says of such rows.
        """
        posed = self.rows(subject.problem, tokens, kv_head)
        return Answer(self.solution(subject, posed, tokens, kv_head), self.bounds(subject, posed, tokens))

    def bounds(self, subject: Subject, posed: Problem, tokens: Sequence[int]) -> Bounds:
        """The budget of `solution`."""
        bounds = subject.bounds(posed)
        return bounds if self.bounded is None else self.bounded(bounds, describe_rows(subject.problem, tokens))
