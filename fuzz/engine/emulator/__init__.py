"""A CPU engine for Triton kernels: executes their source over torch, with sanitizers, without Triton.

    module = load_source(path, "kernels")
    with session() as log:
        module.launcher(tensors)
    log.findings

Values carry a leading program axis: programs run in batches (`launch`), which are split where programs part
ways and repeated one by one where order matters, so results equal serial execution bit for bit. The engine
keeps its state in the module: one thread of a process uses it.
"""

from fuzz.engine.emulator.errors import KernelError, UnknownName
from fuzz.engine.emulator.loader import load_source, load_text, stub
from fuzz.engine.emulator.options import Fp8Overflow, MaskedLanes, Options
from fuzz.engine.emulator.sanitizer import Finding, FindingKind, FindingsError
from fuzz.engine.emulator.session import Launch, Log, session

__all__ = [
    "Finding",
    "FindingKind",
    "FindingsError",
    "Fp8Overflow",
    "KernelError",
    "Launch",
    "Log",
    "MaskedLanes",
    "Options",
    "UnknownName",
    "load_source",
    "load_text",
    "session",
    "stub",
]
