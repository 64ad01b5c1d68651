"""GPU architectures to compile for."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from fuzz.engine.emulator.facade import H200, MI300X, MI350X, Device
from oracle.kinds import Engine

DEVICES = {"sm_90": H200, "gfx942": MI300X, "gfx950": MI350X}
"""A GPU of each architecture, for kernel files that ask."""

SHARED_LIMITS = {
    "gfx942": 64 << 10,
    "gfx950": 160 << 10,
    "sm_80": 163 << 10,
    "sm_90": 227 << 10,
    "sm_100": 227 << 10,
}
"""Bytes of shared memory (LDS) that one workgroup may have: the CDNA 3 and CDNA 4 instruction set manuals, and
the CUDA programming guide's table of compute capabilities. An architecture without an entry is not checked."""


class ArchError(ValueError):
    """A name that is no architecture. One line."""


@dataclass(frozen=True)
class Arch:
    """One architecture: its name as users write it, and as Triton's ``GPUTarget`` wants it."""

    name: str
    backend: str
    target: int | str
    warp_size: int

    @property
    def engine(self) -> Engine:
        """The engine whose kernels run on it."""
        return Engine.HIP if self.backend == "hip" else Engine.CUDA

    @property
    def device(self) -> Device:
        """What kernel files are told of the machine: a GPU of this architecture."""
        if self.name in DEVICES:
            return DEVICES[self.name]
        if isinstance(self.target, int):
            return replace(H200, name=self.name, capability=divmod(self.target, 10))
        return replace(MI300X, name=self.name, warp_size=self.warp_size, arch=self.name)

    @property
    def shared_limit(self) -> int | None:
        """Bytes of shared memory that a workgroup may have, None where it is not known here."""
        return SHARED_LIMITS.get(self.name)


def parse_arch(name: str) -> Arch:
    """``gfx942`` or ``sm_90``. Raises ``ArchError`` for other words."""
    if match := re.fullmatch(r"sm_(\d{2,3})", name):
        return Arch(name, "cuda", int(match[1]), 32)
    if re.fullmatch(r"gfx\d{1,2}[0-9a-f]{2}", name):
        # CDNA, gfx9, runs waves of 64 lanes; RDNA kernels are compiled for 32.
        return Arch(name, "hip", name, 64 if name.startswith("gfx9") else 32)
    raise ArchError(f"{name!r}: no architecture; allowed: names such as gfx942, gfx950, sm_90")
