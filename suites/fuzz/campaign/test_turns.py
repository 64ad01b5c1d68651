"""Whose turn it is in a campaign with little time."""

from __future__ import annotations

from collections import deque
from itertools import islice

import pytest

from fuzz import registry
from fuzz.campaign.corpus import Seen
from fuzz.campaign.rounds import Ask, Shard
from fuzz.campaign.run import SAMPLED_EVERY, TURN, Campaign, Settings
from oracle.kinds import Engine
from suites.targets import sglang_merge_state

TARGETS = registry.declared_in(sglang_merge_state)[:2]
FIRST, SECOND = (target.name for target in TARGETS)


def turns(campaign: Campaign, count: int) -> list[str]:
    return [request.target for request in islice(campaign._requests(deque()), count) if request is not None]


def campaign(time_s: float | None, engine: Engine = Engine.EMULATOR, cases: int | None = None) -> Campaign:
    return Campaign(TARGETS, Settings(engine=engine), cases=cases, time_s=time_s)


def test_pairs_still_to_cover_come_before_a_fair_share_of_the_time() -> None:
    timed = campaign(3600.0)
    timed.summaries[SECOND].seconds["kernel"] = 1000.0
    assert turns(timed, 3) == [FIRST] * 3
    timed.searches[FIRST]._plan.missing.clear()
    assert turns(timed, 3) == [SECOND] * 3
    timed.searches[SECOND]._plan.missing.clear()
    assert turns(timed, 3) == [FIRST] * 3


def test_without_a_limit_of_time_targets_take_turns() -> None:
    untimed = campaign(None)
    untimed.searches[FIRST]._plan.missing.clear()
    assert turns(untimed, 4) == [FIRST, SECOND] * 2


def test_where_kernels_are_compiled_a_turn_is_several_cases() -> None:
    assert turns(campaign(None, Engine.CUDA), 3 * TURN) == [FIRST] * TURN + [SECOND] * TURN + [FIRST] * TURN
    few = turns(campaign(None, Engine.HIP, cases=TURN - 1), 99)
    assert few == [FIRST] * (TURN - 1) + [SECOND] * (TURN - 1)


@pytest.mark.parametrize("shard", [Shard(), Shard(2, 2), Shard(3, 5), Shard(32, 32)])
def test_one_case_in_four_is_looked_at_and_the_plans_turn_says_nothing_of_which(shard: Shard) -> None:
    settings = Settings(engine=Engine.EMULATOR, seed=1)
    searching = Campaign(TARGETS[:1], settings, cases=None, time_s=None, shard=shard)
    out, places = deque[Ask](), list[int]()
    for i, request in enumerate(islice(searching._requests(out), 160)):
        ask = out.popleft()
        searching.searches[FIRST].note(ask, Seen(ran=True, failed=False, margin=0))
        if request is not None and request.coverage:
            places.append(i % SAMPLED_EVERY)
    assert len(places) == 160 // SAMPLED_EVERY
    assert all(places.count(place) >= 3 for place in range(SAMPLED_EVERY))
