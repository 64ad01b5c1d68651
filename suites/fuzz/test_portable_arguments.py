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
    aiter.unified_attention: "ops/triton/attention/unified_attention.py",
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


def _pages(size: int) -> dict[str, Tensor]:
    """Keys and values in three linear pages."""
    return _cache("k", (3, size, 1, 64)) | _cache("v", (3, size, 1, 64))


def _table(rows: list[list[int]], *lengths: int) -> dict[str, Tensor]:
    return _pages(16) | {"block_table": torch.tensor(rows), "seqlen_k": torch.tensor(lengths)}


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (_cache("k", (3, 1, 32)), "k: head dim 32; allowed: the query's, 64"),
        (_cache("k", (3, 1, 8, 16, 8)), "v: 3 dimensions; allowed: those of k, 5"),
        (_cache("k", (3, 64)), "k: 2 dimensions; allowed: 3: "),
        (_cache("v", (2, 1, 64)), r"v: \[2, 1, 64\]; allowed: all but the head dim of k, \[3, 1, 64\]"),
        (_pages(4), "page size: 4; allowed: 1, 16, 1024"),
        (_pages(16), "kv_last_page_lens: None; allowed: a length a request"),
        (_pages(16) | {"kv_last_page_lens": torch.tensor([17])}, "kv_last_page_lens: 17; allowed: 1 to 16"),
        (_pages(16) | {"kv_last_page_lens": torch.tensor([1, 2])}, "kv_last_page_lens: 2 entries; allowed: 1"),
        (_pages(16) | {"block_table": torch.tensor([[0, 1]])}, "seqlen_k: None; allowed: a length a request"),
        (_table([[0]], 20), "block_table: 1 pages wide; allowed: 2 for a context of 20"),
        (_table([[0, 3]], 20), "block_table: 3; allowed: 0 to 2, the pages"),
        (_table([[0, 1]], 20, 21), "seqlen_k: 2 entries; allowed: 1"),
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


def unified_arguments() -> dict[str, Any]:
    return _pages(16) | {
        "q": torch.zeros(3, 2, 64, dtype=torch.bfloat16),
        "out": torch.zeros(3, 2, 64, dtype=torch.bfloat16),
        "cu_seqlens_q": torch.tensor([0, 3], dtype=torch.int32),
        "max_seqlen_q": 3,
        "seqused_k": torch.tensor([20]),
        "max_seqlen_k": 20,
        "softmax_scale": 0.1,
        "causal": True,
        "window_size": (-1, -1),
        "block_table": torch.tensor([[1, 2]], dtype=torch.int32),
        "softcap": 0.0,
        "q_descale": None,
        "k_descale": None,
        "v_descale": None,
    }


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (_cache("k", (3, 1, 8, 16, 8)), "k, v: 5 and 4 dimensions; allowed: 4: "),
        (_cache("k", (3, 16, 1, 32)), "k: head dim 32; allowed: the query's, 64"),
        ({"shuffled_kv_cache": True}, "key_cache: 4 dimensions; allowed: 5"),
        ({"block_table": torch.tensor([[1]])}, "block_table: 1 pages wide; allowed: 2 for a context of 20"),
        ({"causal": False}, "causal: False; allowed: True: more is not done here"),
        ({"qq_bias": ONE}, "qq_bias: given; allowed: None"),
    ],
)
def test_bad_input_to_unified_attention_is_one_clear_error(changed: dict[str, Any], told: str) -> None:
    with pytest.raises(ArgumentError, match=told):
        aiter.unified_attention(**(unified_arguments() | changed))
    with pytest.raises(AssertionError, match="a kernel was launched"):
        aiter.unified_attention(**unified_arguments())


@pytest.mark.parametrize("missing", ["q_descale", "k_descale", "v_descale"])
def test_prefill_of_fp8_needs_every_scale(missing: str) -> None:
    scales = dict.fromkeys(("q_descale", "k_descale", "v_descale"), ONE) | {missing: None}
    with pytest.raises(ArgumentError, match=f"{missing}: None; allowed: a factor for torch.float8_e4m3fn"):
        aiter.mha_batch_prefill_func(**(prefill_arguments(FP8) | scales))


def test_what_prefill_does_with_its_arguments_is_what_the_source_tree_says() -> None:
    """The contract behind the signature: what is passed on under which name, defaults, layouts by their dimensions."""
    root = AITER.root()
    if root is None or not (root / "ops/mha.py").is_file():
        pytest.skip(f"no source of aiter: {AITER.install}")
    tree = ast.parse((root / "ops/mha.py").read_text(encoding="utf-8"))
    function = next(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "mha_batch_prefill_func")
    if not any(argument.arg == "block_table" for argument in function.args.args):
        pytest.skip("this aiter has no prefill over pages")
    passed = passed_on(function, "_mha_batch_prefill")
    for name in ("kv_last_page_lens", "block_table", "seqlen_k", "q_descale", "k_descale", "v_descale", "sink_ptr"):
        assert passed[name] == name
    assert passed["window_size_left"] == "window_size[0]"
    assert passed["window_size_right"] == "window_size[1]"
    assert passed["causal"] == "causal"
    assert dims_asked_for(function, "k") == {3, 4, 5}
    assert dims_asked_for(function, "v") == {3, 4, 5}
    fake = next(
        n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "mha_batch_prefill_fake_tensors"
    )
    shapes = {ast.unparse(n) for n in ast.walk(fake) if isinstance(n, ast.Tuple)}
    assert "(total_q, num_heads, head_size_v)" in shapes
    assert "(num_heads, total_q)" in shapes


def passed_on(function: ast.FunctionDef, to: str) -> dict[str, str]:
    """By keyword, what a function passes to another."""
    calls = (n for n in ast.walk(function) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name))
    call = next(n for n in calls if isinstance(n.func, ast.Name) and n.func.id == to)
    return {k.arg: ast.unparse(k.value) for k in call.keywords if k.arg is not None}


def dims_asked_for(function: ast.FunctionDef, tensor: str) -> set[int]:
    """Numbers of dimensions that a function compares those of a tensor with."""
    compared = (
        n for n in ast.walk(function) if isinstance(n, ast.Compare) and ast.unparse(n.left) == f"{tensor}.dim()"
    )
    return {int(ast.unparse(n.comparators[0])) for n in compared}


def test_another_name_or_layout_would_be_seen() -> None:
    (function,) = ast.parse("def f(k, w):\n    if k.dim() == 3: g(left=w[1], right=w[0])").body
    assert isinstance(function, ast.FunctionDef)
    assert passed_on(function, "g") == {"left": "w[1]", "right": "w[0]"}
    assert dims_asked_for(function, "k") == {3}
    assert dims_asked_for(function, "v") == set()


def test_pages_by_list_and_by_table_are_the_same_slots() -> None:
    table, lengths = torch.tensor([[2, 0], [1, 9]], dtype=torch.int32), torch.tensor([20, 3])
    k = torch.zeros(3, 16, 1, 64)
    counts, slots = aiter._by_table(k, table, lengths, 16, 3)
    starts, listed = torch.tensor([0, 2, 3]), torch.tensor([2, 0, 1])
    again, same = aiter._by_list(k, starts, listed, torch.tensor([4, 3]), 16, 3)
    assert torch.equal(counts, again)
    assert torch.equal(slots, same)
    assert slots.tolist() == [*range(32, 48), *range(4), *range(16, 19)]
