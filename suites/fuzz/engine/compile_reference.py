"""What Triton's own launcher makes of arguments, beside what the compile gate makes of their record.

Runs in a worker: the real Triton is not imported where the emulator runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from fuzz import engine as engines
from fuzz.engine.compile_gate import jobs
from fuzz.engine.compile_gate.arch import parse_arch
from fuzz.engine.compile_gate.compiler import dialect
from fuzz.engine.compile_gate.signature import Signature, signature
from fuzz.engine.emulator.specialisation import specialise
from suites.fuzz.engine.compile_targets import kernels

_FLOATS = torch.zeros(64)
_BIG = torch.empty((1 << 31) + 16, dtype=torch.uint8)
VALUES: dict[str, Any] = {
    **{f"{dtype}": torch.zeros(4, dtype=dtype) for dtype in (torch.bool, torch.int8, torch.uint16, torch.int64)},
    **{f"{dtype}": torch.zeros(4, dtype=dtype) for dtype in (torch.bfloat16, torch.float16, torch.float64)},
    **{
        f"{dtype}": torch.zeros(4, dtype=dtype)
        for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
    },
    "unaligned": _FLOATS[1:],
    "aligned view": _FLOATS[4:],
    "big": _BIG,
    **{f"{n}": n for n in (0, 1, 2, 16, -16, -1, 2**31 - 1, 2**31, -(2**31) - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 16)},
    **{f"{value}": value for value in (True, False, 0.0, 1.0, 0.5, None)},
    "tuple": (1, 16, _FLOATS, None, (3, _BIG[1:])),
}


def compare(request: dict[str, Any], progress: Callable[[str], None]) -> dict[str, Any]:
    """``different``: the values of which the launcher and the gate say different things, on ``request["arch"]``."""
    arch = parse_arch(request["arch"])
    engines.start(arch.engine, compile_only=True)
    kernel = kernels().flags
    different = {}
    for name, value in VALUES.items():
        bound = {p.name: value for p in kernel.params} | {"BLOCK": 8}
        for parameter in ("d", "e"):
            bound[parameter] = value if isinstance(value, (int, float)) else 3
        recorded = specialise("file", "flags", bound, frozenset({"BLOCK"}), {})
        ours = signature(list(kernel.params), recorded, dialect(kernel, arch))
        theirs = _launcher(kernel, bound, arch.backend)
        if ours != theirs:
            different[name] = [repr(ours), repr(theirs)]
    return {"different": different, "compared": len(VALUES)}


def record_and_look(request: dict[str, Any], progress: Callable[[str], None]) -> dict[str, Any]:
    """Record, then say how much, and which modules of the real Triton the process has."""
    recorded = jobs.record(request, progress)["specialisations"]
    return {"launches": len(recorded), "real": [name for name in sys.modules if name.partition(".")[0] == "triton"]}


def _launcher(kernel: Any, bound: dict[str, Any], name: str) -> Signature:
    from triton._utils import find_paths_if, get_iterable_path
    from triton.backends import backends
    from triton.runtime.jit import create_function_from_signature

    compiler = next(b.compiler for key, b in backends.items() if key == {"hip": "amd", "cuda": "nvidia"}[name])
    binder = create_function_from_signature(kernel.signature, kernel.params, compiler)
    values, specialisation, _ = binder(**bound)
    types = [kind for kind, _ in specialisation]
    facts = ["" if kind == "constexpr" else fact for kind, fact in specialisation]
    constants = find_paths_if(types, lambda _, kind: kind == "constexpr")
    described = find_paths_if(facts, lambda _, fact: isinstance(fact, str))
    attributes = {path: compiler.parse_attr(get_iterable_path(facts, path)) for path in described}
    return Signature(
        dict(zip(values, types, strict=True)),
        {path: get_iterable_path(list(values.values()), path) for path in constants},
        {path: found for path, found in attributes.items() if found},
    )
