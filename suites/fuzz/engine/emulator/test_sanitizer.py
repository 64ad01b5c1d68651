"""A planted fault of each class is found and named by its line; its clean twin is silent."""

from pathlib import Path
from types import ModuleType

import pytest
import torch

from fuzz.engine import emulator
from fuzz.engine.emulator import FindingKind, MaskedLanes, Options

LINES = (Path(__file__).parent / "planted.py").read_text().splitlines()


def line_of(fault: str) -> int:
    return next(number for number, line in enumerate(LINES, 1) if line.endswith(f"# fault: {fault}"))


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


CASES = [
    ("load_past_end", "load_within", FindingKind.OUT_OF_BOUNDS_LOAD, "x", (5, 7)),
    ("store_past_end", "store_within", FindingKind.OUT_OF_BOUNDS_STORE, "out", (5, 7)),
    ("sum_of_undefined", "sum_of_selected", FindingKind.UNDEFINED_OUTPUT, "out", (0, 0)),
    ("undefined_address", "masked_address", FindingKind.UNDEFINED_ADDRESS, "out", (0, 0)),
    ("undefined_mask", "settled_mask", FindingKind.UNDEFINED_ADDRESS, "out", (5, 7)),
    ("undefined_branch", "defined_branch", FindingKind.UNDEFINED_BRANCH, None, None),
    ("wrapped_address", "wide_address", FindingKind.INT32_WRAP_ADDRESS, "x", (-(2**31), -(2**31) + 7)),
    ("divide_by_zero", "divide_by_nonzero", FindingKind.INTEGER_DIVISION_BY_ZERO, None, None),
]


def arguments(kernel: str) -> tuple[object, ...]:
    five, guarded = ints(1, 2, 0, 3, 4), torch.full((32,), 9, dtype=torch.int32)
    if kernel.startswith(("load", "sum")):
        return guarded[8:13], torch.zeros(8, dtype=torch.int32), 5, 8
    if kernel.startswith("store"):
        return guarded[8:13], 5, 4
    if kernel in ("undefined_address", "masked_address", "undefined_mask", "settled_mask"):
        return five, torch.zeros(8, dtype=torch.int32), 5, 8
    if kernel.endswith("branch"):
        return five, torch.zeros(8, dtype=torch.int32), 0
    if kernel in ("wrapped_address", "wide_address"):
        return torch.zeros(8, dtype=torch.int32), torch.zeros(8, dtype=torch.int32), 2**15, 2**16, 8
    return ints(1, 2, 0, 3, -1, 0, 1, 1), torch.zeros(8, dtype=torch.int32), 8


@pytest.mark.parametrize(("faulty", "clean", "kind", "argument", "indices"), CASES, ids=[c[0] for c in CASES])
@pytest.mark.parametrize("serial", [True, False], ids=["serial", "batched"])
def test_planted_fault_is_named_and_its_twin_silent(
    planted: ModuleType,
    faulty: str,
    clean: str,
    kind: FindingKind,
    argument: str,
    indices: object,
    serial: bool,
) -> None:
    with emulator.session(Options(serial=serial)) as log:
        getattr(planted, faulty)[(2,)](*arguments(faulty))
    finding = next(f for f in log.findings if f.kind is kind)
    assert (finding.kernel, finding.file, finding.line) == (faulty, "planted.py", line_of(faulty))
    assert (finding.argument, finding.indices) == (argument, indices)
    assert faulty in finding.message
    assert "planted.py" in finding.message
    assert "\n" not in finding.message
    with emulator.session(Options(serial=serial)) as log:
        getattr(planted, clean)[(2,)](*arguments(clean))
    assert log.findings == ()


def test_out_of_bounds_is_of_the_argument_not_of_its_storage(planted: ModuleType) -> None:
    storage = torch.full((32,), 9, dtype=torch.int32)
    with emulator.session() as log:
        planted.store_past_end[(1,)](storage[8:13], 5, 8)
    (finding,) = log.findings
    assert (finding.extent, finding.indices, finding.lanes) == ((0, 4), (5, 7), 3)
    assert storage.tolist() == [9] * 8 + [0, 1, 2, 3, 4] + [9] * 19


def test_extent_of_a_strided_argument_spans_its_reach(planted: ModuleType) -> None:
    storage = torch.arange(32, dtype=torch.int32)
    with emulator.session() as log:
        planted.load_past_end[(1,)](storage[4:32:4][:4], torch.zeros(8, dtype=torch.int32), 8, 8)
        planted.load_past_end[(1,)](storage[4:16:3][:2], torch.zeros(8, dtype=torch.int32), 4, 8)
    outside = [f for f in log.findings if f.kind is FindingKind.OUT_OF_BOUNDS_LOAD]
    assert [(f.extent, f.indices) for f in outside] == [((0, 3), (4, 7))]


def test_empty_argument_has_no_element(planted: ModuleType) -> None:
    empty = torch.empty(0, dtype=torch.int32)
    with emulator.session() as log:
        planted.load_past_end[(1,)](empty, torch.zeros(8, dtype=torch.int32), 0, 8)
        planted.store_past_end[(1,)](empty, 0, 8)
    assert [f.kind for f in log.findings] == [FindingKind.OUT_OF_BOUNDS_LOAD, FindingKind.OUT_OF_BOUNDS_STORE]


def test_findings_of_one_line_are_merged_and_counted(planted: ModuleType) -> None:
    logs = []
    for serial in (True, False):
        with emulator.session(Options(serial=serial)) as log:
            planted.store_past_end[(4,)](torch.zeros(5, dtype=torch.int32), 5, 4)
        logs.append(log.findings)
    assert logs[0] == logs[1]
    (finding,) = logs[0]
    assert (finding.program, finding.lanes, finding.indices) == ((1, 0, 0), 11, (5, 15))


def test_line_is_that_of_the_helper_and_kernel_the_launched_one(planted: ModuleType) -> None:
    with emulator.session() as log:
        planted.load_through_helper[(1,)](ints(1, 2), ints(0), 2)
    (finding,) = log.findings
    assert (finding.kernel, finding.line) == ("load_through_helper", line_of("helper_load"))


def test_masked_lanes_may_read_as_zero(planted: ModuleType) -> None:
    out = torch.full((8,), 5, dtype=torch.int32)
    with emulator.session(Options(masked_lanes=MaskedLanes.ZERO)) as log:
        planted.sum_of_undefined[(1,)](ints(1, 2, 3, 4, 5), out, 5, 8)
    assert log.findings == ()
    assert out[0] == 0


def test_findings_outside_a_session_raise(planted: ModuleType) -> None:
    with pytest.raises(emulator.FindingsError, match="out-of-bounds store in store_past_end") as caught:
        planted.store_past_end[(2,)](torch.zeros(5, dtype=torch.int32), 5, 4)
    assert caught.value.findings[0].indices == (5, 7)
    planted.store_within[(2,)](torch.zeros(5, dtype=torch.int32), 5, 4)


def test_sessions_nest(planted: ModuleType) -> None:
    with emulator.session() as outer:
        with emulator.session() as inner:
            planted.store_past_end[(2,)](torch.zeros(5, dtype=torch.int32), 5, 4)
        planted.store_within[(2,)](torch.zeros(5, dtype=torch.int32), 5, 4)
    assert (len(inner.findings), [launch.kernel for launch in inner.launches]) == (1, ["store_past_end"])
    assert (outer.findings, [launch.kernel for launch in outer.launches]) == ((), ["store_within"])


def test_unknown_name_says_which_where_and_how(planted: ModuleType) -> None:
    expected = rf"kernel unknown_name, planted\.py:{line_of('unknown_name')}: tl\.frobnicate is not known"
    with emulator.session(), pytest.raises(emulator.UnknownName, match=expected) as caught:
        planted.unknown_name[(1,)](torch.zeros(1))
    assert "lang" in str(caught.value)
