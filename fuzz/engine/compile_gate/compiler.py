"""One compilation by the Triton that is installed, in this process, without a GPU."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from fuzz.engine.compile_gate.arch import Arch
from fuzz.engine.compile_gate.resources import Resources, of_amdgcn, of_cubin
from fuzz.engine.compile_gate.signature import Dialect, signature
from fuzz.engine.emulator.specialisation import Specialisation
from fuzz.engine.loader import KernelLoader


class KernelNotFound(Exception):
    """A recorded kernel that the loaded modules do not have. One line."""


@dataclass(frozen=True)
class Refusal:
    """Why the compiler's front end refused a kernel, and at which line of the kernel's file."""

    message: str
    line: int | None


class _NoDevice:
    """Stands for Triton's driver: kernel files and the language ask it what is compiled for."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0


def target_of(arch: Arch) -> Any:
    """Triton's name of an architecture."""
    from triton.backends.compiler import GPUTarget

    return GPUTarget(arch.backend, arch.target, arch.warp_size)


def pretend(arch: Arch) -> None:
    """Let Triton believe, in this process, that the current GPU is of an architecture."""
    import triton

    triton.runtime.driver.set_active(_NoDevice(target_of(arch)))


def find_kernel(adapter: ModuleType, file: str, name: str) -> Any:
    """The kernel ``name`` of the source ``file``, as a ``JITFunction`` of the installed Triton.

    Loads what the loaders of ``adapter`` (``KernelLoader``) load. Raises ``KernelNotFound``, and whatever
    loading raises.
    """
    loaders = [value for value in vars(adapter).values() if isinstance(value, KernelLoader)]
    if not loaders:
        raise KernelNotFound(f"{adapter.__name__} has no KernelLoader")
    for load in loaders:
        loaded = load()
        others = [m for m in list(sys.modules.values()) if getattr(m, "__file__", None) == file]
        for module in (loaded, *others):
            for kernel in _kernels(module, name):
                if Path(kernel.fn.__code__.co_filename) == Path(file):
                    return kernel
    raise KernelNotFound(f"no kernel {name} in {Path(file).name} as {adapter.__name__} loads it")


def _kernels(module: ModuleType, name: str) -> Iterator[Any]:
    from triton.runtime.jit import JITFunction

    for value in vars(module).values():
        inner, depth = value, 0
        # autotune and heuristics keep what they decorate as `fn`.
        while not isinstance(inner, JITFunction) and hasattr(inner, "fn") and depth < 8:
            inner, depth = inner.fn, depth + 1
        if isinstance(inner, JITFunction) and inner.__name__ == name:
            yield inner


def compile_source(kernel: Any, source: Any, options: dict[str, Any], arch: Arch) -> Resources | Refusal:
    """Compile what ``source_of`` made, with launch options. All but refusals of the front end passes through."""
    import triton
    from triton.compiler.errors import CompilationError

    try:
        compiled = triton.compile(source, target=target_of(arch), options=options)
    except CompilationError as error:
        return _refusal(kernel, error)
    shared = int(compiled.metadata.shared)
    if arch.backend == "hip":
        return of_amdgcn(compiled.asm["amdgcn"], shared)
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    return of_cubin(compiled.asm["cubin"], shared, tools / "cuobjdump")


def source_of(kernel: Any, specialisation: Specialisation, arch: Arch) -> Any:
    """What Triton is to compile. Raises ``CannotRebuild``."""
    from triton.compiler import ASTSource

    built = signature(list(kernel.params), specialisation, dialect(kernel, arch))
    source = ASTSource
    if getattr(kernel, "is_gluon", lambda: False)():
        from triton.experimental.gluon._runtime import GluonASTSource

        source = GluonASTSource
    return source(kernel, built.types, built.constants, built.attributes)


def dialect(kernel: Any, arch: Arch) -> Dialect:
    """The installed Triton's, for a kernel whose functions are found among the globals of its file."""
    import triton
    import triton.language as tl
    from triton.runtime.jit import type_canonicalisation_dict

    return Dialect(
        type_names=dict(type_canonicalisation_dict),
        pointer_range=arch.backend == "hip" and bool(triton.knobs.amd.use_buffer_ops),
        dtype=tl.dtype,
        function=lambda name: kernel.fn.__globals__[name],
    )


def _refusal(kernel: Any, error: Any) -> Refusal:
    """The innermost message, without the source text that Triton quotes, and the line in the kernel itself."""
    chain, inner = [error], error.__cause__
    while inner is not None:
        chain.append(inner)
        inner = inner.__cause__
    texts = (getattr(e, "error_message", None) if hasattr(e, "node") else str(e) for e in reversed(chain))
    message = next((str(text) for text in texts if text), type(chain[-1]).__name__)
    return Refusal(" ".join(message.split()), _line(kernel, error))


def _line(kernel: Any, error: Any) -> int | None:
    """The line in the kernel's file: errors count from the line of its `def`."""
    within = getattr(error.node, "lineno", None)
    if within is None or error.src != kernel.src:
        return None
    lines, first = inspect.getsourcelines(kernel.fn)
    start = next((i for i, line in enumerate(lines) if re.match(r"\s*def\s", line)), 0)
    return int(first + start + within - 1)
