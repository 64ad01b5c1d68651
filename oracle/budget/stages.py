"""What each stage of a kernel's arithmetic contributes to the budget of one element."""

from __future__ import annotations

import math
from dataclasses import replace

from oracle.attention import solve
from oracle.budget.arithmetic import Arithmetic
from oracle.budget.blocks import Rows, block_of
from oracle.budget.chance import Model
from oracle.budget.rows import bound_rows
from oracle.precision import Accumulation, MatrixUnit, Precision
from oracle.problem import Problem


def explain(
    problem: Problem,
    precision: Precision | None = None,
    *,
    input_dtype: str,
    token: int,
    head: int,
    dim: int | None = None,
    confidence: float | None = None,
) -> dict[str, float]:
    """What each stage contributes to the bound of one output element, the largest first; {} without a key.

    dim: None: of the log-sum-exp without the sink. confidence: None: of the worst case; else of the probable bound,
    whose stages have what they would come to alone, before the worst case cuts it off. In the worst case a stage's
    share is the bound of a precision that has this stage's errors and no other avoidable one, less that of a precision
    without any; "float32" is the latter. Shares need not add up to the bound exactly.
    """
    request = next(i for i, end in enumerate(problem.q_starts[1:]) if token < end)
    if not problem.kv_lens[request]:
        return {}
    rows = block_of(problem, solve(problem).out, token).rows
    if not bool(rows.count.any()):
        return {}
    kv_head, member = divmod(head, problem.group)
    where = (kv_head, member, 0 if dim is None else dim)
    precision = precision or Precision()
    if confidence is None:
        shares = _shares(rows, precision, input_dtype, where, of_lse=dim is None)
    else:
        arithmetic = Arithmetic(precision, input_dtype, rows.count, rows.q.device)
        found = bound_rows(rows, arithmetic, False, chance=True)
        model = Model.of(rows, found, arithmetic, confidence / math.sqrt(3))
        parts, like = (model.lse_parts(False), found.lse) if dim is None else (model.out_parts(), found.out)
        shares = {name: float(part.expand_as(like)[where]) for name, part in parts.items()}
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def _shares(
    rows: Rows, precision: Precision, input_dtype: str, where: tuple[int, int, int], *, of_lse: bool
) -> dict[str, float]:
    def bound(*fields: str) -> float:
        allowed = replace(_NOTHING, **{name: getattr(precision, name) for name in fields})
        found = bound_rows(rows, Arithmetic(allowed, input_dtype, rows.count, rows.q.device), False)
        return float((found.lse if of_lse else found.out)[where])

    shares = {stage: bound(*own, *given) - bound(*given) for stage, (own, given) in _STAGES.items()}
    return {**shares, "float32": bound()}


_NO_ERROR = MatrixUnit(accumulation=Accumulation.BLOCK, unit_roundoff=0.0)
_NOTHING = Precision(
    source="no avoidable error",
    kv_cast=None,
    qk=_NO_ERROR,
    qk_product=None,
    scale_error=0.0,
    tanh_error=0.0,
    exp_error=0.0,
    exp_argument_roundings=0,
    log_error=0.0,
    p_dtype=None,
    row_sum_of_rounded_p=False,
    pv=_NO_ERROR,
    tile=1 << 40,
    flush_subnormals=False,
)
_EXPONENTIAL = ("exp_error", "exp_argument_roundings")
_STAGES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "query cast": (("q_cast",), ()),
    "key and value cast": (("kv_cast",), ()),
    "product rounding": (("qk_product",), ()),
    "query-key accumulation": (("qk",), ()),
    "scale": (("scale_error",), ()),
    "logit dtype": (("logit_dtype",), ()),
    "soft cap": (("tanh_error",), ()),
    "exponential": (_EXPONENTIAL, ()),
    "rescaling": (("tile",), _EXPONENTIAL),
    "weight cast": (("p_dtype", "p_scale", "p_rounding", "row_sum_of_rounded_p"), ()),
    "value accumulation": (("pv",), ()),
    "splits": (("max_splits", "partial_dtype"), (*_EXPONENTIAL, "log_error")),
    "ranks": (("ranks", "rank_dtype", "reduce_dtype"), (*_EXPONENTIAL, "log_error")),
    "underflow": (("flush_subnormals",), ()),
}
"""Of each stage: its own fields of `Precision`, and those of other stages that they act on."""
