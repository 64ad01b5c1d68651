"""Kernels of the emulator's tests, loaded by the emulator."""

from pathlib import Path
from types import ModuleType

import pytest

from fuzz.engine import emulator

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def planted() -> ModuleType:
    return emulator.load_source(HERE / "planted.py", "planted_kernels")


@pytest.fixture(scope="session")
def programs() -> ModuleType:
    return emulator.load_source(HERE / "programs.py", "program_kernels")
