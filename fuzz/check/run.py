"""Everything that must hold for one case on one target."""

from __future__ import annotations

from fuzz.buffers import Poison
from fuzz.call import ResultError, Unsupported
from fuzz.case import Case
from fuzz.check.attention import attention_values
from fuzz.check.copies import gather_values, written_pool
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
from fuzz.check.result import CaseResult, Check, CheckResult
from oracle.declare import Declaration
from oracle.kinds import Engine, Operation
from oracle.verdict import Verdict, worst


def check_case(declaration: Declaration, case: Case, engine: Engine, progress: Progress) -> CaseResult:
    """Run ``case`` on a target and judge it.

    ``progress`` hears of the phases generate, kernel, checks and oracle. What the target raises passes through, apart
    from ``Unsupported`` and a result of the wrong kind.
    """
    try:
        first = execute(declaration, case, Poison.POSITIVE, engine, progress)
        second = execute(declaration, case, opposite(first.poison), engine, progress)
        nan = None
        if not declaration.supports.requires_finite_pool:
            nan = execute(declaration, case, Poison.NAN, engine, progress)
    except Unsupported as error:
        return CaseResult(checks=(), reason=str(error))
    except ResultError as error:
        return CaseResult(checks=(CheckResult(Check.RESULT, Verdict.FAIL, str(error)),))
    found = _memory_checks(declaration, first, second, nan)
    found += _again(declaration, case, engine, first, found, progress)
    progress("oracle")
    values = _values(declaration, first)
    found += values.checks
    return CaseResult(
        checks=_one_each(found),
        elements=values.elements,
        vacuous_elements=values.vacuous_elements,
        worst_ratio=values.worst_ratio,
    )


def _memory_checks(
    declaration: Declaration, first: Execution, second: Execution, nan: Execution | None
) -> list[CheckResult]:
    in_place = IN_PLACE if declaration.operation is Operation.KV_WRITE else ()
    runs = [run for run in (first, second, nan) if run is not None]
    found = [inputs_untouched(run, in_place) for run in runs]
    found += [allocations_in_bounds(run) for run in runs]
    found += [result for run in runs for result in run.sanitizer]
    missing = unwritten(first, second)
    if first.outputs:
        found.append(all_written(first, second))
        found.append(same_result(Check.POISON, first, second, missing))
        if nan is not None:
            found.append(same_result(Check.NAN, first, nan, missing))
    return found


def _again(
    declaration: Declaration,
    case: Case,
    engine: Engine,
    first: Execution,
    found: list[CheckResult],
    progress: Progress,
) -> list[CheckResult]:
    """Determinism: an identical call gives identical bits.

    Where two poisons already gave the same bits nothing more needs to run.
    """
    if not declaration.supports.deterministic or not first.outputs:
        return []
    if all(r.verdict is Verdict.PASS for r in found if r.check is Check.POISON):
        return [CheckResult(Check.DETERMINISM, Verdict.PASS)]
    again = execute(declaration, case, first.poison, engine, progress)
    return [same_result(Check.DETERMINISM, first, again, {})]


def _values(declaration: Declaration, run: Execution) -> CaseResult:
    if declaration.operation is Operation.KV_WRITE:
        results, elements = written_pool(run)
        return CaseResult(checks=tuple(results), elements=elements)
    if declaration.operation is Operation.KV_GATHER:
        result, elements = gather_values(run)
        return CaseResult(checks=(result,), elements=elements)
    return attention_values(declaration, run)


def _one_each(results: list[CheckResult]) -> tuple[CheckResult, ...]:
    """One result a check: the most severe, the first among equals. In the order of ``Check``."""
    kept = []
    for check in Check:
        own = [r for r in results if r.check is check]
        if own:
            severest = worst(r.verdict for r in own)
            kept.append(next(r for r in own if r.verdict is severest))
    return tuple(kept)
