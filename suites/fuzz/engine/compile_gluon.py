"""An adapter for the Gluon kernels of compile_gluon_kernels.py."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from fuzz import engine as engines
from fuzz.engine import loader

KERNELS = Path(__file__).with_name("compile_gluon_kernels.py")


@loader.KernelLoader
def kernels() -> ModuleType:
    return loader.load_source(KERNELS, "attn_oracle_loaded.compile_gluon", {}, engines.current())
