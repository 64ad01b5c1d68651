"""A float32 attention kernel over a paged cache: tiles, splits and a merge, in plain torch on any device.

It reads the tensors that a target would get: the pool through the page table, slots past the length included.
By itself it is honest; a fault changes what passes at one of its stages, and each changed element is counted, so
that a fault which had nothing to do does not pass for one that was missed.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fuzz.buffers import DTYPES
from fuzz.case import Case, Prefix
from fuzz.instance import Instance
from fuzz.instance.operands import scale_of
from fuzz.instance.pool import geometry
from oracle import philox
from oracle.kinds import IndexForm, Operation, Role
from oracle.layout import read_slots
from oracle.precision import KeyOrder, Precision
from oracle.rounding import round_to, widen

LOG2E = math.log2(math.e)
FAULT_STREAM = 1 << 20
"""Streams of a case's seed from here on decide where a fault strikes; inputs are drawn from lower ones."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The honest arithmetic: float32 but for what is named here. `base_two`: exp2 and log2 of scaled logits."""

    tile: int = 64
    splits: int = 8
    base_two: bool = True
    p_dtype: str | None = "bf16"
    p_scale: float = 1.0
    partial_dtype: str = "fp32"
    out_dtype: str = "bf16"

    @staticmethod
    def at(context: int, **fields: Any) -> "Recipe":
        """A tile that leaves each of 8 splits several tiles to rescale, once the context is long enough."""
        return Recipe(tile=64 if context <= 4096 else 128 if context <= 8192 else 256, **fields)

    def precision(self) -> Precision:
        """What this kernel rounds, and nothing else."""
        return Precision(
            source="an emulated kernel of the tolerance suite",
            qk_product=None,
            tanh_error=2.0**-22,
            p_dtype=self.p_dtype,
            p_scale=self.p_scale,
            row_sum_of_rounded_p=False,
            sink_first=False,
            tile=self.tile,
            key_order=KeyOrder.ASCENDING,
            max_splits=self.splits,
            partial_dtype=self.partial_dtype,
            flush_subnormals=False,
        )

    def cuts(self, columns: int) -> list[slice]:
        """The keys of each split: whole tiles, as evenly as they go."""
        tiles = max(1, -(-columns // self.tile))
        width = -(-tiles // min(self.splits, tiles)) * self.tile
        return [slice(start, min(start + width, columns)) for start in range(0, max(columns, 1), width)]


class Stage(StrEnum):
    """Where a fault can strike, in the order of execution, and the value that passes there.

    H query heads over Hkv kv heads; R = H / Hkv * T rows of a kv head, its query heads one after the other.
    """

    OPERANDS = "operands"
    """Operands"""
    SCORES = "scores"
    """q . k of a tile [Hkv, R, n], before the scale"""
    LOGITS = "logits"
    """scaled, capped and masked logits of a tile [Hkv, R, n], in the kernel's base"""
    MAXIMUM = "maximum"
    """running maximum at the start of a split [Hkv, R]"""
    EXP = "exp"
    """exponentials of a tile [Hkv, R, n]"""
    ADDED = "added"
    """sum of a tile's exponentials [Hkv, R]"""
    KEEP = "keep"
    """factor of the accumulator, though not of the sum, before a tile is added [Hkv, R]; not at a split's first"""
    WEIGHTS = "weights"
    """weights of a tile [Hkv, R, n], before they are cast"""
    VALUES = "values"
    """V of a tile [Hkv, n, D_v]"""
    ACCUMULATED = "accumulated"
    """accumulator after a tile [Hkv, R, D_v]"""
    PART_SUM = "part sum"
    """sum of exponentials of a split [Hkv, R]"""
    PART = "part"
    """normalised result of a split [Hkv, R, D_v]; not where there is one split"""
    MERGE_WEIGHTS = "merge weights"
    """weights of the splits [N, Hkv, R]"""
    SINK = "sink"
    """weight of the sink in the merge [Hkv, R]"""
    LSE_TOTAL = "lse total"
    """sum of all weights, as the log-sum-exp takes it [Hkv, R]"""
    OUT = "out"
    """result before the last rounding [T, H, D_v]"""
    LSE = "lse"
    """log-sum-exp in natural units, sink included [T, H]"""


@dataclass(frozen=True, eq=False)
class Operands:
    """What the kernel reads for one request, in float32.

    q [H, T, D]. k [Hkv, S, D], v [Hkv, S, D_v]: the columns are the slots of the request's pages in order, those
    past the length too. k_scale, v_scale, sinks: [Hkv], [Hkv], [H] or None. visible: bool [H, T, S].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    k_scale: Tensor
    v_scale: Tensor
    sinks: Tensor | None
    visible: Tensor
    scale: float
    soft_cap: float | None
    case: Case
    context: int

    @property
    def columns(self) -> int:
        return self.k.shape[1]

    @property
    def group(self) -> int:
        return self.q.shape[0] // self.k.shape[0]

    @cached_property
    def position(self) -> Tensor:
        """Of each query: int64 [T, 1]."""
        queries = self.q.shape[1]
        return torch.arange(self.context - queries, self.context, device=self.q.device).unsqueeze(1)

    def mask(self, *, window: int | None) -> Tensor:
        """bool [H, T, S]: what the case shows each query, but for the window."""
        key = torch.arange(self.columns, device=self.q.device).unsqueeze(0)
        shown = (key < self.context).expand(self.q.shape[1], -1)
        if self.case.causal:
            shown = shown & (key <= self.position)
        if window is not None:
            shown = shown & (key > self.position - window)
        return shown.expand(self.q.shape[0], -1, -1)


@dataclass(frozen=True, eq=False)
class Result:
    """out [Tq, Hq, D_v] in its dtype, and as it was before that rounding; lse [Tq, Hq] float32, natural, with sinks.

    touched: elements that the fault changed, by stage.
    """

    out: Tensor
    wide: Tensor
    lse: Tensor
    touched: Mapping[Stage, int]

    @property
    def executed(self) -> bool:
        """Whether the fault changed anything."""
        return any(self.touched.values())


Change = Callable[[Any, "Call"], Any]


def cast(x: Tensor, dtype: str | None) -> Tensor:
    """float32 x rounded once to a dtype, saturating where that is fp8, and back."""
    if dtype is None or dtype == "fp32":
        return x
    return widen(round_to(x.double(), DTYPES[dtype])).float()


def read(instance: Instance) -> list[Operands]:
    """The operands of each request, read as a kernel reads them."""
    case, buffers = instance.case, instance.buffers

    def per_head(name: str) -> Tensor:
        factor = buffers[name].view.float() if name in buffers else torch.ones(1, device=instance.device)
        return factor.expand(case.num_kv_heads)

    found, start = [], 0
    for request, (context, queries) in enumerate(zip(case.context_lens, case.query_lens, strict=True)):
        operands = Operands(
            q=buffers["q"].view[start : start + queries].float().transpose(0, 1),
            k=_columns(instance, Role.K, request),
            v=_columns(instance, Role.V, request),
            k_scale=per_head("k_descale"),
            v_scale=per_head("v_descale"),
            sinks=buffers["sinks"].view.float() if "sinks" in buffers else None,
            visible=torch.empty(0),
            scale=scale_of(case),
            soft_cap=case.soft_cap,
            case=case,
            context=context,
        )
        found.append(replace(operands, visible=operands.mask(window=case.window)))
        start += queries
    return found


def _columns(instance: Instance, role: Role, request: int) -> Tensor:
    """Keys or values of one request in order of position, float32 [Hkv, S, D]."""
    case, buffers = instance.case, instance.buffers
    context, parts = case.context_lens[request], []
    if case.operation is Operation.PAGED_DECODE and case.index_form is IndexForm.PAGE_TABLE:
        pages = buffers["page_table"].view[request, : -(-context // case.page_size)].long()
        within = torch.arange(case.page_size, device=pages.device)
        parts.append(_pooled(instance, role, (pages.unsqueeze(1) * case.page_size + within).flatten()))
    elif case.operation is Operation.PAGED_DECODE or case.prefix is Prefix.POOL:
        begin, end = buffers["kv_indptr"].view[request : request + 2].tolist()
        parts.append(_pooled(instance, role, buffers["slots"].view[begin:end].long()))
    if case.operation is Operation.VARLEN_EXTEND:
        lens = case.query_lens if case.prefix is Prefix.POOL else case.context_lens
        begin = sum(lens[:request])
        parts.append(buffers[role.value].view[begin : begin + lens[request]])
    return widen(torch.cat(parts)).float().transpose(0, 1)


def _pooled(instance: Instance, role: Role, slots: Tensor) -> Tensor:
    return read_slots(instance.buffers[f"{role.value}_cache"].view, slots, geometry(instance.case, role))


def run(instance: Instance, recipe: Recipe, changes: Mapping[Stage, Change] | None = None) -> Result:
    """Attention over the tensors of `instance`; `changes` are a fault's."""
    return attend(read(instance), recipe, changes)


def attend(requests: list[Operands], recipe: Recipe, changes: Mapping[Stage, Change] | None = None) -> Result:
    """The same, of operands read before: they are not changed."""
    touched: Counter[Stage] = Counter()
    pairs = [Call(recipe, changes or {}, touched, operands).attend() for operands in requests]
    wide, lse = torch.cat([out for out, _ in pairs]), torch.cat([lse for _, lse in pairs])
    return Result(round_to(wide.double(), DTYPES[recipe.out_dtype]), wide, lse, touched)


@dataclass(eq=False)
class Tile:
    """The tile at hand: its number in the split, how many there are, its columns, and what was there before."""

    index: int
    count: int
    columns: slice
    weights: Tensor
    values: Tensor
    before: Tensor


class Call:
    """One request. A fault reads from it what it needs: `x`, `recipe`, `cuts`, `split`, `tile`, `maximum`, `top`."""

    def __init__(self, recipe: Recipe, changes: Mapping[Stage, Change], touched: Counter[Stage], x: Operands) -> None:
        self.recipe, self.changes, self.touched = recipe, changes, touched
        self.x = x
        self.unit = LOG2E if recipe.base_two else 1.0
        self.x = self.at(Stage.OPERANDS, x)
        self.cuts = recipe.cuts(self.x.columns)
        self.split = 0
        self.tile: Tile
        self.maximum: Tensor
        self.top: Tensor
        self.lses: Tensor

    def at(self, stage: Stage, value: Any) -> Any:
        """What goes on from `stage`: `value`, or what the fault makes of it."""
        if stage not in self.changes:
            return value
        changed = self.changes[stage](value, self)
        self.touched[stage] += _differences(value, changed)
        return changed

    def pick(self, count: int, which: int = 0) -> int:
        """Where the fault strikes: one of 0 .. count - 1 by the case's seed, for `which` of several choices."""
        return int(philox.uniform_int(self.x.case.seed, FAULT_STREAM + which, (1,), 0, count))

    def exp(self, x: Tensor) -> Tensor:
        return torch.exp2(x) if self.recipe.base_two else torch.exp(x)

    def log(self, x: Tensor) -> Tensor:
        return torch.log2(x) if self.recipe.base_two else torch.log(x)

    def rows(self, x: Tensor) -> Tensor:
        """[H, T, ...] as [Hkv, R, ...]."""
        return x.reshape(self.x.k.shape[0], -1, *x.shape[2:])

    def by_token(self, x: Tensor) -> Tensor:
        """[Hkv, R, ...] as [T, H, ...]."""
        return x.reshape(*self.x.q.shape[:2], *x.shape[2:]).transpose(0, 1)

    @cached_property
    def sink(self) -> Tensor | None:
        """[Hkv, R], in the kernel's base."""
        if self.x.sinks is None:
            return None
        return self.rows(self.x.sinks.unsqueeze(1).expand(self.x.q.shape[:2])) * self.unit

    def attend(self) -> tuple[Tensor, Tensor]:
        parts, lses = [], []
        for split, columns in enumerate(self.cuts):
            self.split = split
            part, lse = self.one_split(columns)
            if len(self.cuts) > 1:
                part = self.at(Stage.PART, cast(part, self.recipe.partial_dtype))
            parts.append(part)
            lses.append(lse)
        out, lse = self.merge(torch.stack(parts), torch.stack(lses))
        return self.at(Stage.OUT, self.by_token(out)), self.at(Stage.LSE, self.by_token(lse / self.unit))

    def logits(self, columns: slice) -> Tensor:
        x = self.x
        s = self.at(Stage.SCORES, self.rows(x.q) @ x.k[:, columns].transpose(1, 2))
        factor = torch.tensor(
            x.scale * (self.unit if x.soft_cap is None else 1.0), dtype=torch.float32, device=s.device
        )
        s = s * (factor * x.k_scale).view(-1, 1, 1)
        if x.soft_cap is not None:
            s = torch.tanh(s / x.soft_cap) * x.soft_cap * self.unit
        return self.at(Stage.LOGITS, s.masked_fill(~self.rows(x.visible[..., columns]), -math.inf))

    def one_split(self, columns: slice) -> tuple[Tensor, Tensor]:
        """Online softmax over some columns: normalised [Hkv, R, D_v], and the log-sum-exp in the kernel's base."""
        x, size = self.x, self.recipe.tile
        shape = (x.k.shape[0], x.group * x.q.shape[1])
        self.maximum = self.at(Stage.MAXIMUM, x.q.new_full(shape, -math.inf))
        total, acc = x.q.new_zeros(shape), x.q.new_zeros(*shape, x.v.shape[2])
        starts = range(columns.start, columns.stop, size)
        for index, start in enumerate(starts):
            tile = slice(start, min(start + size, columns.stop))
            s = self.logits(tile)
            raised = torch.maximum(self.maximum, s.amax(-1))
            shift = raised.masked_fill(raised == -math.inf, 0.0)
            weights = self.at(Stage.EXP, self.exp(s - shift.unsqueeze(-1)))
            self.tile = Tile(index, len(starts), tile, weights, x.v[:, tile], acc)
            if index:
                keep = self.exp(self.maximum - shift)
                total, acc = total * keep, acc * self.at(Stage.KEEP, keep).unsqueeze(-1)
            total = total + self.at(Stage.ADDED, weights.sum(-1))
            acc = self.accumulate(acc, weights, self.tile)
            self.maximum = raised
        if self.recipe.p_scale != 1:
            acc = acc / self.recipe.p_scale
        shift = self.maximum.masked_fill(self.maximum == -math.inf, 0.0)
        total = self.at(Stage.PART_SUM, total)
        part = acc / total.masked_fill(total == 0, 1.0).unsqueeze(-1)
        return part * x.v_scale.view(-1, 1, 1), self.log(total) + shift

    def accumulate(self, acc: Tensor, weights: Tensor, tile: Tile) -> Tensor:
        weights = self.at(Stage.WEIGHTS, weights)
        tile.weights, tile.before = cast(weights * self.recipe.p_scale, self.recipe.p_dtype), acc
        tile.values = self.at(Stage.VALUES, tile.values)
        return self.at(Stage.ACCUMULATED, acc + tile.weights @ tile.values)

    def merge(self, parts: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
        """Parts [N, Hkv, R, D_v] and their log-sum-exps as one; the log-sum-exp counts the sink."""
        top = lses.amax(0)
        if self.sink is not None:
            top = torch.maximum(top, self.sink)
        self.lses, self.top = lses, top.masked_fill(top == -math.inf, 0.0)
        weights = self.at(Stage.MERGE_WEIGHTS, self.exp(lses - self.top))
        total = weights.sum(0)
        if self.sink is not None:
            total = total + self.at(Stage.SINK, self.exp(self.sink - self.top))
        lse = self.log(self.at(Stage.LSE_TOTAL, total)) + self.top
        total = total.masked_fill(total == 0, 1.0)
        return (parts * (weights / total).unsqueeze(-1)).sum(0), lse


def _differences(before: Any, after: Any) -> int:
    """How many elements differ; of keys and values only those that somebody sees."""
    if isinstance(before, Operands):
        return sum(_differing(before, after, f.name) for f in fields(Operands))
    if before.shape != after.shape:
        return abs(before.numel() - after.numel())
    return int(((before != after) & ~(before.isnan() & after.isnan())).sum())


def _differing(before: Operands, after: Operands, name: str) -> int:
    a, b = getattr(before, name), getattr(after, name)
    if a is b:
        return 0
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return int(a != b)
    if name not in ("k", "v"):
        return _differences(a, b)
    seen = before.visible.any(0).any(0)
    shared = min(a.shape[1], b.shape[1], len(seen))
    return _differences(a[:, :shared][:, seen[:shared]], b[:, :shared][:, seen[:shared]])
