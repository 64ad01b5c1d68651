"""The worst-case budget: how far a correct kernel of a given precision may be from the oracle, per element.

A kernel beyond it is wrong, or its precision is described wrongly: no rounding that the precision allows
reaches it, whatever the data. `oracle.budget.rows` has the derivation; here problems are cut into blocks.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from oracle.budget.formats import format_named
from oracle.budget.rows import Arithmetic, Rows, bound_rows
from oracle.masking import key_order, key_ranges
from oracle.precision import Accumulation, MatrixUnit, Precision
from oracle.problem import Descale, Problem

_CPU_LOGITS = 1 << 18
_GPU_LOGITS = 1 << 24


@dataclass(frozen=True, eq=False)
class Bounds:
    """What a kernel's result may differ from the oracle's by, before it is rounded to its output dtype.

    out: float64 [Tq, Hq, D_v], absolute; inf where nothing can be promised, 0 in rows without a visible key.
    lse: float64 [Tq, Hq], absolute, natural units.
    reach: float64 [Tq, Hq, D_v], the largest |v| over the row's visible keys: so large a bound says nothing.
    keys: int64 [Tq], how many keys each query sees.
    """

    out: Tensor
    lse: Tensor
    reach: Tensor
    keys: Tensor


def worst_case(
    problem: Problem,
    precision: Precision | None = None,
    *,
    input_dtype: str,
    lse_includes_sink: bool = False,
    block_logits: int | None = None,
) -> Bounds:
    """Bound the rounding errors of any kernel that keeps to `precision` (default: the loosest) on `problem`.

    input_dtype: name of the dtype of the query that the kernel gets, which "input" stands for.
    lse_includes_sink: the log-sum-exp judged counts the sink.
    block_logits: logits held at a time (a few dozen float64 tensors of that many elements; at least those of
    one query). Runs on the problem's device. Non-finite values are taken as absent, since the results that
    they reach are judged without a bound. Raises ValueError for an unknown dtype name.
    """
    format_named(input_dtype)
    precision = precision or Precision()
    shape = (problem.q.shape[0], problem.q_heads, problem.dim_v)
    out = torch.zeros(shape, dtype=torch.float64, device=problem.device)
    bounds = Bounds(
        out, torch.zeros_like(out[..., 0]), torch.zeros_like(out), out.new_zeros(shape[0], dtype=torch.int64)
    )
    limit = block_logits or (_CPU_LOGITS if problem.device.type == "cpu" else _GPU_LOGITS)
    for index in range(problem.requests):
        request, start = _Request.of(problem, index), problem.q_starts[index]
        bounds.keys[start : problem.q_starts[index + 1]] = request.hi - request.lo
        for span, rows in request.blocks(limit):
            tokens = slice(start + span.start, start + span.stop)
            error, lse_error = bound_rows(rows, Arithmetic(precision, input_dtype, rows.count), lse_includes_sink)
            bounds.out[tokens] = _by_token(error.masked_fill_(rows.count == 0, 0.0), problem.group)
            bounds.lse[tokens] = _by_token(lse_error.masked_fill_(rows.count.squeeze(1) == 0, 0.0), problem.group)
            bounds.reach[tokens] = _by_token(rows.reach, problem.group)
    return bounds


def explain(
    problem: Problem, precision: Precision | None = None, *, input_dtype: str, token: int, head: int, dim: int
) -> dict[str, float]:
    """What each stage contributes to the bound of one output element, the largest first; {} without a key.

    A stage's share is the bound of a precision that has this stage's errors and no other avoidable one, less
    that of a precision without any; "float32" is the latter. Shares need not add up to the bound exactly.
    """
    precision = precision or Precision()
    request = next(i for i, end in enumerate(problem.q_starts[1:]) if token < end)
    row = token - problem.q_starts[request]
    rows = _Request.of(problem, request).rows(slice(row, row + 1))
    if rows is None:
        return {}
    kv_head, member = divmod(head, problem.group)

    def bound(*fields: str) -> float:
        allowed = replace(_NOTHING, **{name: getattr(precision, name) for name in fields})
        out, _ = bound_rows(rows, Arithmetic(allowed, input_dtype, rows.count), False)
        return float(out[kv_head, member, dim])

    shares = {stage: bound(*own, *given) - bound(*given) for stage, (own, given) in _STAGES.items()}
    return dict(sorted({**shares, "float32": bound()}.items(), key=lambda item: -item[1]))


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


def _by_token(block: Tensor, group: int) -> Tensor:
    """[h, tokens * group, ...] as [tokens, h * group, ...]."""
    return block.reshape(block.shape[0], block.shape[1] // group, group, *block.shape[2:]).transpose(0, 1).flatten(1, 2)


@dataclass(frozen=True, eq=False)
class _Request:
    """One request, its keys in order of position: query i sees lo[i] <= j < hi[i]. Operands as in `Rows`."""

    q: Tensor
    k: Tensor
    v: Tensor
    q_factor: Tensor
    k_factor: Tensor
    lo: Tensor
    hi: Tensor
    reach: Tensor
    sinks: Tensor | None
    soft_cap: float | None
    group: int

    @staticmethod
    def of(problem: Problem, request: int) -> "_Request":
        queries = slice(problem.q_starts[request], problem.q_starts[request + 1])
        keys = slice(problem.kv_starts[request], problem.kv_starts[request + 1])
        positions = problem.positions()[keys]
        order = key_order(positions, [len(positions)])
        ranges = key_ranges(
            [problem.q_lens[request]],
            [problem.kv_lens[request]],
            [problem.contexts[request]],
            causal=problem.causal,
            window=problem.window,
            positions=[positions if order is None else positions[order]],
        )
        lo, hi = ranges.lo[0].to(problem.device), ranges.hi[0].to(problem.device)
        k, v = problem.k[keys].double(), problem.v[keys].double()
        k_factor = _factor(problem.k_descale, keys, problem.k)
        v = v * _factor(problem.v_descale, keys, problem.v)
        if order is not None:
            index = order.to(problem.device)
            k, v = k[index], v[index]
            k_factor = k_factor if k_factor.shape[0] == 1 else k_factor[index]
        q_factor = _factor(problem.q_descale, queries, problem.q) * problem.scale
        v = v.transpose(0, 1).masked_fill(~v.transpose(0, 1).isfinite(), 0.0)
        group = problem.group
        return _Request(
            q=_by_kv_head(problem.q[queries].double(), group),
            k=k.transpose(0, 1),
            v=v,
            q_factor=_by_kv_head(q_factor.expand(problem.q_lens[request], problem.q_heads, 1), group),
            k_factor=k_factor.permute(1, 2, 0),
            lo=lo,
            hi=hi,
            reach=_range_max(v.abs(), lo, hi).repeat_interleave(group, 1),
            sinks=None if problem.sinks is None else problem.sinks.double().to(problem.device).view(-1, group),
            soft_cap=problem.soft_cap,
            group=group,
        )

    def blocks(self, logits: int) -> Iterator[tuple[slice, Rows]]:
        """Blocks of queries, each with all the keys that one of them sees."""
        tokens, (heads, keys) = len(self.lo), self.k.shape[:2]
        step = max(1, logits // max(1, keys * heads * self.group))
        for start in range(0, tokens, step):
            span = slice(start, min(start + step, tokens))
            rows = self.rows(span)
            if rows is not None:
                yield span, rows

    def rows(self, span: slice) -> Rows | None:
        """The rows of the queries in `span`; None if no query sees a key."""
        lo, hi = self.lo[span], self.hi[span]
        seen = hi > lo
        if not bool(seen.any()):
            return None
        first, last = int(lo[seen].amin()), int(hi.amax())
        key = torch.arange(first, last, device=lo.device)
        hidden = (key < lo.unsqueeze(1)) | (key >= hi.unsqueeze(1))
        rows = slice(span.start * self.group, span.stop * self.group)
        narrow = self.k_factor.shape[2] == 1
        sinks = self.sinks
        return Rows(
            q=self.q[:, rows],
            k=self.k[:, first:last],
            v=self.v[:, first:last],
            q_factor=self.q_factor[:, rows],
            k_factor=self.k_factor if narrow else self.k_factor[..., first:last],
            hidden=hidden.repeat_interleave(self.group, 0),
            count=(hi - lo).double().repeat_interleave(self.group).unsqueeze(1),
            reach=self.reach[:, rows],
            sinks=None if sinks is None else sinks.repeat(1, span.stop - span.start).unsqueeze(-1),
            soft_cap=self.soft_cap,
        )


def _factor(descale: Descale, tokens: slice, operand: Tensor) -> Tensor:
    """A descale as float64 [tokens | 1, heads | 1, 1]."""
    if not isinstance(descale, Tensor):
        value = 1.0 if descale is None else float(descale)
        return torch.full((1, 1, 1), value, dtype=torch.float64, device=operand.device)
    factor = descale.to(operand.device, torch.float64)
    if factor.numel() == 1:
        return factor.reshape(1, 1, 1)
    return (factor if factor.shape[0] == 1 else factor[tokens]).unsqueeze(-1)


def _by_kv_head(x: Tensor, group: int) -> Tensor:
    """[tokens, h * group, d] as [h, tokens * group, d]."""
    return x.reshape(x.shape[0], x.shape[1] // group, group, x.shape[2]).transpose(0, 1).flatten(1, 2)


def _range_max(values: Tensor, lo: Tensor, hi: Tensor) -> Tensor:
    """Maximum of values [h, n, e] over lo[i] <= j < hi[i], as [h, i, e]; 0 for empty ranges.

    Two overlapping runs of a power of two cover a range; only the maxima of one power are held at a time.
    """
    result = values.new_zeros(values.shape[0], len(lo), values.shape[2])
    lengths = hi - lo
    width, runs = 1, values
    while width <= values.shape[1]:
        chosen = ((lengths >= width) & (lengths < 2 * width)).nonzero().squeeze(1)
        if len(chosen):
            left, right = runs[:, lo[chosen]], runs[:, hi[chosen] - width]
            result[:, chosen] = torch.maximum(left, right)
        runs = torch.maximum(runs[:, :-width], runs[:, width:])
        width *= 2
    return result
