"""Scores of changes agree with solving each of them, and quick solutions with the oracle."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oracle.attention import solve
from oracle.convention import Convention
from oracle.diagnose import Surroundings, scores
from oracle.diagnose.quick import Quick, view_of
from oracle.diagnose.rows import Row, rows_of, visible
from oracle.diagnose.search import _Search
from oracle.diagnose.subject import Subject
from oracle.diagnose.weights import Weights, weights
from oracle.precision import Precision
from oracle.problem import Problem
from oracle.rounding import round_to
from suites.oracle.diagnose.calls import problem

SINKS = torch.tensor([1.5, 0.5, 2.0, -1.0])
KEYS = 24
NOISE = 200.0
"""Scores of what is right: about one for each of 96 elements and 6 log-sum-exps."""


@cache
def asked() -> Problem:
    return problem(keys=KEYS, sinks=SINKS, window=18)


def seen_by(returned: Problem) -> Weights:
    """Weights of all rows of kv head 1, with what a kernel that solves `returned` gives in float32."""
    solution = solve(returned)
    subject = Subject(
        asked(), solution.out.float(), solution.lse.float(), Precision(), "bf16", Convention(source="this test"), 6.5
    )
    cells = [(token, head) for token in range(3) for head in (2, 3)]
    return weights(subject, asked(), solve(asked()), 0, 1, cells)


@given(key=st.integers(8, KEYS - 4), sign=st.sampled_from([-1, 1]))
@settings(max_examples=10, deadline=None)
def test_the_right_key_leaves_nothing(key: int, sign: int) -> None:
    found = seen_by(asked().subset(torch.arange(KEYS) != key) if sign < 0 else _louder(key))
    score = scores.one_key(found, sign, found.seen)
    assert int(score.argmin()) == key
    assert float(score[key]) < NOISE
    assert float(score.sort().values[1]) > 100 * NOISE


def _louder(key: int) -> Problem:
    """The problem with one key's weight doubled: a logit larger by ln 2, which one more dim carries."""
    p = asked()
    q = torch.cat([p.q.double(), torch.ones(*p.q.shape[:2], 1, dtype=torch.float64)], -1)
    extra = torch.zeros(KEYS, 2, 1, dtype=torch.float64)
    extra[key] = math.log(2) / p.scale
    return replace(p, q=q, k=torch.cat([p.k.double(), extra], -1))


@given(ends=st.tuples(st.integers(4, KEYS - 4), st.integers(4, KEYS - 4)))
@settings(max_examples=10, deadline=None)
def test_the_right_range_leaves_nothing(ends: tuple[int, int]) -> None:
    a, b = sorted(ends)
    cuts = torch.arange(KEYS + 1)
    key = torch.arange(KEYS)
    lost = scores.ranges(seen_by(asked().subset((key < a) | (key >= b))), cuts, -1)
    kept = scores.kept(seen_by(asked().subset((key >= a) & (key < b))), cuts)
    if a < b:
        assert float(lost[a, b]) < NOISE
        assert float(lost[a, b + 1]) > 100 * NOISE
        # A row's window may begin behind the range, which leaves it no key.
        if b - a > 1 and a > 8:
            assert float(kept[a, b]) < NOISE
            assert float(kept[a, b - 1]) > 100 * NOISE
    assert float(lost[b, a]) > 1e29


@pytest.mark.parametrize("name", ["kv", "k"])
@pytest.mark.parametrize(("a", "b"), [(2, 4), (3, 2)])
def test_the_right_page_leaves_nothing(name: str, a: int, b: int) -> None:
    index = torch.arange(KEYS)
    index[a * 4 : a * 4 + 4] = torch.arange(b * 4, b * 4 + 4)
    changed = replace(asked(), **{operand: getattr(asked(), operand)[index] for operand in name})
    score = scores.pages(seen_by(changed), 4)[name]
    assert float(score[a, b]) < NOISE
    assert int(score.argmin()) == a * (KEYS // 4) + b


def test_another_value_is_found_and_told() -> None:
    v = asked().v.clone()
    v[13, 1] = round_to(torch.linspace(-1, 1, 16).double(), torch.bfloat16)
    found = seen_by(replace(asked(), v=v))
    score = scores.other_values(found)
    assert int(score.argmin()) == 13
    assert torch.allclose(scores.value_of(found, 13), v[13, 1].double(), atol=1e-4)


def test_another_key_is_found_and_told() -> None:
    k, v = asked().k.clone(), asked().v.clone()
    k[13], v[13] = k[2] * 0.5, v[3] + 1
    found = seen_by(replace(asked(), k=k, v=v))
    score = scores.foreign_key(found, lost=True)
    assert int(score.argmin()) == 13
    value = scores.foreign_value(found, 13)
    assert torch.allclose(value, v[13, 1].double(), atol=1e-4)
    assert scores.plausible(found, 13, value)
    assert not scores.plausible(found, 13, value * 1e-6)


@given(
    window=st.sampled_from([None, 1, 7]),
    soft_cap=st.sampled_from([None, 2.0]),
    sinks=st.booleans(),
    repeat=st.integers(0, 5),
    kv_head=st.sampled_from([None, 0, 1]),
)
@settings(max_examples=20, deadline=None)
def test_quick_solutions_are_those_of_the_oracle(
    window: int | None, soft_cap: float | None, sinks: bool, repeat: int, kv_head: int | None
) -> None:
    p = problem(keys=9, queries=4, window=window, soft_cap=soft_cap, sinks=SINKS if sinks else None)

    def keys(row: Row) -> torch.Tensor:
        seen = visible(row)
        return torch.cat([seen, seen[seen == repeat]])

    posed = rows_of(p, (0, 2, 3), keys, kv_head)
    expected = solve(posed)
    quick, view = Quick().solution(p, (0, 2, 3), keys, kv_head)
    assert torch.allclose(quick.out, expected.out, atol=1e-12)
    assert torch.allclose(quick.lse, expected.lse, atol=1e-12)
    other = view_of(posed)
    for i in range(3):
        assert torch.allclose(view.logits(i), other.logits(i), atol=1e-12)
        assert torch.equal(view.values(i), other.values(i))


def test_a_search_looks_at_rows_that_fail_and_at_some_that_do_not() -> None:
    p = asked()
    out = round_to(solve(p).out, torch.bfloat16)
    out[1, 2] = 7.0
    subject = Subject(p, out, None, Precision(), "bf16", Convention(source="this test"), 6.5)
    search = _Search.of(subject, Surroundings())
    assert search.screen == (1, 1)
    assert search.panel == (0, 1, 2)
    assert search.scene.failing.nonzero().tolist() == [[1, 2]]
