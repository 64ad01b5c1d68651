"""What was done is named, with its numbers; what is right, or of no kind that is known, is not."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from oracle.attention import solve
from oracle.convention import Convention, Fp8Flavour
from oracle.diagnose import Kind, Surroundings, diagnose
from oracle.kinds import LseBase
from oracle.precision import Precision
from oracle.problem import Problem
from oracle.rounding import round_to
from suites.oracle.diagnose.calls import CONVENTION, normal, problem, returned, said, solved_instead

SINKS = torch.tensor([1.5, 0.5, 2.0, -1.0])
WINDOWED = {"window": 20}


def slow(*values: object) -> object:
    """Parameters of a test that is left out unless asked for."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize("with_lse", [True, False])
def test_what_is_right_needs_no_diagnosis(with_lse: bool) -> None:
    asked = problem(window=20, sinks=SINKS, soft_cap=5.0)
    found = solved_instead(asked, with_lse=with_lse)
    assert found.kind is Kind.NONE
    assert found.ratio <= 1


@pytest.mark.parametrize(
    ("asked", "solved", "kind", "words"),
    [
        (WINDOWED, {"window": 19}, Kind.WINDOW, "19 keys where 20 keys are asked for"),
        slow(WINDOWED, {"window": 37}, Kind.WINDOW, "37 keys where 20 keys are asked for"),
        (WINDOWED, {"window": None}, Kind.WINDOW, "no window where 20 keys"),
        slow({}, {"window": 31}, Kind.WINDOW, "31 keys where none is"),
        slow({}, {"causal": False}, Kind.CAUSAL, "off"),
        ({"sinks": SINKS}, {"sinks": None}, Kind.SINK, "left out"),
        slow({"sinks": SINKS}, {"sinks": SINKS * 0.23}, Kind.SINK, "softmax scale"),
        slow({"sinks": SINKS}, {"sinks": SINKS.roll(1)}, Kind.SINK, "head before"),
        slow({}, {"scale": 0.25}, Kind.SCALE, "1/sqrt(D)"),
        ({}, {"scale": 0.23 * 1.03}, Kind.SCALE, "1.03 times"),
        ({"soft_cap": 3.0}, {"soft_cap": None}, Kind.SOFT_CAP, "none where 3"),
        slow({"k_descale": torch.tensor([[0.5, 1.75]])}, {"k_descale": None}, Kind.K_DESCALE, "left out"),
        (
            {"v_descale": torch.tensor([[0.5, 1.75]])},
            {"v_descale": torch.tensor([[1.75, 0.5]])},
            Kind.V_DESCALE,
            "head",
        ),
        slow({}, {"q": problem().q.double() * (torch.arange(16) < 15)}, Kind.DIMS, "last dim"),
        ({}, {"v": problem().v.double() * 1.07}, Kind.V_DESCALE, "1.07 times"),
    ],
)
def test_another_convention_is_named(asked: dict[str, Any], solved: dict[str, Any], kind: Kind, words: str) -> None:
    found = solved_instead(problem(**asked), **solved)
    assert (found.kind, words in found.detail) == (kind, True), found
    assert found.ratio <= 1


def test_the_log_sum_exp_may_be_all_that_is_wrong() -> None:
    asked = problem(sinks=SINKS)
    out, lse = returned(asked)
    assert said(asked, out, lse * 1.4426950408889634).kind is Kind.LSE_BASE
    convention = Convention(source="this test", lse_includes_sink=True)
    assert "log-sum-exp" in said(asked, out, lse, convention).detail
    two = Convention(source="this test", lse_base=LseBase.TWO)
    assert said(asked, out, lse, two).kind is Kind.LSE_BASE
    axes = said(asked, out, lse.t().reshape(lse.shape))
    assert axes.kind is Kind.LSE


def test_bytes_of_the_other_fp8_family() -> None:
    asked = problem(k=normal(2, 60, 2, 16, dtype=torch.float8_e4m3fn), v=normal(3, 60, 2, 16))
    found = solved_instead(asked, k=asked.k.view(torch.float8_e4m3fnuz))
    assert found.kind is Kind.FP8_FLAVOUR
    assert Fp8Flavour.FNUZ in found.detail


@pytest.mark.parametrize("with_lse", [True, slow(False)])
def test_single_keys(with_lse: bool) -> None:
    asked = problem()
    keep = torch.arange(60) != 23
    out, lse = returned(asked.subset(keep))
    found = said(asked, out, lse if with_lse else None)
    assert found.kind is Kind.MISSING_KEY
    assert found.parameters["key"] == 23

    v = asked.v.clone()
    v[31] = normal(9, 2, 16)
    found = solved_instead(asked, with_lse=with_lse, v=v)
    assert found.kind is Kind.STALE_KEY
    assert (found.parameters["key"], found.parameters["operand"]) == (31, "v")


def test_several_keys_are_decoded() -> None:
    asked = problem(sinks=SINKS)
    keep = ~torch.isin(torch.arange(60), torch.tensor([9, 23, 41]))
    found = said(asked, *returned(asked.subset(keep)))
    assert found.kind is Kind.MISSING_KEY
    assert [key["position"] for key in found.parameters["keys"][:3]] == [9, 23, 41]
    assert "each row of request 0 misses key 9; each row" in found.detail


def test_a_key_and_value_from_elsewhere() -> None:
    asked = problem()
    k, v = asked.k.clone(), asked.v.clone()
    k[31], v[31] = normal(8, 2, 16), normal(9, 2, 16)
    found = solved_instead(asked, k=k, v=v)
    assert found.kind is Kind.STALE_KEY
    assert found.parameters["key"] == 31


def test_a_slot_past_the_end() -> None:
    asked = problem()
    stale = normal(8, 4, 2, 16), normal(9, 4, 2, 16)
    seen = replace(
        asked,
        k=torch.cat([asked.k, stale[0][:1]]),
        v=torch.cat([asked.v, stale[1][:1]]),
        q_lens=(3,),
        kv_lens=(61,),
        causal=False,
    )
    causal_off = replace(asked, causal=False)
    found = said(causal_off, *returned(seen), around=Surroundings(stale=(stale,)))
    assert found.kind is Kind.STALE_KEY
    assert "past the request's last key" in found.detail


@pytest.mark.parametrize("heads", [[0, 1, 2, 3], [1, 2]])
@pytest.mark.parametrize("window", [None, 1])
def test_rows_as_if_without_a_key(heads: list[int], window: int | None) -> None:
    asked = problem(window=window, sinks=SINKS)
    out, lse = returned(asked)
    out[:, heads], lse[:, heads] = 0.0, -torch.inf
    found = said(asked, out, lse)
    assert found.kind is Kind.NO_KEY
    assert found.detail.endswith("only in heads 1, 2") == (len(heads) == 2)


def test_all_weights_lost_says_no_number_for_the_start_of_the_maximum() -> None:
    # Logits of about -300: a start of 0 and one of -100 lose them all alike.
    asked = problem(q=-torch.ones(3, 4, 16).bfloat16(), k=normal(2, 60, 2, 16) + 80)
    out, lse = returned(asked)
    found = said(asked, torch.zeros_like(out), torch.full_like(lse, -torch.inf))
    assert found.kind is Kind.MAXIMUM
    assert "at 0" not in found.detail
    assert found.parameters["start"] is None


def test_logits_of_0_are_no_scale() -> None:
    asked = problem()
    out, lse = returned(asked)
    zero_out, zero_lse = returned(replace(asked, q=asked.q * 0))
    out[:, 1:], lse[:, 1:] = zero_out[:, 1:], zero_lse[:, 1:]
    found = said(asked, out, lse)
    assert (found.kind, "every logit is 0" in found.detail) == (Kind.DIMS, True), found
    assert found.detail.endswith("only in heads 1, 2, 3")


@pytest.mark.parametrize(("heads", "kind"), [([0, 1], Kind.SCALE), ([1, 2], Kind.UNEXPLAINED)])
def test_a_scale_that_is_fitted_holds_of_whole_kv_heads(heads: list[int], kind: Kind) -> None:
    asked = problem()
    out, lse = returned(asked)
    other_out, other_lse = returned(replace(asked, scale=0.23 * 1.7))
    out[:, heads], lse[:, heads] = other_out[:, heads], other_lse[:, heads]
    assert said(asked, out, lse).kind is kind


def test_a_cap_after_the_mask_over_values_that_are_not_loaded() -> None:
    # A tile of 128 keys: those hidden weigh exp(-cap), but a load that is masked gives values of 0.
    asked = problem(soft_cap=3.0, keys=100, queries=1)
    solution = solve(asked)
    whole = torch.logaddexp(solution.lse, torch.tensor(-3.0 + math.log(28)).double())
    out = round_to(solution.out * (solution.lse - whole).exp().unsqueeze(-1), torch.bfloat16)
    found = said(asked, out, whole.float(), around=Surroundings(tile=128))
    assert (found.kind, "after the mask" in found.detail) == (Kind.SOFT_CAP, True), found
    assert found.detail.endswith("with values of 0")


def test_too_little_evidence_is_said_and_names_nothing() -> None:
    # One row of one value: a sink left out shows as the next number, and so would much else.
    asked = problem(
        keys=60,
        queries=1,
        q=normal(1, 1, 1, 16),
        k=normal(2, 60, 1, 16),
        v=torch.ones(60, 1, 16).bfloat16(),
        sinks=torch.tensor([-2.5]),
    )
    asked = replace(asked, sinks=solve(asked).lse[0].float() + math.log(0.00201))
    precision = Precision(source="this test", kv_cast=None, p_dtype=None, qk_product=None, sink_first=False)
    found = diagnose(asked, torch.ones(1, 1, 16).bfloat16(), None, precision=precision, input_dtype="bf16")
    assert found.kind is Kind.UNEXPLAINED
    assert "too little is wrong" in found.detail
    assert "sink: left out" in found.detail
    assert not found.runners_up


def test_keys_that_explain_alike_are_not_told_apart() -> None:
    v = normal(3, 60, 2, 16)
    v[40], k = v[23], problem().k.clone()
    k[40] = k[23]
    asked = problem(k=k, v=v, causal=False)
    found = said(asked, *returned(asked.subset(torch.arange(60) != 23)))
    assert found.kind is Kind.MISSING_KEY
    assert "one of the keys 23, 40 " in found.detail
    assert found.parameters["alike"] == [23, 40]
    alone = said(asked, *returned(asked.subset(torch.arange(60) != 24)))
    assert alone.detail == "missing_key: key 24 is not seen"


def pooled(pages: tuple[tuple[int, ...], ...], lens: tuple[int, ...], size: int = 8) -> tuple[Problem, Surroundings]:
    """A problem whose keys lie in pages of a pool of 12, what lies around it."""
    pool_k, pool_v = normal(20, 12, size, 2, 16), normal(21, 12, size, 2, 16)
    k, v = (
        torch.cat([pool[list(own)].flatten(0, 1)[:n] for own, n in zip(pages, lens, strict=True)])
        for pool in (pool_k, pool_v)
    )
    asked = problem(q=normal(1, len(lens), 4, 16), k=k, v=v, q_lens=(1,) * len(lens), kv_lens=lens)
    return asked, Surroundings(page_size=size, pages=pages, pool_k=pool_k, pool_v=pool_v)


@pytest.mark.parametrize(
    ("read", "words"),
    [
        (((0, 1, 2), (0, 1)), "the table is not used"),
        (((5, 9, 3), (7, 2)), "row of the next request"),
        (((2, 5, 5), (9, 9)), "entry i + 1"),
    ],
)
def test_a_page_table_that_is_not_read_as_it_is_given(read: tuple[tuple[int, ...], ...], words: str) -> None:
    pages, lens = ((7, 2, 5), (1, 9)), (20, 13)
    if "next" in words:
        pages, read, lens = ((7, 2), (5, 9)), ((5, 9), (7, 2)), (13, 16)
    asked, around = pooled(pages, lens)
    found = said(asked, *returned(pooled(read, lens)[0]), around=around)
    assert found.kind is Kind.PAGE, found
    assert words in found.detail


def test_a_page_of_poison_read_in_place_of_another() -> None:
    pages, lens = ((7, 2, 5, 1),), (32,)
    asked, around = pooled(pages, lens)
    assert around.pool_k is not None
    assert around.pool_v is not None
    for page in (3, 4):
        around.pool_k[page], around.pool_v[page] = 1.25, 40.0
    k, v = asked.k.clone(), asked.v.clone()
    k[16:24], v[16:24] = 1.25, 40.0
    found = said(asked, *returned(replace(asked, k=k, v=v)), around=around)
    assert found.kind is Kind.PAGE, found
    assert found.detail.startswith("page: page 3 of the pool (or another of 2 that are alike) is read")
    assert found.parameters["page"] == 2


@pytest.mark.parametrize("operands", ["kv", "k"])
def test_pages(operands: str) -> None:
    asked = problem()
    index = torch.arange(60)
    index[8:16] = torch.arange(32, 40)
    changed = {name: getattr(asked, name)[index] for name in operands}
    found = said(asked, *returned(replace(asked, **changed)), around=Surroundings(page_size=8))
    assert found.kind is Kind.PAGE
    assert (found.parameters["page"], found.parameters["read"]) == (1, 4)


def test_a_range_and_a_rank_of_keys() -> None:
    asked = problem()
    key = torch.arange(60)
    lost = said(asked, *returned(asked.subset((key < 16) | (key >= 43))))
    assert lost.kind is Kind.SPLIT
    assert (lost.parameters["first"], lost.parameters["last"]) == (16, 42)
    rank = said(asked, *returned(asked.subset(key % 3 != 1)))
    assert rank.kind is Kind.SPLIT
    assert (rank.parameters["rank"], rank.parameters["ranks"]) == (1, 3)


@pytest.mark.slow
def test_places() -> None:
    asked = problem()
    out, lse = returned(asked)
    order = [1, 0, 2, 3]
    heads = said(asked, out[:, order], lse[:, order])
    assert heads.kind is Kind.HEAD
    assert "head 0 holds 1" in heads.detail
    queries = said(asked, out.flip(0), lse.flip(0))
    assert queries.kind is Kind.ROW
    kv = solved_instead(asked, k=asked.k.flip(1), v=asked.v.flip(1))
    assert kv.kind is Kind.HEAD
    assert "kv head" in kv.detail


def test_one_row_alone_is_said_to_be_one() -> None:
    asked = problem(window=20)
    out, lse = returned(asked)
    wrong_out, wrong_lse = returned(replace(asked, window=21))
    out[1, 2], lse[1, 2] = wrong_out[1, 2], wrong_lse[1, 2]
    found = said(asked, out, lse)
    assert found.kind is Kind.WINDOW
    assert found.detail.endswith("only in token 1, head 2")


def test_rows_without_a_key() -> None:
    asked = problem(keys=2, queries=4)
    out, lse = returned(asked)
    out[0] = torch.nan
    found = said(asked, out, lse)
    assert found.kind is Kind.EMPTY_ROW
    assert "NaN" in found.detail


@pytest.mark.parametrize("with_lse", [True, slow(False)])
@pytest.mark.parametrize("fault", ["noise", "nan", slow("sign"), slow("zero")])
def test_what_is_of_no_known_kind_is_unexplained(fault: str, with_lse: bool) -> None:
    asked = problem(sinks=SINKS, window=20)
    out, lse = returned(asked)
    match fault:
        case "noise":
            out = round_to(out.double() + 0.05 * normal(7, *out.shape).double(), torch.bfloat16)
        case "nan":
            out[2, 1, 5] = torch.nan
        case "sign":
            out[..., 3] *= -1
        case "zero":
            out[..., 4] = 0
    found = said(asked, out, lse if with_lse else None)
    assert found.kind is Kind.UNEXPLAINED, found
    assert not found.runners_up


def test_an_effect_below_the_budget_is_no_explanation() -> None:
    # A value within its budget of another hypothesis, and of none that changes it: noise stays noise.
    asked = problem(sinks=torch.full((4,), -40.0))
    out, lse = returned(asked)
    lse = lse + 1e-2
    assert said(asked, out, lse).kind is not Kind.SINK


@pytest.mark.slow
def test_the_same_call_gives_the_same_diagnosis() -> None:
    asked = problem(sinks=SINKS, window=20)
    first, second = (solved_instead(asked, window=22) for _ in range(2))
    assert first.to_dict() == second.to_dict()


@pytest.mark.slow
def test_several_requests_and_keys_out_of_order() -> None:
    lens = (60, 5, 40)
    asked = problem(
        keys=sum(lens),
        queries=5,
        q_lens=(2, 1, 2),
        kv_lens=lens,
        window=20,
        kv_positions=torch.cat([torch.arange(n).flip(0) for n in lens]),
    )
    assert solved_instead(asked).kind is Kind.NONE
    found = solved_instead(asked, window=18)
    assert found.kind is Kind.WINDOW
    keep = torch.ones(sum(lens), dtype=torch.bool)
    keep[60 + 5 + 3] = False  # position 36 of the third request
    found = said(asked, *returned(asked.subset(keep)))
    assert found.kind is Kind.MISSING_KEY
    assert (found.parameters["key"], found.parameters["request"]) == (36, 2)


def test_what_is_said_is_plain_data() -> None:
    data = solved_instead(problem(window=20), window=21).to_dict()
    assert data["kind"] == "window"
    assert data["parameters"] == {"keys": 21, "asked": 20}
    assert isinstance(data["runners_up"], list)


@pytest.mark.slow
def test_a_target_that_returns_what_it_was_asked_in_its_own_convention() -> None:
    asked = problem(sinks=SINKS)
    convention = Convention(source="this test", lse_includes_sink=True, lse_base=LseBase.TWO)
    out, lse = returned(asked, convention)
    assert said(asked, out, lse * 1.4426950408889634, convention).kind is Kind.NONE
    assert said(asked, out, lse, CONVENTION).kind is Kind.SINK
    assert solve(asked).out.shape == out.shape
