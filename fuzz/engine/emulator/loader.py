"""Loading kernel source: a file is executed with substitutes for `triton` and for its other imports.

Executing the file is the purpose: it is source that the caller has installed and names by path. Its imports
are answered by an `__import__` of its own, at load time and whenever a function of it imports later, so that
nothing real is shadowed for anyone else, and the file never meets a real triton.
"""

import builtins
import linecache
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import resolve_name
from pathlib import Path
from types import ModuleType
from typing import Any

from fuzz.engine.emulator import lang
from fuzz.engine.emulator.errors import SOURCE_MARK
from fuzz.engine.emulator.facade import Facade
from fuzz.engine.emulator.rewrite import compile_source


def load_source(path: Path, module_name: str, *, imports: Mapping[str, ModuleType] | None = None) -> ModuleType:
    """Execute a source file as `module_name`; its kernels run in the emulator.

    `imports`: modules that the file shall find under these full names; packages above them are made up.
    Imports beyond these, `triton` and what is importable anyway raise ImportError, as does a missing file.
    """
    return _execute(_read(path), module_name, str(path), _Imports(imports or {}, {}))


def load_text(
    source: str,
    module_name: str,
    *,
    filename: str | None = None,
    imports: Mapping[str, ModuleType] | None = None,
) -> ModuleType:
    """The same for source text; tracebacks show it under `filename` (default: the module's name)."""
    filename = filename or f"<{module_name}>"
    if filename.startswith("<"):
        linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    return _execute(source, module_name, filename, _Imports(imports or {}, {}))


class SourceTree:
    """Packages whose files are executed in the emulator as they are imported from each other.

    `folders`: folder of each top-level package. No `__init__` is executed: packages are bare, and a name that
    a file imports from one is a module. `imports`: as in `load_source`; they go before files.
    """

    def __init__(self, folders: Mapping[str, Path], imports: Mapping[str, ModuleType] | None = None) -> None:
        self._imports = _Imports(imports or {}, folders)

    def load(self, name: str) -> ModuleType:
        """A module by its full name, executed once. Raises ImportError where there is no such file."""
        return self._imports.find(name)


def stub(name: str, **names: Any) -> ModuleType:
    """A module for `imports` with the given names; any other name fails only when it is used."""
    return lang.SubstituteModule(name, name, names)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ImportError(f"cannot read kernel source {path}: {error.strerror}") from error


def _execute(
    source: str, module_name: str, filename: str, imports: "_Imports", made: Callable[[ModuleType], None] | None = None
) -> ModuleType:
    """Run a module's code. `made` sees the module before that, as `sys.modules` does of real ones."""
    code = compile_source(source, filename)
    module = ModuleType(module_name)
    module.__file__ = filename
    module.__package__ = module_name.rpartition(".")[0]
    module.__dict__[SOURCE_MARK] = lang.RUNTIME
    module.__dict__["__builtins__"] = {**vars(builtins), "__import__": imports.importer}
    if made is not None:
        made(module)
    with _listed(module):
        exec(code, module.__dict__)
    return module


class _Imports:
    """What the imports of loaded files find. Top-level packages with an entry here hide the real ones."""

    def __init__(self, given: Mapping[str, ModuleType], folders: Mapping[str, Path]) -> None:
        self.modules = {**lang.modules(), **given}
        self.folders = folders
        self.roots = {name.partition(".")[0] for name in (*self.modules, *folders)}
        for name in [*lang.modules(), *given]:
            self._link(name)

    def importer(
        self,
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, Any] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> Any:
        """`builtins.__import__` for loaded files."""
        package = (globals or {}).get("__package__") or ""
        full = resolve_name("." * level + name, package) if level else name
        root = full.partition(".")[0]
        if root not in self.roots:
            return builtins.__import__(name, globals, locals, fromlist or (), level)
        module = self.find(full)
        if not fromlist:
            return self.modules[root]
        for item in fromlist:
            if root in self.folders and item not in vars(module) and self._is_source(f"{full}.{item}"):
                self.find(f"{full}.{item}")
        return module

    def find(self, name: str) -> ModuleType:
        """A module by its full name. Raises ImportError."""
        if name in self.modules:
            return self.modules[name]
        root = name.partition(".")[0]
        if isinstance(self.modules.get(root), Facade):
            __import__(name)
            return sys.modules[name]
        path = self._path(name)
        if path is not None and path.with_suffix(".py").is_file():
            file = path.with_suffix(".py")
            self._link(name.rpartition(".")[0])

            def made(module: ModuleType) -> None:
                self.modules[name] = module

            try:
                _execute(_read(file), name, str(file), self, made)
            except BaseException:
                self.modules.pop(name, None)
                raise
        elif path is not None and path.is_dir():
            self.modules[name] = _package(name)
        else:
            raise ImportError(f"no module named {name} among the substitutes", name=name)
        self._link(name)
        return self.modules[name]

    def _path(self, name: str) -> Path | None:
        root, *rest = name.split(".")
        return self.folders[root].joinpath(*rest) if root in self.folders else None

    def _is_source(self, name: str) -> bool:
        path = self._path(name)
        return name in self.modules or (path is not None and (path.with_suffix(".py").is_file() or path.is_dir()))

    def _link(self, name: str) -> None:
        """Make the packages above a module, and set it in them as an attribute, as import would."""
        while "." in name:
            parent, _, last = name.rpartition(".")
            package = self.modules.get(parent)
            if package is None:
                package = self.modules[parent] = _package(parent)
            if name in self.modules:
                vars(package).setdefault(last, self.modules[name])
            name = parent


def _package(name: str) -> ModuleType:
    return lang.SubstituteModule(name, name, {})


@contextmanager
def _listed(module: ModuleType) -> Iterator[None]:
    """The module in `sys.modules` while it executes: decorators of classes look it up there."""
    name = module.__name__
    before = sys.modules.get(name)
    sys.modules[name] = module
    try:
        yield
    finally:
        if before is None:
            sys.modules.pop(name, None)
        else:
            sys.modules[name] = before
