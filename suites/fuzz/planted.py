"""Targets with one planted fault each, and their clean twins. Loaded by name, as a user's own targets are."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from oracle import Convention, Precision, Supports, declare
from oracle.convention import DefaultScale, LseLayout, Window, WindowMeaning
from oracle.kinds import KVLayout, Role
from oracle.layout import CacheGeometry, read_slots, write_slots
from oracle.precision import EXACT_COPY

COPY = Convention(source="this test", kv_layout=KVLayout.SHUFFLE_5D, index_dtypes=("int64", "int32"))
COPIES = Supports(dtypes=("bf16", "uint8"), head_dims=(32,), num_kv_heads=(1, 2))
WRITES = replace(COPIES, features=frozenset({"skip", "slot_map", "strided"}))
ATTENTION = Convention(
    source="this test",
    window=Window(meaning=WindowMeaning.KEYS, off=(0,)),
    default_scale=DefaultScale.RSQRT_HEAD_DIM,
    lse_layout=LseLayout.TOKEN_HEAD,
)
FLOAT64 = Precision(source="float64 inside", qk_product=None, p_dtype=None)
EXTENDS = Supports(
    dtypes=("fp32",),
    head_dims=(32,),
    num_kv_heads=(2,),
    group_sizes=(2,),
    features=frozenset({"window", "non_causal", "chunked", "custom_scale", "strided", "empty"}),
)


def _geometries(k_cache: Tensor, v_cache: Tensor) -> tuple[CacheGeometry, CacheGeometry]:
    blocks, heads, outer, page, x = k_cache.shape
    make = partial(
        CacheGeometry, KVLayout.SHUFFLE_5D, num_blocks=blocks, heads=heads, page_size=page, dtype=k_cache.dtype
    )
    return make(role=Role.K, dim=outer * x), make(role=Role.V, dim=v_cache.shape[3])


def gather_rows(k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    k, v = _geometries(k_cache, v_cache)
    return read_slots(k_cache, slots, k), read_slots(v_cache, slots, v)


def _write(
    key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, slot_map: Tensor | None
) -> None:
    stored = slots >= 0
    slots = slots[stored].long()
    if slot_map is not None:
        slots = slot_map[slots].long()
    k, v = _geometries(k_cache, v_cache)
    kept = slots >= 0
    write_slots(k_cache, slots[kept], key[stored][kept], k)
    write_slots(v_cache, slots[kept], value[stored][kept], v)


def gathers(name: str, fault: Callable[..., Any], **supports: Any) -> Any:
    """Declare a gather that is right up to ``fault(key, value, k_cache, v_cache, slots)``."""

    def gather(k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> Any:
        key, value = gather_rows(k_cache, v_cache, slots)
        changed = fault(key, value, k_cache, v_cache, slots)
        return (key, value) if changed is None else changed

    supported = replace(COPIES, **supports)
    return declare.kv_gather(name=name, convention=COPY, precision=EXACT_COPY, supports=supported)(gather)


def _wrong_bit(key: Tensor, *rest: Tensor) -> None:
    if key.numel():
        key.view(torch.uint8).view(-1)[0] ^= 1


def _unwritten(key: Tensor, value: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
    out = torch.empty(key.shape, dtype=key.dtype)
    out[:-1] = key[:-1]
    return out, value


def _overrun(key: Tensor, value: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
    out = torch.empty(key.shape, dtype=key.dtype)
    torch.as_strided(out, (out.numel() + 1,), (1,)).zero_()
    out.copy_(key)
    return out, value


def _changes_input(key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    if slots.numel():
        slots[0] += 1


def _reads_past_the_end(key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    beyond = torch.as_strided(v_cache, (1,), (1,), v_cache.storage_offset() + v_cache.numel())
    if key.numel():
        # Finite poison times zero is zero: only NaN shows it.
        key.view(-1)[0] += (beyond[0] * 0).to(key.dtype)


def _depends_on_poison(key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    beyond = torch.as_strided(v_cache, (1,), (1,), v_cache.storage_offset() + v_cache.numel())
    if key.numel() and float(beyond[0]) < 0:
        key.view(torch.uint8).view(-1)[0] ^= 1


_calls = 0


def _differs_by_call(key: Tensor, *rest: Tensor) -> None:
    global _calls
    _calls += 1
    if key.numel():
        key.view(torch.uint8).view(-1)[0] ^= _calls & 0xFF


def _raises(*_: Tensor) -> None:
    raise ValueError("planted")


def _segfaults(*_: Tensor) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def _hangs(*_: Tensor) -> None:
    time.sleep(3600)


def _wrong_shape(key: Tensor, value: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
    return key[..., :-1], value


gather_clean = gathers("planted.gather.clean", lambda *_: None)
gather_values = gathers("planted.gather.values", _wrong_bit)
gather_written = gathers("planted.gather.written", _unwritten)
gather_bounds = gathers("planted.gather.bounds", _overrun)
gather_inputs = gathers("planted.gather.inputs", _changes_input)
gather_nan = gathers("planted.gather.nan", _reads_past_the_end, dtypes=("bf16",))
gather_poison = gathers("planted.gather.poison", _depends_on_poison, dtypes=("bf16",))
gather_determinism = gathers("planted.gather.determinism", _differs_by_call)
gather_crash = gathers("planted.gather.crash", _raises)
gather_segfault = gathers("planted.gather.segfault", _segfaults)
gather_hang = gathers("planted.gather.hang", _hangs)
gather_result = gathers("planted.gather.result", _wrong_shape)


def _writes(name: str, fault: Callable[[Tensor, Tensor], None], late: bool = True) -> Any:
    """Declare a writer that does ``fault(k_cache, slots)`` after its work, or instead of it."""

    def write(
        key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, *, slot_map: Tensor | None
    ) -> None:
        if late:
            _write(key, value, k_cache, v_cache, slots, slot_map)
        fault(k_cache, slots)

    return declare.kv_write(name=name, convention=COPY, precision=EXACT_COPY, supports=WRITES)(write)


def _spills(k_cache: Tensor, slots: Tensor) -> None:
    torch.as_strided(k_cache, (1,), (1,), k_cache.storage_offset() + k_cache.numel()).zero_()


def _garbles(k_cache: Tensor, slots: Tensor) -> None:
    stored = slots[slots >= 0]
    if len(stored):
        page = int(stored[0]) // k_cache.shape[3]
        k_cache[page, 0, 0, int(stored[0]) % k_cache.shape[3], 0] = 1


def _garbles_later(k_cache: Tensor, slots: Tensor) -> None:
    global _calls
    _calls += 1
    if _calls % 3 == 2:
        _garbles(k_cache, slots)


def _garbles_over_nan(k_cache: Tensor, slots: Tensor) -> None:
    before = torch.as_strided(k_cache, (1,), (1,), k_cache.storage_offset() - 1)
    if k_cache.is_floating_point() and bool(before.isnan()):
        _garbles(k_cache, slots)


def forget() -> None:
    global _calls
    _calls = 0


write_clean = _writes("planted.write.clean", lambda *_: None)
write_written = _writes("planted.write.written", lambda *_: None, late=False)
write_bounds = _writes("planted.write.bounds", _spills)
write_values = _writes("planted.write.values", _garbles)
write_later = _writes("planted.write.later", _garbles_later)
write_nan = _writes("planted.write.nan", _garbles_over_nan)


def _extends(
    name: str,
    *,
    window_off_by: int = 0,
    lse_scale: float = 1.0,
    drop_key: bool = False,
    jitter: bool = False,
    lse: LseLayout = LseLayout.TOKEN_HEAD,
    convention: Convention = ATTENTION,
    **supports: Any,
) -> Any:
    """Declare a float64 attention, right up to the named mistake. It shares no code with the oracle.

    ``jitter`` moves the last bit from call to call, ``lse`` is what it really returns.
    """
    returned = lse

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
        **_: Any,
    ) -> Any:
        global _calls
        _calls += 1
        out, lse = torch.zeros_like(q), torch.full(q.shape[:2], -torch.inf)
        group = q.shape[1] // k.shape[1]
        for r in range(len(q_indptr) - 1):
            first, keys = int(kv_indptr[r]), int(kv_indptr[r + 1]) - int(kv_indptr[r])
            queries = int(q_indptr[r + 1]) - int(q_indptr[r])
            for i in range(queries):
                row, position = int(q_indptr[r]) + i, keys - queries + i
                low = max(0, position - window - window_off_by + 1) if window else 0
                high = position + 1 if causal else keys
                seen = list(range(low, high))[1 if drop_key and high - low > 1 else 0 :]
                for h in range(q.shape[1]):
                    rows = [first + j for j in seen]
                    s = k[rows, h // group].double() @ q[row, h].double() * (scale or q.shape[2] ** -0.5)
                    if len(rows):
                        lse[row, h] = torch.logsumexp(s, 0) * lse_scale
                        out[row, h] = (s.softmax(0) @ v[rows, h // group].double()).float()
        if jitter and _calls % 2:
            out = out.nextafter(torch.zeros_like(out))
        if returned is LseLayout.NONE:
            return out
        return out, lse.T.contiguous() if returned is LseLayout.HEAD_TOKEN else lse

    supported = replace(EXTENDS, **supports)
    return declare.varlen_extend(name=name, convention=convention, precision=FLOAT64, supports=supported)(extend)


extend_clean = _extends("planted.extend.clean")
extend_window = _extends("planted.extend.window", window_off_by=1)
extend_lse = _extends("planted.extend.lse", lse_scale=1.4426950408889634)
extend_key = _extends("planted.extend.key", drop_key=True)
extend_jitter = _extends("planted.extend.jitter", jitter=True)
extend_jitter_declared = _extends("planted.extend.jitter_declared", jitter=True, deterministic=False)
extend_turned = _extends(
    "planted.extend.turned",
    lse=LseLayout.HEAD_TOKEN,
    convention=replace(ATTENTION, lse_layout=LseLayout.HEAD_TOKEN),
)
extend_without_lse = _extends("planted.extend.without_lse", lse=LseLayout.NONE)
