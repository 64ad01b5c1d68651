"""The other case, or the other call, that a relation compares with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fuzz.buffers import DTYPES
from fuzz.case import Case, Placement, Pool, Prefix
from fuzz.instance import Instance
from fuzz.instance.pool import pages
from fuzz.probes import PLAIN
from fuzz.space import prefix_of
from oracle.convention import Granularity
from oracle.declare import Declaration, Knob
from oracle.kinds import Operation
from oracle.precision import Precision


def elsewhere(case: Case) -> Case | None:
    """The same values with every page in another place, or None where there are no pages, or no other place."""
    in_pool = case.operation in (Operation.PAGED_DECODE, Operation.BACKEND) or case.prefix is not Prefix.INLINE
    if not in_pool or case.pool is Pool.HUGE:
        return None
    other = Placement.ASCENDING if case.placement is Placement.SHUFFLED else Placement.SHUFFLED
    moved = replace(case, placement=other)
    return moved if pages(moved) != pages(case) else None


def alone(case: Case) -> Case:
    """The first request by itself. Its values are the first that are drawn, so that they stay what they are."""
    return replace(case, context_lens=case.context_lens[:1], query_lens=case.query_lens[:1])


def chunks(case: Case) -> list[tuple[Case, range]]:
    """The first request's new tokens as two steps of a backend, and which of its rows each has.

    None of one token, or of tokens that see later ones.
    """
    queries, length = case.query_lens[:1], case.context_lens[:1]
    if case.operation is not Operation.BACKEND or queries[0] < 2 or not case.causal or case.probe not in PLAIN:
        return []
    late = queries[0] // 2
    early = queries[0] - late
    return [
        (replace(case, context_lens=(length[0] - late,), query_lens=(early,)), range(early)),
        (replace(case, context_lens=length, query_lens=(late,)), range(early, early + late)),
    ]


def beside(case: Case) -> Case | None:
    """The first request of a backend's case, a fresh prompt: alone if another has a prefix, else beside one that has.

    None where it is no fresh prompt, or its values depend on the others.
    """
    if case.operation is not Operation.BACKEND or case.probe not in PLAIN:
        return None
    if case.query_lens[0] != case.context_lens[0]:
        return None
    if case.query_lens != case.context_lens:
        return alone(case)
    return replace(case, context_lens=(*case.context_lens, 3), query_lens=(*case.query_lens, 1))


def turned(declaration: Declaration, knob: Knob, case: Case) -> tuple[Declaration, str]:
    """The target with a setting, chosen by the case's seed, and the words for it."""
    value = knob.values[case.seed % len(knob.values)]

    def allowed(precision: Precision) -> Precision:
        changed: dict[str, Any] = {} if knob.precision is None else {knob.precision: value}
        return replace(precision, **changed)

    own = declaration.precision
    precision = {d: allowed(p) for d, p in own.items()} if isinstance(own, Mapping) else own and allowed(own)
    function = partial(declaration.function, **{knob.keyword: value})
    return replace(declaration, function=function, precision=precision), f"with {knob.keyword} {value}: "


def rescalable(case: Case) -> bool:
    """Whether a pool of fp8 has a descale, and values were drawn one by one."""
    scaled = any(g is not Granularity.NONE for g in (case.k_descale, case.v_descale))
    return scaled and case.kv_dtype != case.dtype and case.probe in PLAIN and sum(case.query_lens) > 0


def unsaturated(instance: Instance) -> bool:
    """Whether doubling loses nothing: no query leaves the narrowest format that it may be cast to."""
    largest = instance.buffers["q"].view.float().abs().max()
    return bool(2 * largest < torch.finfo(DTYPES[instance.case.kv_dtype]).max / 2)


def rescale(instance: Instance) -> None:
    """Move a factor of two between operands, in place. Logits stay; the result is ``out_factor`` times what it was.

    The instance's problem is left as it was: the two have one solution but for that factor.
    """
    for role, factor in (("k", 0.5), ("v", 2.0)):
        descale = instance.buffers.get(f"{role}_descale")
        if descale is None:
            continue
        descale.view.mul_(factor)
        if role == "k":
            _multiply(instance.buffers["q"].view, 2.0)
        passed = instance.buffers.get(role)
        if passed is not None and f"{role}_cache" in instance.buffers:
            _multiply(passed.view, factor)


def _multiply(view: Tensor, factor: float) -> None:
    """In place, exactly: by a power of two, of a dtype that holds the products."""
    view.copy_((view.double() * factor).to(view.dtype))


def out_factor(case: Case) -> float:
    """What the result of the rescaled call is to be multiplied by."""
    return 1.0 if case.v_descale is Granularity.NONE else 0.5


def as_extend(case: Case, partner: Declaration) -> Case | None:
    """A decode's queries as the last tokens of each request of a varlen_extend; None where values would differ."""
    convention = partner.convention
    prefix = prefix_of(partner)
    divided = {case.k_descale, case.v_descale} != {Granularity.NONE}
    if prefix is Prefix.POOL and (case.kv_dtype != case.dtype or divided):
        return None  # what is passed is the model's own: neither rounded nor divided as what the pool holds
    if prefix is not Prefix.INLINE and any(q > n for q, n in zip(case.query_lens, case.context_lens, strict=True)):
        return None
    return replace(
        case,
        operation=partner.operation,
        prefix=prefix,
        index_form=convention.index_form,
        kv_layout=convention.kv_layout,
        v_layout=convention.v_layout,
        pool=case.pool if prefix is not Prefix.INLINE else Pool.TIGHT,
    )
