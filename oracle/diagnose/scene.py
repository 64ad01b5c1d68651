"""What a diagnosis looks at: a subject beside the answer that was asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from oracle.attention import Solution
from oracle.budget import Bounds
from oracle.diagnose.model import Surroundings
from oracle.diagnose.quick import Quick
from oracle.diagnose.subject import Answer, Fit, Subject
from oracle.diagnose.weights import with_stale
from oracle.problem import Problem


@dataclass(frozen=True, eq=False)
class Scene:
    """A subject, the answer that was asked for, how it fits, and which rows fail. All rows [Tq, Hq]."""

    subject: Subject
    around: Surroundings
    base: Answer
    fit: Fit

    quick: Quick = field(default_factory=Quick)

    @cached_property
    def extended(self) -> Problem:
        """The problem with the stale keys behind each request's own, nothing hidden."""
        return with_stale(self.subject.problem, self.around)

    @property
    def failing(self) -> Tensor:
        """bool [Tq, Hq]."""
        return ~self.fit.passes

    def part(self, tokens: Sequence[int], kv_head: int | None = None) -> Answer:
        """The answer that was asked for, for some rows."""
        index, heads = torch.tensor(list(tokens), dtype=torch.int64), self.heads(kv_head)
        s, b = self.base.solution, self.base.bounds
        return Answer(
            Solution(s.out[index][:, heads], s.lse[index][:, heads]),
            Bounds(b.out[index][:, heads], b.lse[index][:, heads], b.reach[index][:, heads], b.keys[index]),
        )

    def heads(self, kv_head: int | None) -> slice:
        """The query heads that read a kv head; all for None."""
        group = self.subject.problem.group
        return slice(None) if kv_head is None else slice(kv_head * group, (kv_head + 1) * group)
