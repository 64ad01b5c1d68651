"""Programs that part ways at a branch or a loop meet again behind it, and leave the bits of serial execution."""

from __future__ import annotations

import ast
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fuzz.engine import emulator
from fuzz.engine.emulator import FindingKind, Log, Options
from fuzz.engine.emulator.liveness import sites
from fuzz.engine.emulator.provenance import Origin, from_origin, rows_of, sources, united_masks

HERE = Path(__file__).parent
counted = st.lists(st.integers(0, 5), min_size=2, max_size=9)


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    return emulator.load_source(HERE / "meeting.py", "meeting_kernels")


@pytest.fixture(scope="module")
def gluon_kernels() -> ModuleType:
    return emulator.load_source(HERE / "gluon" / "programs.py", "meeting_gluon_kernels")


def both_ways(kernel: object, inputs: list[Tensor], outputs: list[Tensor], *rest: object) -> Log:
    """Launch one program for each element of the second input; the outputs agree bit for bit, and the findings do."""
    logs, results = [], []
    for serial in (True, False):
        copies = [output.clone() for output in outputs]
        with emulator.session(Options(serial=serial)) as log:
            kernel[(len(inputs[1]),)](*inputs, *copies, *rest)  # type: ignore[index]
        logs.append(log)
        results.append(copies)
    for one, other in zip(*results, strict=True):
        assert torch.equal(one.view(torch.int32), other.view(torch.int32))
    assert logs[0].findings == logs[1].findings
    return logs[1]


def data(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def numbers(items: list[int]) -> Tensor:
    return torch.tensor(items, dtype=torch.int32)


@settings(max_examples=30, deadline=None)
@given(kinds=counted, counts=counted, deep=st.booleans(), block=st.sampled_from([1, 8]), seed=st.integers(0, 99))
def test_nested_regions(
    kernels: ModuleType, kinds: list[int], counts: list[int], deep: bool, block: int, seed: int
) -> None:
    programs = min(len(kinds), len(counts))
    inputs = [data(seed, 16 * block), numbers(kinds[:programs]), numbers(counts[:programs])]
    outputs = [torch.zeros(programs, block), numbers([-1] * programs)]
    log = both_ways(kernels.regions, inputs, outputs, block, deep)
    assert log.findings == ()
    assert log.launches[0].batches == 1


@settings(max_examples=20, deadline=None)
@given(kinds=counted, counts=counted, seed=st.integers(0, 99))
def test_shared_memory_in_regions(gluon_kernels: ModuleType, kinds: list[int], counts: list[int], seed: int) -> None:
    programs = min(len(kinds), len(counts))
    inputs = [data(seed, 96), numbers(kinds[:programs]), numbers(counts[:programs])]
    log = both_ways(gluon_kernels.shared_in_regions, inputs, [torch.zeros(programs, 64)], 0)
    assert log.findings == ()
    assert log.launches[0].batches == 1


def test_a_copy_under_way_outlasts_a_region(gluon_kernels: ModuleType) -> None:
    inputs = [data(0, 4, 64), numbers([0, 1, 0, 2])]
    log = both_ways(gluon_kernels.copies_around_regions, inputs, [torch.zeros(4, 64)], False)
    assert log.findings == ()
    assert log.launches[0].batches == 1


def test_programs_that_wait_for_a_copy_in_a_region_run_apart(gluon_kernels: ModuleType) -> None:
    inputs = [data(0, 4, 64), numbers([0, 1, 0, 2])]
    log = both_ways(gluon_kernels.copies_around_regions, inputs, [torch.zeros(4, 64)], True)
    assert log.findings == ()
    assert log.launches[0].batches == 2


@pytest.mark.parametrize("kernel", ["other_types", "leaving_early"])
def test_programs_that_cannot_meet_run_apart(kernels: ModuleType, kernel: str) -> None:
    kinds = numbers([0, 1, 0, 2, 0])
    inputs = [data(1, 5), kinds] if kernel == "other_types" else [kinds]
    for _ in range(2):  # the second launch knows the place already
        copies = []
        for serial in (True, False):
            out = torch.zeros(5)
            with emulator.session(Options(serial=serial)) as log:
                getattr(kernels, kernel)[(5,)](*inputs, out)
            copies.append(out)
        assert torch.equal(*copies)
        assert log.launches[0].batches == 2


def test_undefined_lanes_of_one_arm_are_reported_behind_it(kernels: ModuleType) -> None:
    inputs = [data(2, 8), numbers([0, 1, 0, 1, 1])]
    log = both_ways(kernels.undefined_in_some, inputs, [torch.zeros(5, 8)], 6, 8)
    assert log.launches[0].batches == 1
    (finding,) = log.findings
    assert (finding.kind, finding.program, finding.lanes) == (FindingKind.UNDEFINED_OUTPUT, (1, 0, 0), 6)


def test_coverage_sees_every_trip_count(kernels: ModuleType) -> None:
    inputs = [data(3, 128), numbers([1, 1, 1]), numbers([0, 1, 4])]
    with emulator.session(Options(coverage=True)) as log:
        kernels.regions[(3,)](*inputs, torch.zeros(3, 8), numbers([0] * 3), 8, False)
    seen = log.coverage.functions["meeting.py:regions"]
    first_loop, first_condition = (min(found, key=int) for found in (seen.loops, seen.conditions))
    assert seen.loops[first_loop] == {"0", "1", "many"}
    assert seen.conditions[first_condition] == {"true"}


KERNEL = """
def kernel(x, n, FLAG: tl.constexpr):
    total = 0
    SIZE: tl.constexpr = FLAG * 2
    if SIZE > FLAG + 1:
        total = 1
    carried = x
    for i in range(n):
        passing = x + i
        if passing > 3:
            half = passing / 2
            total += half
        total += carried
        carried = passing
    y = [z for z in range(3)]
    if n:
        return total
    while total > 3:
        total -= n
    for j in range(n):
        x[j] = j
    return (lambda: total)()
"""


def test_variables_of_a_region_are_told_apart() -> None:
    (function,) = ast.parse(KERNEL).body
    assert isinstance(function, ast.FunctionDef)
    found = {site[0]: site[1:] for site in sites(function).values()}
    assert found == {
        "kernel:8:4": (("x",), ("total",), ("carried",), ("half", "i", "passing")),
        "kernel:10:8": (("passing",), ("total",), (), ("half",)),
        "kernel:18:4": (("n",), ("total",), (), ()),
    }


@given(st.lists(st.booleans(), min_size=2, max_size=8), st.lists(st.integers(0, 2), min_size=8, max_size=8))
def test_masks_survive_being_cut_and_put_together(lanes: list[bool], groups: list[int]) -> None:
    programs = len(lanes)
    mask = torch.tensor(lanes)[:, None].expand(programs, 3)
    offsets = torch.arange(3 * programs).reshape(programs, 3)
    traced = from_origin(mask, Origin("file", 1, "x"), offsets)
    group = torch.tensor(groups[:programs])
    rows = [(group == g).nonzero().flatten() for g in group.unique()]
    whole = united_masks([(r, rows_of(traced, r)) for r in rows], (programs, 3))
    assert whole is not None
    assert torch.equal(torch.as_tensor(whole).as_subclass(Tensor), mask)
    for (origin, source), (other, expected) in zip(sources(whole), sources(traced), strict=True):
        assert origin == other
        assert torch.equal(source.lanes, expected.lanes)
        showing = mask[:, 0]
        assert torch.equal(source.low[showing], expected.low[showing])
        assert torch.equal(source.high[showing], expected.high[showing])
