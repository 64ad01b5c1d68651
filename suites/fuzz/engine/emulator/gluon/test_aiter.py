"""aiter's `pa_decode_gluon`, unmodified: every code path is right against float64, batched as one by one."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from _pytest.mark import ParameterSet

from suites.fuzz.engine.emulator.gluon import kernels_aiter
from suites.fuzz.engine.emulator.gluon.decoding import Decode, answer

TREE = kernels_aiter.tree()
pytestmark = pytest.mark.skipif(TREE is None, reason="ATTN_ORACLE_AITER names no tree with pa_decode_gluon")


@pytest.fixture(scope="module")
def tree() -> Path:
    assert TREE is not None
    return TREE


# Name -> the call, and the attention kernel that it must reach for pages of 16 or 64.
PATHS = {
    "one shot, one head": (Decode(kv_heads=1), "paged_attention_decode_sliding_window_head_1"),
    "one shot": (Decode(), "paged_attention_decode_sliding_window"),
    "persistent, one head": (Decode(kv_heads=1, parts=3), "paged_attention_decode_sliding_window_head_1"),
    "persistent": (Decode(parts=3), "paged_attention_decode_sliding_window"),
    "partitioned": (Decode(parts=3, persistent=False), "paged_attention_decode_v2_gluon_dot_kernel"),
}
REDUCTIONS = {
    "persistent, one head": "paged_attention_decode_ps_reduce_kernel",
    "persistent": "paged_attention_decode_ps_reduce_kernel",
    "partitioned": "paged_attention_decode_v2_reduce_kernel",
}
FEATURES = {
    "fp16": {},
    "bf16, 4d values": {"dtype": torch.bfloat16, "transposed": False},
    "two queries, odd group": {"query_length": 2, "group": 5, "transposed": False},
    "three queries, bf16": {"query_length": 3, "dtype": torch.bfloat16, "group": 4},
    "four queries, wide group": {"query_length": 4, "group": 16},
    "sinks": {"sinks": True},
    "fp8 cache": {"cache_fp8": True},
    "fp8 cache, scale per token, 4d values": {"cache_fp8": True, "scales": "token", "transposed": False},
    "fp8 cache, scale per token, two queries, bf16": {
        "cache_fp8": True,
        "scales": "token",
        "query_length": 2,
        "dtype": torch.bfloat16,
    },
    "fp8 throughout": {"cache_fp8": True, "query_scale": "tensor", "compute_fp8": True, "dtype": torch.bfloat16},
    "fp8 throughout, per token": {
        "cache_fp8": True,
        "scales": "token",
        "query_scale": "token",
        "compute_fp8": True,
        "query_length": 2,
        "dtype": torch.bfloat16,
    },
}


def judged(tree: Path, case: Decode) -> list[str]:
    """Check the case; returns the kernels that ran."""
    result = answer(tree, case)
    assert result.log.findings == ()
    assert result.ratio <= 1
    return [launch.kernel for launch in result.log.launches]


def others_slow(*pairs: tuple[int, str]) -> list[ParameterSet]:
    """The first pair of page and architecture is part of every run."""
    return [pytest.param(*pair, marks=[pytest.mark.slow] if i else []) for i, pair in enumerate(pairs)]


@pytest.mark.parametrize(("page", "arch"), others_slow((16, "gfx942"), (64, "gfx950"), (16, "gfx950"), (64, "gfx942")))
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("features", FEATURES)
def test_path(tree: Path, path: str, page: int, arch: str, features: str) -> None:
    case, kernel = PATHS[path]
    kernels = judged(tree, replace(case, page=page, arch=arch, **FEATURES[features]))
    assert kernels == [kernel, *([REDUCTIONS[path]] if path in REDUCTIONS else [])]


# Pages of 1024 hold four partitions of 256: a persistent launch takes a multiple of four of them.
WIDE = {
    "persistent, one head": (Decode(kv_heads=1, parts=4), "paged_attention_decode_sliding_window_head_1"),
    "persistent": (Decode(parts=4), "paged_attention_decode_sliding_window"),
    "partitioned": (
        Decode(parts=6, persistent=False),
        "paged_attention_decode_v2_gluon_large_block_dot_kernel",
    ),
}


@pytest.mark.parametrize(("page", "arch"), others_slow((1024, "gfx950"), (1024, "gfx942")))
@pytest.mark.parametrize("path", WIDE)
@pytest.mark.parametrize("features", FEATURES)
def test_page_of_1024(tree: Path, path: str, page: int, arch: str, features: str) -> None:
    case, kernel = WIDE[path]
    lengths = (37, 1300) if path == "partitioned" else (37, 700)
    kernels = judged(tree, replace(case, page=page, arch=arch, lengths=lengths, **FEATURES[features]))
    assert kernels == [kernel, REDUCTIONS[path]]


@pytest.mark.parametrize("path", [path for path in PATHS if path != "partitioned"])
def test_sinks_of_several_queries(tree: Path, path: str) -> None:
    judged(tree, replace(PATHS[path][0], sinks=True, query_length=3))


@pytest.mark.parametrize("page", [16, pytest.param(64, marks=pytest.mark.slow)])
@pytest.mark.parametrize("window", [1, 100, 256, 1000])
@pytest.mark.parametrize("query_length", [1, 3])
def test_window_of_the_partitioned_path(tree: Path, page: int, window: int, query_length: int) -> None:
    case, _ = PATHS["partitioned"]
    judged(tree, replace(case, page=page, window=window, query_length=query_length, sinks=query_length == 1))


@pytest.mark.parametrize("length", [1, 15, 16, 17, 255, 256, 257, 512])
@pytest.mark.parametrize("path", PATHS)
def test_lengths_at_boundaries(tree: Path, path: str, length: int) -> None:
    """Page tables and caches are exactly as wide as the one request needs, so that reading on would show."""
    judged(tree, replace(PATHS[path][0], lengths=(length,)))


@pytest.mark.parametrize("path", [*PATHS, "page of 1024"])
def test_serial_and_batched_are_one(tree: Path, path: str) -> None:
    case = replace(WIDE["partitioned"][0], page=1024) if path == "page of 1024" else PATHS[path][0]
    case = replace(case, query_length=2, dtype=torch.bfloat16, lengths=(37, 700, 37))
    batched, serial = (answer(tree, case, serial=serial) for serial in (False, True))
    assert torch.equal(batched.out.view(torch.int16), serial.out.view(torch.int16))
    assert sum(launch.batches for launch in serial.log.launches) > sum(
        launch.batches for launch in batched.log.launches
    )


def test_a_wrong_reference_is_told_apart(tree: Path) -> None:
    """The bound has teeth: one key more or less in the window is far outside it."""
    case, _ = PATHS["partitioned"]
    result = answer(tree, replace(case, window=100))
    for other in (99, 101):
        wrong = answer(tree, replace(case, window=other)).expected
        assert float(((result.out.double() - wrong).abs() / result.allowed[:, None, None]).amax()) > 5


# What the snapshot of 2026 that these tests were written with gets wrong: right answers are asked for.
WRONG = {
    "window, persistent: query_length keys too few": replace(PATHS["persistent"][0], window=100),
    "window, one shot: query_length keys too few": replace(PATHS["one shot"][0], window=100, query_length=2),
    "window, pages of 1024": replace(WIDE["partitioned"][0], page=1024, lengths=(700,), window=100),
    "window, pages of 1024, one shot: stores out of bounds": Decode(page=1024, lengths=(700,), window=100),
    "split at a multiple of 256, two queries: a key is lost": replace(
        PATHS["persistent"][0], parts=2, lengths=(512,), query_length=2, group=1, needle=255
    ),
    "sinks, partitioned, two queries: sinks are read as if each query had its own": replace(
        PATHS["partitioned"][0], sinks=True, query_length=2
    ),
    "empty request, one shot: output never written": replace(PATHS["one shot"][0], lengths=(0,)),
    "empty request, persistent: NaN": replace(PATHS["persistent"][0], lengths=(0,)),
    "empty request and window: reads before the page table": replace(PATHS["partitioned"][0], lengths=(0,), window=100),
    "query before the first key: mean of values": replace(PATHS["one shot"][0], lengths=(1,), query_length=2),
    "pages of 1024, one shot: division by zero": Decode(page=1024, lengths=(37,)),
    "query of another type than the arithmetic": replace(
        PATHS["one shot"][0], cache_fp8=True, query_scale="tensor", compute_fp8=True, dtype=torch.float16
    ),
    "dim that is no power of two: reads out of bounds": replace(PATHS["one shot"][0], dim=80, lengths=(300,)),
}


@pytest.mark.parametrize("defect", WRONG)
def test_known_defect(tree: Path, defect: str) -> None:
    result = answer(tree, WRONG[defect])
    if result.ratio > 1 or result.log.findings:
        pytest.xfail(f"{defect}: {result.ratio:.0f} times what is allowed, {len(result.log.findings)} findings")
