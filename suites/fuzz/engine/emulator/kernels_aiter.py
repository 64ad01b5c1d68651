"""How to load the Triton attention kernels of an unpacked `amd-aiter`, unmodified, into the emulator."""

import importlib.util
import itertools
import os
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import torch

from fuzz.engine import emulator
from fuzz.engine.emulator import Options
from fuzz.engine.emulator.facade import MI300X, MI350X
from fuzz.engine.emulator.lang import TYPES
from suites.fuzz.engine.emulator.ragged import Result, Shape, Source, ints, starts, tables, unset
from suites.fuzz.engine.emulator.reference import Rules


def package() -> Path:
    """The folder `aiter` below ATTN_ORACLE_AITER, or that of an installed aiter; skips the test without one."""
    given = os.environ.get("ATTN_ORACLE_AITER")
    if given is not None:
        folder = Path(given)
        found = folder / "aiter" if (folder / "aiter").is_dir() else folder
        if not (found / "ops/triton/unified_attention.py").is_file():
            pytest.skip(f"ATTN_ORACLE_AITER={given} has no ops/triton/unified_attention.py")
        return found
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


def run_unified(
    lengths: list[int],
    new: list[int],
    shape: Shape,
    rules: Rules,
    *,
    page: int = 16,
    serial: bool = False,
    arch: str = "gfx950",
    query: torch.dtype | None = None,
) -> Result:
    """`unified_attention` over a linear cache [pages, page, H_kv, D]; descales are tensors of one element.

    `window_size` is (W - 1, 0), (-1, 0) without a window; only `causal=True`, and one head dim.
    """
    source = Source()
    q = source.normal(sum(new), shape.heads, shape.dim, dtype=query or shape.dtype)
    table, pages = tables(lengths, page, source)
    k, v = (source.normal(pages, page, shape.kv_heads, shape.dim, dtype=shape.cached) for _ in range(2))
    out = unset(sum(new), shape.heads, shape.dim, dtype=shape.dtype)
    narrow = shape.cached.itemsize == 1 and query is None
    with emulator.session(Options(serial=serial)) as log:
        operation("unified_attention", arch).unified_attention(
            q,
            k,
            v,
            out,
            starts(new),
            max(new),
            ints(lengths),
            max(lengths),
            rules.scale,
            True,
            (rules.window - 1, 0) if rules.window else (-1, 0),
            table,
            rules.cap,
            None,
            torch.tensor([shape.k_scale]) if narrow else None,
            torch.tensor([shape.v_scale]) if narrow else None,
            sinks=rules.sinks,
        )
    keys, values = [], []
    for row, length in zip(table.long(), lengths, strict=True):
        keys.append(k[row].double().flatten(0, 1)[:length] * shape.k_scale)
        values.append(v[row].double().flatten(0, 1)[:length] * shape.v_scale)
    return Result(out, None, q, keys, values, log)


def run_paged_decode(
    lengths: list[int],
    shape: Shape,
    rules: Rules,
    *,
    page: int = 16,
    per_token: bool = False,
    options: Options | None = None,
) -> Result:
    """`paged_attention_decode` over caches [pages, H_kv, page, D]: one query a request.

    `k_scale`, `v_scale`: one element, or fp32 [pages, H_kv, page, 1] for scales per token.
    """
    source, batch = Source(), len(lengths)
    q = source.normal(batch, shape.heads, shape.dim, dtype=shape.dtype)
    table, pages = tables(lengths, page, source)
    k, v = (source.normal(pages, shape.kv_heads, page, shape.dim, dtype=shape.cached) for _ in range(2))
    k_scale, v_scale = torch.tensor([shape.k_scale]), torch.tensor([shape.v_scale])
    if per_token:
        k_scale, v_scale = (source.normal(pages, shape.kv_heads, page, 1).abs() + 0.5 for _ in range(2))
    out = unset(batch, shape.heads, shape.dim, dtype=shape.dtype)
    with emulator.session(options) as log:
        operation("pa_decode").paged_attention_decode(
            out,
            q,
            k,
            v,
            ints(lengths),
            table,
            rules.scale,
            max(lengths),
            TYPES[str(shape.dtype).removeprefix("torch.")],
            k_scale,
            v_scale,
        )
    keys, values = [], []
    for row, length in zip(table.long(), lengths, strict=True):
        for pool, scale, rows in ((k, k_scale, keys), (v, v_scale, values)):
            wide = pool.double() * (scale.double() if shape.cached.itemsize == 1 else 1.0)
            rows.append(wide[row].transpose(1, 2).flatten(0, 1)[:length])
    return Result(out, None, q, keys, values, log)


def run_prefix(lengths: list[int], new: list[int], shape: Shape, rules: Rules, *, page: int = 16) -> Result:
    """`pa_prefill.context_attention_fwd`: new tokens after a prefix in a SHUFFLE cache.

    K cache [pages, H_kv, D / x, page, x], V cache [pages, H_kv, D, page]; `sliding_window` counts the keys seen,
    the query's own included.
    """
    source, total, x = Source(), sum(new), 16 // shape.cached.itemsize
    q = source.normal(total, shape.heads, shape.dim, dtype=shape.dtype)
    k_new, v_new = (source.normal(total, shape.kv_heads, shape.dim, dtype=shape.dtype) for _ in range(2))
    table, pages = tables(lengths, page, source)
    k_cache = source.normal(pages, shape.kv_heads, shape.dim // x, page, x, dtype=shape.cached)
    v_cache = source.normal(pages, shape.kv_heads, shape.dim, page, dtype=shape.cached)
    out, first = unset(total, shape.heads, shape.dim, dtype=shape.dtype), starts(new)
    narrow = shape.cached.itemsize == 1
    with emulator.session() as log:
        operation("pa_prefill").context_attention_fwd(
            q,
            k_new,
            v_new,
            out,
            "fp8" if narrow else "auto",
            k_cache,
            v_cache,
            table,
            first,
            ints(lengths),
            max(new),
            torch.tensor([shape.k_scale]),
            torch.tensor([shape.v_scale]),
            sliding_window=rules.window or None,
            sm_scale=rules.scale,
        )
    keys, values = [], []
    for i, (row, length) in enumerate(zip(table.long(), lengths, strict=True)):
        context, fresh = length - new[i], slice(int(first[i]), int(first[i + 1]))
        k = k_cache[row].double().permute(0, 3, 1, 2, 4).flatten(3).flatten(0, 1)[:context] * shape.k_scale
        v = v_cache[row].double().permute(0, 3, 1, 2).flatten(0, 1)[:context] * shape.v_scale
        keys.append(torch.cat([k, k_new[fresh].double()]))
        values.append(torch.cat([v, v_new[fresh].double()]))
    return Result(out, None, q, keys, values, log)


def run_prefill(lengths: list[int], shape: Shape, rules: Rules) -> Result:
    """`prefill_attention.context_attention_fwd`: no cache; the scale is always D^-0.5."""
    source, total, first = Source(), sum(lengths), starts(lengths)
    q = source.normal(total, shape.heads, shape.dim, dtype=shape.dtype)
    k, v = (source.normal(total, shape.kv_heads, shape.dim, dtype=shape.dtype) for _ in range(2))
    out = unset(total, shape.heads, shape.dim, dtype=shape.dtype)
    with emulator.session() as log:
        operation("prefill_attention").context_attention_fwd(
            q, k, v, out, first[:-1], ints(lengths), max(lengths), is_causal=rules.causal
        )
    rows = [slice(low, high) for low, high in itertools.pairwise(first.tolist())]
    return Result(out, None, q, [k[row].double() for row in rows], [v[row].double() for row in rows], log)
