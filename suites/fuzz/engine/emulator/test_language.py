"""Features of the language in kernels of ours: values, taints, and the same bits in batches as one by one."""

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from fuzz.engine import emulator
from fuzz.engine.emulator import FindingKind, Options, dtypes

SERIAL = pytest.mark.parametrize("serial", [False, True], ids=["batched", "serial"])


@pytest.fixture(scope="module")
def features() -> ModuleType:
    return emulator.load_source(Path(__file__).with_name("features.py"), "feature_kernels")


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


@SERIAL
def test_block_pointers(features: ModuleType, serial: bool) -> None:
    m, n, k = 37, 21, 53
    a, b, out = numbers(m, k), numbers(k, n), torch.full((m, n), torch.nan)
    with emulator.session(Options(serial=serial)) as log:
        features.block_pointers[(3, 2)](a, b, out, m, n, k, "zero", BLOCK=16)
    assert log.findings == ()
    assert (out.double() - a.double() @ b.double()).abs().max() < 2.0**-16


def test_block_pointers_without_padding_are_undefined_beyond_the_edge(features: ModuleType) -> None:
    a, b, out = numbers(16, 20), numbers(20, 16), torch.zeros(16, 16)
    with emulator.session() as log:
        features.block_pointers[(1, 1)](a, b, out, 16, 16, 20, "", BLOCK=16)
    assert [(f.kind, f.argument) for f in log.findings] == [(FindingKind.UNDEFINED_OUTPUT, "out")]


@SERIAL
def test_descriptors(features: ModuleType, serial: bool) -> None:
    source, target = numbers(20, 12), torch.zeros(20, 12)
    with emulator.session(Options(serial=serial)) as log:
        features.descriptors[(3, 2)](features.describe(source, 8), target, 20, 12, BLOCK=8)
    assert log.findings == ()
    assert torch.equal(target, 2 * source)


def test_a_descriptor_needs_unit_stride(features: ModuleType) -> None:
    with emulator.session(), pytest.raises(emulator.KernelError, match="last stride of a tensor descriptor must be 1"):
        features.descriptors[(1, 1)](features.describe(numbers(8, 8).T, 8), torch.zeros(8, 8), 8, 8, BLOCK=8)


@SERIAL
def test_scans(features: ModuleType, serial: bool) -> None:
    x = torch.randint(-9, 9, (5, 16), generator=torch.Generator().manual_seed(2), dtype=torch.int32)
    sums, best, place, ordered = (torch.zeros_like(x) for _ in range(4))
    with emulator.session(Options(serial=serial)) as log:
        features.scans[(5,)](x, sums, best, place, ordered, N=16)
    assert log.findings == ()
    assert torch.equal(sums, x.cumsum(1).int())
    assert torch.equal(best, x.cummax(1).values)
    latest = [[max(j for j in range(i + 1) if row[j] == max(row[: i + 1])) for i in range(16)] for row in x.tolist()]
    assert place.tolist() == latest
    assert torch.equal(ordered, x.sort(1).values)


@pytest.mark.parametrize(("order", "lanes"), [(False, (6, 7)), (True, (0, 7))], ids=["cumsum", "sort"])
def test_undefined_lanes_spread_through_scans(features: ModuleType, order: bool, lanes: tuple[int, int]) -> None:
    with emulator.session() as log:
        features.undefined_scan[(1,)](torch.ones(8), torch.zeros(8), 6, order)
    assert [(f.kind, f.indices) for f in log.findings] == [(FindingKind.UNDEFINED_OUTPUT, lanes)]
    with emulator.session() as log:
        features.undefined_scan[(1,)](torch.ones(8), torch.zeros(8), 8, order)
    assert log.findings == ()


@SERIAL
def test_a_lock(features: ModuleType, serial: bool) -> None:
    lock, total, x = torch.zeros(1, dtype=torch.int32), torch.zeros(1), numbers(9)
    with emulator.session(Options(serial=serial)) as log:
        features.spin[(9,)](lock, total, x)
    expected = torch.zeros(1)
    for item in x:
        expected += item
    assert torch.equal(total, expected)
    assert log.launches[0].batches == 9


def test_annotated_scalars(features: ModuleType) -> None:
    out = torch.zeros(3, dtype=torch.int64)
    with emulator.session() as log:
        features.typed[(1,)](out, 3, 7, 2)
    assert log.findings == ()
    assert out.tolist() == [3 * 2**32, 21, 16]


@SERIAL
def test_helpers(features: ModuleType, serial: bool) -> None:
    x = torch.tensor([[1.0, -1, 2, -3], [1, 2, 3, 4], [-1, -1, -1, -1]])
    out = torch.zeros(6, dtype=torch.int32)
    with emulator.session(Options(serial=serial)) as log:
        features.helpers[(3,)](x, out, 4, STRICT=False)
    assert log.findings == ()
    assert out.tolist() == [1, 3, -1, 5, 0, 4]


def test_device_functions(features: ModuleType) -> None:
    x, out = numbers(8), torch.zeros(8)
    features.device_functions[(1,)](x, out, N=8)
    assert (out.double() - x.double().tanh() - x.double().exp2()).abs().max() < 2.0**-20


def test_pruned_configurations_and_chained_heuristics(features: ModuleType) -> None:
    out = torch.zeros(1, dtype=torch.int32)
    features.pruned[lambda arguments: (arguments["BLOCK"] // 8,)](out, 20)
    assert out.item() == 8 * 100 + 4 * 10 + 1
    with pytest.raises(emulator.KernelError, match="no configuration left"):
        features.pruned[(1,)](out, 3)


def test_host_code_imports_the_substitute_when_it_runs(features: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    for real in (None, ModuleType("triton")):
        monkeypatch.setitem(sys.modules, "triton", real)
        assert features.later(9) == (3, dtypes.float32, "3.6.0")
        assert sys.modules["triton"] is real
