"""Hypothesis profiles of the framework's own tests; `--hypothesis-profile=nightly` asks for the long one."""

from __future__ import annotations

import pytest
from hypothesis import settings

# No deadline: a first call may compile, and two workers share the cores. Derandomised: a commit is judged by
# what it changes; new examples are the nightly profile's work. No database: nothing to carry between runs.
settings.register_profile("default-run", deadline=None, derandomize=True, database=None)
settings.register_profile("nightly", deadline=None, max_examples=2000, print_blob=True)
settings.load_profile("default-run")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the failure texts that are kept anew")
