"""Who compiles what: each group's kernels once and on one worker, and nothing else depends on it."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuzz import engine as engines
from fuzz import registry
from fuzz.buffers import Poison
from fuzz.call import call
from fuzz.campaign.groups import Order, Queue, kernels_of
from fuzz.campaign.pool import Pool
from fuzz.campaign.rounds import Search, Shard
from fuzz.campaign.run import Campaign, Recorded, Settings
from fuzz.campaign.server import Server
from fuzz.campaign.worker import Job
from fuzz.case import Case
from fuzz.engine.emulator.session import session
from fuzz.engine.emulator.specialisation import Constant, Pointer, Specialisation
from fuzz.instance import build
from fuzz.plan import Plan
from fuzz.probes import unfit
from fuzz.space import Space
from oracle.kinds import Engine
from suites.fuzz.campaign.test_rounds import asked
from suites.fuzz.cases import gather_case

Group = Callable[[dict[str, Any]], Hashable]
Run = tuple[float, float, int, Order]
"""begin, end, worker, order"""


def simulated(requests: list[dict[str, Any]], workers: int, group: Group, *, grouped: bool, cost: float) -> list[Run]:
    """What a queue makes of requests: a case takes 1, and ``cost`` more on the first that a worker has of a group, or 0
    more than 1 where another worker's is in the cache on disk.
    """
    queue = Queue(group if grouped else None)
    for index, request in enumerate(requests):
        queue.put(index, request)
    runs: list[Run] = []
    cached: dict[Hashable, float] = {}
    busy: list[tuple[float, int, Order]] = []
    idle, now = list(range(workers)), 0.0
    while True:
        for worker in list(idle):
            order = queue.take(worker)
            if order is None:
                continue
            idle.remove(worker)
            kernels = group(order.request)
            end = now + 1 + (cost if cached.get(kernels, now + 1) > now else 0)
            cached[kernels] = min(cached.get(kernels, end), end)
            heapq.heappush(busy, (end, worker, order))
            runs.append((now, end, worker, order))
        if not busy:
            return runs
        now, worker, order = heapq.heappop(busy)
        queue.done(worker, order)
        idle.append(worker)


def compiled_by(runs: list[Run], group: Group, cost: float) -> list[tuple[Hashable, int]]:
    """Each compilation: its group, and who did it."""
    return [(group(order.request), worker) for begin, end, worker, order in runs if end - begin > cost]


def plainly(request: dict[str, Any]) -> Hashable:
    return request["group"]


@given(groups=st.lists(st.integers(0, 5), max_size=40), workers=st.integers(1, 9))
def test_all_are_run_once_and_no_group_is_compiled_twice(groups: list[int], workers: int) -> None:
    requests = [{"group": g} for g in groups]
    runs = simulated(requests, workers, plainly, grouped=True, cost=7.0)
    assert sorted(order.index for *_, order in runs) == list(range(len(groups)))
    compiled = compiled_by(runs, plainly, 7.0)
    assert sorted(g for g, _ in compiled) == sorted(set(groups))


def test_without_groups_workers_compile_the_same_at_the_same_time() -> None:
    requests = [{"group": 0}, {"group": 0}, {"group": 1}, {"group": 1}]
    runs = simulated(requests, 2, plainly, grouped=False, cost=7.0)
    assert compiled_by(runs, plainly, 7.0) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    runs = simulated(requests, 2, plainly, grouped=True, cost=7.0)
    assert compiled_by(runs, plainly, 7.0) == [(0, 0), (1, 1)]
    assert max(end for _, end, *_ in runs) == 9.0


def test_a_worker_goes_on_with_what_it_has_compiled() -> None:
    queue = Queue(plainly)
    for index, g in enumerate("abab"):
        queue.put(index, {"group": g})
    first, second = queue.take(1), queue.take(2)
    assert first is not None
    assert second is not None
    assert (first.index, second.index) == (0, 1)
    assert queue.take(3) is None  # what is left is being compiled
    queue.done(2, second)
    queue.done(1, first)
    again = queue.take(2)
    assert again is not None
    assert again.index == 3
    other = queue.take(3)  # held by another, which is busy: from the disk
    assert other is not None
    assert other.index == 2


def test_a_group_whose_first_never_ended_begins_anew() -> None:
    queue = Queue(plainly)
    for index in range(2):
        queue.put(index, {"group": "a"})
    first = queue.take(1)
    assert first is not None
    assert queue.take(2) is None
    queue.forget()  # an interrupt: the pool goes on with other requests
    queue.put(0, {"group": "a"})
    assert queue.take(2) is not None


# ------------------------------------------------------------------ real cases

COPIES = ("sglang.shuffle_5d.gather", "sglang.merge_state")


def of_rounds(names: tuple[str, ...], count: int) -> list[dict[str, Any]]:
    """Requests of searches, eight of each target in a row, as on a GPU."""
    known = registry.load()
    asks = [iter(asked(Search(Space(known[name]), 3), count)) for name in names]
    found = []
    for _ in range(0, count, 8):
        for one in asks:
            found += [request(ask.target, ask.case) for ask in islice(one, 8)]
    return found


def test_cases_of_rounds_are_compiled_once_and_workers_meet_few_groups() -> None:
    requests, workers, cost = of_rounds((*COPIES, "portable.merge"), 96), 8, 30.0
    met: dict[bool, int] = {}
    for grouped in (False, True):
        runs = simulated(requests, workers, kernels_of, grouped=grouped, cost=cost)
        met[grouped] = len({(kernels_of(order.request), worker) for *_, worker, order in runs})
        compiled = compiled_by(runs, kernels_of, cost)
        distinct = {g for g, _ in compiled}
        assert len(compiled) == len(distinct) if grouped else len(compiled) > len(distinct)
    assert met[True] < met[False]


def request(name: str, case: Case) -> dict[str, Any]:
    return {"target": name, "case": case.to_dict()}


def used(name: str, case: Case) -> set[Specialisation]:
    """What the launches of one call, emulated, would be compiled for."""
    engines.start(Engine.EMULATOR)
    target = registry.load()[name]
    instance = build(case, Poison.POSITIVE)
    with session() as log:
        call(target, instance)
    return {launch.specialisation for launch in log.launches if launch.specialisation is not None}


def constants(made: set[Specialisation]) -> set[Hashable]:
    """Types and constants alone: not whether a number is 1 or a multiple of 16, nor how addresses are aligned."""
    return {
        (one.kernel, *((n, a.dtype if isinstance(a, Pointer) else a if isinstance(a, Constant) else None)
                       for n, a in one.arguments))
        for one in made
    }  # fmt: skip


def sibling(case: Case) -> Case:
    """A case of the same group: other values, and one request more."""
    lengths, queries = (*case.context_lens, 5), case.query_lens
    return replace(case, seed=case.seed + 1, context_lens=lengths, query_lens=(*queries, 1) if queries else ())


@pytest.mark.parametrize("name", ["portable.merge", "portable.shuffle_5d.decode", *COPIES])
def test_one_group_has_one_choice_of_types_and_constants(name: str) -> None:
    target = registry.load()[name]
    if registry.why_not(target, Engine.EMULATOR) is not None:
        pytest.skip("not installed")
    plan = Plan(Space(target, 60), 3)
    cases = [case for case in islice(plan, 24) if sum(case.context_lens) and unfit(sibling(case)) is None][:10]
    assert len(cases) == 10
    found = [constants(used(name, case)) for case in cases]
    for case, own in zip(cases, found, strict=True):
        assert kernels_of(request(name, sibling(case))) == kernels_of(request(name, case))
        assert own == constants(used(name, sibling(case))), case
    # And not for want of differences.
    assert len({frozenset(own) for own in found}) > 3


def test_values_places_and_counts_are_no_kernels() -> None:
    def group(**changes: Any) -> Hashable:
        return kernels_of({"target": "t", "case": gather_case(**changes).to_dict()})

    same: list[dict[str, Any]] = [{"seed": 8}, {"context_lens": [1]}, {"placement": "ascending"}, {"probe": "bytes"}]
    assert [group(**changes) == group() for changes in same] == [True] * len(same)
    other: list[dict[str, Any]] = [
        {"dtype": "fp16", "kv_dtype": "fp16"},
        {"head_dim": 64},
        {"page_size": 32},
        {"index_dtype": "int32"},
        {"num_kv_heads": 3},
    ]
    assert [group(**changes) == group() for changes in other] == [False] * len(other)
    assert group(num_kv_heads=3) == group(num_kv_heads=4)
    assert kernels_of({"target": "u", "case": gather_case().to_dict()}) != group()


# --------------------------------------------------------------------- workers


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(preload=["suites.fuzz.campaign.faults"]) as server:
        yield server


def test_a_pool_with_groups_replies_in_order(server: Server) -> None:
    requests = [{"do": "sleep", "seconds": 0.02, "echo": index, "group": index % 5} for index in range(24)]
    requests[5] = {"do": "segfault", "group": 0}
    with Pool(Job("suites.fuzz.campaign.faults:misbehave"), 3, server, group=plainly) as pool:
        first = list(pool.map(requests, 30.0))
        again = list(pool.map(requests, 30.0))
    for replies in (first, again):
        assert [index for index, _ in replies] == list(range(24))
        assert [index for index, reply in replies if not reply.ok] == [5]
        assert all(reply.value["echo"] == index for index, reply in replies if reply.value is not None)


@pytest.fixture(scope="module")
def judges() -> Iterator[Server]:
    with Server(preload=["torch", "suites.fuzz.campaign.stand_in"]) as server:
        yield server


def test_what_is_recorded_does_not_depend_on_workers_or_groups(judges: Server) -> None:
    known = registry.load()
    targets = [known[name] for name in (*COPIES, "torch.sdpa")]
    job = Job("suites.fuzz.campaign.stand_in:judge")

    def recorded(jobs: int, group: Group | None, engine: Engine, shard: Shard) -> list[tuple[object, ...]]:
        rows: list[tuple[object, ...]] = []

        def note(one: Recorded) -> None:
            failure = None if one.outcome.harness is None else one.outcome.harness.message
            rows.append((one.ask, one.outcome.result, failure, one.found, one.new, one.closed))

        campaign = Campaign(targets, Settings(engine=engine, seed=2), 36, None, shard=shard, record=note)
        with Pool(job, jobs, judges, group=group) as pool:
            campaign.run(pool)
        return rows

    shard = Shard(1, 2)
    one = recorded(1, kernels_of, Engine.CUDA, shard)
    assert len(one) == 3 * 18
    assert recorded(4, kernels_of, Engine.CUDA, shard) == one
    assert recorded(3, None, Engine.CUDA, shard) == one

    # Turns are another matter than workers: each target's own sequence is the same on any engine.
    def of_target(rows: list[tuple[object, ...]], name: str) -> list[object]:
        return [row[0] for row in rows if row[0].target == name]  # type: ignore[attr-defined]

    emulated = recorded(2, None, Engine.EMULATOR, shard)
    assert [of_target(one, t.name) for t in targets] == [of_target(emulated, t.name) for t in targets]
    assert [row[0] for row in one] != [row[0] for row in emulated]
