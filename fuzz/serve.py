"""Answers a test session: draws cases that somebody else chooses, and judges cases in a worker of its own.

A test session may not import `fuzz`, since its repository may have a package of that name. It starts this process
instead, whose path is ours first, and the two talk in lines of JSON. Requests have a key `do`:

    open    target, modules, engine, timeout    loads targets; -> engine, skip (why it cannot run here, or null)
    draw    target                              -> {"choose": n} or {"integer": [low, high]}, each answered by
                                                {"pick": i} or {"pick": null} to give up; at last -> case, words
    judge   target, case                        -> what `_Session.judge` says
    minimise  target, case, finding, time       -> what `_Session.minimise` says
    findings  path                              -> findings: [{target, case, words}]

An answer {"stop": line} is an error that the user caused, {"harness": line} one of ours. What targets print goes to
standard error. The process ends with its standard input.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TypeVar

import torch

from fuzz import engine as engines
from fuzz import registry
from fuzz.campaign.finding import Finding, finding_from_dict, findings_of, saved_finding
from fuzz.campaign.minimise import minimise, shows
from fuzz.campaign.run import Settings, job_of, outcome_of
from fuzz.campaign.worker import Limits, Worker, fair_memory_bytes
from fuzz.case import Case, case_from_dict
from fuzz.check.result import Check, CheckResult
from fuzz.commands import parse_engine
from fuzz.describe import describe
from fuzz.errors import Exit, Expected, Stop
from fuzz.finding_files import finding_files
from fuzz.plain import read_json
from fuzz.report.failure import failure_text
from fuzz.space import Space
from fuzz.support import unsupported
from fuzz.versions import versions
from oracle.declare import Declaration
from oracle.failure import Failed, by_telling
from oracle.kinds import Engine

T = TypeVar("T")
_OURS = ("fuzz", "suites", "oracle")
_GIVE = 'one of your own: give its function, or modules=["mine.py"], the file that declares it'
"""What to write in a test for a target that is not among those known."""
_VISIBLE = {Engine.CUDA: "CUDA_VISIBLE_DEVICES", Engine.HIP: "HIP_VISIBLE_DEVICES"}


class _GaveUp(Exception):
    """Who chooses wants no more of this case."""


@dataclass(frozen=True)
class _Channel:
    """Lines of JSON in and out."""

    lines: Iterator[str]
    out: IO[str]

    def ask(self, question: Mapping[str, Any]) -> int:
        self.send(question)
        pick = json.loads(next(self.lines))["pick"]
        if pick is None:
            raise _GaveUp
        return int(pick)

    def send(self, message: Mapping[str, Any]) -> None:
        self.out.write(json.dumps(message) + "\n")
        self.out.flush()


@dataclass(frozen=True)
class _Asking:
    """A chooser that asks the other side."""

    channel: _Channel

    def choose(self, name: str, options: Sequence[T]) -> T:
        return options[self.channel.ask({"choose": len(options)})] if len(options) > 1 else options[0]

    def integer(self, name: str, low: int, high: int) -> int:
        return self.channel.ask({"integer": [low, high]}) if high > low else low


@dataclass
class _Target:
    declaration: Declaration
    space: Space
    settings: Settings
    worker: Worker


@dataclass
class _Session:
    """Targets that were opened, each with a warm worker; those of the same modules and engine share one."""

    channel: _Channel
    targets: dict[str, _Target] = field(default_factory=dict)
    workers: dict[tuple[Any, ...], tuple[dict[str, Declaration], Settings, Worker]] = field(default_factory=dict)

    def open(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Load the modules of a target and say whether it can run here. Raises ``Expected``."""
        name, modules = request["target"], tuple(request["modules"])
        known, settings, worker = self._loaded(modules, request["engine"], request["timeout"])
        if name not in known:
            raise Stop(Exit.USAGE, f"target {registry.unknown(name, known, _GIVE)}")
        declaration = known[name]
        self.targets[name] = _Target(declaration, Space(declaration), settings, worker)
        return {"engine": settings.engine, "skip": registry.why_not(declaration, settings.engine)}

    def _loaded(
        self, modules: tuple[str, ...], engine: str, timeout_s: float
    ) -> tuple[dict[str, Declaration], Settings, Worker]:
        key = (modules, engine, timeout_s)
        if key not in self.workers:
            known = _load(modules)
            chosen = parse_engine(engine)
            _own_device(chosen)
            settings = Settings(engine=chosen, modules=modules, versions=versions(), timeout_s=timeout_s)
            worker = Worker(job_of(settings), limits=Limits(memory_bytes=fair_memory_bytes(1)))
            self.workers[key] = known, settings, worker
        return self.workers[key]

    def draw(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """One case, as the other side chooses; or `gave_up`."""
        try:
            case = self.targets[request["target"]].space.draw(_Asking(self.channel))
        except _GaveUp:
            return {"gave_up": True}
        return {"case": case.to_dict(), "words": describe(case)}

    def judge(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Judge one case: verdict, elements, worst_ratio, reason (of unsupported); where it fails, also text, the most
        telling failure's check, diagnosis and finding, failed (all checks that did), and ways: how many explanations of
        the diagnosed class fit.
        """
        name, case = request["target"], case_from_dict(request["case"])
        reason = unsupported(self.targets[name].declaration, case)
        if reason is not None:
            return {"verdict": "unsupported", "elements": 0, "worst_ratio": None, "reason": reason}
        return self._judged(name, case, self.targets[name].settings.timeout_s)

    def minimise(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The smallest case found within `time` seconds that fails as `finding` of `case` does.

        Says its judgement, as `judge` does, with case, words, tried (cases judged) and complete (no single reduction
        keeps the fault); tried and complete alone, where nothing smaller shows it.
        """
        name, case, like = request["target"], case_from_dict(request["case"]), saved_finding(request["finding"])
        target, deadline = self.targets[name], time.monotonic() + request["time"]
        # A candidate that takes longer than all of the time hangs, unless hanging is what is looked for.
        most_s = math.inf if like.check is Check.HANG else max(request["time"], 1.0)
        shown: dict[Case, dict[str, Any]] = {}

        def judge(cases: Sequence[Case]) -> list[bool]:
            for one in cases:
                said = self._judged(name, one, min(target.settings.timeout_s, most_s))
                if "finding" in said and shows(saved_finding(said["finding"]), like, target.settings):
                    shown[one] = said
            return [one in shown for one in cases]

        found = minimise(target.declaration, case, judge, expired=lambda: time.monotonic() >= deadline)
        said = {"tried": found.judged, "complete": found.complete}
        if found.case not in shown:
            return said
        return said | shown[found.case] | {"case": found.case.to_dict(), "words": describe(found.case)}

    def _judged(self, name: str, case: Case, timeout_s: float) -> dict[str, Any]:
        target = self.targets[name]
        asked = {"target": name, "case": case.to_dict(), "coverage": False}
        outcome = outcome_of(name, case, target.worker.run(asked, timeout_s))
        if outcome.harness is not None:
            return {"harness": outcome.harness.message}
        result = outcome.result
        said = {
            "verdict": result.verdict,
            "elements": result.elements,
            "worst_ratio": result.worst_ratio,
            "reason": result.reason,
        }
        if not result.failures:
            return said
        return said | _failed(findings_of(name, case, result, target.settings), case, name)

    def findings(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Targets and cases of a finding's file, or of a folder of them. Raises ``Expected``."""
        path = Path(request["path"])
        found = [(file, *read_json(file, finding_from_dict)) for file in finding_files(path)]
        return {
            "findings": [
                {"target": target, "case": case.to_dict(), "words": describe(case), "path": str(file)}
                for file, target, case in found
            ]
        }

    def close(self) -> None:
        for _, _, worker in self.workers.values():
            worker.close()


def _load(modules: tuple[str, ...]) -> dict[str, Declaration]:
    try:
        return registry.load(modules)
    except registry.RegistryError as error:
        clash = next((name for name in _OURS if f"the module {name}." in str(error)), None)
        hint = "" if clash is None else f"; where kernels are judged, {clash} is attn-oracle's own package"
        raise Stop(Exit.USAGE, f"{error}{hint}") from None


def _failed(found: Sequence[Finding], case: Case, name: str) -> dict[str, Any]:
    failures = [CheckResult(f.check, f.verdict, f.message, f.evidence) for f in found]
    first = by_telling([Failed(check=f.check.value, message=f.message, evidence=f.evidence) for f in failures])[0]
    leading = next(f for f in found if f.check.value == first.check)
    return {
        "text": failure_text(name, case, failures),
        "check": leading.check,
        "diagnosis": leading.diagnosis,
        "finding": leading.to_dict(),
        "failed": [f.check for f in found],
        "ways": leading.ways,
    }


def _own_device(engine: Engine) -> None:
    """Give each worker of pytest-xdist a GPU of its own, as far as there are enough."""
    number = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
    variable = _VISIBLE.get(engine)
    if variable is None or not number.isdigit():
        return
    given = [device for device in os.environ.get(variable, "").split(",") if device]
    devices = given or [str(i) for i in range(torch.cuda.device_count())]
    if devices:
        os.environ[variable] = devices[int(number) % len(devices)]


def main() -> None:
    """Serve until standard input ends."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever else is printed in this process is not for the other side
    session = _Session(_Channel(iter(sys.stdin.readline, ""), out))
    try:
        for line in session.channel.lines:
            request = json.loads(line)
            session.channel.send(_answer(session, request))
    except (KeyboardInterrupt, BrokenPipeError):
        pass
    finally:
        session.close()


def _answer(session: _Session, request: Mapping[str, Any]) -> dict[str, Any]:
    do = {
        "open": session.open,
        "draw": session.draw,
        "judge": session.judge,
        "minimise": session.minimise,
        "findings": session.findings,
    }
    try:
        return do[request["do"]](request)
    except StopIteration:
        raise KeyboardInterrupt from None
    except Expected as error:
        nothing = isinstance(error, engines.EngineError)
        return {"skip" if nothing else "stop": str(error)}
    except Exception as error:  # noqa: BLE001 - told to the other side, which stops
        return {"harness": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}


if __name__ == "__main__":
    main()
