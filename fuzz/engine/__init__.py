"""Where a kernel executes. One process runs one engine."""

from __future__ import annotations

from contextlib import suppress

import torch

from fuzz.errors import Exit, Expected
from oracle.kinds import Engine


class EngineError(Expected, RuntimeError):
    """An engine that cannot run here. The message is one line that says what is missing."""

    exit_code = Exit.NOTHING


_current: Engine | None = None


def detect() -> Engine:
    """The engine that ``auto`` means: the GPU that torch sees, else the emulator."""
    if not torch.cuda.is_available():
        return Engine.EMULATOR
    return Engine.HIP if torch.version.hip else Engine.CUDA


def unavailable(engine: Engine) -> str | None:
    """Why ``engine`` cannot run here, or None."""
    if engine is Engine.EMULATOR:
        return None
    if not torch.cuda.is_available():
        return f"{engine.value}: torch {torch.__version__} sees no GPU"
    built = Engine.HIP if torch.version.hip else Engine.CUDA
    if engine is not built:
        return f"{engine.value}: torch {torch.__version__} is built for {built.value}"
    return None


def start(engine: Engine, *, compile_only: bool = False) -> None:
    """Make ``engine`` the engine of this process. With ``compile_only`` kernels are loaded for it and compiled,
    but nothing executes: no device is needed.

    Raises ``EngineError`` if it cannot run here, or if the process already runs another.
    """
    global _current
    reason = None if compile_only else unavailable(engine)
    if reason is not None:
        raise EngineError(reason)
    if _current not in (None, engine):
        raise EngineError(f"{engine.value}: this process runs {_current.value if _current else ''} already")
    _current = engine


def current() -> Engine:
    """The engine of this process. Raises ``EngineError`` before ``start``."""
    if _current is None:
        raise EngineError("no engine: call fuzz.engine.start first")
    return _current


def device(engine: Engine) -> str:
    """The torch device on which an engine's tensors live."""
    return "cpu" if engine is Engine.EMULATOR else "cuda"


def synchronize(engine: Engine) -> None:
    """Wait for the device, so that its errors surface here."""
    if engine is not Engine.EMULATOR:
        torch.cuda.synchronize()


def memory_bytes() -> int:
    """Memory of the GPU. Raises what torch raises where there is none."""
    return int(torch.cuda.get_device_properties(0).total_memory)


def warm(engine: Engine) -> None:
    """Do now what the first kernel of this process would else do: start the device, and Triton's driver for it, which
    is compiled where the compiler's cache is empty. What is missing shows where it is used.
    """
    if engine is Engine.EMULATOR:
        return
    with suppress(Exception):
        torch.zeros(1, device=device(engine))
        from triton.runtime import driver

        driver.active.get_current_target()


def works(engine: Engine) -> bool:
    """Whether the device still takes work from this process: an error of a kernel sticks to it."""
    try:
        synchronize(engine)
        torch.zeros(1, device=device(engine)).item()
    except Exception:  # noqa: BLE001 - whatever a broken device raises
        return False
    return True


def unsupported_reason(error: BaseException) -> str | None:
    """The reason, if ``error`` says that the engine lacks something rather than that the kernel is wrong."""
    if _current is not Engine.EMULATOR:
        return None
    from fuzz.engine.emulator.errors import UnknownName

    return str(error) if isinstance(error, UnknownName) else None
