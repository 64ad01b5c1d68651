"""What a worker does with a captured call: a kernel that ends its process ends this one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fuzz import engine as engines
from fuzz.call import ResultError, Unsupported
from fuzz.campaign.job import crash, declared, ours
from fuzz.captured.call import Captured, understand
from fuzz.captured.judge import failures, judge_here, judge_recorded, judge_values, run_here, wrong_result
from fuzz.captured.load import RecordError, load
from fuzz.captured.shrink import fewer_queries, reduced, shorter
from fuzz.captured.unjudged import unjudged
from fuzz.check.result import CaseResult
from fuzz.errors import Expected
from oracle.capture import Record, write
from oracle.declare import Declaration


def run(request: dict[str, Any], progress: Callable[[str], None]) -> dict[str, Any]:
    """What ``request["do"]`` names, with ``request["path"]`` and ``request["target"]``."""
    return {"recorded": recorded, "here": here, "shrink": shrink}[request["do"]](request, progress)


def recorded(request: dict[str, Any], progress: Callable[[str], None]) -> dict[str, Any]:
    """Judge the output in ``request["path"]``: ``case``, ``result``, ``about``, ``unjudged``; ``refused``: a bad file.

    ``unjudged`` is None or says what cannot be judged, ``refused`` is a line.
    """
    progress("oracle")
    try:
        captured = _understood(request)
    except Expected as error:
        return {"refused": str(error)}
    declaration = declared(request["target"])
    result, nothing = judge_recorded(declaration, captured), unjudged(declaration, captured)
    return {
        "unjudged": None if nothing is None else nothing.message,
        "case": captured.case.to_dict(),
        "result": result.to_dict(),
        "about": dict(captured.record.about),
    }


def here(request: dict[str, Any], progress: Callable[[str], None]) -> dict[str, Any]:
    """Run ``request["target"]`` on the recorded arguments: ``CaseResult.to_dict()``."""
    progress("generate")
    return _run(declared(request["target"]), _understood(request), progress)[0].to_dict()


def shrink(request: dict[str, Any], progress: Callable[[str], None]) -> dict[str, Any]:
    """Write the smallest call that still fails to ``request["smaller"]``; ``case`` describes it.

    ``request["here"]``: whether the target fails here as it did; then its contexts are shortened too.
    """
    progress("oracle")
    declaration, captured = declared(request["target"]), _understood(request)
    wanted = {check.check for check in judge_values(declaration, captured).failures}
    if not wanted:
        return {"refused": "the recorded output is right: there is nothing to make smaller"}

    def fails(record: Record) -> bool:
        # What is wrong in a part is what is wrong in the whole, whatever explains it best.
        try:
            result = judge_values(declaration, _again(record, declaration))
        except RecordError:
            return False
        return any(check.check in wanted for check in result.failures)

    best = _again(reduced(captured, declaration, fails), declaration)
    best = _again(fewer_queries(best, declaration, fails), declaration)
    result = judge_recorded(declaration, best)
    if request["here"]:
        first = failures(result)[0]

        def fails_anew(record: Record) -> Record | None:
            try:
                found, outputs = _run(declaration, _again(record, declaration), progress)
            except RecordError:
                return None
            return replace(record, outputs=outputs) if outputs and first in failures(found) else None

        again = fails_anew(best.record)
        if again is not None:
            best = _again(shorter(_again(again, declaration), declaration, fails_anew), declaration)
            result = judge_recorded(declaration, best)
    write(Path(request["smaller"]), replace(best.record, about=dict(best.record.about) | {"shrunk": True}))
    return {"case": best.case.to_dict(), "result": result.to_dict()}


def _understood(request: Mapping[str, Any]) -> Captured:
    return understand(load(Path(request["path"])), declared(request["target"]), engines.device(engines.current()))


def _again(record: Record, declaration: Declaration) -> Captured:
    return understand(record, declaration, engines.device(engines.current()))


def _run(
    declaration: Declaration, captured: Captured, progress: Callable[[str], None]
) -> tuple[CaseResult, dict[str, Any]]:
    """How the target does here, and what it returned on the CPU; nothing where it raised."""
    engine = engines.current()
    try:
        run = run_here(declaration, captured, engine, progress)
    except Unsupported as error:
        return CaseResult(checks=(), reason=str(error)), {}
    except ResultError as error:
        return wrong_result(error), {}
    except (Exception, SystemExit) as error:
        if ours(error):
            raise
        return crash(error), {}
    result = judge_here(declaration, captured, run)
    return result, {name: value.cpu() for name, value in run.outputs.items()}
