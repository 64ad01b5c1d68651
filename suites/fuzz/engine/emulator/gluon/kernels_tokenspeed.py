"""How the Gluon attention kernels of tokenspeed-kernel-amd are loaded and called, in the emulator.

The package is found among the installed ones, or in the folder that ATTN_ORACLE_TOKENSPEED names; it is not imported.
Its files take Triton from a fork, `tokenspeed_triton`, for which the emulator has the same substitutes.
"""

import importlib.util
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

from torch import Tensor

from fuzz.engine.emulator import SourceTree

PACKAGE = "tokenspeed_kernel_amd"


def package() -> Path | None:
    """The package's folder, if it is there."""
    folder = os.environ.get("ATTN_ORACLE_TOKENSPEED")
    if folder:
        found = Path(folder) / PACKAGE
        return found if found.is_dir() else None
    spec = importlib.util.find_spec(PACKAGE)
    return Path(spec.origin).parent if spec is not None and spec.origin else None


@cache
def tree(folder: Path) -> SourceTree:
    """The package as a tree of sources: a file is executed when it is asked for, or imported by one that is."""
    return SourceTree({PACKAGE: folder})


def _entry(folder: Path, name: str) -> Callable[..., Tensor | tuple[Tensor, Tensor]]:
    module = tree(folder).load(f"{PACKAGE}.ops.gfx950.attention.mha.{name}")
    function: Callable[..., Tensor | tuple[Tensor, Tensor]] = getattr(module, f"launch_gluon_mha_{name}_gfx950")
    return function


def decode(folder: Path) -> Callable[..., Tensor | tuple[Tensor, Tensor]]:
    """launch_gluon_mha_decode_gfx950(q, k_cache, v_cache, page_table, cache_seqlens, max_seqlen_k, ...)."""
    return _entry(folder, "decode")


def extend(folder: Path) -> Callable[..., Tensor | tuple[Tensor, Tensor]]:
    """launch_gluon_mha_extend_gfx950(q, cu_seqlens_q, cu_seqlens_kv, k_cache, v_cache, page_table,
    cache_seqlens, ...)."""
    return _entry(folder, "extend")


def prefill(folder: Path) -> Callable[..., Tensor | tuple[Tensor, Tensor]]:
    """launch_gluon_mha_prefill_gfx950(q, k, v, cu_seqlens, cu_seqlens_cpu, max_seqlen, ...)."""
    return _entry(folder, "prefill")
