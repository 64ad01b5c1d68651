"""Kinds of partial states to merge, and the ways there are to merge them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial

import torch
from torch import Tensor

from fuzz.buffers import Poison
from fuzz.case import Case, States
from fuzz.instance.merge import build_merge
from fuzz.plan import CANDIDATES, CounterChooser
from fuzz.space import Space
from oracle.declare import Declaration, declaration_of
from oracle.precision import Precision
from suites.targets import ranks, sglang_dcp, sglang_dcp_comm, sglang_merge_splits, sglang_merge_state
from suites.targets.portable import merge as portable
from suites.targets.sglang_dcp_comm import Merge


class Kind(StrEnum):
    """What is special about the states of a case."""

    FULL = "every state has keys"
    EMPTY = "empty states, finite garbage in their outputs"
    EMPTY_NAN = "empty states, NaN in their outputs"
    ALL_EMPTY = "rows without any key"
    INFINITE = "empty states whose log-sum-exp is +inf"
    NOT_A_NUMBER = "empty states whose log-sum-exp is NaN"
    VIEWS = "outputs and log-sum-exps that are views, heads first"
    TURNED = "log-sum-exps alone that are views, heads first"
    SHARED = "log-sum-exps that all heads of a row share, of stride 0"
    NARROW = "outputs of 96 dims, which is no power of two"
    UNEVEN = "heads that the ranks cannot share evenly"


NARROW = 96

STATES = {
    Kind.FULL: States.FULL,
    Kind.EMPTY_NAN: States.EMPTY_NAN,
    Kind.ALL_EMPTY: States.ALL_EMPTY,
    Kind.VIEWS: States.FULL,
    Kind.TURNED: States.FULL,
    Kind.SHARED: States.FULL,
    Kind.NARROW: States.FULL,
    Kind.UNEVEN: States.FULL,
}
"""Those of the other kinds are some of them empty."""

REFUSABLE = frozenset({Kind.NARROW, Kind.UNEVEN})
"""Shapes that no path is bound to take: to raise is right."""

_VIEWS = frozenset({Kind.VIEWS, Kind.TURNED, Kind.SHARED})

SPECIAL = {Kind.INFINITE: torch.inf, Kind.NOT_A_NUMBER: torch.nan}
"""What stands where -inf is meant."""


@dataclass(frozen=True)
class Given:
    """Outputs [N, T, H, D] and log-sum-exps [N, T, H] as they are given, and the latter as they are meant."""

    outs: Tensor
    lses: Tensor
    meant: Tensor


def states(kind: Kind, case: Case, device: str) -> Given:
    """The states of ``case``, a case of ``kind``."""
    buffers = build_merge(case, Poison.POSITIVE, device).buffers
    outs, lses = buffers["outs"].view, buffers["lses"].view
    if kind in SPECIAL:
        return Given(outs, lses.masked_fill(lses == -torch.inf, SPECIAL[kind]), lses)
    if kind is Kind.VIEWS:
        return Given(_heads_first(outs), _heads_first(lses), lses)
    if kind is Kind.TURNED:
        return Given(outs, _heads_first(lses), lses)
    if kind is Kind.SHARED:
        shared = lses[..., :1].expand_as(lses)
        return Given(outs, shared, shared)
    return Given(outs, lses, lses)


def _heads_first(x: Tensor) -> Tensor:
    """[N, T, H, ...] whose memory has the heads before the rows."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def drawn(declaration: Declaration, kind: Kind, parts: int, index: int, seed: int) -> Case:
    """Case ``index`` of a kind: from the target's own space, but for the number of states."""
    space = Space(declaration)
    dtypes = declaration.supports.dtypes
    pins = {"dtype": dtypes[index % len(dtypes)], "requests": "many"}
    stream = ((parts * len(Kind) + list(Kind).index(kind)) * 64 + index) * CANDIDATES
    case = space.draw(CounterChooser(seed, stream, pins))
    case = replace(case, parts=parts, states=STATES.get(kind, States.SOME_EMPTY), earlier_calls=0)
    if kind in _VIEWS:
        # Of one head every view is the same.
        case = replace(case, num_kv_heads=max(case.num_kv_heads, 2))
    if kind is Kind.NARROW:
        case = replace(case, v_head_dim=NARROW)
    if kind is Kind.UNEVEN:
        case = replace(case, num_kv_heads=next(heads for heads in (8, 12, parts + 1) if heads % parts))
    return case


@dataclass(frozen=True)
class Path:
    """A way to merge N states.

    ``promised``: the kinds that its documentation or its callers hold it to; ``tried``: those that it can be given.
    ``merge`` is what one rank does, None where one call merges all. A path that ``gives_back`` makes nothing of a
    single state.
    """

    name: str
    declaration: Declaration
    promised: frozenset[Kind]
    tried: frozenset[Kind]
    merge: Merge | None = None
    gives_back: bool = False

    def precision(self, case: Case) -> Precision:
        """Its arithmetic for ``case``."""
        if self.declaration.name in _REPEATED and case.parts > 1:
            return sglang_merge_state.repeated(case.dtype, case.parts - 1)
        return self.declaration.precision_for(case.dtype)

    def call(
        self, run: ranks.Run, place: Callable[..., Tensor], kind: Kind, given: Given
    ) -> tuple[Tensor, Tensor | None]:
        """Output [T, H, D], and log-sum-exp [T, H] if it gives one. ``place`` is how a rank does its work.

        Unless ``kind`` is about them, heads are regrouped so that the ranks can share them.
        """
        if self.merge is None:
            found = self.declaration.function(given.outs, given.lses)
            return (found, None) if isinstance(found, Tensor) else found
        merge = sglang_dcp_comm.shares if kind is Kind.UNEVEN else sglang_dcp_comm.merged
        return merge(run, partial(place, self.merge), given.outs, given.lses), None


_REPEATED = ("sglang.merge_state.chain", "sglang.merge_state.tree")
_USUAL = frozenset({Kind.FULL, Kind.EMPTY, Kind.ALL_EMPTY, Kind.NARROW})
_READ_AS_EMPTY = frozenset(SPECIAL)
_ALONE = frozenset(Kind) - {Kind.UNEVEN}
"""What a path without ranks can be given."""


def _path(name: str, function: Callable[..., object], promised: frozenset[Kind], tried: frozenset[Kind]) -> Path:
    declaration = declaration_of(function)
    assert declaration is not None
    merge = sglang_dcp_comm.PATHS.get(function)  # type: ignore[call-overload]
    return Path(name, declaration, promised, tried, merge, merge is not None or declaration.name in _REPEATED)


_KERNELS = _USUAL | _READ_AS_EMPTY | _VIEWS
"""The kernels' comments say that NaN and +inf read as -inf; they take strides."""

_SPLITS = frozenset({Kind.FULL, Kind.NARROW})

PATHS = (
    _path("reduce-scatter, base 2", sglang_dcp_comm.reduce_scatter, _KERNELS, frozenset(Kind)),
    _path("reduce-scatter, natural", sglang_dcp_comm.natural_reduce_scatter, _KERNELS, frozenset(Kind)),
    _path("all-reduce, natural", sglang_dcp_comm.all_reduce, _USUAL | _VIEWS | {Kind.EMPTY_NAN}, frozenset(Kind)),
    _path("all-to-all, natural", sglang_dcp_comm.all_to_all, _KERNELS, frozenset(Kind)),
    _path("all-to-all, base 2", sglang_dcp_comm.base_two_all_to_all, _KERNELS, frozenset(Kind)),
    _path("correct_attn_out, all ranks' sums", sglang_dcp.correct_attn_out, _KERNELS, _ALONE),
    _path("merge_state, a chain", sglang_merge_state.merge_state_chain, _USUAL | {Kind.INFINITE}, _ALONE),
    _path("merge_state, a tree", sglang_merge_state.merge_state_tree, _USUAL | {Kind.INFINITE}, _ALONE),
    _path("splits of Triton decode", sglang_merge_splits.merge_splits, _SPLITS, _SPLITS),
    _path("our portable kernels' splits", portable.merge, _USUAL | _VIEWS, _USUAL | _VIEWS),
)
