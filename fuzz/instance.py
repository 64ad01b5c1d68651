"""From a case to the problem and the physical tensors, bit-identical on any machine."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fuzz.buffers import DTYPES, Buffer, Poison, empty_buffer, huge_buffer
from fuzz.case import Case, Placement, Pool, Skip, SlotMap
from fuzz.probes import Stream, sinks, values
from oracle import philox
from oracle.kinds import Operation, Role
from oracle.layout import CacheGeometry, write_slots
from oracle.problem import Problem

HUGE_ELEMENTS = 1 << 31
STRIDE_GAP = 48
"""Elements between the rows of a strided operand: a multiple of 16 bytes for every dtype, so that vector
loads stay aligned, and no multiple of a row."""


@dataclass(frozen=True, eq=False)
class Instance:
    """A case with its tensors on one device.

    ``buffers`` by parameter name; ``slots`` int64 [T] on the CPU: where each token lives in the pool, -1 for
    a token that is not to be stored; ``linear`` the keys and values [T, H, D] that the pool holds or is to
    hold; ``problem`` what an attention operation has to solve.
    """

    case: Case
    device: str
    buffers: dict[str, Buffer]
    slots: Tensor
    linear: dict[Role, Tensor] = field(default_factory=dict)
    problem: Problem | None = None

    def geometry(self, role: Role) -> CacheGeometry:
        """Where the elements of the K or V cache lie."""
        return geometry(self.case, role)


def build(case: Case, poison: Poison, device: str = "cpu") -> Instance:
    """Rebuild the tensors of ``case``, with ``poison`` wherever no data is."""
    builders = {
        Operation.KV_WRITE: _build_write,
        Operation.KV_GATHER: _build_gather,
        Operation.VARLEN_EXTEND: _build_extend,
    }
    return builders[case.operation](case, poison, device)


def geometry(case: Case, role: Role) -> CacheGeometry:
    """Where the elements of the K or V cache of ``case`` lie."""
    dim = case.head_dim if role is Role.K else case.v_head_dim
    return CacheGeometry(
        layout=case.kv_layout,
        role=role,
        num_blocks=num_blocks(case),
        heads=case.num_kv_heads,
        page_size=case.page_size,
        dim=dim,
        dtype=DTYPES[case.kv_dtype],
        v_layout=case.v_layout,
    )


def pages_per_request(case: Case) -> list[int]:
    """Pages that each request occupies: exactly as many as its length needs."""
    return [-(-length // case.page_size) for length in case.context_lens]


def num_blocks(case: Case) -> int:
    """Pages in the pool."""
    used = sum(pages_per_request(case))
    if case.pool is Pool.TIGHT:
        return max(used, 1)
    if case.pool is Pool.SPARE:
        return 2 * used + 3
    per_block = case.num_kv_heads * case.page_size * min(case.head_dim, case.v_head_dim)
    return HUGE_ELEMENTS // per_block + 2 + used


def pages(case: Case) -> list[int]:
    """Physical page of each logical page, request after request."""
    used, blocks = sum(pages_per_request(case)), num_blocks(case)
    if case.pool is Pool.HUGE:
        half = used // 2
        found = [*range(half), *range(blocks - (used - half), blocks)]
    elif case.placement is Placement.SHUFFLED and case.pool is Pool.SPARE:
        found = philox.permutation(case.seed, Stream.PAGES, blocks)[:used].tolist()
        return [int(page) for page in found]
    else:
        found = [2 * page + 1 if case.pool is Pool.SPARE else page for page in range(used)]
    if case.placement is Placement.SHUFFLED:
        order = philox.permutation(case.seed, Stream.PAGES, used).tolist()
        found = [found[int(i)] for i in order]
    return found


def slots_of(case: Case) -> Tensor:
    """Pool slot of every position of every request: int64 [T]."""
    table, start, g = pages(case), 0, case.page_size
    rows: list[int] = []
    for length, count in zip(case.context_lens, pages_per_request(case), strict=True):
        own = table[start : start + count]
        rows += [own[p // g] * g + p % g for p in range(length)]
        start += count
    return torch.tensor(rows, dtype=torch.int64)


def _operand(name: str, data: Tensor, case: Case, poison: Poison, device: str) -> Buffer:
    stride = None
    if case.strided and data.dim() == 3:
        stride = data.shape[1] * data.shape[2] + STRIDE_GAP
    buffer = empty_buffer(name, data.shape, data.dtype, poison, device=device, token_stride=stride)
    buffer.view.copy_(data)
    return buffer


def _indices(name: str, data: Tensor, dtype: str, poison: Poison, device: str) -> Buffer:
    buffer = empty_buffer(name, data.shape, DTYPES[dtype], poison, device=device)
    buffer.view.copy_(data)
    return buffer


def _cache(case: Case, role: Role, poison: Poison, device: str) -> Buffer:
    name, shape = f"{role.value}_cache", geometry(case, role).shape
    dtype = DTYPES[case.kv_dtype]
    if case.pool is Pool.HUGE:
        return huge_buffer(name, shape, dtype, poison, device=device, blocks=pages(case))
    return empty_buffer(name, shape, dtype, poison, device=device)


def _linear(case: Case) -> dict[Role, Tensor]:
    tokens, heads = sum(case.context_lens), case.num_kv_heads
    return {
        Role.K: values(case, Stream.K, (tokens, heads, case.head_dim), case.kv_dtype),
        Role.V: values(case, Stream.V, (tokens, heads, case.v_head_dim), case.kv_dtype),
    }


def _build_gather(case: Case, poison: Poison, device: str) -> Instance:
    slots, linear = slots_of(case), _linear(case)
    buffers = {"slots": _indices("slots", slots, case.index_dtype, poison, device)}
    for role in Role:
        cache = _cache(case, role, poison, device)
        write_slots(cache.view, slots, linear[role], geometry(case, role))
        buffers[cache.name] = cache
    return Instance(case, device, buffers, slots, linear)


def _skipped(case: Case, tokens: int) -> Tensor:
    if case.skip is Skip.NONE:
        return torch.zeros(tokens, dtype=torch.bool)
    if case.skip is Skip.ALL:
        return torch.ones(tokens, dtype=torch.bool)
    return philox.uniform_int(case.seed, Stream.SKIP, (tokens,), 0, 3) == 0


def _build_write(case: Case, poison: Poison, device: str) -> Instance:
    slots, linear = slots_of(case), _linear(case)
    buffers = {
        "key": _operand("key", linear[Role.K], case, poison, device),
        "value": _operand("value", linear[Role.V], case, poison, device),
    }
    skipped = _skipped(case, len(slots))
    listed = slots.masked_fill(skipped, -1)
    if case.slot_map is not SlotMap.NONE:
        listed, slot_map, slots = _through_map(case, slots, skipped)
        buffers["slot_map"] = _indices("slot_map", slot_map, case.index_dtype, poison, device)
    else:
        slots = listed
    buffers["slots"] = _indices("slots", listed, case.index_dtype, poison, device)
    for role in Role:
        cache = _cache(case, role, poison, device)
        buffers[cache.name] = cache
    return Instance(case, device, buffers, slots, linear)


def _through_map(case: Case, slots: Tensor, skipped: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Full-pool slots to list, the map from them to ``slots``, and where each token then belongs.

    The full pool is twice as large as need be; its unused entries map to -1, as those of an allocator do.
    """
    tokens = len(slots)
    full = philox.permutation(case.seed, Stream.SLOT_MAP, 2 * tokens + 1)[:tokens].to(torch.int64)
    target = slots
    if case.slot_map is SlotMap.HOLES:
        holes = philox.uniform_int(case.seed, Stream.SLOT_MAP, (tokens,), 0, 3) == 0
        target = slots.masked_fill(holes, -1)
    slot_map = torch.full((2 * tokens + 1,), -1, dtype=torch.int64)
    slot_map[full] = target
    return full.masked_fill(skipped, -1), slot_map, target.masked_fill(skipped, -1)


def write_expected(instance: Instance) -> None:
    """Do to the caches of ``instance`` what a correct KV write does."""
    stored = instance.slots >= 0
    for role in Role:
        cache = instance.buffers[f"{role.value}_cache"].view
        write_slots(cache, instance.slots[stored], instance.linear[role][stored], instance.geometry(role))


def _indptr(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)


def _build_extend(case: Case, poison: Poison, device: str) -> Instance:
    tokens_q = sum(case.query_lens)
    q = values(case, Stream.Q, (tokens_q, case.num_q_heads, case.head_dim), case.dtype)
    linear = _linear(case)
    sink = sinks(case)
    buffers = {
        "q": _operand("q", q, case, poison, device),
        "k": _operand("k", linear[Role.K], case, poison, device),
        "v": _operand("v", linear[Role.V], case, poison, device),
        "q_indptr": _indices("q_indptr", _indptr(case.query_lens), case.index_dtype, poison, device),
        "kv_indptr": _indices("kv_indptr", _indptr(case.context_lens), case.index_dtype, poison, device),
    }
    if sink is not None:
        buffers["sinks"] = _operand("sinks", sink, case, poison, device)
    problem = Problem(
        q=q.to(device),
        k=linear[Role.K].to(device),
        v=linear[Role.V].to(device),
        q_lens=case.query_lens,
        kv_lens=case.context_lens,
        scale=scale_of(case),
        causal=case.causal,
        window=case.window,
        sinks=None if sink is None else sink.to(device),
        soft_cap=case.soft_cap,
    )
    return Instance(case, device, buffers, torch.empty(0, dtype=torch.int64), linear, problem)


def scale_of(case: Case) -> float:
    """The softmax scale in force: the case's own, or 1/sqrt(D)."""
    return case.head_dim**-0.5 if case.scale is None else case.scale
