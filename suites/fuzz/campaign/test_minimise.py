"""The minimiser: its result shows the fault, nothing one step simpler does, and the way there is always the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuzz import registry
from fuzz.campaign.finding import Finding, findings_of
from fuzz.campaign.journal import made_smaller
from fuzz.campaign.minimise import (
    Minimised,
    _one_of_each_first,
    minimise,
    minimise_finding,
    minimise_findings,
    readable,
    shows,
)
from fuzz.campaign.pool import Pool as Workers
from fuzz.campaign.reductions import Reducer, weight
from fuzz.campaign.run import Outcome, Settings, open_pool, run_cases
from fuzz.campaign.store import FindingRow, Key
from fuzz.case import Case, Pool, Probe
from fuzz.check.result import Check
from fuzz.features import labels
from fuzz.report.keep import Keeper
from fuzz.report.summary import distinct
from fuzz.space import Space
from fuzz.strategies import cases
from fuzz.support import unsupported
from oracle.declare import Declaration, declaration_of
from oracle.kinds import Engine
from oracle.verdict import Verdict
from suites.fuzz import planted
from suites.fuzz.cases import extend_case, gather_case

TARGETS = list(registry.load().values())
HOW = Settings(engine=Engine.EMULATOR, jobs=2, modules=("suites.fuzz.planted",))
some_targets = pytest.mark.parametrize("target", TARGETS[::7], ids=lambda t: t.name)

Predicate = Callable[[Case], bool]


class Judge:
    """A judge that keeps what it was asked."""

    def __init__(self, fails: Predicate) -> None:
        self.fails = fails
        self.asked: list[Case] = []

    def __call__(self, cases: Sequence[Case]) -> list[bool]:
        self.asked += cases
        return [self.fails(case) for case in cases]


def still_failing(declaration: Declaration, case: Case, fails: Predicate) -> list[Case]:
    """What is one step simpler than ``case`` and fails too: nothing, if it is minimal."""
    return [simpler for simpler in Reducer(declaration).candidates(case) if fails(simpler)]


@st.composite
def predicates(draw: st.DrawFn, case: Case) -> Predicate:
    """A fault that ``case`` shows: some of its labels, and at least so many requests, keys and queries."""
    wanted = draw(st.sets(st.sampled_from(sorted(labels(case))), max_size=3))
    requests = draw(st.integers(0, min(2, len(case.context_lens))))
    longest, queries = max(case.context_lens, default=0), max(case.query_lens, default=0)
    keys, rows = draw(st.integers(0, longest)), draw(st.integers(0, queries))

    def fails(other: Case) -> bool:
        return (
            wanted <= labels(other)
            and len(other.context_lens) >= requests
            and max(other.context_lens, default=0) >= keys
            and max(other.query_lens, default=0) >= rows
        )

    return fails


@some_targets
@given(data=st.data())
@settings(max_examples=15)
def test_the_result_fails_and_is_minimal_and_stays_as_it_is(target: Declaration, data: st.DataObject) -> None:
    case = data.draw(cases(Space(target)))
    fails = data.draw(predicates(case))
    found = minimise(target, case, Judge(fails))
    assert found.complete
    assert fails(found.case)
    assert still_failing(target, found.case, fails) == []
    again = minimise(target, found.case, Judge(fails))
    assert again.case == found.case


@some_targets
@given(data=st.data())
@settings(max_examples=15)
def test_every_case_asked_about_can_be_run_and_is_simpler(target: Declaration, data: st.DataObject) -> None:
    case = data.draw(cases(Space(target)))
    judge = Judge(data.draw(predicates(case)))
    minimise(target, case, judge)
    space = Space(target)
    assert all(unsupported(target, asked) is None for asked in judge.asked)
    assert all(weight(asked, space) < weight(case, space) for asked in judge.asked)
    assert all(
        0 < q <= n or n == 0
        for asked in judge.asked
        for q, n in zip(asked.query_lens, asked.context_lens, strict=False)
    )
    assert len(set(judge.asked)) == len(judge.asked)


@some_targets
@given(data=st.data(), batch=st.integers(2, 9), most=st.none() | st.integers(0, 40))
@settings(max_examples=15)
def test_the_way_does_not_depend_on_the_number_of_workers(
    target: Declaration, data: st.DataObject, batch: int, most: int | None
) -> None:
    case = data.draw(cases(Space(target)))
    fails = data.draw(predicates(case))
    assert minimise(target, case, Judge(fails), batch=batch, most=most) == minimise(
        target, case, Judge(fails), most=most
    )


def test_what_is_not_minimal_is_told() -> None:
    declaration = declared(planted.extend_window)
    case = extend_case(context_lens=[17, 9], query_lens=[17, 9], window=4, index_dtype="int32")
    assert still_failing(declaration, case, lambda other: other.window is not None)


def test_a_fault_of_a_window_and_its_context() -> None:
    declaration = declared(planted.extend_window)
    case = extend_case(
        context_lens=[33, 57, 4], query_lens=[1, 31, 4], window=19, strided=True, probe="ramp", index_dtype="int32"
    )
    fails = lambda c: c.window is not None and any(n > c.window for n in c.context_lens)  # noqa: E731
    found = minimise(declaration, case, Judge(fails)).case
    assert (found.context_lens, found.query_lens, found.window) == ((2,), (1,), 1)
    assert (found.strided, found.probe) == (False, Probe.NORMAL)


def test_a_fault_that_needs_two_requests_keeps_two() -> None:
    declaration = declared(planted.gather_values)
    case = gather_case(context_lens=[17, 40, 3, 22, 5], dtype="uint8", kv_dtype="uint8", probe="bytes")
    found = minimise(declaration, case, Judge(lambda c: sum(n > 4 for n in c.context_lens) > 1)).case
    assert found.context_lens == (5, 5)
    assert (found.kv_dtype, found.pool, found.page_size) == ("bf16", Pool.TIGHT, 16)


def test_a_limit_ends_the_search() -> None:
    declaration, case = declared(planted.gather_values), gather_case(context_lens=[17, 40, 3])
    judge = Judge(lambda c: True)
    assert minimise(declaration, case, judge, most=0) == Minimised(case, 0, False)
    judge = Judge(lambda c: False)
    found = minimise(declaration, case, judge, expired=lambda: len(judge.asked) >= 4, batch=2)
    # Two, then four at once.
    assert (found.case, len(judge.asked), found.complete) == (case, 6, False)


def test_a_case_that_is_small_enough_is_where_it_stops() -> None:
    declaration, case = declared(planted.gather_values), gather_case(context_lens=[17, 40, 3, 90])
    fails = lambda c: any(n > 10 for n in c.context_lens)  # noqa: E731
    found = minimise(declaration, case, Judge(fails), enough=readable)
    assert not found.complete
    assert readable(found.case)
    assert fails(found.case)
    assert minimise(declaration, found.case, Judge(fails), enough=readable).judged == 0
    assert minimise(declaration, found.case, Judge(fails)).case.context_lens == (11,)


def test_a_smaller_case_that_fails_too_is_where_it_starts() -> None:
    declaration, case = declared(planted.gather_values), gather_case(context_lens=[17, 40, 3])
    small = gather_case(context_lens=[1])
    judge = Judge(lambda c: bool(c.context_lens) and c.context_lens[0] > 0)
    minimise(declaration, case, judge, smaller=[small])
    assert judge.asked[0] == small


# -------------------------------------------------------------- what counts as the same fault


def finding(*kinds: str, check: Check = Check.VALUES) -> Finding:
    """A finding with the best explanation's class, and those of the others that fit."""
    evidence: dict[str, Any] = {}
    if kinds:
        evidence = {"diagnosis": {"kind": kinds[0], "runners_up": [{"kind": kind} for kind in kinds[1:]]}}
    return Finding(
        target="planted.extend.window",
        check=check,
        verdict=Verdict.FAIL,
        message="planted",
        evidence=evidence,
        diagnosis=kinds[0] if kinds else None,
        worst_ratio=2.0,
        engine=Engine.EMULATOR,
        versions={},
        known=None,
        case=extend_case(),
    )


def test_ways_are_explanations_of_the_diagnosed_class() -> None:
    assert finding().ways == 0
    assert finding("unexplained").ways == 1
    assert finding("window", "extra_key").ways == 1
    assert finding("window", "window", "extra_key", "window").ways == 3


def crashed(exception: str, where: str, **changes: Any) -> Finding:
    """What a kernel raised on a case."""
    evidence = {"exception": exception, "where": where}
    return replace(finding(check=Check.CRASH), evidence=evidence, case=extend_case(**changes))


def test_what_is_raised_on_one_line_is_one_fault_whatever_the_operands() -> None:
    first = crashed("ValueError", "kernel.py, line 7, in run")
    other = crashed("ValueError", "kernel.py, line 7, in run", dtype="bf16", kv_dtype="bf16")
    elsewhere = crashed("ValueError", "kernel.py, line 9, in run")
    assert len(distinct([first, other])) == 1
    assert distinct([first, elsewhere]) == [first, elsewhere]
    assert shows(other, first, HOW)
    assert not shows(elsewhere, first, HOW)
    died = replace(first, evidence={"signal": "SIGSEGV"})
    assert len(distinct([died, replace(died, case=other.case)])) == 2


def test_the_clearest_case_is_shown_and_made_smaller() -> None:
    unclear = finding("window", "window", "window")
    clear = replace(finding("window", "extra_key"), case=extend_case(context_lens=[33, 57], query_lens=[33, 31]))
    for both in ([unclear, clear], [clear, unclear]):
        assert distinct(both) == [clear]
    smaller = replace(clear, case=extend_case(context_lens=[9], query_lens=[9]))
    assert distinct([clear, smaller]) == [smaller]


def test_what_is_stored_is_the_clearest_and_stays_so_when_a_run_goes_on(tmp_path: Path) -> None:
    unclear = finding("window", "window", "window")
    clear = replace(finding("window"), case=extend_case(context_lens=[33, 57], query_lens=[33, 31]))
    after = replace(clear, case=extend_case(context_lens=[33, 9], query_lens=[33, 9]), made_from=clear.id)
    assert sum(after.case.context_lens) > sum(unclear.case.context_lens)
    kept = Keeper(tmp_path)
    kept.keep([unclear, clear])
    assert list(kept.paths) == [clear.id]
    row = FindingRow(unclear.id, unclear.fault, Key("t", 0, 0), unclear.to_dict(), 1, None, None, after.to_dict())
    assert made_smaller(row) == after


def test_a_smaller_case_is_explained_as_clearly() -> None:
    like = finding("window", "extra_key")
    assert shows(finding("window"), like, HOW)
    assert shows(finding("window", "split", "missing_key"), like, HOW)
    assert not shows(finding("window", "window"), like, HOW)
    assert not shows(finding("causal"), like, HOW)
    assert not shows(finding("window", check=Check.LSE), like, HOW)
    assert shows(finding(check=Check.CRASH), finding(check=Check.CRASH), HOW)


# ------------------------------------------------------------------- with real workers


def declared(function: object) -> Declaration:
    declaration = declaration_of(function)
    assert declaration is not None
    return declaration


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with open_pool(HOW) as pool:
        yield pool


def found_on(declaration: Declaration, case: Case, workers: Workers) -> list[Finding]:
    (outcome,) = run_cases(workers, iter([(declaration.name, case)]), HOW)
    return findings_of(declaration.name, case, outcome.result, HOW)


def test_findings_keep_check_and_diagnosis_on_a_smaller_case(workers: Workers) -> None:
    declaration = declared(planted.extend_window)
    case = extend_case(context_lens=[33, 57], query_lens=[33, 31], window=9, index_dtype="int32", scale=0.5)
    found = found_on(declaration, case, workers)
    several = minimise_findings(found, [declaration], workers, HOW, None)
    assert {s.before.check for s in several} == {f.check for f in found} == {Check.VALUES, Check.LSE}
    for one in several:
        assert one.complete
        assert (one.after.check, one.after.diagnosis) == (one.before.check, "window")
        assert len(one.after.case.context_lens) == 1
        # Over two keys, windows of two, of three and none at all look the same.
        assert (sum(one.after.case.context_lens), one.after.ways) == (3, 1)
        assert any(line.startswith("context_lens: [33, 57] -> ") for line in one.lines())
        assert "scale: 0.5 -> None" in one.lines()


def test_checks_of_one_case_are_judged_once(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    declaration = declared(planted.extend_window)
    values, lse = found_on(
        declaration, extend_case(context_lens=[33], query_lens=[33], window=9, index_dtype="int32"), workers
    )
    asked: list[Case] = []

    def counted(pool: Workers, requests: Iterator[tuple[str, Case]], how: Settings) -> Iterator[Outcome]:
        given = list(requests)
        asked.extend(case for _, case in given)
        return run_cases(pool, iter(given), how)

    monkeypatch.setattr("fuzz.campaign.minimise.run_cases", counted)
    several = minimise_findings([values, lse], [declaration], workers, HOW, None)
    assert [(one.complete, one.after.smallest) for one in several] == [(True, True)] * 2
    assert len({one.after.case for one in several}) == 1
    assert len(asked) == len(set(asked))
    assert all(one.after.made_from == one.before.id for one in several)


def test_each_known_defect_comes_before_its_other_checks_and_targets() -> None:
    def of(target: str, check: Check, entry: str | None) -> Finding:
        return replace(finding(check=check), target=target, entry=entry)

    known = [of("a", Check.VALUES, "e"), of("b", Check.NAN, "e"), of("a", Check.NAN, "f")]
    first, others = _one_of_each_first([*known, of("a", Check.LSE, None), of("b", Check.LSE, None)])
    assert sorted(f.entry or f.target for f in first) == ["a", "b", "e", "f"]
    assert [f.entry for f in others] == ["e"]


def test_a_finding_that_cannot_be_smaller_is_said_to_be_so(workers: Workers) -> None:
    declaration = declared(planted.gather_crash)
    case = gather_case(context_lens=[], num_kv_heads=1, placement="ascending", pool="tight")
    (finding,) = found_on(declaration, case, workers)
    found = minimise_finding(finding, declaration, workers, HOW)
    assert found.after == replace(finding, smallest=True)
    assert found.lines()[0] == "nothing could be removed"


def test_no_time_is_no_change(workers: Workers) -> None:
    declaration = declared(planted.gather_crash)
    (finding,) = found_on(declaration, gather_case(), workers)
    assert minimise_findings([finding], [declaration], workers, HOW, 0.0) == []
    (found,) = minimise_findings([finding], [declaration], workers, HOW, None, most=1)
    assert (found.judged, found.complete) == (1, False)
