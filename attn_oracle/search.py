"""Search for a case on which a target is wrong: Hypothesis chooses, a process of ours judges and makes it smaller."""

from __future__ import annotations

import json
import time as clock
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase, Verbosity, given, settings, strategies

from attn_oracle import current
from attn_oracle.current import Record
from attn_oracle.drawn import DrawnCase, drawn, opened, skip
from attn_oracle.options import DEFAULT_CASES, MARKER, OptionError, Options, parse
from attn_oracle.process import Unavailable, UsageError, shared
from attn_oracle.target import Named, Target, named
from oracle.failure import AttentionMismatch, mismatch_type
from oracle.failure.words import count

SHRINK_S = 30.0
"""Seconds for making a failing case smaller."""
MORE = 20
"""Cases judged after one whose failure may be read in several ways, in search of one that may not."""
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

    target: a declared function, or the name of a target of ours, of an entry point, of `modules` (names, or .py
    files) or, without these, of a module that was imported here; may be left out where the marker names it. cases:
    how many (default 50), or time: how long ("30s"). seed: what the cases are a function of, with `cases` (default
    0). engine: auto, emulator, cuda, hip. Options of the command line take the place of these.
    Returns what was judged. Raises a subclass of `oracle.failure.AttentionMismatch`, UsageError for a target that
    cannot be had, HarnessError; skips the test where the target cannot run here, or every case is unsupported.
    """
    __tracebackhide__ = True
    given_here = {"cases": cases, "time": time, "seed": seed, "engine": engine, "modules": modules}
    try:
        call = Options(**{n: parse(f"check: {n}", n, value) for n, value in given_here.items() if value is not None})
        return _checked(target, call)
    except (AttentionMismatch, UsageError, OptionError) as said:
        raise said.with_traceback(None) from None  # the text says it all


def _checked(target: Target | None, call: Options) -> Record:
    chosen = current.options(call)
    target = target if target is not None else chosen.target
    if target is None:
        raise UsageError(f"check: no target; give one, or mark the test: the marker takes {', '.join(MARKER)}")
    asked = current.engine(call)
    current.check_out()
    try:
        own = opened(named(target, chosen.modules), asked)
        record = Record(own.name, own.runs_on, chosen.seed or 0)
        current.records.append(record)
        failed = _replay(own, record, chosen, asked) if chosen.replay else _search(own, record, chosen, asked)
    except Unavailable as reason:
        skip(target, reason)
    if failed is not None:
        raise failed
    if record.cases and set(record.verdicts) == {"unsupported"}:
        pytest.skip(f"{own.name}: all of {record.cases} cases are unsupported")
    return record


def judge(case: DrawnCase) -> None:
    """Judge one drawn case. Raises a subclass of `oracle.failure.AttentionMismatch` if the target is wrong on it.

    For a test with `@given(case=attn_oracle.cases(...))`. A case that the target does not support is rejected.
    """
    __tracebackhide__ = True
    engine = current.engine()
    record = next((r for r in current.records if (r.target, r.engine) == (case.target, case.named.runs_on)), None)
    if record is None:
        record = Record(case.target, case.named.runs_on)
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


def _fail(case: DrawnCase, judged: dict[str, Any], record: Record, engine: str, tried: str = "") -> NoReturn:
    """Keep the finding and raise the type of its class, always from this line: Hypothesis goes by type and line."""
    __tracebackhide__ = True
    kind = mismatch_type(judged["check"], judged["diagnosis"])
    path = current.path_of(judged["finding"])
    replay = case.named.replay(path, engine)
    lines = [judged["text"], *([f"  {'smallest':<11}{tried}"] if tried else []), f"  {'replay':<11}{replay}"]
    kept = {
        "finding": judged["finding"],
        "case": case.words,
        "path": str(path),
        "replay": replay,
        "text": "\n".join(lines),
    }
    current.keep(record, kind.__name__, kept)
    if "unwritten" in kept:
        lines[-1] = f"  {'not kept':<11}{kept['unwritten']}"
    raise kind("\n".join(lines), {**judged["finding"]["evidence"], "case": dict(case.data)})


@dataclass
class _Search:
    """One search, until when it may ask for judgements, and what it has found."""

    record: Record
    engine: str
    until: float | None
    failed: tuple[DrawnCase, dict[str, Any]] | None = None
    """the failing case whose diagnosis may be read in the fewest ways, and its judgement"""
    more: int = MORE

    def judge(self, case: DrawnCase) -> None:
        """Raise where there is no need of further cases: a case fails, and in one way only, or all are used up."""
        __tracebackhide__ = True
        late = self.until is not None and clock.monotonic() > self.until
        if (late or self.more <= 0) and json.dumps(case.data, sort_keys=True) not in self.record.seen:
            return
        self.more -= self.failed is not None
        judged = _judged(case, self.record)
        if "finding" not in judged:
            return
        if self.failed is None or judged["ways"] < self.failed[1]["ways"]:
            self.failed = case, judged
        if judged["ways"] <= 1:
            _fail(case, judged, self.record, self.engine)

    def smallest(self) -> None:
        """Raise for the smallest case that fails in the same way."""
        __tracebackhide__ = True
        assert self.failed is not None
        case, judged = self.failed
        found = shared().ask(
            "minimise",
            target=case.target,
            case=dict(case.data),
            finding=judged["finding"],
            time=SHRINK_S,
        )
        if "finding" in found:
            case, judged = DrawnCase(case.target, found["words"], found["case"], case.named), found
        end = "no single reduction keeps the fault" if found["complete"] else "the time was up: it may be smaller yet"
        _fail(case, judged, self.record, self.engine, f"of {count(found['tried'], 'case')} tried; {end}")


def _search(own: Named, record: Record, chosen: Options, engine: str) -> AttentionMismatch | None:
    """The smallest failure that was found, None if there was none."""
    until = None if chosen.time is None else clock.monotonic() + chosen.time
    search = _Search(record, engine, until)
    number = ROUND if until is not None else chosen.cases or DEFAULT_CASES
    seed = chosen.seed or 0
    while True:
        _round(own, search, number, seed)
        if search.failed is not None:
            current.forget(record)
            return _raised(search.smallest)
        if until is None or clock.monotonic() > until:
            return None
        seed += 1


def _round(own: Named, search: _Search, number: int, seed: int) -> None:
    """Judge cases until one fails clearly enough; the search then holds it."""

    @strategies.composite
    def own_cases(draw: strategies.DrawFn) -> DrawnCase:
        return drawn(draw, own)

    @hypothesis.seed(seed)
    @settings(
        max_examples=number,
        phases=(Phase.generate,),
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

    _raised(one)


def _raised(run: Callable[[], None]) -> AttentionMismatch | None:
    try:
        run()
    except AttentionMismatch as failed:
        return failed
    return None


def _replay(own: Named, record: Record, chosen: Options, engine: str) -> AttentionMismatch | None:
    """Judge the cases of findings of this target, and nothing else."""
    found = shared().ask("findings", path=str(Path(chosen.replay or "")))["findings"]
    mine = [one for one in found if one["target"] == own.name]
    if not mine:
        pytest.skip(f"{own.name}: no finding of it in {chosen.replay}")
    for one in mine:
        case = DrawnCase(own.name, one["words"], one["case"], own)
        judged = _judged(case, record)
        if "finding" in judged:
            return _raised(partial(_fail, case, judged, record, engine))
    return None
