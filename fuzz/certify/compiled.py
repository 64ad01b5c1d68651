"""Our own Triton kernels: the emulator against exact arithmetic, and a compiler against the emulator."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from fuzz.certify.oracle import Tensors, short, tensors_differ
from fuzz.certify.trial import Trial
from fuzz.engine.loader import load_source
from oracle import philox
from oracle.fp8 import FORMATS
from oracle.kinds import Engine
from oracle.rounding import round_to

KERNELS = Path(__file__).with_name("kernels.py")
_NARROW = (torch.bfloat16, torch.float16, *(fmt.dtype for fmt in FORMATS))
_COUNT = 4096


def load_kernels(engine: Engine) -> ModuleType:
    """`fuzz.certify.kernels` for one engine. Raises ImportError where that engine's compiler is missing."""
    return load_source(KERNELS, f"attn_oracle_loaded.certify_{engine.value}", {}, engine)


def emulated() -> Trial[Tensors]:
    """The emulator narrows as `oracle.rounding` does, and divides towards zero."""
    values, (a, b) = hard_values(), _integers()
    dtypes = (torch.float32, *_NARROW)
    want = {short(dtype): round_to(values.double(), dtype) for dtype in dtypes}
    want |= {"quotient": torch.div(a, b, rounding_mode="trunc"), "remainder": torch.fmod(a, b)}
    got = _run(Engine.EMULATOR, torch.device("cpu"), dtypes)
    return Trial(partial(tensors_differ, want=want), {"exact rounding and division": got}, _mistaken(want))


def compiled(engine: Engine, device: torch.device) -> Trial[Tensors]:
    """What a compiler makes of the kernels gives the same bits as the emulator."""
    dtypes = (torch.float32, torch.bfloat16, torch.float16, *fp8_dtypes(engine))
    want = _run(Engine.EMULATOR, torch.device("cpu"), dtypes)
    got = _run(engine, device, dtypes)
    return Trial(partial(tensors_differ, want=want), {"the emulator's bits": got}, _mistaken(want))


def fp8_dtypes(engine: Engine) -> tuple[torch.dtype, ...]:
    """The fp8 formats that instructions of this GPU narrow float32 to."""
    if engine is Engine.CUDA:
        return (torch.float8_e4m3fn, torch.float8_e5m2) if torch.cuda.get_device_capability() >= (8, 9) else ()
    arch = torch.cuda.get_device_properties().gcnArchName
    if arch.startswith("gfx94"):
        return (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
    return (torch.float8_e4m3fn, torch.float8_e5m2) if arch.startswith("gfx95") else ()


def _run(engine: Engine, device: torch.device, dtypes: Sequence[torch.dtype]) -> Tensors:
    kernels, values = load_kernels(engine), hard_values().to(device)
    quotient, remainder = kernels.divide(*(x.to(device) for x in _integers()))
    results = {short(dtype): kernels.convert(values, dtype).cpu() for dtype in dtypes}
    return results | {"quotient": quotient.cpu(), "remainder": remainder.cpu()}


def _mistaken(want: Tensors) -> dict[str, Tensors]:
    """The results with one mistake each, of a kind that compilers and interpreters make."""
    truncated = (hard_values().view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)
    a, b = _integers()
    return {
        "bf16 by truncation": {**want, "bfloat16": truncated},
        "quotients rounded down": {**want, "quotient": torch.div(a, b, rounding_mode="floor")},
        "remainders of the divisor's sign": {**want, "remainder": torch.remainder(a, b)},
    }


def _integers() -> tuple[Tensor, Tensor]:
    """Numerators and denominators of either sign, int32 [N], no denominator 0."""
    sign = 1 - 2 * philox.uniform_int(5, 2, _COUNT, 0, 2)
    denominator = philox.uniform_int(5, 1, _COUNT, 1, 40) * sign
    return philox.uniform_int(5, 0, _COUNT, -1000, 1000).int(), denominator.int()


def hard_values() -> Tensor:
    """Float32 values [N] where narrowing is hard: numbers of every size, zeros, and midpoints of each format."""
    small = philox.normal(3, 0, _COUNT)
    spread = torch.ldexp(small, philox.uniform_int(3, 1, _COUNT, -40, 41))
    midpoints = [_midpoints(dtype) for dtype in _NARROW]
    exact = torch.cat([torch.tensor([0.0, -0.0]), spread, *midpoints])
    return torch.cat([exact, -exact])


def _midpoints(dtype: torch.dtype) -> Tensor:
    """Midpoints of neighbouring values of `dtype`, exact in float32, some thousand at most."""
    codes = torch.arange(0, (1 << (8 * dtype.itemsize - 1)) - 1, 1 if dtype.itemsize == 1 else 16)
    integers = torch.uint8 if dtype.itemsize == 1 else torch.int16
    low, high = (c.to(integers).view(dtype).double() for c in (codes, codes + 1))
    middle = (low + high) / 2
    return middle[middle.isfinite()].float()
