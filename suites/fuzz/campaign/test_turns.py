"""Whose turn it is in a campaign with little time."""

from __future__ import annotations

from collections import deque
from itertools import islice

from fuzz import registry
from fuzz.campaign.run import TURN, Campaign, Settings
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
