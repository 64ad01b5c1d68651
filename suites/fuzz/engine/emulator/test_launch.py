"""Batched execution leaves the bits of serial execution, whatever programs do to each other."""

import platform
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fuzz.engine import emulator
from fuzz.engine.emulator import FindingKind, Fp8Overflow, Log, Options
from fuzz.engine.emulator.allocator import keep_memory


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def both_ways(run: object, *tensors: torch.Tensor) -> tuple[Log, Log]:
    """Run on copies, serially and batched; the copies must agree bit for bit and so must the findings."""
    logs, results = [], []
    for options in (Options(serial=True), Options()):
        copies = [tensor.clone() for tensor in tensors]
        with emulator.session(options) as log:
            run(*copies)  # type: ignore[operator]
        logs.append(log)
        results.append(copies)
    for serial, batched in zip(*results, strict=True):
        assert torch.equal(bits(serial), bits(batched))
    assert logs[0].findings == logs[1].findings
    return logs[0], logs[1]


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(-3, 70), min_size=1, max_size=12),
    planes=st.integers(1, 2),
    block=st.sampled_from([1, 4, 32]),
    seed=st.integers(0, 2**31),
)
def test_divergent_programs_agree_with_serial_execution(
    programs: ModuleType, lengths: list[int], planes: int, block: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    count = len(lengths) * planes
    x = torch.randn(count, 70, generator=generator) * 4
    size = torch.tensor(lengths * planes, dtype=torch.int32)
    out = torch.full((count, block), torch.nan)

    def run(out: torch.Tensor) -> None:
        programs.divergent[(len(lengths), planes)](x, size, out, 70, block, 40)

    serial, batched = both_ways(run, out)
    assert serial.findings == ()
    assert serial.launches[0].batches == count
    assert batched.launches[0].batches <= count


def test_memory_is_kept_where_the_c_library_can() -> None:
    assert keep_memory() == (platform.libc_ver()[0] == "glibc")


def test_like_programs_run_as_one_batch(programs: ModuleType) -> None:
    x, size = torch.randn(48, 70), torch.full((48,), 64, dtype=torch.int32)
    out = torch.zeros(48, 32)
    with emulator.session() as log:
        programs.divergent[(48,)](x.clamp(-1, -1), size, out, 70, 32, 40)
    assert log.launches[0].batches == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_products_do_not_depend_on_the_batch(programs: ModuleType, dtype: torch.dtype) -> None:
    for m, n, k in [(16, 16, 16), (16, 64, 32), (32, 16, 128), (1, 1, 256), (16, 1, 128), (1, 16, 64)]:
        a, b = torch.randn(7, m, k).to(dtype), torch.randn(7, n, k).to(dtype)

        def run(out: torch.Tensor, m: int = m, n: int = n, k: int = k, a: object = a, b: object = b) -> None:
            programs.products[(7,)](a, b, out, m, n, k)

        out = torch.zeros(7, m, m)
        both_ways(run, out)


@pytest.mark.parametrize("second", [False, True])
def test_the_last_program_in_order_wins(programs: ModuleType, second: bool) -> None:
    places = torch.tensor([3, 1, 3, 3, 0, 1, 5, 0], dtype=torch.int32)

    def run(out: torch.Tensor) -> None:
        programs.race[(8,)](places, out, 6, second)

    _, batched = both_ways(run, torch.full((6,), -1, dtype=torch.int32))
    assert batched.launches[0].batches == 1  # only the stores are done again, in order
    assert {finding.kind for finding in batched.findings} == {FindingKind.RACING_STORES}


@pytest.mark.parametrize(("shift", "batches"), [(0, 1), (1, 16), (15, 16)])
def test_reading_what_another_program_writes_runs_in_order(programs: ModuleType, shift: int, batches: int) -> None:
    def run(x: torch.Tensor) -> None:
        programs.in_place[(16,)](x, shift, 16)

    _, batched = both_ways(run, torch.arange(16, dtype=torch.int64))
    assert batched.launches[0].batches == batches


def test_atomics_take_turns_in_program_order(programs: ModuleType) -> None:
    x = torch.tensor([5, 1, 2, 9], dtype=torch.int32)
    tickets, total = torch.zeros(4, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)

    def run(tickets: torch.Tensor, total: torch.Tensor) -> None:
        programs.counter[(4,)](x, tickets, total, 8)

    both_ways(run, tickets, total)
    run(tickets, total)
    assert tickets.tolist() == [0, 5, 6, 8]
    assert total.tolist() == [17, 17 * (0 + 2 + 4 + 6), 17 * (1 + 3 + 5 + 7)]


def test_lanes_of_one_program_take_turns(programs: ModuleType) -> None:
    items = torch.tensor([[1, 2, 1, 1], [3, 3, 0, 3], [0, 0, 0, 0]], dtype=torch.int32)

    def run(items: torch.Tensor, out: torch.Tensor) -> None:
        programs.tally[(3,)](items, out, 4)

    out = torch.zeros(3, 4, dtype=torch.int32)
    both_ways(run, items, out)
    run(items, out)
    assert out.tolist() == [[0, 3, 1, 0], [0, 0, 0, 3], [0, 0, 0, 0]]
    assert items.tolist() == [[0, 0, 1, 2], [0, 1, 0, 2], [0, 0, 0, 0]]


def test_memory_budget_splits_batches(programs: ModuleType) -> None:
    expected = torch.arange(100) * (4096 * 4095 // 2)
    for budget, least in [(1 << 30, 2), (64 * 4096 * 10, 10), (1, 100)]:
        out = torch.zeros(100, dtype=torch.int64)
        with emulator.session(Options(batch_bytes=budget)) as log:
            programs.large[(100,)](out, 4096)
        assert torch.equal(out, (expected + 2**31) % 2**32 - 2**31)
        assert log.launches[0].batches >= least


def test_grids(programs: ModuleType) -> None:
    out = torch.zeros(4, dtype=torch.int64)
    with emulator.session() as log:
        programs.large[lambda meta: (meta["BLOCK"],)](out, BLOCK=4, num_warps=4)
        programs.large[0, 3](out, 4)
    assert [(launch.grid, launch.programs) for launch in log.launches] == [((4, 1, 1), 4), ((0, 3, 1), 0)]
    for grid in [(), (1, 1, 1, 1), (-1,)]:
        with pytest.raises(ValueError, match="grid"):
            programs.large[grid](out, 4)
    with pytest.raises(TypeError, match="no parameter BLOK"):
        programs.large[(1,)](out, BLOK=4)


def test_a_jitted_function_is_not_called_from_the_host(programs: ModuleType) -> None:
    with pytest.raises(emulator.KernelError, match="a grid launches it"):
        programs.large(torch.zeros(1), 4)


def test_compiled_kernel_keeps_what_compilation_fixed(programs: ModuleType) -> None:
    first, second = torch.zeros(8, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
    compiled = programs.languages[(1,)](first, None, 1)
    compiled[(1,)](second, torch.zeros(1), 7)
    assert torch.equal(first, second)
    compiled = programs.languages[(1,)](first, None, 2)
    compiled[(1,)](second, None, 7)
    assert not torch.equal(first, second)
    with pytest.raises(TypeError, match="takes 3 arguments, got 2"):
        compiled[(1,)](second, None)


def test_memory_of_other_types(programs: ModuleType) -> None:
    x = torch.tensor([0x0002FFFF, -1], dtype=torch.int32)
    results = {}
    for overflow in Fp8Overflow:
        out, flags = torch.zeros(4, dtype=torch.int32), torch.tensor([True, False, True, False])
        narrow = torch.zeros(4, dtype=torch.uint8).view(torch.float8_e4m3fn)
        with emulator.session(Options(fp8_overflow=overflow)) as log:
            programs.reinterpret[(1,)](x, out, flags, narrow, 4)
        assert log.findings == ()
        assert out.tolist() == [0xFFFF, 2, 0xFFFF, 0xFFFF]
        assert flags.tolist() == [False, True, True, False]
        results[overflow] = narrow.view(torch.uint8).tolist()
    assert results == {
        Fp8Overflow.SATURATE: [0x7E, 0xAA, 0x7E, 0xAA],
        Fp8Overflow.NAN: [0x7F, 0xAA, 0x7F, 0xAA],
    }
    with emulator.session() as log:
        programs.reinterpret[(1,)](x[:1], out, flags, narrow, 4)
    assert [(f.kind, f.extent, f.indices) for f in log.findings][:1] == [
        (FindingKind.OUT_OF_BOUNDS_LOAD, (0, 1), (2, 3))
    ]


def test_decorators_supply_arguments(programs: ModuleType) -> None:
    out = torch.zeros(1, dtype=torch.int32)
    programs.tuned[(1,)](out, 6)
    assert out.item() == 641
    programs.tuned[(1,)](out, n=7, BLOCK=2)
    assert out.item() == 720


def test_front_end(programs: ModuleType) -> None:
    out = torch.zeros(8, dtype=torch.int32)
    for n, expected in [
        (5, [4, 4, 5, 4, -3, 2, 60]),
        (6, [4, 4, 6, 4, 3, 2, 60]),
        (-1, [-1, -1, 4, -1, -3, 2, 60]),
    ]:
        programs.languages[(1,)](out, None, n)
        assert out[:7].tolist() == expected
    programs.languages[(1,)](out, None, -7, NAME="runtime")
    assert out[7].item() == -3 * 10 - 1
