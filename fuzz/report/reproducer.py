"""A finding as a folder that shows it: its case, a script that needs none of us, and a report ready for an issue.

The script is made by tracing the target on its own case (``trace``), here, on whatever engine this machine has: the
calls are the same on a GPU.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from fuzz import engine as engines
from fuzz.buffers import Poison
from fuzz.call import Unsupported, arguments
from fuzz.campaign.finding import Finding, saved_finding
from fuzz.campaign.job import declared
from fuzz.campaign.pool import Pool
from fuzz.campaign.run import Settings, job_of
from fuzz.campaign.worker import Limits, fair_memory_bytes
from fuzz.case import Case
from fuzz.check.diagnosis import detail_of, others_of
from fuzz.check.memory import IN_PLACE
from fuzz.check.result import Check
from fuzz.check.sanitizer import CHECK_OF, sanitized
from fuzz.check.variations import alone, chunks, elsewhere
from fuzz.engine import loader
from fuzz.instance import Instance, build
from fuzz.instance.copies import write_expected
from fuzz.instance.merge import earlier_cases
from fuzz.report.expected import expectations
from fuzz.report.issue import issue
from fuzz.report.script import DATA_FILE, Argument, Reproduction, TracedRun, render
from fuzz.report.trace import NotTraced, trace
from fuzz.whole import write_whole
from oracle.declare import Declaration
from oracle.kinds import Engine, Operation

SCRIPT_FILE = "reproduce.py"
ISSUE_FILE = "ISSUE.md"
CASE_FILE = "case.json"
FINDING_FILE = "finding.json"

POISONS = {"first": Poison.POSITIVE, "again": Poison.POSITIVE, "second": Poison.NEGATIVE, "nan": Poison.NAN}
_SAME = {
    "second": "depend on values where no data is",
    "nan": "are contaminated by NaN where no data is",
    "again": "differ between two identical calls",
    "moved": "depend on which pages hold the keys",
    "alone": "of the first request depend on the others",
}
_BY_EMULATOR = (*CHECK_OF.values(),)
_BY_REPLAY = (Check.FRESH, Check.SESSION, Check.SETTINGS, Check.RESCALED)
"""Relations that a script does not write down: their second call is more than another case."""


@dataclass(frozen=True)
class Reproducer:
    """A script, what lies beside it, and why there is none."""

    script: str | None
    beside: bytes
    reason: str


# ---------------------------------------------------------------------- in a worker


def reproduction(declaration: Declaration, finding: Finding, engine: Engine) -> Reproduction:
    """What shows ``finding``, traced on ``engine``. Raises ``NotTraced`` where a call cannot be written down.

    The process runs that engine. A target that ends its process does so here, too.
    """
    if finding.check in _BY_REPLAY:
        raise NotTraced(
            f"{finding.check}: a relation of calls that a script does not write down; attn-oracle replay is the way"
        )
    case = finding.case
    launched = _warm(declaration, case, engine)
    loader.asked.clear()
    runs, same = [], []
    for name, other in _runs(declaration, case, finding.check):
        poison = POISONS.get(name, Poison.POSITIVE)
        runs.append(_traced(declaration, name, other, poison, engine, _is_suspect(finding)))
        if name in _SAME and declaration.operation is not Operation.KV_WRITE:
            same.append(("first", name, _SAME[name]))
    if (partner := declaration.agrees_with) is not None and finding.check is Check.AGREEMENT:
        if partner.operation is not declaration.operation:
            raise NotTraced("agreement: the partner is of another operation; attn-oracle replay is the way")
        _warm(partner, case, engine)
        runs.append(_traced(partner, "partner", case, Poison.POSITIVE, engine, False))
    return Reproduction(
        title=f"{finding.target}: {finding.check}: {finding.message}",
        about=list(_about(declaration, finding)),
        runs=runs,
        same=same,
        asked=dict(loader.asked),
        gpu=launched or engine is not Engine.EMULATOR,
        raises=finding.check is Check.CRASH,
        note=_note(finding, runs),
    )


def _runs(declaration: Declaration, case: Case, check: Check) -> Iterator[tuple[str, Case]]:
    """Each run of the script by name, and its case."""
    for name in POISONS:
        if name == "nan" and declaration.supports.requires_finite_pool:
            continue
        if name == "again" and not declaration.supports.deterministic:
            continue
        yield name, case
    moved = elsewhere(case) if check is Check.PAGES else None
    if moved is not None:
        yield "moved", moved
    if check is Check.BATCH and declaration.supports.batch_invariant:
        yield "alone", alone(case)
    if check is Check.CHUNKS:
        yield from ((f"step {i}", chunk) for i, (chunk, _) in enumerate(chunks(case), 1))


def _is_suspect(finding: Finding) -> bool:
    """Whether the fault is beyond the probable budget alone."""
    evidence = finding.evidence
    return (
        finding.check in (Check.VALUES, Check.LSE) and not evidence.get("failures") and bool(evidence.get("suspects"))
    )


def _calls(declaration: Declaration, case: Case, poison: Poison, engine: Engine) -> list[tuple[str, Instance]]:
    """The calls of a case, the ones before it first, each with what stands before its arguments' names."""
    device = engines.device(engine)
    earlier = [(f"earlier{i}_", build(one, poison, device)) for i, one in enumerate(earlier_cases(case))]
    return [*earlier, ("", build(case, poison, device))]


def _all_calls(declaration: Declaration, calls: list[tuple[str, Instance]]) -> Callable[..., Any]:
    """One function over the arguments of all calls, which returns what the last one does."""

    def run(**given: Any) -> Any:
        result = None
        for prefix, instance in calls:
            wanted = arguments(declaration, instance)
            result = declaration.function(**{name: given[prefix + name] for name in wanted})
        return result

    return run


def _given(declaration: Declaration, calls: list[tuple[str, Instance]]) -> dict[str, Any]:
    return {p + name: value for p, instance in calls for name, value in arguments(declaration, instance).items()}


def _reset(declaration: Declaration) -> None:
    if declaration.reset is not None:
        declaration.reset()


def _warm(declaration: Declaration, case: Case, engine: Engine) -> bool:
    """Call once, so that everything is imported and loaded. Whether the emulator launched a kernel."""
    _reset(declaration)
    calls = _calls(declaration, case, Poison.POSITIVE, engine)
    with sanitized(engine) as log:
        try:
            _all_calls(declaration, calls)(**_given(declaration, calls))
        except Unsupported as reason:
            raise NotTraced(str(reason)) from None
        except Exception:  # noqa: BLE001 - what a target raises is shown by the traced call
            pass
    return log is not None and bool(log.launches)


def _traced(
    declaration: Declaration, name: str, case: Case, poison: Poison, engine: Engine, probable: bool
) -> TracedRun:
    _reset(declaration)
    calls = _calls(declaration, case, poison, engine)
    given = _given(declaration, calls)
    with sanitized(engine):
        program = trace(
            _all_calls(declaration, calls),
            given,
            lambda result: _named(declaration, result),
            home=declaration.function,
        )
    buffers = {p + key: (p, key) for p, instance in calls for key in instance.buffers}
    instances = dict(calls)
    # The traced call may have changed its arguments: their data come from new ones.
    fresh = dict(_calls(declaration, case, poison, engine))
    wanted = _wanted(declaration, case, poison, engine)
    found = {
        full: Argument(fresh[prefix].buffers[key], wanted.get(key) if not prefix else None)
        for full, (prefix, key) in buffers.items()
    }
    expected = expectations(declaration, instances[""], probable=probable)
    return TracedRun(name, program, found, expected, poison)


def _named(declaration: Declaration, result: Any) -> Mapping[str, Tensor]:
    """The tensors of a result by their names, whatever else is wrong with it."""
    values = result if isinstance(result, tuple) else () if result is None else (result,)
    names = {
        Operation.KV_GATHER: ("key", "value"),
        Operation.INDEX_BUILD: ("indices",),
        Operation.KV_WRITE: (),
    }.get(declaration.operation, ("out", "lse"))
    return {name: value for name, value in zip(names, values, strict=False) if isinstance(value, Tensor)}


def _wanted(declaration: Declaration, case: Case, poison: Poison, engine: Engine) -> dict[str, Tensor]:
    """The images of the caches after an operation that writes them."""
    if declaration.operation not in (Operation.KV_WRITE, Operation.BACKEND):
        return {}
    instance = build(case, poison, engines.device(engine))
    write_expected(instance)
    return {name: instance.buffers[name].image() for name in IN_PLACE}


def _about(declaration: Declaration, finding: Finding) -> Iterator[str]:
    detail = detail_of(finding.evidence)
    if detail:
        yield f"Diagnosis: {detail}."
    if others := others_of(finding.evidence):
        yield f"Or: {'; '.join(others)}."
    used = ", ".join(f"{name} {version}" for name, version in finding.versions.items() if version)
    yield f"Found with {used}, on {finding.engine}."
    yield "Exit: 1 the fault shows, 0 it does not, 2 it cannot run here."


def _note(finding: Finding, runs: list[TracedRun]) -> str:
    said = []
    if finding.check in _BY_EMULATOR and finding.check is not Check.BOUNDS:
        said.append(f"{finding.check}: the emulator saw it; natively only what follows from it can show")
    if finding.check is Check.BOUNDS:
        said.append("bounds: writes beyond arguments and allocations show here; reads show only where values change")
    if finding.check is Check.AGREEMENT:
        said.append("agreement: the partner runs, too; both are compared with the oracle's values, not with each other")
    if finding.check is Check.BATCH and not any(run.name == "alone" for run in runs):
        said.append("batch: the target may differ within its budget; the script compares with the oracle's values only")
    if any(run.program.raised for run in runs):
        said.append("where it was traced the last call did not return: a result, if there is one, is not compared")
    return "; ".join(said)


def run(request: dict[str, Any], progress: Callable[[str], None]) -> dict[str, Any]:
    """A worker's job: the script of ``request["finding"]``: "script" and "beside" (base64), or "reason"."""
    progress("kernel")
    finding = saved_finding(request["finding"])
    try:
        made = reproduction(declared(finding.target), finding, engines.current())
    except NotTraced as reason:
        return {"reason": str(reason)}
    script, beside = render(made)
    return {"script": script, "beside": base64.b64encode(beside).decode()}


# -------------------------------------------------------------------------- outside


def open_reproducers(settings: Settings) -> Pool:
    """Workers that write scripts; use as a context manager."""
    usual = job_of(settings)
    job = replace(usual, function="fuzz.report.reproducer:run")
    return Pool(job, settings.jobs, limits=Limits(memory_bytes=fair_memory_bytes(settings.jobs)))


def reproducers(pool: Pool, findings: list[Finding], settings: Settings) -> Iterator[tuple[Finding, Reproducer]]:
    """The script of each finding, or why there is none, in order. ``pool`` is of ``open_reproducers``."""
    requests = ({"finding": finding.to_dict()} for finding in findings)
    for index, reply in pool.map(requests, settings.timeout_s):
        finding = findings[index]
        if not reply.ok or reply.value is None:
            what = f"{reply.raised.type}: {reply.raised.message}" if reply.raised else reply.detail
            yield finding, Reproducer(None, b"", f"the call could not be traced: {what}")
        elif "reason" in reply.value:
            yield finding, Reproducer(None, b"", reply.value["reason"])
        else:
            yield finding, Reproducer(reply.value["script"], base64.b64decode(reply.value["beside"]), "")


def write_reproducer(folder: Path, finding: Finding, made: Reproducer) -> Path:
    """Write a finding's folder: case, finding, script if there is one, and last the report. Raises ``OSError``.

    Where the report is, all of it is.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / CASE_FILE, finding.case.to_json())
    write_whole(folder / FINDING_FILE, json.dumps(finding.to_dict(), indent=2) + "\n")
    if made.script is not None:
        write_whole(folder / SCRIPT_FILE, made.script)
    if made.beside:
        write_whole(folder / DATA_FILE, made.beside)
    write_whole(folder / ISSUE_FILE, issue(finding, SCRIPT_FILE if made.script else None, made.reason))
    return folder
