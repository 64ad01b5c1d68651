"""How a rank of sglang's decode context parallel stores latent keys (MLA): its own ones of a list of widened slots.

A row of the pool holds a latent key and, behind it, the part with positions, if the model has one. What a case skips
is another rank's. Slots of rank 0 are no case: later versions take its slot 0 for padding.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fuzz.engine.loader import KernelLoader, scoped_imports
from fuzz.versions import installed
from oracle import Convention, Supports, declare
from oracle.kinds import Engine, IndexForm, KVLayout
from oracle.precision import EXACT_COPY
from suites.targets import sglang_dcp_backend, sglang_dcp_modules, sglang_wheel

FILES = ("srt/mem_cache/triton_ops/mla_buffer.py", "kernels/ops/kvcache/mla_buffer.py")
RANKS, RANK = 3, 1

CONVENTION = Convention(
    source="docstring of set_mla_kv_buffer_dcp_sharded_triton: of widened slots a rank selects its own, and collapses",
    kv_layout=KVLayout.LINEAR,
    index_form=IndexForm.SLOT_LIST,
    index_dtypes=("int64", "int32"),
)
SUPPORTS = Supports(
    dtypes=("bf16", "fp16", "uint8"),
    head_dims=(512, 128),
    v_head_dims=(64, 16),
    page_sizes=(16, 64),
    num_kv_heads=(1,),
    features=frozenset({"skip"}),
    batch_invariant=True,
)


def _given() -> sglang_wheel.Given:
    parallel = SimpleNamespace(attn_dcp_size=RANKS, attn_dcp_rank=RANK)
    platform = SimpleNamespace(capabilities=SimpleNamespace(supports_triton=True))
    told: dict[str, dict[str, Any]] = {
        "sglang.srt.layers.dcp": {
            "dcp_enabled": lambda: True,
            "get_attention_dcp_rank": lambda: RANK,
            "get_attention_dcp_world_size": lambda: RANKS,
        },
        "sglang.srt.runtime_context": {"get_parallel": lambda: parallel},
        "sglang.srt.platforms": {"current_platform": platform},
    }
    for name in ("sglang.jit_kernel", "sglang.kernels.jit"):
        told[f"{name}.utils"] = {"is_arch_support_pdl": lambda: False}
    for name in ("sglang.jit_kernel", "sglang.kernels.ops.kvcache"):
        told[f"{name}.set_mla_kv_buffer"] = {"can_use_set_mla_kv_buffer": lambda *widths: False}
    return told


@KernelLoader
def _kernels() -> ModuleType:
    return sglang_wheel.load(FILES, _given())


def _unavailable(engine: Engine) -> str | None:
    return sglang_wheel.missing(FILES, engine)


def widened(slots: Tensor, rows: int) -> Tensor:
    """Slots of this rank, and of the next one where a token is to be skipped."""
    others = torch.arange(len(slots), device=slots.device, dtype=slots.dtype) % rows * RANKS + (RANK + 1) % RANKS
    return torch.where(slots >= 0, slots * RANKS + RANK, others)


def _store(pool: Tensor, loc: Tensor, latent: Tensor, positional: Tensor) -> None:
    kernels = _kernels()
    store = getattr(kernels, "set_mla_kv_buffer_dcp_sharded_triton", kernels.set_mla_kv_buffer_triton)
    # Both versions import within the function.
    with scoped_imports(sglang_wheel.packages(_given())):
        store(pool, loc, latent, positional)


@declare.kv_write(
    name="sglang.dcp.write_latent",
    convention=CONVENTION,
    precision=EXACT_COPY,
    supports=SUPPORTS,
    unavailable=_unavailable,
    runs=("sglang set_mla_kv_buffer_triton",),
)
def write(
    key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, *, slot_map: Tensor | None
) -> None:
    """Latent parts as keys, those with positions as values; in the pool they are one row."""
    pool = torch.cat([k_cache, v_cache], -1)
    _store(pool, widened(slots, len(pool)), key, value)
    k_cache.copy_(pool[..., : k_cache.shape[-1]])
    v_cache.copy_(pool[..., k_cache.shape[-1] :])


@declare.kv_write(
    name="sglang.dcp.write_latent.no_positions",
    convention=CONVENTION,
    precision=EXACT_COPY,
    supports=SUPPORTS,
    unavailable=_unavailable,
    runs=("sglang set_mla_kv_buffer_triton",),
)
def write_without_positions(
    key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, *, slot_map: Tensor | None
) -> None:
    """Keys and values alike are latent keys of a model without positions, each in a pool of its own."""
    for pool, latent in ((k_cache, key), (v_cache, value)):
        _store(pool, widened(slots, len(pool)), latent, latent[..., :0])


POOL = ("srt/mem_cache/memory_pool.py",)


@KernelLoader
def _pool() -> ModuleType:
    no = partial(bool, False)
    here = {"is_cuda": no, "is_hip": no, "is_npu": no, "is_cpu": no, "cpu_has_amx_support": no}
    told = {
        **_given(),
        "sglang.srt.environ": {"envs": sglang_dcp_backend.environment(SGLANG_USE_AITER=False)},
        "sglang.srt.layers.quantization.fp8_kernel": {"is_fp8_fnuz": no},
        "sglang.srt.utils": here,
        "sglang.srt.utils.async_probe": {"maybe_detect_oob": lambda *what: None},
    }
    return sglang_wheel.load(POOL, told)


def _pool_unavailable(engine: Engine) -> str | None:
    if sglang_dcp_modules.later():
        return f"set_kv_buffer of sglang {installed('sglang')}'s latent pool refuses several ranks: AssertionError"
    return sglang_wheel.missing(POOL, engine)


@declare.kv_write(
    name="sglang.dcp.write_latent.whole_rows",
    convention=replace(CONVENTION, source="set_mla_kv_buffer_kernel, which takes the same slots to the same pool"),
    precision=EXACT_COPY,
    supports=replace(SUPPORTS, dtypes=("bf16", "fp16")),
    unavailable=_pool_unavailable,
)
def write_whole_rows(
    key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, *, slot_map: Tensor | None
) -> None:
    """Both parts at once, by ``MLATokenToKVPool.set_kv_buffer``."""
    rows = torch.cat([k_cache, v_cache], -1)
    pool = SimpleNamespace(
        size=len(rows),
        page_size=1,
        dtype=rows.dtype,
        store_dtype=rows.dtype,
        start_layer=0,
        kv_buffer=[rows],
        dsa_kv_cache_store_fp8=False,
    )
    layer, loc = SimpleNamespace(layer_id=0), widened(slots, len(rows))
    _pool().MLATokenToKVPool.set_kv_buffer(pool, layer, loc, torch.cat([key, value], -1), None)
    k_cache.copy_(rows[..., : k_cache.shape[-1]])
    v_cache.copy_(rows[..., k_cache.shape[-1] :])
