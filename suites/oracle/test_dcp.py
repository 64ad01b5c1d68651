"""Ownership of positions and slots: a partition, with inverses."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oracle import dcp

RANKS = st.integers(1, 9)
INTERLEAVE = st.integers(1, 7)


@settings(deadline=None)
@given(st.integers(0, 200), RANKS, INTERLEAVE)
def test_every_position_is_owned_exactly_once(length: int, ranks: int, interleave: int) -> None:
    owned = [dcp.local_positions(length, r, ranks, interleave) for r in range(ranks)]
    assert sorted(p for part in owned for p in part) == list(range(length))
    assert all(dcp.owner(p, ranks, interleave) == r for r, part in enumerate(owned) for p in part)
    assert all(list(part) == sorted(part) for part in owned)


@settings(deadline=None)
@given(st.integers(0, 10**12), RANKS, INTERLEAVE)
def test_local_lengths_sum_to_the_length(length: int, ranks: int, interleave: int) -> None:
    assert sum(dcp.local_length(length, r, ranks, interleave) for r in range(ranks)) == length


@settings(deadline=None)
@given(st.integers(0, 10**12), RANKS, INTERLEAVE)
def test_owner_and_local_index_invert(position: int, ranks: int, interleave: int) -> None:
    rank = dcp.owner(position, ranks, interleave)
    index = dcp.local_index(position, ranks, interleave)
    assert dcp.global_position(index, rank, ranks, interleave) == position
    assert dcp.local_length(position, rank, ranks, interleave) == index


@settings(deadline=None)
@given(st.integers(0, 10**12), RANKS)
def test_without_interleave_it_is_remainder_and_quotient(position: int, ranks: int) -> None:
    assert dcp.owner(position, ranks) == position % ranks
    assert dcp.local_index(position, ranks) == position // ranks


@settings(deadline=None)
@given(st.integers(0, 10**12), RANKS)
def test_widened_slots_invert(slot: int, ranks: int) -> None:
    assert dcp.widen(dcp.slot_row(slot, ranks), dcp.slot_owner(slot, ranks), ranks) == slot


@settings(deadline=None)
@given(st.integers(0, 500), st.integers(0, 40), RANKS)
def test_slots_congruent_to_positions_have_the_same_owner(page: int, position: int, ranks: int) -> None:
    slot = page * ranks + position  # a run that starts at a multiple of the ranks
    assert dcp.slot_owner(slot, ranks) == dcp.owner(position, ranks)


def test_interleaved_example() -> None:
    assert dcp.local_positions(11, 0, 2, 3) == (0, 1, 2, 6, 7, 8)
    assert dcp.local_positions(11, 1, 2, 3) == (3, 4, 5, 9, 10)


@pytest.mark.parametrize(
    "call",
    [
        lambda: dcp.owner(-1, 2),
        lambda: dcp.owner(0, 0),
        lambda: dcp.local_index(0, 2, 0),
        lambda: dcp.local_length(4, 2, 2),
        lambda: dcp.local_length(-1, 0, 2),
        lambda: dcp.global_position(0, -1, 2),
        lambda: dcp.slot_row(-1, 2),
        lambda: dcp.widen(0, 2, 2),
    ],
)
def test_numbers_out_of_range_are_refused(call: Callable[[], int]) -> None:
    with pytest.raises(ValueError, match="allowed is"):
        call()
