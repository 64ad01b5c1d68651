"""Many cases on many targets, each in a worker process, with everything that happened counted."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from fuzz.campaign.corpus import seen_of
from fuzz.campaign.finding import Finding, findings_of
from fuzz.campaign.groups import kernels_of
from fuzz.campaign.pool import Pool
from fuzz.campaign.reply import Reply, Status
from fuzz.campaign.rounds import WHOLE, Ask, Closed, Search, Shard
from fuzz.campaign.worker import Job, Limits, fair_memory_bytes
from fuzz.case import Case
from fuzz.check.diagnosis import class_of
from fuzz.check.result import CaseResult, Check, CheckResult
from fuzz.ledger import Defect, Versions
from fuzz.options import CASE_TIMEOUT_S
from fuzz.plan import Coverage, key_of
from fuzz.space import Space
from oracle.declare import Declaration
from oracle.kinds import Engine
from oracle.verdict import Verdict

PHASES = ("generate", "kernel", "oracle", "checks")

SAMPLED_EVERY = 4
"""Of so many cases, one says what its kernels reached."""

TURN = 8
"""Cases in a row that a target gets where its kernels are compiled: those of one round share some."""

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
    margins: dict[str, float] = field(default_factory=dict)
    """the worst ratio of each dtype of the queries and the cache"""
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
            dtypes = case.dtype if case.kv_dtype == case.dtype else f"{case.dtype}/{case.kv_dtype}"
            self.margins[dtypes] = max(result.worst_ratio, self.margins.get(dtypes, 0.0))
        if result.verdict is Verdict.UNSUPPORTED:
            self.skipped[result.reason] += 1
        else:
            self.coverage.add(case)
        for phase, spent in seconds.items():
            self.seconds[phase if phase in PHASES else "other"] += spent
        self.findings += found


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How to run. ``modules`` are the user's own target modules; ``coverage`` asks for what the kernels reached
    (emulator only). ``ledger`` tells known defects apart; ``excused``: they are known, and not reported as new.
    """

    engine: Engine
    seed: int = 0
    jobs: int = 1
    modules: tuple[str, ...] = ()
    ledger: tuple[Defect, ...] = ()
    excused: bool = True
    versions: Versions = field(default_factory=dict)
    timeout_s: float = CASE_TIMEOUT_S
    coverage: bool = False

    @property
    def defects(self) -> tuple[Defect, ...]:
        """Ledger entries that say something about this engine and these versions."""
        return tuple(d for d in self.ledger if d.applies(self.engine, self.versions))

    def explains(self, outcome: Outcome) -> bool:
        """Whether every failure of an outcome is known."""
        return self.excused and all(
            self.entry(outcome.target, f.check, outcome.diagnosis(f.check), outcome.case) is not None
            for f in outcome.result.failures
        )

    def entry(self, target: str, check: Check, diagnosis: str | None, case: Case) -> str | None:
        """The ledger's entry of a failure, by its id."""
        return next((d.id for d in self.defects if d.matches(target, check, diagnosis, case)), None)


def job_of(settings: Settings) -> Job:
    """What each worker runs."""
    return Job(
        "fuzz.campaign.job:run",
        "fuzz.campaign.job:setup",
        {"engine": settings.engine.value, "modules": list(settings.modules), "threads": 1},
    )


def open_pool(settings: Settings) -> Pool:
    """Workers for these settings; use as a context manager. Those of a GPU share what they compile."""
    limits = Limits(memory_bytes=fair_memory_bytes(settings.jobs))
    group = None if settings.engine is Engine.EMULATOR else kernels_of
    return Pool(job_of(settings), settings.jobs, limits=limits, group=group)


@dataclass(frozen=True)
class HarnessError:
    """A failure of our own code on a case: one line, and the traceback for whoever mends it."""

    target: str
    case: Case
    message: str
    traceback: str

    def to_dict(self) -> dict[str, object]:
        """Plain data."""
        return {
            "target": self.target,
            "message": self.message,
            "traceback": self.traceback,
            "case": self.case.to_dict(),
        }


@dataclass(frozen=True)
class Outcome:
    """One case, judged. ``result`` holds CRASH and HANG as checks too.

    ``harness`` says where our own code failed and not the target; then nothing was judged. ``fresh`` is False
    where the worker had run other cases before: what they corrupted may be to blame for a crash.
    """

    target: str
    case: Case
    result: CaseResult
    seconds: Mapping[str, float]
    harness: HarnessError | None = None
    fresh: bool = True

    def diagnosis(self, check: Check) -> str | None:
        """The class of a failed check's diagnosis, None where nothing was diagnosed."""
        return class_of(self.result.checks, check)


def outcome_of(target: str, case: Case, reply: Reply) -> Outcome:
    """Read a worker's reply."""
    if reply.ok and reply.value is not None:
        return Outcome(target, case, CaseResult.from_dict(reply.value), reply.seconds)
    if reply.harness or reply.status is Status.EXCEPTION:
        what = f"{reply.raised.type}: {reply.raised.message}" if reply.raised else reply.detail
        error = HarnessError(
            target,
            case,
            f"{target}, phase {reply.phase}: {what}",
            reply.raised.traceback if reply.raised else reply.output,
        )
        return Outcome(target, case, CaseResult(checks=(), reason="harness"), reply.seconds, error)
    hung = reply.status is Status.HANG
    evidence = {"phase": reply.phase, "signal": reply.signal_name, "output": reply.output[-2000:]}
    check = CheckResult(
        Check.HANG if hung else Check.CRASH, Verdict.HANG if hung else Verdict.CRASH, reply.detail, evidence
    )
    return Outcome(target, case, CaseResult(checks=(check,)), reply.seconds, fresh=reply.fresh)


@dataclass(frozen=True)
class Request:
    """A case to judge on a target; ``coverage`` asks for what its kernels reach (emulator only)."""

    target: str
    case: Case
    coverage: bool = False


def run_cases(pool: Pool, requests: Iterator[tuple[str, Case]], settings: Settings) -> Iterator[Outcome]:
    """Judge (target, case) pairs in order."""
    return judged(pool, (Request(*pair, settings.coverage) for pair in requests), settings)


def judged(pool: Pool, requests: Iterator[Request | None], settings: Settings) -> Iterator[Outcome]:
    """Judge requests in order; None stands for one that is known when more outcomes are (see ``Pool.map``).

    A crash of a worker that had run other cases is repeated in a fresh one, unless the ledger explains it: what
    counts is what the case does by itself. So is the end of a worker that somebody killed: a case that kills its own
    process will do it again.
    """
    asked: deque[Request] = deque()

    def ask() -> Iterator[dict[str, object] | None]:
        for request in requests:
            if request is not None:
                asked.append(request)
            yield None if request is None else _plain(request)

    for _, reply in pool.map(ask(), settings.timeout_s):
        request = asked.popleft()
        outcome = outcome_of(request.target, request.case, reply)
        killed = reply.status is Status.CRASH and reply.signal_name == "SIGKILL"
        again = killed or not (outcome.fresh or settings.explains(outcome))
        yield _alone(request, settings, pool) if again else outcome


def _plain(request: Request) -> dict[str, object]:
    return {"target": request.target, "case": request.case.to_dict(), "coverage": request.coverage}


def _alone(request: Request, settings: Settings, pool: Pool) -> Outcome:
    reply = pool.alone(_plain(request), settings.timeout_s, Limits(memory_bytes=fair_memory_bytes(1)))
    return outcome_of(request.target, request.case, reply)


@dataclass(frozen=True)
class Recorded:
    """A case of a search with all that came of it: what a store keeps.

    ``new`` is what its kernels reached that none had reached when the round began; ``closed`` is the round, if
    this was its last case.
    """

    ask: Ask
    outcome: Outcome
    found: tuple[Finding, ...]
    new: frozenset[str]
    closed: Closed | None


@dataclass
class Campaign:
    """A search over targets: each gets its cases until its number or the time is used up.

    ``cases`` is the number a target, over all shards; ``time_s`` bounds the whole, shared fairly: of the targets with
    pairs of features still to cover, then of all, the next case goes to that which has had the least time. Which cases
    a target gets, and in which order, depends on nothing but ``settings``, ``shard`` and what came of the target's
    cases before; the time says only how many.

    ``record`` hears of each case before it is counted, ``on_outcome`` after it.
    """

    targets: Sequence[Declaration]
    settings: Settings
    cases: int | None
    time_s: float | None
    most_tokens: int = 600
    huge: bool = False
    shard: Shard = WHOLE
    record: Callable[[Recorded], None] = lambda recorded: None
    on_outcome: Callable[[Outcome, list[Finding]], None] = lambda outcome, found: None
    summaries: dict[str, TargetSummary] = field(init=False)
    searches: dict[str, Search] = field(init=False)
    harness_errors: list[HarnessError] = field(default_factory=list)

    def __post_init__(self) -> None:
        spaces = {t.name: Space(t, self.most_tokens, self.huge) for t in self.targets}
        self.searches = {name: Search(space, self.settings.seed, self.shard) for name, space in spaces.items()}
        self.summaries = {t.name: TargetSummary(t, Coverage(spaces[t.name])) for t in self.targets}

    def run(self, pool: Pool) -> None:
        """Run to the end of the budget. Ctrl-C passes through, and what was counted stays."""
        out: deque[Ask] = deque()
        for outcome in judged(pool, self._requests(out), self.settings):
            self.take(out.popleft(), outcome)
            if len(self.harness_errors) >= MOST_HARNESS_ERRORS:
                return

    def take(self, ask: Ask, outcome: Outcome, reached: frozenset[str] = frozenset()) -> None:
        """What came of a case: to the search, to the record, to the count.

        ``reached`` is what a recorded outcome, which is without coverage, said of it.
        """
        search, seen = self.searches[ask.target], seen_of(outcome.result, reached)
        new = seen.reached - search.corpus.reached
        closed = search.note(ask, seen)
        found = self._findings(outcome)
        self.record(Recorded(ask, outcome, tuple(found), new, closed))
        self._count(outcome, found)
        self.on_outcome(outcome, found)

    def count(self, target: Declaration, outcome: Outcome) -> list[Finding]:
        """Add one outcome, of a case that no search asked for, to its target's summary. Returns its findings."""
        self.summaries.setdefault(target.name, TargetSummary(target, Coverage(Space(target))))
        found = self._findings(outcome)
        self._count(outcome, found)
        return found

    def _findings(self, outcome: Outcome) -> list[Finding]:
        if outcome.harness is not None:
            return []
        return findings_of(outcome.target, outcome.case, outcome.result, self.settings)

    def _count(self, outcome: Outcome, found: list[Finding]) -> None:
        if outcome.harness is not None:
            self.harness_errors.append(outcome.harness)
        else:
            self.summaries[outcome.target].add(outcome.case, outcome.result, outcome.seconds, found)

    def _requests(self, out: deque[Ask]) -> Iterator[Request | None]:
        """The cases to come; each goes to ``out`` as well. None where every search waits for results."""
        deadline = None if self.time_s is None else time.monotonic() + self.time_s
        asked = {name: summary.cases for name, summary in self.summaries.items()}
        most = 1 if self.settings.engine is Engine.EMULATOR else TURN
        name, left = "", 0
        while deadline is None or time.monotonic() < deadline:
            places = {name: search.place() for name, search in self.searches.items()}
            waiting = any(place is None for place in places.values())
            ready = [name for name, place in places.items() if place is not None and not self._is_enough(place)]
            if not ready:
                if not waiting:
                    return
                yield None
                continue
            if not left or name not in ready:
                name, left = min(ready, key=lambda n: (self._covered(n), self._spent(n), asked[n])), most
            left -= 1
            asked[name] += 1
            ask = self.searches[name].next()
            out.append(ask)
            yield Request(name, ask.case, self.settings.coverage or self._is_sampled(ask))

    def _is_sampled(self, ask: Ask) -> bool:
        """Whether to look at what the kernels reach: of one case in four, as it costs up to a quarter of a case.

        Which one of the four is drawn: a fixed one would be the plan's each time, or never.
        """
        four, place = divmod(self.shard.count(ask.round, ask.index), SAMPLED_EVERY)
        drawn = key_of(self.settings.seed, ask.target, four, "sampled") % SAMPLED_EVERY
        return self.settings.engine is Engine.EMULATOR and place == drawn

    def _is_enough(self, place: int) -> bool:
        return self.cases is not None and place >= self.cases

    def _covered(self, name: str) -> bool:
        return self.time_s is not None and self.searches[name].covered

    def _spent(self, name: str) -> float:
        return 0.0 if self.time_s is None else sum(self.summaries[name].seconds.values())
