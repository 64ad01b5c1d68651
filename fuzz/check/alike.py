"""Whether two executions gave the same: bit for bit, or within what both may err by."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from fuzz.check.attention import judge_within
from fuzz.check.execute import Execution
from fuzz.check.result import Check, CheckResult
from oracle.attention import Solution
from oracle.bits import bits
from oracle.budget import Bounds, worst_case
from oracle.convention import LseLayout
from oracle.declare import Declaration
from oracle.kinds import LseBase
from oracle.verdict import Verdict

Side = tuple[Declaration, Execution]


def same_bits(declaration: Declaration, check: Check, words: str, first: Execution, second: Execution) -> CheckResult:
    """The rows that both have are the same bit for bit: those of ``second``, the shorter one or as long."""
    for name in second.outputs:
        a, b = (_by_token(declaration, name, run.outputs[name]) for run in (first, second))
        differ = bits(a[: len(b)].contiguous()) != bits(b.contiguous())
        count = int(differ.sum())
        if count:
            where = differ.nonzero()[0].tolist()
            message = f"{count} of {differ.numel()} elements of {name} {words}, the first at {where}"
            return CheckResult(check, Verdict.FAIL, message, {"output": name, "count": count, "first": where})
    return CheckResult(check, Verdict.PASS)


def _by_token(declaration: Declaration, name: str, output: Tensor) -> Tensor:
    turned = name == "lse" and declaration.convention.lse_layout is LseLayout.HEAD_TOKEN
    return output.transpose(0, 1) if turned else output


def within(check: Check, words: str, a: Side, b: Side, rows: range, *, factor: float = 1.0) -> CheckResult:
    """``rows`` of the first's outputs are the first rows of the second's: within what each may err by, and the latter's
    output rounding.

    ``factor``: what the second's output is to be multiplied by, which its problem has not.
    """
    (declaration, first), (partner, second) = a, b
    problem, case = second.instance.problem, second.instance.case
    if problem is None:
        raise TypeError(f"{case.operation} poses no attention problem")
    one, other = (
        worst_case(
            problem,
            d.precision_for(case.dtype, case.kv_dtype),
            input_dtype=case.dtype,
            lse_includes_sink=d.convention.lse_includes_sink,
        )
        for d in (declaration, partner)
    )
    count = slice(len(rows))
    out = second.outputs["out"][count].to(problem.device)
    lse, lse_error = _natural_lse(partner, second, one, count)
    allowed = Bounds(
        one.out[count] + other.out[count] + _half_spacing(out) * factor,
        one.lse[count] + other.lse[count] + lse_error,
        one.reach[count],
        one.keys[count],
    )
    names = ("out", "lse") if _same_lse(declaration, partner) else ("out",)
    part = {name: _by_token(declaration, name, first.outputs[name])[rows.start : rows.stop] for name in names}
    part = {name: _by_token(declaration, name, output) for name, output in part.items()}
    found = judge_within(declaration, replace(first, outputs=part), Solution(out.double() * factor, lse), allowed)
    wrong = next((result for result in found if result.verdict is Verdict.FAIL), None)
    if wrong is None:
        return CheckResult(check, Verdict.PASS)
    output = "log-sum-exp, " if wrong.check is Check.LSE else ""
    return CheckResult(check, Verdict.FAIL, words + output + wrong.message, wrong.evidence)


def _same_lse(declaration: Declaration, partner: Declaration) -> bool:
    """Whether both return a log-sum-exp, of the same terms."""
    both = (declaration.convention, partner.convention)
    returned = all(convention.lse_layout is not LseLayout.NONE for convention in both)
    return returned and both[0].lse_includes_sink == both[1].lse_includes_sink


def _natural_lse(partner: Declaration, run: Execution, bounds: Bounds, count: slice) -> tuple[Tensor, Tensor]:
    """The first rows of the log-sum-exp that ``run`` returned, in natural units, and its rounding; else zeros."""
    if "lse" not in run.outputs:
        zero = torch.zeros_like(bounds.lse[count])
        return zero, zero
    unit = math.log2(math.e) if partner.convention.lse_base is LseBase.TWO else 1.0
    lse = _by_token(partner, "lse", run.outputs["lse"]).to(bounds.lse.device)[count]
    finite = lse.masked_fill((bounds.keys[count] == 0).unsqueeze(1), 0.0)
    return finite.double() / unit, _half_spacing(finite) / unit


def _half_spacing(values: Tensor) -> Tensor:
    """An upper bound on the rounding error that is in each of ``values``, float64; 0 where one is not finite."""
    info = torch.finfo(values.dtype)
    found = values.double().abs().clamp_min(info.smallest_normal) * info.eps / 2
    return found.masked_fill(~values.isfinite(), 0.0)
