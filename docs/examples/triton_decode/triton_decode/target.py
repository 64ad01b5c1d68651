"""What the kernel claims, for attn-oracle."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from types import ModuleType

from oracle import Convention, Precision, Supports, declare
from oracle.convention import DefaultScale, Window, WindowMeaning
from oracle.kinds import IndexForm, KVLayout
from triton_decode.decode import paged_decode


@declare.paged_decode(
    name="triton_decode.decode",
    convention=Convention(
        source="the docstring of paged_decode",
        kv_layout=KVLayout.NHD,
        index_form=IndexForm.PAGE_TABLE,
        window=Window(meaning=WindowMeaning.KEYS, off=(0,)),
        default_scale=DefaultScale.RSQRT_HEAD_DIM,
    ),
    precision=Precision(source="kernels.py: float32 throughout, one step of the softmax a page", kv_cast=None,
                        qk_product=None, p_dtype=None, row_sum_of_rounded_p=False),
    supports=Supports(dtypes=("bf16", "fp16", "fp32"), max_query_len=1, features=frozenset({"window", "custom_scale"})),
)  # fmt: skip
def decode(q, k_cache, v_cache, page_table, lengths, *, scale, window, **_):
    return paged_decode(q, k_cache, v_cache, page_table, lengths, scale=scale, window=window, kernels=_kernels())


@cache
def _kernels() -> ModuleType:
    """The kernels for the engine of this process: emulated without a GPU, else compiled as ever."""
    from fuzz import engine
    from fuzz.engine.loader import load_source

    return load_source(Path(__file__).with_name("kernels.py"), "triton_decode.kernels", {}, engine.current())
