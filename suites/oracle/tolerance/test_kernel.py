"""The emulated kernel is honest without a fault, reads what a target would read, and counts what a fault changes."""

import math
from typing import Any

import pytest
import torch

from fuzz.buffers import Poison
from fuzz.instance import Instance, build
from oracle.attention import lse_with_sink, solve
from oracle.budget import judge, worst_case
from oracle.diagnose import Kind
from oracle.verdict import Verdict
from suites.fuzz.cases import decode_case, extend_case
from suites.tolerance.faults import CLEAN, COUNTED, FAULTS, OUTSIDE, Fault
from suites.tolerance.kernel import Recipe, Result, Stage, attend, cast, read, run

RECIPE = Recipe(tile=16, splits=3)


def decoding(**changes: Any) -> Instance:
    """Four query rows over 123 keys, all features but descales."""
    fields: dict[str, Any] = {
        "context_lens": [123],
        "query_lens": [4],
        "group_size": 4,
        "dtype": "bf16",
        "kv_dtype": "bf16",
        "kv_layout": "nhd",
        "index_form": "page_table",
        "window": 82,
        "sinks": "normal",
        "soft_cap": 30.0,
        "scale": 128**-0.5,
    }
    return build(decode_case(**fields | changes), Poison.POSITIVE)


def judged(instance: Instance, result: Result, recipe: Recipe) -> Verdict:
    problem, precision = instance.problem, recipe.precision()
    assert problem is not None
    solution = solve(problem)
    counted = problem.sinks is not None
    if problem.sinks is not None:
        solution = type(solution)(solution.out, lse_with_sink(solution.lse, problem.sinks))
    bounds = worst_case(problem, precision, input_dtype=instance.case.dtype, lse_includes_sink=counted)
    # Without a key, but with a sink, the log-sum-exp is the sink's: not the worst case's to judge.
    return judge(
        result.out,
        result.lse,
        solution,
        bounds,
        out_dtype=recipe.out_dtype,
        precision=precision,
        expected_empty_lse=None if counted else -math.inf,
    ).verdict


@pytest.mark.parametrize(
    "instance",
    [
        decoding(),
        decoding(kv_layout="shuffle_5d", soft_cap=None),
        decoding(index_form="slot_list", window=None, sinks="none"),
        decoding(context_lens=[123, 0, 2, 70], query_lens=[4, 1, 4, 1]),
        decoding(kv_dtype="e4m3fn", k_descale="head", v_descale="tensor"),
        build(extend_case(dtype="bf16", kv_dtype="bf16", sinks="normal", window=5), Poison.NAN),
        build(extend_case(dtype="bf16", kv_dtype="bf16", context_lens=[70, 3], prefix="pool"), Poison.NEGATIVE),
        build(extend_case(dtype="bf16", kv_dtype="bf16", causal=False), Poison.POSITIVE),
    ],
    ids=["all", "shuffle_5d", "slot_list", "ragged", "fp8", "extend", "prefix", "not causal"],
)
@pytest.mark.parametrize("base_two", [True, False])
def test_without_a_fault_it_is_within_its_worst_case(instance: Instance, base_two: bool) -> None:
    recipe = Recipe(tile=16, splits=3, base_two=base_two, partial_dtype="bf16")
    result = run(instance, recipe)
    assert judged(instance, result, recipe) is Verdict.PASS
    assert not result.executed


def test_that_judgement_can_fail() -> None:
    instance = decoding()
    result = run(instance, RECIPE, FAULTS["window + 1"].changes)
    assert judged(instance, result, RECIPE) is Verdict.FAIL


def test_slots_past_the_length_are_read_and_hidden() -> None:
    (x,) = read(decoding())
    assert x.columns == 128
    assert bool((x.k[:, 123:].abs() > 1e20).all())
    assert not bool(x.visible[..., 123:].any())
    assert int(x.visible.sum(-1).min()) == 82


@pytest.mark.parametrize("fault", [*COUNTED, *OUTSIDE], ids=lambda fault: fault.name)
def test_each_fault_is_executed_and_changes_the_result(fault: Fault) -> None:
    """Over enough keys each fault has something to do; logits below 0 throughout show a maximum that starts at 0."""
    operands = read(decoding())
    if fault.kind is Kind.MAXIMUM:
        for x in operands:
            x.q.abs_()
            x.k.abs_().mul_(-60)
    clean, faulty = attend(operands, RECIPE), attend(operands, RECIPE, fault.changes)
    assert set(faulty.touched) == set(fault.changes)
    assert faulty.executed
    assert not torch.equal(clean.wide, faulty.wide) or not torch.equal(clean.lse, faulty.lse)


@pytest.mark.parametrize(
    ("name", "instance"),
    [
        ("window + 1", decoding(window=None)),
        ("no sink", decoding(sinks="none")),
        ("sink in every split", decoding(sinks="none")),
        ("no soft cap", decoding(soft_cap=None)),
        ("soft cap after the mask", decoding(soft_cap=None)),
        ("one slot past the length", decoding(context_lens=[128])),
        ("wrong kv head", decoding(num_kv_heads=1)),
        ("heads swapped in a group", decoding(group_size=1)),
        ("one row sees ahead", decoding(query_lens=[1])),
        ("pages of K swapped", decoding(context_lens=[18], window=None)),
    ],
)
def test_a_fault_without_its_feature_is_not_executed(name: str, instance: Instance) -> None:
    operands = read(instance)
    clean, faulty = attend(operands, RECIPE), attend(operands, RECIPE, FAULTS[name].changes)
    assert not faulty.executed
    assert torch.equal(clean.out, faulty.out)
    assert torch.equal(clean.lse, faulty.lse)


@pytest.mark.parametrize("name", ["last tile not rescaled", "split lost", "merge in wrong base", "sink in every split"])
def test_what_needs_tiles_or_splits_is_not_executed_without_them(name: str) -> None:
    operands, one = read(decoding()), Recipe(tile=128, splits=1)
    faulty = attend(operands, one, FAULTS[name].changes)
    assert not faulty.executed
    assert torch.equal(attend(operands, one).wide, faulty.wide)


def test_faults_strike_where_the_seed_says() -> None:
    for name in ("key dropped", "stale token", "wrong page", "sign of one output dim"):
        first, again, other = (run(decoding(seed=seed), RECIPE, FAULTS[name].changes) for seed in (1, 1, 2))
        assert torch.equal(first.out, again.out)
        assert not torch.equal(first.out, other.out)


def test_a_dropped_key_is_one_key_of_every_row() -> None:
    operands = read(decoding())
    result = attend(operands, RECIPE, FAULTS["key dropped"].changes)
    assert result.touched == {Stage.OPERANDS: operands[0].visible.shape[0] * 4}


def test_operands_are_left_as_they_were() -> None:
    operands, fresh = read(decoding()), read(decoding())
    for fault in FAULTS.values():
        attend(operands, RECIPE, fault.changes)
    for x, y in zip(operands, fresh, strict=True):
        for name in ("q", "k", "v", "k_scale", "v_scale", "sinks", "visible"):
            assert torch.equal(getattr(x, name), getattr(y, name))


def test_names_are_distinct_and_counts_are_those_of_the_table() -> None:
    assert (len(COUNTED), len(OUTSIDE), len(FAULTS)) == (41, 10, 53)
    assert {fault.kind for fault in OUTSIDE} == {Kind.UNEXPLAINED}
    assert CLEAN.changes == {}


def test_splits_are_whole_tiles_and_cover_the_columns() -> None:
    for columns in (0, 1, 16, 17, 128, 1000):
        cuts = RECIPE.cuts(columns)
        assert [c.start for c in cuts[1:]] == [c.stop for c in cuts[:-1]]
        assert (cuts[0].start, cuts[-1].stop) == (0, columns)
        assert len(cuts) <= RECIPE.splits
        assert all(c.start % RECIPE.tile == 0 for c in cuts)


def test_a_cast_to_fp8_saturates() -> None:
    assert cast(torch.tensor([1.0, 1.06, 1e9]), "e4m3fn").tolist() == [1.0, 1.0, 448.0]
