"""Index lists for context parallelism, against the definitions written out position by position."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from fuzz.buffers import Poison
from fuzz.case import Case
from fuzz.instance import build
from fuzz.instance.indices import widened_slots
from oracle import dcp
from suites.fuzz.cases import index_case


@st.composite
def cases(draw: st.DrawFn, task: str) -> Case:
    parts = draw(st.integers(1, 6))
    contexts = draw(st.lists(st.integers(0, 70), max_size=4))
    return index_case(
        seed=draw(st.integers(0, 99)),
        context_lens=contexts,
        query_lens=[draw(st.integers(0, n)) for n in contexts],
        parts=parts,
        rank=draw(st.integers(0, parts - 1)),
        index_task=task,
        index_dtype="int32",
    )


@given(cases("rank_slots"))
def test_slots_are_widened_and_distinct(case: Case) -> None:
    slots = widened_slots(case)
    assert [len(own) for own in slots] == list(case.context_lens)
    together = torch.cat(slots) if slots else torch.zeros(0)
    assert len(together.unique()) == len(together)
    for own in slots:
        for position, slot in enumerate(own.tolist()):
            assert dcp.slot_owner(slot, case.parts) == dcp.owner(position, case.parts)


@given(cases("rank_slots"))
def test_rank_slots_by_position(case: Case) -> None:
    instance = build(case, Poison.POSITIVE)
    table = instance.buffers["req_to_token"].view
    rows = instance.buffers["req_pool_indices"].view.tolist()
    expected = []
    for row, length, queries in zip(rows, case.context_lens, case.query_lens, strict=True):
        for position in range(length - queries, length):
            if position % case.parts == case.rank:
                expected.append(int(table[row, position]) // case.parts)
    assert instance.indices is not None
    assert instance.indices.tolist() == expected
    assert instance.buffers["indptr"].view[-1:].tolist() in ([len(expected)], [0])


@given(cases("gathered"))
def test_gathered_ids_by_position(case: Case) -> None:
    instance = build(case, Poison.POSITIVE)
    prefix = [n - q for n, q in zip(case.context_lens, case.query_lens, strict=True)]
    expected = []
    for i, (before, new) in enumerate(zip(prefix, case.query_lens, strict=True)):
        expected += [sum(prefix[:i]) + j for j in range(before)]
        expected += [sum(prefix) + sum(case.query_lens[:i]) + j for j in range(new)]
    assert instance.indices is not None
    assert instance.indices.tolist() == expected


@given(cases("local"))
def test_local_rows_by_position(case: Case) -> None:
    instance = build(case, Poison.POSITIVE)
    slots = instance.buffers["slots"].view.tolist()
    expected, start = [], 0
    for length in case.context_lens:
        own = slots[start : start + length]
        expected += [own[p] // case.parts for p in range(length) if p % case.parts == case.rank]
        start += length
    assert instance.indices is not None
    assert instance.indices.tolist() == expected
    assert instance.buffers["local_lens"].view.tolist() == [
        dcp.local_length(n, case.rank, case.parts) for n in case.context_lens
    ]
