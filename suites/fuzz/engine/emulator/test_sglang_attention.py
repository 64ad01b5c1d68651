"""sglang's Triton decode and extend attention, unmodified, against float64; skipped where it is not installed."""

import math

import pytest
import torch

from fuzz.engine import emulator
from suites.fuzz.engine.emulator import kernels_sglang
from suites.fuzz.engine.emulator.judge import judge
from suites.fuzz.engine.emulator.ragged import Shape, Source, ints, starts, unset
from suites.fuzz.engine.emulator.reference import Rules, batch

F16, BF16, F32, FP8 = torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn
LENGTHS = [5, 33, 70, 1]
PREFIXES, NEW = [0, 70, 130, 3], [9, 1, 140, 64]
CAP_AND_SINKS = Rules(0.17, cap=2.0, sinks=Source(7).normal(8))


def rules_of(shape: Shape, **names: object) -> Rules:
    return Rules(shape.dim**-0.5, **names)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=["fp16", "bf16", "fp32"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 2), (6, 2)], ids=["plain", "grouped", "group 3"])
def test_decode(dtype: torch.dtype, heads: int, kv_heads: int) -> None:
    shape = Shape(heads, kv_heads, 64, 64, dtype)
    rules = rules_of(shape)
    judge(kernels_sglang.run_decode(LENGTHS, shape, rules), [1] * 4, shape, rules)


@pytest.mark.parametrize("kv_heads", [2, 8], ids=["grouped", "plain"])
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        (Shape(8, 2, 80, 48), {"hip": True}),
        (Shape(8, 2, 64, 64), {"page": 16}),
        (Shape(8, 2, 64, 64), {"splits": 1}),
        (Shape(8, 2, 64, 64), {"splits": 16}),
    ],
    ids=["odd dims on AMD", "pages", "one split", "more splits than blocks"],
)
def test_decode_with_cap_and_sinks(kv_heads: int, shape: Shape, options: dict[str, int]) -> None:
    shape = Shape(8, kv_heads, shape.dim, shape.dim_v)
    judge(kernels_sglang.run_decode(LENGTHS, shape, CAP_AND_SINKS, **options), [1] * 4, shape, CAP_AND_SINKS)


def test_decode_of_latent_attention() -> None:
    shape = Shape(16, 1, 576, 512, BF16)
    rules = rules_of(shape)
    judge(kernels_sglang.run_decode([5, 40], shape, rules), [1, 1], shape, rules)


@pytest.mark.parametrize("kv_heads", [2, 8], ids=["grouped", "plain"])
def test_decode_of_an_fp8_cache(kv_heads: int) -> None:
    shape = Shape(8, kv_heads, 64, 64, BF16, FP8, 0.5, 2.0)
    rules = rules_of(shape)
    result = kernels_sglang.run_decode(LENGTHS, shape, rules)
    # The grouped kernel rounds the query to the type of the cache.
    judge(result, [1] * 4, shape, rules, result.q.to(FP8).double() if kv_heads == 2 else None)


@pytest.mark.parametrize("kv_heads", [2, 8], ids=["grouped", "plain"])
def test_decode_of_an_empty_request_is_nan(kv_heads: int) -> None:
    shape = Shape(8, kv_heads)
    result = kernels_sglang.run_decode([5, 0], shape, rules_of(shape))
    assert result.log.findings == ()
    assert result.out[1].isnan().all()  # the contract: 0
    sunk = kernels_sglang.run_decode([5, 0], shape, CAP_AND_SINKS)
    assert (sunk.out[1] == 0).all()


@pytest.mark.parametrize("kv_heads", [2, 8], ids=["grouped", "plain"])
def test_decode_batched_equals_serial(kv_heads: int) -> None:
    shape = Shape(8, kv_heads)
    batched, serial = (
        kernels_sglang.run_decode([5, 33, 70, 1, 64], shape, CAP_AND_SINKS, serial=serial) for serial in (False, True)
    )
    assert torch.equal(batched.out, serial.out)
    assert batched.log.launches[0].batches * 4 < serial.log.launches[0].batches == serial.log.launches[0].programs


@pytest.mark.parametrize("unified", [False, True], ids=["two stages", "unified"])
@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=["fp16", "bf16", "fp32"])
def test_extend(unified: bool, dtype: torch.dtype) -> None:
    shape = Shape(dtype=dtype)
    rules = rules_of(shape)
    judge(kernels_sglang.run_extend(PREFIXES, NEW, shape, rules, unified=unified), NEW, shape, rules)


@pytest.mark.parametrize("unified", [False, True], ids=["two stages", "unified"])
@pytest.mark.parametrize(
    ("shape", "rules", "options"),
    [
        (Shape(), Rules(0.125, window=18), {}),
        (Shape(8, 2), Rules(0.125, window=41, cap=2.0, sinks=CAP_AND_SINKS.sinks), {}),
        (Shape(4, 4, 80, 48), Rules(0.11, causal=False), {"hip": True}),
        (Shape(4, 1), Rules(0.125), {"page": 16}),
        (Shape(4, 1, 192, 128, BF16), Rules(0.07), {}),
    ],
    ids=["window", "window, cap and sinks", "not causal, odd dims, AMD", "pages", "split head dim"],
)
def test_extend_features(unified: bool, shape: Shape, rules: Rules, options: dict[str, int]) -> None:
    prefixes, new = [0, 70, 3], [9, 1, 64]
    judge(kernels_sglang.run_extend(prefixes, new, shape, rules, unified=unified, **options), new, shape, rules)


@pytest.mark.parametrize("unified", [False, True], ids=["two stages", "unified"])
def test_extend_of_an_fp8_cache(unified: bool) -> None:
    """At a small scale it hardly matters that the query is rounded to the type of the cache for the prefix."""
    shape = Shape(4, 2, 64, 64, F16, FP8, 0.5, 2.0)
    rules = Rules(2.0**-7)
    judge(kernels_sglang.run_extend([0, 70], [9, 40], shape, rules, unified=unified), [9, 40], shape, rules)


@pytest.mark.parametrize("parts", [(True, False), (False, True)], ids=["prefix", "new"])
def test_extend_of_one_part(parts: tuple[bool, bool]) -> None:
    prefixes, new = [70, 3], [9, 64]
    shape = Shape()
    rules = rules_of(shape, causal=parts[1])
    judge(kernels_sglang.run_extend(prefixes, new, shape, rules, parts=parts), new, shape, rules)


def test_extend_of_a_part_without_keys() -> None:
    """Found in 0.5.15: NaN, which no weight of 0 takes away again when the parts are merged. 0.5.23 gives 0."""
    shape = Shape()
    result = kernels_sglang.run_extend([0, 3], [2, 1], shape, rules_of(shape, causal=False), parts=(True, False))
    assert result.log.findings == ()
    wrong = kernels_sglang.version() == "0.5.15"
    assert (result.out[:2].isnan() if wrong else result.out[:2] == 0).all()
    assert result.lse is not None
    assert (result.lse[:2] == -math.inf).all()


def test_extend_batched_equals_serial() -> None:
    shape, rules = Shape(2, 1), Rules(0.125, window=41, cap=2.0, sinks=Source(7).normal(2))
    for unified in (False, True):
        batched, serial = (
            kernels_sglang.run_extend([40, 3], [9, 130], shape, rules, unified=unified, serial=serial)
            for serial in (False, True)
        )
        assert torch.equal(batched.out, serial.out)


def test_plain_decode_overflows_where_grouped_decode_does_not() -> None:
    """Found in 0.5.15: without groups, q . k is summed in the type of the inputs, before the scale: fp16 overflows
    beyond 65504. 0.5.23 sums in fp32.
    """
    for heads, works in ((2, True), (1, kernels_sglang.version() != "0.5.15")):
        q, pool = torch.full((1, heads, 128), 24.0, dtype=F16), torch.full((3, 1, 128), 24.0, dtype=F16)
        out, logits, lse = unset(1, heads, 128, dtype=F16), unset(1, heads, 1, 128), unset(1, heads, 1)
        with emulator.session() as log:
            kernels_sglang.operation("decode_attention").decode_attention_fwd(
                *(q, pool, pool, out, starts([3]), torch.arange(3), logits, lse, ints([1]), 1, 2.0**-10, 1.0, 1.0)
            )
        assert log.findings == ()
        assert bool((out == 24).all()) is works
        assert bool(out.isnan().all()) is not works


def test_unified_extend_has_another_temperature() -> None:
    """Found: `xai_temperature_len` means log(p) / log(len) to decode and extend, len / (p + 1) to unified extend."""
    source, keys, bound = Source(), 40, 8
    q, k, v = source.normal(1, 1, 16), source.normal(keys, 1, 16), source.normal(keys, 1, 16)
    slots, outs = torch.arange(keys), [unset(1, 1, 16) for _ in range(3)]
    decode, extend = (kernels_sglang.operation(f"{name}_attention") for name in ("decode", "extend"))
    with emulator.session() as log:
        decode.decode_attention_fwd(
            *(
                q,
                k,
                v,
                outs[0],
                starts([keys]),
                slots,
                unset(1, 1, 1, 16),
                unset(1, 1, 1),
                ints([1]),
                1,
                0.25,
                1.0,
                1.0,
            ),
            xai_temperature_len=bound,
        )
        extend.extend_attention_fwd(
            *(q, k[-1:], v[-1:], outs[1], k, v, starts([1]), starts([keys - 1]), slots[:-1], None, True, None, 1),
            *(1.0, 1.0, 0.25),
            xai_temperature_len=bound,
        )
        extend.extend_attention_fwd_unified(
            *(q, outs[2], k, v, 1.0, 1.0, starts([1]), starts([keys]), slots, ints([keys - 1]), 1),
            sm_scale=0.25,
            xai_temperature_len=bound,
        )
    assert log.findings == ()
    logarithmic, rational = (
        batch(q, [k], [v], [1], Rules(0.25 * factor))[0]
        for factor in (math.log(keys - 1) / math.log(bound), bound / keys)
    )
    for out, expected in zip(outs, (logarithmic, logarithmic, rational), strict=True):
        assert (out.double() - expected).abs().max() < 2.0**-18
    assert (logarithmic - rational).abs().max() > 0.1


def test_the_judge_notices_another_scale() -> None:
    shape = Shape()
    result = kernels_sglang.run_decode(LENGTHS, shape, rules_of(shape))
    with pytest.raises(AssertionError):
        judge(result, [1] * 4, shape, Rules(0.5))
