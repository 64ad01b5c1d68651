"""An adapter for the kernels of compile_faults.py."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from fuzz import engine as engines
from fuzz.engine import loader

KERNELS = Path(__file__).with_name("compile_faults.py")


@loader.KernelLoader
def kernels() -> ModuleType:
    return loader.load_source(KERNELS, "attn_oracle_loaded.compile_faults", {}, engines.current())
