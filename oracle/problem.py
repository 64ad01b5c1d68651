"""The mathematics of one attention call: ragged q, k, v, scale, masks, sinks, soft cap, descales.

A problem knows nothing of layouts, pages, or the conventions of a kernel; `oracle.attention.solve` says
what it must return.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

Descale = float | Tensor | None


class ProblemError(ValueError):
    """A field of a problem is not allowed. The message names the field and what it may be."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Problem:
    """One attention call over `R` requests, whose tokens are concatenated in order.

    Shapes: q [Tq, Hq, D_qk], k [Tk, Hkv, D_qk], v [Tk, Hkv, D_v], of any floating dtypes, on one device.
    Query head h reads kv head h // (Hq / Hkv). Float8 tensors are read as the values that their bytes stand
    for.

    q_lens, kv_lens: queries of, and keys given for, each request.
    context_lens: L of each request; its keys have positions 0..L-1 and its queries sit at L - q_len .. L -
    1 (so that
        with q_len > L the first queries have negative positions). Default: kv_lens.
    kv_positions: [Tk] integers, the position of every given key, distinct within a request, in any order.
    For calls
        that see only some keys: a prefix, one split, one rank. Default: 0 .. kv_len - 1 in each request.
    scale: factor of q . k.
    causal: key j is visible to a query at p only if j <= p.
    window: key j is visible to a query at p only if p - window < j (so the window counts the query's own
    key).
    sinks: [Hq] logits in natural units, neither scaled nor capped nor masked. They enter the denominator
    only.
    soft_cap: cap * tanh(logit / cap), after the scale, before the mask.
    q_descale, k_descale, v_descale: factors of the operand: a number, a tensor with one element, or a
    tensor that
        broadcasts to [T, H] of its operand ([1, H] per head, [T, 1] per token). Per request or page: expand
        first.

    Raises ProblemError on construction if a field is not allowed.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    context_lens: tuple[int, ...] | None = None
    kv_positions: Tensor | None = None
    scale: float
    causal: bool = True
    window: int | None = None
    sinks: Tensor | None = None
    soft_cap: float | None = None
    q_descale: Descale = None
    k_descale: Descale = None
    v_descale: Descale = None

    def __post_init__(self) -> None:
        _check_operands(self)
        _check_lengths(self)
        _check_numbers(self)
        _check_descale("q_descale", self.q_descale, self.q)
        _check_descale("k_descale", self.k_descale, self.k)
        _check_descale("v_descale", self.v_descale, self.v)
        if self.kv_positions is not None:
            _check_positions(self.kv_positions, self.kv_lens, self.contexts)

    @property
    def requests(self) -> int:
        return len(self.q_lens)

    @property
    def q_heads(self) -> int:
        return self.q.shape[1]

    @property
    def kv_heads(self) -> int:
        return self.k.shape[1]

    @property
    def group(self) -> int:
        """Query heads that share one kv head."""
        return self.q_heads // self.kv_heads

    @property
    def dim_qk(self) -> int:
        return self.q.shape[2]

    @property
    def dim_v(self) -> int:
        return self.v.shape[2]

    @property
    def device(self) -> torch.device:
        return self.q.device

    @property
    def contexts(self) -> tuple[int, ...]:
        """L of each request."""
        return self.kv_lens if self.context_lens is None else self.context_lens

    @cached_property
    def q_starts(self) -> tuple[int, ...]:
        """R + 1 offsets into the queries: request i owns rows q_starts[i] .. q_starts[i + 1] - 1."""
        return (0, *accumulate(self.q_lens))

    @cached_property
    def kv_starts(self) -> tuple[int, ...]:
        """R + 1 offsets into the given keys."""
        return (0, *accumulate(self.kv_lens))

    def positions(self) -> Tensor:
        """Position of every given key, int64 [Tk], on the CPU."""
        if self.kv_positions is not None:
            return self.kv_positions.to(device="cpu", dtype=torch.int64)
        return torch.cat([torch.arange(n) for n in (*self.kv_lens, 0)])

    def to(self, device: torch.device) -> "Problem":
        """The problem with every tensor on `device`; itself if they are there."""
        moved: dict[str, Any] = {
            f.name: x.to(device)
            for f in fields(self)
            if isinstance(x := getattr(self, f.name), Tensor) and x.device != device
        }
        return replace(self, **moved) if moved else self

    def subset(self, keep: Tensor) -> "Problem":
        """The same call, given only the keys where the bool mask `keep` [Tk] is true (a prefix, a split, a
        rank).

        Raises ProblemError if `keep` is not a bool tensor of one element per key.
        """
        if keep.dtype != torch.bool or keep.shape != self.k.shape[:1]:
            raise ProblemError(f"keep: allowed is a bool tensor [{self.k.shape[0]}], got {_describe(keep)}")
        kept = keep.to("cpu")
        counts = tuple(int(part.sum()) for part in torch.split(kept, list(self.kv_lens)))
        return self.take_keys(kept.nonzero().squeeze(1), counts)

    def take_keys(self, index: Tensor, kv_lens: tuple[int, ...]) -> "Problem":
        """The same call, given the keys `index` (int64, request by request, kv_lens[i] of request i)."""
        rows = index.to(self.device)
        return replace(
            self,
            k=self.k[rows],
            v=self.v[rows],
            kv_lens=kv_lens,
            context_lens=self.contexts,
            kv_positions=self.positions()[index.to("cpu")],
            k_descale=_select(self.k_descale, index, self.k.shape[0]),
            v_descale=_select(self.v_descale, index, self.v.shape[0]),
        )


def _select(descale: Descale, index: Tensor, tokens: int) -> Descale:
    """The descale of the chosen tokens; factors that do not vary by token stay as they are."""
    if not isinstance(descale, Tensor) or descale.numel() == 1 or descale.shape[0] != tokens:
        return descale
    return descale[index.to(descale.device)]


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return repr(value)


def _require(ok: bool, field: str, allowed: str, got: object) -> None:
    if not ok:
        raise ProblemError(f"{field}: allowed is {allowed}, got {_describe(got)}")


def _check_operands(p: Problem) -> None:
    for name, x in (("q", p.q), ("k", p.k), ("v", p.v)):
        ok = isinstance(x, Tensor) and x.ndim == 3 and x.is_floating_point()
        _require(ok, name, "a floating tensor [tokens, heads, dim]", x)
        _require(x.shape[1] > 0 and x.shape[2] > 0, name, "at least one head and one dimension", x)
        if x.device != p.q.device:
            raise ProblemError(f"{name}: allowed is the device of q ({p.q.device}), got {x.device}")
    _require(p.q.shape[1] % p.k.shape[1] == 0, "q", f"a multiple of k's {p.k.shape[1]} heads", p.q)
    _require(p.k.shape[2] == p.q.shape[2], "k", f"q's dimension {p.q.shape[2]}", p.k)
    _require(p.v.shape[:2] == p.k.shape[:2], "v", f"k's tokens and heads {list(p.k.shape[:2])}", p.v)


def _check_lengths(p: Problem) -> None:
    lens: Sequence[tuple[str, object]] = (
        ("q_lens", p.q_lens),
        ("kv_lens", p.kv_lens),
        ("context_lens", p.contexts),
    )
    for name, values in lens:
        ok = isinstance(values, tuple) and all(type(n) is int and n >= 0 for n in values)
        _require(ok, name, "a tuple of integers >= 0", values)
    if len(p.kv_lens) != len(p.q_lens):
        raise ProblemError(f"kv_lens: allowed is one length per request ({len(p.q_lens)}), got {len(p.kv_lens)}")
    if len(p.contexts) != len(p.q_lens):
        raise ProblemError(f"context_lens: allowed is one length per request ({len(p.q_lens)}), got {len(p.contexts)}")
    _require(sum(p.q_lens) == p.q.shape[0], "q_lens", f"a sum of q's {p.q.shape[0]} tokens", p.q_lens)
    _require(sum(p.kv_lens) == p.k.shape[0], "kv_lens", f"a sum of k's {p.k.shape[0]} tokens", p.kv_lens)
    fits = all(n <= length for n, length in zip(p.kv_lens, p.contexts, strict=True))
    _require(fits, "context_lens", f"no less than kv_lens {p.kv_lens}", p.contexts)


def _check_numbers(p: Problem) -> None:
    _require(isinstance(p.scale, (int, float)) and math.isfinite(p.scale), "scale", "a finite number", p.scale)
    _require(isinstance(p.causal, bool), "causal", "True or False", p.causal)
    _require(
        p.window is None or (type(p.window) is int and p.window >= 1),
        "window",
        "None (off) or an integer >= 1 (keys including the query's own)",
        p.window,
    )
    cap = p.soft_cap
    _require(
        cap is None or (isinstance(cap, (int, float)) and math.isfinite(cap) and cap > 0),
        "soft_cap",
        "None (off) or a finite number > 0",
        cap,
    )
    sinks = p.sinks
    _require(
        sinks is None or (isinstance(sinks, Tensor) and sinks.is_floating_point() and sinks.shape == p.q.shape[1:2]),
        "sinks",
        f"None or a floating tensor [{p.q.shape[1]}]",
        sinks,
    )


def _check_descale(name: str, descale: Descale, operand: Tensor) -> None:
    if descale is None or isinstance(descale, (int, float)):
        return
    tokens, heads = operand.shape[:2]
    ok = isinstance(descale, Tensor) and descale.is_floating_point()
    ok = ok and (
        descale.numel() == 1
        or (descale.ndim == 2 and descale.shape[0] in (1, tokens) and descale.shape[1] in (1, heads))
    )
    allowed = f"None, a number, one element, or a floating tensor that broadcasts to [{tokens}, {heads}]"
    _require(ok, name, allowed, descale)


def _check_positions(positions: Tensor, kv_lens: tuple[int, ...], contexts: tuple[int, ...]) -> None:
    total = sum(kv_lens)
    ok = isinstance(positions, Tensor) and not positions.is_floating_point() and positions.dtype != torch.bool
    _require(ok and positions.shape == (total,), "kv_positions", f"an integer tensor [{total}]", positions)
    on_cpu = positions.to(device="cpu", dtype=torch.int64)
    request = torch.repeat_interleave(torch.arange(len(kv_lens)), torch.tensor(kv_lens, dtype=torch.int64))
    limits = torch.tensor(contexts, dtype=torch.int64)[request]
    if bool(((on_cpu < 0) | (on_cpu >= limits)).any()):
        raise ProblemError("kv_positions: allowed are 0 .. context_len - 1 of each request, got one outside")
    # One number per (request, position): requests are spaced by the longest context.
    keys = request * max(contexts, default=0) + on_cpu
    ordered = keys.sort().values
    if bool((ordered[1:] == ordered[:-1]).any()):
        raise ProblemError("kv_positions: allowed are distinct positions in each request, got one twice")
