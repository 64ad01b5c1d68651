"""Layouts of Gluon: recorded and checked against the blocks that they lay out, without effect on values.

A layout says which lane of which warp holds which element. Here every program's block is one tensor, so a layout
changes nothing; but one that Gluon's front end or the verifier of its IR refuses is refused here as well: the wrong
rank, lanes or warps that the launch does not have, sizes that are no powers of two, bases that do not cover the block.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fuzz.engine.emulator.errors import KernelError

_WARP_SIZES = (32, 64)


@dataclass
class Machine:
    """What all layouts of one launch must agree on; `lanes` of a warp is learnt from the first layout that says."""

    warps: int = 4
    lanes: int = 0


machine = Machine()


def _is_power(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise KernelError(message)


def _sizes(layout: "Layout", **lists: Sequence[int]) -> None:
    """Each list has one power of two for each axis."""
    for name, sizes in lists.items():
        _require(len(sizes) == layout.rank, f"{layout.kind}: {name} {list(sizes)} is not of rank {layout.rank}")
        _require(all(map(_is_power, sizes)), f"{layout.kind}: {name} {list(sizes)} has a size that is no power of 2")


def _order(layout: "Layout", order: Sequence[int], rank: int) -> None:
    _require(sorted(order) == list(range(rank)), f"{layout.kind}: order {list(order)} does not order {rank} axes")


def _check_machine(layout: "Layout", warps: int, lanes: int | None = None) -> None:
    _require(warps == machine.warps, f"{layout.kind} has {warps} warps, the kernel is launched with {machine.warps}")
    if lanes is None:
        return
    machine.lanes = machine.lanes or lanes
    message = f"{layout.kind} has {lanes} lanes in a warp"
    _require(lanes in _WARP_SIZES, f"{message}; no AMD or NVIDIA GPU has")
    _require(lanes == machine.lanes, f"{message}, another layout of the kernel {machine.lanes}")


class Layout:
    """What every layout has: a name for messages, a number of axes, and a check against a block."""

    rank: int

    @property
    def kind(self) -> str:
        return type(self).__name__

    def check(self, shape: tuple[int, ...]) -> None:
        """Raise KernelError unless a block of this shape can have this layout."""
        _require(len(shape) == self.rank, f"{self.kind} of rank {self.rank} cannot lay out a block {list(shape)}")


class DistributedLayout(Layout):
    """Layout of a tensor in registers."""


class SharedLayout(Layout):
    """Layout of shared memory."""


@dataclass(frozen=True)
class AutoLayout(DistributedLayout):
    """A layout that the compiler finds: fits any block."""

    def check(self, shape: tuple[int, ...]) -> None:
        """Fits."""


@dataclass(frozen=True)
class CoalescedLayout(AutoLayout):
    """A layout that the compiler chooses for memory accesses: fits any block."""


@dataclass(frozen=True)
class BlockedLayout(DistributedLayout):
    """Tiles of `size_per_thread` elements over `threads_per_warp` lanes over `warps_per_cta` warps."""

    size_per_thread: Sequence[int]
    threads_per_warp: Sequence[int]
    warps_per_cta: Sequence[int]
    order: Sequence[int]
    cga_layout: Any = None
    cta_split_num: Any = None
    cta_order: Any = None

    def __post_init__(self) -> None:
        _sizes(
            self,
            size_per_thread=self.size_per_thread,
            threads_per_warp=self.threads_per_warp,
            warps_per_cta=self.warps_per_cta,
        )
        _order(self, self.order, self.rank)

    @property
    def rank(self) -> int:  # type: ignore[override]
        return len(self.size_per_thread)

    def check(self, shape: tuple[int, ...]) -> None:
        """Also: its lanes and warps are those of the launch."""
        super().check(shape)
        _check_machine(self, math.prod(self.warps_per_cta), math.prod(self.threads_per_warp))


@dataclass(frozen=True)
class SliceLayout(DistributedLayout):
    """`parent` without its axis `dim`."""

    dim: int
    parent: DistributedLayout

    def __post_init__(self) -> None:
        _require(isinstance(self.parent, DistributedLayout), f"SliceLayout of {self.parent!r}, which is no layout")
        if not isinstance(self.parent, AutoLayout):
            fits = 0 <= int(self.dim) < self.parent.rank and self.parent.rank > 1
            _require(fits, f"SliceLayout takes axis {self.dim} of a {self.parent.kind} of rank {self.parent.rank}")

    @property
    def rank(self) -> int:  # type: ignore[override]
        return self.parent.rank - 1

    def check(self, shape: tuple[int, ...]) -> None:
        """Also: the parent fits the block with an axis of size 1 put in."""
        if not isinstance(self.parent, AutoLayout):
            super().check(shape)
            self.parent.check((*shape[: self.dim], 1, *shape[self.dim :]))


@dataclass(frozen=True)
class DotOperandLayout(DistributedLayout):
    """Layout of operand 0 or 1 of a matrix instruction; `k_width` consecutive elements of K in a lane."""

    operand_index: int
    parent: DistributedLayout
    k_width: int

    def __post_init__(self) -> None:
        _require(self.operand_index in (0, 1), f"DotOperandLayout: operand {self.operand_index} is neither 0 nor 1")
        _require(_is_power(self.k_width), f"DotOperandLayout: k_width {self.k_width} is no power of 2")

    @property
    def rank(self) -> int:  # type: ignore[override]
        return self.parent.rank

    def check(self, shape: tuple[int, ...]) -> None:
        """Fits what its parent fits."""
        self.parent.check(shape)


@dataclass(frozen=True)
class AMDMFMALayout(DistributedLayout):
    """Layout of the accumulator of a matrix instruction of gfx908 (version 1) to gfx950 (version 4)."""

    version: int
    instr_shape: Sequence[int]
    transposed: bool
    warps_per_cta: Sequence[int]
    element_bitwidth: int = 32
    tiles_per_warp: Sequence[int] | None = None
    cga_layout: Any = None

    def __post_init__(self) -> None:
        _require(1 <= self.version <= 4, f"AMDMFMALayout: version {self.version} is not within 1 to 4")
        shape = list(self.instr_shape)
        known = len(shape) in (2, 3) and shape[:2] in ([32, 32], [16, 16], [64, 4], [4, 64], [4, 4])
        _require(known, f"AMDMFMALayout: no instruction has shape {shape}")
        _sizes(self, warps_per_cta=self.warps_per_cta)
        if self.tiles_per_warp is not None:
            _sizes(self, tiles_per_warp=self.tiles_per_warp)

    @property
    def rank(self) -> int:  # type: ignore[override]
        return len(self.warps_per_cta)

    def check(self, shape: tuple[int, ...]) -> None:
        """Also: its warps are those of the launch, in warps of 64 lanes."""
        super().check(shape)
        _check_machine(self, math.prod(self.warps_per_cta), 64)


@dataclass(frozen=True)
class DistributedLinearLayout(DistributedLayout):
    """Each bit of register, lane, warp and block number moves the element by a basis vector; moves combine by xor."""

    reg_bases: Sequence[Sequence[int]]
    lane_bases: Sequence[Sequence[int]]
    warp_bases: Sequence[Sequence[int]]
    block_bases: Sequence[Sequence[int]]
    shape: Sequence[int]

    def __post_init__(self) -> None:
        _sizes(self, shape=self.shape)
        bases = [*self.reg_bases, *self.lane_bases, *self.warp_bases, *self.block_bases]
        for basis in bases:
            _require(
                len(basis) == self.rank, f"DistributedLinearLayout: basis {list(basis)} is not of rank {self.rank}"
            )
            inside = all(0 <= step < size for step, size in zip(basis, self.shape, strict=True))
            _require(inside, f"DistributedLinearLayout: basis {list(basis)} leaves the shape {list(self.shape)}")
        covered = 1 << _independent([self._flat(basis) for basis in bases])
        size = math.prod(self.shape)
        _require(covered == size, f"DistributedLinearLayout: its bases reach {covered} of {size} elements")

    def _flat(self, basis: Sequence[int]) -> int:
        flat = 0
        for step, size in zip(basis, self.shape, strict=True):
            flat = flat * size | int(step)
        return flat

    @property
    def rank(self) -> int:  # type: ignore[override]
        return len(self.shape)

    def check(self, shape: tuple[int, ...]) -> None:
        """Also: its lanes and warps are those of the launch."""
        super().check(shape)
        _check_machine(self, 1 << len(self.warp_bases), 1 << len(self.lane_bases))


def _independent(vectors: list[int]) -> int:
    """Rank over GF(2) of vectors given as bit masks."""
    pivots: list[int] = []
    for vector in vectors:
        for pivot in pivots:
            vector = min(vector, vector ^ pivot)
        if vector:
            pivots.append(vector)
    return len(pivots)


@dataclass(frozen=True)
class SwizzledSharedLayout(SharedLayout):
    """Rows of `vec`-element groups, swapped by row number: `per_phase` rows share a phase of `max_phase`."""

    vec: int
    per_phase: int
    max_phase: int
    order: Sequence[int]
    cga_layout: Any = None
    cta_split_num: Any = None
    cta_order: Any = None

    def __post_init__(self) -> None:
        for name in ("vec", "per_phase", "max_phase"):
            _require(_is_power(getattr(self, name)), f"SwizzledSharedLayout: {name} is no power of 2")
        _order(self, self.order, self.rank)

    @property
    def rank(self) -> int:  # type: ignore[override]
        return len(self.order)

    def check(self, shape: tuple[int, ...]) -> None:
        """Fits its rank, or one more for buffers in turn; all but the first size are powers of two."""
        _require(len(shape) in (self.rank, self.rank + 1), f"{self.kind} of rank {self.rank} cannot hold {list(shape)}")
        _require(all(map(_is_power, shape[1:])), f"{self.kind}: {list(shape)} has a size that is no power of 2")


@dataclass(frozen=True)
class PaddedSharedLayout(SharedLayout):
    """`padding` elements are skipped after every `interval` elements, for each pair."""

    interval_padding_pairs: Sequence[Sequence[int]]
    offset_bases: Sequence[Sequence[int]]
    cga_layout: Any = field(default_factory=list)
    shape: Sequence[int] = ()

    def __post_init__(self) -> None:
        pairs = [tuple(pair) for pair in self.interval_padding_pairs]
        _require(bool(pairs) and all(len(pair) == 2 for pair in pairs), "PaddedSharedLayout needs (interval, padding)")
        whole = all(_is_power(number) for pair in pairs for number in pair)
        _require(whole, f"PaddedSharedLayout: {pairs} has a number that is no power of 2")
        unique = len({interval for interval, _ in pairs}) == len(pairs)
        _require(unique, f"PaddedSharedLayout: an interval of {pairs} occurs twice")
        _require(len(self.shape) > 0, "PaddedSharedLayout needs a shape")

    @staticmethod
    def with_identity_for(
        interval_padding_pairs: Sequence[Sequence[int]],
        shape: Sequence[int],
        order: Sequence[int],
        cga_layout: Any = None,
    ) -> "PaddedSharedLayout":
        """Elements of `shape` in row-major order of the axes listed fastest first in `order`."""
        _require(sorted(order) == list(range(len(shape))), f"PaddedSharedLayout: order {order} does not fit {shape}")
        _require(all(map(_is_power, shape)), f"PaddedSharedLayout: {list(shape)} has a size that is no power of 2")
        bases = [
            [1 << bit if axis == other else 0 for other in range(len(shape))]
            for axis in order
            for bit in range(int(shape[axis]).bit_length() - 1)
        ]
        return PaddedSharedLayout(interval_padding_pairs, bases, cga_layout or [], list(shape))

    @property
    def rank(self) -> int:  # type: ignore[override]
        return len(self.shape)

    def check(self, shape: tuple[int, ...]) -> None:
        """Fits its own shape, or several such in turn."""
        fits = list(shape[-self.rank :]) == list(self.shape) and len(shape) in (self.rank, self.rank + 1)
        _require(fits, f"PaddedSharedLayout for {list(self.shape)} cannot hold {list(shape)}")


def check_distributed(layout: Any, shape: tuple[int, ...]) -> None:
    """Check a tensor's layout, if one is given. Raises KernelError where Gluon refuses it."""
    if layout is None:
        return
    _require(isinstance(layout, DistributedLayout), f"{layout!r} is no layout of a tensor")
    layout.check(shape)


def check_shared(layout: Any, shape: tuple[int, ...]) -> None:
    """Check a layout of shared memory, likewise."""
    _require(isinstance(layout, SharedLayout), f"{layout!r} is no layout of shared memory")
    layout.check(shape)


def mfma_scale_layout(
    dot_operand_layout: DotOperandLayout, shape: Sequence[int], scale_factor: int = 32
) -> DistributedLayout:
    """Layout of the scales of an operand of `mfma_scaled`; only that one exists matters here."""
    _require(scale_factor == 32, f"scales cover 32 elements each, not {scale_factor}")
    return AutoLayout()


def efficient_padded_layout(
    dot_operand_layout: DotOperandLayout, shape: Sequence[int], elem_bytes: Any, is_k_contig: bool = True
) -> PaddedSharedLayout:
    """A padded layout for an operand: one row, then 16 bytes. Which padding is quickest does not matter here."""
    width = elem_bytes if isinstance(elem_bytes, int) else elem_bytes.itemsize
    return PaddedSharedLayout.with_identity_for([[int(shape[-1]), 16 // width]], shape, [1, 0])
