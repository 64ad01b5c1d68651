"""An adapter for sglang's kernels of decode context parallelism."""

from __future__ import annotations

from types import ModuleType

from fuzz.engine.loader import KernelLoader
from suites.targets import sglang_wheel

FILES = ("srt/layers/dcp/kernels.py",)


@KernelLoader
def kernels() -> ModuleType:
    return sglang_wheel.load(FILES, {})
