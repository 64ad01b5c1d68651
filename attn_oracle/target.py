"""Which target is meant, and how another process finds it."""

from __future__ import annotations

import importlib.util
import os
import shlex
import site
import sys
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attn_oracle.process import UsageError
from oracle.declare import Declaration, declaration_of, declared

Target = str | Callable[..., Any]


@dataclass(frozen=True)
class Named:
    """A target's name, the modules that declare it, and folders that these need on the path.

    runs_on: the engine on which our process runs it, once it is open there.
    """

    name: str
    modules: tuple[str, ...]
    folders: tuple[str, ...] = ()
    runs_on: str = ""

    def replay(self, path: Path, engine: str) -> str:
        """The command that runs a finding again."""
        named = "".join(f" --targets {_word(module)}" for module in self.modules)
        chosen = "" if engine == "auto" else f" --engine {engine}"
        needed = f"PYTHONPATH={_word(os.pathsep.join(self.folders))} " if self.folders else ""
        return f"{needed}attn-oracle replay {_word(str(path))}{named}{chosen}"


def named(target: Target, modules: Sequence[str] | None) -> Named:
    """A target by its declared function, or by its name: with the modules that declare it, or as this process has it.

    A name that nothing here declares is left for the other process to find. Raises UsageError.
    """
    if isinstance(target, str):
        return Named(target, tuple(modules)) if modules is not None else _by_name(target)
    declaration = declaration_of(target)
    if declaration is None:
        shown = getattr(target, "__qualname__", repr(target))
        raise UsageError(f"target: {shown} is not declared; write @declare.paged_decode(...) above it, or give a name")
    if modules is not None:
        return Named(declaration.name, tuple(modules))
    return _in_its_module(declaration)


def _by_name(name: str) -> Named:
    found = sorted({_in_its_module(one) for one in declared(name)}, key=lambda one: one.modules)
    if len(found) > 1:
        places = " and ".join(module for one in found for module in one.modules)
        raise UsageError(f"target {name}: declared in {places}; give the function, or modules=[...] with one of them")
    return found[0] if found else Named(name, ())


def _in_its_module(declaration: Declaration) -> Named:
    module = sys.modules.get(getattr(declaration.function, "__module__", ""))
    file = getattr(module, "__file__", None)
    if module is None or file is None:
        raise UsageError(f"target {declaration.name}: its module has no file; give modules=[...]")
    return _of_module(declaration.name, module.__name__, Path(file).resolve())


def _of_module(name: str, module: str, file: Path) -> Named:
    """By the module's name if that finds the same file, as of a package; else by the file."""
    depth = module.count(".") + (file.name == "__init__.py")
    folder = file.parents[depth]
    spec = importlib.util.find_spec(module) if "." in module else None
    if spec is not None and spec.origin is not None and Path(spec.origin).resolve() == file:
        return Named(name, (module,), () if _standard(folder) else (_relative(folder),))
    return Named(name, (_relative(file),))


def _standard(folder: Path) -> bool:
    """Whether every Python of this environment looks there."""
    known = {*site.getsitepackages(), site.getusersitepackages(), sysconfig.get_path("purelib")}
    return any(folder == Path(one).resolve() for one in known)


def _relative(path: Path) -> str:
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def _word(text: str) -> str:
    return shlex.quote(text)
