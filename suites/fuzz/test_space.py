"""The case space: every draw is a valid case inside the declared capabilities; plans cover what is declared."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from itertools import islice
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuzz import registry
from fuzz.case import Case, Pool, case_from_json
from fuzz.features import labels
from fuzz.plan import CounterChooser, Coverage, Plan, pairs_among, pairs_of
from fuzz.space import Space
from fuzz.strategies import cases
from fuzz.support import unsupported
from oracle.declare import Declaration, declaration_of
from suites.fuzz import planted

T = TypeVar("T")
TARGETS = list(registry.load().values())
by_name = pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.name)


class First:
    """Picks the simplest of everything."""

    def choose(self, name: str, options: Sequence[T]) -> T:
        return options[0]

    def integer(self, name: str, low: int, high: int) -> int:
        return low


@by_name
def test_the_simplest_case_is_small(target: Declaration) -> None:
    case = Space(target).draw(First())
    assert len(case.context_lens) == 1
    assert sum(case.context_lens) <= 1
    assert not case.strided
    assert unsupported(target, case) is None


@by_name
@given(data=st.data())
def test_drawn_cases_are_supported_and_survive_json(target: Declaration, data: st.DataObject) -> None:
    case = data.draw(cases(Space(target)))
    assert unsupported(target, case) is None
    assert case_from_json(case.to_json()) == case
    # The first request may be as long as its boundary class asks; the others fill the rest.
    assert sum(case.context_lens[1:]) <= 600
    assert case.context_lens[:1] <= (max(3 * 256, 3 * case.page_size),)
    assert case.pool is not Pool.HUGE


@by_name
def test_features_of_drawn_cases_are_declared_ones(target: Declaration) -> None:
    space = Space(target)
    for case in islice(Plan(space, 3), 60):
        names = {name for name, _ in space.features(case)}
        lacking = set(space.dimensions) - names
        # A batch without requests has no lengths, a length that is no boundary has no label.
        assert lacking <= {"length", "query"}, lacking


@by_name
def test_a_plan_covers_every_pair_within_300_cases(target: Declaration) -> None:
    space = Space(target)
    plan, coverage = Plan(space, 0), Coverage(space)
    for case in islice(plan, 300):
        coverage.add(case)
    assert coverage.holes == []
    seen, declared = coverage.boundary_classes()
    assert seen == declared


def test_coverage_counts_only_what_was_added() -> None:
    space = Space(TARGETS[0])
    coverage = Coverage(space)
    assert len(coverage.holes) == len(space.pairs())
    case = next(iter(Plan(space, 0)))
    coverage.add(case)
    assert coverage.seen == pairs_of(space, case) & coverage.wanted
    assert coverage.holes


@by_name
def test_the_quick_way_finds_the_same_pairs(target: Declaration) -> None:
    space = Space(target)
    wanted = set(space.pairs())
    found = [(pairs_among(wanted, space, case), pairs_of(space, case) & wanted) for case in islice(Plan(space, 1), 30)]
    assert [quick for quick, _ in found] == [slow for _, slow in found]
    quick = found[0][0]
    assert quick
    one = next(iter(quick))
    assert pairs_among(wanted - {one}, space, next(iter(Plan(space, 1)))) == quick - {one}


def test_an_impossible_pair_is_excluded_with_a_reason() -> None:
    space = Space(TARGETS[0])
    assert space.excluded(frozenset({("requests", "none"), ("length", "one")}))
    assert space.excluded(frozenset({("requests", "many"), ("length", "one")})) is None


def drawn(target: str, count: int, **pins: str) -> list[Case]:
    space = Space(registry.load()[target])
    return [space.draw(CounterChooser(7, stream, pins)) for stream in range(count)]


def test_requests_of_a_batch_have_different_lengths() -> None:
    batches = [case.context_lens for case in drawn("sglang.triton.decode", 200, requests="many")]
    different = sum(len(set(lengths)) == len(lengths) for lengths in batches)
    assert different > 150
    assert sum(max(lengths) >= 3 * 256 for lengths in batches) > 50


def test_what_hides_other_faults_is_off_half_of_the_time() -> None:
    windows = [case.window for case in drawn("sglang.dcp.decode.window.2_ranks", 300)]
    assert 120 < windows.count(None) < 210


def test_a_prefix_of_one_key_is_a_class_of_its_own() -> None:
    cases = drawn("sglang.dcp.extend.2_ranks", 60, query="but_one", requests="many")
    prefixes = [n - q for case in cases for n, q in zip(case.context_lens, case.query_lens, strict=True)]
    assert set(prefixes) <= {0, 1}
    assert prefixes.count(1) > len(prefixes) // 2
    assert all(("query", "but_one") in labels(case) for case in cases if max(case.context_lens) > 1)


def test_plans_repeat_and_seeds_differ() -> None:
    space = Space(TARGETS[0])

    def first(seed: int, round_: int = 0) -> list[str]:
        return [case.to_json() for case in islice(Plan(space, seed, round_), 40)]

    assert first(5) == first(5)
    assert first(5) != first(6)
    assert first(5) != first(5, 1)


def test_counters_pick_every_option_and_obey_pins() -> None:
    picks = {CounterChooser(1, stream).choose("x", "abc") for stream in range(40)}
    assert picks == set("abc")
    assert {CounterChooser(1, s, {"x": "b"}).choose("x", "abc") for s in range(9)} == {"b"}
    numbers = {CounterChooser(1, s).integer("n", 2, 4) for s in range(40)}
    assert numbers == {2, 3, 4}
    # A pin must not shift what is drawn after it.
    free, pinned = CounterChooser(1, 0), CounterChooser(1, 0, {"x": "b"})
    free.choose("x", "abc")
    pinned.choose("x", "abc")
    assert free.integer("n", 0, 1 << 30) == pinned.integer("n", 0, 1 << 30)


def test_the_sequence_is_pinned() -> None:
    """Case i is a function of (seed, round, i): changing this orphans what others have recorded."""
    target = declaration_of(planted.gather_clean)
    assert target is not None
    drawn = [case.to_json() for case in islice(Plan(Space(target), 11), 50)]
    assert blake2b("".join(drawn).encode(), digest_size=8).hexdigest() == PINNED


PINNED = "bb3b196a0cd14536"
