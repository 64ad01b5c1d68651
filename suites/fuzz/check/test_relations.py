"""Relations run where their preconditions hold, and each can fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fuzz import engine as engines
from fuzz.buffers import Poison
from fuzz.case import Case, Placement, Pool, Probe
from fuzz.check.result import CaseResult, Check
from fuzz.check.run import check_case
from fuzz.check.variations import alone, as_extend, beside, elsewhere, rescalable, rescale, turned, unsaturated
from fuzz.instance import build
from fuzz.instance.pool import pages
from fuzz.plan import Plan
from fuzz.space import Space
from fuzz.support import unsupported
from oracle import declare
from oracle.attention import solve
from oracle.declare import Declaration, DeclarationError, declaration_of
from oracle.kinds import Engine
from oracle.verdict import Verdict
from suites.fuzz.cases import backend_case, decode_case, extend_case, gather_case
from suites.targets.portable import targets

ALWAYS = (Check.PAGES, Check.BATCH, Check.SETTINGS, Check.AGREEMENT)
RELATIONS = (*ALWAYS, Check.FRESH, Check.CHUNKS, Check.RESCALED)
DECODE = declaration_of(targets.decode)
assert DECODE is not None
Wrong = Callable[..., Any]


def found(declaration: Declaration, case: Case) -> dict[Check, Verdict]:
    engines.start(Engine.EMULATOR)
    result: CaseResult = check_case(declaration, case, Engine.EMULATOR, lambda _: None)
    return {c.check: c.verdict for c in result.checks if c.check in RELATIONS}


def decoding(**changes: Any) -> Case:
    plain = {"head_dim": 64, "v_head_dim": 64, "group_size": 1, "num_kv_heads": 1, "index_form": "page_table"}
    return decode_case(**(plain | {"index_dtype": "int32", "page_size": 16, "kv_layout": "shuffle_5d"} | changes))


def with_function(function: Wrong, **changes: Any) -> Declaration:
    assert DECODE is not None
    return replace(DECODE, function=function, **changes)


def test_the_relations_of_a_right_kernel_hold() -> None:
    partner = with_function(targets.decode)
    for case in (decoding(), decoding(kv_dtype="e4m3fnuz", k_descale="head", v_descale="tensor")):
        held = (*ALWAYS, Check.RESCALED) if case.kv_dtype != case.dtype else ALWAYS
        assert found(with_function(targets.decode, agrees_with=partner), case) == dict.fromkeys(held, Verdict.PASS)


def test_a_result_that_depends_on_page_numbers_fails() -> None:
    def wrong(page_table: Tensor, **given: Any) -> Any:
        out, lse = targets.decode(page_table=page_table, **given)
        return out + int(page_table[0, 0]), lse

    case = decoding(placement="ascending", pool="tight")
    assert found(with_function(wrong), case)[Check.PAGES] is Verdict.FAIL


@pytest.mark.parametrize(
    ("blame", "bitwise", "verdict"),
    [(1e-6, True, Verdict.FAIL), (1e-6, False, Verdict.PASS), (1e-2, False, Verdict.FAIL), (0.0, True, Verdict.PASS)],
)
def test_a_result_that_depends_on_the_batch_fails_by_bits_only_where_it_was_declared(
    blame: float, bitwise: bool, verdict: Verdict
) -> None:
    def wrong(lengths: Tensor, **given: Any) -> Any:
        out, lse = targets.decode(lengths=lengths, **given)
        return out * (1 + blame * len(lengths)), lse

    assert DECODE is not None
    supports = replace(DECODE.supports, batch_invariant=bitwise)
    # Of values in 16 bits, so that 1e-6 is far within the rounding of both.
    case = decoding() if bitwise else decoding(dtype="bf16", kv_dtype="bf16")

    def rounded(**given: Any) -> Any:
        out, lse = wrong(**given)
        return out.to(given["q"].dtype), lse

    assert found(with_function(rounded, supports=supports), case)[Check.BATCH] is verdict


@pytest.mark.parametrize("output", ["out", "lse"])
@pytest.mark.parametrize(("factor", "verdict"), [(0.0, Verdict.PASS), (1e-3, Verdict.FAIL)])
@pytest.mark.parametrize("knob", ["splits", "block"])
def test_a_result_that_depends_on_splits_or_on_the_size_of_a_partition_fails(
    knob: str, factor: float, verdict: Verdict, output: str
) -> None:
    def wrong(splits: int = targets.SPLITS, block: int = targets.BLOCK_N, **given: Any) -> Any:
        out, lse = targets.decode(splits=splits, block=block, **given)
        blame = factor * {"splits": splits - targets.SPLITS, "block": block - targets.BLOCK_N}[knob]
        return (out * (1 + blame), lse) if output == "out" else (out, lse + blame)

    assert found(with_function(wrong, agrees_with=None), decoding())[Check.SETTINGS] is verdict


def test_each_setting_is_judged_by_its_own_precision() -> None:
    assert DECODE is not None
    splits, block = DECODE.knobs
    for seed in range(3):
        tuned, words = turned(DECODE, splits, decoding(seed=seed))
        assert tuned.precision_for("bf16").max_splits == splits.values[seed]
        assert words == f"with splits {splits.values[seed]}: "
    assert turned(DECODE, block, decoding(seed=1))[0].precision_for("bf16").tile == 16


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"keyword": "lengths"}, "knob.keyword"),
        ({"keyword": "parts"}, "knob.keyword"),
        ({"precision": "splits"}, "knob.precision"),
        ({"values": ()}, "knob.values"),
        ({"values": (1, "2")}, "knob.values"),
    ],
)
def test_a_knob_is_a_keyword_with_a_default_and_a_field_of_the_precision(changes: dict[str, Any], told: str) -> None:
    knob = declare.Knob(**({"keyword": "splits", "values": (1, 2), "precision": "max_splits"} | changes))
    with pytest.raises(DeclarationError, match=told):
        declare.paged_decode(name="x", convention=targets.DECODE, knobs=(knob,))(targets.decode)
    with pytest.raises(DeclarationError, match="knobs"):
        declare.paged_decode(name="x", convention=targets.DECODE, knobs=("splits",))  # type: ignore[arg-type]


def scale_taken_for_the_query_too(**given: Any) -> Any:
    """As if the query had been quantised by the scale of the keys."""
    return targets.decode(**{**given, "scale": given["scale"] * float(given["k_descale"].flatten()[0])})


def values_without_descale(**given: Any) -> Any:
    return targets.decode(**{**given, "v_descale": None})


def saturated_scale(**given: Any) -> Any:
    return targets.decode(**{**given, "k_descale": given["k_descale"].clamp(min=1.0)})


@pytest.mark.parametrize("kv_dtype", ["e4m3fn", "e4m3fnuz", "e5m2fnuz"])
@pytest.mark.parametrize(
    ("function", "verdict"),
    [
        (targets.decode, Verdict.PASS),
        (scale_taken_for_the_query_too, Verdict.FAIL),
        (values_without_descale, Verdict.FAIL),
        (saturated_scale, Verdict.FAIL),
    ],
)
def test_a_power_of_two_may_be_moved_from_a_descale(function: Wrong, verdict: Verdict, kv_dtype: str) -> None:
    case = decoding(dtype="bf16", kv_dtype=kv_dtype, k_descale="tensor", v_descale="tensor", query_lens=[1, 1])
    assert found(with_function(function, agrees_with=None, knobs=()), case)[Check.RESCALED] is verdict


def test_what_is_rescaled_poses_the_same_problem() -> None:
    for case in (
        decoding(dtype="bf16", kv_dtype="e4m3fn", k_descale="tensor", v_descale="head"),
        extend_case(
            dtype="bf16",
            kv_dtype="e5m2",
            k_descale="tensor",
            v_descale="tensor",
            prefix="pool",
            head_dim=64,
            v_head_dim=64,
        ),
    ):
        plain, changed = build(case, Poison.POSITIVE), build(case, Poison.POSITIVE)
        rescale(changed)
        kept = {
            name: b.view.double()
            for name, b in plain.buffers.items()
            if not name.endswith(("cache", "indptr", "slots"))
        }
        ratios = {name: changed.buffers[name].view.double() / kept[name] for name in kept if name != "page_table"}
        assert torch.equal(ratios["q"], torch.full_like(ratios["q"], 2.0))
        assert set(ratios["k_descale"].flatten().tolist()) == {0.5}
        assert set(ratios["v_descale"].flatten().tolist()) == {2.0}
        if "k" in ratios:
            assert set(ratios["k"].flatten().tolist()) == {0.5}
            assert set(ratios["v"].flatten().tolist()) == {2.0}


def test_nothing_is_rescaled_without_a_descale_or_beyond_a_format() -> None:
    assert not rescalable(decoding())
    assert not rescalable(decoding(dtype="bf16", kv_dtype="e4m3fn"))
    scaled = decoding(dtype="bf16", kv_dtype="e4m3fn", k_descale="tensor")
    assert rescalable(scaled)
    assert not rescalable(replace(scaled, probe=Probe.OUTLIERS))
    instance = build(scaled, Poison.POSITIVE)
    assert unsaturated(instance)
    instance.buffers["q"].view[0, 0, 0] = 200.0
    assert not unsaturated(instance)


@pytest.mark.parametrize(("factor", "verdict"), [(1.0, Verdict.PASS), (1.01, Verdict.FAIL)])
def test_two_targets_that_must_agree(factor: float, verdict: Verdict) -> None:
    def other(**given: Any) -> Any:
        out, lse = targets.decode(**given)
        return (out.float() * factor).to(out.dtype), lse

    declaration = with_function(targets.decode, agrees_with=with_function(other))
    assert found(declaration, decoding(dtype="bf16", kv_dtype="bf16"))[Check.AGREEMENT] is verdict


@pytest.mark.parametrize(("keys", "verdict"), [(0, Verdict.PASS), (1, Verdict.FAIL)])
@pytest.mark.parametrize("queries", [1, 3])
def test_decode_gives_what_extend_gives_the_last_tokens(queries: int, keys: int, verdict: Verdict) -> None:
    def short(lengths: Tensor, **given: Any) -> Any:
        return targets.decode(lengths=lengths - keys, **given)

    case = decoding(dtype="bf16", kv_dtype="bf16", query_lens=[queries] * 2, window=9, soft_cap=5.0, sinks="normal")
    assert found(with_function(short), case)[Check.AGREEMENT] is verdict


def test_a_decode_and_its_extend_pose_one_problem() -> None:
    extend = declaration_of(targets.extend_after_prefix)
    linear = declaration_of(targets.extend)
    assert extend is not None
    assert linear is not None
    case = decoding(dtype="bf16", kv_dtype="bf16", query_lens=[2, 2], placement="shuffled")
    whole = build(case, Poison.POSITIVE).problem
    assert whole is not None
    for partner in (extend, linear):
        other = as_extend(case, partner)
        assert other is not None
        problem = build(other, Poison.POSITIVE).problem
        assert problem is not None
        for name in ("q", "k", "v"):
            assert torch.equal(getattr(problem, name), getattr(whole, name))
        assert (problem.q_lens, problem.kv_lens) == (whole.q_lens, whole.kv_lens)
    # What is passed beside an fp8 pool is in the model's dtype: other keys.
    quantised = decoding(dtype="bf16", kv_dtype="e4m3fn")
    assert as_extend(quantised, extend) is None
    assert as_extend(quantised, linear) is not None
    # A query before its request's first key has no token in a pool.
    early = decoding(query_lens=[1, 1], context_lens=[9, 0])
    assert as_extend(early, extend) is None
    assert as_extend(early, linear) is not None


def test_a_fresh_prompt_is_compared_with_itself_in_other_company() -> None:
    fresh = backend_case(query_lens=[17, 3])
    company = beside(fresh)
    assert company is not None
    assert (company.context_lens, company.query_lens) == ((17, 3, 3), (17, 3, 1))
    assert beside(backend_case(query_lens=[17, 2])) == alone(backend_case(query_lens=[17, 2]))
    assert beside(backend_case(query_lens=[16, 3])) is None
    assert beside(extend_case()) is None
    whole, more = (build(c, Poison.POSITIVE).problem for c in (fresh, company))
    assert whole is not None
    assert more is not None
    assert torch.equal(more.q[:20], whole.q)
    assert torch.equal(more.k[:20], whole.k)


def test_what_depends_on_poison_is_not_asked_about_relations() -> None:
    def wrong(k_cache: Tensor, **given: Any) -> Any:
        out, lse = targets.decode(k_cache=k_cache, **given)
        return out + k_cache.flatten()[-1], lse

    assert found(with_function(wrong), decoding(context_lens=[3, 3])) == {}


def test_no_other_place_is_no_relation() -> None:
    one = decoding(context_lens=[3], query_lens=[1], placement="ascending", pool="tight")
    assert elsewhere(one) is None
    assert elsewhere(decoding(pool=Pool.HUGE)) is None
    assert elsewhere(extend_case()) is None
    assert elsewhere(gather_case()) is None
    moved = elsewhere(decoding(pool="spare"))
    assert moved is not None
    assert pages(moved) != pages(decoding(pool="spare"))


@given(seed=st.integers(0, 1 << 31), placement=st.sampled_from(Placement), backend=st.booleans())
def test_the_first_request_alone_has_the_values_that_it_has_in_the_batch(
    seed: int, placement: Placement, backend: bool
) -> None:
    make = backend_case if backend else decode_case
    case = make(seed=seed, placement=placement)
    whole, single = (build(c, Poison.NAN) for c in (case, alone(case)))
    assert whole.problem is not None
    assert single.problem is not None
    queries, keys = case.query_lens[0], case.context_lens[0]
    assert torch.equal(single.problem.q, whole.problem.q[:queries])
    assert torch.equal(single.problem.k, whole.problem.k[:keys])
    assert torch.equal(single.problem.v, whole.problem.v[:keys])


def a_gather(k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """A gather, which no decode agrees with."""


declare.kv_gather(name="x", convention=targets.SHUFFLE_5D)(a_gather)


def test_a_partner_is_a_declared_function_of_the_same_operation() -> None:
    for partner in (len, a_gather):
        with pytest.raises(DeclarationError, match="agrees_with"):
            declare.paged_decode(name="x", convention=targets.DECODE, agrees_with=partner)


def test_a_decode_as_an_extend_poses_the_same_problem_whatever_its_features() -> None:
    assert DECODE is not None
    partner = DECODE.agrees_with
    assert partner is not None
    compared = 0
    for case in islice(Plan(Space(DECODE, most_tokens=60), 0), 400):
        other = as_extend(case, partner)
        if other is not None and unsupported(partner, other) is None:
            ours, theirs = (build(one, Poison.POSITIVE).problem for one in (case, other))
            assert ours is not None
            assert theirs is not None
            assert torch.equal(solve(ours).out, solve(theirs).out), case
            compared += 1
    assert compared > 3
