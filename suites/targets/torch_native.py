"""torch's own attention, believed right: the whole way from oracle to report runs on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from packaging.version import Version
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from oracle import Convention, Precision, Supports, declare
from oracle.convention import DefaultScale, LseLayout, Window, WindowMeaning
from oracle.kinds import Engine
from oracle.precision import Accumulation, MatrixUnit
from suites.targets.checked import checked

CONVENTION = Convention(
    source="torch documentation, torch.nn.functional.scaled_dot_product_attention",
    index_dtypes=("int32", "int64"),
    window=Window(meaning=WindowMeaning.KEYS, off=(0,)),
    default_scale=DefaultScale.RSQRT_HEAD_DIM,
)
"""Causality and the window are handed over as a mask, so that their meaning is ours."""

CONVENTION_LSE = replace(
    CONVENTION,
    source="aten/src/ATen/native/native_functions.yaml: logsumexp is the second result of both operators",
    lse_layout=LseLayout.TOKEN_HEAD,
)

FLOAT32 = Precision(
    source="aten/src/ATen/native/cpu/FlashAttentionKernel.cpp and native/transformers/attention.cpp: float32 "
    "accumulation, weights in the input dtype, vectorised exp of 20 ulp",
    qk_product=None,
    p_dtype="input",
    exp_error=20 * 2.0**-23,
)

REDUCED = replace(
    FLOAT32,
    source=f"{FLOAT32.source}; for bf16 and fp16 the exp of aten/src/ATen/cpu/vec/vec512/vec512_float.h, "
    "fexp_u20: a cubic whose largest relative error is its constant term, 1.071e-4",
    exp_error=2.0**-13,
)

PRECISION = {"fp32": FLOAT32, "bf16": REDUCED, "fp16": REDUCED}

SUPPORTS = Supports(
    dtypes=("bf16", "fp16", "fp32"),
    head_dims=(64, 80, 128),
    num_kv_heads=(1, 2, 3),
    group_sizes=(1, 4),
    features=frozenset({"window", "non_causal", "chunked", "custom_scale", "strided"}),
)

MATH = Precision(
    source="aten/src/ATen/native/transformers/attention.cpp, _scaled_dot_product_attention_math: operands in float32, "
    "query and key each times the root of the scale, weights normalised in float32",
    # The roots round both factors of a product, and the product is rounded.
    qk=MatrixUnit(unit_roundoff=2.0**-23),
    qk_product="fp32",
    p_dtype=None,
    p_normalised=True,
    row_sum_of_rounded_p=False,
    tile=1 << 20,
)

TENSOR_CORES = MatrixUnit(
    accumulation=Accumulation.FUSED, block=8, fraction_bits=24, unit_roundoff=2.0**-23, toward_zero=True
)
"""mma.sync of bf16 and fp16 from Ampere on, the loosest of them (microsoft/MMA-Sim, arXiv 2511.10909)."""

FLASH = Precision(
    source="aten/src/ATen/native/transformers/cuda/flash_attn: softmax.h and flash_fwd_kernel.h: float32 logits and "
    "row sums, exp2, weights cast to the input dtype",
    qk=TENSOR_CORES,
    qk_product=None,
    p_dtype="input",
    row_sum_of_rounded_p=False,
    pv=TENSOR_CORES,
    tile=32,
)

FLEX = Precision(
    source="torch/_inductor/kernel/flex/templates, flex_attention.py.jinja and flex_decode.py.jinja: float32 logits "
    "and row sums, exp2, weights cast to the dtype of the values, partial results in float32",
    qk=TENSOR_CORES,
    qk_product=None,
    p_dtype="input",
    row_sum_of_rounded_p=False,
    pv=TENSOR_CORES,
    max_splits=256,
)
FLEX_FLOAT32 = replace(
    FLEX, source=f"{FLEX.source}; float32 products in full (IEEE) precision", qk=MatrixUnit(), pv=MatrixUnit()
)

FLEX_EAGER = Precision(
    source="torch/_higher_order_ops/flex_attention.py, math_attention: logits and softmax in float32, weights cast to "
    "the input dtype once they are normalised",
    qk_product=None,
    p_dtype="input",
    p_normalised=True,
    row_sum_of_rounded_p=False,
    tile=1 << 20,
)


def _visible(queries: int, keys: int, causal: bool, window: int, device: torch.device) -> Tensor:
    """Mask [queries, keys], True where a query sees a key: bottom-right aligned, ``window`` 0 is off."""
    position = torch.arange(queries, device=device)[:, None] + (keys - queries)
    key = torch.arange(keys, device=device)[None, :]
    visible = torch.ones(queries, keys, dtype=torch.bool, device=device)
    if causal:
        visible &= key <= position
    if window:
        visible &= key > position - window
    return visible


Attend = Callable[[Tensor, Tensor, Tensor, Tensor, float | None], tuple[Tensor, Tensor | None]]
"""q, k, v [1, H, tokens, D], mask [queries, keys], scale -> out [1, H, queries, D_v], lse [1, H, queries]."""


def _by_request(
    attend: Attend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_indptr: Tensor,
    kv_indptr: Tensor,
    causal: bool,
    window: int,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    """One call of ``attend`` a request, keys repeated for grouped heads."""
    out = torch.empty(q.shape[0], q.shape[1], v.shape[2], dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[0], q.shape[1], dtype=torch.float32, device=q.device)
    group = q.shape[1] // k.shape[1]
    for request in range(len(q_indptr) - 1):
        rows = slice(int(q_indptr[request]), int(q_indptr[request + 1]))
        keys = slice(int(kv_indptr[request]), int(kv_indptr[request + 1]))
        queries = rows.stop - rows.start
        if not queries:
            continue
        own = [q[rows], k[keys].repeat_interleave(group, 1), v[keys].repeat_interleave(group, 1)]
        mask = _visible(queries, keys.stop - keys.start, causal, window, q.device)
        own_out, own_lse = attend(*(t.transpose(0, 1).unsqueeze(0) for t in own), mask, scale)
        out[rows] = own_out[0].transpose(0, 1)
        if own_lse is not None:
            lse[rows] = own_lse[0, :, :queries].transpose(0, 1)
    return out, lse


@declare.varlen_extend(name="torch.sdpa", convention=CONVENTION, precision=PRECISION, supports=SUPPORTS)
@checked(CONVENTION)
def sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_indptr: Tensor,
    kv_indptr: Tensor,
    *,
    causal: bool,
    scale: float | None,
    window: int,
    **_: None,
) -> Tensor:
    """Attention of each request through the public function."""

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None) -> tuple[Tensor, None]:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale), None

    return _by_request(attend, q, k, v, q_indptr, kv_indptr, causal, window, scale)[0]


@declare.varlen_extend(name="torch.sdpa_with_lse", convention=CONVENTION_LSE, precision=PRECISION, supports=SUPPORTS)
@checked(CONVENTION)
def sdpa_with_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_indptr: Tensor,
    kv_indptr: Tensor,
    *,
    causal: bool,
    scale: float | None,
    window: int,
    **_: None,
) -> tuple[Tensor, Tensor]:
    """Attention of each request through the operators beneath, which also return the log-sum-exp."""
    return _by_request(_with_lse, q, k, v, q_indptr, kv_indptr, causal, window, scale)


def _with_lse(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    aten = torch.ops.aten
    bias = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -torch.inf)
    if q.device.type == "cpu":
        result = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False, attn_mask=bias, scale=scale)
        return result[0], result[1]
    # The memory-efficient kernel reads its bias in vectors of 16: rows are padded, and expanded over heads.
    padded = F.pad(bias, (0, -bias.shape[1] % 16))[:, : bias.shape[1]]
    expanded = padded.expand(1, q.shape[1], *bias.shape)
    result = aten._scaled_dot_product_efficient_attention(q, k, v, expanded, True, 0.0, False, scale=scale)
    return result[0], result[1]


def _torch_can(engine: Engine) -> str | None:
    return "torch's CUDA kernels need an NVIDIA GPU" if engine is not Engine.CUDA else None


def _flex_can(engine: Engine) -> str | None:
    if Version(torch.__version__) < Version("2.12"):
        return f"torch {torch.__version__} cannot trace flex_attention over lengths that change from call to call"
    return _torch_can(engine)


@declare.varlen_extend(name="torch.sdpa_math", convention=CONVENTION, precision=MATH, supports=SUPPORTS)
@checked(CONVENTION)
def sdpa_math(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_indptr: Tensor,
    kv_indptr: Tensor,
    *,
    causal: bool,
    scale: float | None,
    window: int,
    **_: None,
) -> Tensor:
    """Attention as a composition of matrix products and a softmax."""

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None) -> tuple[Tensor, None]:
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale), None

    return _by_request(attend, q, k, v, q_indptr, kv_indptr, causal, window, scale)[0]


@declare.varlen_extend(
    name="torch.sdpa_flash",
    convention=replace(CONVENTION_LSE, window=Window()),
    precision=FLASH,
    supports=replace(SUPPORTS, dtypes=("bf16", "fp16"), features=SUPPORTS.features - {"window"}),
    engines=(Engine.CUDA,),
    unavailable=_torch_can,
)
@checked(CONVENTION)
def sdpa_flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_indptr: Tensor,
    kv_indptr: Tensor,
    *,
    causal: bool,
    scale: float | None,
    **_: None,
) -> tuple[Tensor, Tensor]:
    """The flash kernel, which takes no mask; its own causality is aligned at the bottom right."""

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
        result = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
        return result[0], result[1]

    return _by_request(attend, q, k, v, q_indptr, kv_indptr, causal, 0, scale)


def _flex(attention: Callable[..., Any]) -> Attend:
    """`attention` (flex_attention, compiled or not) with our mask as its mask_mod."""
    # Imported late: it brings half of the compiler along.
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
        def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return mask[query, key]

        blocks = create_block_mask(visible, None, None, *mask.shape, device=str(q.device))
        out, aux = attention(q, k, v, block_mask=blocks, scale=scale, return_aux=AuxRequest(lse=True))
        return out, aux.lse

    return attend


@cache
def _compiled_flex(backend: str = "inductor") -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    # Beyond its limit of recompilations dynamo would run the eager operator, whose arithmetic is another, unless the
    # whole function has to be one graph: then it raises.
    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=True, fullgraph=True, backend=backend)
    return compiled


def _recompiled(*operands: Tensor, **options: Any) -> Any:
    """The compiled kernel for any number of shapes: heads, head dims, dtypes and lengths of 1 have one each."""
    with torch._dynamo.config.patch(recompile_limit=_KERNELS, accumulated_recompile_limit=_KERNELS):
        return _compiled_flex()(*operands, **options)


_KERNELS = 4096


def _eager_flex(*operands: Tensor, **options: Any) -> Any:
    """flex_attention as it stands. By itself it would be traced anew for each shape, to the same arithmetic."""
    from torch.nn.attention import flex_attention as module

    before = module._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG
    module._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True
    try:
        return module.flex_attention(*operands, **options)
    finally:
        module._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = before


@declare.varlen_extend(
    name="torch.flex",
    convention=replace(CONVENTION_LSE, source="torch documentation, torch.nn.attention.flex_attention"),
    precision={"bf16": FLEX, "fp16": FLEX, "fp32": FLEX_FLOAT32},
    supports=SUPPORTS,
    engines=(Engine.CUDA,),
    unavailable=_flex_can,
)
@checked(CONVENTION)
def flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_indptr: Tensor,
    kv_indptr: Tensor,
    *,
    causal: bool,
    scale: float | None,
    window: int,
    **_: None,
) -> tuple[Tensor, Tensor]:
    """The compiled kernel: Triton's, and for few queries the one that splits the keys."""
    return _by_request(_flex(_recompiled), q, k, v, q_indptr, kv_indptr, causal, window, scale)


@declare.varlen_extend(
    name="torch.flex_eager",
    convention=replace(CONVENTION_LSE, source="torch documentation, torch.nn.attention.flex_attention"),
    precision=FLEX_EAGER,
    supports=SUPPORTS,
    # On a GPU its second product may be split into partial sums of its own dtype.
    engines=(Engine.EMULATOR,),
)
@checked(CONVENTION)
def flex_eager(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_indptr: Tensor,
    kv_indptr: Tensor,
    *,
    causal: bool,
    scale: float | None,
    window: int,
    **_: None,
) -> tuple[Tensor, Tensor]:
    """The same operator without a compiler, as torch's reference for it on the CPU."""
    return _by_request(_flex(_eager_flex), q, k, v, q_indptr, kv_indptr, causal, window, scale)
