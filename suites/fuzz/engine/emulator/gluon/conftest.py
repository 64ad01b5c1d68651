"""Gluon kernels of these tests, loaded by the emulator."""

from pathlib import Path
from types import ModuleType

import pytest

from fuzz.engine import emulator

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def faults() -> ModuleType:
    return emulator.load_source(HERE / "faults.py", "faulty_gluon_kernels")


@pytest.fixture(scope="session")
def programs() -> ModuleType:
    return emulator.load_source(HERE / "programs.py", "gluon_program_kernels")
