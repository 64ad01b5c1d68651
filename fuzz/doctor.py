"""What is installed here, which engines work, what is missing and how to get it."""

from __future__ import annotations

import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fuzz.versions import AITER, PRODUCT, aiter_is_amds, installed, own, versions
from oracle.dependencies import NEEDED, how, missing
from oracle.kinds import Engine

# What needs torch is imported where it is used: what is missing is said without it.

SCHEMA = 1
SGLANG = "sglang==0.5.15"
DEPENDENCIES = tuple(name for name in NEEDED if name != "torch")
_LOOKED_AT_WITH = ("torch", "numpy")
FOR_DEVELOPERS = ("mpmath", "nox", "ruff", "mypy")
NEVER_EXECUTED = "never executed by us"
NEVER_EXECUTED_ON = (Engine.HIP,)


@dataclass(frozen=True)
class Gpu:
    """One GPU that torch sees. ``memory`` in bytes; ``arch`` such as sm_90 or gfx942."""

    name: str
    arch: str
    memory: int


@dataclass(frozen=True)
class EngineState:
    """Whether an engine can run here; ``detail`` says why not, or what to know."""

    engine: Engine
    usable: bool
    detail: str


@dataclass(frozen=True)
class Advice:
    """Something missing or wrong. ``command`` gets or mends it; empty where no one command does."""

    about: str
    why: str
    command: str


@dataclass(frozen=True)
class Report:
    """Everything that `attn-oracle doctor` shows. ``packages``: version of each, None where missing."""

    versions: dict[str, str | None]
    packages: dict[str, str | None]
    platform: str
    torch_build: str
    gpus: tuple[Gpu, ...]
    engines: tuple[EngineState, ...]
    advice: tuple[Advice, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ``schema`` first."""
        return {"schema": SCHEMA} | asdict(self)

    def rows(self) -> list[tuple[str, str]]:
        """What and its state, line by line, for a table."""
        found = [("platform", self.platform)]
        found += [(name, version or "missing") for name, version in self.versions.items() if name != "gpu"]
        found += [(name, version or "missing") for name, version in self.packages.items()]
        found.append(("torch build", self.torch_build))
        found += [(f"gpu {i}", f"{g.name}, {g.arch}, {g.memory / 2**30:.0f} GiB") for i, g in enumerate(self.gpus)]
        found += [(f"engine {s.engine}", f"{'works' if s.usable else 'no'}: {s.detail}") for s in self.engines]
        return found

    def lines(self) -> list[str]:
        """The table as text, then what is missing and how to get it."""
        width = max(len(name) for name, _ in self.rows())
        found = [f"{name:<{width}}  {state}" for name, state in self.rows()]
        for advice in self.advice:
            found.append(f"{advice.about}: {advice.why}{': ' + advice.command if advice.command else ''}")
        return found if self.advice else [*found, "nothing is missing"]


def doctor() -> Report:
    """Look around. Imports no kernel package and runs no kernel."""
    if missing(_LOOKED_AT_WITH):
        return _without(missing())
    names = versions()
    packages = _needed() | {name: installed(name) for name in FOR_DEVELOPERS}
    return Report(
        versions=names,
        packages=packages,
        platform=f"{platform.platform()}, {platform.machine()}, {sys.executable}",
        torch_build=_build(),
        gpus=tuple(_gpus()),
        engines=tuple(_state(engine) for engine in Engine),
        advice=tuple(_advice(names, packages)),
    )


def _without(gone: list[str]) -> Report:
    """What can be said where packages that everything needs are missing."""
    reason = f"needs {', '.join(gone)}"
    names = dict.fromkeys(("python", "torch", "triton", "sglang", AITER, "gpu"))
    return Report(
        versions={PRODUCT: own(), **names, "python": platform.python_version(), "torch": _version("torch")},
        packages=_needed(),
        platform=f"{platform.platform()}, {platform.machine()}, {sys.executable}",
        torch_build="not looked at",
        gpus=(),
        engines=tuple(EngineState(engine, False, reason) for engine in Engine),
        advice=tuple(Advice(name, "attn-oracle needs it", how(name)) for name in gone),
    )


def _needed() -> dict[str, str | None]:
    return {name: _version(name) for name in DEPENDENCIES}


def _version(name: str) -> str | None:
    """Of a package that attn-oracle needs; None where it cannot be imported, whatever is known of its distribution."""
    return None if missing([name]) else installed(name) or "of no known version"


def _build() -> str:
    import torch

    if torch.version.hip:
        return f"ROCm {torch.version.hip}"
    return f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"


def _gpus() -> Iterator[Gpu]:
    import torch

    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        arch = found.gcnArchName if torch.version.hip else f"sm_{found.major}{found.minor}"
        yield Gpu(found.name, arch, found.total_memory)


def _state(engine: Engine) -> EngineState:
    from fuzz import engine as engines
    from fuzz.engine.loader import missing_compiler

    reason = engines.unavailable(engine)
    if reason is not None:
        detail = reason.removeprefix(f"{engine}: ")
        return EngineState(engine, False, f"{detail}; {NEVER_EXECUTED}" if engine is Engine.HIP else detail)
    if engine is Engine.EMULATOR:
        return EngineState(engine, True, "Triton source on the CPU")
    compiler = missing_compiler(engine)
    detail = "compiled kernels" if compiler is None else "torch's own kernels; Triton's need triton, which is missing"
    return EngineState(engine, True, f"{detail}; {NEVER_EXECUTED}" if engine is Engine.HIP else detail)


def _advice(names: dict[str, str | None], packages: dict[str, str | None]) -> Iterator[Advice]:
    yield from _about_gpu(names)
    if names["sglang"] is None:
        yield Advice("sglang", "its kernels are targets; only their source is read", f"pip install --no-deps {SGLANG}")
    yield from _about_aiter(names[AITER])
    for name in DEPENDENCIES:
        if packages[name] is None:
            yield Advice(name, "attn-oracle needs it", how(name))
    unused = [name for name in FOR_DEVELOPERS if packages[name] is None]
    if unused:
        yield Advice(
            ", ".join(unused), "for the framework's own tests and lint only", f"pip install {' '.join(unused)}"
        )


def _about_gpu(names: dict[str, str | None]) -> Iterator[Advice]:
    """Torch and Triton. Nothing here ever suggests to install a torch where a ROCm one is, or should be."""
    import torch

    if torch.version.hip or Path("/dev/kfd").exists():
        if not torch.version.hip:
            yield Advice(
                "torch",
                "this machine has an AMD GPU and a torch that is not built for ROCm: install the "
                "build of ROCm's vendor, in an environment of its own",
                "",
            )
        elif names["triton"] is None:
            yield Advice(
                "triton", "ROCm builds of torch come with their own: take it from where that torch came from", ""
            )
        return
    if not torch.cuda.is_available():
        if Path("/dev/nvidiactl").exists():
            yield Advice(
                "torch",
                f"this machine has an NVIDIA GPU that torch ({_build()}) does not see: check the driver, "
                "or install a CUDA build (pytorch.org has the command for yours)",
                "",
            )
        return
    if names["triton"] is None:
        yield Advice("triton", "compiles the Triton kernels among the targets", "pip install triton")
    elif not any(shutil.which(name) for name in ("cc", "gcc", "clang")):
        yield Advice("a C compiler", "triton builds its launchers with one", "")


def _about_aiter(version: str | None) -> Iterator[Advice]:
    import torch

    if aiter_is_amds() is False:
        why = "the installed package aiter is PyPI's of that name, about asynchronous iterators, and not AMD's kernels"
        yield Advice("aiter", why, f"pip uninstall aiter && pip install {AITER}" if torch.version.hip else "")
    elif version is None and torch.version.hip:
        yield Advice(AITER, "its kernels are targets", f"pip install {AITER}")
