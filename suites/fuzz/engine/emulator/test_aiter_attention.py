"""aiter's Triton attention, unmodified, against float64; skipped without an aiter (see `kernels_aiter`)."""

import math
from dataclasses import replace

import pytest
import torch

from fuzz.engine import emulator
from fuzz.engine.emulator import FindingKind, KernelError, MaskedLanes, Options
from suites.fuzz.engine.emulator import kernels_aiter
from suites.fuzz.engine.emulator.judge import judge
from suites.fuzz.engine.emulator.ragged import ROUNDING, Shape, Source, ints, starts, unset
from suites.fuzz.engine.emulator.reference import Rules, batch

F16, BF16, F32, FP8 = torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn
SINKS = Source(7).normal(4)
# A tile of the 2D kernel has 64 keys: the longest row's pages fill whole tiles, so that none is read past its end.
LENGTHS, NEW = [70, 118, 33, 64], [9, 1, 33, 64]
LONG, FEW = [600, 513, 40], [3, 1, 2]


def rules_of(shape: Shape) -> Rules:
    return Rules(shape.dim**-0.5)


@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("new", [NEW, [1] * 4], ids=["extend", "decode"])
def test_unified_2d(dtype: torch.dtype, page: int, new: list[int]) -> None:
    shape = Shape(dtype=dtype)
    result = kernels_aiter.run_unified(LENGTHS, new, shape, rules_of(shape), page=page)
    assert [launch.kernel for launch in result.log.launches] == ["kernel_unified_attention_2d"]
    judge(result, new, shape, rules_of(shape))


@pytest.mark.parametrize(
    ("shape", "rules"),
    [
        (Shape(), Rules(0.125, window=21, cap=5.0, sinks=SINKS)),
        (Shape(), Rules(0.125, window=1)),
        (Shape(3, 1, 80, 80), Rules(0.11)),
        (Shape(24, 1), Rules(0.125)),
    ],
    ids=["window, cap and sinks", "window of one", "odd group and dim", "group above 16"],
)
def test_unified_2d_features(shape: Shape, rules: Rules) -> None:
    judge(kernels_aiter.run_unified(LENGTHS, NEW, shape, rules, page=64), NEW, shape, rules)


@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("rules", [Rules(0.125), Rules(0.125, cap=5.0, sinks=SINKS)], ids=["plain", "cap, sinks"])
@pytest.mark.parametrize("new", [FEW, [1] * 3], ids=["several queries", "decode"])
def test_unified_3d(page: int, rules: Rules, new: list[int]) -> None:
    shape = Shape(dtype=BF16)
    result = kernels_aiter.run_unified(LONG, new, shape, rules, page=page)
    assert [launch.kernel for launch in result.log.launches] == ["kernel_unified_attention_3d", "reduce_segments"]
    judge(result, new, shape, rules)


@pytest.mark.parametrize("lengths", [LENGTHS, [600, 40]], ids=["2d", "3d"])
def test_unified_of_an_fp8_cache(lengths: list[int]) -> None:
    shape, new = Shape(dtype=BF16, cache=FP8, k_scale=0.5, v_scale=2.0), [1] * len(lengths)
    result = kernels_aiter.run_unified(lengths, new, shape, rules_of(shape), page=64)
    judge(result, new, Shape(dtype=BF16), rules_of(shape))  # dequantised to bf16 before any product


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_unified_all_in_fp8(arch: str) -> None:
    fp8 = torch.float8_e4m3fnuz if arch == "gfx942" else FP8
    shape = Shape(dtype=BF16, cache=fp8)
    result = kernels_aiter.run_unified(LENGTHS, NEW, shape, rules_of(shape), page=64, query=fp8, arch=arch)
    judge(result, NEW, Shape(dtype=BF16, cache=FP8), rules_of(shape), result.q.double())


def test_unified_batched_equals_serial() -> None:
    shape, rules = Shape(), Rules(0.125, cap=5.0, sinks=SINKS)
    for lengths, new in (([70, 33], [9, 33]), ([520, 40], [3, 1])):
        batched, serial = (
            kernels_aiter.run_unified(lengths, new, shape, rules, page=64, serial=serial) for serial in (False, True)
        )
        assert torch.equal(batched.out, serial.out)


def test_unified_2d_reads_past_the_page_table() -> None:
    """Found: page 16 with tiles of 64 keys reads the table unmasked to the end of the last tile."""
    shape = Shape(1, 1, 16, 16)
    result = kernels_aiter.run_unified([17], [2], shape, rules_of(shape), page=16)
    (finding,) = result.log.findings
    assert (finding.kind, finding.argument) == (FindingKind.OUT_OF_BOUNDS_LOAD, "block_tables_ptr")
    assert (finding.indices, finding.extent) == ((2, 3), (0, 1))


def test_unified_3d_of_an_odd_head_dim_does_not_compile() -> None:
    """Found: `reduce_segments` masks a head dim that is no power of two by a variable that it never sets."""
    shape = Shape(2, 1, 80, 80)
    with pytest.raises(KernelError, match=r"reduce_segments, unified_attention\.py:\d+: name 'offs_d' is not defined"):
        kernels_aiter.run_unified([600], [1], shape, rules_of(shape), page=64)


def _constant(length: int, new: int, logit: float, *, window: int = -1, cap: float = 0.0) -> torch.Tensor:
    """Output of one head where every logit is `logit` and every value 1: the truth is 1 in every row."""
    q, k = torch.full((new, 1, 16), -1.0), torch.ones(-(-length // 64), 64, 1, 16)
    out, table = torch.full_like(q, torch.nan), torch.arange(len(k), dtype=torch.int32)[None]
    lengths, bounds = torch.tensor([length], dtype=torch.int32), torch.tensor([0, new], dtype=torch.int32)
    with emulator.session() as log:
        kernels_aiter.operation("unified_attention").unified_attention(
            *(q, k, torch.ones_like(k), out, bounds, new, lengths, length, -logit / 16, True, (window, 0), table, cap),
            *(None, None, None),
        )
    assert log.findings == ()
    return out[:, 0, 0]


def test_unified_2d_after_a_tile_outside_the_window() -> None:
    """Found: a row whose first tile lies outside its window counts a maximum of 0, and low logits vanish."""
    assert (_constant(67, 3, -80.0, window=1) - 1).abs().max() < 1e-6
    assert _constant(67, 3, -100.0, window=1)[1:].tolist() == [math.inf] * 2
    assert _constant(67, 3, -108.0, window=1)[1:].isnan().all()


def test_unified_3d_after_a_tile_beyond_the_query() -> None:
    """Found: likewise for the rows of a query block that do not reach the last segment, whose output becomes 0."""
    assert (_constant(578, 3, -80.0) - 1).abs().max() < 1e-6
    assert _constant(578, 3, -160.0)[0] == 0
    assert (_constant(578, 1, -160.0) - 1).abs().max() < 1e-6


@pytest.mark.parametrize("length", [70, 600], ids=["2d", "3d"])
def test_unified_needs_finite_values_past_the_length(length: int) -> None:
    """Where a tile is a page, nothing masks the slots past the length: weights of 0 meet what they hold."""
    page = 64
    q, k = torch.ones(1, 1, 16), torch.ones(-(-length // page), page, 1, 16)
    for filler, finite in ((1e30, True), (math.nan, False)):
        v, out = torch.ones_like(k), unset(1, 1, 16)
        v[-1, length % page :] = filler
        k[-1, length % page :] = filler
        with emulator.session() as log:
            kernels_aiter.operation("unified_attention").unified_attention(
                *(q, k, v, out, starts([1]), 1, ints([length]), length, 0.25, True, (-1, 0)),
                *(torch.arange(len(k), dtype=torch.int32)[None], 0.0, None, None, None),
            )
        assert log.findings == ()
        assert bool(out.isfinite().all()) is finite


def test_unified_soft_cap_overflows() -> None:
    """Found: the cap's tanh is a quotient of powers, infinite over infinite beyond 88 times the cap."""
    assert (_constant(3, 3, 170.0, cap=2.0) - 1).abs().max() < 1e-6
    assert _constant(3, 3, 180.0, cap=2.0).isnan().all()


@pytest.mark.parametrize("lengths", [LENGTHS, [1100, 70, 3]], ids=["one pass", "partitions"])
@pytest.mark.parametrize(
    ("shape", "per_token"),
    [
        (Shape(8, 2), False),
        (Shape(8, 2, 80, 80), False),
        (Shape(8, 2, dtype=BF16), False),
        (Shape(8, 2, dtype=BF16, cache=FP8, k_scale=0.5, v_scale=2.0), False),
        (Shape(8, 2, dtype=BF16, cache=FP8), True),
    ],
    ids=["fp16", "odd dim", "bf16", "fp8", "fp8 per token"],
)
def test_paged_decode(lengths: list[int], shape: Shape, per_token: bool) -> None:
    result = kernels_aiter.run_paged_decode(lengths, shape, rules_of(shape), per_token=per_token)
    # The query is scaled, and keys and values are dequantised, in the compute type.
    judge(result, [1] * len(lengths), replace(shape, cache=None), rules_of(shape))


@pytest.mark.parametrize("dtype", [F16, BF16], ids=["fp16", "bf16"])
def test_paged_decode_of_one_query_a_head(dtype: torch.dtype) -> None:
    """Found: values past the length are loaded masked without `other`; with zeros there the result is right.

    Products of query and key are rounded to the compute type one by one before they are summed.
    """
    shape = Shape(2, 2, dtype=dtype)
    zeroed = Options(masked_lanes=MaskedLanes.ZERO)
    result = kernels_aiter.run_paged_decode(LENGTHS, shape, rules_of(shape), options=zeroed)
    judge(result, [1] * 4, shape, rules_of(shape))
    strict = kernels_aiter.run_paged_decode([17, 16], shape, rules_of(shape))
    assert [(f.kind, f.argument, f.indices) for f in strict.log.findings] == [
        (FindingKind.UNDEFINED_OUTPUT, "out", (0, 127))
    ]


@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("rules", [Rules(0.125), Rules(0.125, window=20)], ids=["plain", "window"])
def test_prefix(dtype: torch.dtype, rules: Rules) -> None:
    shape = Shape(dtype=dtype)
    result = kernels_aiter.run_prefix(LENGTHS, NEW, shape, rules)
    assert result.log.findings == ()
    expected, _ = batch(result.q, result.keys, result.values, NEW, rules)
    # Weights are normalised, and so rounded against the running total, at every block of keys.
    assert (result.out.double() - expected).abs().max() < 4 * ROUNDING[dtype] * 4


@pytest.mark.parametrize("flash", [True, False], ids=["linear cache", "shuffled cache"])
@pytest.mark.parametrize("neox", [True, False], ids=["halves", "pairs"])
@pytest.mark.parametrize("cache", [BF16, FP8], ids=["bf16", "fp8"])
def test_rope_and_cache(flash: bool, neox: bool, cache: torch.dtype) -> None:
    """Rotated queries and keys, keys and values divided by their scales into the cache, -1 slots left alone."""
    source, x, page, dim, tokens = Source(), 16 // cache.itemsize, 16, 64, 5
    q, k, v = (source.normal(tokens, heads, dim, dtype=BF16) for heads in (4, 2, 2))
    angles = source.normal(32, dim // 2)
    cos, sin = angles.cos().to(BF16), angles.sin().to(BF16)
    positions, slots = torch.tensor([3, 31, 0, 7, 8]), torch.tensor([17, 0, -1, 33, 5])
    k_shape, v_shape = ((4, page, 2, dim),) * 2 if flash else ((4, 2, dim // x, page, x), (4, 2, dim, page))
    k_cache, v_cache = (torch.zeros(shape).to(cache) for shape in (k_shape, v_shape))
    k_scale, v_scale = (torch.tensor([0.5]), torch.tensor([2.0])) if cache is FP8 else (None, None)
    with emulator.session() as log:
        q_out, k_out, *_ = kernels_aiter.operation("fused_kv_cache").fused_qk_rope_reshape_and_cache(
            *(q, k, v, k_cache, v_cache, slots, positions, cos, sin, k_scale, v_scale, neox, flash)
        )
    assert log.findings == ()

    def rotated(y: torch.Tensor) -> torch.Tensor:
        a, b = (
            (y.double()[..., : dim // 2], y.double()[..., dim // 2 :])
            if neox
            else y.double().unflatten(-1, (-1, 2)).unbind(-1)
        )
        c, s = (table[positions].double()[:, None] for table in (cos, sin))
        parts = a * c - b * s, b * c + a * s
        return torch.cat(parts, -1) if neox else torch.stack(parts, -1).flatten(-2)

    assert (q_out.double() - rotated(q)).abs().max() < 3 * ROUNDING[BF16] * 6
    stored = slots >= 0
    assert (k_out.double() - rotated(k))[stored].abs().max() < 3 * ROUNDING[BF16] * 6
    if not flash:
        k_cache, v_cache = k_cache.permute(0, 3, 1, 2, 4).flatten(3), v_cache.permute(0, 3, 1, 2)
    k_rows, v_rows = (rows.flatten(0, 1)[slots[stored]].double() for rows in (k_cache, v_cache))
    rounding = (ROUNDING[BF16] * 3 + (ROUNDING[FP8] if cache is FP8 else 0)) * 6
    assert (k_rows * (0.5 if cache is FP8 else 1) - rotated(k)[stored]).abs().max() < rounding
    assert (v_rows * (2 if cache is FP8 else 1) - v.double()[stored]).abs().max() < rounding
    assert int((v_cache.reshape(-1, dim) != 0).any(-1).sum()) == 2 * int(stored.sum())


def test_prefix_of_an_fp8_cache() -> None:
    shape = Shape(dtype=BF16, cache=FP8, k_scale=0.5, v_scale=2.0)
    result = kernels_aiter.run_prefix([70, 33], [9, 33], shape, rules_of(shape))
    judge(result, [9, 33], Shape(dtype=BF16), rules_of(shape))


@pytest.mark.parametrize("causal", [True, False])
def test_prefill(causal: bool) -> None:
    shape = Shape(4, 2, 80, 80)
    rules = Rules(80**-0.5, causal=causal)
    judge(kernels_aiter.run_prefill([70, 130, 3], shape, rules), [70, 130, 3], shape, rules)
