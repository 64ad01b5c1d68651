"""Everything that must hold for one case on one target."""

from __future__ import annotations

from dataclasses import replace

from fuzz.buffers import Poison
from fuzz.call import ResultError, Unsupported
from fuzz.case import Case
from fuzz.check.attention import attention_values, merge_values
from fuzz.check.copies import gather_values, index_values, written_pool
from fuzz.check.diagnosis import diagnosed
from fuzz.check.execute import Execution, Progress, execute
from fuzz.check.memory import (
    IN_PLACE,
    all_written,
    allocations_in_bounds,
    inputs_untouched,
    opposite,
    same_result,
    unwritten,
)
from fuzz.check.relations import relations
from fuzz.check.result import CaseResult, Check, CheckResult
from fuzz.check.suspect import resolve
from oracle.declare import Declaration
from oracle.kinds import Engine, Operation
from oracle.verdict import Verdict, worst

_MUDDLED = (
    *(Check.WRITTEN, Check.BOUNDS, Check.POISON, Check.NAN, Check.DETERMINISM),
    *(Check.UNDEFINED, Check.UNINITIALISED, Check.RACE),
)
"""A result that depends on where no data is, or on chance, shows nothing by differing once more."""


def check_case(
    declaration: Declaration, case: Case, engine: Engine, progress: Progress, coverage: bool = False
) -> CaseResult:
    """Run ``case`` on a target and judge it; ``coverage``: say what its kernels reached, on the emulator.

    ``progress`` hears of the phases generate, kernel, checks and oracle. What the target raises passes through, apart
    from ``Unsupported`` and a result of the wrong kind.
    """
    try:
        first = execute(declaration, case, Poison.POSITIVE, engine, progress, coverage)
        second = execute(declaration, case, opposite(first.poison), engine, progress)
        nan = None
        if not declaration.supports.requires_finite_pool:
            nan = execute(declaration, case, Poison.NAN, engine, progress)
    except Unsupported as error:
        return CaseResult(checks=(), reason=str(error))
    except ResultError as error:
        return CaseResult(checks=(CheckResult(Check.RESULT, Verdict.FAIL, str(error)),))
    found = _memory_checks(declaration, first, second, nan)
    progress("oracle")
    values = resolve(
        case,
        values_of(declaration, first),
        lambda other: values_of(declaration, execute(declaration, other, first.poison, engine, progress)),
    )
    found += diagnosed(declaration, first, values.checks)
    found += _influence(declaration, case, engine, (first, second, nan), progress)
    if not any(result.check in _MUDDLED and result.verdict is not Verdict.PASS for result in found):
        found += relations(declaration, case, engine, first, progress)
    return CaseResult(
        checks=_one_each(found),
        elements=values.elements,
        vacuous_elements=values.vacuous_elements,
        worst_ratio=values.worst_ratio,
        coverage=first.coverage,
    )


def _memory_checks(
    declaration: Declaration, first: Execution, second: Execution, nan: Execution | None
) -> list[CheckResult]:
    in_place = IN_PLACE if declaration.operation in (Operation.KV_WRITE, Operation.BACKEND) else ()
    runs = [run for run in (first, second, nan) if run is not None]
    found = [inputs_untouched(run, in_place) for run in runs]
    found += [allocations_in_bounds(run) for run in runs]
    found += [result for run in runs for result in run.sanitizer]
    if first.outputs:
        found.append(all_written(first, second))
    return found


def _influence(
    declaration: Declaration,
    case: Case,
    engine: Engine,
    runs: tuple[Execution, Execution, Execution | None],
    progress: Progress,
) -> list[CheckResult]:
    """POISON, NAN and DETERMINISM: what is no data has no influence, and an identical call gives identical bits.

    Executions are compared bit for bit. Where that fails, a repetition tells whether calls differ by themselves;
    then the influence of poison is judged within the budget.
    """
    first, second, nan = runs
    compared = [(Check.POISON, second), *([(Check.NAN, nan)] if nan is not None else [])]
    deterministic = declaration.supports.deterministic
    if not first.outputs:
        # Written in place: every execution has to leave the one expected pool.
        found = [_within_budget(declaration, check, run) for check, run in compared]
        return [*found, *([CheckResult(Check.DETERMINISM, found[0].verdict)] if deterministic else [])]
    missing = unwritten(first, second)
    found = [same_result(check, first, run, missing) for check, run in compared]
    if all(result.verdict is Verdict.PASS for result in found):
        return [*found, *([CheckResult(Check.DETERMINISM, Verdict.PASS)] if deterministic else [])]
    again = same_result(Check.DETERMINISM, first, execute(declaration, case, first.poison, engine, progress), missing)
    if again.verdict is not Verdict.PASS:
        found = [_within_budget(declaration, check, run) for check, run in compared]
    return [*found, again] if deterministic else found


def _within_budget(declaration: Declaration, check: Check, run: Execution) -> CheckResult:
    """``check`` as the values of ``run`` say: right whatever the poison was."""
    wrong = next((r for r in values_of(declaration, run).checks if r.verdict is Verdict.FAIL), None)
    if wrong is None:
        return CheckResult(check, Verdict.PASS)
    return CheckResult(check, Verdict.FAIL, f"with {run.poison} poison: {wrong.message}", wrong.evidence)


def values_of(declaration: Declaration, run: Execution) -> CaseResult:
    """Everything that a call returned or stored, against the oracle's."""
    if declaration.operation is Operation.KV_WRITE:
        results, elements = written_pool(run)
        return CaseResult(checks=tuple(results), elements=elements)
    if declaration.operation in (Operation.KV_GATHER, Operation.INDEX_BUILD):
        gather = declaration.operation is Operation.KV_GATHER
        result, elements = gather_values(run) if gather else index_values(run)
        return CaseResult(checks=(result,), elements=elements)
    if declaration.operation is Operation.LSE_MERGE:
        return merge_values(declaration, run)
    values = attention_values(declaration, run)
    if declaration.operation is not Operation.BACKEND:
        return values
    written, elements = written_pool(run)
    return replace(values, checks=(*values.checks, *written), elements=values.elements + elements)


def _one_each(results: list[CheckResult]) -> tuple[CheckResult, ...]:
    """One result a check: the most severe, the first among equals. In the order of ``Check``."""
    kept = []
    for check in Check:
        own = [r for r in results if r.check is check]
        if own:
            severest = worst(r.verdict for r in own)
            kept.append(next(r for r in own if r.verdict is severest))
    return tuple(kept)
