"""Execute a third-party kernel file for the engine of this process, with scoped imports."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from oracle.kinds import Engine

ModuleFactory = Callable[[str], ModuleType]


class _Given(Loader):
    def __init__(self, factory: ModuleFactory) -> None:
        self._factory = factory

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._factory(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: the factory filled it."""


class _Finder(MetaPathFinder):
    def __init__(self, packages: Mapping[str, ModuleFactory]) -> None:
        self._packages = packages

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        factory = self._packages.get(fullname.partition(".")[0])
        if factory is None:
            return None
        return ModuleSpec(fullname, _Given(factory), is_package=True)


@contextmanager
def scoped_imports(packages: Mapping[str, ModuleFactory]) -> Iterator[None]:
    """Within the block, every module of the named top-level packages is made by its factory.

    Modules of these packages that were loaded before are put aside and put back; those made within are gone
    afterwards.
    """

    def take() -> dict[str, ModuleType]:
        names = [name for name in sys.modules if name.partition(".")[0] in packages]
        return {name: sys.modules.pop(name) for name in names}

    before = take()
    finder = _Finder(packages)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        take()
        sys.modules.update(before)


def load_source(path: Path, name: str, packages: Mapping[str, ModuleFactory], engine: Engine) -> ModuleType:
    """Execute the kernel file ``path`` under the module name ``name``.

    ``packages`` says, by top-level name, how to make the modules that the file imports but does not need for
    its kernels. On ``emulator`` the file sees our substitute for Triton, elsewhere the installed one.
    """
    with scoped_imports(packages):
        if engine is Engine.EMULATOR:
            from fuzz.engine.emulator.loader import load_source as emulate

            return emulate(path, name)
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{path} is not a Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return module


def missing_compiler(engine: Engine) -> str | None:
    """Why Triton kernels cannot run on ``engine`` here, or None. The emulator needs no Triton."""
    if engine is Engine.EMULATOR or importlib.util.find_spec("triton") is not None:
        return None
    if engine is Engine.HIP:
        return "triton is not installed: get it from where torch for ROCm came from"
    return "triton is not installed: pip install attn-oracle[triton]"
