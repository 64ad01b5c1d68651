"""What `attn-oracle check` does: judge a call that was captured in production, and make it smaller."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fuzz import registry
from fuzz.campaign.reply import Reply
from fuzz.campaign.worker import Job, Limits, Worker, fair_memory_bytes
from fuzz.captured.call import understand
from fuzz.captured.load import RecordError, load
from fuzz.check.diagnosis import told_of
from fuzz.check.result import CaseResult, Check, CheckResult
from fuzz.errors import Exit, Stop
from fuzz.report.summary import SCHEMA
from fuzz.versions import versions
from oracle.declare import Declaration
from oracle.failure.words import count
from oracle.kinds import Engine
from oracle.verdict import Verdict

_FUNCTION, _SETUP = "fuzz.captured.job:run", "fuzz.campaign.job:setup"

_NO_EVIDENCE = (Verdict.UNSUPPORTED, Verdict.VACUOUS)


@dataclass(frozen=True)
class Answer:
    """What became of a record. ``here`` is None where the target was not run here; ``not_here`` says why. ``unjudged``:
    why a part of it, or all, cannot be judged."""

    case: Mapping[str, Any]
    about: Mapping[str, Any]
    recorded: CaseResult
    here: CaseResult | None
    not_here: str
    unjudged: str | None = None
    shrunk: Mapping[str, Any] | None = None

    @property
    def clean(self) -> bool:
        """Whether nothing fails, neither what was recorded nor what the target does here."""
        return not self.recorded.failures and not (self.here and self.here.failures)

    @property
    def empty(self) -> bool:
        """Whether nothing was shown, neither for nor against the target."""
        return self.clean and all(r.verdict in _NO_EVIDENCE for r in (self.recorded, self.here) if r is not None)


def check_record(
    path: Path,
    target: str,
    *,
    engine: Engine,
    modules: tuple[str, ...],
    smaller: Path | None,
    as_json: bool,
    timeout_s: float,
) -> None:
    """Judge a captured call; print what was found. Ends with ``Stop`` unless all of it is right."""
    known = registry.load(modules)
    if target not in known:
        raise Stop(Exit.USAGE, f"--target: {registry.unknown(target, known)}")
    declaration = known[target]
    try:
        understand(load(path), declaration)
    except RecordError as error:
        text = str(error)
        raise Stop(Exit.USAGE, text if text.startswith(str(path)) else f"{path}: {text}") from None
    if smaller is not None and not smaller.parent.is_dir():
        raise Stop(Exit.USAGE, f"--shrink {smaller}: cannot be written: no such folder")
    setup = {"engine": engine.value, "modules": list(modules), "threads": 1}
    job = Job(_FUNCTION, _SETUP, setup)
    worker = Worker(job, limits=Limits(memory_bytes=fair_memory_bytes(1)))
    try:
        answer = _answer(worker, path, declaration, engine, smaller, timeout_s)
    finally:
        worker.close()
    if as_json:
        print(json.dumps(to_dict(answer, target, engine), indent=2))
    else:
        print("\n".join(lines(answer, path, target, engine)))
    if not answer.clean:
        raise Stop(Exit.FINDINGS)
    if answer.empty:
        reason = answer.recorded.reason or "the budget allows anything"
        raise Stop(Exit.NOTHING, f"{path}: nothing was judged: {reason}")


def _answer(
    worker: Worker, path: Path, declaration: Declaration, engine: Engine, smaller: Path | None, timeout_s: float
) -> Answer:
    request = {"path": str(path), "target": declaration.name}
    judged = _value(worker.run(request | {"do": "recorded"}, timeout_s))
    recorded = CaseResult.from_dict(judged["result"])
    here, reason = None, registry.why_not(declaration, engine) or recorded.reason
    if not reason:
        here = _here(worker.run(request | {"do": "here"}, timeout_s))
        reason = here.reason
    shrunk = None
    if smaller is not None and recorded.failures:
        again = here is not None and bool(here.failures)
        shrunk = _shrunk(worker, request | {"do": "shrink", "smaller": str(smaller)}, again, timeout_s)
    return Answer(
        judged["case"], judged["about"], recorded, here if not reason else None, reason, judged["unjudged"], shrunk
    )


def _value(reply: Reply) -> dict[str, Any]:
    if not reply.ok or reply.value is None:
        told = f"{reply.raised.type}: {reply.raised.message}" if reply.raised else reply.detail
        raise Stop(Exit.HARNESS, f"phase {reply.phase}: {told}")
    if "refused" in reply.value:
        raise Stop(Exit.USAGE, reply.value["refused"])
    return reply.value


def _here(reply: Reply) -> CaseResult:
    if reply.ok and reply.value is not None:
        return CaseResult.from_dict(reply.value)
    if reply.harness or reply.raised is not None:
        _value(reply)
    hung = reply.status.value == "hang"
    check = CheckResult(Check.HANG if hung else Check.CRASH, Verdict.HANG if hung else Verdict.CRASH, reply.detail)
    return CaseResult(checks=(check,))


def _shrunk(worker: Worker, request: dict[str, Any], again: bool, timeout_s: float) -> dict[str, Any]:
    """With the target if it fails here, else (or if it ends its process) by what was recorded alone."""
    most = 10 * timeout_s
    if again:
        reply = worker.run(request | {"here": True}, most)
        if reply.ok:
            return _value(reply) | {"path": request["smaller"]}
    return _value(worker.run(request | {"here": False}, most)) | {"path": request["smaller"]}


# ---------------------------------------------------------------------- output


def to_dict(answer: Answer, target: str, engine: Engine) -> dict[str, Any]:
    """The object that ``--json`` prints."""
    return {
        "schema": SCHEMA,
        "target": target,
        "engine": engine,
        "versions": versions(),
        "about": dict(answer.about),
        "case": dict(answer.case),
        "recorded": _result(answer.recorded),
        "here": None if answer.here is None else _result(answer.here),
        "not_here": answer.not_here or None,
        "unjudged": answer.unjudged,
        "shrunk": answer.shrunk,
    }


def _result(result: CaseResult) -> dict[str, Any]:
    return {"verdict": result.verdict, **result.to_dict()}


def lines(answer: Answer, path: Path, target: str, engine: Engine) -> Iterator[str]:
    """The same for people."""
    about = answer.about
    made = "".join(f", {name} {about[name]}" for name in ("made", "torch", "devices") if name in about)
    yield f"{path}: {_size(answer.case)}{made}"
    if answer.unjudged is not None:
        yield f"    {answer.unjudged}"
    yield from _told("what was recorded", answer.recorded)
    if answer.here is None:
        yield f"{target} was not run here: {answer.not_here}"
    else:
        yield from _told(f"{target} here ({engine})", answer.here)
        if answer.recorded.failures and answer.here.verdict is Verdict.PASS:
            yield "    the same arguments give a right result here: look at the device, the versions, or what else ran"
    if answer.shrunk is not None:
        yield f"{answer.shrunk['path']}: fails as well, with {_size(answer.shrunk['case'])}"


def _size(case: Mapping[str, Any]) -> str:
    requests, tokens = len(case["context_lens"]), sum(case["context_lens"])
    queries = f", {sum(case['query_lens'])} queries" if case["query_lens"] else ""
    return f"{count(requests, 'request')} of {tokens} tokens{queries}"


def _told(who: str, result: CaseResult) -> Iterator[str]:
    ratio = "" if result.worst_ratio is None else f", worst error/budget {result.worst_ratio:.3g}"
    reason = f": {result.reason}" if result.reason and not result.checks else ""
    yield f"{who}: {result.verdict}{ratio}{reason}"
    for check in result.checks:
        yield f"    {check.verdict:<8} {check.check:<12} {check.message}".rstrip()
    for line in dict.fromkeys(line for check in result.failures for line in told_of(check.evidence)):
        yield f"    {line}"
