"""Where a captured call cannot be judged: inputs that are not finite reach results of which no number is right."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fuzz.captured.call import Captured
from oracle.attention import Solution, solve
from oracle.convention import LseLayout
from oracle.declare import Declaration
from oracle.merge import merge_states
from oracle.problem import Problem
from oracle.rounding import widen

_SHOWN = 4


@dataclass(frozen=True, eq=False)
class Unjudged:
    """Which results have no right number, by output: what is asked for there, and bool of the same shape."""

    message: str
    expected: Mapping[str, Tensor]
    where: Mapping[str, Tensor]

    @property
    def everything(self) -> bool:
        """Whether no element of the output is left to judge."""
        return bool(self.where["out"].all())

    def left_out(self, outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Outputs that hold what is asked for wherever nothing can be judged."""
        return {
            name: torch.where(self.where[name].to(x.device), self.expected[name].to(x.device, x.dtype), x)
            for name, x in outputs.items()
        }


def unjudged(declaration: Declaration, captured: Captured) -> Unjudged | None:
    """What cannot be judged of a call; None if all of it can."""
    problem = captured.instance.problem
    if problem is None:
        outs, lses = (captured.instance.buffers[name].view for name in ("outs", "lses"))
        solution = Solution(*merge_states(outs.double(), lses.double(), declaration.convention.lse_base))
        inputs = _states(outs, lses)
    else:
        problem = problem.to(torch.device("cpu"))
        solution, inputs = solve(problem), _inputs(problem)
    out = ~solution.out.isfinite()
    lse = solution.lse.isnan() | (solution.lse == torch.inf)
    rows = (out.any(-1) | lse).nonzero().tolist()
    if not rows:
        return None
    token, head = rows[0]
    message = (
        f"{'; '.join(inputs) or 'the sums overflow'}: no number is right in {len(rows)} of {lse.numel()} rows (a query "
        f"and a head), the first token {token}, head {head}, and nothing can be judged there"
    )
    swapped = declaration.convention.lse_layout is LseLayout.HEAD_TOKEN
    lses_ = [x.transpose(0, 1) if swapped else x for x in (solution.lse, lse)]
    return Unjudged(message, {"out": solution.out, "lse": lses_[0]}, {"out": out, "lse": lses_[1]})


def _inputs(problem: Problem) -> Iterator[str]:
    """Which inputs are not finite, in words."""
    for name, what in (("q", "row"), ("k", "row"), ("v", "row"), ("sinks", "head")):
        value = getattr(problem, name)
        if value is not None:
            yield from _said(name, widen(value), what)
    for name in ("q_descale", "k_descale", "v_descale"):
        value = getattr(problem, name)
        if value is not None:
            yield from _said(name, torch.as_tensor(value, dtype=torch.float64).reshape(-1), "entry")


def _states(outs: Tensor, lses: Tensor) -> Iterator[str]:
    yield from _said("outs", widen(outs).flatten(0, 1), "row")
    yield from _said("lses", lses.double().masked_fill(lses == -torch.inf, 0.0).flatten(0, 1), "row")


def _said(name: str, value: Tensor, what: str) -> Iterator[str]:
    """`q is NaN in row 3`. value: float64, of which the first axis is counted."""
    for wrong, word in ((value.isnan(), "NaN"), (value.isinf(), "infinite")):
        rows = wrong.flatten(1).any(1) if wrong.ndim > 1 else wrong
        found = rows.nonzero().flatten().tolist()
        if found:
            shown = ", ".join(map(str, found[:_SHOWN])) + (", ..." if len(found) > _SHOWN else "")
            yield f"{name} is {word} in {what}{'s' if len(found) > 1 else ''} {shown}"
