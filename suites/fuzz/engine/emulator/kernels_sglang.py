"""How to load the Triton attention kernels of the sglang wheel, unmodified, into the emulator."""

import importlib.metadata
import importlib.util
import itertools
import os
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from fuzz.engine import emulator
from fuzz.engine.emulator import Options
from fuzz.engine.emulator.facade import H200, MI300X
from suites.fuzz.engine.emulator.ragged import Result, Shape, Source, ints, starts, unset
from suites.fuzz.engine.emulator.reference import Rules

# Where the attention kernels lie: up to 0.5.16, and from 0.5.17 on.
_FOLDERS = ("srt/layers/attention/triton_ops", "kernels/ops/attention")


def package() -> Path:
    """The folder of the sglang at ATTN_ORACLE_SGLANG, or else of an installed 0.5.15; skips the test without."""
    given = os.environ.get("ATTN_ORACLE_SGLANG")
    if given is not None:
        return Path(given)
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations or importlib.metadata.version("sglang") != "0.5.15":
        pytest.skip("sglang 0.5.15 is not installed")
    return Path(next(iter(spec.submodule_search_locations)))


def version() -> str:
    """The version by where the kernels lie: of the two that these tests know."""
    return "0.5.15" if (package() / _FOLDERS[0]).is_dir() else "0.5.23"


class _Unset:
    """`sglang.srt.environ.envs` with no variable set: all of those that the kernels ask for are switches."""

    def __getattr__(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(get=lambda: False)


@cache
def tree(hip: bool = False) -> emulator.SourceTree:
    """The package's own files, with what they ask about the machine answered for NVIDIA or AMD."""
    device = MI300X if hip else H200
    utils = emulator.stub(
        "sglang.srt.utils",
        is_cuda=lambda: not hip,
        is_hip=lambda: hip,
        is_gfx95_supported=lambda: False,
        is_gfx1250_supported=lambda: False,
        get_device_core_count=lambda: device.multi_processor_count,
    )
    imports = {
        "sglang.srt.utils": utils,
        "sglang.srt.environ": emulator.stub("sglang.srt.environ", envs=_Unset()),
        "torch": emulator.torch_with(device),
    }
    return emulator.SourceTree({"sglang": package()}, imports)


def operation(name: str, hip: bool = False) -> ModuleType:
    """A module beside the attention kernels: decode_attention, extend_attention, prefill_attention, merge_state."""
    folder = _FOLDERS[version() != "0.5.15"]
    return tree(hip).load(f"sglang.{folder.replace('/', '.')}.{name}")


def run_decode(
    lengths: list[int],
    shape: Shape,
    rules: Rules,
    *,
    splits: int = 4,
    page: int = 1,
    hip: bool = False,
    serial: bool = False,
) -> Result:
    """One new token a request over a pool of slots [slots, H_kv, D]; request i uses 1 + i % splits splits.

    The kernels keep partial results in `logits` fp32 [B, H, splits, D_v] and `partial_lse` fp32 [B, H, splits].
    """
    source, batch = Source(), len(lengths)
    slots = (sum(lengths) // page + 3) * page
    q = source.normal(batch, shape.heads, shape.dim, dtype=shape.dtype)
    k_pool = source.normal(slots, shape.kv_heads, shape.dim, dtype=shape.cached)
    v_pool = source.normal(slots, shape.kv_heads, shape.dim_v, dtype=shape.cached)
    indices, indptr = source.order(slots)[: sum(lengths)], starts(lengths)
    out = unset(batch, shape.heads, shape.dim_v, dtype=shape.dtype)
    logits, partial_lse = unset(batch, shape.heads, splits, shape.dim_v), unset(batch, shape.heads, splits)
    with emulator.session(Options(serial=serial)) as log:
        operation("decode_attention", hip).decode_attention_fwd(
            q,
            k_pool,
            v_pool,
            out,
            indptr,
            indices,
            logits,
            partial_lse,
            ints([1 + i % splits for i in range(batch)]),
            splits,
            rules.scale,
            shape.k_scale,
            shape.v_scale,
            logit_cap=rules.cap,
            sinks=rules.sinks,
            page_size=page,
        )
    rows = [indices[low:high] for low, high in itertools.pairwise(indptr.tolist())]
    keys = [k_pool[row].double() * shape.k_scale for row in rows]
    return Result(out, None, q, keys, [v_pool[row].double() * shape.v_scale for row in rows], log)


def run_extend(
    prefixes: list[int],
    new: list[int],
    shape: Shape,
    rules: Rules,
    *,
    page: int = 1,
    hip: bool = False,
    serial: bool = False,
    unified: bool = False,
    parts: tuple[bool, bool] = (True, True),
) -> Result:
    """New tokens after prefixes in the pool; `unified` takes the new keys from the pool, too.

    `parts`: whether prefix and new keys take part (`skip_prefix`, `skip_extend`). The window argument of these
    kernels counts the keys before the query: a query sees `sliding_window_size + 1`.
    """
    source, batch, total = Source(), len(new), sum(new)
    slots = (sum(prefixes) // page + total // page + 5) * page
    q, k_new = (source.normal(total, n, shape.dim, dtype=shape.dtype) for n in (shape.heads, shape.kv_heads))
    v_new = source.normal(total, shape.kv_heads, shape.dim_v, dtype=shape.dtype)
    k_pool = source.normal(slots, shape.kv_heads, shape.dim, dtype=shape.cached)
    v_pool = source.normal(slots, shape.kv_heads, shape.dim_v, dtype=shape.cached)
    order = source.order(slots)
    prefix_slots, new_slots = order[: sum(prefixes)], order[sum(prefixes) :][:total]
    qo_indptr, kv_indptr = starts(new), starts(prefixes)
    out, lse = unset(total, shape.heads, shape.dim_v, dtype=shape.dtype), unset(total, shape.heads)
    window = rules.window - 1 if rules.window else -1
    keys, values = [], []
    for i in range(batch):
        mine = prefix_slots[kv_indptr[i] : kv_indptr[i + 1]] if parts[0] else prefix_slots[:0]
        fresh = slice(int(qo_indptr[i]), int(qo_indptr[i + 1]) if parts[1] else int(qo_indptr[i]))
        k, v = k_new[fresh], v_new[fresh]
        if unified:
            k_pool[new_slots[fresh]], v_pool[new_slots[fresh]] = k.to(shape.cached), v.to(shape.cached)
            k, v = k_pool[new_slots[fresh]].double() * shape.k_scale, v_pool[new_slots[fresh]].double() * shape.v_scale
        keys.append(torch.cat([k_pool[mine].double() * shape.k_scale, k.double()]))
        values.append(torch.cat([v_pool[mine].double() * shape.v_scale, v.double()]))
    common = {"logit_cap": rules.cap, "sliding_window_size": window, "sinks": rules.sinks, "page_size": page}
    module = operation("extend_attention", hip)
    with emulator.session(Options(serial=serial)) as log:
        if unified:
            indptr, indices, prefix_lengths = module.build_unified_kv_indices(
                kv_indptr, prefix_slots, qo_indptr[:-1], ints(new), new_slots, batch
            )
            module.extend_attention_fwd_unified(
                q,
                out,
                k_pool,
                v_pool,
                shape.k_scale,
                shape.v_scale,
                qo_indptr,
                indptr,
                indices,
                prefix_lengths,
                max(new),
                sm_scale=rules.scale,
                is_causal=rules.causal,
                **common,
            )
        else:
            module.extend_attention_fwd(
                q,
                k_new,
                v_new,
                out,
                k_pool,
                v_pool,
                qo_indptr,
                kv_indptr,
                prefix_slots,
                None,
                rules.causal,
                None,
                max(new),
                shape.k_scale,
                shape.v_scale,
                rules.scale,
                lse_extend=lse,
                skip_prefix=not parts[0],
                skip_extend=not parts[1],
                **common,
            )
    return Result(out, None if unified or rules.sinks is not None else lse, q, keys, values, log)
