"""Queries, and the result's rows in the order of the queries, from the layouts that suites use."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from oracle.assertion.arguments import Lengths, lengths, one_of, tensor, within, wrong
from oracle.convention import LseLayout


class TensorLayout(StrEnum):
    """Order of the axes of q, k, v and of the output."""

    BHSD = "bhsd"
    """[B, H, S, D], as `torch.nn.functional.scaled_dot_product_attention` has them"""
    BSHD = "bshd"
    """[B, S, H, D], as flash-attention has them"""
    THD = "thd"
    """[T, H, D]: the tokens of all requests, one after the other"""


_AXES = {
    TensorLayout.BHSD: "B, {h}, {s}, {d}",
    TensorLayout.BSHD: "B, {s}, {h}, {d}",
    TensorLayout.THD: "{t}, {h}, {d}",
}


@dataclass(frozen=True, eq=False)
class Queries:
    """q [Tq, Hq, D], q_lens of each request; `rows` is None, or the rows of a padded [B, S] that are queries."""

    layout: TensorLayout
    q: Tensor
    q_lens: tuple[int, ...]
    batch: int
    longest: int
    rows: Tensor | None

    def taken(self, name: str, value: object, dim: int) -> Tensor:
        """[Tq, Hq, dim] from a tensor in the queries' layout."""
        heads = self.q.shape[1]
        if self.layout is TensorLayout.THD:
            return tensor(name, value, "tokens, heads, dim", self.q.shape[0], heads, dim)
        sizes = {"B": self.batch, "H": heads, "S": self.longest, "D": dim}
        axes = "B, H, S, D" if self.layout is TensorLayout.BHSD else "B, S, H, D"
        found = tensor(name, value, axes, *(sizes[axis] for axis in axes.split(", ")))
        return self._flat(found.transpose(1, 2) if self.layout is TensorLayout.BHSD else found)

    def lse(self, value: object, order: LseLayout) -> Tensor:
        """[Tq, Hq] from a log-sum-exp; order NONE: heads first where q is 4-D, tokens first where it is 3-D."""
        if order is LseLayout.NONE:
            order = LseLayout.TOKEN_HEAD if self.layout is TensorLayout.THD else LseLayout.HEAD_TOKEN
        heads_first, heads = order is LseLayout.HEAD_TOKEN, self.q.shape[1]
        if self.layout is TensorLayout.THD:
            sizes = {"tokens": self.q.shape[0], "heads": heads}
            axes: tuple[str, ...] = ("heads", "tokens") if heads_first else ("tokens", "heads")
        else:
            sizes = {"B": self.batch, "H": heads, "S": self.longest}
            axes = ("B", "H", "S") if heads_first else ("B", "S", "H")
        found = tensor("lse", value, ", ".join(axes), *(sizes[axis] for axis in axes))
        if self.layout is TensorLayout.THD:
            return found.transpose(0, 1) if heads_first else found
        return self._flat(found.transpose(1, 2) if heads_first else found)

    def _flat(self, x: Tensor) -> Tensor:
        """[B, S, ...] as [Tq, ...]."""
        x = x.flatten(0, 1)
        return x if self.rows is None else x[self.rows]


def layout_of(q: object, given: object) -> TensorLayout:
    """The layout that the caller names; a 3-D q needs no name, a 4-D one does, since sizes cannot tell."""
    if not isinstance(q, Tensor) or not q.is_floating_point() or q.ndim not in (3, 4):
        raise wrong("q", q, "a floating tensor [tokens, heads, dim], [B, H, S, D] or [B, S, H, D]")
    layout = TensorLayout.THD if given is None and q.ndim == 3 else None
    if layout is None:
        layout = one_of("layout", given, TensorLayout)
    if (layout is TensorLayout.THD) != (q.ndim == 3):
        raise wrong("layout", str(layout), "bhsd or bshd for a 4-D q" if q.ndim == 4 else "thd for a 3-D q")
    return layout


def queries(q: Tensor, layout: TensorLayout, q_lens: Lengths, *, requests: int | None) -> Queries:
    """The queries of a call. requests: how many there are, if the keys say so; then ragged q may have one each."""
    if layout is TensorLayout.THD:
        one_each = (1,) * requests if requests == q.shape[0] else None
        own = lengths("q_lens", q_lens, requests, one_each)
        if sum(own) != q.shape[0]:
            raise wrong("q_lens", list(own), f"a sum of q's {q.shape[0]} tokens")
        return Queries(layout, q, own, len(own), max(own, default=0), None)
    dense = q.transpose(1, 2) if layout is TensorLayout.BHSD else q
    batch, longest = dense.shape[:2]
    if requests not in (None, batch):
        raise wrong("q", q, f"B = {requests}, one a request")
    own = lengths("q_lens", q_lens, batch, (longest,) * batch)
    within("q_lens", own, longest, "q")
    rows = padded_rows(own, longest).to(q.device)
    return Queries(layout, dense.flatten(0, 1)[rows], own, batch, longest, rows)


def padded_rows(own: tuple[int, ...], longest: int) -> Tensor:
    """Rows of a [B * longest] tensor that the first own[b] of each request are."""
    parts = [torch.arange(b * longest, b * longest + n) for b, n in enumerate(own)]
    return torch.cat(parts) if parts else torch.arange(0)
