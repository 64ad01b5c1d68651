"""The smallest case that still shows a fault: greedy, over reductions of the case, to a fixed point.

Whether a case shows the fault is asked of a judge, many cases at a time, so that a pool of workers is used. The first
candidate that shows it, in the candidates' order, is taken: the way, and so the result, depends neither on the number
of workers nor on their speed; a limit of time alone can end it earlier.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum

from fuzz.campaign.finding import Finding, findings_of
from fuzz.campaign.pool import Pool
from fuzz.campaign.reductions import REDUCTIONS, Reducer, weight
from fuzz.campaign.run import HarnessError, Settings, run_cases
from fuzz.case import Case
from fuzz.check.result import Check
from fuzz.report.summary import distinct
from fuzz.space import Space
from oracle.declare import Declaration

Judge = Callable[[Sequence[Case]], Sequence[bool]]
"""Whether each of some cases shows the fault."""

FINDING_TIME_S = 60.0
"""For one finding, if nothing else is said."""

MOST_REQUESTS, MOST_TOKENS = 2, 64
"""The size at which a case can be read: the smallest should have no more, where the fault allows."""

Judged = dict[tuple[str, Case], list[Finding]]
"""What cases of targets showed: findings of one target often ask about the same cases."""


@dataclass(frozen=True)
class Minimised:
    """What became of a case. ``judged``: cases that were asked about; ``complete``: no reduction keeps the fault."""

    case: Case
    judged: int
    complete: bool


@dataclass
class _Search:
    """A case on its way down, and what is known of those that were asked about."""

    reducer: Reducer
    judge: Judge
    case: Case
    batch: int
    most: int | None
    expired: Callable[[], bool]
    enough: Callable[[Case], bool]
    known: dict[Case, bool] = field(default_factory=dict)
    consulted: set[Case] = field(default_factory=set)
    stopped: bool = False

    def run(self) -> Minimised:
        changed = True
        while changed and not self.stopped:
            changed = False
            for name in REDUCTIONS:
                while self._reduce(name):
                    changed = True
        return Minimised(self.case, len(self.consulted), not self.stopped)

    def take(self, candidates: Sequence[Case]) -> bool:
        """Whether any of ``candidates`` shows the fault; the first that does becomes the case."""
        start, size = 0, self.batch
        while start < len(candidates):
            self.stopped = self.stopped or self.enough(self.case)
            if self.stopped:
                return False
            part = candidates[start : start + size]
            # What follows the first that shows it is judged for nothing: few are asked about until some do not.
            start, size = start + size, 2 * self.batch
            self._ask(part)
            for candidate in part:
                if candidate not in self.consulted:
                    if len(self.consulted) == self.most:
                        self.stopped = True
                        return False
                    self.consulted.add(candidate)
                if self.known[candidate]:
                    self.case = candidate
                    return True
            self.stopped = self.expired()
        return False

    def _reduce(self, name: str) -> bool:
        return not self.stopped and self.take(self.reducer.of(name, self.case))

    def _ask(self, cases: Sequence[Case]) -> None:
        unknown = [case for case in cases if case not in self.known]
        if unknown:
            self.known |= zip(unknown, self.judge(unknown), strict=True)


def minimise(
    declaration: Declaration,
    case: Case,
    judge: Judge,
    *,
    batch: int = 1,
    most: int | None = None,
    expired: Callable[[], bool] = lambda: False,
    enough: Callable[[Case], bool] = lambda case: False,
    smaller: Sequence[Case] = (),
) -> Minimised:
    """The smallest case that ``judge`` calls a fault, on the way down from ``case``, which shows it.

    ``batch``: how many cases are asked about at first, then twice as many at a time; ``most``: how many in all;
    ``expired``: whether to stop, asked after each batch; ``enough``: whether a case is small enough to stop at;
    ``smaller``: cases worth trying first. Every case asked about lies in what is declared.
    """
    reducer = Reducer(declaration)
    search = _Search(reducer, judge, case, batch, most, expired, enough)
    own = _weight(declaration, case)
    search.take(sorted((c for c in smaller if _weight(declaration, c) < own), key=lambda c: _weight(declaration, c)))
    return search.run()


def _weight(declaration: Declaration, case: Case) -> tuple[int, ...]:
    return weight(case, Space(declaration, huge=True))


# ---------------------------------------------------------------------------- findings


@dataclass
class FindingJudge:
    """Runs cases in a pool: does a finding show again, as ``shows`` says?

    ``shown`` keeps the finding of every case that shows it; ``errors`` the failures of our own code: they show nothing;
    ``judged`` what is known of cases from before.
    """

    finding: Finding
    pool: Pool
    settings: Settings
    judged: Judged = field(default_factory=dict)
    shown: dict[Case, Finding] = field(default_factory=dict)
    errors: list[HarnessError] = field(default_factory=list)

    def __call__(self, cases: Sequence[Case]) -> list[bool]:
        """Judge the cases."""
        target = self.finding.target
        self._run([case for case in cases if (target, case) not in self.judged])
        for case in cases:
            for found in self.judged.get((target, case), ()):
                if shows(found, self.finding, self.settings):
                    self.shown[case] = replace(
                        found, known=self.finding.known, entry=self.finding.entry, modules=self.finding.modules
                    )
        return [case in self.shown for case in cases]

    def _run(self, cases: Sequence[Case]) -> None:
        requests = iter([(self.finding.target, case) for case in cases])
        for outcome in run_cases(self.pool, requests, self.settings):
            if outcome.harness is not None:
                self.errors.append(outcome.harness)
                continue
            found = findings_of(outcome.target, outcome.case, outcome.result, self.settings)
            self.judged[outcome.target, outcome.case] = found


def shows(found: Finding, like: Finding, settings: Settings) -> bool:
    """Whether a finding shows the fault of another: same check, diagnosis, exception and ledger entry, and as clearly.

    Clearly: no more explanations of the diagnosed class fit. Over two keys, windows of two, of three and none at all
    look the same. The entry is that of the settings' ledger, whether or not it explained the finding when it was found:
    so a search that ignores the ledger keeps its faults apart, too.
    """
    return _fault(found, settings) == _fault(like, settings) and found.ways <= like.ways


def _fault(found: Finding, settings: Settings) -> tuple[str | None, ...]:
    entry = settings.entry(found.target, found.check, found.diagnosis, found.case)
    return found.target, found.check, found.diagnosis, entry, *found.raised


@dataclass(frozen=True)
class Smaller:
    """A finding before and after. ``after`` has the case of ``before`` where nothing smaller shows it."""

    before: Finding
    after: Finding
    judged: int
    complete: bool
    """no reduction keeps the fault; else the time was up"""

    def lines(self) -> list[str]:
        """What was removed, one line a field, and whether that is all."""
        found = [f"{name}: {old} -> {new}" for name, old, new in changes(self.before.case, self.after.case)]
        end = "no single reduction keeps the fault" if self.complete else "the time was up: it may be smaller yet"
        return [*(found or ["nothing could be removed"]), f"{self.judged} cases judged; {end}"]


def changes(before: Case, after: Case) -> list[tuple[str, str, str]]:
    """Field, old and new value of what differs."""
    pairs = [(f.name, getattr(before, f.name), getattr(after, f.name)) for f in fields(Case)]
    return [(name, _shown(old), _shown(new)) for name, old, new in pairs if old != new]


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    return value.value if isinstance(value, StrEnum) else str(value)


def minimise_finding(
    finding: Finding,
    declaration: Declaration,
    pool: Pool,
    settings: Settings,
    *,
    time_s: float | None = FINDING_TIME_S,
    most: int | None = None,
    enough: Callable[[Case], bool] = lambda case: False,
    smaller: Sequence[Case] = (),
    judged: Judged | None = None,
) -> Smaller:
    """The same fault on the smallest case found within ``time_s``, or ``most`` cases: see ``minimise``.

    A candidate that takes longer than the whole time hangs, unless hanging is what is looked for. ``judged``: what is
    known of cases; it is added to.
    """
    if time_s is not None and finding.check is not Check.HANG:
        settings = replace(settings, timeout_s=min(settings.timeout_s, max(time_s, 1.0)))
    # How long a case may take differs: what was said to hang need not.
    judge = FindingJudge(finding, pool, settings, {} if judged is None or finding.check is Check.HANG else judged)
    deadline = None if time_s is None else time.monotonic() + time_s
    found = minimise(
        declaration,
        finding.case,
        judge,
        batch=settings.jobs,
        most=most,
        expired=lambda: deadline is not None and time.monotonic() >= deadline,
        enough=enough,
        smaller=smaller,
    )
    after = judge.shown.get(found.case, finding)
    made_from = finding.made_from if after.id == finding.id else finding.id
    after = replace(after, made_from=made_from, smallest=found.complete)
    return Smaller(finding, after, found.judged, found.complete)


def readable(case: Case) -> bool:
    """Whether a case is as small as one should be that people are to read."""
    return len(case.context_lens) <= MOST_REQUESTS and sum(case.context_lens) <= MOST_TOKENS


def _one_of_each_first(findings: Sequence[Finding]) -> list[list[Finding]]:
    """The smallest of each known defect, on all its targets, or diagnosis of a target; then all others, in turns."""
    seen: Counter[tuple[str | None, ...]] = Counter()
    placed = []
    for finding in sorted(findings, key=lambda f: (f.size, f.id)):
        entry = finding.known or finding.entry
        cause = (entry,) if entry else (finding.target, finding.diagnosis)
        placed.append((seen[cause], finding))
        seen[cause] += 1
    placed.sort(key=lambda pair: pair[0])
    return [[f for place, f in placed if not place], [f for place, f in placed if place]]


@dataclass
class _Several:
    """Findings on their way down, one after the other, and what was learnt from those before."""

    pool: Pool
    settings: Settings
    declarations: Mapping[str, Declaration]
    deadline: float | None
    each_s: float
    most: int | None
    judged: Judged = field(default_factory=dict)
    results: dict[str, Smaller] = field(default_factory=dict)
    """by the id of the finding that it began with"""

    def take(self, findings: Sequence[Finding], enough: Callable[[Case], bool]) -> Iterator[Smaller]:
        """Make each smaller, from where it is; each has what time is left over those that are left."""
        for place, finding in enumerate(findings):
            share = None if self.deadline is None else (self.deadline - time.monotonic()) / (len(findings) - place)
            if share is not None and share <= 0:
                return
            so_far = self.results.get(finding.id, Smaller(finding, finding, 0, False))
            if so_far.complete or enough(so_far.after.case) or so_far.judged == self.most:
                continue
            self.results[finding.id] = found = self._further(so_far, share, enough)
            yield found

    def _further(self, so_far: Smaller, share: float | None, enough: Callable[[Case], bool]) -> Smaller:
        now = so_far.after
        others = (r.after.case for r in self.results.values() if r.after.target == now.target)
        found = minimise_finding(
            now,
            self.declarations[now.target],
            self.pool,
            self.settings,
            time_s=None if share is None else min(self.each_s, share),
            most=None if self.most is None else self.most - so_far.judged,
            enough=enough,
            smaller=list(dict.fromkeys(others)),
            judged=self.judged,
        )
        first, after = so_far.before, found.after
        if after.id != first.id:
            after = replace(after, made_from=first.id)
        return Smaller(first, after, so_far.judged + found.judged, found.complete)


def minimise_findings(
    findings: Iterable[Finding],
    declarations: Iterable[Declaration],
    pool: Pool,
    settings: Settings,
    time_s: float | None,
    *,
    each_s: float = FINDING_TIME_S,
    most: int | None = None,
    done: Callable[[Smaller], None] = lambda smaller: None,
) -> list[Smaller]:
    """One smaller finding for each fault that can be told apart. ``done`` hears of each step at once.

    First one of each known defect or diagnosis is brought to a size that can be read, then its other checks and
    targets, then all are made as small as they can be: little time gives every fault a case for people.

    ``time_s`` is shared: each has what is left over those that are left in its turn, at most ``each_s``; None: there is
    no limit of time. The smallest cases of a target so far are tried first for its other findings. Settings with the
    ledger keep known defects apart, whether or not they are excused.
    """
    known = {d.name: d for d in declarations}
    first, others = _one_of_each_first([f for f in distinct(list(findings)) if f.target in known])
    deadline = None if time_s is None else time.monotonic() + time_s
    several = _Several(pool, settings, known, deadline, each_s, most)
    for group, enough in ((first, readable), (others, readable), ([*first, *others], lambda case: False)):
        for found in several.take(group, enough):
            done(found)
    return list(several.results.values())
