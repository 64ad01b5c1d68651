"""Inputs of attention kernels as the tests' launchers take them: ragged batches, slots and pages."""

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from fuzz.engine import emulator

# Relative rounding of one number to each type; fp32 stands for sums of some hundred products.
ROUNDING = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-21, torch.float8_e4m3fn: 2.0**-4}


@dataclass(frozen=True)
class Shape:
    """Heads and head dims of one attention problem, its types, and the dequantisation factors of its cache."""

    heads: int = 4
    kv_heads: int = 2
    dim: int = 64
    dim_v: int = 64
    dtype: torch.dtype = torch.float16
    cache: torch.dtype | None = None
    k_scale: float = 1.0
    v_scale: float = 1.0

    @property
    def cached(self) -> torch.dtype:
        return self.cache or self.dtype


@dataclass(frozen=True)
class Result:
    """What a kernel gave, with what the reference needs: keys and values in float64, one tensor a request."""

    out: Tensor
    lse: Tensor | None
    q: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    log: emulator.Log


class Source:
    """Standard normal numbers, the same for the same seed."""

    def __init__(self, seed: int = 0) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, generator=self._generator).to(dtype)

    def order(self, count: int) -> Tensor:
        return torch.randperm(count, generator=self._generator)


def starts(lengths: list[int]) -> Tensor:
    """Offsets of a ragged batch, int32 [requests + 1]."""
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def ints(items: list[int]) -> Tensor:
    return torch.tensor(items, dtype=torch.int32)


def unset(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Memory that must not reach an output: NaN."""
    return torch.full(shape, torch.nan).to(dtype)


def tables(lengths: list[int], page: int, source: Source, spare: int = 2) -> tuple[Tensor, int]:
    """A page table int32 [requests, pages of the longest], rows filled with page 0, and the pool's page count."""
    needed = [-(-length // page) for length in lengths]
    pages = sum(needed) + spare
    order, table, used = source.order(pages).int(), torch.zeros(len(lengths), max(needed), dtype=torch.int32), 0
    for row, count in enumerate(needed):
        table[row, :count] = order[used : used + count]
        used += count
    return table, pages
