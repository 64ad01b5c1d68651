"""The pytest plugin of attn-oracle.

pytest loads this module in every run of every environment that has attn-oracle installed, so it imports
pytest and nothing of ours. It never imports `fuzz` or `suites`: a repository may have top-level packages of
those names, and in its test process they are the repository's.
"""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def attn_oracle() -> ModuleType:
    """The `oracle` package, imported by the first test that asks for it."""
    return importlib.import_module("oracle")
