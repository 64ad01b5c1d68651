"""Roundings that no hypothesis reproduces bit for bit are named by the budget that allows them, and nothing else is."""

from __future__ import annotations

import torch
from torch import Tensor

from oracle.diagnose import Diagnosis, Kind, diagnose
from oracle.precision import Precision
from oracle.problem import Problem
from oracle.rounding import round_to, widen
from suites.oracle.diagnose.calls import normal

PRECISE = Precision(source="this test", kv_cast=None, p_dtype=None, sink_first=False)
LENGTHS = (3, 1, 12, 2, 7)
DIM = 64


def bf16(x: Tensor) -> Tensor:
    return widen(round_to(x, torch.bfloat16))


def posed(stream: int) -> Problem:
    """A decode of five requests over one kv head for each query head; logits are about -32, where bf16 is coarse."""
    q, k, v = (normal(stream + i, n, 3, DIM) for i, n in enumerate((len(LENGTHS), sum(LENGTHS), sum(LENGTHS))))
    q, k = (round_to(widen(x) + step, torch.bfloat16) for x, step in ((q, 1.0), (k, -1.0)))
    return Problem(q=q, k=k, v=v, q_lens=(1,) * len(LENGTHS), kv_lens=LENGTHS, scale=0.5)


def halved(asked: Problem, small: float = 1.0) -> Tensor:
    """out of a kernel that adds products up in bf16, in halves of halves; `small`: another factor of request 4."""
    outs = []
    for r, (q, k, v) in enumerate(
        zip(widen(asked.q), widen(asked.k).split(LENGTHS), widen(asked.v).split(LENGTHS), strict=True)
    ):
        terms = bf16(q * k)
        while terms.shape[-1] > 1:
            terms = bf16(terms.unflatten(-1, (2, -1)).sum(-2))
        weights = (bf16(terms.squeeze(-1) * asked.scale)).softmax(0)
        outs.append((weights.unsqueeze(-1) * v).sum(0) * (small if r == 4 else 1.0))
    return round_to(torch.stack(outs), torch.bfloat16)


def said(asked: Problem, out: Tensor) -> Diagnosis:
    return diagnose(asked, out, None, precision=PRECISE, input_dtype="bf16")


def test_sums_in_bf16_are_a_rounding_and_no_fault_of_some_rows() -> None:
    found = [d for stream in range(6) if (d := said(asked := posed(10 * stream), halved(asked))).kind is not Kind.NONE]
    assert len(found) >= 3
    assert {(d.kind, d.detail) for d in found} == {
        (Kind.PRECISION, "precision: errors as large as those of logits in bf16")
    }


def test_what_is_larger_than_such_a_rounding_is_not_one() -> None:
    asked = posed(0)
    assert said(asked, halved(asked, small=2.0)).kind is not Kind.PRECISION
