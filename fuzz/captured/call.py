"""A captured call as the rest of the framework knows calls: a case that describes it, its problem, its buffers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fuzz.buffers import DTYPE_NAMES, Buffer, Poison, empty_buffer
from fuzz.captured.load import RecordError
from fuzz.captured.reader import Reader
from fuzz.case import STORAGE_BYTES, Case, CaseError, Placement, Pool, Prefix, Probe, Sink, SlotMap, States
from fuzz.case import Skip as SkipTokens
from fuzz.instance import Instance
from oracle.capture import Record
from oracle.convention import DefaultScale, Granularity
from oracle.declare import Declaration
from oracle.diagnose import Surroundings
from oracle.kinds import IndexForm, IndexTask, KVLayout, Operation, Role
from oracle.layout import CacheGeometry, LayoutError, cache_axes, geometry_of, read_slots
from oracle.problem import Problem, ProblemError

OPERATIONS = (Operation.PAGED_DECODE, Operation.VARLEN_EXTEND, Operation.LSE_MERGE)
_FLOATS = ("fp32", "bf16", "fp16")


@dataclass(frozen=True, eq=False)
class Captured:
    """A record in the terms of one target.

    ``instance`` has the case that describes the record (its values are not those that the case would draw) and the
    problem. ``slots``: pool slot of each key that lies in a pool, request by request. ``geometry``: of the caches.
    """

    record: Record
    instance: Instance
    around: Surroundings
    slots: Tensor | None = None
    geometry: dict[Role, CacheGeometry] | None = None

    @property
    def case(self) -> Case:
        """The case that describes the record."""
        return self.instance.case


def understand(record: Record, declaration: Declaration, device: str = "cpu") -> Captured:
    """Read a record in a target's convention. Raises ``RecordError``: the field and what is allowed."""
    if declaration.operation not in OPERATIONS:
        raise RecordError(f"{declaration.name} is {declaration.operation}; allowed: {', '.join(OPERATIONS)}")
    if declaration.convention.keys_in_pool:
        raise RecordError(f"{declaration.name} reads all its keys from a pool by a page table, as no record can yet")
    reader = Reader(record, declaration)
    try:
        captured = _merge(reader) if declaration.operation is Operation.LSE_MERGE else _attention(reader, device)
    except (CaseError, ProblemError, LayoutError) as error:
        raise RecordError(f"the call that was captured: {error}") from None
    _check_outputs(captured, declaration)
    return captured


# ------------------------------------------------------------------ attention


def _attention(read: Reader, device: str) -> Captured:
    dtypes = (*_FLOATS, "e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz")
    q = read.tensor("q", "tokens heads dim", dtypes)
    if read.record.arguments.get("q_descale") is not None:
        raise RecordError("q_descale: allowed: None, as no record with it can be judged yet")
    decode = read.declaration.operation is Operation.PAGED_DECODE
    causal = True if decode else read.flag("causal", True)
    window = read.window(causal)
    pooled = decode or read.convention.prefix_in_pool
    geometry = _geometry(read) if pooled else None
    slots: Tensor | None = None
    pages: tuple[tuple[int, ...], ...] | None = None
    if decode:
        contexts, slots, pages = _decode_keys(read, _some(geometry))
        queries = _uniform(q.shape[0], len(contexts))
        k, v = _pool_rows(read, _some(geometry), slots)
    else:
        queries = read.lengths("q_indptr", q.shape[0], "rows of q")
        passed = {r: read.tensor(r.value, "tokens heads dim", dtypes) for r in Role}
        contexts, slots, k, v = _extend_keys(read, geometry, queries, passed)
    head_dim, kv_heads = q.shape[2], k.shape[1]
    if not kv_heads or not head_dim or q.shape[1] % max(kv_heads, 1) or not q.shape[1]:
        raise RecordError(f"q: {q.shape[1]} heads; allowed: a multiple of the {kv_heads} of the keys")
    held = None if not pooled else _held(contexts, queries, decode)
    factors = {
        name: _factors(read, name, kv_heads, geometry, slots, held, k.shape[0]) for name in ("k_descale", "v_descale")
    }
    if v.shape[0] != k.shape[0] or v.shape[1] != kv_heads or v.dtype != k.dtype:
        raise RecordError(f"v: {v.dtype} {list(v.shape)}; allowed: the rows, heads and dtype of k")
    case = _case(
        read,
        contexts,
        queries,
        q,
        geometry,
        kv_heads=kv_heads,
        v_head_dim=v.shape[2],
        causal=causal,
        window=window,
        kv_dtype=_kv_dtype(read),
        pooled=pooled,
    )
    problem = Problem(
        q=q.contiguous(),
        k=k,
        v=v,
        q_lens=queries,
        kv_lens=contexts,
        scale=head_dim**-0.5 if case.scale is None else case.scale,
        causal=causal,
        window=window,
        sinks=_sinks(read, q.shape[1]),
        soft_cap=case.soft_cap,
        k_descale=factors["k_descale"],
        v_descale=factors["v_descale"],
    )
    around = Surroundings()
    if pages is not None and geometry is not None:
        pools = [_whole(read, geometry, role) for role in Role]
        around = Surroundings(page_size=geometry[Role.K].page_size, pages=pages, pool_k=pools[0], pool_v=pools[1])
    instance = Instance(case, device, _buffers(read, device), problem=problem.to(torch.device(device)))
    return Captured(read.record, instance, around, slots, geometry)


def _some(geometry: dict[Role, CacheGeometry] | None) -> dict[Role, CacheGeometry]:
    assert geometry is not None
    return geometry


def _uniform(rows: int, requests: int) -> tuple[int, ...]:
    if requests == 0 or rows % requests:
        if rows == requests == 0:
            return ()
        raise RecordError(f"q: {rows} rows for {requests} requests; allowed: as many for each")
    return (rows // requests,) * requests


def _geometry(read: Reader) -> dict[Role, CacheGeometry]:
    caches = {role: read.record.arguments[f"{role.value}_cache"] for role in Role}
    found = {role: _geometry_of(read, role, cache) for role, cache in caches.items()}
    k, v = found[Role.K], found[Role.V]
    if (k.num_blocks, k.heads, k.page_size, k.dtype) != (v.num_blocks, v.heads, v.page_size, v.dtype):
        raise RecordError("v_cache: allowed: as many pages, heads and tokens a page as k_cache has, of its dtype")
    return found


def _geometry_of(read: Reader, role: Role, cache: Tensor) -> CacheGeometry:
    layout, v_layout, name = read.convention.kv_layout, read.convention.v_layout, f"{role.value}_cache"
    dtypes = (*_FLOATS, "e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz")
    read.tensor(name, cache_axes(layout, role, v_layout), dtypes)
    page = _page_size(read) if layout is KVLayout.LINEAR else 1
    try:
        return geometry_of(tuple(cache.shape), cache.dtype, layout, role, v_layout, page)
    except LayoutError as error:
        raise RecordError(f"{name}: {error}") from None


def _page_size(read: Reader) -> int:
    value = read.record.arguments.get("page_size", 1)
    if type(value) is not int or not 1 <= value <= 4096:
        raise RecordError("page_size: allowed: an integer from 1 to 4096")
    return value


def _decode_keys(
    read: Reader, geometry: dict[Role, CacheGeometry]
) -> tuple[tuple[int, ...], Tensor, tuple[tuple[int, ...], ...] | None]:
    own = geometry[Role.K]
    if read.convention.index_form is not IndexForm.PAGE_TABLE:
        slots = read.indices("slots")
        return read.lengths("kv_indptr", len(slots), "slots"), _within("slots", slots, own.num_slots), None
    table = read.tensor("page_table", "requests pages", ("int32", "int64")).long()
    lengths = read.indices("lengths", table.shape[0]).tolist()
    g, pages, slots_ = own.page_size, [], []
    for row, length in enumerate(lengths):
        if not 0 <= length <= table.shape[1] * g:
            allowed = f"0 to {table.shape[1] * g}, what the page table has room for"
            raise RecordError(f"lengths[{row}]: {length}; allowed: {allowed}")
        named = _within(f"page_table[{row}]", table[row, : -(-length // g)], own.num_blocks)
        pages.append(tuple(named.tolist()))
        slots_.append((named[:, None] * g + torch.arange(g)).flatten()[:length])
    return tuple(lengths), torch.cat(slots_) if slots_ else torch.zeros(0, dtype=torch.int64), tuple(pages)


def _within(name: str, index: Tensor, limit: int) -> Tensor:
    outside = ((index < 0) | (index >= limit)).nonzero()
    if len(outside):
        place = int(outside[0])
        raise RecordError(f"{name}: entry {place} is {int(index[place])}; allowed: 0 to {limit - 1}, the pool's")
    return index


def _extend_keys(
    read: Reader, geometry: dict[Role, CacheGeometry] | None, queries: tuple[int, ...], passed: dict[Role, Tensor]
) -> tuple[tuple[int, ...], Tensor | None, Tensor, Tensor]:
    k, v = passed[Role.K], passed[Role.V]
    if geometry is None:
        contexts = read.lengths("kv_indptr", k.shape[0], "rows of k")
        return contexts, None, k.contiguous(), v.contiguous()
    slots = _within("slots", read.indices("slots"), geometry[Role.K].num_slots)
    before = read.lengths("kv_indptr", len(slots), "slots")
    if len(before) != len(queries) or k.shape[0] != sum(queries):
        raise RecordError(f"k: {k.shape[0]} rows; allowed: {sum(queries)}, one for each query")
    if v.shape[0] != k.shape[0]:
        raise RecordError(f"v: {v.shape[0]} rows; allowed: {k.shape[0]}, those of k")
    pool = _pool_rows(read, geometry, slots)
    joined = []
    for role, held, new in zip(Role, pool, (k, v), strict=True):
        if held.shape[1:] != new.shape[1:]:
            raise RecordError(
                f"{role}_cache: {list(held.shape[1:])} a slot; allowed: {list(new.shape[1:])}, as in {role}"
            )
        if held.dtype != new.dtype:
            held, new = held.double(), new.double()  # exact: read as the numbers that they stand for
        parts = zip(held.split(list(before)), new.split(list(queries)), strict=True)
        joined.append(torch.cat([x for pair in parts for x in pair]) if before else new)
    return tuple(a + b for a, b in zip(before, queries, strict=True)), slots, joined[0], joined[1]


def _pool_rows(read: Reader, geometry: dict[Role, CacheGeometry], slots: Tensor) -> tuple[Tensor, Tensor]:
    found = [read_slots(read.record.arguments[f"{role.value}_cache"], slots, geometry[role]) for role in Role]
    return found[0], found[1]


def _whole(read: Reader, geometry: dict[Role, CacheGeometry], role: Role) -> Tensor:
    own = geometry[role]
    rows: Tensor = read_slots(read.record.arguments[f"{role.value}_cache"], torch.arange(own.num_slots), own)
    return torch.unflatten(rows, 0, (own.num_blocks, own.page_size))


def _held(contexts: tuple[int, ...], queries: tuple[int, ...], decode: bool) -> Tensor:
    """Which keys lie in the pool: bool [Tk]."""
    parts = [torch.arange(n) < (n if decode else n - q) for n, q in zip(contexts, queries, strict=True)]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.bool)


def _factors(
    read: Reader,
    name: str,
    heads: int,
    geometry: dict[Role, CacheGeometry] | None,
    slots: Tensor | None,
    held: Tensor | None,
    keys: int,
) -> Tensor | None:
    """Factors as a problem wants them, [1, H] or [Tk, H]; 1 for keys that are not in the pool."""
    value = read.record.arguments.get(name)
    if value is None:
        return None
    if not isinstance(value, Tensor):
        value = torch.tensor([read.number(name)], dtype=torch.float32)
    if value.dtype != torch.float32:
        raise RecordError(f"{name}: {value.dtype}; allowed: torch.float32")
    if value.ndim == 3 and geometry is not None and slots is not None:
        own = geometry[Role.K]
        if tuple(value.shape) != (own.num_blocks, heads, own.page_size):
            raise RecordError(f"{name}: {list(value.shape)}; allowed: {[own.num_blocks, heads, own.page_size]}")
        rows = value[slots // own.page_size, :, slots % own.page_size]
        every = torch.ones(keys, heads)
        every[held if held is not None else slice(None)] = rows
        return every
    if value.numel() not in (1, heads):
        raise RecordError(f"{name}: {list(value.shape)}; allowed: [1], [{heads}] or [pages, {heads}, page size]")
    spread = value.reshape(1, -1).expand(1, heads)
    if held is None or bool(held.all()):
        return spread.contiguous()
    return torch.where(held.unsqueeze(1), spread, 1.0)


def _sinks(read: Reader, heads: int) -> Tensor | None:
    if read.record.arguments.get("sinks") is None:
        return None
    if not isinstance(read.record.arguments["sinks"], Tensor):
        raise RecordError(f"sinks: allowed: None or a tensor [{heads}], one a query head")
    sinks = read.tensor("sinks", "heads", _FLOATS)
    if len(sinks) != heads:
        raise RecordError(f"sinks: {len(sinks)}; allowed: {heads}, one a query head")
    return sinks


def _kv_dtype(read: Reader) -> str:
    name = "k_cache" if "k_cache" in read.record.arguments else "k"
    return DTYPE_NAMES[read.record.arguments[name].dtype]


def _granularity(read: Reader, name: str) -> Granularity:
    value = read.record.arguments.get(name)
    if value is None:
        return Granularity.NONE
    if not isinstance(value, Tensor) or value.numel() == 1:
        return Granularity.TENSOR
    return Granularity.TOKEN if value.ndim == 3 else Granularity.HEAD


def _case(
    read: Reader,
    contexts: tuple[int, ...],
    queries: tuple[int, ...],
    q: Tensor,
    geometry: dict[Role, CacheGeometry] | None,
    *,
    kv_heads: int,
    v_head_dim: int,
    causal: bool,
    window: int | None,
    kv_dtype: str,
    pooled: bool,
) -> Case:
    """The case of the same shapes and features. Raises ``CaseError`` where there is none."""
    convention, arguments = read.convention, read.record.arguments
    scale = read.number("scale")
    if scale is None and convention.default_scale is not DefaultScale.RSQRT_HEAD_DIM:
        scale = 1.0 if convention.default_scale is DefaultScale.ONE else _required_scale(read)
    cap = read.number("soft_cap")
    index = arguments.get("page_table", arguments.get("slots", arguments.get("kv_indptr")))
    return _plain_case(
        read,
        operation=read.declaration.operation,
        context_lens=contexts,
        query_lens=queries,
        num_kv_heads=kv_heads,
        group_size=q.shape[1] // kv_heads,
        head_dim=q.shape[2],
        v_head_dim=v_head_dim,
        dtype=DTYPE_NAMES[q.dtype],
        kv_dtype=kv_dtype,
        page_size=geometry[Role.K].page_size if geometry else 16,
        index_dtype=DTYPE_NAMES[index.dtype] if isinstance(index, Tensor) else "int32",
        strided=not q.is_contiguous(),
        causal=causal,
        window=window,
        sinks=Sink.NONE if arguments.get("sinks") is None else Sink.NORMAL,
        soft_cap=cap if cap else None,
        scale=scale,
        k_descale=_granularity(read, "k_descale"),
        v_descale=_granularity(read, "v_descale"),
        prefix=Prefix.POOL if pooled and read.declaration.operation is Operation.VARLEN_EXTEND else Prefix.INLINE,
    )


def _required_scale(read: Reader) -> float:
    raise RecordError(f"scale: missing; {read.declaration.name} has no default")


def _plain_case(read: Reader, **given: Any) -> Case:
    plain: dict[str, Any] = {
        "seed": 0,
        "kv_layout": read.convention.kv_layout,
        "v_layout": read.convention.v_layout,
        "placement": Placement.SHUFFLED,
        "pool": Pool.SPARE,
        "strided": False,
        "causal": True,
        "window": None,
        "sinks": Sink.NONE,
        "soft_cap": None,
        "scale": None,
        "q_descale": Granularity.NONE,
        "k_descale": Granularity.NONE,
        "v_descale": Granularity.NONE,
        "index_form": read.convention.index_form,
        "prefix": Prefix.INLINE,
        "skip": SkipTokens.NONE,
        "slot_map": SlotMap.NONE,
        "parts": 1,
        "rank": 0,
        "states": States.FULL,
        "index_task": IndexTask.NONE,
        "earlier_calls": 0,
        "probe": Probe.NORMAL,
    }
    return Case(**(plain | given))


# --------------------------------------------------------------------- merges


def _merge(read: Reader) -> Captured:
    outs = read.tensor("outs", "parts tokens heads dim", _FLOATS)
    lses = read.tensor("lses", "parts tokens heads", ("fp32",))
    if lses.shape != outs.shape[:3]:
        raise RecordError(f"lses: {list(lses.shape)}; allowed: {list(outs.shape[:3])}")
    parts, rows, heads, dim = outs.shape
    empty = bool((lses == -torch.inf).any())
    case = _plain_case(
        read,
        operation=Operation.LSE_MERGE,
        context_lens=(rows,),
        query_lens=(),
        num_kv_heads=heads,
        group_size=1,
        head_dim=dim,
        v_head_dim=dim,
        dtype=DTYPE_NAMES[outs.dtype],
        kv_dtype=DTYPE_NAMES[outs.dtype],
        page_size=16,
        pool=Pool.TIGHT,
        index_dtype="int32",
        parts=parts,
        states=States.SOME_EMPTY if empty else States.FULL,
    )
    return Captured(read.record, Instance(case, "cpu", _buffers(read, "cpu")), Surroundings())


# -------------------------------------------------------------------- buffers


def _buffers(read: Reader, device: str) -> dict[str, Buffer]:
    """The tensors between guards, so that reads and writes outside of them show."""
    return {
        name: _buffer(name, value, device) for name, value in read.record.arguments.items() if isinstance(value, Tensor)
    }


def _buffer(name: str, value: Tensor, device: str) -> Buffer:
    buffer = empty_buffer(name, value.shape, value.dtype, Poison.POSITIVE, device=device, strides=value.stride())
    buffer.view.copy_(value)
    return buffer


def _check_outputs(captured: Captured, declaration: Declaration) -> None:
    from fuzz.call import expected_outputs
    from oracle.convention import LseLayout

    expected = expected_outputs(captured.instance, declaration)
    outputs = captured.record.outputs
    if "out" not in outputs:
        raise RecordError("out: missing; allowed: what the call returned")
    if "lse" in outputs and declaration.convention.lse_layout is LseLayout.NONE:
        raise RecordError(f"lse: {declaration.name} returns none")
    for name, value in outputs.items():
        shape, dtype = expected[name]
        if tuple(value.shape) != shape or (dtype is not None and value.dtype != dtype):
            raise RecordError(f"{name}: {value.dtype} {list(value.shape)}; allowed: {dtype or 'a float'} {list(shape)}")
    if DTYPE_NAMES[outputs["out"].dtype] not in STORAGE_BYTES or not outputs["out"].is_floating_point():
        raise RecordError(f"out: {outputs['out'].dtype}; allowed: a float dtype")
