"""Whether a call that is being captured can be read again: names, dtypes, shapes, runs and options, without its target.

What only the target knows (its layout, the meaning of its window, the size of its pages, the dtype of its results) is
left to `attn-oracle check`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from oracle import limits
from oracle.capturable_options import FLOATS, options, shown
from oracle.capturable_pool import factors_fit, heads_fit, pooled
from oracle.convention import Convention
from oracle.declare import parameters
from oracle.kinds import IndexForm, Operation

INTEGERS = (torch.int32, torch.int64)
OPTIONAL = ("causal", "scale", "window", "sinks", "soft_cap", "k_descale", "v_descale", "q_descale")
"""Arguments that may be left out."""
_SOURCE = "names alone"
_QUANTISED = tuple(getattr(torch, f"float8_{name}") for name in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz"))


def _forms() -> Iterator[tuple[str, ...]]:
    """The parameters of every operation that can be captured, the most first."""
    table = Convention(source=_SOURCE, index_form=IndexForm.PAGE_TABLE)
    slots = Convention(source=_SOURCE, index_form=IndexForm.SLOT_LIST)
    yield parameters(Operation.VARLEN_EXTEND, Convention(source=_SOURCE, prefix_in_pool=True))
    yield parameters(Operation.PAGED_DECODE, table)
    yield parameters(Operation.PAGED_DECODE, slots)
    yield parameters(Operation.VARLEN_EXTEND, Convention(source=_SOURCE))
    yield parameters(Operation.LSE_MERGE, Convention(source=_SOURCE))


def complaint(arguments: Mapping[str, Any], outputs: Mapping[str, Tensor]) -> str | None:
    """Why no target can be judged by a record of this call: the argument and what is allowed. None if one can."""
    return next(_complaints(arguments, outputs), None)


def _complaints(arguments: Mapping[str, Any], outputs: Mapping[str, Tensor]) -> Iterator[str]:
    if "out" not in outputs:
        yield "out: missing; allowed: what the call returned"
        return
    for name, output in outputs.items():
        if not isinstance(output, Tensor):
            yield f"{name}: {shown(output)}; allowed: a tensor"
    yield from _names(arguments)
    for name, value in arguments.items():
        if isinstance(value, float) and not math.isfinite(value):
            yield f"{name}: {value}; allowed: a finite number"
    if "outs" in arguments:
        yield from _merge(arguments["outs"], arguments["lses"], outputs)
    else:
        yield from _attention(arguments, outputs)


def _names(arguments: Mapping[str, Any]) -> Iterator[str]:
    """Nothing, if an operation takes these names, and all that it needs are tensors."""
    given = {name for name, value in arguments.items() if isinstance(value, Tensor)}
    forms = list(_forms())
    known = {name for form in forms for name in form} | {"page_size"}
    for name in arguments:
        if name not in known:
            yield f"{name}: unknown; allowed: {', '.join(sorted(known))}"
    needed = [{name for name in form if name not in OPTIONAL} for form in forms]
    # The operation of which the least is missing, then the one that leaves the fewest names over.
    index = min(range(len(forms)), key=lambda i: (len(needed[i] - given), len(set(arguments) - set(forms[i]))))
    form = forms[index]
    missing = [name for name in form if name in needed[index] - given]
    if missing:
        yield f"{missing[0]}: missing; allowed: a tensor, beside {', '.join(n for n in form if n in needed[index])}"
    for name in arguments:
        if name not in form and name != "page_size":
            yield f"{name}: not among the arguments of one operation; allowed: {', '.join(form)}"


def _attention(arguments: Mapping[str, Any], outputs: Mapping[str, Tensor]) -> Iterator[str]:
    for name in ("q", "k", "v", "k_cache", "v_cache"):
        value = arguments.get(name)
        if value is not None and value.dtype not in FLOATS + _QUANTISED:
            yield f"{name}: {value.dtype}; allowed: a float dtype"
        if name in ("q", "k", "v") and value is not None and value.ndim != 3:
            yield f"{name}: {list(value.shape)}; allowed: [tokens, heads, dim]"
    q, v = arguments["q"], arguments.get("v")
    if outputs["out"].ndim != 3:
        yield f"out: {list(outputs['out'].shape)}; allowed: [tokens, heads, dim]"
    out_dim = outputs["out"].shape[-1] if v is None else v.shape[2]
    if not 1 <= min(q.shape[2], out_dim) <= max(q.shape[2], out_dim) <= limits.DIM:
        yield f"q: {q.shape[2]} dimensions, {out_dim} of values; allowed: 1 to {limits.DIM}"
    yield from _outputs(outputs, (*q.shape[:2], out_dim))
    yield from options(arguments, q.shape[1])
    for name in ("page_table", "lengths", "slots", "q_indptr", "kv_indptr"):
        axes = 2 if name == "page_table" else 1
        index = arguments.get(name)
        if index is not None and (index.dtype not in INTEGERS or index.ndim != axes):
            yield f"{name}: {index.dtype} {list(index.shape)}; allowed: int32 or int64, {axes} axes"
    yield from _requests(arguments, q.shape[0])
    if v is not None:
        yield from _passed(arguments)
    if "k_cache" in arguments:
        yield from pooled(arguments, out_dim)


def _passed(arguments: Mapping[str, Any]) -> Iterator[str]:
    """Whether keys and values that are passed fit the queries and each other."""
    q, k, v = (arguments[name] for name in ("q", "k", "v"))
    if k.shape[2] != q.shape[2]:
        yield f"k: {k.shape[2]} dimensions; allowed: {q.shape[2]}, those of q"
    if v.shape[:2] != k.shape[:2] or v.dtype != k.dtype:
        yield f"v: {v.dtype} {list(v.shape)}; allowed: the rows, heads and dtype of k, {k.dtype} {list(k.shape[:2])}"
    yield from heads_fit(q.shape[1], k.shape[1])
    if "slots" not in arguments:
        for name in ("k_descale", "v_descale"):
            yield from factors_fit(name, arguments.get(name), k.shape[1])
    elif k.shape[0] != q.shape[0]:
        yield f"k: {k.shape[0]} rows; allowed: {q.shape[0]}, one for each query"


def _requests(arguments: Mapping[str, Any], rows: int) -> Iterator[str]:
    """Whether the requests' runs cover the queries and the keys."""
    keys = "slots" if "slots" in arguments else "k"
    counts = {}
    for name, of in (("q_indptr", "q"), ("kv_indptr", keys)):
        if name in arguments:
            yield from _runs(name, arguments[name].tolist(), arguments[of].shape[0], of)
            counts[name] = len(arguments[name]) - 1
    if "page_table" in arguments:
        counts["lengths"], counts["page_table"] = len(arguments["lengths"]), len(arguments["page_table"])
        if any(length < 0 for length in arguments["lengths"].tolist()):
            yield "lengths: a negative one; allowed: 0 up"
    if len(set(counts.values())) > 1:
        yield f"{', '.join(f'{name} of {n} requests' for name, n in counts.items())}; allowed: as many in each"
    requests = next(iter(counts.values()))
    tokens = sum(arguments["lengths"].tolist()) if "page_table" in arguments else arguments[keys].shape[0]
    if "slots" in arguments and "k" in arguments:
        tokens += rows
    if requests > limits.REQUESTS or tokens > limits.TOKENS:
        yield f"q: {requests} requests of {tokens} keys; allowed: at most {limits.REQUESTS}, {limits.TOKENS}"
    if "q_indptr" not in arguments and (rows % requests if requests else rows):
        yield f"q: {rows} rows for {requests} requests; allowed: as many for each"


def _runs(name: str, starts: list[int], total: int, of: str) -> Iterator[str]:
    if not starts or starts[0] != 0 or any(a > b for a, b in pairwise(starts)):
        yield f"{name}: allowed: 0, then integers that never fall"
    elif starts[-1] != total:
        yield f"{name}: ends at {starts[-1]}; allowed: {total}, the rows of {of}"


def _merge(outs: Tensor, lses: Tensor, outputs: Mapping[str, Tensor]) -> Iterator[str]:
    if outs.dtype not in FLOATS or outs.ndim != 4:
        yield f"outs: {outs.dtype} {list(outs.shape)}; allowed: floats [parts, tokens, heads, dim]"
    if lses.dtype != torch.float32 or lses.shape != outs.shape[:3]:
        yield f"lses: {lses.dtype} {list(lses.shape)}; allowed: torch.float32 {list(outs.shape[:3])}"
    most = (limits.PARTS, limits.TOKENS, limits.HEADS, limits.DIM)
    if any(not low <= size <= high for low, size, high in zip((1, 0, 1, 1), outs.shape, most, strict=True)):
        yield f"outs: {list(outs.shape)}; allowed: at most {list(most)}, at least [1, 0, 1, 1]"
    yield from _outputs(outputs, tuple(outs.shape[1:]))


def _outputs(outputs: Mapping[str, Tensor], shape: tuple[int, ...]) -> Iterator[str]:
    out, lse = outputs["out"], outputs.get("lse")
    if tuple(out.shape) != shape or not out.is_floating_point():
        yield f"out: {out.dtype} {list(out.shape)}; allowed: floats {list(shape)}"
    if lse is None:
        return
    by_token, by_head = shape[:2], shape[1::-1]
    if tuple(lse.shape) not in (by_token, by_head) or not lse.is_floating_point():
        yield f"lse: {lse.dtype} {list(lse.shape)}; allowed: floats {list(by_token)} or {list(by_head)}"
