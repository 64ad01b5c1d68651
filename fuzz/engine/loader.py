"""Execute a third-party kernel file for the engine of this process, with scoped imports."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, update_wrapper
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from fuzz.engine import emulator
from fuzz.engine.emulator.facade import H200, Device, Facade, torch_with
from oracle.kinds import Engine

ModuleFactory = Callable[[str], ModuleType]


class KernelLoader:
    """Decorates an adapter's function that loads its kernels for the engine of this process.

    It runs once a process. The compile gate finds it in the adapter's module and calls it in a process of its
    own, where the installed compiler loads what the emulator has run.
    """

    def __init__(self, load: Callable[[], ModuleType]) -> None:
        self._load = cache(load)
        update_wrapper(self, load)

    def __call__(self) -> ModuleType:
        """The module that the function returns."""
        return self._load()


_machine: Device | None = None


def pretend(device: Device) -> None:
    """In this process, which has no GPU or does not use it: kernel files find the machine to be ``device``."""
    global _machine
    _machine = device


def pretended() -> Device | None:
    """The machine that ``pretend`` named. The emulator is an H200 where nothing else was said."""
    return _machine


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


asked: dict[str, ModuleType] = {}
"""Every module that scoped imports made, by name, the latest of each; whoever wants to know clears it before."""


@contextmanager
def scoped_imports(packages: Mapping[str, ModuleFactory]) -> Iterator[dict[str, ModuleType]]:
    """Within the block, every module of the named top-level packages is made by its factory.

    Modules of these packages that were loaded before are put aside and put back; those made within are gone
    afterwards, and then in the dictionary that is yielded.
    """
    made: dict[str, ModuleType] = {}

    def take() -> dict[str, ModuleType]:
        names = [name for name in sys.modules if name.partition(".")[0] in packages]
        return {name: sys.modules.pop(name) for name in names}

    before = take()
    finder = _Finder(packages)
    sys.meta_path.insert(0, finder)
    try:
        yield made
    finally:
        sys.meta_path.remove(finder)
        made |= take()
        asked.update(made)
        sys.modules.update(before)


def stands_for(kind: type) -> tuple[str, str] | None:
    """Module and name that a class of an adapter was given as to files that were executed, or None."""
    for modules in imported.values():
        for module, found in modules.items():
            name = next((name for name, value in vars(found).items() if value is kind), None)
            if name is not None:
                return module, name
    return None


imported: dict[Path, dict[str, ModuleType]] = {}
"""For each file that was executed, the modules that its imports were given, by name."""


def load_source(
    path: Path, name: str, packages: Mapping[str, ModuleFactory], engine: Engine, device: Device | None = None
) -> ModuleType:
    """Execute the kernel file ``path`` under the module name ``name``.

    ``packages`` says, by top-level name, how to make the modules that the file imports but does not need for
    its kernels. On ``emulator`` the file sees our substitute for Triton, and the pretended machine, or ``device``,
    or an H200; elsewhere the installed one.
    """
    with scoped_imports(packages) as imported[path]:
        if engine is Engine.EMULATOR:
            # Launchers choose block sizes by what torch.cuda says of the machine.
            return emulator.load_source(path, name, imports={"torch": torch_with(_machine or device or H200)})
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{path} is not a Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        with _answering_for_the_machine():
            spec.loader.exec_module(module)
        for global_name, value in list(vars(module).items()):
            if isinstance(value, Facade):
                # Triton takes a module among a kernel's globals only if it is one: the answers have been given.
                setattr(module, global_name, value.real)
        return module


@contextmanager
def _answering_for_the_machine() -> Iterator[None]:
    """Within the block an import of torch finds one that answers for the pretended machine, if there is one."""
    if _machine is None:
        yield
        return
    real = sys.modules["torch"]
    sys.modules["torch"] = torch_with(_machine)
    try:
        yield
    finally:
        sys.modules["torch"] = real


def missing_compiler(engine: Engine) -> str | None:
    """Why Triton kernels cannot run on ``engine`` here, or None. The emulator needs no Triton."""
    if engine is Engine.EMULATOR or importlib.util.find_spec("triton") is not None:
        return None
    if engine is Engine.HIP:
        return "triton is not installed: get it from where torch for ROCm came from"
    return "triton is not installed: pip install attn-oracle[triton]"
