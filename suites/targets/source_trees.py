"""Packages whose kernels are read from a source tree: the folder that a variable names, or an installed package.

Nothing of a package is imported, so that its ``__init__``, which may build extensions or ask for a GPU, never runs:
single files are executed for the engine of this process, and find each other.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

from fuzz import engine as engines
from fuzz.engine import emulator, loader
from fuzz.engine.emulator.facade import Device, torch_with
from fuzz.engine.loader import pretended
from fuzz.sources import VARIABLES, folder
from oracle.kinds import Engine


@dataclass(frozen=True)
class SourceTree:
    """Where a package comes from: its import name, and how to install it."""

    package: str
    install: str
    compiler: str = "triton"
    """Import name of the Triton that its files ask for."""

    @property
    def variable(self) -> str:
        """The variable that names the package's folder, or the one that holds it."""
        return VARIABLES[self.package]

    def root(self) -> Path | None:
        """The package's folder, or None."""
        return folder(self.package)

    def missing(self, files: tuple[str, ...], engine: Engine) -> str | None:
        """Why ``files`` (paths inside the package) cannot be loaded here, in one line, or None."""
        root = self.root()
        if root is None:
            given = os.environ.get(self.variable)
            if given:
                return f"{self.variable}={given} holds no package {self.package}"
            return f"no {self.package}: {self.install}"
        absent = next((name for name in files if not (root / name).is_file()), None)
        if absent is not None:
            return f"{root} has no {absent}: {self.install}"
        if self.compiler == "triton" or engine is Engine.EMULATOR:
            return loader.missing_compiler(engine)
        found = importlib.util.find_spec(self.compiler)
        return None if found is not None else f"{self.compiler} is not installed: pip install {self.compiler}"

    def load(self, module: str, given: Mapping[str, ModuleType], device: Device) -> ModuleType:
        """Execute a module by its full name. ``given`` answers, by full name, what files import beyond themselves.

        In the emulator the files find the machine to be ``device``. Raises ``FileNotFoundError``, ``ImportError``.
        """
        root = self.root()
        if root is None:
            raise FileNotFoundError(f"no {self.package}: {self.install}")
        if engines.current() is Engine.EMULATOR:
            return emulator.SourceTree({self.package: root}, {**given, "torch": torch_with(device)}).load(module)
        with self.importing(given):
            return importlib.import_module(module)

    @contextmanager
    def importing(self, given: Mapping[str, ModuleType]) -> Iterator[None]:
        """Within the block, functions of loaded files that import only when they are called find what they need."""
        root = self.root()
        if root is None or engines.current() is Engine.EMULATOR:
            # In the emulator files keep an import of their own.
            yield
            return
        roots = {self.package, *(name.partition(".")[0] for name in given)}
        with loader.scoped_imports(dict.fromkeys(roots, _Files(self.package, root, given).module)):
            yield


@dataclass(frozen=True)
class _Files:
    """Makes the modules of a package from its files, for an installed Triton."""

    package: str
    root: Path
    given: Mapping[str, ModuleType]

    def module(self, name: str) -> ModuleType:
        if name in self.given:
            return self.given[name]
        top, *rest = name.split(".")
        path = self.root.joinpath(*rest)
        above = any(known.startswith(f"{name}.") for known in self.given)
        if above or (top == self.package and path.is_dir()):
            # A package. Its __init__ is not executed.
            return ModuleType(name)
        path = path.with_suffix(".py")
        if top != self.package or not path.is_file():
            raise ModuleNotFoundError(f"no module named {name} among the files of {self.package}", name=name)
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{path} is not a Python file")
        made = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(made)
        return made


def other_arch(device: Device, engine: Engine) -> str | None:
    """Why a target of ``device``'s architecture cannot run on the GPU of this machine, in one line, or None."""
    if engine is not Engine.HIP or not torch.cuda.is_available():
        return None
    here = str(torch.cuda.get_device_properties(0).gcnArchName).partition(":")[0]
    return None if here == device.arch else f"this GPU is {here}, the target is of {device.arch}"


def amd_device(default: Device) -> Device:
    """The AMD machine that this process pretends to be; ``default`` where it pretends to be none, or another's."""
    machine = pretended()
    return machine if machine is not None and machine.arch is not None else default


def amd_arch(default: Device) -> str:
    """The architecture to load kernels for: of the pretended machine, of the GPU, or of ``default``."""
    machine = amd_device(default)
    if engines.current() is Engine.EMULATOR or machine is pretended():
        return machine.arch or ""
    return str(torch.cuda.get_device_properties(0).gcnArchName).partition(":")[0]


FP8_DTYPE = {"gfx942": "e4m3fnuz", "gfx950": "e4m3fn"}
"""The 8-bit format that AMD's libraries store by default, by architecture."""

AITER = SourceTree("aiter", "pip install --no-deps amd-aiter, or ATTN_ORACLE_AITER=FOLDER")
TOKENSPEED = SourceTree(
    "tokenspeed_kernel_amd",
    "pip install --no-deps tokenspeed-kernel-amd, or ATTN_ORACLE_TOKENSPEED=FOLDER",
    compiler="tokenspeed_triton",
)
