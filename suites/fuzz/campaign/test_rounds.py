"""Which cases a search tries: the plan, mutations inside the case space; feedback in any order."""

from __future__ import annotations

import random
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuzz import registry
from fuzz.campaign import rounds
from fuzz.campaign.corpus import Altered, Corpus, Seen
from fuzz.campaign.rounds import ROUND, Ask, Origin, Search, Shard
from fuzz.plan import CounterChooser, Coverage, Plan
from fuzz.space import Space
from fuzz.support import unsupported

TARGETS = registry.load()
SOME = ["sglang.shuffle_5d.write", "sglang.merge_state", "torch.sdpa", "sglang.backend.decode_5d.fp8"]
by_name = pytest.mark.parametrize("name", SOME)
WELL = Seen(ran=True, failed=False, margin=0)


def asked(search: Search, count: int, seen: Seen = WELL) -> list[Ask]:
    asks = []
    for _ in range(count):
        asks.append(search.next())
        search.note(asks[-1], seen)
    return asks


@by_name
def test_every_second_case_is_the_plans_until_it_covers_every_pair(name: str) -> None:
    space = Space(TARGETS[name])
    asks = asked(Search(space, 5), 400)
    planned = [ask for ask in asks if ask.origin is Origin.PLAN]
    assert asks[: 2 * len(planned) : 2] == planned
    assert [ask.case for ask in planned] == list(islice(Plan(space, 5), len(planned)))
    coverage = Coverage(space)
    for ask in planned:
        coverage.add(ask.case)
    assert coverage.holes == []


@by_name
def test_every_mutation_is_declared(name: str) -> None:
    asks = asked(Search(Space(TARGETS[name]), 5), 400)
    mutations = [ask for ask in asks if ask.origin is Origin.MUTATION]
    assert len(mutations) > 50
    assert [unsupported(TARGETS[name], ask.case) for ask in mutations] == [None] * len(mutations)


@given(stream=st.integers(0, 1000), data=st.data())
def test_one_pick_changes(stream: int, data: st.DataObject) -> None:
    space = Space(TARGETS[data.draw(st.sampled_from(SOME))])
    first = CounterChooser(3, stream)
    case, before = space.draw(first), first.picked
    at = data.draw(st.integers(0, len(before) - 1))
    altered = Altered(4, stream, before, at)
    other, after = space.draw(altered), altered.picked
    # What comes before the pick is untouched; the pick changes wherever there is something else to pick.
    assert after[:at] == before[:at]
    assert after[at][0] == before[at][0]
    again = Altered(4, stream, before, len(before))
    assert space.draw(again) == case
    if after == before:
        assert other == case


def test_a_pick_with_an_alternative_does_change() -> None:
    before = (("x", "b"), ("n", 5), ("seed", 7))
    for stream in range(20):
        assert Altered(1, stream, before, 0).choose("x", "abc") in "ac"
        chooser = Altered(1, stream, before, 1)
        assert chooser.choose("x", "abc") == "b"
        assert chooser.integer("n", 0, 9) in (0, 4, 6, 9)
        assert Altered(1, stream, before, 0).choose("x", "b") == "b"
        assert Altered(1, stream, before, 3).choose("x", "ac") in "ac"


def test_feedback_does_not_depend_on_the_order_of_replies() -> None:
    space = Space(TARGETS["torch.sdpa"])
    states = []
    for order in (0, 1, 2):
        search = Search(space, 1)
        random_ = random.Random(order)
        for _ in range(6):
            asks = [search.next() for _ in range(ROUND)]
            assert search.place() is None
            random_.shuffle(asks)
            closed = None
            for ask in asks:
                assert closed is None
                margin, lines = ask.index % 4, frozenset({f"line {ask.case.seed % 9}"})
                closed = search.note(
                    ask, Seen(ran=ask.index % 5 > 0, failed=ask.index % 7 == 0, margin=margin, reached=lines)
                )
            assert closed is not None
        states.append((search.corpus.entries, search.corpus.reached, search.corpus.margins, search.next()))
    assert states[0] == states[1] == states[2]


def test_what_failed_or_did_not_run_is_not_mutated() -> None:
    space = Space(TARGETS["torch.sdpa"])
    case = space.draw(CounterChooser(1, 1))
    assert Corpus(space).absorb(0, {0: (case, (), Seen(ran=False, failed=False, margin=3))}) == []
    assert Corpus(space).absorb(0, {0: (case, (), Seen(ran=True, failed=True, margin=3))}) == []
    (entry,) = Corpus(space).absorb(0, {4: (case, (), Seen(ran=True, failed=False, margin=3))})
    assert (entry.index, entry.reasons) == (4, ("pair", "margin"))


def test_a_boundary_class_that_was_tried_with_little_is_offered_more_often() -> None:
    corpus = Corpus(Space(TARGETS["torch.sdpa"]))
    picked = {"dtype": "fp32", "kv_dtype": "same"}
    assert corpus.weight(picked, "page") == 4
    for stream in range(3000):
        corpus.coverage.add(corpus.space.draw(CounterChooser(1, stream, {"length": "page", "dtype": "fp32"})))
    assert corpus.weight(picked, "page") == 1
    assert corpus.weight(picked, "any") == 1


def test_shards_split_every_round() -> None:
    parts = [Shard(i, 5).indices for i in range(1, 6)]
    assert sorted(index for part in parts for index in part) == list(range(ROUND))


@pytest.mark.parametrize("shards", [1, 2, 3, 4, 6, 31, 32])
def test_every_shard_gets_its_part_of_the_plan(shards: int) -> None:
    space, rounds = Space(TARGETS["torch.sdpa"]), 2
    planned = []
    for number in range(1, shards + 1):
        shard = Shard(number, shards)
        own = asked(Search(space, 5, shard), rounds * len(shard.indices))
        assert [shard.count(ask.round, ask.index) for ask in own] == list(range(len(own)))
        turns = [ask.origin is Origin.PLAN for ask in own]
        assert len(set(turns[::2])) == len(set(turns[1::2])) == 1
        assert turns[0] != turns[1]
        planned += [ask for ask in own if ask.origin is Origin.PLAN]
    planned.sort(key=lambda ask: (ask.round, ask.index))
    assert [ask.case for ask in planned] == list(islice(Plan(space, 5), rounds * ROUND // 2))


def test_rounds_of_another_size_have_turns_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    space = Space(TARGETS["sglang.merge_state"])
    rounds._turns.cache_clear()
    for size in (4, ROUND):
        monkeypatch.setattr(rounds, "ROUND", size)
        assert [ask.origin is Origin.PLAN for ask in asked(Search(space, 5), 40)] == [True, False] * 20
