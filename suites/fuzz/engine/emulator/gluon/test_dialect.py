"""Each part of the Gluon dialect: a planted fault is found and named by its line, its clean twin is silent."""

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from fuzz.engine import emulator
from fuzz.engine.emulator import FindingKind, Options

LINES = (Path(__file__).parent / "faults.py").read_text().splitlines()


def line_of(fault: str) -> int:
    return next(number for number, line in enumerate(LINES, 1) if line.endswith(f"# fault: {fault}"))


def arguments() -> tuple[torch.Tensor, torch.Tensor, int]:
    guarded = torch.arange(100, 132, dtype=torch.int32)
    return guarded[8:16], torch.zeros(8, dtype=torch.int32), 8


CASES = [
    ("read_before_store", "read_after_store", FindingKind.SHARED_READ_BEFORE_STORE, None, 8),
    ("half_stored", "both_halves_stored", FindingKind.SHARED_READ_BEFORE_STORE, None, 2),
    ("copy_not_awaited", "copy_awaited", FindingKind.SHARED_READ_BEFORE_STORE, None, 8),
    ("store_wide", "store_cast", FindingKind.STORE_DTYPE, "out", 8),
    ("buffer_past_end", "buffer_masked", FindingKind.OUT_OF_BOUNDS_LOAD, "x", 8),
    ("copy_past_end", "copy_masked", FindingKind.OUT_OF_BOUNDS_LOAD, "x", 8),
    ("wrapped_offset", "wide_offset", FindingKind.INT32_WRAP_ADDRESS, "x", 8),
    ("undefined_through_shared", "defined_through_shared", FindingKind.UNDEFINED_OUTPUT, "out", 3),
]


@pytest.mark.parametrize(("faulty", "clean", "kind", "argument", "lanes"), CASES, ids=[case[0] for case in CASES])
@pytest.mark.parametrize("serial", [True, False], ids=["serial", "batched"])
def test_planted_fault_is_named_and_its_twin_silent(
    faults: ModuleType,
    faulty: str,
    clean: str,
    kind: FindingKind,
    argument: str | None,
    lanes: int,
    serial: bool,
) -> None:
    with emulator.session(Options(serial=serial)) as log:
        getattr(faults, faulty)[(2,)](*arguments())
    (finding,) = [finding for finding in log.findings if finding.kind is kind]
    assert (finding.kernel, finding.file, finding.line) == (faulty, "faults.py", line_of(faulty))
    assert (finding.argument, finding.program, finding.lanes) == (argument, (0, 0, 0), 2 * lanes)
    with emulator.session(Options(serial=serial)) as log:
        getattr(faults, clean)[(2,)](*arguments())
    assert log.findings == ()


def test_masked_lanes_of_a_buffer_load_read_as_zero(faults: ModuleType) -> None:
    x, out, _ = arguments()
    with emulator.session() as log:
        faults.buffer_masked[(1,)](x, out, 5)
    assert log.findings == ()
    # Lanes 5 to 7 were masked off, and stored what they read plus one.
    assert out.tolist() == [108, 109, 110, 111, 112, 1, 1, 1]


def test_a_masked_copy_to_shared_memory_zeroes_only_as_a_buffer_load(faults: ModuleType) -> None:
    """`certify` has both; here the difference shows as a finding: lanes left alone were never stored to."""
    text = (
        "from triton.experimental import gluon\n"
        "from triton.experimental.gluon import language as gl\n"
        "@gluon.jit\n"
        "def kernel(x, out, n, BUFFER: gl.constexpr):\n"
        "    lanes = gl.arange(0, 8)\n"
        "    shared = gl.allocate_shared_memory(gl.int32, [8], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))\n"
        "    if BUFFER:\n"
        "        gl.amd.cdna4.async_copy.buffer_load_to_shared(shared, x, lanes, mask=lanes < n)\n"
        "    else:\n"
        "        gl.amd.cdna4.async_copy.global_load_to_shared(shared, x + lanes, mask=lanes < n)\n"
        "    gl.amd.cdna4.async_copy.wait_group(0)\n"
        "    gl.store(out + lanes, shared.load(None))\n"
    )
    kernel = emulator.load_text(text, "masked_copies").kernel
    found = {}
    for buffered in (True, False):
        x, out, _ = arguments()
        with emulator.session() as log:
            kernel[(1,)](x, out, 5, buffered)
        found[buffered] = [(finding.kind, finding.lanes) for finding in log.findings]
        assert out.tolist() == [108, 109, 110, 111, 112, 0, 0, 0]
    assert found[True] == []
    assert found[False] == [(FindingKind.SHARED_READ_BEFORE_STORE, 3), (FindingKind.UNDEFINED_OUTPUT, 3)]


@pytest.mark.parametrize(
    ("kernel", "name"), [("unknown_name", "gl.frobnicate"), ("unknown_vendor_name", "gl.amd.cdna4.frobnicate")]
)
def test_unknown_name_says_which_where_and_how(faults: ModuleType, kernel: str, name: str) -> None:
    with emulator.session(), pytest.raises(emulator.UnknownName) as caught:
        getattr(faults, kernel)[(1,)](*arguments())
    message = str(caught.value)
    assert message.startswith(f"kernel {kernel}, faults.py:{line_of(kernel)}: {name} is not known")
    assert "gluon/table" in message


def test_an_import_that_no_release_offers_fails_as_it_does_there() -> None:
    """Sources then take their own fallback."""
    with pytest.raises(ImportError, match="sched_barrier"):
        emulator.load_text("from triton.experimental.gluon.language.amd.cdna3 import sched_barrier\n", "unreleased")


def test_a_fork_has_the_same_language() -> None:
    text = (
        "import tokenspeed_triton.experimental.gluon.language as gl\n"
        "from tokenspeed_triton import language as tl\n"
        "from tokenspeed_triton.experimental import gluon\n"
        "from tokenspeed_triton.language.core import _aggregate as aggregate\n"
        "from triton.experimental.gluon import language as same\n"
    )
    module = emulator.load_text(text, "forked")
    assert module.gl.load is module.same.load is module.tl.load


def test_buffer_offsets_are_32_bit(faults: ModuleType) -> None:
    with emulator.session(), pytest.raises(emulator.KernelError, match="int32 or uint32 offsets, not int64"):
        faults.wide_offsets[(1,)](*arguments())


def product_inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    a, b = (torch.randint(-8, 9, (4, 16, 32), generator=generator).half() / 8 for _ in range(2))
    return a, b, torch.tensor([2, 0, 4, 2, 1, 0], dtype=torch.int32)


@pytest.mark.parametrize("serial", [True, False], ids=["serial", "batched"])
def test_pipelined_product_splits_by_trip_count(programs: ModuleType, serial: bool) -> None:
    a, b, tiles = product_inputs()
    out = torch.full((6, 16, 16), -1.0)
    with emulator.session(Options(serial=serial)) as log:
        programs.pipelined_product[(6,)](a, b, tiles, out, 32)
    assert log.findings == ()
    assert log.launches[0].batches == (6 if serial else 4)
    for program, count in enumerate(tiles.tolist()):
        exact = (a.double() @ b.double().transpose(1, 2))[:count].sum(0)
        assert torch.equal(out[program].double(), exact if count else torch.full((16, 16), -1.0).double())


@pytest.mark.parametrize("serial", [True, False], ids=["serial", "batched"])
def test_aggregates_methods_and_a_reduction_of_a_pair(programs: ModuleType, serial: bool) -> None:
    x = torch.randint(-9, 10, (3, 16, 32), generator=torch.Generator().manual_seed(1)).float()
    out = torch.zeros(3, 16, 2)
    with emulator.session(Options(serial=serial)) as log:
        programs.rows_summarised[(3,)](x, out)
    assert log.findings == ()
    assert torch.equal(out, torch.stack([x.amax(2), x.sum(2)], 2))


def test_a_compile_time_assertion_refuses_the_kernel(programs: ModuleType) -> None:
    out = torch.zeros(1, dtype=torch.int32)
    with emulator.session():
        programs.compile_time_check[(1,)](out, 32)
        assert out.item() == 32
        with pytest.raises(emulator.KernelError, match=r"kernel compile_time_check.*size is 16 or 32"):
            programs.compile_time_check[(1,)](out, 17)


def test_an_aggregate_needs_all_its_fields(programs: ModuleType) -> None:
    with (
        emulator.session(),
        pytest.raises(emulator.KernelError, match="Lacking: its __init__ leaves out field forgotten"),
    ):
        programs.incomplete[(1,)](torch.zeros(1, dtype=torch.int32))


def refused(body: str, message: str, *given: Any) -> None:
    """A kernel of these statements is refused with the message; `x`, `lanes`, `shared` [8] of int32 are at hand."""
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    text = (
        "from triton.experimental import gluon\n"
        "from triton.experimental.gluon import language as gl\n"
        "@gluon.jit\n"
        "def kernel(x):\n"
        "    lanes = gl.arange(0, 8)\n"
        "    shared = gl.allocate_shared_memory(gl.int32, [8], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))\n"
    )
    kernel = emulator.load_text(text + lines, "refused_kernel").kernel
    with emulator.session(), pytest.raises(emulator.KernelError, match=message):
        kernel[(1,)](torch.zeros(8, dtype=torch.int32))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("shared.store(lanes.to(gl.float32))", "shared memory of int32 cannot take fp32"),
        ("shared.store(gl.arange(0, 4))", r"shape \[8\] cannot take \[4\]"),
        ("shared.index(8)", "none of index 8"),
        ("shared.slice(4, 8)", r"slice 4 \+ 8 along axis 0 leaves"),
        ("shared.permute([1])", "do not permute"),
        ("shared.reshape([4])", "cannot reshape"),
        ("shared.slice(0, 4)._reinterpret(gl.int64, [8], shared.layout)", "16 bytes cannot be seen as"),
        ("gl.amd.cdna4.async_copy.buffer_load_to_shared(shared, x, gl.arange(0, 4))", "does not fit"),
        ("gl.amd.cdna3.buffer_load(x + lanes, lanes)", "scalar pointer"),
        ("gl.amd.cdna3.buffer_load(x, 3)", "block of int32 or uint32 offsets, not int"),
        ("gl.amd.cdna3.buffer_load(x, lanes, other=0)", "only together with a mask"),
        ("gl.amd.cdna3.buffer_store(1, x, lanes)", r"block \[\] to offsets \[8\]"),
        ("gl.amd.cdna3.mfma(lanes[:, None], lanes[None, :], None)", "needs an accumulator"),
        ("gl.amd.cdna3.mfma(lanes[:, None], lanes[None, :], lanes)", r"accumulator \[8\] does not fit"),
        ("gl.amd.cdna4.mfma_scaled(lanes, None, 'e3m2', lanes, None, 'e4m3', None)", "format e3m2"),
        ("gl.amd.cdna4.mfma_scaled(lanes, None, 'e4m3', lanes, None, 'e4m3', None)", "cannot be int32"),
    ],
)
def test_what_gluon_refuses_is_refused(body: str, message: str) -> None:
    refused(body, message)


@pytest.mark.parametrize("serial", [True, False], ids=["serial", "batched"])
def test_shared_memory_keeps_why_lanes_are_undefined(faults: ModuleType, serial: bool) -> None:
    x, out = torch.full((8,), 7, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
    with emulator.session(Options(serial=serial)) as log:
        log.mark_fresh(x, 7)
        faults.copied_and_sliced[(2,)](x, out, 4)
    (finding,) = log.findings
    assert (finding.kind, finding.argument, finding.indices) == (FindingKind.UNINITIALISED_OUTPUT, "out", (0, 1))
    assert finding.unwritten is not None
    assert (finding.unwritten.argument, finding.unwritten.indices) == ("x", (0, 3))


def test_what_follows_from_a_read_before_store_says_so(faults: ModuleType) -> None:
    text = (
        "from triton.experimental import gluon\n"
        "from triton.experimental.gluon import language as gl\n"
        "@gluon.jit\n"
        "def kernel(out):\n"
        "    shared = gl.allocate_shared_memory(gl.int32, [8], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))\n"
        "    gl.store(out + gl.arange(0, 8), shared.load(None))\n"
    )
    with emulator.session() as log:
        emulator.load_text(text, "follows").kernel[(1,)](torch.zeros(8, dtype=torch.int32))
    read, stored = log.findings
    assert read.kind is FindingKind.SHARED_READ_BEFORE_STORE
    assert (stored.kind, stored.caused_by) == (FindingKind.UNDEFINED_OUTPUT, read.key)
