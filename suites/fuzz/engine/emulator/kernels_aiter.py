"""How to load the Triton attention kernels of an unpacked `amd-aiter`, unmodified, into the emulator."""

import importlib.util
import os
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from fuzz.engine import emulator
from fuzz.engine.emulator.facade import MI300X, MI350X


def package() -> Path:
    """The folder `aiter` below ATTN_ORACLE_AITER, or that of an installed aiter; skips the test without one."""
    given = os.environ.get("ATTN_ORACLE_AITER")
    if given is not None:
        folder = Path(given)
        return folder / "aiter" if (folder / "aiter").is_dir() else folder
    spec = importlib.util.find_spec("aiter")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("aiter is not installed, and ATTN_ORACLE_AITER names no source tree")
    return Path(next(iter(spec.submodule_search_locations)))


@cache
def tree(arch: str = "gfx950") -> emulator.SourceTree:
    """The package's own files as on `arch`: gfx942 (fnuz fp8) or gfx950 (fn fp8)."""
    device = {"gfx942": MI300X, "gfx950": MI350X}[arch]
    arch_info = emulator.stub(
        "aiter.ops.triton.utils._triton.arch_info",
        get_arch=lambda: arch,
        get_device=lambda: "MI300X" if arch == "gfx942" else "MI350X",
        is_fp4_avail=lambda: arch == "gfx950",
        is_fp8_avail=lambda: True,
    )
    return emulator.SourceTree(
        {"aiter": package()},
        {"aiter.ops.triton.utils._triton.arch_info": arch_info, "torch": emulator.torch_with(device)},
    )


def operation(name: str, arch: str = "gfx950") -> ModuleType:
    """A module of `aiter.ops.triton`: unified_attention, pa_decode, pa_prefill, prefill_attention, fused_kv_cache."""
    return tree(arch).load(f"aiter.ops.triton.{name}")
