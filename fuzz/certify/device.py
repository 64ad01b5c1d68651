"""A GPU against the CPU: the oracle, its formats and its generator give the same there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product

import torch

from fuzz.certify.compiled import compiled, hard_values
from fuzz.certify.oracle import Tensors, short, solutions_differ, tensors_differ
from fuzz.certify.problems import Example, examples
from fuzz.certify.trial import Check, Trial, judge
from fuzz.engine.loader import missing_compiler
from oracle import philox
from oracle.attention import solve
from oracle.fp8 import FORMATS, Overflow, decode, encode
from oracle.kinds import Engine
from oracle.problem import Problem
from oracle.rounding import round_to

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, *(fmt.dtype for fmt in FORMATS))
_COUNT = 4096

Part = Callable[[torch.device], Tensors]


def certify_device(engine: Engine) -> list[Check]:
    """Check a CUDA or HIP device."""
    device = torch.device("cuda")
    found = [judge(f"solve on the device: {e.name}", "engine", partial(_solve, e, device)) for e in examples()]
    parts: dict[str, Part] = {"rounding": _rounded, "fp8": _fp8, "philox": _philox}
    found += [judge(f"{name} on the device", "engine", partial(_same, part, device)) for name, part in parts.items()]
    if missing_compiler(engine) is None:
        found.append(judge("kernels, compiled", "engine", partial(compiled, engine, device)))
    return found


def on_device(problem: Problem, device: torch.device) -> Problem:
    """The problem with its operands on `device`."""
    sinks = None if problem.sinks is None else problem.sinks.to(device)
    return replace(problem, q=problem.q.to(device), k=problem.k.to(device), v=problem.v.to(device), sinks=sinks)


def _solve(example: Example, device: torch.device) -> Trial[Problem]:
    want = solve(example.problem)

    def fault(problem: Problem) -> str | None:
        return solutions_differ(solve(on_device(problem, device)), want)

    return Trial(fault, {"what the CPU gives": example.problem}, example.misread)


def _same(part: Part, device: torch.device) -> Trial[Tensors]:
    """The part's tensors are the same bits on the device; a flipped bit in any one of them would show."""
    want = part(torch.device("cpu"))
    return Trial(partial(tensors_differ, want=want), {"the CPU's bits": part(device)}, dict(_one_flipped(want)))


def _one_flipped(tensors: Tensors) -> Iterator[tuple[str, Tensors]]:
    """The tensors with the lowest bit of one's first element flipped."""
    for name, tensor in tensors.items():
        changed = tensor.clone()
        changed.view(-1).view(torch.uint8)[0] ^= 1
        yield f"a flipped bit in {name}", {**tensors, name: changed}


def _rounded(device: torch.device) -> Tensors:
    exact = hard_values().double()
    nearby = torch.cat([exact, exact.nextafter(torch.zeros_like(exact)), exact * (1 + 2.0**-52)]).to(device)
    return {short(dtype): round_to(nearby, dtype).cpu() for dtype in _DTYPES}


def _fp8(device: torch.device) -> Tensors:
    exact = hard_values().double().to(device)
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8).to(device)
    decoded = {f"{fmt.name} decoded": decode(codes, fmt).cpu() for fmt in FORMATS}
    pairs = product(FORMATS, (Overflow.SATURATE, Overflow.NAN))
    return decoded | {f"{fmt.name} {overflow}": encode(exact, fmt, overflow).cpu() for fmt, overflow in pairs}


def _philox(device: torch.device) -> Tensors:
    made = {
        "words": philox.raw(7, 1, _COUNT, device),
        "bytes": philox.bytes_(7, 2, _COUNT, device),
        "integers": philox.uniform_int(7, 3, _COUNT, -5, 1000, device),
        "permutation": philox.permutation(7, 4, _COUNT, device),
        "normal": philox.normal(7, 5, _COUNT, device),
    }
    return {name: x.cpu() for name, x in made.items()}
