"""Uninitialised memory, races, stores of another dtype, shared memory, and what follows from what."""

from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fuzz.engine import emulator
from fuzz.engine.emulator import Finding, FindingKind, Options
from fuzz.engine.emulator.dtypes import float32
from fuzz.engine.emulator.launch import Experience, launch
from fuzz.engine.emulator.memory import Buffer, store
from fuzz.engine.emulator.sanitizer import shared_load
from fuzz.engine.emulator.value import constant

HERE = Path(__file__).parent
LINES = (HERE / "planted_memory.py").read_text().splitlines()
POISON = 0x2AAAAAAA
SERIAL = pytest.mark.parametrize("serial", [True, False], ids=["serial", "batched"])


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    return emulator.load_source(HERE / "planted_memory.py", "planted_memory_kernels")


def line_of(mark: str) -> int:
    return next(number for number, line in enumerate(LINES, 1) if line.endswith(f"# {mark}"))


def zeros(size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.int32)


def scratch(size: int) -> torch.Tensor:
    return torch.full((size,), POISON, dtype=torch.int32)


@SERIAL
@pytest.mark.parametrize(
    ("kernel", "kind", "argument", "indices", "read"),
    [
        ("scratch_to_output", FindingKind.UNINITIALISED_OUTPUT, "out", (4, 15), (4, 7)),
        ("scratch_sum", FindingKind.UNINITIALISED_OUTPUT, "out", (0, 1), (4, 4)),
        ("scratch_address", FindingKind.UNINITIALISED_ADDRESS, "out", (POISON, POISON), (4, 7)),
        ("scratch_branch", FindingKind.UNINITIALISED_BRANCH, None, None, (4, 4)),
    ],
)
def test_uninitialised_memory(
    kernels: ModuleType, kernel: str, kind: FindingKind, argument: str, indices: object, read: object, serial: bool
) -> None:
    with emulator.session(Options(serial=serial)) as log:
        memory = scratch(8)
        log.mark_fresh(memory, POISON)
        kernels.fill[(1,)](memory, 4, 8)
        getattr(kernels, kernel)[(2,)](memory, zeros(16), 4, *((8,) if kernel != "scratch_branch" else ()))
    finding = next(f for f in log.findings if f.line == line_of(f"fault: {kernel}"))
    assert (finding.kind, finding.kernel) == (kind, kernel)
    assert (finding.argument, finding.indices, finding.program) == (argument, indices, (0, 0, 0))
    assert finding.unwritten is not None
    assert (finding.unwritten.argument, finding.unwritten.indices) == ("scratch", read)
    assert "nobody wrote scratch[" in finding.message


@SERIAL
def test_written_memory_is_silent(kernels: ModuleType, serial: bool) -> None:
    with emulator.session(Options(serial=serial)) as log:
        memory, host = scratch(8), scratch(8)
        log.mark_fresh(memory, POISON)
        log.mark_fresh(host, POISON)
        kernels.fill[(1,)](memory, 4, 8)
        kernels.scratch_selected[(2,)](memory, zeros(16), 4, 8)  # undefined lanes are not chosen
        kernels.fill[(1,)](memory, 8, 8)  # one kernel writes what the next reads
        kernels.scratch_to_output[(2,)](memory, zeros(16), 8, 8)
        host.zero_()
        kernels.scratch_to_output[(2,)](host, zeros(16), 8, 8)
        kernels.scratch_to_output[(2,)](scratch(8), zeros(16), 8, 8)  # not marked: the caller's data
    assert log.findings == ()


def test_host_writes_are_told_by_the_pattern_and_bytes_by_the_version(kernels: ModuleType) -> None:
    with emulator.session() as log:
        memory = scratch(8)
        log.mark_fresh(memory, POISON)
        memory[:6] = 1
        kernels.scratch_to_output[(1,)](memory, zeros(8), 8, 8)
    (finding,) = log.findings
    assert finding.indices == (6, 7)
    with emulator.session() as log:
        narrow = torch.full((8,), 0x7B, dtype=torch.uint8)
        log.mark_fresh(narrow, 0x7B)
        kernels.scratch_to_output[(1,)](narrow, zeros(8), 8, 8)
        assert len(log.findings) == 1
        narrow[2] = 0x7B
        kernels.scratch_to_output[(1,)](narrow, zeros(8), 8, 8)
    assert len(log.findings) == 1


def test_storing_the_pattern_is_writing(kernels: ModuleType) -> None:
    with emulator.session() as log:
        memory = torch.full((8,), 3, dtype=torch.int32)
        log.mark_fresh(memory, 3)
        kernels.fill[(1,)](memory, 4, 8)
        kernels.scratch_to_output[(1,)](memory[:4], zeros(4), 4, 4)
    assert log.findings == ()


def races(kernels: ModuleType, kernel: str, serial: bool, programs: int, *arguments: object) -> tuple[Finding, ...]:
    with emulator.session(Options(serial=serial)) as log:
        getattr(kernels, kernel)[(programs,)](*arguments)
    return log.findings


@SERIAL
@pytest.mark.parametrize("programs", [4, 100])  # in one chunk, and in two
@pytest.mark.parametrize(
    ("kernel", "kind", "program", "other"),
    [
        ("different_values", FindingKind.RACING_STORES, 1, 0),
        ("read_of_neighbour", FindingKind.RACING_LOAD, None, 0),
        ("read_before_neighbour", FindingKind.RACING_LOAD, None, 0),
        ("ticket_too_early", FindingKind.RACING_LOAD, None, 0),
        ("last_one_sums_relaxed", FindingKind.RACING_LOAD, None, 0),
    ],
)
def test_races(
    kernels: ModuleType,
    kernel: str,
    kind: FindingKind,
    program: int | None,
    other: int,
    programs: int,
    serial: bool,
) -> None:
    tensors = {
        "different_values": (zeros(1), programs),
        "read_of_neighbour": (zeros(128), zeros(128), programs),
        "read_before_neighbour": (zeros(128), zeros(128), programs),
    }
    arguments = tensors.get(kernel, (zeros(128), zeros(1), zeros(1), programs, 128))
    found = races(kernels, kernel, serial, programs, *arguments)
    line = line_of(f"fault: {kernel}")
    finding = next(f for f in found if f.line == line)
    assert (finding.kind, finding.kernel) == (kind, kernel)
    assert finding.program == (programs - 1 if program is None else program, 0, 0)
    assert finding.other == (other, 0, 0)
    assert all(f.line == line or f.detail.endswith(f":{line}") for f in found), "both sides name the line"
    assert f"against program {finding.other}" in finding.message


@SERIAL
@pytest.mark.parametrize("programs", [4, 100])
def test_what_atomics_order_and_what_shows_no_difference_is_silent(
    kernels: ModuleType, programs: int, serial: bool
) -> None:
    for kernel, arguments in [
        ("same_value", (zeros(1), 7)),
        ("own_place", (zeros(128), 7)),
        ("last_one_sums", (zeros(128), zeros(1), zeros(1), programs, 128)),
        ("atomics_alone", (zeros(8), programs, 8)),
        ("fill", (zeros(8), 8, 8)),
    ]:
        for _ in range(2):  # the second launch knows what the first taught
            assert races(kernels, kernel, serial, programs, *arguments) == (), kernel


@SERIAL
def test_atomics_and_plain_stores_race(kernels: ModuleType, serial: bool) -> None:
    found = races(kernels, "atomic_and_plain", serial, 2, zeros(8), 3, 8)
    line = line_of("fault: atomic_and_plain")
    assert FindingKind.RACING_STORES in {f.kind for f in found}
    assert all(line == f.line or f.detail.endswith(f":{line}") for f in found)


@pytest.mark.parametrize("programs", [2, 64, 65, 200])
def test_races_do_not_depend_on_the_batch(kernels: ModuleType, programs: int) -> None:
    for kernel in ("read_of_neighbour", "read_before_neighbour"):
        anew = emulator.load_source(HERE / "planted_memory.py", "planted_memory_kernels")  # of no experience
        batched, serial, again = (
            races(of, kernel, way, programs, zeros(256), zeros(256), programs)
            for of, way in ((anew, False), (kernels, True), (anew, False))
        )
        assert serial == batched == again
        assert serial


def test_a_race_in_a_later_launch_of_a_known_kernel_is_found(kernels: ModuleType) -> None:
    for serial in (False, True):
        for _ in range(3):
            assert races(kernels, "read_of_neighbour", serial, 3, zeros(8), zeros(8), 3)


@SERIAL
def test_consequences_name_their_cause(kernels: ModuleType, serial: bool) -> None:
    with emulator.session(Options(serial=serial)) as log:
        kernels.out_of_bounds_stored[(1,)](zeros(12)[:6], zeros(16), 6, 8)
    load, _again, follows, *_ = log.findings
    assert (load.kind, load.line, load.caused_by) == (
        FindingKind.OUT_OF_BOUNDS_LOAD,
        line_of("fault: out_of_bounds_stored"),
        None,
    )
    assert (follows.kind, follows.line) == (FindingKind.UNDEFINED_OUTPUT, line_of("follows: out_of_bounds_stored"))
    assert (follows.caused_by, follows.indices) == (load.key, (6, 7))
    assert f"follows from out-of-bounds load at planted_memory.py:{load.line}" in follows.message
    stored = [f for f in log.findings if f.line == line_of("other: out_of_bounds_stored")]
    assert sorted((f.indices, f.caused_by is None) for f in stored) == [((8, 8), True), ((14, 15), False)]


@SERIAL
def test_a_wrapped_offset_is_the_root_of_what_follows(kernels: ModuleType, serial: bool) -> None:
    with emulator.session(Options(serial=serial)) as log:
        kernels.wrapped_out_of_bounds[(1,)](zeros(8), zeros(8), 2**15, 2**16, 8)
    wrap, outside, output = log.findings
    assert [f.kind for f in log.findings] == [
        FindingKind.INT32_WRAP_ADDRESS,
        FindingKind.OUT_OF_BOUNDS_LOAD,
        FindingKind.UNDEFINED_OUTPUT,
    ]
    assert wrap.caused_by is None
    assert outside.caused_by == output.caused_by == wrap.key


@SERIAL
def test_a_quotient_by_zero_is_the_cause_of_its_store(kernels: ModuleType, serial: bool) -> None:
    with emulator.session(Options(serial=serial)) as log:
        kernels.divided_stored[(1,)](torch.tensor([1, 0, 2, 0], dtype=torch.int32), zeros(4), 4)
    division, output = log.findings
    assert (division.kind, division.lanes) == (FindingKind.INTEGER_DIVISION_BY_ZERO, 2)
    assert (output.caused_by, output.indices) == (division.key, (1, 3))


def test_store_of_another_dtype_is_reported_where_no_cast_is_implied() -> None:
    out = torch.zeros(4, dtype=torch.bfloat16)

    def body(exact: bool) -> None:
        store(Buffer.of(out, "out").pointer(), constant(1.5, float32), None, exact=exact)

    with emulator.session() as log:
        launch("plain", lambda: body(False), (1, 1, 1), Experience())
        launch("exact", lambda: body(True), (2, 1, 1), Experience())
    (finding,) = log.findings
    assert (finding.kind, finding.kernel, finding.argument) == (FindingKind.STORE_DTYPE, "exact", "out")
    assert finding.detail == "a value of fp32 to elements of bf16"


def test_shared_memory_is_read_after_it_is_stored() -> None:
    written = torch.tensor([[True, True, False, True]])

    def body(read: torch.Tensor | None) -> None:
        undefined = shared_load("tile", written, read)
        assert (undefined is None) == (read is not None)

    with emulator.session() as log:
        launch("partly", lambda: body(torch.tensor([[True, True, False, False]])), (2, 1, 1), Experience())
        launch("whole", lambda: body(None), (2, 1, 1), Experience())
    (finding,) = log.findings
    assert (finding.kind, finding.kernel) == (FindingKind.SHARED_READ_BEFORE_STORE, "whole")
    assert (finding.argument, finding.indices, finding.extent, finding.lanes) == ("tile", (2, 2), (0, 3), 2)


@settings(max_examples=100, deadline=None)
@given(
    script=st.lists(
        st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9), st.integers(1, 2)), min_size=2, max_size=2),
        min_size=2,
        max_size=5,
    ),
    distinct=st.booleans(),
    block=st.sampled_from([1, 2]),
    budget=st.sampled_from([64 << 20, 64 * 4]),  # one chunk, or chunks of few programs
)
def test_races_of_random_programs(
    kernels: ModuleType, script: list[list[tuple[int, int, int]]], distinct: bool, block: int, budget: int
) -> None:
    """Found serially and batched alike, and where all stores differ, exactly where two programs meet."""
    ops, places, values = torch.tensor(script, dtype=torch.int32).permute(2, 0, 1).contiguous()
    if distinct:
        values = torch.arange(1, values.numel() + 1, dtype=torch.int32).reshape(values.shape)
    programs = len(script)
    row = torch.tensor([1, 2], dtype=torch.int32)  # one launch teaches which loads matter
    both = [torch.cat(pair) for pair in ((row, row), (row * 0, row * 0 + 5), (row, row))]
    kernels.scripted[(2,)](zeros(12), *both, zeros(4), 2, block)
    found, memories = [], []
    for serial in (True, False, True):
        memory, out = zeros(12), zeros(programs * block)
        with emulator.session(Options(serial=serial, batch_bytes=budget)) as log:
            kernels.scripted[(programs,)](memory, ops, places, values, out, 2, block)
        found.append(log.findings)
        memories.append((memory.tolist(), out.tolist()))
    assert found[0] == found[1] == found[2]
    assert memories[0] == memories[1]
    assert all(f.kind in (FindingKind.RACING_LOAD, FindingKind.RACING_STORES) for f in found[0])
    touched: dict[int, dict[int, set[int]]] = {}
    for program, steps in enumerate(script):
        for op, place, _ in steps:
            for lane in range(block if op else 0):
                touched.setdefault(place + lane, {}).setdefault(program, set()).add(op)
    meet = any(len(by) > 1 and any(2 in seen for seen in by.values()) for by in touched.values())
    if distinct:
        assert bool(found[0]) == meet
    assert meet or not found[0]
