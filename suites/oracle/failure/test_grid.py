"""The text map: every row is on it once, and a wrong one never looks right."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from oracle.budget.judge import Mark
from oracle.failure.grid import COLUMNS, LINES, SIGNS, grid
from oracle.failure.words import count, runs


def marks(*rows: str) -> torch.Tensor:
    return torch.tensor([[SIGNS.index(sign) for sign in row] for row in rows], dtype=torch.uint8)


def test_decode_has_a_line_a_request() -> None:
    lines = grid(marks("..", "..", "XN", ".?"), [1, 1, 1, 1])
    assert lines[0] == "heads 0 to 1 across; . within budget, ? within the worst case only, X beyond it, N not finite"
    assert lines[1:] == ["requests 0 to 1  ..", "request 2        XN", "request 3        .?"]


def test_ragged_requests_have_a_line_for_each_run_of_rows() -> None:
    lines = grid(marks("..", "X.", "X.", "..", ".."), [1, 2, 0, 2])
    assert [line.split("  ")[0] for line in lines[1:]] == ["request 0", "request 1, rows 0 to 1", "requests 2 to 3"]
    assert [line.split("  ")[-1].strip() for line in lines[1:]] == ["all within budget", "X.", "all within budget"]


@given(st.integers(1, 200), st.integers(0, 199), st.sampled_from([Mark.SUSPECT, Mark.BEYOND, Mark.NOT_FINITE]))
def test_one_wrong_head_among_many_is_seen(heads: int, wrong: int, mark: Mark) -> None:
    found = torch.zeros(3, heads, dtype=torch.uint8)
    found[1, wrong % heads] = mark
    lines = grid(found, [3])
    assert len(lines) == 4
    assert SIGNS[mark] in lines[2].split("  ")[-1]
    assert all(len(line.split("  ")[-1]) <= COLUMNS for line in lines[1:])
    assert SIGNS[mark] not in lines[1].split("  ")[-1] + lines[3].split("  ")[-1]


def test_what_does_not_fit_is_counted() -> None:
    found = torch.zeros(100, 1, dtype=torch.uint8)
    found[::2] = Mark.BEYOND
    lines = grid(found, [100])
    assert len(lines) == LINES + 2
    assert lines[-1] == f"... and {100 - LINES} more"


@given(st.sets(st.integers(0, 40), min_size=1, max_size=12))
def test_runs_name_every_number_once(numbers: set[int]) -> None:
    said = runs(sorted(numbers))
    if "..." in said:
        return
    found: set[int] = set()
    for part in said.split(", "):
        low, _, high = part.partition(" to ")
        found |= set(range(int(low), int(high or low) + 1))
    assert found == numbers


def test_counts() -> None:
    assert [count(1, "key"), count(2, "query"), count(0, "row")] == ["1 key", "2 queries", "0 rows"]
