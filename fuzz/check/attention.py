"""Values and log-sum-exp of an attention target against the oracle, within the target's budget."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from fuzz.buffers import DTYPE_NAMES
from fuzz.check.execute import Execution
from fuzz.check.picture import decoded_keys, ratio_map
from fuzz.check.result import CaseResult, Check, CheckResult
from fuzz.instance import Instance
from oracle.attention import Solution, lse_with_sink, solve
from oracle.budget import Bounds, Budgets, Tally, budgets, confidence_for, judge
from oracle.budget.merge import merge_bounds
from oracle.convention import Convention, LseLayout
from oracle.declare import Declaration
from oracle.failure import evidence
from oracle.kinds import LseBase
from oracle.merge import merge_states
from oracle.precision import Precision
from oracle.verdict import Verdict

CONFIDENCE = confidence_for(elements=10**9, risk=1e-3)
"""Of the probable budget. A campaign judges fewer elements than these, so that one in a thousand has a suspect."""


def attention_values(declaration: Declaration, run: Execution) -> CaseResult:
    """Solve the problem, bound the target's rounding errors, and judge each element of out and lse."""
    solution, bounds = expected_attention(declaration, run.instance)
    case, convention = run.instance.case, declaration.convention
    precision = declaration.precision_for(case.dtype, case.kv_dtype)
    return _judged(run, solution, bounds, convention, precision, convention.lse_base)


def expected_attention(declaration: Declaration, instance: Instance) -> tuple[Solution, Budgets]:
    """The solution of the instance's problem, its log-sum-exp natural, with the sink if the target counts it; and by
    how much the target may be off. Raises ``TypeError`` where there is no such problem."""
    problem, case = instance.problem, instance.case
    if problem is None:
        raise TypeError(f"{case.operation} poses no attention problem")
    convention, precision = declaration.convention, declaration.precision_for(case.dtype, case.kv_dtype)
    solution = solve(problem)
    if convention.lse_includes_sink and problem.sinks is not None:
        solution = type(solution)(solution.out, lse_with_sink(solution.lse, problem.sinks))
    bounds = budgets(
        problem,
        precision,
        input_dtype=case.dtype,
        lse_includes_sink=convention.lse_includes_sink,
        confidence=CONFIDENCE,
        solution=solution,
    )
    return solution, bounds


def judge_within(
    declaration: Declaration, run: Execution, expected: Solution, bounds: Bounds
) -> tuple[CheckResult, ...]:
    """The outputs of ``run`` against ``expected``, whose log-sum-exp is natural, instead of the oracle's solution."""
    case, convention = run.instance.case, declaration.convention
    precision = declaration.precision_for(case.dtype, case.kv_dtype)
    return _judged(run, expected, bounds, convention, precision, convention.lse_base).checks


def merge_values(declaration: Declaration, run: Execution) -> CaseResult:
    """Merge the states in float64, bound the target's rounding errors, and judge each element of out and lse."""
    solution, bounds = expected_merge(declaration, run.instance)
    convention, precision = declaration.convention, declaration.precision_for(run.instance.case.dtype)
    # Numbers stay in the target's base throughout: nothing is converted when they are judged.
    return _judged(run, solution, bounds, convention, precision, LseBase.NATURAL)


def expected_merge(declaration: Declaration, instance: Instance) -> tuple[Solution, Bounds]:
    """The instance's states merged, log-sum-exps in the target's base, and by how much the target may be off."""
    convention, precision = declaration.convention, declaration.precision_for(instance.case.dtype)
    outs, lses = (instance.buffers[name].view.double() for name in ("outs", "lses"))
    out, lse = merge_states(outs, lses, convention.lse_base)
    return Solution(out, lse), merge_bounds(outs, lses, out, lse, precision, convention.lse_base)


def _judged(
    run: Execution,
    solution: Solution,
    bounds: Bounds | Budgets,
    convention: Convention,
    precision: Precision,
    base: LseBase,
) -> CaseResult:
    out, lse = run.outputs["out"], run.outputs.get("lse")
    if lse is not None and convention.lse_layout is LseLayout.HEAD_TOKEN:
        lse = lse.transpose(0, 1)
    judgement = judge(
        out,
        lse,
        solution,
        bounds,
        out_dtype=DTYPE_NAMES[out.dtype],
        precision=precision,
        expected_empty_out=convention.empty_out.number,
        expected_empty_lse=convention.empty_lse.number,
        lse_base=base,
    )
    problem = run.instance.problem
    q_lens = run.instance.case.context_lens if problem is None else problem.q_lens
    # A tally without elements (an empty batch) has nothing to say and is left out.
    checks = [_result(Check.VALUES, judgement.out, out, precision, q_lens)] if judgement.out.elements else []
    if judgement.out.ratios is not None:
        tight = bounds.probable if isinstance(bounds, Budgets) else bounds
        checks = [_with_keys(check, run, judgement.out.ratios, tight.out) for check in checks]
    if judgement.lse is not None and lse is not None and judgement.lse.elements:
        checks.append(_result(Check.LSE, judgement.lse, lse, precision, q_lens))
    tallies = [t for t in (judgement.out, judgement.lse) if t is not None]
    ratios = [t.worst.ratio for t in tallies if t.worst is not None and math.isfinite(t.worst.ratio)]
    return CaseResult(
        checks=tuple(checks),
        elements=sum(t.elements for t in tallies),
        vacuous_elements=sum(t.vacuous for t in tallies),
        worst_ratio=max(ratios, default=None),
    )


def _result(check: Check, tally: Tally, actual: Tensor, precision: Precision, q_lens: Sequence[int]) -> CheckResult:
    if tally.worst is None or tally.verdict is Verdict.PASS:
        return CheckResult(check, tally.verdict)
    worst = tally.worst
    names = ("token", "head", "dim")[: len(worst.index)]
    where = ", ".join(f"{name} {i}" for name, i in zip(names, worst.index, strict=True))
    rows = f"of {tally.elements} elements in {tally.failing_rows} rows beyond their"
    if tally.failures:
        said = f"{tally.failures + tally.suspects} {rows} budget"
    elif tally.suspects:
        said = f"{tally.suspects} {rows} probable budget, none beyond the worst case"
    else:
        said = f"{tally.vacuous} of {tally.elements} elements have a budget that says nothing"
    message = (
        f"{said}; {where}: expected {worst.expected:.6g}, got {worst.actual:.6g}, "
        f"budget {worst.bound:.3g}, ratio {worst.ratio:.3g}"
    )
    found = evidence(tally, actual, precision, q_lens)
    return CheckResult(
        check, tally.verdict, message, found if tally.ratios is None else found | {"map": ratio_map(tally.ratios)}
    )


def _with_keys(check: CheckResult, run: Execution, ratios: Tensor, noise: Tensor) -> CheckResult:
    """``check`` with the keys that its failing rows attended to, where they can be decoded."""
    keys = decoded_keys(run, ratios, noise)
    return replace(check, evidence={**check.evidence, "keys": keys}) if keys else check
