"""aiter's functions over our kernels: their signatures are aiter's, and bad input is refused before any launch."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from suites.targets.arguments import ArgumentError
from suites.targets.portable import aiter, attention
from suites.targets.source_trees import AITER

Signature = list[tuple[str, str]]


def declared(source: str, name: str) -> Signature:
    """Names of the parameters of a function, and their defaults as they are written."""
    function = next(n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef) and n.name == name)
    arguments = function.args.args
    defaults = [None] * (len(arguments) - len(function.args.defaults)) + list(function.args.defaults)
    pairs = zip(arguments, defaults, strict=True)
    return [(a.arg, "" if d is None else ast.unparse(d)) for a, d in pairs]


SOURCES = {
    aiter.mha_batch_prefill_func: "ops/mha.py",
    aiter.pa_decode_gluon: "ops/triton/gluon/pa_decode_gluon.py",
    aiter.get_recommended_splits: "ops/triton/gluon/pa_decode_gluon.py",
}


@pytest.mark.parametrize("function", SOURCES, ids=lambda f: f.__name__)
def test_signatures_are_those_of_the_source_tree(function: Callable[..., Any]) -> None:
    root = AITER.root()
    if root is None or not (root / SOURCES[function]).is_file():
        pytest.skip(f"no source of aiter: {AITER.install}")
    theirs = declared((root / SOURCES[function]).read_text(encoding="utf-8"), function.__name__)
    ours = declared(inspect.getsource(inspect.getmodule(function)), function.__name__)  # type: ignore[arg-type]
    assert ours == theirs


def test_a_changed_default_or_order_is_another_signature() -> None:
    plain = declared("def f(a, b=1): ...", "f")
    assert plain == [("a", ""), ("b", "1")]
    assert declared("def f(a, b=2): ...", "f") != plain
    assert declared("def f(b=1, a=None): ...", "f") != plain


@pytest.fixture(autouse=True)
def _no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch raises."""

    def launched() -> None:
        raise AssertionError("a kernel was launched")

    monkeypatch.setattr(attention, "kernels", launched)


def zeros(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.int16 if dtype.itemsize == 2 else torch.uint8).view(dtype)


def decode_arguments(dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    x = 16 // dtype.itemsize
    return {
        "output": torch.zeros(1, 2, 64, dtype=torch.bfloat16),
        "query": torch.zeros(1, 2, 64, dtype=torch.bfloat16),
        "key_cache": zeros(dtype, 3, 1, 64 // x, 16, x),
        "value_cache": zeros(dtype, 3, 1, 16 // x, 64, x),
        "context_lengths": torch.tensor([20]),
        "block_tables": torch.tensor([[1, 2]], dtype=torch.int32),
        "softmax_scale": 0.1,
        "query_length": 1,
        "max_context_partition_num": 2,
    }


FP8 = torch.float8_e4m3fn
ONE = torch.ones(1)


def _cache(name: str, shape: tuple[int, ...]) -> dict[str, Tensor]:
    return {name: torch.zeros(shape, dtype=torch.bfloat16)}


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (_cache("key_cache", (3, 1, 8, 20, 8)), "page size: 20; allowed: a multiple of 8"),
        (_cache("key_cache", (3, 1, 16, 16, 4)), "key_cache: vectors of 4; allowed: 8"),
        (_cache("key_cache", (3, 1, 16, 16, 8)), "key_cache: head dim 128; allowed: the query's, 64"),
        (_cache("key_cache", (3, 8, 16, 8)), "key_cache: 4 dimensions; allowed: 5"),
        (_cache("value_cache", (3, 1, 64, 16)), "value_cache: 4 dimensions; allowed: 5"),
        (_cache("value_cache", (3, 1, 4, 64, 8)), r"value_cache: \[3, 1, 4, 64, 8\]; allowed: \[3, 1, 2, 64, 8\]"),
        ({"block_tables": torch.tensor([[1]])}, "block_tables: 1 pages wide; allowed: 2 for a context of 20"),
        ({"block_tables": torch.tensor([1, 2])}, "block_tables: 1 dimensions; allowed: 2"),
        ({"block_tables": torch.tensor([[1, 3]])}, "block_tables: 3; allowed: 0 to 2"),
        ({"block_tables": torch.tensor([[-1, 1]])}, "block_tables: -1; allowed: 0 to 2"),
        ({"query_length": 5}, "query_length: 5; allowed: up to 4"),
        ({"alibi_slopes": ONE}, "alibi_slopes: given; allowed: None"),
        ({"exp_sums": torch.zeros(1, 1, 3, 2)}, r"exp_sums: \[1, 1, 3, 2\]; allowed: \[1, 1, 2, 2\]"),
    ],
)
def test_bad_input_to_decode_is_one_clear_error(changed: dict[str, Any], told: str) -> None:
    with pytest.raises(ArgumentError, match=told):
        aiter.pa_decode_gluon(**(decode_arguments() | changed))


@pytest.mark.parametrize("missing", ["key_scale", "value_scale"])
def test_decode_over_fp8_needs_both_scales(missing: str) -> None:
    scales = {"key_scale": ONE, "value_scale": ONE} | {missing: None}
    with pytest.raises(ArgumentError, match=f"{missing}: None; allowed: a factor for torch.float8_e4m3fn"):
        aiter.pa_decode_gluon(**(decode_arguments(FP8) | scales))


def test_good_input_is_launched() -> None:
    with pytest.raises(AssertionError, match="a kernel was launched"):
        aiter.pa_decode_gluon(**decode_arguments())
    with pytest.raises(AssertionError, match="a kernel was launched"):
        aiter.mha_batch_prefill_func(**prefill_arguments())


def prefill_arguments(dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    return {
        "q": zeros(dtype, 3, 2, 64),
        "k": zeros(dtype, 3, 1, 64),
        "v": zeros(dtype, 3, 1, 64),
        "cu_seqlens_q": torch.tensor([0, 3], dtype=torch.int32),
        "kv_indptr": torch.tensor([0, 3], dtype=torch.int32),
        "kv_page_indices": torch.arange(3, dtype=torch.int32),
        "max_seqlen_q": 3,
        "max_seqlen_k": 3,
        "causal": True,
    }


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (_cache("k", (3, 1, 32)), "k: head dim 32; allowed: the query's, 64"),
        (_cache("k", (3, 1, 8, 16, 8)), "k: 5 dimensions; allowed: 3"),
        (_cache("v", (2, 1, 64)), r"v: \[2, 1, 64\]; allowed: tokens and heads of k, \[3, 1\]"),
        ({"kv_page_indices": torch.tensor([0, 1, 3])}, "kv_page_indices: 3; allowed: 0 to 2"),
        ({"kv_page_indices": torch.tensor([0, 1])}, "kv_page_indices: 2 entries; allowed: 3 and more"),
        ({"cu_seqlens_q": torch.tensor([0, 2])}, "cu_seqlens_q: 2 tokens; allowed: the query's 3"),
        ({"causal": False, "window_size": (3, 0)}, r"window_size: \(3, 0\); allowed: no limit to the right"),
        ({"return_lse": True}, "return_lse: True; allowed: False: more is not done here"),
        ({"sink_size": 4}, "sink_size: 4; allowed: 0: more is not done here"),
    ],
)
def test_bad_input_to_prefill_is_one_clear_error(changed: dict[str, Any], told: str) -> None:
    with pytest.raises(ArgumentError, match=told):
        aiter.mha_batch_prefill_func(**(prefill_arguments() | changed))


@pytest.mark.parametrize("missing", ["q_descale", "k_descale", "v_descale"])
def test_prefill_of_fp8_needs_every_scale(missing: str) -> None:
    scales = dict.fromkeys(("q_descale", "k_descale", "v_descale"), ONE) | {missing: None}
    with pytest.raises(ArgumentError, match=f"{missing}: None; allowed: a factor for torch.float8_e4m3fn"):
        aiter.mha_batch_prefill_func(**(prefill_arguments(FP8) | scales))
