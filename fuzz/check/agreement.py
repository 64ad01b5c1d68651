"""Do two engines give the same outputs for the same case?

Copies and index lists have one right answer, so their bits must agree. Where floating-point numbers are computed, two
correct executions may differ by twice the worst-case bound and a rounding of the output.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from fuzz.buffers import Poison
from fuzz.case import Case
from fuzz.check.execute import Execution
from fuzz.check.memory import IN_PLACE
from fuzz.instance import build
from oracle.bits import bits
from oracle.budget import Bounds, worst_case
from oracle.budget.formats import FORMAT_OF_DTYPE
from oracle.budget.merge import merge_bounds
from oracle.convention import LseLayout
from oracle.declare import Declaration
from oracle.kinds import LseBase, Operation
from oracle.merge import merge_states
from oracle.rounding import widen


class Agreement(StrEnum):
    """How the outputs of two engines compare, the better ones first."""

    IDENTICAL = "identical"
    WITHIN = "within"
    """other bits, no farther apart than two correct executions may be"""
    BEYOND = "beyond"


@dataclass(frozen=True)
class Compared:
    """How two results compare. ``ratio``: the largest difference over what is allowed, None where bits decide."""

    agreement: Agreement
    ratio: float | None = None


def outputs_of(run: Execution) -> dict[str, Tensor]:
    """What a call produced, on the CPU: its outputs, or the buffers that it wrote in place."""
    found = run.outputs or {name: run.instance.buffers[name].view for name in IN_PLACE}
    return {name: value.contiguous().cpu() for name, value in found.items()}


def compare(declaration: Declaration, case: Case, a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Compared:
    """Compare the outputs of two executions of ``case``. Raises ``ValueError`` if they differ in kind."""
    kinds = [{name: (x.dtype, tuple(x.shape)) for name, x in side.items()} for side in (a, b)]
    if kinds[0] != kinds[1]:
        raise ValueError(f"outputs: {kinds[0]} on one engine, {kinds[1]} on the other")
    if all(bool((bits(a[name]) == bits(b[name])).all()) for name in a):
        return Compared(Agreement.IDENTICAL)
    if not (case.is_attention or case.operation is Operation.LSE_MERGE):
        return Compared(Agreement.BEYOND)
    bounds = _bounds(declaration, case)
    ratio = _ratio(a["out"], b["out"], bounds.out)
    if "lse" in a:
        turned = declaration.convention.lse_layout is LseLayout.HEAD_TOKEN
        ratio = max(ratio, _ratio(a["lse"], b["lse"], bounds.lse.T if turned else bounds.lse))
    return Compared(Agreement.WITHIN if ratio <= 1 else Agreement.BEYOND, ratio)


def _bounds(declaration: Declaration, case: Case) -> Bounds:
    """Worst-case bounds of the outputs, the log-sum-exp's in the target's own base."""
    convention, precision = declaration.convention, declaration.precision_for(case.dtype, case.kv_dtype)
    instance = build(case, Poison.POSITIVE)
    if instance.problem is None:
        outs, lses = (instance.buffers[name].view.double() for name in ("outs", "lses"))
        out, lse = merge_states(outs, lses, convention.lse_base)
        return merge_bounds(outs, lses, out, lse, precision, convention.lse_base)
    found = worst_case(
        instance.problem, precision, input_dtype=case.dtype, lse_includes_sink=convention.lse_includes_sink
    )
    unit = math.log2(math.e) if convention.lse_base is LseBase.TWO else 1.0
    return Bounds(found.out, found.lse * unit, found.reach, found.keys)


def _ratio(a: Tensor, b: Tensor, bound: Tensor) -> float:
    """Largest difference over twice ``bound`` and a step of the dtype; inf if only one side is finite there."""
    fmt = FORMAT_OF_DTYPE[a.dtype]
    same = bits(a) == bits(b)
    x, y = widen(a), widen(b)
    step = torch.maximum(x.abs(), y.abs()) * (2 * fmt.unit_roundoff) + 2 * fmt.half_subnormal
    ratio = ((x - y).abs() / (2 * bound + step)).masked_fill(same, 0.0)
    # Two NaNs of other payloads agree; a NaN or an infinity beside a number does not.
    ratio = ratio.masked_fill(x.isnan() & y.isnan(), 0.0)
    return float(ratio.nan_to_num(nan=math.inf, posinf=math.inf).max()) if ratio.numel() else 0.0
