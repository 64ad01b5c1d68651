"""Many cases on many targets, each in a worker process, with everything that happened counted."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from fuzz.campaign.finding import Finding, findings_of
from fuzz.campaign.pool import Pool
from fuzz.campaign.reply import Reply, Status
from fuzz.campaign.worker import Job, Limits
from fuzz.case import Case
from fuzz.check.result import CaseResult, Check, CheckResult
from fuzz.ledger import Defect, Versions
from fuzz.plan import Coverage, Plan
from fuzz.space import Space
from oracle.declare import Declaration
from oracle.kinds import Engine
from oracle.verdict import Verdict

PHASES = ("generate", "kernel", "oracle", "checks")
CASE_TIMEOUT_S = 120.0
"""One case runs a kernel three or four times; a cold compilation takes seconds. Beyond this it hangs."""

MEMORY_SHARE = 0.4
"""Share of the machine's memory that one worker may hold resident."""


MOST_HARNESS_ERRORS = 10
"""After so many failures of our own code a campaign stops: the rest would say nothing new."""


@dataclass
class TargetSummary:
    """What happened on one target so far."""

    declaration: Declaration
    coverage: Coverage
    cases: int = 0
    elements: int = 0
    vacuous_elements: int = 0
    worst_ratio: float | None = None
    verdicts: Counter[Verdict] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys((*PHASES, "other"), 0.0))

    @property
    def name(self) -> str:
        """The target's name."""
        return self.declaration.name

    @property
    def unknown(self) -> list[Finding]:
        """Findings that no ledger entry explains."""
        return [f for f in self.findings if f.known is None]

    def add(self, case: Case, result: CaseResult, seconds: Mapping[str, float], found: list[Finding]) -> None:
        """Count one case."""
        self.cases += 1
        self.elements += result.elements
        self.vacuous_elements += result.vacuous_elements
        self.verdicts[result.verdict] += 1
        if result.worst_ratio is not None:
            self.worst_ratio = max(result.worst_ratio, self.worst_ratio or 0.0)
        if result.verdict is Verdict.UNSUPPORTED:
            self.skipped[result.reason] += 1
        else:
            self.coverage.add(case)
        for phase, spent in seconds.items():
            self.seconds[phase if phase in PHASES else "other"] += spent
        self.findings += found


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How to run. ``modules`` are the user's own target modules; ``ledger`` is empty where it is ignored."""

    engine: Engine
    seed: int = 0
    jobs: int = 1
    modules: tuple[str, ...] = ()
    ledger: tuple[Defect, ...] = ()
    versions: Versions = field(default_factory=dict)
    timeout_s: float = CASE_TIMEOUT_S

    @property
    def defects(self) -> tuple[Defect, ...]:
        """Ledger entries that say something about this engine and these versions."""
        return tuple(d for d in self.ledger if d.applies(self.engine, self.versions))


def open_pool(settings: Settings) -> Pool:
    """Workers for these settings; use as a context manager."""
    job = Job(
        "fuzz.campaign.job:run",
        "fuzz.campaign.job:setup",
        {"engine": settings.engine.value, "modules": list(settings.modules), "threads": 1},
    )
    return Pool(job, settings.jobs, limits=Limits(memory_bytes=_memory_limit()))


def _memory_limit() -> int:
    return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * MEMORY_SHARE)


@dataclass(frozen=True)
class Outcome:
    """One case, judged. ``result`` holds CRASH and HANG as checks too.

    ``harness_error`` is one line where our own code failed and not the target; then nothing was judged.
    """

    target: str
    case: Case
    result: CaseResult
    seconds: Mapping[str, float]
    harness_error: str = ""


def outcome_of(target: str, case: Case, reply: Reply) -> Outcome:
    """Read a worker's reply."""
    if reply.ok and reply.value is not None:
        return Outcome(target, case, CaseResult.from_dict(reply.value), reply.seconds)
    if reply.harness or reply.status is Status.EXCEPTION:
        what = f"{reply.raised.type}: {reply.raised.message}" if reply.raised else reply.detail
        message = f"{target}, phase {reply.phase}: {what}"
        return Outcome(target, case, CaseResult(checks=(), reason="harness"), reply.seconds, message)
    hung = reply.status is Status.HANG
    evidence = {"phase": reply.phase, "signal": reply.signal_name, "output": reply.output[-2000:]}
    check = CheckResult(
        Check.HANG if hung else Check.CRASH, Verdict.HANG if hung else Verdict.CRASH, reply.detail, evidence
    )
    return Outcome(target, case, CaseResult(checks=(check,)), reply.seconds)


def run_cases(pool: Pool, requests: Iterator[tuple[str, Case]], settings: Settings) -> Iterator[Outcome]:
    """Judge (target, case) pairs in order."""
    asked: list[tuple[str, Case]] = []

    def ask() -> Iterator[dict[str, object]]:
        for target, case in requests:
            asked.append((target, case))
            yield {"target": target, "case": case.to_dict()}

    for index, reply in pool.map(ask(), settings.timeout_s):
        target, case = asked[index]
        yield outcome_of(target, case, reply)


@dataclass
class Campaign:
    """A search over targets: each gets its plan's cases until its number or the time is used up.

    ``cases`` is the number a target; ``time_s`` bounds the whole, shared fairly: the next case goes to the
    target that has had the least time. Without ``time_s`` the targets take turns, so that a run is a
    function of its seed.
    """

    targets: Sequence[Declaration]
    settings: Settings
    cases: int | None
    time_s: float | None
    budget: int = 600
    huge: bool = False
    on_outcome: Callable[[Outcome, list[Finding]], None] = lambda outcome, found: None
    summaries: dict[str, TargetSummary] = field(init=False)
    harness_errors: list[Outcome] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._plans = {t.name: self._plan(t) for t in self.targets}
        self.summaries = {t.name: TargetSummary(t, Coverage(self._plans[t.name].space)) for t in self.targets}

    def _plan(self, target: Declaration) -> Plan:
        return Plan(Space(target, self.budget, self.huge), self.settings.seed)

    def run(self, pool: Pool) -> None:
        """Run to the end of the budget. Ctrl-C passes through, and what was counted stays."""
        for outcome in run_cases(pool, self._requests(), self.settings):
            if outcome.harness_error:
                self.harness_errors.append(outcome)
                if len(self.harness_errors) == MOST_HARNESS_ERRORS:
                    return
                continue
            summary = self.summaries[outcome.target]
            found = findings_of(outcome.target, outcome.case, outcome.result, self.settings)
            summary.add(outcome.case, outcome.result, outcome.seconds, found)
            self.on_outcome(outcome, found)

    def _requests(self) -> Iterator[tuple[str, Case]]:
        deadline = None if self.time_s is None else time.monotonic() + self.time_s
        streams = {name: islice(plan, self.cases) for name, plan in self._plans.items()}
        asked = Counter(dict.fromkeys(streams, 0))
        while streams and (deadline is None or time.monotonic() < deadline):
            name = min(streams, key=lambda n: (self._spent(n), asked[n]))
            case = next(streams[name], None)
            if case is None:
                del streams[name]
                continue
            asked[name] += 1
            yield name, case

    def _spent(self, name: str) -> float:
        return 0.0 if self.time_s is None else sum(self.summaries[name].seconds.values())
