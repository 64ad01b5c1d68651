"""Search for a case on which a target is wrong, and shrink it: Hypothesis chooses, a process of ours judges."""

from __future__ import annotations

import json
import time as clock
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase, Verbosity, given, settings, strategies

from attn_oracle import current
from attn_oracle.current import Record
from attn_oracle.drawn import DrawnCase, drawn, opened
from attn_oracle.options import DEFAULT_CASES, MARKER, Options, parse
from attn_oracle.process import Unavailable, UsageError, shared
from attn_oracle.target import Named, Target, named
from oracle.failure import AttentionMismatch, mismatch_type

SHRINK_S = 60.0
"""Seconds for making a failing case smaller; what was not judged by then is taken to pass."""
SHRINK_CASES = 300
ROUND = 20
"""Cases of one round of a search that has a time and no number."""


def check(
    target: Target | None = None,
    *,
    cases: int | None = None,
    time: str | float | None = None,
    seed: int | None = None,
    engine: str | None = None,
    modules: list[str] | None = None,
) -> Record:
    """Judge a target on drawn cases; raise the text of the smallest failing one.

    target: a declared function, or the name of a target of ours, of an entry point or of `modules` (names, or .py
    files); may be left out where the marker names it. cases: how many (default 50), or time: how long ("30s"). seed:
    what the cases are a function of, with `cases` (default 0). engine: auto, emulator, cuda, hip. Options of the
    command line take the place of these.
    Returns what was judged. Raises a subclass of `oracle.failure.AttentionMismatch`, UsageError for a target that
    cannot be had, HarnessError; skips the test where the target cannot run here, or every case is unsupported.
    """
    __tracebackhide__ = True
    given_here = {"cases": cases, "time": time, "seed": seed, "engine": engine, "modules": modules}
    call = Options(**{n: parse(f"check: {n}", n, value) for n, value in given_here.items() if value is not None})
    chosen = current.options(call)
    target = target if target is not None else chosen.target
    if target is None:
        raise UsageError(f"check: no target; give one, or mark the test: the marker takes {', '.join(MARKER)}")
    try:
        own = opened(named(target, chosen.modules), chosen.engine)
        record = Record(own.name, chosen.engine or "auto", chosen.seed or 0)
        current.records.append(record)
        failed = _replay(own, record, chosen) if chosen.replay else _search(own, record, chosen)
    except Unavailable as reason:
        pytest.skip(f"{target if isinstance(target, str) else getattr(target, '__name__', target)}: {reason}")
    if failed is not None:
        raise type(failed)(str(failed), failed.evidence) from None
    if record.cases and set(record.verdicts) == {"unsupported"}:
        pytest.skip(f"{own.name}: all of {record.cases} cases are unsupported")
    return record


def judge(case: DrawnCase) -> None:
    """Judge one drawn case. Raises a subclass of `oracle.failure.AttentionMismatch` if the target is wrong on it.

    For a test with `@given(case=attn_oracle.cases(...))`. A case that the target does not support is rejected.
    """
    __tracebackhide__ = True
    engine = current.options().engine or "auto"
    record = next((r for r in current.records if r.target == case.target), None)
    if record is None:
        record = Record(case.target, engine)
        current.records.append(record)
    judged = _judged(case, record)
    if judged["verdict"] == "unsupported":
        hypothesis.reject()
    if "finding" in judged:
        _fail(case, judged, record, engine)


def _judged(case: DrawnCase, record: Record) -> dict[str, Any]:
    """The judgement of a case, asked for and counted once: shrinking comes back to what it has seen."""
    key = json.dumps(case.data, sort_keys=True)
    if key not in record.seen:
        record.seen[key] = shared().ask("judge", target=case.target, case=dict(case.data))
        record.count(record.seen[key])
    return record.seen[key]


def _fail(case: DrawnCase, judged: dict[str, Any], record: Record, engine: str) -> NoReturn:
    """Keep the finding and raise the type of its class, always from this line: Hypothesis goes by type and line."""
    __tracebackhide__ = True
    kind = mismatch_type(judged["check"], judged["diagnosis"])
    path = current.path_of(judged["finding"])
    replay = case.named.replay(path, engine)
    text = f"{judged['text']}\n  {'replay':<11}{replay}"
    record.findings[kind.__name__] = {
        "finding": judged["finding"],
        "case": case.words,
        "path": str(path),
        "replay": replay,
        "text": text,
    }
    raise kind(text, {**judged["finding"]["evidence"], "case": dict(case.data)})


@dataclass
class _Search:
    """How far one search may go."""

    record: Record
    engine: str
    until: float | None
    shrinks: int = 0
    shrink_until: float | None = None

    def judge(self, case: DrawnCase) -> None:
        """Raise if the case fails; nothing once what the search may use is used up."""
        __tracebackhide__ = True
        if json.dumps(case.data, sort_keys=True) not in self.record.seen and self._spent():
            return
        judged = _judged(case, self.record)
        if "finding" in judged:
            if self.shrink_until is None:
                self.shrink_until = clock.monotonic() + SHRINK_S
            _fail(case, judged, self.record, self.engine)

    def _spent(self) -> bool:
        if self.shrink_until is None:
            return self.until is not None and clock.monotonic() > self.until
        self.shrinks += 1
        return self.shrinks > SHRINK_CASES or clock.monotonic() > self.shrink_until


def _search(own: Named, record: Record, chosen: Options) -> AttentionMismatch | None:
    """The smallest failure that was found, None if there was none."""
    until = None if chosen.time is None else clock.monotonic() + chosen.time
    search = _Search(record, chosen.engine or "auto", until)
    number = ROUND if until is not None else chosen.cases or DEFAULT_CASES
    seed = chosen.seed or 0
    while True:
        failed = _round(own, search, number, seed)
        if failed is not None:
            record.findings = {type(failed).__name__: record.findings[type(failed).__name__]}
            return failed
        if until is None or clock.monotonic() > until:
            return None
        seed += 1


def _round(own: Named, search: _Search, number: int, seed: int) -> AttentionMismatch | None:
    @strategies.composite
    def own_cases(draw: strategies.DrawFn) -> DrawnCase:
        return drawn(draw, own)

    @hypothesis.seed(seed)
    @settings(
        max_examples=number,
        phases=(Phase.generate, Phase.shrink),
        database=None,
        deadline=None,
        derandomize=False,
        print_blob=False,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        verbosity=Verbosity.quiet,
    )
    @given(case=own_cases())
    def one(case: DrawnCase) -> None:
        search.judge(case)

    try:
        one()
    except AttentionMismatch as failed:
        return failed
    return None


def _replay(own: Named, record: Record, chosen: Options) -> AttentionMismatch | None:
    """Judge the cases of findings of this target, and nothing else."""
    found = shared().ask("findings", path=str(Path(chosen.replay or "")))["findings"]
    mine = [one for one in found if one["target"] == own.name]
    if not mine:
        pytest.skip(f"{own.name}: no finding of it in {chosen.replay}")
    search = _Search(record, chosen.engine or "auto", None)
    for one in mine:
        try:
            search.judge(DrawnCase(own.name, one["words"], one["case"], own))
        except AttentionMismatch as failed:
            return failed
    return None
