"""Coverage names exactly what ran: the same serially and batched, merged, and through JSON."""

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from fuzz.engine import emulator
from fuzz.engine.emulator import Coverage, Options

HERE = Path(__file__).parent
LINES = (HERE / "covered.py").read_text().splitlines()
KERNEL, HELPER = "covered.py:branches", "covered.py:helper"
SERIAL = pytest.mark.parametrize("serial", [True, False], ids=["serial", "batched"])


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    return emulator.load_source(HERE / "covered.py", "covered_kernels")


def line_of(mark: str) -> int:
    return next(number for number, line in enumerate(LINES, 1) if line.endswith(f"# line: {mark}"))


def run(kernels: ModuleType, trips: list[int], n: int, flag: bool, serial: bool, grid: int | None = None) -> Coverage:
    out = torch.zeros(8, dtype=torch.int32)
    x = torch.tensor(trips, dtype=torch.int32)
    with emulator.session(Options(serial=serial, coverage=True)) as log:
        kernels.branches[(grid or len(trips),)](x, out, n, 4, flag)
    return log.coverage


@SERIAL
def test_one_program(kernels: ModuleType, serial: bool) -> None:
    coverage = run(kernels, [2, 0, 0, 0], 4, False, serial, grid=1)
    function, missing = coverage.functions[KERNEL], coverage.missing()
    assert missing[KERNEL]["lines"] == sorted((line_of("flagged"), line_of("while") + 1))
    assert missing[KERNEL]["conditions"] == {
        str(line_of("if_flag")): ["true"],
        str(line_of("elif")): ["false"],
        str(line_of("if_last")): ["false"],
    }
    assert function.loops == {
        str(line_of("for")): {"many"},
        str(line_of("while")): {"0"},
        str(line_of("broken")): {"1"},
    }
    assert missing[KERNEL]["masks"] == {f"load {line_of('load')}": ["some", "none"]}
    assert function.possible[f"store {line_of('store')}"] == {"all"}
    assert missing[HELPER] == {
        "lines": [line_of("helper_true")],
        "conditions": {str(line_of("helper_if")): ["true"]},
        "loops": {},
        "masks": {},
    }
    assert line_of("inside") not in function.lines, "a statement of several lines counts once"


@pytest.mark.parametrize(
    ("trips", "n", "flag"), [([0, 1, 2, 70], 4, False), ([0, 1, 0, 1], 2, True), ([3, 3, 3, 3], 0, True)]
)
def test_batches_cover_what_their_programs_cover(kernels: ModuleType, trips: list[int], n: int, flag: bool) -> None:
    serial, batched = (run(kernels, trips, n, flag, way).to_dict() for way in (True, False))
    assert serial == batched


def test_divergent_programs_show_every_outcome(kernels: ModuleType) -> None:
    function = run(kernels, [0, 1, 2, 70], 4, False, serial=False).functions[KERNEL]
    assert function.loops[str(line_of("for"))] == {"0", "1", "many"}
    assert function.loops[str(line_of("while"))] == {"0", "many"}


def test_merging_fills_gaps_and_json_loses_nothing(kernels: ModuleType) -> None:
    total = Coverage()
    runs = [run(kernels, [0, 1, 2, 90], n, flag, False) for n, flag in [(4, False), (2, True), (0, True), (0, False)]]
    for each in runs:
        total.merge(Coverage.from_dict(json.loads(json.dumps(each.to_dict()))))
    assert total.missing()[KERNEL]["lines"] == []
    assert total.missing()[KERNEL]["masks"] == {f"store {line_of('flagged')}": ["all"]}
    assert total.to_dict() == Coverage.from_dict(total.to_dict()).to_dict()
    before = total.to_dict()
    total.merge(runs[0])
    assert total.to_dict() == before


def test_off_it_collects_nothing_and_a_tracer_outlives_it(kernels: ModuleType) -> None:
    with emulator.session() as log:
        kernels.branches[(1,)](torch.zeros(4, dtype=torch.int32), torch.zeros(8, dtype=torch.int32), 4, 4, False)
    assert log.coverage.functions == {}

    def tracer(*_: object) -> None:
        return None

    previous = sys.gettrace()
    sys.settrace(tracer)
    try:
        run(kernels, [0, 0, 0, 0], 4, False, False)
        assert sys.gettrace() is tracer
    finally:
        sys.settrace(previous)


def test_a_chunk_that_is_taken_back_counts_once(kernels: ModuleType) -> None:
    """Programs that meet run anew, one by one; what the failed batch saw is dropped."""
    serial, batched = (run(kernels, [5, 1, 0, 2], 4, True, way).to_dict() for way in (True, False))
    assert serial == batched
