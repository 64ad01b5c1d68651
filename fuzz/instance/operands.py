"""Operands and index lists as buffers; the values that attention operations share."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from fuzz.buffers import DTYPES, Buffer, Poison, contiguous_strides, empty_buffer
from fuzz.case import Case
from fuzz.probes import Stream, values
from oracle.kinds import Role

STRIDE_GAP = 112
"""Elements between the rows of a strided operand: a multiple of 16 bytes for every dtype, so that vector
loads stay aligned, and no multiple of a usual row."""


def operand(name: str, data: Tensor, case: Case, poison: Poison, device: str) -> Buffer:
    """A buffer that holds ``data``; rows [T, H, D] lie apart where the case is strided."""
    strides = contiguous_strides(data.shape)
    if case.strided and data.dim() == 3:
        strides[0] += STRIDE_GAP
    buffer = empty_buffer(name, data.shape, data.dtype, poison, device=device, strides=strides)
    buffer.view.copy_(data)
    return buffer


def index_list(name: str, data: Tensor, dtype: str, poison: Poison, device: str) -> Buffer:
    """A buffer that holds integers."""
    buffer = empty_buffer(name, data.shape, DTYPES[dtype], poison, device=device)
    buffer.view.copy_(data)
    return buffer


def indptr(lengths: tuple[int, ...]) -> Tensor:
    """Starts of consecutive runs, and the end: int64 [R + 1]."""
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)


def starts(lengths: tuple[int, ...]) -> Tensor:
    """Starts of consecutive runs: int64 [R]."""
    return indptr(lengths)[:-1]


@lru_cache(maxsize=1)
def keys_and_values(case: Case) -> dict[Role, Tensor]:
    """Keys and values of every position of every request, on the CPU, in the storage dtype. Not to be written to."""
    tokens, heads = sum(case.context_lens), case.num_kv_heads
    return {
        Role.K: values(case, Stream.K, (tokens, heads, case.head_dim), case.kv_dtype),
        Role.V: values(case, Stream.V, (tokens, heads, case.v_head_dim), case.kv_dtype),
    }


def scale_of(case: Case) -> float:
    """The softmax scale in force: the case's own, or 1/sqrt(D)."""
    return case.head_dim**-0.5 if case.scale is None else case.scale
