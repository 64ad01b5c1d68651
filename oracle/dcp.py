"""Who owns which position in decode context parallel (DCP): N ranks share the keys of one request.

Blocks of `interleave` (S) consecutive positions go round the ranks: position p lies in block p // S, on
rank (p // S) % N. Physical slots are *widened*: a slot number is row * N + rank, so the owner reads row
slot // N of its pool. Pure integer arithmetic; every function raises ValueError on a number out of range.
"""


def _check(ranks: int, rank: int, interleave: int, count: int) -> None:
    if ranks < 1:
        raise ValueError(f"ranks: allowed is an integer >= 1, got {ranks}")
    if not 0 <= rank < ranks:
        raise ValueError(f"rank: allowed is 0 .. {ranks - 1}, got {rank}")
    if interleave < 1:
        raise ValueError(f"interleave: allowed is an integer >= 1, got {interleave}")
    if count < 0:
        raise ValueError(f"position, index, length or slot: allowed is an integer >= 0, got {count}")


def owner(position: int, ranks: int, interleave: int = 1) -> int:
    """Rank that holds the key at `position`."""
    _check(ranks, 0, interleave, position)
    return position // interleave % ranks


def local_index(position: int, ranks: int, interleave: int = 1) -> int:
    """Index of `position` among the positions of its owner, in order."""
    _check(ranks, 0, interleave, position)
    return position // (interleave * ranks) * interleave + position % interleave


def global_position(index: int, rank: int, ranks: int, interleave: int = 1) -> int:
    """Position whose owner is `rank` and whose local index is `index`: inverse of (owner, local_index)."""
    _check(ranks, rank, interleave, index)
    return (index // interleave * ranks + rank) * interleave + index % interleave


def local_length(length: int, rank: int, ranks: int, interleave: int = 1) -> int:
    """How many of the positions 0 .. length - 1 `rank` owns."""
    _check(ranks, rank, interleave, length)
    rounds, rest = divmod(length, ranks * interleave)
    return rounds * interleave + min(max(rest - rank * interleave, 0), interleave)


def local_positions(length: int, rank: int, ranks: int, interleave: int = 1) -> tuple[int, ...]:
    """The positions of 0 .. length - 1 that `rank` owns, ascending: entry j has local index j."""
    count = local_length(length, rank, ranks, interleave)
    return tuple(global_position(index, rank, ranks, interleave) for index in range(count))


def slot_owner(slot: int, ranks: int) -> int:
    """Rank that holds a widened slot."""
    _check(ranks, 0, 1, slot)
    return slot % ranks


def slot_row(slot: int, ranks: int) -> int:
    """Row of a widened slot in its owner's pool."""
    _check(ranks, 0, 1, slot)
    return slot // ranks


def widen(row: int, rank: int, ranks: int) -> int:
    """Slot number of a row of one rank's pool: the inverse of (slot_row, slot_owner)."""
    _check(ranks, rank, 1, row)
    return row * ranks + rank
