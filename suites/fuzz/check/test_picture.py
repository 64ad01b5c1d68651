"""What a finding keeps for plots: grids of error/budget that stay small, and decoded keys."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fuzz.case import Case, Probe
from fuzz.check.picture import INFINITE, LEVELS, PER_OCTAVE, SIDE, ratio_map
from fuzz.check.result import CaseResult, Check
from fuzz.check.run import check_case
from oracle.declare import declaration_of
from oracle.kinds import Engine
from suites.fuzz import planted
from suites.fuzz.cases import extend_case


def judge(function: Any, case: Case) -> CaseResult:
    declaration = declaration_of(function)
    assert declaration is not None
    return check_case(declaration, case, Engine.EMULATOR, lambda phase: None)


def evidence(result: CaseResult, check: Check) -> dict[str, Any]:
    return dict(next(one.evidence for one in result.checks if one.check is check))


def test_levels_are_quarters_of_octaves_and_zero_is_the_border() -> None:
    ratios = torch.tensor([[[0.0, 0.25, 1.0, 1.01, 4.0, math.inf, -1.0]]], dtype=torch.float64)
    (levels,) = ratio_map(ratios)["by_dim"]
    assert levels == f"{LEVELS[0]} {-2 * PER_OCTAVE} 0 1 {2 * PER_OCTAVE} {INFINITE} ."


@given(st.integers(1, 200), st.integers(1, 90), st.integers(0, 10**6))
def test_a_grid_is_small_and_keeps_what_is_worst(tokens: int, heads: int, seed: int) -> None:
    ratios = torch.zeros(tokens, heads, 3, dtype=torch.float64)
    token, head = seed % tokens, seed % heads
    ratios[token, head, 1] = 8.0
    found = ratio_map(ratios)
    grid = [row.split() for row in found["by_head"]]
    assert (len(grid), len(grid[0])) == (min(tokens, SIDE), min(heads, SIDE))
    assert found["shape"] == [tokens, heads, 3]
    hot = [(y, x) for y, row in enumerate(grid) for x, level in enumerate(row) if level == str(3 * PER_OCTAVE)]
    assert len(hot) == 1
    (y, x) = hot[0]
    assert y * tokens // len(grid) <= token < (y + 1) * tokens // len(grid)
    assert x * heads // len(grid[0]) <= head < (x + 1) * heads // len(grid[0])


def test_what_fails_is_above_the_border_in_the_map_and_what_passes_is_not() -> None:
    case = extend_case(context_lens=(9, 17), query_lens=(9, 17), head_dim=32, v_head_dim=32, probe=Probe.CODE)
    found = evidence(judge(planted.extend_key, case), Check.VALUES)
    levels = [int(level) for row in found["map"]["by_head"] for level in row.split()]
    assert any(level > 0 for level in levels)
    assert any(level <= 0 for level in levels)
    assert "map" not in evidence(judge(planted.extend_clean, case), Check.VALUES)


def test_keys_of_failing_rows_are_decoded() -> None:
    """The planted target loses the first key that each row sees, of contexts of some length."""
    case = extend_case(context_lens=(9, 17), query_lens=(9, 17), head_dim=32, v_head_dim=32, probe=Probe.CODE)
    rows = evidence(judge(planted.extend_key, case), Check.VALUES)["keys"]
    assert rows
    for row in rows:
        assert row["told"]
        assert row["extra"] == []
        assert row["missing"] == [[row["visible"][0], 1]]


@pytest.mark.parametrize("probe", [Probe.NORMAL, Probe.HUGE_SCALE])
def test_long_contexts_without_a_code_are_not_decoded(probe: Probe) -> None:
    case = extend_case(context_lens=(90,), query_lens=(90,), head_dim=32, v_head_dim=32, probe=probe)
    found = evidence(judge(planted.extend_key, case), Check.VALUES)
    assert "map" in found
    assert "keys" not in found
