"""How to load the Triton attention kernels of the sglang wheel, unmodified, into the emulator."""

import importlib.metadata
import importlib.util
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from fuzz.engine import emulator
from fuzz.engine.emulator.facade import H200

_OPERATIONS = "sglang.srt.layers.attention.triton_ops"


def package() -> Path:
    """The folder of the installed sglang 0.5.15; skips the test without it."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations or importlib.metadata.version("sglang") != "0.5.15":
        pytest.skip("sglang 0.5.15 is not installed")
    return Path(next(iter(spec.submodule_search_locations)))


@cache
def tree(hip: bool = False) -> emulator.SourceTree:
    """The package's own files, with what they ask about the machine answered for NVIDIA or AMD."""
    utils = emulator.stub(
        "sglang.srt.utils", is_cuda=lambda: not hip, is_hip=lambda: hip, is_gfx95_supported=lambda: hip
    )
    return emulator.SourceTree({"sglang": package()}, {"sglang.srt.utils": utils, "torch": emulator.torch_with(H200)})


def decode(hip: bool = False) -> ModuleType:
    """`decode_attention_fwd` and the plain and grouped forms below it."""
    return tree(hip).load(f"{_OPERATIONS}.decode_attention")


def extend(hip: bool = False) -> ModuleType:
    """`extend_attention_fwd`, `extend_attention_fwd_unified`, `build_unified_kv_indices`."""
    return tree(hip).load(f"{_OPERATIONS}.extend_attention")


def prefill() -> ModuleType:
    """`context_attention_fwd`: no prefix."""
    return tree().load(f"{_OPERATIONS}.prefill_attention")


def merge() -> ModuleType:
    """`merge_state_triton`."""
    return tree().load(f"{_OPERATIONS}.merge_state")
