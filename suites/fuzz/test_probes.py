"""Designed inputs: what each promises, for every shape that it accepts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from hashlib import blake2b
from pathlib import Path
from typing import Any

import mpmath
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fuzz import registry
from fuzz.buffers import Poison
from fuzz.case import Case, CaseError, Probe
from fuzz.instance import build
from fuzz.plan import Plan
from fuzz.probes import DESIGNS, RECOMMENDED, design, exact_weights, unfit
from fuzz.probes.exact import log, power_above, uncapped
from fuzz.probes.geometry import Geometry
from fuzz.probes.uniform import hadamard
from fuzz.probes.watch import watched
from fuzz.space import Space
from fuzz.support import unsupported
from oracle.attention import solve
from oracle.bits import bits
from oracle.problem import Problem
from oracle.rounding import widen
from suites.fuzz.cases import decode_case, extend_case

FP8 = ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz")
each = pytest.mark.parametrize("probe", DESIGNS)


def fitting(probe: Probe, **changes: Any) -> Case:
    """A paged decode with whatever ``probe`` needs, four queries each."""
    needs = {name: labels[-1] for name, labels in DESIGNS[probe].needs.items()}
    given = {
        "context_lens": [300, 40],
        "query_lens": [4, 4],
        "head_dim": 64,
        "v_head_dim": 64,
        "dtype": "bf16",
        "kv_dtype": needs.get("kv_dtype", "bf16"),
        "window": 100,
        "sinks": "normal",
        "soft_cap": 30.0 if needs.get("soft_cap") == "on" else None,
        "k_descale": needs.get("k_descale", "none"),
        "v_descale": needs.get("v_descale", "none"),
        "kv_layout": "nhd",
        "probe": probe,
    }
    return decode_case(**(given | changes))


def problem_of(case: Case) -> Problem:
    """The problem that a case poses."""
    problem = build(case, Poison.POSITIVE).problem
    assert problem is not None
    return problem


@st.composite
def any_case(draw: st.DrawFn, probes: Sequence[Probe] = tuple(DESIGNS), longest: int = 300) -> Case:
    """An attention case of any shape and dtype, with a probe that fits."""
    probe = draw(st.sampled_from(probes))
    needs = DESIGNS[probe].needs
    lengths = [n for n in (0, 1, 2, 3, 15, 16, 17, 40, 70, 300) if n <= longest]
    contexts = draw(st.lists(st.sampled_from(lengths), min_size=0, max_size=3))
    group = draw(st.sampled_from((1, 2, 5)))
    caps = {("off", "on"): (None, 5.0, 30.0), ("off",): (None,), ("on",): (5.0, 30.0)}
    decode = draw(st.booleans())
    shared = {
        "seed": draw(st.integers(0, 1 << 40)),
        "num_kv_heads": draw(st.sampled_from((1, 2, 3))),
        "group_size": group,
        "head_dim": draw(st.sampled_from((1, 7, 16, 24, 64, 80))),
        "v_head_dim": draw(st.sampled_from((1, 8, 20, 64))),
        "dtype": draw(st.sampled_from(("fp32", "bf16", "fp16", "e4m3fn", "e5m2"))),
        "kv_dtype": draw(st.sampled_from(needs.get("kv_dtype", ("fp32", "bf16", "fp16", *FP8)))),
        "page_size": draw(st.sampled_from((1, 3, 16, 64))),
        "pool": draw(st.sampled_from(("tight", "spare"))),
        "window": draw(st.sampled_from((None, 1, 7, 16, 1 << 20))),
        "sinks": draw(st.sampled_from(needs.get("sinks", ("none", "normal", "dominant")))),
        "soft_cap": draw(st.sampled_from(caps[needs.get("soft_cap", ("off", "on"))])),
        "scale": draw(st.sampled_from((None, 0.02, 0.5, -0.3, 1e-3, 40.0, 0.0))),
        "k_descale": draw(st.sampled_from(needs.get("k_descale", ("none", "tensor", "head")))),
        "v_descale": draw(st.sampled_from(needs.get("v_descale", ("none", "tensor", "head")))),
        "probe": probe,
    }
    if decode:
        queries = draw(st.sampled_from((1, 2, 4)))
        case = decode_case(kv_layout="nhd", context_lens=contexts, query_lens=[queries] * len(contexts), **shared)
    else:
        lens = [draw(st.integers(0, n + 1)) for n in contexts]
        causal = draw(st.booleans())
        case = extend_case(context_lens=contexts, query_lens=lens, causal=causal, **shared)
    assume(unfit(case) is None)
    return case


@settings(max_examples=50)
@given(case=any_case())
def test_every_case_that_fits_is_finite_and_repeats(case: Case) -> None:
    first = design(case)
    design.cache_clear()
    second = design(case)
    for name in ("q", "k", "v", "sinks", "k_descale", "v_descale"):
        a, b = getattr(first, name), getattr(second, name)
        assert (a is None) == (b is None)
        if a is not None:
            assert torch.equal(bits(a), bits(b))
            assert bool(widen(a).isfinite().all())
    if first.unused is not None:
        for data in first.unused(3).values():
            assert data.shape[0] == 3
            assert bool(widen(data).isfinite().all())
    solution = solve(problem_of(case))
    assert bool(solution.out.isfinite().all())


@settings(max_examples=50)
@given(case=any_case([probe for probe in DESIGNS if exact_weights(probe)], longest=40))
def test_exact_weights_are_zero_or_equal(case: Case) -> None:
    """Of a row, logits are the greatest one or so far below it that no format holds the weight."""
    for row, (logits, _) in enumerate(rows_of(problem_of(case))):
        for head in logits:
            seen = head[head > -torch.inf]
            if len(seen):
                below = seen.max() - seen
                assert bool(((below == 0) | (below > 104)).all()), (row, below)


def rows_of(problem: Problem) -> list[tuple[Tensor, Tensor]]:
    """Logits of each query row [Hq, keys of its request], -inf where it does not see; and those keys' V, descaled."""
    k, v = widen(problem.k), widen(problem.v)
    for name, x in (("k_descale", k), ("v_descale", v)):
        factors = getattr(problem, name)
        if factors is not None:
            x *= factors.double()[..., None]
    group = problem.group
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    found = []
    for request, count in enumerate(problem.q_lens):
        start, length = problem.kv_starts[request], problem.kv_lens[request]
        for i in range(count):
            at, position = length - count + i, torch.arange(length)
            seen = torch.ones(length, dtype=torch.bool) if not problem.causal else position <= at
            if problem.window is not None:
                seen &= position > at - problem.window
            q = widen(problem.q)[problem.q_starts[request] + i]
            logits = (q[:, None] * k[start : start + length].transpose(0, 1)).sum(-1) * problem.scale
            if problem.soft_cap is not None:
                logits = problem.soft_cap * torch.tanh(logits / problem.soft_cap)
            found.append((logits.masked_fill(~seen, -torch.inf), v[start : start + length]))
    return found


@each
def test_a_probe_says_what_it_is(probe: Probe) -> None:
    found = DESIGNS[probe]
    assert found.probe is probe
    assert found.aims
    assert 20 < len(found.summary) < 120
    assert found.summary.endswith(".")
    assert unfit(fitting(probe)) is None


def test_every_probe_has_a_design_and_names_stay() -> None:
    assert set(Probe) - set(DESIGNS) == {Probe.BYTES}
    assert set(RECOMMENDED) <= set(DESIGNS)
    assert {p for p in DESIGNS if exact_weights(p)} == {
        Probe.CODE,
        Probe.GATE,
        Probe.VALUE_NEEDLE,
        Probe.SIGNATURES,
        Probe.INTEGERS,
    }
    assert not exact_weights(Probe.BYTES)


def test_the_page_of_probes_is_up_to_date() -> None:
    page = (Path(__file__).parents[2] / "docs" / "probes.md").read_text()
    for probe, found in DESIGNS.items():
        needs = "; ".join(f"{name} {' or '.join(labels)}" for name, labels in found.needs.items())
        star = " *" if probe in RECOMMENDED else ""
        assert f"| `{probe}`{star} | {found.summary} | {', '.join(found.aims)} | {needs} |\n" in page
    assert page.count("\n| `") == len(DESIGNS)


@pytest.mark.parametrize(
    ("probe", "changes", "reason"),
    [
        (Probe.GATE, {"soft_cap": 30.0}, "needs soft_cap off"),
        (Probe.DEEP_NEGATIVE, {"soft_cap": None}, "needs soft_cap on"),
        (Probe.SINK_NEAR_LSE, {"sinks": "none"}, "needs sinks normal"),
        (Probe.CODE, {"sinks": "dominant"}, "needs sinks none or normal"),
        (Probe.CODE, {"v_head_dim": 4}, "v_head_dim of 8"),
        (Probe.NEEDLE_POISON, {"head_dim": 8}, "head_dim of 16"),
        (Probe.NEEDLE_POISON, {"scale": 0.0}, "no product of one channel reaches 22 nats"),
        (Probe.GATE, {"scale": 1e-3, "kv_dtype": "e4m3fnuz", "dtype": "fp16"}, "no product of one channel"),
        (Probe.UNEQUAL_DESCALES, {"v_descale": "none"}, "needs v_descale tensor or head"),
        (Probe.FP8_EDGES, {"kv_dtype": "bf16"}, "needs kv_dtype e4m3fn"),
    ],
)
def test_a_case_that_leaves_no_room_is_refused_with_a_reason(
    probe: Probe, changes: dict[str, Any], reason: str
) -> None:
    case = fitting(probe, **changes)
    assert reason in str(unfit(case))
    with pytest.raises(CaseError, match=r"case\.probe"):
        build(case, Poison.POSITIVE)


def test_a_target_does_not_run_a_probe_that_does_not_fit() -> None:
    target = registry.load()["sglang.triton.decode"]
    case = next(case for case in Plan(Space(target), 0) if case.probe is Probe.GATE)
    assert unsupported(target, case) is None
    assert "the probe gate needs soft_cap off" in str(unsupported(target, replace(case, soft_cap=5.0)))
    assert "the probe fp8_edges needs kv_dtype" in str(unfit(replace(case, probe=Probe.FP8_EDGES, kv_dtype=case.dtype)))


@each
def test_values_are_pinned(probe: Probe) -> None:
    """Bits of every design, so that a change, or a machine that computes otherwise, is noticed."""
    inputs = design(fitting(probe, seed=3))
    tensors = [inputs.q, inputs.k, inputs.v, inputs.sinks, inputs.k_descale, inputs.v_descale]
    tensors += list(inputs.unused(5).values()) if inputs.unused is not None else []
    found = blake2b(digest_size=4)
    for tensor in tensors:
        if tensor is not None:
            found.update(bits(tensor).contiguous().view(torch.uint8).numpy().tobytes())
    assert found.hexdigest() == PINNED[probe]


PINNED: dict[Probe, str] = {
    Probe.NORMAL: "1beb65e5",
    Probe.CONSTANT_V: "ea2f3b37",
    Probe.NEEDLE_POISON: "f2baadbf",
    Probe.CODE: "bad03691",
    Probe.GATE: "87c37d45",
    Probe.DEEP_NEGATIVE: "1778b7a4",
    Probe.DEEP_NEGATIVE_UNCAPPED: "5a2a15cd",
    Probe.RAMP: "dbb3f4ce",
    Probe.VALUE_NEEDLE: "4ea81c79",
    Probe.SIGNATURES: "9b628b1e",
    Probe.INTEGERS: "418b0e9c",
    Probe.CANCELLING: "84c6db9b",
    Probe.OUTLIERS: "f3b77d91",
    Probe.NEAR_TIES: "b74346b4",
    Probe.HUGE_SCALE: "87966de1",
    Probe.TINY_SCALE: "fe2fd850",
    Probe.SINK_NEAR_LSE: "023523cc",
    Probe.UNEQUAL_DESCALES: "c2c7994c",
    Probe.FP8_EDGES: "4d835f24",
}


def deviations(problem: Problem, **changes: Any) -> Tensor:
    """How far a typical element of each row and head moves, relative to itself, with the mistake ``changes``."""
    right, wrong = solve(problem).out, solve(replace(problem, **changes)).out
    return ((wrong - right).abs() / right.abs().clamp(min=1e-300)).median(-1).values


LONG = {"context_lens": [8187], "query_lens": [4], "window": 8000, "group_size": 4}


@pytest.mark.parametrize("probe", [Probe.NEEDLE_POISON, Probe.DEEP_NEGATIVE, Probe.CODE, Probe.GATE])
@pytest.mark.parametrize("by", [-1, 1])
def test_a_window_off_by_one_shows_at_8k(probe: Probe, by: int) -> None:
    problem = problem_of(fitting(probe, **LONG))
    assert problem.window is not None
    moved = deviations(problem, window=problem.window + by)
    # In every row some head sees it; a rounding to bf16 is at most 2e-3.
    least = {Probe.NEEDLE_POISON: 0.3, Probe.CODE: 0.3, Probe.GATE: 0.01, Probe.DEEP_NEGATIVE: 0.005}[probe]
    assert float(moved.amax(1).min()) > least
    assert float(deviations(problem).max()) == 0.0


def test_a_window_off_by_one_hardly_shows_in_normal_numbers_at_8k() -> None:
    problem = problem_of(fitting(Probe.NORMAL, **LONG))
    assert problem.window is not None
    assert float(deviations(problem, window=problem.window + 1).median()) < 0.015


@pytest.mark.parametrize("probe", [Probe.NEEDLE_POISON, Probe.GATE, Probe.SINK_NEAR_LSE, Probe.SIGNATURES])
def test_a_missing_sink_shows_at_8k(probe: Probe) -> None:
    problem = problem_of(fitting(probe, **LONG))
    assert float(deviations(problem, sinks=None).min()) > 0.1


def test_a_scale_shows_where_logits_are_large() -> None:
    for probe in (Probe.NEEDLE_POISON, Probe.DEEP_NEGATIVE_UNCAPPED):
        problem = problem_of(fitting(probe, **LONG))
        assert float(deviations(problem, scale=problem.scale * 1.02).amax(1).min()) > 0.02


def test_a_soft_cap_after_the_mask_shows() -> None:
    """A mask before the cap leaves invisible keys at minus the cap: as heavy as the others of this probe."""
    case = fitting(Probe.DEEP_NEGATIVE)
    problem = problem_of(case)
    right = solve(problem).out
    for row, (logits, v) in enumerate(rows_of(problem)):
        logits = logits.masked_fill(logits == -torch.inf, -30.0)
        assert problem.sinks is not None
        weights = torch.cat([logits, problem.sinks.double()[:, None]], 1).softmax(1)[:, :-1]
        wrong = torch.einsum("hn,nhd->hd", weights, v)
        if row < 4:
            assert float((wrong - right[row]).abs().max()) > 5.0


def test_a_gate_is_open_to_some_key_of_every_row() -> None:
    lens = {"context_lens": [30, 7, 3], "query_lens": [30, 7, 5], "window": 4, "group_size": 3}
    seen = 0
    for logits, _ in rows_of(problem_of(extend_case(probe=Probe.GATE, **lens))):
        greatest = logits.amax(1)
        assert bool(((greatest == 0) | (greatest == -torch.inf)).all())
        seen += int((greatest == 0).sum())
    assert seen == 40 * 6


def test_a_needle_carries_about_half_of_the_weight_whatever_the_context() -> None:
    for length in (123, 8187):
        problem = problem_of(fitting(Probe.NEEDLE_POISON, context_lens=[length], query_lens=[1], sinks="none"))
        (logits, _), *_ = rows_of(problem)
        heaviest = logits.softmax(1).amax(1)
        assert float(heaviest.min()) > 0.3
        assert float(heaviest.max()) < 0.8


def test_poison_outweighs_all_keys_of_a_watched_row() -> None:
    case = fitting(Probe.NEEDLE_POISON, context_lens=[2000], query_lens=[4], window=1000)
    problem = problem_of(case)
    for row in watched(Geometry(case)):
        (logits, _) = rows_of(replace(problem, window=None, causal=False))[row.row]
        outside = torch.cat([logits[:, : row.lo], logits[:, row.hi :]], 1)
        assert float((outside.amin(1) - logits[:, row.lo : row.hi].logsumexp(1)).min()) > 5


def test_unused_slots_hold_the_design_under_the_positive_poison_only() -> None:
    case = fitting(Probe.NEEDLE_POISON, pool="spare", kv_layout="linear")
    designed, poisoned = (build(case, poison).buffers["v_cache"].view for poison in (Poison.POSITIVE, Poison.NEGATIVE))
    differ = bits(designed) != bits(poisoned)
    assert bool(differ.any())
    assert set(widen(designed)[differ].unique().tolist()) == {-64.0, 64.0}


def test_a_code_sums_to_zero_over_a_block_and_names_pages() -> None:
    case = fitting(Probe.CODE, context_lens=[320], query_lens=[1], page_size=64, window=None)
    v = widen(design(case).v)
    assert set(v.unique().tolist()) == {-1.0, 1.0}
    assert bool((v[..., :48].reshape(20, 16, -1).sum(1) == 0).all())
    pages = v[..., 48:].reshape(5, 64, -1)
    assert bool((pages == pages[:, :1]).all())
    assert len({tuple(page.flatten().tolist()) for page in pages[:, 0]}) == 5


def test_no_two_keys_of_a_block_have_one_code() -> None:
    v = widen(design(fitting(Probe.CODE, context_lens=[160], query_lens=[1], v_head_dim=24)).v)
    for head in range(v.shape[1]):
        assert len({tuple(code) for code in v[:, head].tolist()}) == 160


def test_value_needles_read_the_weight_of_their_key() -> None:
    case = fitting(Probe.VALUE_NEEDLE, context_lens=[1024], query_lens=[1], window=None, sinks="none")
    out = solve(problem_of(case)).out
    assert bool(((out - 1.0).abs() < 0.13).all())


def test_integers_add_up_exactly() -> None:
    problem = problem_of(fitting(Probe.INTEGERS, scale=1.0))
    for logits, _ in rows_of(problem):
        seen = logits[logits > -torch.inf]
        assert bool((seen == seen.round()).all())
        assert 1 <= float(seen.min()) <= float(seen.max()) <= 3


def test_near_ties_differ_by_little() -> None:
    for logits, _ in rows_of(problem_of(fitting(Probe.NEAR_TIES, window=None)))[:4]:
        seen = logits[:, logits[0] > -torch.inf]
        spread = seen.amax(1) - seen.amin(1)
        assert 0 < float(spread.min()) <= float(spread.max()) < 0.3


def test_descales_lie_far_apart() -> None:
    inputs = design(fitting(Probe.UNEQUAL_DESCALES, num_kv_heads=8))
    assert inputs.k_descale is not None
    ratio = inputs.k_descale[1:] / inputs.k_descale[:-1]
    assert bool(((ratio > 3) | (ratio < 1 / 3)).all())
    assert not bool((inputs.k_descale.log2() % 1 == 0).any())
    logits = torch.cat([row[row > -torch.inf] for row, _ in rows_of(problem_of(fitting(Probe.UNEQUAL_DESCALES)))])
    assert float(logits.abs().max()) < 10


@pytest.mark.parametrize("fmt", FP8)
def test_fp8_edges_are_visited(fmt: str) -> None:
    k = widen(design(fitting(Probe.FP8_EDGES, kv_dtype=fmt)).k)
    most = {"e4m3fn": 448.0, "e4m3fnuz": 240.0, "e5m2": 57344.0, "e5m2fnuz": 57344.0}[fmt]
    assert float(k.max()) == -float(k.min()) == most
    assert 0.0 in k
    assert float(k[k > 0].min()) < 0.01


def test_scales_reach_the_ends_of_the_range() -> None:
    for dtype, high, low in (("fp16", 4000.0, 1e-4), ("bf16", 1e17, 1e-17), ("e4m3fn", 20.0, 0.02)):
        huge = widen(design(fitting(Probe.HUGE_SCALE, kv_dtype=dtype, dtype="bf16")).v).abs()
        tiny = widen(design(fitting(Probe.TINY_SCALE, kv_dtype=dtype, dtype="bf16")).v).abs()
        assert float(huge.max()) > high
        assert float(tiny[tiny > 0].median()) < low


@pytest.mark.parametrize("probe", [Probe.CODE, Probe.GATE, Probe.NEEDLE_POISON])
def test_long_contexts_can_be_built(probe: Probe) -> None:
    case = fitting(probe, context_lens=[1 << 17], query_lens=[1], num_kv_heads=1, head_dim=16, v_head_dim=8)
    assert bool(solve(problem_of(case)).out.isfinite().all())


@given(st.fractions(min_value=Fraction(1, 1 << 40), max_value=1 << 60))
def test_logarithms_come_from_integers(x: Fraction) -> None:
    exact = mpmath.log(mpmath.mpf(x.numerator) / x.denominator)
    assert abs(log(x) - exact) < 1.5e-7 + 1e-9 * abs(exact)


def test_logarithms_of_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="above 0"):
        log(0)


@given(st.floats(-0.99, 0.99), st.sampled_from((1e-3, 5.0, 30.0)))
def test_a_cap_is_undone(share: float, cap: float) -> None:
    assert abs(cap * mpmath.tanh(uncapped(share * cap, cap) / cap) - share * cap) < 1e-6 * cap
    assert uncapped(share, None) == share


@given(st.floats(1e-30, 1e30))
def test_powers_lie_just_above(x: float) -> None:
    assert 2.0 ** (power_above(x) - 1) < x <= 2.0 ** power_above(x)


def test_hadamard_rows_are_orthogonal() -> None:
    matrix = hadamard(16)
    assert torch.equal(matrix @ matrix.T, 16 * torch.eye(16, dtype=torch.float64))
    assert bool((matrix[0] == 1).all())


def lengths_of(edges: Sequence[Any]) -> list[tuple[int, int]]:
    """(lo, hi) of each."""
    return [(edge.lo, edge.hi) for edge in edges]


def test_watched_rows_know_their_edges() -> None:
    case = extend_case(context_lens=[30, 0], query_lens=[3, 2], window=10)
    assert lengths_of(watched(Geometry(case))) == [(18, 28), (19, 29), (20, 30)]
    many = watched(Geometry(extend_case(context_lens=[30, 7], query_lens=[30, 7])))
    assert len(many) == 8
    assert lengths_of(many)[:2] == [(0, 1), (0, 30)]
    assert all(edge.lo <= edge.inner < edge.hi for edge in many)
