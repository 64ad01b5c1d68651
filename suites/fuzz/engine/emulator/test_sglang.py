"""Unmodified kernels of the sglang 0.5.15 wheel in the emulator; skipped where it is not installed."""

import importlib.metadata
import importlib.util
import math
from pathlib import Path
from types import ModuleType

import pytest
import torch

from fuzz.engine import emulator
from fuzz.engine.emulator import FindingKind, Options

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2]
H, D, PAGE = 3, 64, 16


def layers() -> Path:
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations or importlib.metadata.version("sglang") != "0.5.15":
        pytest.skip("sglang 0.5.15 is not installed")
    return Path(next(iter(spec.submodule_search_locations))) / "srt" / "layers"


@pytest.fixture(scope="module")
def cache() -> ModuleType:
    operations = "sglang.srt.layers.attention.triton_ops"
    names = [
        "sglang.jit_kernel.utils",
        *(f"{operations}.{n}" for n in ("cache_ops", "kv_indices", "pad", "rope_cache")),
    ]
    imports = {name: emulator.stub(name) for name in names}
    imports["sglang.srt.utils"] = emulator.stub("sglang.srt.utils", is_cuda=lambda: False)
    return emulator.load_source(layers() / "attention" / "utils.py", "sglang_utils", imports=imports)


@pytest.fixture(scope="module")
def dcp() -> ModuleType:
    return emulator.load_source(layers() / "dcp" / "kernels.py", "sglang_dcp")


@pytest.fixture(scope="module")
def merge() -> ModuleType:
    path = layers() / "attention" / "triton_ops" / "merge_state.py"
    return emulator.load_source(path, "sglang_merge_state")


def codes(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Every bit pattern in turn, NaN payloads included (of the upper half of fp32)."""
    count = torch.Size(shape).numel()
    pattern = torch.arange(count, dtype=torch.int64) * 4093
    width = dtype.itemsize
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[width]
    return (pattern << 16 if width == 4 else pattern).to(integers).view(dtype).reshape(shape)


def pool(
    dtype: torch.dtype, blocks: int, h: int = H, d: int = D, page: int = PAGE
) -> tuple[torch.Tensor, torch.Tensor]:
    x = 16 // dtype.itemsize
    flat = torch.zeros(blocks * h * d * page * dtype.itemsize, dtype=torch.uint8).view(dtype)
    return flat.view(blocks, h, d // x, page, x), flat.clone().view(blocks, h, page // x, d, x)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_round_trip_keeps_every_bit(cache: ModuleType, dtype: torch.dtype, index: torch.dtype) -> None:
    tokens = 90
    key, value = codes(dtype, tokens, H, D), codes(dtype, tokens, H, D).flip(0).contiguous()
    slots = torch.randperm(8 * PAGE, generator=torch.Generator().manual_seed(3))[:tokens].to(index)
    k_cache, v_cache = pool(dtype, 8)
    with emulator.session() as log:
        cache.launch_reshape_and_cache_shuffle_5d(key, value, k_cache, v_cache, slots)
        k_out, v_out = cache.launch_gather_shuffle_5d_to_linear(k_cache, v_cache, slots)
    assert log.findings == ()
    assert same_bits(k_out, key)
    assert same_bits(v_out, value)
    x = 16 // dtype.itemsize
    for token, slot in list(enumerate(slots.tolist()))[::17]:
        block, place = divmod(slot, PAGE)
        assert same_bits(k_cache[block, :, :, place, :].reshape(H, D), key[token])
        assert same_bits(v_cache[block, :, place // x, :, place % x], value[token])


@pytest.mark.parametrize("serial", [True, False], ids=["serial", "batched"])
def test_negative_slots_are_not_stored(cache: ModuleType, serial: bool) -> None:
    key = codes(torch.float16, 6, H, D)
    k_cache, v_cache = pool(torch.float16, 2)
    slots = torch.tensor([4, -1, 0, -7, 31, -1])
    with emulator.session(Options(serial=serial)) as log:
        cache.launch_reshape_and_cache_shuffle_5d(key, key, k_cache, v_cache, slots)
        k_out, v_out = cache.launch_gather_shuffle_5d_to_linear(k_cache, v_cache, torch.arange(32))
    assert log.findings == ()
    assert log.launches[0].batches == (6 if serial else 2)
    expected = torch.zeros(32, H, D, dtype=torch.float16)
    expected[slots[slots >= 0]] = key[slots >= 0]
    assert same_bits(k_out, expected)
    assert same_bits(v_out, expected)


def test_slots_through_a_sliding_window_map(cache: ModuleType) -> None:
    key = codes(torch.bfloat16, 3, H, D)
    k_cache, v_cache = pool(torch.bfloat16, 2)
    to_window = torch.tensor([0, 9, -1, 4])
    with emulator.session() as log:
        cache.launch_reshape_and_cache_shuffle_5d(key, key, k_cache, v_cache, torch.tensor([3, 1, 2]), to_window)
        k_out, _ = cache.launch_gather_shuffle_5d_to_linear(k_cache, v_cache, torch.tensor([4, 9]))
    assert log.findings == ()
    assert same_bits(k_out, key[:2])


def test_a_negative_slot_reads_before_the_sliding_window_map(cache: ModuleType) -> None:
    key = codes(torch.bfloat16, 2, H, D)
    guarded = torch.full((20,), 5)
    with emulator.session() as log:
        cache.launch_reshape_and_cache_shuffle_5d(
            key, key, *pool(torch.bfloat16, 2), torch.tensor([3, -1]), guarded[8:12]
        )
    first = log.findings[0]
    assert (first.kind, first.argument) == (FindingKind.OUT_OF_BOUNDS_LOAD, "swa_slot_mapping_ptr")
    assert (first.indices, first.extent, first.program) == ((-1, -1), (0, 3), (1, 0, 0))


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_pool_beyond_two_to_the_31(cache: ModuleType, index: torch.dtype) -> None:
    page = 64
    blocks = (2**31 + 2**27) // (2 * D * page)
    # Memory that nobody touches is not committed.
    k_cache = torch.empty(blocks * 2 * D * page, dtype=torch.uint8).view(blocks, 2, D // 16, page, 16)
    v_cache = torch.empty(blocks * 2 * D * page, dtype=torch.uint8).view(blocks, 2, page // 16, D, 16)
    key, slots = (
        codes(torch.uint8, 2, 2, D),
        torch.tensor([blocks * page - 1, blocks * page - 6], dtype=index),
    )
    with emulator.session() as log:
        cache.launch_reshape_and_cache_shuffle_5d(key, key, k_cache, v_cache, slots)
        k_out, v_out = cache.launch_gather_shuffle_5d_to_linear(k_cache, v_cache, slots)
    if index is torch.int64:
        assert log.findings == ()
        assert same_bits(k_out, key)
        assert same_bits(v_out, key)
    else:
        found = {(finding.kind, finding.kernel, finding.argument) for finding in log.findings}
        for argument in ("key_cache_ptr", "value_cache_ptr"):
            assert (FindingKind.INT32_WRAP_ADDRESS, "gather_shuffle_5d_to_linear", argument) in found
            assert (FindingKind.OUT_OF_BOUNDS_LOAD, "gather_shuffle_5d_to_linear", argument) in found
            assert (FindingKind.OUT_OF_BOUNDS_STORE, "reshape_and_cache_shuffle_5d", argument) in found


def widened(lengths: list[int], ranks: int) -> torch.Tensor:
    """req_to_token of requests whose runs start at multiples of the rank count."""
    table = torch.full((len(lengths), 2048), 10**8, dtype=torch.int32)
    for row, length in enumerate(lengths):
        table[row, :length] = torch.arange(length) + 2048 * ranks * ((row * 5) % len(lengths))
    return table


@pytest.mark.parametrize("serial", [True, False], ids=["serial", "batched"])
@pytest.mark.parametrize("starts", [None, [0, 3, 100, 7, 0]])
def test_dcp_indices_of_a_rank(dcp: ModuleType, serial: bool, starts: list[int] | None) -> None:
    lengths, ranks = [0, 1, 513, 1999, 5], 4
    table, first = widened([2048] * 5, ranks), starts or [0] * 5
    for rank in range(ranks):
        owned = [[p for p in range(s, s + n) if p % ranks == rank] for s, n in zip(first, lengths, strict=True)]
        local = torch.tensor([len(positions) for positions in owned], dtype=torch.int32)
        indptr = torch.cat([torch.zeros(1, dtype=torch.int32), local.cumsum(0).int()])
        out = torch.full((int(indptr[-1]),), -1)
        with emulator.session(Options(serial=serial)) as log:
            dcp.create_triton_kv_indices_for_dcp_triton[(5,)](
                table,
                torch.arange(5),
                local,
                indptr,
                None if starts is None else torch.tensor(starts),
                out,
                table.stride(0),
                ranks,
                rank,
            )
        assert log.findings == ()
        assert out.tolist() == [int(table[i, p]) // ranks for i, ps in enumerate(owned) for p in ps]


def test_dcp_indices_of_the_gathered_buffer(dcp: ModuleType) -> None:
    prefix, extend = torch.tensor([3, 0, 600]), torch.tensor([2, 5, 513])
    total = prefix + extend
    start = lambda lengths: torch.cumsum(lengths, 0) - lengths  # noqa: E731
    out = torch.full((int(total.sum()),), -1)
    with emulator.session() as log:
        dcp.create_dcp_kv_indices[(3,)](
            start(total), extend, start(extend), prefix, start(prefix), out, int(prefix.sum()), 4
        )
    expected = []
    for i in range(3):
        expected += [int(start(prefix)[i]) + j for j in range(int(prefix[i]))]
        expected += [int(prefix.sum() + start(extend)[i]) + j for j in range(int(extend[i]))]
    assert log.findings == ()
    assert out.tolist() == expected


def test_dcp_local_lengths(dcp: ModuleType) -> None:
    lengths, ranks, rank = [9, 1, 130], 2, 1
    starts = [0, 9, 10]
    kv = torch.arange(140, dtype=torch.int32) * 3
    local = [len(range(rank, n, ranks)) for n in lengths]
    local_start = [0, local[0], local[0] + local[1]]
    out = torch.full((sum(local),), -1, dtype=torch.int32)
    ints = lambda xs: torch.tensor(xs, dtype=torch.int32)  # noqa: E731
    with emulator.session() as log:
        dcp.update_kv_lens_and_indices[(3, 3)](
            ints(lengths), ints(starts), kv, ints(local), ints(local_start), out, rank, ranks, BLOCK_SIZE=32
        )
    assert log.findings == ()
    assert out.tolist() == [
        int(kv[s + p]) // ranks for s, n in zip(starts, lengths, strict=True) for p in range(rank, n, ranks)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dcp_corrected_outputs_sum_to_the_whole(dcp: ModuleType, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    out = torch.randn(4, 3, 5, 32, generator=generator).to(dtype)
    lse = torch.randn(4, 3, 5, generator=generator) * 4
    lse[1, 0, 0], lse[2, 1, 1], lse[:, 2, 2] = torch.nan, torch.inf, -torch.inf
    context, total = dcp.CPTritonContext(), torch.zeros(5, 3, 32, dtype=torch.float64)
    for rank in (2, 0, 1, 3):  # rank 1 last but one: a first launch with it would compile it in
        fresh = dcp.CPTritonContext() if rank == 1 else context
        with emulator.session() as log:
            part, merged = dcp.correct_attn_out(out[rank], lse, rank, fresh, torch.empty(5, 3, 32, dtype=dtype))
        assert log.findings == ()
        total += part.double()
    clean = torch.where(lse.isnan() | (lse == torch.inf), -torch.inf, lse).double()
    expected_lse = torch.logsumexp(clean * math.log(2), 0) / math.log(2)
    weights = torch.exp2(clean - expected_lse).nan_to_num(0.0)
    expected = (weights[..., None] * out.double()).sum(0).transpose(0, 1)
    tolerance = 2.0**-6 if dtype is torch.bfloat16 else 2.0**-20
    assert (total - expected).abs().max() < tolerance
    assert merged[2, 2] == -torch.inf
    finite = expected_lse.isfinite()
    assert (merged.double() - expected_lse)[finite].abs().max() < 2.0**-20


def test_dcp_correction_of_three_ranks_does_not_compile(dcp: ModuleType) -> None:
    with (
        emulator.session(),
        pytest.raises(emulator.KernelError, match=r"kernels\.py:\d+: shape \[3\]: 3 is not a power"),
    ):
        dcp.correct_attn_out(torch.zeros(1, 1, 16), torch.zeros(3, 1, 1), 0, None, torch.zeros(1, 1, 16))


def test_merge_state(merge: ModuleType) -> None:
    generator = torch.Generator().manual_seed(2)
    outs = torch.randn(2, 6, 4, 80, generator=generator)
    lses = torch.randn(2, 6, 4, generator=generator)
    lses[0, 0, 0], lses[1, 1, 1], lses[:, 2, 2] = torch.inf, -torch.inf, -torch.inf
    results = []
    for serial in (True, False):
        with emulator.session(Options(serial=serial)) as log:
            results.append(merge.merge_state_triton(outs[0], lses[0], outs[1], lses[1]))
        assert log.findings == ()
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))
    out, lse = results[0]
    clean = torch.where(lses == torch.inf, -torch.inf, lses).double()
    weights = torch.softmax(clean, 0)
    expected = (weights[..., None] * outs.double()).sum(0)
    assert out[2, 2].isnan().all()  # a known fault of this kernel: two empty states
    expected[2, 2] = out[2, 2] = 0
    assert (out - expected).abs().max() < 2.0**-20
    finite = clean.logsumexp(0).isfinite()
    assert (lse - clean.logsumexp(0))[finite].abs().max() < 2.0**-20
