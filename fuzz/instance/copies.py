"""KV write and gather."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from fuzz.buffers import Poison
from fuzz.case import Case, Skip, SlotMap
from fuzz.instance.model import Instance
from fuzz.instance.operands import index_list, keys_and_values, operand
from fuzz.instance.pool import cache, geometry, slots_of
from fuzz.probes import Stream
from oracle import philox
from oracle.kinds import Role
from oracle.layout import write_slots


def build_gather(case: Case, poison: Poison, device: str) -> Instance:
    """A pool that holds every position, and the slots of all of them."""
    slots, linear = slots_of(case), keys_and_values(case)
    buffers = {"slots": index_list("slots", slots, case.index_dtype, poison, device)}
    for role in Role:
        held = cache(case, role, poison, device)
        write_slots(held.view, slots, linear[role], geometry(case, role))
        buffers[held.name] = held
    return Instance(case, device, buffers, slots, linear)


def build_write(case: Case, poison: Poison, device: str) -> Instance:
    """New keys and values, an empty pool, and where to store them."""
    linear = keys_and_values(case)
    buffers = {
        "key": operand("key", linear[Role.K], case, poison, device),
        "value": operand("value", linear[Role.V], case, poison, device),
    }
    listed, slot_map, slots = _places(case)
    if slot_map is not None:
        buffers["slot_map"] = index_list("slot_map", slot_map, case.index_dtype, poison, device)
    buffers["slots"] = index_list("slots", listed, case.index_dtype, poison, device)
    for role in Role:
        held = cache(case, role, poison, device)
        buffers[held.name] = held
    return Instance(case, device, buffers, slots, linear)


@lru_cache(maxsize=1)
def _places(case: Case) -> tuple[Tensor, Tensor | None, Tensor]:
    """The slots to list, the map that they go through, if any, and where each token belongs, -1 for nowhere: drawn
    once for a case that is built with one poison after the other. Not to be written to.
    """
    slots = slots_of(case)
    skipped = _skipped(case, len(slots))
    if case.slot_map is not SlotMap.NONE:
        return _through_map(case, slots, skipped)
    listed = slots.masked_fill(skipped, -1)
    return listed, None, listed


def _skipped(case: Case, tokens: int) -> Tensor:
    if case.skip is Skip.NONE:
        return torch.zeros(tokens, dtype=torch.bool)
    if case.skip is Skip.ALL:
        return torch.ones(tokens, dtype=torch.bool)
    return _some(case, Stream.SKIP, tokens)


def _some(case: Case, stream: Stream, tokens: int) -> Tensor:
    """About a third of the tokens, at least one where there is one: bool [T]."""
    drawn = philox.uniform_int(case.seed, stream, (tokens + 1,), 0, 1 << 20)
    chosen = drawn[:tokens] % 3 == 0
    if tokens:
        chosen[int(drawn[tokens]) % tokens] = True
    return chosen


def _through_map(case: Case, slots: Tensor, skipped: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Full-pool slots to list, the map from them to ``slots``, and where each token then belongs.

    The full pool is twice as large as need be; its unused entries map to -1, as those of an allocator do.
    """
    tokens = len(slots)
    full = philox.permutation(case.seed, Stream.SLOT_MAP, 2 * tokens + 1)[:tokens].to(torch.int64)
    target = slots
    if case.slot_map is SlotMap.HOLES:
        target = slots.masked_fill(_some(case, Stream.HOLES, tokens), -1)
    slot_map = torch.full((2 * tokens + 1,), -1, dtype=torch.int64)
    slot_map[full] = target
    return full.masked_fill(skipped, -1), slot_map, target.masked_fill(skipped, -1)


def write_expected(instance: Instance) -> None:
    """Do to the caches of ``instance`` what a correct KV write does."""
    if instance.slots is None:
        raise TypeError(f"{instance.case.operation} writes no slots")
    stored = instance.slots >= 0
    for role in Role:
        held = instance.buffers[f"{role.value}_cache"].view
        kept = instance.linear[role][stored]
        write_slots(held, instance.slots[stored], kept, geometry(instance.case, role))
