"""Known targets, by name: a visible list of modules, entry points, and modules that the user names."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType

from oracle.declare import Declaration, declaration_of
from oracle.kinds import Engine

BUILT_IN = "suites.targets"
GROUP = "attn_oracle.targets"


class RegistryError(ValueError):
    """Targets that cannot be loaded or found. One line: what, and what there is instead."""


def _import(name: str, origin: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise RegistryError(f"{origin}: no module named {name}") from None
        raise RegistryError(f"{origin}: {name} needs the module {error.name}, which is missing") from None


def _load_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"attn_oracle_targets_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise RegistryError(f"--targets: {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def declared_in(module: ModuleType) -> list[Declaration]:
    """Declarations attached to the functions of a module, in the order of their definition."""
    found = [declaration_of(value) for value in vars(module).values()]
    return [d for d in dict.fromkeys(found) if d is not None]


def load(extra: Sequence[str] = ()) -> dict[str, Declaration]:
    """Every known target by name.

    ``extra`` are module names or paths of Python files. Raises ``RegistryError`` for a module that cannot be
    found and for a name that is declared twice.
    """
    built_in: tuple[str, ...] = _import(BUILT_IN, "attn-oracle").MODULES
    modules = [_import(name, BUILT_IN) for name in built_in]
    modules += [_import(point.value, f"entry point {point.name}") for point in entry_points(group=GROUP)]
    for name in extra:
        modules.append(_load_file(Path(name)) if name.endswith(".py") else _import(name, "--targets"))
    targets: dict[str, Declaration] = {}
    for module in modules:
        for declaration in declared_in(module):
            known = targets.setdefault(declaration.name, declaration)
            if known is not declaration:
                raise RegistryError(f"target {declaration.name} is declared twice, in {module.__name__} too")
    return targets


def select(targets: dict[str, Declaration], patterns: Sequence[str]) -> list[Declaration]:
    """Targets whose name matches one of the globs, all where there are none.

    Raises ``RegistryError`` for a pattern that matches nothing.
    """
    if not patterns:
        return list(targets.values())
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in targets):
            raise RegistryError(f"target {pattern!r}: unknown; known: {', '.join(targets)}")
    return [t for name, t in targets.items() if any(fnmatchcase(name, p) for p in patterns)]


def why_not(declaration: Declaration, engine: Engine) -> str | None:
    """Why a target cannot run on ``engine`` here, or None."""
    if engine not in declaration.engines:
        return f"runs on {', '.join(declaration.engines)} only"
    return declaration.unavailable(engine)
