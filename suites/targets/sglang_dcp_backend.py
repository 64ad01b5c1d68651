"""sglang's Triton backend as one of several ranks: its own methods, on a stand-in that holds what they read.

Position p of a request belongs to rank p % N. Every rank sees the same pool here: what is checked is which rows it
reads and how the parts are merged.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fuzz.engine.emulator.facade import MI300X
from fuzz.engine.loader import KernelLoader, scoped_imports
from oracle.kinds import Engine
from suites.targets import ranks, sglang_attention, sglang_dcp_modules, sglang_wheel

FILES = ("srt/layers/attention/triton_backend.py",)
SPLITS = sglang_attention.SPLITS
_KV_INDICES = ("srt/layers/attention/triton_ops/kv_indices.py", "kernels/ops/attention/kv_indices.py")


class Mode(StrEnum):
    """What a forward pass does."""

    DECODE = "decode"
    EXTEND = "extend"
    VERIFY = "verify"
    """drafted tokens, the same number of each request"""


class _OtherPool:
    """Stands for the classes of pools that ours is none of."""


@dataclass(frozen=True)
class _WriteLoc:
    """As ``KVWriteLoc``: where keys are written."""

    loc: Tensor
    physical: bool


def environment(**answers: object) -> SimpleNamespace:
    """sglang's environment variables, each with its value."""
    return SimpleNamespace(**{name: SimpleNamespace(get=partial(_same, value)) for name, value in answers.items()})


def _same(value: object) -> object:
    return value


def _given() -> sglang_wheel.Given:
    dcp = vars(sglang_dcp_modules.kernels()) | vars(sglang_dcp_modules.layout())
    dcp["cp_lse_ag_out_rs_mha"] = sglang_dcp_modules.comm().cp_lse_ag_out_rs_mha
    told = sglang_dcp_modules.given(cuda=False)
    told["sglang.srt.utils"] |= {"is_gfx942_supported": lambda: False, "is_gfx95_supported": lambda: False}
    told["sglang.srt.layers.dcp"] = dcp
    told["sglang.srt.layers.attention.base_attn_backend"] = {"AttentionBackend": object}
    told["sglang.srt.layers.attention.triton_ops.kv_indices"] = vars(kv_indices())
    told["sglang.srt.environ"] = {"envs": environment(SGLANG_DISABLE_LEAN_ATTENTION=False)}
    told["sglang.srt.mem_cache.memory_pool"] = {"KVWriteLoc": _WriteLoc}
    for name in ("BaseSWAKVPool", "SWAKVPool"):
        for module in ("swa_memory_pool", "base_swa_memory_pool"):
            told.setdefault(f"sglang.srt.mem_cache.{module}", {})[name] = _OtherPool
    return told


@KernelLoader
def kv_indices() -> ModuleType:
    """Index lists of one rank alone, which several ranks must not use as they are."""
    return sglang_wheel.load(_KV_INDICES, {})


@KernelLoader
def lean_decode() -> ModuleType:
    """The decode kernels as they are on AMD, with a grid of one program: no program waits for another."""
    told = sglang_attention.about_the_machine(MI300X)
    told["sglang.srt.environ"] = {"envs": environment(SGLANG_FORCE_LEAN_GRID_CU_MULT=1e-6)}
    beside = sglang_attention.sibling("score_mod", told, MI300X)
    return sglang_wheel.load(sglang_attention.DECODE, told | beside, MI300X)


@KernelLoader
def module() -> ModuleType:
    """The backend's file."""
    return sglang_wheel.load(FILES, _given())


def missing(engine: Engine) -> str | None:
    """Why the backend cannot be had here, in one line, or None."""
    return sglang_dcp_modules.missing(engine) or sglang_wheel.missing(FILES, engine)


class _Translator:
    """As ``KVIndexTranslator`` over a pool whose slots need no translation: what it lists is what the table holds."""

    window_kv_kind = "window"

    def __init__(self, table: Tensor) -> None:
        self._table = table

    def pack_read_stream(
        self,
        plan: None,
        *,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        indptr: Tensor,
        out: Tensor,
        kv_start_idx: Tensor | None = None,
        **_: object,
    ) -> bool:
        """Fill ``out`` with the entries of each request; they are no rows yet."""
        kv_indices().create_flashinfer_kv_indices_triton[(len(seq_lens), 1)](
            self._table,
            req_pool_indices,
            seq_lens,
            indptr,
            kv_start_idx,
            out,
            self._table.stride(0),
            ENTRY_PAGE_SIZE=1,
            TOKEN_BLOCK_PARALLEL=False,
            token_mapping=None,
        )
        return False


@dataclass(frozen=True, kw_only=True)
class Step:
    """What all ranks of a step see alike. Lengths are of keys in the pool; ``table`` [R, longest] has their slots.

    ``q`` [Tq, H, D] holds the query heads of all ranks; ``k`` and ``v`` the new tokens' own keys and values, if any.
    """

    count: int
    mode: Mode
    q: Tensor
    k: Tensor | None
    v: Tensor | None
    k_cache: Tensor
    v_cache: Tensor
    lengths: Tensor
    query_lens: Tensor
    table: Tensor
    radius: int
    """As a layer of the model has it: keys of the window but the query's own; -1: none."""
    options: dict[str, Any]
    lean: bool = False

    def heads(self) -> int:
        """Query heads of one rank."""
        return self.q.shape[1] // self.count


def widened_table(lengths: Tensor, slots: Tensor, count: int) -> Tensor:
    """int32 [R, longest]: the widened slot of each position, its row times the number of ranks plus its owner."""
    table = torch.zeros(len(lengths), max(1, int(lengths.max())), dtype=torch.int32, device=slots.device)
    for row, own in enumerate(slots.split(lengths.tolist())):
        table[row, : len(own)] = own * count + torch.arange(len(own), device=slots.device) % count
    return table


def run(step: Step, over: ranks.Run) -> Tensor:
    """All ranks' shares of the heads, put together: [Tq, H, D_v]."""
    # Later versions import within their methods.
    with scoped_imports(sglang_wheel.packages(_given())):
        shares = over([partial(_rank, step, rank) for rank in range(step.count)])
    return torch.cat([share.view(len(step.q), step.heads(), -1) for share in shares], 1)


def _rank(step: Step, rank: int, group: ranks.Group) -> Tensor:
    """One rank's step: its own query heads in, its own heads of the output out, [Tq, H / N * D_v]."""
    backend, methods = _stand_in(step, rank), module().TritonAttnBackend
    own = step.q[:, rank * step.heads() : (rank + 1) * step.heads()].flatten(1)
    layer, batch = _layer(step), _batch(step)
    with sglang_dcp_modules.as_rank(group, step.q.device):
        methods.init_forward_metadata(backend, batch)
        if step.mode is Mode.DECODE:
            sinks = step.options["sinks"]
            result: Tensor = methods.forward_decode(
                backend, own, None, None, layer, batch, save_kv_cache=False, sinks=sinks
            )
            return result
        causal, cap = step.options.get("causal", True), step.options["soft_cap"] or 0.0
        result = methods._forward_extend_dcp(backend, own, step.k, step.v, layer, batch, causal, cap, None)
        return result


def _stand_in(step: Step, rank: int) -> SimpleNamespace:
    """The backend of a rank: what its methods read of ``self``."""
    device, requests = step.q.device, len(step.lengths)
    starts = {
        name: torch.zeros(requests + 1, dtype=torch.int32, device=device)
        for name in ("kv_indptr", "window_kv_indptr", "qo_indptr", "mask_indptr")
    }
    queries = int(step.query_lens.max())
    decode = lean_decode if step.lean else sglang_attention.decode_kernels
    backend = SimpleNamespace(
        **starts,
        dcp_size=step.count,
        dcp_rank=rank,
        device=device,
        req_to_token=step.table,
        kv_index_translator=_Translator(step.table),
        token_to_kv_pool=SimpleNamespace(
            get_key_buffer=lambda layer: step.k_cache, get_value_buffer=lambda layer: step.v_cache
        ),
        decode_attention_fwd=decode().decode_attention_fwd,
        extend_attention_fwd=sglang_attention.extend_kernels().extend_attention_fwd,
        get_num_kv_splits=_splits,
        num_head=step.q.shape[1],
        v_head_dim=step.v_cache.shape[2],
        swa_v_head_dim=None,
        max_kv_splits=SPLITS,
        sliding_window_size=step.radius,
        use_sliding_window_kv_pool=False,
        num_draft_tokens=queries,
        target_verify_num_tokens_per_req=queries,
        enable_deterministic=False,
        enable_lean_attention=step.lean,
        lean_total_programs=1,
        lean_block_m=16,
        dllm_attention=None,
        use_mla=False,
        use_pdl=False,
        page_size=1,
        _translate_kv_loc=None,
    )
    methods = module().TritonAttnBackend
    for name in ("_dcp_lens", "_dcp_kv_indices", "_fill_kv_indptr_and_indices", "_target_verify_num_tokens_per_req"):
        if hasattr(methods, name):
            setattr(backend, name, partial(getattr(methods, name), backend))
    return backend


def _splits(counts: Tensor, lengths: Tensor, uneven: Tensor | None = None) -> None:
    """Every number of splits in turn, instead of what suits a machine."""
    counts.copy_(torch.arange(len(counts), device=counts.device) % SPLITS + 1)


def _batch(step: Step) -> SimpleNamespace:
    """What the methods read of a batch. No tree of drafts: a chain, which needs no mask."""
    new = step.query_lens
    return SimpleNamespace(
        batch_size=len(step.lengths),
        req_pool_indices=torch.arange(len(step.lengths), dtype=torch.int32, device=step.q.device),
        seq_lens=step.lengths,
        seq_lens_sum=int(step.lengths.sum()),
        extend_prefix_lens=step.lengths,
        extend_prefix_lens_cpu=step.lengths.tolist(),
        extend_seq_lens=new,
        extend_seq_lens_cpu=new.tolist(),
        forward_mode=SimpleNamespace(
            is_decode_or_idle=lambda: step.mode is Mode.DECODE, is_target_verify=lambda: step.mode is Mode.VERIFY
        ),
        spec_info=SimpleNamespace(custom_mask=None, num_tokens_per_req=int(new.max()), kv_indptr=None),
        kv_loc_plan=None,
        out_cache_loc=None,
    )


def _layer(step: Step) -> SimpleNamespace:
    """What the methods read of a layer of the model."""
    scales = (step.options.get("k_descale"), step.options.get("v_descale"))
    return SimpleNamespace(
        layer_id=0,
        tp_q_head_num=step.heads(),
        tp_k_head_num=step.k_cache.shape[1],
        qk_head_dim=step.q.shape[2],
        v_head_dim=step.v_cache.shape[2],
        logit_capping_method="tanh",
        logit_cap=step.options["soft_cap"] or 0.0,
        scaling=step.options["scale"],
        sliding_window_size=step.radius,
        xai_temperature_len=-1,
        # The backend uses scales only where a layer has both.
        k_scale=None if scales == (None, None) else scales,
        v_scale=None if scales == (None, None) else scales,
        k_scale_float=1.0 if scales[0] is None else float(scales[0]),
        v_scale_float=1.0 if scales[1] is None else float(scales[1]),
    )
