"""Judging a captured call: its recorded output, and what the target makes of the same arguments here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from fuzz import engine as engines
from fuzz.buffers import Poison
from fuzz.call import ResultError, call
from fuzz.captured.call import Captured
from fuzz.captured.unjudged import Unjudged, unjudged
from fuzz.check.diagnosis import class_of, diagnosed
from fuzz.check.execute import Execution, Progress
from fuzz.check.memory import allocations_in_bounds, inputs_untouched
from fuzz.check.result import CaseResult, Check, CheckResult
from fuzz.check.run import values_of
from fuzz.check.sanitizer import sanitized, sanitizer_results
from fuzz.check.scratch import overrun, poisoned_allocations
from oracle.declare import Declaration
from oracle.kinds import Engine
from oracle.verdict import Verdict


@dataclass(frozen=True)
class Failure:
    """What a result failed by: a check and the class of its diagnosis."""

    check: Check
    diagnosis: str | None


def failures(result: CaseResult) -> list[Failure]:
    """By check, in the order of the checks."""
    return [Failure(check.check, class_of(result.checks, check.check)) for check in result.failures]


def judge_recorded(declaration: Declaration, captured: Captured) -> CaseResult:
    """The output that was recorded against the oracle's, with a diagnosis where it fails."""
    return _judged(declaration, captured, _execution(captured, captured.record.outputs))


def judge_values(declaration: Declaration, captured: Captured) -> CaseResult:
    """The same without a diagnosis."""
    return _values(declaration, unjudged(declaration, captured), _execution(captured, captured.record.outputs))


def run_here(declaration: Declaration, captured: Captured, engine: Engine, progress: Progress) -> Execution:
    """Call the target on the recorded arguments. What it raises passes through."""
    if declaration.reset is not None:
        declaration.reset()
    buffers = captured.instance.buffers
    before = {name: buffer.image() for name, buffer in buffers.items()}
    engines.synchronize(engine)
    progress("kernel")
    with sanitized(engine) as log:
        marked = {} if log is None else {"allocated": log.mark_fresh}
        with poisoned_allocations(Poison.POSITIVE, **marked) as allocated:
            outputs = call(declaration, captured.instance)
            engines.synchronize(engine)
    progress("checks")
    after = {name: buffer.image() for name, buffer in buffers.items()}
    run = _execution(captured, outputs)
    return replace(
        run,
        before=before,
        after=after,
        overrun=overrun(allocated, Poison.POSITIVE),
        sanitizer=sanitizer_results(log),
    )


def judge_here(declaration: Declaration, captured: Captured, run: Execution) -> CaseResult:
    """What came back here against the oracle's, and whether the call kept to its memory."""
    result = _judged(declaration, captured, run)
    memory = (inputs_untouched(run, ()), allocations_in_bounds(run), *run.sanitizer)
    return replace(result, checks=(*result.checks, *(c for c in memory if c.verdict is not Verdict.PASS)))


def wrong_result(error: ResultError) -> CaseResult:
    """A target that returned something else than its operation returns."""
    return CaseResult(checks=(CheckResult(Check.RESULT, Verdict.FAIL, str(error)),))


def _execution(captured: Captured, outputs: Mapping[str, Tensor]) -> Execution:
    return Execution(Poison.POSITIVE, captured.instance, dict(outputs), {}, {}, 0, ())


def _judged(declaration: Declaration, captured: Captured, run: Execution) -> CaseResult:
    nothing = unjudged(declaration, captured)
    result = _values(declaration, nothing, run)
    run = run if nothing is None else replace(run, outputs=nothing.left_out(run.outputs))
    return replace(result, checks=diagnosed(declaration, run, result.checks, captured.around))


def _values(declaration: Declaration, nothing: Unjudged | None, run: Execution) -> CaseResult:
    """What can be judged; a reason where that is nothing."""
    if nothing is None:
        result = values_of(declaration, run)
        return result if result.elements else replace(result, reason="it has no query, and nothing to judge")
    if nothing.everything:
        checks = (CheckResult(Check.VALUES, Verdict.VACUOUS, nothing.message),)
        return CaseResult(checks=checks, reason=nothing.message)
    return values_of(declaration, replace(run, outputs=nothing.left_out(run.outputs)))
