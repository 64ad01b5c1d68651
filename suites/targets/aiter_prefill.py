"""aiter's ragged prefill, `mha_batch_prefill_func`: its own code, and its contract over our kernels.

aiter's own is compiled C++ (Composable Kernel). **Never executed by us.** What callers rely on (argument order,
defaults, the window as a pair, when scales count, bf16 for fp8) is tested over the portable kernels, which the backend
targets run where there is no aiter.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fuzz.engine import loader
from oracle import Convention, Precision, Supports, declare
from oracle.convention import DefaultScale, SinkUnits, Window, WindowMeaning
from oracle.kinds import Engine, IndexForm, KVLayout
from suites.targets.checked import checked
from suites.targets.portable import aiter
from suites.targets.portable.attention import kernels as kernels  # the compile gate looks for it here
from suites.targets.portable.targets import PRECISION as PORTABLE

CONVENTION = Convention(
    source="aiter/ops/mha.py: mha_batch_prefill_func, 3D linear K and V (page_size=1), -1 means infinite window",
    index_dtypes=("int32",),
    window=Window(meaning=WindowMeaning.LEFT_RIGHT, off=(-1,)),
    sink=SinkUnits.NATURAL,
    soft_cap=True,
    default_scale=DefaultScale.RSQRT_HEAD_DIM,
)
PRECISION = Precision(source="aiter/ops/mha.py names no arithmetic: the loosest honest assumption")
SUPPORTS = Supports(
    dtypes=("bf16", "fp16"),
    head_dims=(64, 128),
    page_sizes=(1,),
    num_kv_heads=(1, 2),
    group_sizes=(1, 4),
    features=frozenset({"window", "sinks", "soft_cap", "custom_scale", "non_causal", "chunked"}),
    # A caller's comment in sglang's aiter_backend.py: keys are read 128 at a time, past the end of the list.
    requires_finite_pool=True,
)


def missing(engine: Engine) -> str | None:
    """Why aiter's own prefill cannot be called here, in one line, or None."""
    if engine is not Engine.HIP:
        return "compiled C++ that only an AMD GPU runs"
    if importlib.util.find_spec("aiter") is None:
        return "no aiter: it comes with ROCm images, or is built from its source"
    return None


def _run(
    function: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_indptr: Tensor,
    kv_indptr: Tensor,
    *,
    causal: bool,
    scale: float | None,
    window: tuple[int, int],
    sinks: Tensor | None,
    soft_cap: float | None,
    **_: None,
) -> Tensor:
    longest = [max((p[1:] - p[:-1]).tolist(), default=0) for p in (q_indptr, kv_indptr)]
    return function(
        q,
        k,
        v,
        q_indptr,
        kv_indptr,
        torch.arange(k.shape[0], dtype=torch.int32, device=k.device),
        *longest,
        softmax_scale=scale,
        logits_soft_cap=soft_cap or 0.0,
        causal=causal,
        window_size=window,
        sink_ptr=sinks,
    )


@declare.varlen_extend(
    name="aiter.mha_batch_prefill_func",
    convention=CONVENTION,
    precision=PRECISION,
    supports=SUPPORTS,
    engines=(Engine.HIP,),
    unavailable=missing,
    runs=("aiter mha_batch_prefill_func",),
)
@checked(CONVENTION)
def prefill(*tensors: Tensor, **options: Any) -> Tensor:
    """aiter's own."""
    import aiter as theirs

    return _run(theirs.mha_batch_prefill_func, *tensors, **options)


@declare.varlen_extend(
    name="portable.aiter.mha_batch_prefill_func",
    convention=CONVENTION,
    precision=PORTABLE,
    supports=replace(SUPPORTS, requires_finite_pool=False),
    unavailable=loader.missing_compiler,
    runs=("portable mha_batch_prefill_func",),
)
@checked(CONVENTION)
def contract(*tensors: Tensor, **options: Any) -> Tensor:
    """Its contract over our kernels."""
    return _run(aiter.mha_batch_prefill_func, *tensors, **options)


# ------------------------------------------------------------------ keys in pages

PAGED_SOURCE = (
    "aiter/ops/mha.py and csrc/py_itfs_ck/mha_batch_prefill_kernels.cu: 4D linear [pages, page size, heads, dim] or "
    "5D; kv_last_page_lens where pages hold more than one key and there is no block_table, which comes with seqlen_k"
)
PAGED = replace(
    CONVENTION, source=PAGED_SOURCE, keys_in_pool=True, index_form=IndexForm.PAGE_TABLE, kv_layout=KVLayout.NHD
)
PAGED_SUPPORTS = replace(SUPPORTS, page_sizes=(16, 1, 1024), v_head_dims=())


def _lists(page_table: Tensor, lengths: Tensor, page_size: int) -> dict[str, Tensor]:
    """The pages of all requests one after the other, where each begins, and how much the last one holds."""
    pages = -(-lengths // page_size)
    listed = torch.arange(page_table.shape[1], device=lengths.device) < pages[:, None]
    starts = torch.zeros(len(lengths) + 1, dtype=torch.int32, device=lengths.device)
    starts[1:] = pages.cumsum(0)
    return {
        "kv_indptr": starts,
        "kv_page_indices": page_table[listed],
        "kv_last_page_lens": (lengths - (pages - 1) * page_size).to(torch.int32),
    }


def _run_paged(
    function: Callable[..., Tensor],
    by_table: bool,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    q_indptr: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    *,
    causal: bool,
    scale: float | None,
    window: tuple[int, int],
    sinks: Tensor | None,
    soft_cap: float | None,
    **_: None,
) -> Tensor:
    page_size = k_cache.shape[3 if k_cache.dim() == 5 else 1]
    lists = _lists(page_table, lengths, page_size)
    if page_size == 1 and not by_table:
        # A page of one key may also be given as 3D, and then has no last page to speak of.
        k_cache, v_cache = k_cache[:, 0], v_cache[:, 0]
        del lists["kv_last_page_lens"]
    if by_table:
        # The list is asked for whichever form is used; nothing is read of it.
        lists |= {"kv_page_indices": lists["kv_page_indices"][:0], "block_table": page_table, "seqlen_k": lengths}
        lists.pop("kv_last_page_lens", None)
    longest = max((q_indptr[1:] - q_indptr[:-1]).tolist(), default=0)
    return function(
        q,
        k_cache,
        v_cache,
        q_indptr,
        max_seqlen_q=longest,
        max_seqlen_k=max(lengths.tolist(), default=0),
        softmax_scale=scale,
        logits_soft_cap=soft_cap or 0.0,
        causal=causal,
        window_size=window,
        sink_ptr=sinks,
        **lists,
    )


def _declared(
    layout: KVLayout, own: bool, *, same_by_table: Callable[..., Tensor] | None = None
) -> Callable[..., Tensor]:
    """A target for one layout, of aiter's own or of its contract over our kernels.

    It takes the table of pages, or their list where there is a target that does the same by the table.
    """
    by_table = same_by_table is None
    form = "block_table" if by_table else "kv_indptr"
    shuffled = layout is KVLayout.SHUFFLE_5D
    sizes = (16, 1024) if shuffled else PAGED_SUPPORTS.page_sizes
    function = "aiter.mha_batch_prefill_func" if own else "portable.aiter.mha_batch_prefill_func"
    attach = declare.varlen_extend(
        name=f"{function}.{'shuffle_5d' if shuffled else 'linear'}.{form}",
        convention=replace(PAGED, kv_layout=layout),
        precision=PRECISION if own else PORTABLE,
        supports=replace(PAGED_SUPPORTS, page_sizes=sizes, requires_finite_pool=own),
        engines=(Engine.HIP,) if own else tuple(Engine),
        unavailable=missing if own else loader.missing_compiler,
        agrees_with=same_by_table,
        runs=(f"{'aiter' if own else 'portable'} mha_batch_prefill_func",),
    )

    def target(*tensors: Tensor, **options: Any) -> Tensor:
        if not own:
            return _run_paged(aiter.mha_batch_prefill_func, by_table, *tensors, **options)
        import aiter as theirs

        return _run_paged(theirs.mha_batch_prefill_func, by_table, *tensors, **options)

    return attach(checked(replace(PAGED, kv_layout=layout))(target))


linear_by_table = _declared(KVLayout.NHD, True)
linear_by_list = _declared(KVLayout.NHD, True, same_by_table=linear_by_table)
shuffled_by_table = _declared(KVLayout.SHUFFLE_5D, True)
shuffled_by_list = _declared(KVLayout.SHUFFLE_5D, True, same_by_table=shuffled_by_table)
contract_linear_by_table = _declared(KVLayout.NHD, False)
contract_linear_by_list = _declared(KVLayout.NHD, False, same_by_table=contract_linear_by_table)
contract_shuffled_by_table = _declared(KVLayout.SHUFFLE_5D, False)
contract_shuffled_by_list = _declared(KVLayout.SHUFFLE_5D, False, same_by_table=contract_shuffled_by_table)
