"""Load single modules of an installed sglang without running its packages' ``__init__``.

``import sglang`` needs some ninety packages that the kernels do not. A kernel file is executed under a
private name; while it loads, and only then, its imports from sglang see placeholders. Nothing is left in
``sys.modules`` under sglang's names, so that a full installation in the same process is never shadowed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from fuzz import engine as engines
from fuzz.call import Unsupported
from fuzz.engine import loader
from fuzz.engine.emulator.facade import Device
from fuzz.engine.loader import ModuleFactory
from fuzz.versions import installed
from oracle.kinds import Engine
from oracle.precision import Citation


@cache
def root() -> Path | None:
    """The folder of the installed sglang, found without importing it, or None."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def has(candidates: tuple[str, ...]) -> bool:
    """Whether the installed sglang has one of the files (paths inside the package)."""
    folder = root()
    return folder is not None and any((folder / name).is_file() for name in candidates)


def missing(candidates: tuple[str, ...], engine: Engine) -> str | None:
    """Why none of the files can be loaded here, in one line, or None."""
    if root() is None:
        return "sglang is not installed: pip install --no-deps sglang==0.5.15"
    if not has(candidates):
        return f"sglang {installed('sglang')} has none of {', '.join(candidates)}"
    return loader.missing_compiler(engine)


def lacks(candidates: tuple[str, ...], function: str) -> str | None:
    """Why the first of the files that exists does not define ``function``, in one line, or None."""
    folder = root()
    path = next((folder / name for name in candidates if folder is not None and (folder / name).is_file()), None)
    if path is None or f"\ndef {function}(" in path.read_text(encoding="utf-8"):
        return None
    return f"{path.name} of sglang {installed('sglang')} has no {function}"


class _Placeholder:
    """Stands for a name that a kernel file imports and our targets never use."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise Unsupported(f"sglang {installed('sglang')} needs {self._name}, which this adapter does not load")

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[Any, ...]:
        """As a base class it adds nothing."""
        return ()


class _PlaceholderModule(ModuleType):
    """A module that has every name, as a placeholder, apart from those given."""

    def __init__(self, name: str, given: Mapping[str, Any]) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        vars(self).update(given)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Placeholder(f"{self.__name__}.{name}")


def cited(files: tuple[str, ...], *versions: tuple[str, str]) -> tuple[Citation, ...]:
    """Citations of a file at its places up to 0.5.16 and later, each with its lines and SHA-256 there."""
    return tuple(
        Citation(file=f"sglang/{name}", lines=lines, sha256=sha256)
        for name, (lines, sha256) in zip(files, versions, strict=True)
    )


Given = Mapping[str, Mapping[str, Any]]
"""By module name, the values that a file really needs from other modules."""


def packages(given: Given) -> dict[str, ModuleFactory]:
    """For scoped imports: sglang, and the other packages that ``given`` names. What is not given is a placeholder."""

    def placeholder(name: str) -> ModuleType:
        return _PlaceholderModule(name, given.get(name, {}))

    return dict.fromkeys({"sglang", *(name.partition(".")[0] for name in given)}, placeholder)


def load(candidates: tuple[str, ...], given: Given, device: Device | None = None) -> ModuleType:
    """Execute the first of ``candidates`` (paths inside the package) that exists, for the current engine.

    ``given`` holds, by module name, the values that the file really needs from other modules. In the emulator
    the file finds the machine to be ``device``.
    """
    folder = root()
    if folder is None:
        raise FileNotFoundError("sglang is not installed")
    path = next(folder / name for name in candidates if (folder / name).is_file())
    return loader.load_source(path, f"attn_oracle_loaded.{path.stem}", packages(given), engines.current(), device)
