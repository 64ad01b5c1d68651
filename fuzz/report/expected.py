"""What a case's outputs must be, as tensors: the values, and how far an element may be from them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fuzz.call import expected_outputs
from fuzz.check.attention import expected_attention, expected_merge
from fuzz.instance import Instance
from oracle.budget import Budgets
from oracle.convention import LseLayout
from oracle.declare import Declaration
from oracle.kinds import LseBase, Operation, Role
from oracle.precision import Rounding


@dataclass(frozen=True, eq=False)
class Expectation:
    """One output, on the CPU. ``allowed``: float64, before the output is rounded, inf where anything is right; None:
    the bits of ``values``. ``dtype`` None: any. ``step``: what rounding may add, in steps of the output's dtype."""

    values: Tensor
    allowed: Tensor | None
    dtype: torch.dtype | None
    step: float = 0.5


def expectations(declaration: Declaration, instance: Instance, *, probable: bool) -> dict[str, Expectation]:
    """What each output must be; nothing for an operation that only writes in place.

    ``probable``: by the probable budget, which the fault may be beyond without being beyond the worst case.
    """
    operation = declaration.operation
    if operation is Operation.KV_WRITE:
        return {}
    if operation is Operation.KV_GATHER:
        pairs = zip(("key", "value"), (Role.K, Role.V), strict=True)
        return {name: Expectation(instance.linear[role], None, instance.linear[role].dtype) for name, role in pairs}
    if instance.indices is not None:
        return {"indices": Expectation(instance.indices, None, None)}
    return _computed(declaration, instance, probable)


def _computed(declaration: Declaration, instance: Instance, probable: bool) -> dict[str, Expectation]:
    convention, case = declaration.convention, instance.case
    kinds = expected_outputs(instance, declaration)
    merge = declaration.operation is Operation.LSE_MERGE
    solution, found = (expected_merge if merge else expected_attention)(declaration, instance)
    bounds = (found.probable if probable else found.worst_case) if isinstance(found, Budgets) else found
    # Log-sum-exps of a merge are in the target's base already.
    unit = math.log2(math.e) if convention.lse_base is LseBase.TWO and not merge else 1.0
    step = 0.5 if declaration.precision_for(case.dtype, case.kv_dtype).out_rounding is Rounding.NEAREST_EVEN else 1.0
    empty, of_empty = bounds.keys == 0, convention.empty_out.number
    result = {"out": _expectation(solution.out, bounds.out, empty, of_empty, kinds["out"][1], step)}
    if convention.lse_layout is not LseLayout.NONE:
        of_empty = convention.empty_lse.number
        lse = _expectation(solution.lse * unit, bounds.lse * unit, empty, of_empty, kinds["lse"][1], 0.5)
        result["lse"] = _turned(lse) if convention.lse_layout is LseLayout.HEAD_TOKEN else lse
    return result


def _turned(found: Expectation) -> Expectation:
    allowed = None if found.allowed is None else found.allowed.T.contiguous()
    return replace(found, values=found.values.T.contiguous(), allowed=allowed)


def _expectation(
    values: Tensor, bound: Tensor, empty: Tensor, of_empty: float | None, dtype: torch.dtype | None, step: float
) -> Expectation:
    """``values`` within ``bound``; rows without keys hold ``of_empty``, or anything."""
    hollow = empty.view(-1, *[1] * (values.dim() - 1)).expand_as(values)
    values = values.masked_fill(hollow, 0.0 if of_empty is None else of_empty)
    bound = bound.masked_fill(hollow, math.inf if of_empty is None else 0.0)
    return Expectation(values.cpu().contiguous(), bound.cpu().contiguous(), dtype, step)
