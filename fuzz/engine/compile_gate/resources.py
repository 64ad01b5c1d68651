"""What a compiled kernel needs, read from what the compiler left behind."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory


@dataclass(frozen=True)
class Resources:
    """None where the compiler does not say.

    ``registers`` a lane (VGPRs on AMD), ``spilled`` of them; ``scalar_spilled``: SGPRs, which go to VGPRs first;
    ``stack`` bytes a lane of private memory, which is where spills go; ``shared`` bytes a workgroup.
    """

    shared: int
    registers: int | None = None
    spilled: int | None = None
    scalar_spilled: int | None = None
    stack: int | None = None

    @property
    def spills(self) -> bool:
        """Whether registers spill, as far as the compiler says: NVIDIA's says how much stack a lane has."""
        return bool(self.stack if self.spilled is None else self.spilled)


def of_amdgcn(text: str, shared: int) -> Resources:
    """From the metadata at the end of AMD's assembly."""

    def number(key: str) -> int | None:
        found = re.search(rf"^\s*(?:- )?\.{key}:\s+(\d+)", text, re.MULTILINE)
        return int(found[1]) if found else None

    return Resources(
        shared=shared,
        registers=number("vgpr_count"),
        spilled=number("vgpr_spill_count"),
        scalar_spilled=number("sgpr_spill_count"),
        stack=number("private_segment_fixed_size"),
    )


def of_cubin(cubin: bytes, shared: int, cuobjdump: Path) -> Resources:
    """As ``cuobjdump`` reads an NVIDIA binary; without that tool only ``shared`` is known."""
    if not cuobjdump.is_file():
        return Resources(shared=shared)
    with TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(cubin)
        done = subprocess.run(
            [str(cuobjdump), "--dump-resource-usage", str(file)], capture_output=True, text=True, check=False
        )
    return of_resource_usage(done.stdout, shared)


def of_resource_usage(text: str, shared: int) -> Resources:
    """From a line such as ` REG:32 STACK:0 SHARED:0 LOCAL:0 ...`."""
    found = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
    stack = None if "STACK" not in found else found["STACK"] + found.get("LOCAL", 0)
    return Resources(shared=shared, registers=found.get("REG"), stack=stack)
