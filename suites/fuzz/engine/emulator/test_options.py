"""Fidelity options change what they say, and nothing that depends on the batch."""

from types import ModuleType

import numpy as np
import pytest
import torch

from fuzz.engine import emulator
from fuzz.engine.emulator import Accumulation, Fp8Overflow, MaskedLanes, Options, fidelity_variants
from fuzz.engine.emulator.accumulation import accumulated


def matmul(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.matmul(x, y)


def run(
    x: torch.Tensor, y: torch.Tensor, start: torch.Tensor | None, how: Accumulation, chunk: int = 4
) -> torch.Tensor:
    return accumulated(x, y, start, Options(accumulation=how, dot_chunk=chunk), matmul)


def test_sequential_rounds_after_each_chunk_and_begins_with_the_accumulator() -> None:
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(2, 3, 12, generator=generator), torch.randn(2, 12, 5, generator=generator)
    start = torch.randn(1, 3, 5, generator=generator) * 100
    expected = start.numpy().astype(np.float32)
    for k in range(0, 12, 4):
        step = x[..., k : k + 4].double().numpy() @ y[:, k : k + 4].double().numpy()
        expected = (expected.astype(np.float64) + step).astype(np.float32)
    result = run(x, y, start, Accumulation.SEQUENTIAL)
    assert torch.equal(result, torch.from_numpy(expected))
    assert not torch.equal(result, run(x, y, start, Accumulation.SEQUENTIAL, chunk=1))


def test_tree_adds_halves_and_float64_rounds_once() -> None:
    big, one = 2.0**24, 1.0
    x = torch.tensor([[[big, one, -big, one]]])
    y = torch.ones(1, 4, 1)
    zero = torch.zeros(1, 1, 1)
    assert run(x, y, None, Accumulation.TREE).item() == 1.0  # 2^24 + 1 rounds to 2^24, 1 - 2^24 is exact
    assert run(x, y, zero, Accumulation.SEQUENTIAL, chunk=1).item() == 1.0
    assert run(x, y, zero, Accumulation.SEQUENTIAL, chunk=4).item() == 2.0
    assert run(x, y, None, Accumulation.FLOAT64).item() == 2.0
    assert run(x, y, torch.full((1, 1, 1), 5.0), Accumulation.TREE).item() == 6.0


@pytest.mark.parametrize("how", list(Accumulation))
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_products_do_not_depend_on_the_batch(programs: ModuleType, how: Accumulation, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(7)
    for m, n, k in [(16, 16, 32), (1, 16, 64), (1, 1, 128)]:
        a, b = (torch.randn(5, size, k, generator=generator).to(dtype) for size in (m, n))
        outs = []
        for serial in (True, False):
            out = torch.zeros(5, m, m)
            with emulator.session(Options(serial=serial, accumulation=how)):
                programs.products[(5,)](a, b, out, m, n, k)
            outs.append(out)
        assert torch.equal(*outs)


def test_orders_differ_within_rounding(programs: ModuleType) -> None:
    generator = torch.Generator().manual_seed(1)
    a, b = torch.randn(1, 16, 128, generator=generator), torch.randn(1, 16, 128, generator=generator)
    results = []
    for how in Accumulation:
        out = torch.zeros(1, 16, 16)
        with emulator.session(Options(accumulation=how)):
            programs.products[(1,)](a, b, out, 16, 16, 128)
        results.append(out)
    assert all(torch.allclose(results[0], other, rtol=1e-4, atol=1e-3) for other in results)
    assert len({tuple(result.flatten().tolist()) for result in results}) == len(Accumulation)


def test_variants_differ_from_the_base_in_one_choice() -> None:
    base = Options(serial=True, fp8_overflow=Fp8Overflow.NAN)
    variants = fidelity_variants(base)
    assert variants[0] == base
    assert len(variants) == len(set(variants)) == 1 + (len(MaskedLanes) + len(Fp8Overflow) + len(Accumulation) - 3)
    assert all(variant.serial for variant in variants)
    with pytest.raises(ValueError, match="dot_chunk is 0"):
        Options(dot_chunk=0)
