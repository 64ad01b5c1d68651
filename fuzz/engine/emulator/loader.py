"""Loading kernel source: a file is executed with substitutes for `triton` and for its other imports.

Executing the file is the purpose: it is source that the caller has installed and names by path. Substitutes
are in `sys.modules` only while it executes; what was there before, a real triton or package included, is put
back, and no real module is changed.
"""

import linecache
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from fuzz.engine.emulator import lang
from fuzz.engine.emulator.errors import SOURCE_MARK
from fuzz.engine.emulator.rewrite import compile_source

_ABSENT = object()


def load_source(path: Path, module_name: str, *, imports: Mapping[str, ModuleType] | None = None) -> ModuleType:
    """Execute a source file as `module_name`; its kernels run in the emulator.

    `imports`: modules that the file shall find under these full names; packages above them are made up.
    Imports beyond these, `triton` and what is importable anyway raise ImportError, as does a missing file.
    """
    try:
        source = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ImportError(f"cannot read kernel source {path}: {error.strerror}") from error
    return load_text(source, module_name, filename=str(path), imports=imports)


def load_text(
    source: str,
    module_name: str,
    *,
    filename: str | None = None,
    imports: Mapping[str, ModuleType] | None = None,
) -> ModuleType:
    """The same for source text; tracebacks show it under `filename` (default: the module's name)."""
    filename = filename or f"<{module_name}>"
    code = compile_source(source, filename)
    if filename.startswith("<"):
        linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    module = ModuleType(module_name)
    module.__file__ = filename
    module.__dict__[SOURCE_MARK] = lang.RUNTIME
    with _substituted({**lang.modules(), **_with_parents(imports or {}), module_name: module}):
        exec(code, module.__dict__)
    return module


def stub(name: str, **names: Any) -> ModuleType:
    """A module for `imports` with the given names; any other name fails only when it is used."""
    return lang.SubstituteModule(name, name, names)


def _with_parents(imports: Mapping[str, ModuleType]) -> dict[str, ModuleType]:
    """The modules and the packages above them, linked as import would link them."""
    modules = dict(imports)
    for name in sorted(imports, key=lambda name: name.count("."), reverse=True):
        while "." in name:
            parent = name.rpartition(".")[0]
            package = modules.setdefault(parent, lang.SubstituteModule(parent, parent, {}))
            if parent not in imports:
                setattr(package, name.rpartition(".")[2], modules[name])
            name = parent
    return modules


@contextmanager
def _substituted(modules: Mapping[str, ModuleType]) -> Iterator[None]:
    """`sys.modules` with these entries, and nothing else below their packages, until left."""
    roots = {name.partition(".")[0] for name in modules}
    saved = {name: sys.modules[name] for name in list(sys.modules) if name.partition(".")[0] in roots}
    for name in saved:
        del sys.modules[name]
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in list(sys.modules):
            if name.partition(".")[0] in roots:
                del sys.modules[name]
        sys.modules.update(saved)
