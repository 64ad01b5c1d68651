"""Targets that harm the process that they run in, or give back what no kernel should. Loaded by name."""

from __future__ import annotations

import ctypes
import os
import sys

import torch
from torch import Tensor

from oracle import declare
from oracle.precision import EXACT_COPY
from suites.fuzz.planted import COPIES, COPY, gather_rows, gathers

_kept: list[bytearray] = []


def _exhausts(*_: Tensor) -> None:
    while True:
        _kept.append(bytearray(b"x" * (64 << 20)))


def _leaks(*_: Tensor) -> None:
    """So much that one case fits into a worker and several do not."""
    _kept.append(bytearray(b"x" * (96 << 20)))


def _prints_garbage(*_: Tensor) -> None:
    ctypes.CDLL(None).puts(b'{"id": 1, "value": {}}')
    print('{"id": 1, "value": {}}')
    for _ in range(16):
        os.write(1, b"\x00\xff{\n" * 16384)
        os.write(2, b"\xfe" * 65536)


def _forks(*_: Tensor) -> None:
    """The child goes on as if it were the worker."""
    os.fork()


def _exits(*_: Tensor) -> None:
    os._exit(0)


def _raises_no_exception(*_: Tensor) -> None:
    sys.exit("enough")


def _wrong_dtype(key: Tensor, value: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
    return key.to(torch.float64), value


def _nothing(*_: Tensor) -> tuple[()]:
    return ()


def _nan(key: Tensor, value: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
    return (torch.full_like(key, torch.nan) if key.is_floating_point() else key), value


def _corrupts_the_heap(key: Tensor, *_: Tensor) -> None:
    """Far beyond what any guard surrounds."""
    if key.numel():
        ctypes.memset(key.data_ptr() - (1 << 24), 0x5A, 1 << 24)


exhausts = gathers("hostile.exhausts", _exhausts)
leaks = gathers("hostile.leaks", _leaks)
prints_garbage = gathers("hostile.prints_garbage", _prints_garbage)
forks = gathers("hostile.forks", _forks)
exits = gathers("hostile.exits", _exits)
system_exit = gathers("hostile.system_exit", _raises_no_exception)
wrong_dtype = gathers("hostile.wrong_dtype", _wrong_dtype)
returns_nothing = gathers("hostile.returns_nothing", _nothing)
corrupts_the_heap = gathers("hostile.corrupts_the_heap", _corrupts_the_heap)
nan = gathers("hostile.nan", _nan, dtypes=("bf16",))


@declare.kv_gather(name="hostile.bystander", convention=COPY, precision=EXACT_COPY, supports=COPIES)
def bystander(k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Right, and has to come out as right whatever runs beside it."""
    return gather_rows(k_cache, v_cache, slots)
