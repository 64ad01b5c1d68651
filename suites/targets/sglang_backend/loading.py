"""The backend's files of the installed sglang, each executed once, with what they need of each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import cache, partial
from types import ModuleType
from typing import Any

import torch

from fuzz.engine import loader
from fuzz.engine.emulator.facade import MI300X, MI350X, Device
from fuzz.engine.loader import KernelLoader
from oracle.kinds import Engine
from suites.targets import aiter_pa_decode, sglang_wheel
from suites.targets.portable import aiter
from suites.targets.sglang_shuffle_5d import FILES as CACHE
from suites.targets.source_trees import AITER, amd_arch

INDICES = (
    "srt/layers/attention/triton_ops/kv_indices.py",
    "kernels/ops/attention/kv_indices.py",
    "kernels/ops/kvcache/kv_indices.py",
)
"""Where these live: up to 0.5.16, in 0.5.23, and in between."""

PAGE_TABLES = (
    "srt/layers/attention/triton_ops/aiter_unified_attention.py",
    "kernels/ops/attention/aiter_unified_page_table.py",
    "kernels/ops/kvcache/aiter_unified_attention.py",
)
"""The kernel that makes the page tables of drafted tokens, in the same versions."""

POOL = ("srt/mem_cache/memory_pool.py",)
SUB_POOL = ("srt/mem_cache/swa_memory_pool.py",)
STEPS = ("srt/layers/attention/aiter_utils.py",)
BACKEND = ("srt/layers/attention/aiter_backend.py",)
FILES = (CACHE, INDICES, PAGE_TABLES, POOL, SUB_POOL, STEPS, BACKEND)

FP8 = {"gfx942": torch.float8_e4m3fnuz, "gfx950": torch.float8_e4m3fn}
"""sglang's fp8, by the GPU that it finds."""


class _Off:
    """An environment variable that is not set."""

    def get(self) -> bool:
        """False, whatever it would say."""
        return False


class _Environment:
    """sglang's table of environment variables, none of them set."""

    def __getattr__(self, name: str) -> _Off:
        return _Off()


class AttentionType(Enum):
    """Of a layer: as sglang's, whose file needs the serving stack."""

    DECODER = "decoder"
    DECODER_BIDIRECTIONAL = "decoder_bidirectional"
    ENCODER_ONLY = "encoder_only"


class _Unquantised:
    """The quantisation method of a pool that is not in 4 bits."""


def _no(*_: Any, **__: Any) -> bool:
    return False


def _ignore(*_: Any, **__: Any) -> None:
    """A check of sglang's that is off unless asked for."""


@dataclass(frozen=True)
class Modules:
    """sglang's own: the pools, and the backend."""

    pool: ModuleType
    sub_pool: ModuleType
    backend: ModuleType
    given: sglang_wheel.Given

    def unquantised(self) -> object:
        """The method that marks a pool as not in 4 bits."""
        return _Unquantised()

    @contextmanager
    def importing(self) -> Iterator[None]:
        """Within the block functions that import only when they are called find what they need."""
        with loader.scoped_imports(sglang_wheel.packages(self.given)):
            yield


def missing(engine: Engine) -> str | None:
    """Why the files cannot be loaded here, in one line, or None."""
    return next((reason for names in FILES if (reason := sglang_wheel.missing(names, engine))), None)


def _names(files: tuple[str, ...]) -> list[str]:
    return [f"sglang.{name.removesuffix('.py').replace('/', '.')}" for name in files]


def _machine(arch: str = "gfx950") -> sglang_wheel.Given:
    """What the files ask of the machine: an AMD GPU, fp8 in its format, no variable set."""
    utils: dict[str, Any] = dict.fromkeys(
        ("is_cuda", "is_npu", "is_cpu", "is_xpu", "cpu_has_amx_support", "is_gfx95_supported"), _no
    )
    utils |= {"is_hip": lambda: True, "get_bool_env_var": _no}
    fp8 = {"fp8_dtype": FP8[arch], "is_fp8_fnuz": lambda: arch == "gfx942"}
    return {
        "sglang.srt.utils": utils,
        "sglang.jit_kernel.utils": {"is_arch_support_pdl": _no},
        "sglang.srt.environ": {"envs": _Environment()},
        "sglang.srt.layers.radix_attention": {"AttentionType": AttentionType},
        "sglang.srt.layers.quantization.fp8_kernel": fp8,
        "sglang.kernels.ops.quantization.fp8_kernel": fp8,
        "sglang.srt.utils.async_probe": {"maybe_detect_oob": _ignore},
        "sglang.kernels.ops.attention.unified_attention_3d_mtp": {"reset_verify_attn_plan_cache": _ignore},
        "sglang.srt.layers.quantization.fp4_kv_cache_quant_method": {"UnquantizedKVCacheMethod": _Unquantised},
    }


@KernelLoader
def cache_kernels() -> ModuleType:
    """The file of the writer and the gather."""
    return sglang_wheel.load(CACHE, _machine())


@KernelLoader
def index_kernels() -> ModuleType:
    """The file of the kernels that list a batch's slots."""
    return sglang_wheel.load(INDICES, _machine())


@KernelLoader
def page_table_kernels() -> ModuleType:
    """The file of the kernel that makes page tables."""
    return sglang_wheel.load(PAGE_TABLES, _machine())


@cache
def portable(arch: str = "gfx950") -> Modules:
    """The backend over our portable kernels in the place of aiter's, with the fp8 of ``arch``."""
    return _load(_beneath(aiter.get_recommended_splits, aiter.pa_decode_gluon), arch)


@cache
def over_aiter(device: Device = MI300X) -> Modules:
    """The backend over aiter's own decode. Its prefill is compiled C++, which only an AMD GPU runs."""
    decode = partial(aiter_pa_decode.pa_decode_gluon, device=device)
    return _load(_beneath(aiter_pa_decode.get_recommended_splits, decode), str(device.arch))


@cache
def installed_aiter() -> Modules:
    """The backend over everything of an installed aiter, which it imports itself."""
    return _load({}, amd_arch(MI350X))


def _beneath(splits: Callable[..., int], decode: Callable[..., None]) -> sglang_wheel.Given:
    return {
        "aiter": {"mha_batch_prefill_func": aiter.mha_batch_prefill_func},
        "aiter.ops.triton.attention.unified_attention": {"unified_attention": aiter.unified_attention},
        "aiter.ops.triton.gluon.pa_decode_gluon": {"get_recommended_splits": splits, "pa_decode_gluon": decode},
    }


def missing_aiter(engine: Engine) -> str | None:
    """Why the backend cannot run over aiter's decode here, in one line, or None."""
    return missing(engine) or AITER.missing(aiter_pa_decode.FILES, engine)


def _load(beneath: sglang_wheel.Given, arch: str) -> Modules:
    given = dict(_machine(arch)) | dict(beneath)
    # Up to 0.5.16 the cache kernels' file passes the index kernels on; as it was loaded alone, it has placeholders.
    found = vars(cache_kernels()) | vars(index_kernels())
    given |= dict.fromkeys((*_names(CACHE), *_names(INDICES)), found)
    given |= dict.fromkeys(_names(PAGE_TABLES), vars(page_table_kernels()))
    loaded = []
    for files in (POOL, SUB_POOL, STEPS, BACKEND):
        module = sglang_wheel.load(files, given)
        given |= dict.fromkeys(_names(files), vars(module))
        loaded.append(module)
    pool, sub_pool, _, backend = loaded
    return Modules(pool, sub_pool, backend, given)
