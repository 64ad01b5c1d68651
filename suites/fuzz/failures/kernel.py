"""The example: attention over a paged cache and over ragged keys, in plain torch, with one of several known bugs.

Float64 inside, one rounding at the end, so that the texts made of its results are the same on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import StrEnum
from functools import partial

import torch
from torch import Tensor

from oracle import Convention, Precision, Supports, declare
from oracle.convention import (
    DefaultScale,
    Descales,
    Fp8Flavour,
    Granularity,
    LseLayout,
    SinkUnits,
    Window,
    WindowMeaning,
)
from oracle.declare import Declaration, declaration_of
from oracle.fp8 import FORMAT_OF_DTYPE
from oracle.kinds import IndexForm, KVLayout
from oracle.rounding import widen


class Bug(StrEnum):
    """A public bug, by its place in the catalogue of bugs, and what is changed in the kernel to have it."""

    WINDOW_ONE_SHORT = "B001"
    NO_LENGTH_MASK = "B015"
    TOP_LEFT = "B020"
    EMPTY_IS_NAN = "B027"
    SINK_OF_FIRST_HEAD = "B038"
    LSE_BASE_2 = "B044"
    FIRST_SPLITS_ONLY = "B067"
    TAIL_TIMES_ZERO = "B080"
    NO_TABLE = "B134"
    LAST_PAGE = "B137"
    ONE_DESCALE = "B174"
    FNUZ_AS_FN = "B175"
    CAP_AFTER_MASK = "B184"
    HEAD_BLOCKS = "B191"


REFERENCES = {
    Bug.WINDOW_ONE_SHORT: "sgl-project/sglang#32087",
    Bug.NO_LENGTH_MASK: "pytorch/pytorch#159247",
    Bug.TOP_LEFT: "onnx/onnx#8068",
    Bug.EMPTY_IS_NAN: "HabanaAI/vllm-fork#318",
    Bug.SINK_OF_FIRST_HEAD: "sgl-project/sgl-kernel-xpu#254",
    Bug.LSE_BASE_2: "vllm-project/vllm#43919",
    Bug.FIRST_SPLITS_ONLY: "Dao-AILab/flash-attention#1647",
    Bug.TAIL_TIMES_ZERO: "Dao-AILab/flash-attention#2374",
    Bug.NO_TABLE: "tanishqkumar/ssd#23",
    Bug.LAST_PAGE: "pytorch/xla#8431",
    Bug.ONE_DESCALE: "sgl-project/sgl-kernel-xpu#252",
    Bug.FNUZ_AS_FN: "vllm-project/vllm#45562",
    Bug.CAP_AFTER_MASK: "flashinfer-ai/flashinfer#350",
    Bug.HEAD_BLOCKS: "vllm-project/vllm#40792",
}

SPLIT, FEW_SPLITS = 16, 2
"""Keys of a split, and how many splits a kernel with `FIRST_SPLITS_ONLY` merges."""

CONVENTION = Convention(
    source="suites/fuzz/failures/kernel.py",
    kv_layout=KVLayout.NHD,
    index_form=IndexForm.PAGE_TABLE,
    window=Window(meaning=WindowMeaning.KEYS, off=(0,)),
    lse_layout=LseLayout.TOKEN_HEAD,
    sink=SinkUnits.NATURAL,
    soft_cap=True,
    default_scale=DefaultScale.RSQRT_HEAD_DIM,
    fp8_flavour=Fp8Flavour.FNUZ,
    descales=Descales(k=Granularity.HEAD, v=Granularity.HEAD),
)
PRECISION = Precision(source="float64 throughout, one rounding at the end", kv_cast=None, qk_product=None, p_dtype=None)
SUPPORTS = Supports(
    dtypes=("fp32", "bf16"),
    kv_dtypes=("e4m3fnuz",),
    features=frozenset({"window", "sinks", "soft_cap", "chunked", "empty"}),
)


def decode_target(bug: Bug | None) -> Declaration:
    """Paged decode as a target; its name says nothing of the bug."""
    return _declared(declare.paged_decode, decode, bug)


def extend_target(bug: Bug | None) -> Declaration:
    """Attention over ragged keys as a target."""
    return _declared(declare.varlen_extend, extend, bug)


def _declared(
    operation: Callable[..., Callable[..., object]], kernel: Callable[..., object], bug: Bug | None
) -> Declaration:
    function = partial(kernel, bug=bug)
    operation(name="example.attention", convention=CONVENTION, precision=PRECISION, supports=SUPPORTS)(function)
    found = declaration_of(function)
    assert found is not None
    return found


def decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    *,
    scale: float | None,
    window: int,
    sinks: Tensor | None,
    soft_cap: float | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    bug: Bug | None = None,
) -> tuple[Tensor, Tensor]:
    """One query a request. q [R, Hq, D], caches [pages, page size, Hkv, D], page_table [R, pages], lengths [R]."""
    size = k_cache.shape[1]
    out, lse = torch.empty(*q.shape[:2], v_cache.shape[3], dtype=q.dtype), torch.empty(q.shape[:2])
    for r, length in enumerate(lengths.tolist()):
        count = -(-length // size)
        pages = torch.arange(count) if bug is Bug.NO_TABLE else page_table[r, :count].long()
        keys, values = (_dequantised(cache[pages].flatten(0, 1), bug) for cache in (k_cache, v_cache))
        seen = torch.arange(len(keys)) < (length + size if bug is Bug.NO_LENGTH_MASK else length)
        if window:
            seen &= torch.arange(len(keys)) >= length - window + (bug is Bug.WINDOW_ONE_SHORT)
        if bug is not Bug.TAIL_TIMES_ZERO:
            values = values.masked_fill(~seen[:, None, None], 0.0)
        keys, values = _descaled(keys, k_descale, bug), _descaled(values, v_descale, None)
        row = _Row(q[r].double(), keys, values, _scale(q, scale), soft_cap, sinks, bug)
        if bug is Bug.LAST_PAGE and length % size == 0:
            continue  # the page after which a row is stored does not come
        out[r], lse[r] = row.attend(seen)
    return out, lse


def extend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_indptr: Tensor,
    kv_indptr: Tensor,
    *,
    causal: bool,
    scale: float | None,
    window: int,
    sinks: Tensor | None,
    soft_cap: float | None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    q_descale: Tensor | None = None,
    bug: Bug | None = None,
) -> tuple[Tensor, Tensor]:
    """Queries at the end of their request. q [Tq, Hq, D], k and v [Tk, Hkv, D], offsets [R + 1]."""
    out, lse = torch.empty(*q.shape[:2], v.shape[2], dtype=q.dtype), torch.empty(q.shape[:2])
    for r in range(len(q_indptr) - 1):
        first, last = q_indptr[r : r + 2].tolist()
        start, end = kv_indptr[r : r + 2].tolist()
        keys, values = k[start:end].double(), v[start:end].double()
        for i in range(first, last):
            position = i - first if bug is Bug.TOP_LEFT else end - start - last + i
            key = torch.arange(end - start)
            seen = key <= position if causal else key >= 0
            if window:
                seen = seen & (key > position - window)
            row = _Row(q[i].double(), keys, values, _scale(q, scale), soft_cap, sinks, bug)
            out[i], lse[i] = row.attend(seen)
    return out, lse


class _Row:
    """One query over its keys: q [Hq, D], keys and values [n, Hkv, D]."""

    def __init__(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        scale: float,
        soft_cap: float | None,
        sinks: Tensor | None,
        bug: Bug | None,
    ) -> None:
        heads, group = q.shape[0], q.shape[0] // keys.shape[1]
        kv_head = torch.arange(heads) // group
        if bug is Bug.HEAD_BLOCKS:
            kv_head = (torch.arange(heads) // (group - 1)).clamp(max=keys.shape[1] - 1)
        self.scores = torch.einsum("hd,nhd->hn", q, keys[:, kv_head]) * scale
        self.values, self.soft_cap, self.bug = values[:, kv_head], soft_cap, bug
        self.sinks = None if sinks is None else sinks.double()
        if self.sinks is not None and bug is Bug.SINK_OF_FIRST_HEAD:
            self.sinks = self.sinks[kv_head * group]

    def attend(self, seen: Tensor) -> tuple[Tensor, Tensor]:
        """out [Hq, D] and lse [Hq], over the keys of the mask `seen` [n], in splits that are merged."""
        scores = self.scores
        if self.soft_cap is not None and self.bug is not Bug.CAP_AFTER_MASK:
            scores = self.soft_cap * (scores / self.soft_cap).tanh()
        scores = scores.masked_fill(~seen, -math.inf)
        if self.soft_cap is not None and self.bug is Bug.CAP_AFTER_MASK:
            scores = self.soft_cap * (scores / self.soft_cap).tanh()
        most = FEW_SPLITS if self.bug is Bug.FIRST_SPLITS_ONLY else len(seen)
        parts = list(zip(scores.split(SPLIT, 1), self.values.split(SPLIT, 0), strict=True))[:most]
        tops = [torch.full(scores.shape[:1], -math.inf, dtype=torch.float64), *(s.amax(1) for s, _ in parts)]
        top = torch.stack(tops).amax(0)
        shift = top if self.bug is Bug.EMPTY_IS_NAN else top.masked_fill(top == -math.inf, 0.0)
        weights = [(s - shift[:, None]).exp() for s, _ in parts]
        total = sum((w.sum(1) for w in weights), torch.zeros_like(top))
        out = sum(
            (torch.einsum("hn,nhd->hd", w, v) for w, (_, v) in zip(weights, parts, strict=True)),
            torch.zeros(len(top), self.values.shape[2], dtype=torch.float64),
        )
        lse = total.log() + shift
        if self.sinks is not None:
            total = total + (self.sinks - shift).exp()
        whole = total if self.bug is Bug.EMPTY_IS_NAN else total.clamp(min=1e-300)
        return out / whole[:, None], lse / math.log(2) if self.bug is Bug.LSE_BASE_2 else lse


def _scale(q: Tensor, scale: float | None) -> float:
    return float(q.shape[-1] ** -0.5) if scale is None else scale


def _dequantised(x: Tensor, bug: Bug | None) -> Tensor:
    if x.dtype not in FORMAT_OF_DTYPE:
        return x.double()
    return widen(x.view(torch.float8_e4m3fn) if bug is Bug.FNUZ_AS_FN else x)


def _descaled(x: Tensor, factor: Tensor | None, bug: Bug | None) -> Tensor:
    if factor is None:
        return x
    factor = factor.double()
    return x * (factor[0] if bug is Bug.ONE_DESCALE else factor[:, None])
