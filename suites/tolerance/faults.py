"""Faults of attention kernels, one by one: 41 that count, 2 that must not be seen, 10 of kinds that nobody listed.

A fault is data: a name, the class that a diagnosis should give it, and what it changes at which stage of the
kernel. The kernel counts the elements changed, so that it is known whether the fault was executed at all. Where
it strikes (which key, page, row) follows from the case's seed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fuzz.buffers import DTYPES
from oracle import philox
from oracle.diagnose import Kind
from oracle.rounding import round_to
from suites.tolerance.kernel import FAULT_STREAM, LOG2E, Call, Change, Operands, Stage, cast


@dataclass(frozen=True)
class Fault:
    """`kind`: what a diagnosis should say. `alike`: classes that the result cannot tell from it; right as well."""

    name: str
    kind: Kind
    changes: Mapping[Stage, Change]
    alike: tuple[Kind, ...] = ()


def common_keys(x: Operands) -> Tensor:
    """Columns that every row sees, in order."""
    return x.visible.all(0).all(0).nonzero().flatten()


def some_key(call: Call, which: int = 0) -> int | None:
    """A column that every row sees, by the seed."""
    seen = common_keys(call.x)
    return int(seen[call.pick(len(seen), which)]) if len(seen) else None


def some_pages(call: Call) -> tuple[slice, slice] | None:
    """Two pages that every row sees whole, by the seed."""
    size = call.x.case.page_size
    whole = call.x.visible.all(0).all(0)[: call.x.columns // size * size].view(-1, size).all(1).nonzero().flatten()
    if len(whole) < 2:
        return None
    first = call.pick(len(whole))
    second = (first + 1 + call.pick(len(whole) - 1, 1)) % len(whole)
    a, b = (int(whole[i]) * size for i in (first, second))
    return slice(a, a + size), slice(b, b + size)


def split_start(x: Operands, call: Call) -> int | None:
    """Where the second split begins; only a key that every row sees will do."""
    cuts = call.recipe.cuts(x.columns)
    seen = common_keys(x)
    return next(
        (c.start for c in cuts[1:] if bool((seen == c.start).any()) and bool((seen == c.start - 1).any())), None
    )


def hide(x: Operands, *columns: int) -> Operands:
    visible = x.visible.clone()
    visible[..., list(columns)] = False
    return replace(x, visible=visible)


def repeat(x: Operands, column: int) -> Operands:
    """One key a second time, behind the others."""
    again = slice(column, column + 1)
    k, v, visible = (torch.cat([t, t[:, again]], 1) for t in (x.k, x.v, x.visible.transpose(1, 2)))
    return replace(x, k=k, v=v, visible=visible.transpose(1, 2))


def window(delta: int) -> Change:
    def change(x: Operands, call: Call) -> Operands:
        if x.case.window is None:
            return x
        return replace(x, visible=x.mask(window=x.case.window + delta))

    return change


def drop_key(x: Operands, call: Call) -> Operands:
    key = some_key(call)
    return x if key is None else hide(x, key)


def repeat_key(x: Operands, call: Call) -> Operands:
    key = some_key(call)
    return x if key is None else repeat(x, key)


def without_self(x: Operands, call: Call) -> Operands:
    columns = torch.arange(x.columns, device=x.q.device)
    return replace(x, visible=x.visible & (columns != x.position))


def one_row_ahead(x: Operands, call: Call) -> Operands:
    """One row of one head sees the key after its own."""
    heads, queries = x.visible.shape[:2]
    if queries < 2:
        return x
    row = call.pick(queries - 1)
    visible = x.visible.clone()
    visible[call.pick(heads, 1), row, int(x.position[row]) + 1] = True
    return replace(x, visible=visible)


def past_the_length(count: int | None) -> Change:
    """Slots past the length, the first `count` of them or all, seen by every row."""

    def change(x: Operands, call: Call) -> Operands:
        visible = x.visible.clone()
        visible[..., x.context : None if count is None else x.context + count] = True
        return replace(x, visible=visible)

    return change


def stale_token(x: Operands, call: Call) -> Operands:
    """K and V of one slot are those of another, earlier token."""
    key = some_key(call)
    if key is None:
        return x
    k, v = x.k.clone(), x.v.clone()
    for stream, operand in enumerate((k, v)):
        drawn = philox.normal(x.case.seed, FAULT_STREAM + 100 + stream, operand[:, key].shape).double()
        operand[:, key] = round_to(drawn, DTYPES[x.case.kv_dtype]).float().to(operand.device)
    return replace(x, k=k, v=v)


def stale_value(x: Operands, call: Call) -> Operands:
    """V of one key is that of another."""
    key, other = some_key(call), some_key(call, 1)
    if key is None or other is None:
        return x
    v = x.v.clone()
    v[:, key] = x.v[:, key - 1 if other == key else other]
    return replace(x, v=v)


def pages_swapped_for_k(x: Operands, call: Call) -> Operands:
    pages = some_pages(call)
    if pages is None:
        return x
    (a, b), k = pages, x.k.clone()
    k[:, a], k[:, b] = x.k[:, b], x.k[:, a]
    return replace(x, k=k)


def wrong_page(x: Operands, call: Call) -> Operands:
    pages = some_pages(call)
    if pages is None:
        return x
    (a, b), k, v = pages, x.k.clone(), x.v.clone()
    k[:, a], v[:, a] = x.k[:, b], x.v[:, b]
    return replace(x, k=k, v=v)


def values_shifted(x: Operands, call: Call) -> Operands:
    return replace(x, v=x.v.roll(1, 1))


def splits_overlap(x: Operands, call: Call) -> Operands:
    start = split_start(x, call)
    return x if start is None else repeat(x, start - 1)


def gap_between_splits(x: Operands, call: Call) -> Operands:
    start = split_start(x, call)
    return x if start is None else hide(x, start)


def split_lost(weights: Tensor, call: Call) -> Tensor:
    """The second part never reaches the merge."""
    if len(weights) < 2:
        return weights
    lost = weights.clone()
    lost[1] = 0
    return lost


def merged_in_the_other_base(weights: Tensor, call: Call) -> Tensor:
    if len(weights) < 2:
        return weights
    return (torch.exp if call.recipe.base_two else torch.exp2)(call.lses - call.top)


def without_sink(total: Tensor, call: Call) -> Tensor:
    """The log-sum-exp of the keys alone."""
    return total if call.sink is None else call.exp(call.lses - call.top).sum(0)


def nothing(weight: Tensor, call: Call) -> Tensor:
    return torch.zeros_like(weight)


def sink_in_every_split(total: Tensor, call: Call) -> Tensor:
    if call.sink is None or len(call.cuts) < 2:
        return total
    return total + call.exp(call.sink - call.maximum.masked_fill(call.maximum == -torch.inf, 0.0))


def no_sink_in_the_merge(weight: Tensor, call: Call) -> Tensor:
    return torch.zeros_like(weight) if len(call.cuts) > 1 else weight


def sink_times(factor: Callable[[Call], float]) -> Change:
    """The sink's logit times something."""

    def change(weight: Tensor, call: Call) -> Tensor:
        assert call.sink is not None
        return call.exp(call.sink * factor(call) - call.top)

    return change


def in_operands(field: str, change: Callable[[Operands], object]) -> Mapping[Stage, Change]:
    return {Stage.OPERANDS: lambda x, call: replace(x, **{field: change(x)})}


def first_head_louder(x: Operands) -> Tensor:
    factor = torch.ones_like(x.v_scale)
    factor[0] = 1.05
    return x.v_scale * factor


def scale_in_bf16(x: Operands) -> float:
    return float(round_to(torch.tensor(x.scale, dtype=torch.float64), torch.bfloat16))


def heads_swapped(pair: Callable[[int, int], tuple[int, int] | None]) -> Mapping[Stage, Change]:
    """Two query heads' rows exchanged in out and lse. pair: which, of a group and a number of heads."""

    def change(rows: Tensor, call: Call) -> Tensor:
        found = pair(call.x.group, rows.shape[1])
        if found is None:
            return rows
        order = list(range(rows.shape[1]))
        order[found[0]], order[found[1]] = found[1], found[0]
        return rows[:, order]

    return {Stage.OUT: change, Stage.LSE: change}


def within_a_group(group: int, heads: int) -> tuple[int, int] | None:
    return (0, 1) if group > 1 else None


def across_groups(group: int, heads: int) -> tuple[int, int] | None:
    return (1 % group, group + 1 % group) if heads > group else None


def last_of_two_groups(group: int, heads: int) -> tuple[int, int] | None:
    return (group - 1, 2 * group - 1) if heads > group else None


def queries_swapped(x: Operands, call: Call) -> Operands:
    found = last_of_two_groups(x.group, x.q.shape[0])
    if found is None:
        return x
    order = list(range(x.q.shape[0]))
    order[found[0]], order[found[1]] = found[1], found[0]
    return replace(x, q=x.q[order], visible=x.visible[order], sinks=None if x.sinks is None else x.sinks[order])


def cap_after_mask(s: Tensor, call: Call) -> Tensor:
    """What the mask hides is capped too: it gets the logit -cap."""
    cap = call.x.soft_cap
    return s if cap is None else s.masked_fill(s == -torch.inf, -cap * call.unit)


def not_in_the_last_tile(keep: Tensor, call: Call) -> Tensor:
    """The accumulator, but not the sum, keeps the old maximum's scale in a split's last tile."""
    if call.tile.index + 1 < call.tile.count:
        return keep
    return torch.where(call.maximum == -torch.inf, keep, 1.0)


def accumulator_in_bf16(acc: Tensor, call: Call) -> Tensor:
    """Sixteen keys after sixteen, each sum in bf16."""
    tile, total = call.tile, call.tile.before
    for start in range(0, tile.weights.shape[2], 16):
        keys = slice(start, start + 16)
        total = cast(total + tile.weights[..., keys] @ tile.values[:, keys], "bf16")
    return total


def in_dtype(dtype: str) -> Change:
    return lambda x, call: cast(x, dtype)


def rough_exp(weights: Tensor, call: Call) -> Tensor:
    """Relative errors of up to 1e-3 that follow the argument."""
    return weights * (1 + 1e-3 * torch.sin(37 * weights.log()).nan_to_num())


def last_dims_lost(count: int) -> Mapping[Stage, Change]:
    def change(x: Operands, call: Call) -> Operands:
        q = x.q.clone()
        q[..., -count:] = 0
        return replace(x, q=q)

    return {Stage.OPERANDS: change}


def sign_of_one_dim(out: Tensor, call: Call) -> Tensor:
    flipped = out.clone()
    flipped[..., call.pick(out.shape[-1])] *= -1
    return flipped


def earlier_call(x: Operands, call: Call) -> Operands:
    """What a call of the same shapes with other data would return."""
    fresh = {
        name: philox.normal(x.case.seed, FAULT_STREAM + 110 + i, tuple(old.shape)).to(old.device)
        for i, (name, old) in enumerate((("q", x.q), ("k", x.k), ("v", x.v)))
    }
    return replace(x, **fresh)


def reordered(order: Callable[[Tensor], Tensor]) -> Mapping[Stage, Change]:
    """Output dims stored in another order; `order` makes it of 0 .. D_v - 1."""
    return {Stage.OUT: lambda out, call: out[..., order(torch.arange(out.shape[-1], device=out.device))]}


def weight_bits(weights: Tensor, call: Call) -> Tensor:
    """The highest bit of the fraction flipped in each weight of the second split's first tile."""
    if call.split != min(1, len(call.cuts) - 1) or call.tile.index:
        return weights
    return (weights.view(torch.int32) ^ (1 << 22)).view(torch.float32)


def keys_in_quarters(x: Operands, call: Call) -> Operands:
    return replace(x, k=(x.k * 4).round() / 4)


def half_of_a_tile(values: Tensor, call: Call) -> Tensor:
    """V of one kv head at half its size in the first tile of the second split."""
    if call.split != min(1, len(call.cuts) - 1) or call.tile.index:
        return values
    halved = values.clone()
    halved[call.pick(len(values))] *= 0.5
    return halved


def added_twice(added: Tensor, call: Call) -> Tensor:
    """The last tile of each split enters the sum of weights twice."""
    return added * 2 if call.tile.index + 1 == call.tile.count else added


def without_negatives(s: Tensor, call: Call) -> Tensor:
    return s.clamp(min=0.0)


CLEAN = Fault("clean", Kind.NONE, {})
CONTROLS = (CLEAN, Fault("p double rounded", Kind.NONE, {Stage.WEIGHTS: in_dtype("fp16")}))

_O = Stage.OPERANDS

COUNTED = (
    Fault("window + 1", Kind.WINDOW, {_O: window(1)}),
    Fault("window - 1", Kind.WINDOW, {_O: window(-1)}),
    Fault("key dropped", Kind.MISSING_KEY, {_O: drop_key}),
    Fault("key twice", Kind.EXTRA_KEY, {_O: repeat_key}),
    Fault("own key dropped", Kind.CAUSAL, {_O: without_self}),
    Fault("one row sees ahead", Kind.CAUSAL, {_O: one_row_ahead}, (Kind.EXTRA_KEY,)),
    Fault("one slot past the length", Kind.STALE_KEY, {_O: past_the_length(1)}, (Kind.EXTRA_KEY,)),
    Fault("page past the length", Kind.STALE_KEY, {_O: past_the_length(None)}, (Kind.EXTRA_KEY,)),
    Fault("stale token", Kind.STALE_KEY, {_O: stale_token}),
    Fault("stale value", Kind.STALE_KEY, {_O: stale_value}),
    Fault("pages of K swapped", Kind.PAGE, {_O: pages_swapped_for_k}),
    Fault("wrong page", Kind.PAGE, {_O: wrong_page}),
    Fault("V one row off", Kind.ROW, {_O: values_shifted}),
    Fault("splits overlap", Kind.EXTRA_KEY, {_O: splits_overlap}, (Kind.SPLIT,)),
    Fault("gap between splits", Kind.MISSING_KEY, {_O: gap_between_splits}, (Kind.SPLIT,)),
    Fault("split lost", Kind.SPLIT, {Stage.MERGE_WEIGHTS: split_lost}),
    Fault("merge in wrong base", Kind.MERGE, {Stage.MERGE_WEIGHTS: merged_in_the_other_base}),
    Fault("lse in base 2", Kind.LSE_BASE, {Stage.LSE: lambda lse, call: lse * LOG2E}),
    Fault("lse without sink", Kind.SINK, {Stage.LSE_TOTAL: without_sink}),
    Fault("no sink", Kind.SINK, {Stage.SINK: nothing}),
    Fault("sink in every split", Kind.SINK, {Stage.PART_SUM: sink_in_every_split, Stage.SINK: no_sink_in_the_merge}),
    Fault("sink scaled", Kind.SINK, {Stage.SINK: sink_times(lambda call: call.x.scale)}),
    Fault("sink in wrong base", Kind.SINK, {Stage.SINK: sink_times(lambda call: 1 / LOG2E)}),
    Fault("k descale 2 %", Kind.K_DESCALE, in_operands("k_scale", lambda x: x.k_scale * 1.02), (Kind.SCALE,)),
    Fault("v descale 2 %", Kind.V_DESCALE, in_operands("v_scale", lambda x: x.v_scale * 1.02)),
    Fault("v descale of a head 5 %", Kind.V_DESCALE, in_operands("v_scale", first_head_louder)),
    Fault("scale in bf16", Kind.SCALE, in_operands("scale", scale_in_bf16), (Kind.K_DESCALE,)),
    Fault("heads swapped in a group", Kind.HEAD, heads_swapped(within_a_group)),
    Fault("heads swapped across groups", Kind.HEAD, heads_swapped(across_groups)),
    Fault("wrong kv head", Kind.HEAD, {_O: queries_swapped, **heads_swapped(last_of_two_groups)}),
    Fault("no soft cap", Kind.SOFT_CAP, in_operands("soft_cap", lambda x: None)),
    Fault("soft cap after the mask", Kind.SOFT_CAP, {Stage.LOGITS: cap_after_mask}, (Kind.MASK,)),
    Fault("maximum starts at 0", Kind.MAXIMUM, {Stage.MAXIMUM: nothing}),
    Fault("last tile not rescaled", Kind.RESCALE, {Stage.KEEP: not_in_the_last_tile}),
    Fault("scores in bf16", Kind.PRECISION, {Stage.SCORES: in_dtype("bf16")}),
    Fault("accumulator in bf16", Kind.PRECISION, {Stage.ACCUMULATED: accumulator_in_bf16}),
    Fault("weights in fp8", Kind.PRECISION, {Stage.WEIGHTS: in_dtype("e4m3fn")}),
    Fault("exp off by 1e-3", Kind.PRECISION, {Stage.EXP: rough_exp}),
    Fault("last 8 dims of q lost", Kind.DIMS, last_dims_lost(8)),
    Fault("last dim of q lost", Kind.DIMS, last_dims_lost(1)),
    Fault("partials in bf16", Kind.PRECISION, {Stage.PART: in_dtype("bf16")}),
)
"""Those of the detection table."""

OUTSIDE = (
    Fault("sign of one output dim", Kind.UNEXPLAINED, {Stage.OUT: sign_of_one_dim}),
    Fault("output of an earlier call", Kind.UNEXPLAINED, {_O: earlier_call}),
    Fault("output dims interleaved", Kind.UNEXPLAINED, reordered(lambda d: d.view(2, -1).T.flatten())),
    Fault("output halves swapped", Kind.UNEXPLAINED, reordered(lambda d: d.roll(len(d) // 2))),
    Fault(
        "output blocks transposed", Kind.UNEXPLAINED, reordered(lambda d: d.view(-1, 4, 4).transpose(1, 2).flatten())
    ),
    Fault("bit of a tile's weights flipped", Kind.UNEXPLAINED, {Stage.WEIGHTS: weight_bits}),
    Fault("keys in quarters", Kind.UNEXPLAINED, {_O: keys_in_quarters}),
    Fault("V of a tile halved", Kind.UNEXPLAINED, {Stage.VALUES: half_of_a_tile}),
    Fault("last tile summed twice", Kind.UNEXPLAINED, {Stage.ADDED: added_twice}),
    Fault("negative scores dropped", Kind.UNEXPLAINED, {Stage.SCORES: without_negatives}),
)
"""Of kinds that no diagnosis looks for."""

FAULTS = {fault.name: fault for fault in (*CONTROLS, *COUNTED, *OUTSIDE)}
