"""What sglang's backend is given by the rest of sglang, as far as a step over a SHUFFLE 5D pool looks at it.

A layer and a batch are plain data. The backend and the pools are objects of sglang's own classes, made without their
constructors, which would ask for a model and a GPU; every attribute that they have is a field here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from suites.targets.sglang_backend.loading import AttentionType, Modules


@dataclass(frozen=True, eq=False, kw_only=True)
class Layer:
    """As ``RadixAttention``. ``sliding_window_size`` is W - 1, -1 without a window; ``logit_cap`` 0.0 is off."""

    tp_q_head_num: int
    tp_k_head_num: int
    head_dim: int
    v_head_dim: int
    scaling: float
    logit_cap: float
    sliding_window_size: int
    k_scale: Tensor | None
    v_scale: Tensor | None
    attn_type: AttentionType = AttentionType.DECODER
    layer_id: int = 0
    is_cross_attention: bool = False

    @property
    def tp_v_head_num(self) -> int:
        """As many as of keys."""
        return self.tp_k_head_num

    @property
    def qk_head_dim(self) -> int:
        """Of queries and keys."""
        return self.head_dim


@dataclass(frozen=True)
class Mode:
    """As ``ForwardMode``: a step that decodes, or one that extends, perhaps by drafted tokens that it verifies."""

    decodes: bool
    verifies: bool = False

    def is_decode_or_idle(self) -> bool:
        """Whether each request has one query and the batch no prompts."""
        return self.decodes

    def is_extend(self) -> bool:
        """The other."""
        return not self.decodes

    def is_idle(self) -> bool:
        """No: there is a batch."""
        return False

    def is_target_verify(self) -> bool:
        """Whether each request has the same number of drafted tokens, after those that its length counts."""
        return self.verifies

    def is_draft_extend_v2(self) -> bool:
        """No model drafts here."""
        return False


@dataclass(frozen=True)
class Drafts:
    """As ``EagleVerifyInput`` of a chain of drafted tokens."""

    draft_token_num: int


@dataclass(frozen=True, eq=False, kw_only=True)
class Batch:
    """As ``ForwardBatch``. Lengths are int64 [R], ``out_cache_loc`` int64 [Tq]: where new tokens are stored."""

    forward_mode: Mode
    seq_lens: Tensor
    extend_seq_lens: Tensor
    out_cache_loc: Tensor
    out_cache_loc_is_physical: bool = False
    spec_info: Drafts | None = None
    kv_loc_plan: None = None
    encoder_lens: None = None
    attn_attend_prefix_cache: bool = False

    @property
    def batch_size(self) -> int:
        """Requests."""
        return len(self.seq_lens)

    @property
    def req_pool_indices(self) -> Tensor:
        """Row of the request table that each request has."""
        return torch.arange(self.batch_size, device=self.seq_lens.device)

    @property
    def seq_lens_cpu(self) -> Tensor:
        """The lengths, on the CPU."""
        return self.seq_lens.cpu()

    @property
    def input_ids(self) -> Tensor:
        """As long as the new tokens."""
        return self.out_cache_loc

    @property
    def seq_lens_sum(self) -> int:
        """Tokens of all contexts."""
        return int(self.seq_lens.sum())

    @property
    def extend_prefix_lens(self) -> Tensor:
        """Tokens of each request that the pool holds already."""
        return self.seq_lens - self.extend_seq_lens

    @property
    def extend_prefix_lens_cpu(self) -> list[int]:
        """The same as a list."""
        return [int(n) for n in self.extend_prefix_lens]

    @property
    def extend_seq_lens_cpu(self) -> list[int]:
        """New tokens of each request."""
        return [int(n) for n in self.extend_seq_lens]


@dataclass(frozen=True, eq=False, kw_only=True)
class Pool:
    """Attributes of ``MHATokenToKVPool``: one layer's caches, fp8 stored as bytes."""

    quant_method: Any
    """Of 4-bit pools; this one has the method that does nothing."""

    k_buffer: list[Tensor]
    v_buffer: list[Tensor]
    dtype: torch.dtype
    store_dtype: torch.dtype
    size: int
    page_size: int
    start_layer: int = 0
    use_hnd: bool = False
    kv_cache_layout: str = "vectorized_5d"
    layer_transfer_counter: None = None

    @classmethod
    def of(cls, modules: Modules, k_cache: Tensor, v_cache: Tensor) -> Pool:
        """The pool of two caches; its first page is not counted in its size."""
        pages, _, _, page_size, _ = k_cache.shape
        stored = torch.uint8 if k_cache.dtype.itemsize == 1 else k_cache.dtype
        return cls(
            quant_method=modules.unquantised(),
            k_buffer=[k_cache.view(stored)],
            v_buffer=[v_cache.view(stored)],
            dtype=k_cache.dtype,
            store_dtype=stored,
            size=(pages - 1) * page_size,
            page_size=page_size,
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class HybridPool:
    """Attributes of ``SWAKVPool``: a pool for full layers and one for layers with a window. The layer is the only one
    of its kind."""

    full_kv_pool: Any
    swa_kv_pool: Any
    layers_mapping: dict[int, tuple[int, bool]]
    full_to_swa_index_mapping: Tensor
    start_layer: int = 0
    layer_transfer_counter: None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class Backend:
    """Attributes of ``AiterAttnBackend``. Its own scales are 1, as its constructor makes them."""

    token_to_kv_pool: Any
    swa_kv_pool: Any
    """The pool that holds both, of a model with layers of both kinds; else None."""
    req_to_token: Tensor
    input_dtype: torch.dtype
    kv_cache_dtype: torch.dtype
    page_size: int
    head_dim: int
    use_sliding_window_kv_pool: bool
    indices_updater_prefill: Any
    kv_indptr: Tensor
    qo_indptr: Tensor
    qo_indptr_unified_decode: Tensor
    k_scale: Tensor
    v_scale: Tensor
    device: torch.device
    max_context_len: int
    num_draft_tokens: int | None
    use_triton_unified_attention: bool
    """Set by a hybrid pool, or by the variable SGLANG_USE_AITER_UNIFIED_ATTN."""
    decode_uses_page_table: bool = True
    """In later versions a pool in SHUFFLE 5D is enough for page tables."""
    _kv_indices_scratch: None = None
    _use_unified_verify: bool = True
    """Where drafted tokens are a chain and page tables are made."""
    skip_prefill: bool = True
    use_mla: bool = False
    is_multimodal: bool = False
    kv_cache_is_vectorized_5d: bool = True
    logits_soft_cap: float = 0.0
    dcp_world_size: int = 1


@dataclass(frozen=True, eq=False, kw_only=True)
class Indices:
    """Attributes of ``AiterIndicesUpdaterPrefill``."""

    kv_indptr: Tensor
    qo_indptr: Tensor
    req_to_token: Tensor
    kv_indices: None = None
    max_q_len: int = 0
    max_kv_len: int = 0


def made(cls: type, state: Any) -> Any:
    """An object of ``cls`` with the fields of ``state`` as its attributes, not constructed."""
    found = object.__new__(cls)
    vars(found).update(vars(state))
    return found


def backend_of(
    modules: Modules,
    k_cache: Tensor,
    v_cache: Tensor,
    req_to_token: Tensor,
    slot_map: Tensor | None,
    layer: Layer,
    input_dtype: torch.dtype,
    *,
    unified: bool,
    drafts: int | None = None,
) -> Any:
    """sglang's backend before a step. ``slot_map``: there are two pools, and the caches are of the layer's kind;
    ``unified``: the variable SGLANG_USE_AITER_UNIFIED_ATTN is set; ``drafts``: how many tokens a request verifies.
    """
    device, requests = k_cache.device, len(req_to_token)
    pool = made(modules.pool.MHATokenToKVPool, Pool.of(modules, k_cache, v_cache))
    if slot_map is not None:
        windowed = layer.sliding_window_size > -1
        other = made(modules.pool.MHATokenToKVPool, Pool.of(modules, k_cache[:0], v_cache[:0]))
        both = HybridPool(
            full_kv_pool=other if windowed else pool,
            swa_kv_pool=pool if windowed else other,
            layers_mapping={layer.layer_id: (0, windowed)},
            full_to_swa_index_mapping=slot_map,
        )
        pool = made(modules.sub_pool.SWAKVPool, both)
    kv_indptr = torch.zeros(requests + 1, dtype=torch.int32, device=device)
    qo_indptr = torch.zeros_like(kv_indptr)
    updater = made(
        modules.backend.AiterIndicesUpdaterPrefill,
        Indices(kv_indptr=kv_indptr, qo_indptr=qo_indptr, req_to_token=req_to_token),
    )
    updater.update = updater.update_single_wrapper
    state = Backend(
        token_to_kv_pool=pool,
        swa_kv_pool=None if slot_map is None else pool,
        use_triton_unified_attention=unified or slot_map is not None,
        req_to_token=req_to_token,
        input_dtype=input_dtype,
        kv_cache_dtype=k_cache.dtype if k_cache.dtype.itemsize == 1 else input_dtype,
        page_size=k_cache.shape[3],
        head_dim=layer.head_dim,
        use_sliding_window_kv_pool=slot_map is not None,
        indices_updater_prefill=updater,
        kv_indptr=kv_indptr,
        qo_indptr=qo_indptr,
        qo_indptr_unified_decode=torch.arange(requests + 1, dtype=torch.int32, device=device),
        k_scale=torch.ones(1, dtype=torch.float32, device=device),
        v_scale=torch.ones(1, dtype=torch.float32, device=device),
        device=device,
        max_context_len=req_to_token.shape[1],
        num_draft_tokens=drafts,
    )
    return made(modules.backend.AiterAttnBackend, state)
