"""What the host wrote into memory that was handed out unwritten, as it is inferred from the pattern."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fuzz.engine.emulator.fresh import FreshMemory
from oracle.bits import bits

PATTERNS = {torch.uint8: 0x7B, torch.bfloat16: 0x7149, torch.float16: 0x7BF0, torch.float32: 0x7149F2CA}


def handed_out(dtype: torch.dtype, count: int) -> tuple[Tensor, FreshMemory]:
    tensor = torch.empty(count, dtype=dtype)
    bits(tensor).fill_(PATTERNS[dtype])
    return tensor, FreshMemory(tensor, PATTERNS[dtype])


def unwritten(memory: FreshMemory, size: int) -> list[int]:
    marks = memory.marks()
    return [] if marks is None else marks.view(-1, size).any(1).nonzero().flatten().tolist()


@pytest.mark.parametrize("dtype", PATTERNS)
def test_what_nobody_wrote_is_unwritten(dtype: torch.dtype) -> None:
    tensor, memory = handed_out(dtype, 16)
    assert unwritten(memory, dtype.itemsize) == list(range(16))
    bits(tensor)[:8] = 3
    assert unwritten(memory, dtype.itemsize) == list(range(8, 16))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float16])
def test_a_narrow_value_that_happens_to_be_the_pattern_counts_as_written(dtype: torch.dtype) -> None:
    tensor, memory = handed_out(dtype, 16)
    data = torch.arange(16, dtype=bits(tensor).dtype)
    data[[5, 11]] = PATTERNS[dtype]
    bits(tensor).copy_(data)
    assert unwritten(memory, dtype.itemsize) == []


def test_a_short_last_word_counts_as_written_once_the_host_has_written() -> None:
    tensor, memory = handed_out(torch.bfloat16, 3)
    tensor[0] = 1.0
    assert unwritten(memory, 2) == []
