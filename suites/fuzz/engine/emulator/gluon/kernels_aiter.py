"""How aiter's `pa_decode_gluon` is loaded from a source tree and called, in the emulator.

The tree is named by ATTN_ORACLE_AITER (the folder that holds the package `aiter`). Only the kernel's file is read;
what it imports from aiter are a handful of names, answered here for the architecture asked for.
"""

import os
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fuzz.engine.emulator import dtypes, load_source, stub

SOURCE = Path("aiter/ops/triton/gluon/pa_decode_gluon.py")
FP8 = {"gfx942": torch.float8_e4m3fnuz, "gfx950": torch.float8_e4m3fn}
PARTITION = 256


def tree() -> Path | None:
    """The folder named by ATTN_ORACLE_AITER, if the kernel is in it."""
    folder = os.environ.get("ATTN_ORACLE_AITER", "")
    return Path(folder) if folder and (Path(folder) / SOURCE).is_file() else None


@cache
def stubs(arch: str) -> Mapping[str, ModuleType]:
    """What the file imports: fp8 flavour and name of the architecture, and the table of types.

    Of three builds of the reduction over partitions (C++, FlyDSL, Triton) only the last can run here. The file falls
    back to it only if the launcher of FlyDSL raises ImportError, which a snapshot of 2026 cannot (it evaluates a name
    of FlyDSL before); so the C++ launcher is answered by one that runs the file's own Triton kernel.
    """
    fp8 = FP8[arch]
    kinds = stub("aiter.dtypes", fp8=fp8, bf16=torch.bfloat16, fp16=torch.float16, fp32=torch.float32)
    known = {dtype.memory: dtype for dtype in dtypes.FLOATS}
    return {
        "aiter": stub("aiter", dtypes=kinds),
        "aiter.ops.triton.utils._triton": stub("_triton", arch_info=stub("arch_info", get_arch=lambda: arch)),
        "aiter.ops.triton.utils.types": stub("types", torch_to_triton_dtype=known),
        "csrc.cpp_itfs.pa.pa_ps": stub("pa_ps", launch_pa_decode_ps_reduce=_reduce(arch)),
        "flydsl": ModuleType("flydsl"),
    }


def _reduce(arch: str) -> Callable[..., None]:
    """The C++ launcher of the reduction, as a launch of the Triton kernel with the grid of the file's own."""

    def launch(output: Tensor, exp_sums: Tensor, *rest: Any, **sizes: int) -> None:
        kernel = _loaded[arch].paged_attention_decode_ps_reduce_kernel
        parts, dim = sizes["context_partition_num"], sizes["head_size"]
        rows = sizes["query_seq_len"] * sizes["query_group_size"]
        kernel[(output.shape[0], exp_sums.shape[1], rows)](
            output,
            exp_sums,
            *rest,
            query_group_size=sizes["query_group_size"],
            head_size=dim,
            context_partition_num=parts,
            HEAD_SIZE_POW2=1 << (dim - 1).bit_length(),
            USE_SINKS=rest[2] is not None,
            MAX_CONTEXT_PARTITION_NUM=1 << (parts - 1).bit_length(),
        )

    return launch


_loaded: dict[str, ModuleType] = {}


@cache
def module(folder: Path, arch: str) -> ModuleType:
    """The file, executed for `arch` ("gfx942" or "gfx950")."""
    _loaded[arch] = load_source(folder / SOURCE, f"pa_decode_gluon_{arch}", imports=stubs(arch))
    return _loaded[arch]


def entry(folder: Path, arch: str) -> Callable[..., None]:
    """`pa_decode_gluon` for `arch`."""
    function: Callable[..., None] = module(folder, arch).pa_decode_gluon
    return function


def partials(batch: int, kv_heads: int, parts: int, rows: int, dim: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """The workspace that callers give: filled with NaN, so that what is read before it is written shows."""
    shape = (batch, kv_heads, parts, rows)
    return {
        "exp_sums": torch.full(shape, torch.nan),
        "max_logits": torch.full(shape, torch.nan),
        "temporary_output": torch.full((*shape, dim), torch.nan, dtype=dtype),
    }
