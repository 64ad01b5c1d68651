"""What a merge of states did instead is named."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from oracle import philox
from oracle.diagnose import Diagnosis, Kind, diagnose_merge
from oracle.kinds import LseBase
from oracle.merge import merge_states
from oracle.precision import Precision

PRECISION = Precision(source="this test")
OUTS = philox.normal(5, 1, (3, 4, 2, 8)).float()
LSES = philox.normal(5, 2, (3, 4, 2)).float() * 3


def said(out: Tensor, lse: Tensor, lses: Tensor = LSES, base: LseBase = LseBase.NATURAL) -> Diagnosis:
    return diagnose_merge(OUTS, lses, out.float(), lse.float(), precision=PRECISION, base=base)


def test_a_right_merge_needs_no_diagnosis() -> None:
    assert said(*merge_states(OUTS, LSES)).kind is Kind.NONE


def test_bases() -> None:
    out, lse = merge_states(OUTS, LSES)
    assert said(out, lse / math.log(2)).kind is Kind.LSE_BASE
    read_as_two = said(*merge_states(OUTS, LSES, LseBase.TWO))
    assert read_as_two.kind is Kind.LSE_BASE
    assert "read as of base 2" in read_as_two.detail
    assert said(*merge_states(OUTS, LSES), base=LseBase.TWO).kind is Kind.LSE_BASE


@pytest.mark.parametrize("lost", [0, 2])
def test_a_lost_state(lost: int) -> None:
    kept = [i for i in range(3) if i != lost]
    found = said(*merge_states(OUTS[kept], LSES[kept]))
    assert found.kind is Kind.SPLIT
    assert f"state {lost} is lost" in found.detail


def test_an_average_and_weights_of_others() -> None:
    lse = merge_states(OUTS, LSES)[1]
    assert "averaged" in said(OUTS.mean(0), lse).detail
    assert said(*merge_states(OUTS, LSES.roll(1, 0))).kind is Kind.MERGE


@pytest.mark.parametrize("base", list(LseBase))
def test_weights_that_are_summed_in_the_other_base(base: LseBase) -> None:
    # The sum is of powers of the other base, over which outputs are weighted in their own: the weights miss 1.
    power, log, other = (
        (torch.exp, torch.log, torch.exp2) if base is LseBase.NATURAL else (torch.exp2, torch.log2, torch.exp)
    )
    top = LSES.double().amax(0)
    lse = top + log(other(LSES.double() - top).sum(0))
    out = (power(LSES.double() - lse).unsqueeze(-1) * OUTS.double()).sum(0)
    found = said(out, lse, base=base)
    assert found.kind is Kind.MERGE
    assert "do not sum to 1" in found.detail


@pytest.mark.parametrize("wrong", [[0], [0, 1, 2]])
def test_log_sum_exps_whose_axes_are_exchanged(wrong: list[int]) -> None:
    lses = LSES.clone()
    for i in wrong:
        lses[i] = LSES[i].flatten().view(2, 4).t()
    found = said(*merge_states(OUTS, lses))
    assert found.kind is Kind.LSE
    assert ("state 0 are" if wrong == [0] else "the states are") in found.detail
    assert found.detail.endswith("heads first")


def test_rows_of_empty_states() -> None:
    lses = LSES.clone()
    lses[:, 1] = -math.inf
    out, lse = merge_states(OUTS, lses)
    assert said(out, lse, lses).kind is Kind.NONE
    out[1] = math.nan
    found = said(out, lse, lses)
    assert found.kind is Kind.EMPTY_ROW
    assert "NaN" in found.detail


def test_noise_is_unexplained() -> None:
    out, lse = merge_states(OUTS, LSES)
    assert said(out + 0.01 * philox.normal(5, 3, tuple(out.shape)), lse).kind is Kind.UNEXPLAINED
