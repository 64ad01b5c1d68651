"""A repository of somebody else's in a temporary folder, with a kernel, a `fuzz/` and a `suites/` of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "operations.md"
RIGHT, WRONG = "position - window\n", "position - window - 1\n"

CHECK = """
import fuzz
from mine import attention


def test_attention(attn_oracle):
    assert fuzz.OWNER == "repository"
    attn_oracle.check(attention, cases=8, engine="emulator")
"""


def kernel(*, wrong: bool = False) -> str:
    """The kernel of the documentation, or the same with a window of one key too many."""
    found = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    assert found is not None
    assert RIGHT in found[1]
    return found[1].replace(RIGHT, WRONG) if wrong else found[1]


def installed() -> bool:
    """Whether pytest finds the plugin by itself here."""
    return any(point.value == "attn_oracle_pytest" for point in metadata.entry_points(group="pytest11"))


@dataclass(frozen=True)
class Repository:
    """Files in a folder, and pytest run there."""

    folder: Path

    def write(self, **files: str) -> None:
        for name, text in files.items():
            path = self.folder / name.replace("__", "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.with_suffix(".py").write_text(text)

    def own_packages(self) -> None:
        """Packages of the names of ours, which the repository's tests must keep."""
        for name in ("fuzz", "suites"):
            (self.folder / name).mkdir()
            (self.folder / name / "__init__.py").write_text("OWNER = 'repository'\n")

    def pytest(self, *arguments: str, plugin: bool = True, **env: str) -> subprocess.CompletedProcess[str]:
        load = ["-p", "attn_oracle_pytest"] if plugin else []
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *load, *arguments],
            cwd=self.folder,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
                "PYTEST_ADDOPTS": "",
                "COLUMNS": "140",
                **env,
            },
            capture_output=True,
            text=True,
            check=False,
        )
