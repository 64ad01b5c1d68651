"""sglang's SHUFFLE 5D cache kernels: the writer and the gather."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

from torch import Tensor

from fuzz.engine.loader import KernelLoader
from oracle import Convention, Supports, declare
from oracle.convention import Fp8Flavour
from oracle.kinds import Engine, IndexForm, KVLayout
from oracle.precision import EXACT_COPY
from suites.targets import sglang_wheel
from suites.targets.checked import checked

FILES = (
    "srt/layers/attention/utils.py",
    "kernels/ops/kvcache/shuffle_5d_cache.py",
    "kernels/ops/attention/utils.py",
)
"""Where the kernels live: up to 0.5.16, in 0.5.23, and in between."""

CONVENTION = Convention(
    source="docstrings of launch_reshape_and_cache_shuffle_5d and launch_gather_shuffle_5d_to_linear",
    kv_layout=KVLayout.SHUFFLE_5D,
    index_form=IndexForm.SLOT_LIST,
    index_dtypes=("int64", "int32"),
    fp8_flavour=Fp8Flavour.ANY,
)

SUPPORTS = Supports(
    dtypes=("bf16", "fp16", "fp32", "uint8", "e4m3fn", "e5m2"),
    head_dims=(64, 48, 128, 192),
    page_sizes=(16, 64, 48),
    num_kv_heads=(1, 2, 3, 8),
    batch_invariant=True,
)


@KernelLoader
def _kernels() -> ModuleType:
    return sglang_wheel.load(
        FILES,
        {
            "sglang.srt.utils": {"is_cuda": lambda: False},
            "sglang.jit_kernel.utils": {"is_arch_support_pdl": lambda: False},
        },
    )


def _unavailable(engine: Engine) -> str | None:
    return sglang_wheel.missing(FILES, engine)


@declare.kv_write(
    name="sglang.shuffle_5d.write",
    convention=CONVENTION,
    precision=EXACT_COPY,
    supports=replace(SUPPORTS, features=frozenset({"strided", "skip", "slot_map"})),
    unavailable=_unavailable,
    runs=("sglang launch_reshape_and_cache_shuffle_5d",),
)
@checked(CONVENTION)
def write(
    key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, *, slot_map: Tensor | None
) -> None:
    """Store keys and values in the pool, in place."""
    _kernels().launch_reshape_and_cache_shuffle_5d(key, value, k_cache, v_cache, slots, slot_map)


@declare.kv_gather(
    name="sglang.shuffle_5d.gather",
    convention=CONVENTION,
    precision=EXACT_COPY,
    supports=SUPPORTS,
    unavailable=_unavailable,
    runs=("sglang launch_gather_shuffle_5d_to_linear",),
)
@checked(CONVENTION)
def gather(k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Read keys and values of the slots from the pool."""
    key, value = _kernels().launch_gather_shuffle_5d_to_linear(k_cache, v_cache, slots)
    return key, value
