"""Layouts that Gluon refuses are refused, with the reason; those that it takes change nothing."""

from types import ModuleType
from typing import Any

import pytest
import torch

from fuzz.engine import emulator
from fuzz.engine.emulator.gluon.layouts import (
    AMDMFMALayout,
    AutoLayout,
    BlockedLayout,
    DistributedLinearLayout,
    DotOperandLayout,
    PaddedSharedLayout,
    SliceLayout,
    SwizzledSharedLayout,
)

LINE = BlockedLayout([1], [64], [4], [0])
PLANE = BlockedLayout([1, 4], [8, 8], [2, 2], [1, 0])
MFMA = AMDMFMALayout(3, [16, 16, 16], True, [2, 2])


def linear(warps: int = 2, shape: Any = (16, 64)) -> DistributedLinearLayout:
    lanes = [[1, 0], [2, 0], [4, 0], [8, 0], [0, 1], [0, 2]]
    columns = [[0, 4], [0, 8], [0, 16], [0, 32]]
    return DistributedLinearLayout(columns[: 4 - warps], lanes, columns[4 - warps :], [], list(shape))


TAKEN = [
    LINE,
    SliceLayout(0, PLANE),
    SliceLayout(1, DotOperandLayout(0, MFMA, 8)),
    SliceLayout(1, linear()),
    AutoLayout(),
]


@pytest.mark.parametrize("layout", TAKEN, ids=lambda layout: layout.kind)
def test_a_layout_that_fits_changes_nothing(faults: ModuleType, layout: Any) -> None:
    out = torch.zeros(16, dtype=torch.int32)
    with emulator.session():
        faults.given_layout[(1,)](out, layout, 16)
    assert out.tolist() == list(range(16))


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (PLANE, r"rank 2 cannot lay out a block \[16\]"),
        (BlockedLayout([1], [64], [2], [0]), "has 2 warps, the kernel is launched with 4"),
        (BlockedLayout([1], [16], [4], [0]), "has 16 lanes in a warp; no AMD or NVIDIA GPU has"),
        (SliceLayout(0, MFMA.__class__(3, [16, 16], True, [1, 2])), "AMDMFMALayout has 2 warps"),
        (SliceLayout(1, linear(warps=1)), "DistributedLinearLayout has 2 warps"),
        (SwizzledSharedLayout(1, 1, 1, [0]), "is no layout of a tensor"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(faults: ModuleType, layout: Any, message: str) -> None:
    with emulator.session(), pytest.raises(emulator.KernelError, match=f"kernel given_layout.*{message}"):
        faults.given_layout[(1,)](torch.zeros(16, dtype=torch.int32), layout, 16)


def test_warps_are_those_of_the_launch(faults: ModuleType) -> None:
    out = torch.zeros(16, dtype=torch.int32)
    with emulator.session():
        faults.given_layout[(1,)](out, BlockedLayout([1], [64], [2], [0]), 16, num_warps=2)
        with pytest.raises(emulator.KernelError, match="has 4 warps, the kernel is launched with 2"):
            faults.given_layout[(1,)](out, LINE, 16, num_warps=2)


def test_warps_of_one_kernel_have_one_size() -> None:
    text = (
        "from triton.experimental import gluon\n"
        "from triton.experimental.gluon import language as gl\n"
        "@gluon.jit\n"
        "def kernel(x):\n"
        "    gl.arange(0, 8, layout=gl.BlockedLayout([1], [64], [4], [0]))\n"
        "    gl.arange(0, 8, layout=gl.BlockedLayout([1], [32], [4], [0]))\n"
    )
    kernel = emulator.load_text(text, "two_warp_sizes").kernel
    with (
        emulator.session(),
        pytest.raises(emulator.KernelError, match="32 lanes in a warp, another layout of the kernel 64"),
    ):
        kernel[(1,)](torch.zeros(1))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BlockedLayout([1, 1], [64], [4, 1], [1, 0]), "threads_per_warp .* is not of rank 2"),
        (lambda: BlockedLayout([3], [64], [4], [0]), "size_per_thread .* no power of 2"),
        (lambda: BlockedLayout([1, 1], [8, 8], [4, 1], [1, 1]), "does not order 2 axes"),
        (lambda: SliceLayout(2, PLANE), "axis 2 of a BlockedLayout of rank 2"),
        (lambda: SliceLayout(0, LINE), "axis 0 of a BlockedLayout of rank 1"),
        (lambda: SliceLayout(0, SwizzledSharedLayout(1, 1, 1, [0])), "which is no layout"),
        (lambda: DotOperandLayout(2, MFMA, 8), "operand 2 is neither 0 nor 1"),
        (lambda: DotOperandLayout(0, MFMA, 6), "k_width 6 is no power of 2"),
        (lambda: AMDMFMALayout(5, [16, 16, 16], True, [2, 2]), "version 5"),
        (lambda: AMDMFMALayout(3, [16, 32, 16], True, [2, 2]), "no instruction has shape"),
        (lambda: AMDMFMALayout(3, [16, 16, 16], True, [2, 2], tiles_per_warp=[3, 1]), "tiles_per_warp"),
        (lambda: linear(shape=(16, 32)), "leaves the shape"),
        (lambda: linear(shape=(32, 64)), "reach 1024 of 2048 elements"),
        (lambda: linear(shape=(16, 8, 8)), "is not of rank 3"),
        (lambda: SwizzledSharedLayout(3, 1, 1, [0]), "vec is no power of 2"),
        (lambda: SwizzledSharedLayout(1, 1, 1, [0, 0]), "does not order 2 axes"),
        (lambda: PaddedSharedLayout([], [], [], [8]), "needs"),
        (lambda: PaddedSharedLayout([[32, 3]], [], [], [8]), "no power of 2"),
        (lambda: PaddedSharedLayout([[32, 4], [32, 8]], [], [], [8]), "occurs twice"),
        (lambda: PaddedSharedLayout([[32, 4]], []), "needs a shape"),
        (lambda: PaddedSharedLayout.with_identity_for([[32, 4]], [8, 12], [1, 0]), "no power of 2"),
        (lambda: PaddedSharedLayout.with_identity_for([[32, 4]], [8, 8], [1]), "does not fit"),
    ],
)
def test_a_layout_without_meaning_is_refused(make: Any, message: str) -> None:
    with pytest.raises(emulator.KernelError, match=message):
        make()


def test_identity_layout_orders_its_axes() -> None:
    layout = PaddedSharedLayout.with_identity_for([[32, 4]], [2, 4], [1, 0])
    assert layout.offset_bases == [[0, 1], [0, 2], [1, 0]]


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (SwizzledSharedLayout(1, 1, 1, [0]), ""),
        (SwizzledSharedLayout(1, 1, 1, [1, 0]), ""),
        (PaddedSharedLayout.with_identity_for([[32, 4]], [8, 16], [1, 0]), ""),
        (PaddedSharedLayout.with_identity_for([[32, 4]], [16], [0]), ""),
        (SwizzledSharedLayout(1, 1, 1, [2, 1, 0]), r"rank 3 cannot hold \[8, 16\]"),
        (PaddedSharedLayout.with_identity_for([[32, 4]], [8, 8], [1, 0]), r"for \[8, 8\] cannot hold \[8, 16\]"),
        (PLANE, "is no layout of shared memory"),
    ],
)
def test_shared_memory_needs_a_layout_that_holds_it(faults: ModuleType, layout: Any, message: str) -> None:
    out = torch.zeros(1, dtype=torch.int32)
    with emulator.session():
        if not message:
            faults.given_shared[(1,)](out, layout, 8, 16)
            return
        with pytest.raises(emulator.KernelError, match=message):
            faults.given_shared[(1,)](out, layout, 8, 16)


def test_shared_sizes_are_powers_of_two_but_for_the_first(faults: ModuleType) -> None:
    out, layout = torch.zeros(1, dtype=torch.int32), SwizzledSharedLayout(1, 1, 1, [0])
    with emulator.session():
        faults.given_shared[(1,)](out, layout, 3, 16)
        with pytest.raises(emulator.KernelError, match="no power of 2"):
            faults.given_shared[(1,)](out, layout, 3, 12)


def test_a_block_of_the_wrong_rank_is_refused(faults: ModuleType) -> None:
    out = torch.zeros(1, dtype=torch.int32)
    with emulator.session():
        faults.given_block[(1,)](out, PLANE, 8, 16)
        with pytest.raises(emulator.KernelError, match="rank 1 cannot lay out"):
            faults.given_block[(1,)](out, LINE, 8, 16)
