"""The kernels that the soundness campaign believes to be right, as data: written down before a run, never after.

A false alarm on one of them means that the budget, the precision declared or the belief is wrong. `digest` goes
into every result, so that results of different lists are never added up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from types import MappingProxyType

CONTEXTS = MappingProxyType(
    {
        "0": (0, 0),
        "1": (1, 1),
        "2-16": (2, 16),
        "17-256": (17, 256),
        "257-2k": (257, 2048),
        "2k-8k": (2049, 8192),
        "8k-32k": (8193, 32768),
        "32k-128k": (32769, 131072),
    }
)
"""Classes of context lengths, both ends included."""

Options = Mapping[str, tuple[object, ...]]
"""Fields of `variants.Choices` and what each may be."""

FREE: Options = MappingProxyType(
    {
        "tile": (1, 16, 32, 64, 128, 256),
        "order": ("ascending", "descending", "random"),
        "base_two": (False, True),
        "scale_query": (False, True),
        "fused_argument": (False, True),
        "reciprocal": (False, True),
        "unit": ("blas", "blas", "chain", "block"),
        "exp_noise": ("none", "random", "biased"),
        "sum_rounded": (False, True),
        "merge": ("maximum", "absolute"),
        "sink": ("merge", "initial"),
        "flush": (False, True),
        "sigmoid_tanh": (False, True),
    }
)
"""What every emulated kernel decides on its own, beside its precision."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Emulated kernels of one precision; `options` add to `FREE` and go before it. kv_dtype None: as dtype."""

    name: str
    dtype: str = "bf16"
    kv_dtype: str | None = None
    options: Options = field(default_factory=dict)


_BF16: Options = {"p_dtype": ("bf16",)}
_SPLITS: Options = {"splits": (2, 3, 8, 16), "partial_dtype": ("fp32", "bf16")}

VARIANTS = (
    Variant(name="fp32", dtype="fp32", options={"out_dtype": ("fp32",)}),
    Variant(name="bf16", options=_BF16),
    Variant(name="fp16", dtype="fp16", options={"p_dtype": ("fp16",), "out_dtype": ("fp16",)}),
    Variant(name="bf16 unrounded weights", options={"out_dtype": ("bf16", "fp32")}),
    Variant(name="bf16 splits", options={**_BF16, **_SPLITS}),
    Variant(
        name="fp16 splits",
        dtype="fp16",
        options={
            "p_dtype": ("fp16",),
            "out_dtype": ("fp16",),
            "splits": (2, 5, 8),
            "partial_dtype": ("fp32", "fp16"),
        },
    ),
    Variant(
        name="bf16 ranks",
        options={
            **_BF16,
            "ranks": (2, 4, 8),
            "cyclic": (False, True),
            "rank_dtype": ("fp32", "bf16"),
            "reduce_dtype": ("fp32", "bf16"),
            "splits": (1, 3),
        },
    ),
    Variant(name="bf16 rounded products", options={"qk_product": ("bf16",), **_SPLITS}),
    Variant(name="bf16 rounded logits", options={**_BF16, "logit_dtype": ("bf16",)}),
    Variant(name="bf16 toward zero", options={**_BF16, "p_truncated": (True,), "out_truncated": (True,)}),
    Variant(name="bf16 Hopper units", options={**_BF16, "unit": ("hopper",), "tile": (64, 128)}),
    Variant(
        name="fp16 Ampere units",
        dtype="fp16",
        options={"p_dtype": ("fp16",), "out_dtype": ("fp16",), "unit": ("ampere",), "tile": (64, 128)},
    ),
    Variant(name="bf16 CDNA3 units", options={**_BF16, "unit": ("cdna3",), "tile": (32, 128)}),
    Variant(name="bf16 with e4m3fn cache", kv_dtype="e4m3fn", options=_BF16),
    Variant(
        name="e4m3fn scaled weights",
        kv_dtype="e4m3fn",
        options={"p_dtype": ("e4m3fn",), "p_scale": (256.0, 448.0), "q_cast": (None, "e4m3fn")},
    ),
    Variant(
        name="e4m3fn weights",
        kv_dtype="e4m3fn",
        options={"p_dtype": ("e4m3fn",), "q_cast": (None, "e4m3fn"), **_SPLITS},
    ),
    Variant(
        name="e4m3fnuz scaled weights",
        kv_dtype="e4m3fnuz",
        options={"p_dtype": ("e4m3fnuz",), "p_scale": (240.0,), "q_cast": (None, "e4m3fnuz")},
    ),
    Variant(name="e5m2 weights", kv_dtype="e5m2", options={"p_dtype": ("e5m2",), "p_scale": (1.0, 100.0)}),
    Variant(name="e5m2fnuz weights", kv_dtype="e5m2fnuz", options={"p_dtype": ("e5m2fnuz",)}),
    Variant(
        name="e4m3fn Hopper units",
        kv_dtype="e4m3fn",
        options={
            "p_dtype": ("e4m3fn",),
            "p_scale": (256.0,),
            "q_cast": ("e4m3fn",),
            "unit": ("hopper_fp8",),
            "tile": (64, 128),
        },
    ),
    Variant(
        name="anything",
        options={
            "q_cast": (None, None, "bf16", "e4m3fn"),
            "qk_product": (None, None, "bf16", "fp16"),
            "logit_dtype": ("fp32", "fp32", "bf16", "fp16"),
            "p_dtype": (None, "bf16", "fp16", "e4m3fn"),
            "p_truncated": (False, True),
            "out_dtype": ("bf16", "fp16", "fp32"),
            "out_truncated": (False, True),
            "splits": (1, 5),
            "ranks": (1, 3),
            "partial_dtype": ("fp32", "bf16", "fp16"),
            "rank_dtype": ("fp32", "bf16"),
            "reduce_dtype": ("fp32", "bf16"),
        },
    ),
)


@dataclass(frozen=True, kw_only=True)
class Native:
    """A target of `suites.targets`: by engine, the longest context that it is run at (0: not run there).

    Contexts of the emulator are short because it is slow, not because the kernel is believed less.
    """

    target: str
    cuda: int = 131072
    emulator: int = 0


NATIVE = (
    Native(target="torch.sdpa", emulator=131072),
    Native(target="torch.sdpa_with_lse", emulator=131072),
    Native(target="torch.sdpa_math", emulator=131072),
    Native(target="torch.sdpa_flash"),
    Native(target="torch.flex"),
    Native(target="torch.flex_eager", cuda=0, emulator=32768),
    Native(target="sglang.triton.decode", emulator=2048),
    Native(target="sglang.triton.decode_grouped", emulator=2048),
    Native(target="sglang.triton.extend", emulator=2048),
    Native(target="sglang.triton.extend_with_lse", emulator=2048),
    Native(target="aiter.triton.unified_attention", cuda=0, emulator=512),
    Native(target="aiter.triton.unified_attention.segments", cuda=0, emulator=2048),
)


def digest() -> str:
    """SHA-256 of the lists above."""
    plain = (
        sorted(CONTEXTS.items()),
        sorted(FREE.items()),
        [(v.name, v.dtype, v.kv_dtype, sorted(v.options.items())) for v in VARIANTS],
        [(n.target, n.cuda, n.emulator) for n in NATIVE],
    )
    return sha256(repr(plain).encode()).hexdigest()
