"""The code blocks of the guides are run, page by page, in a folder of their own.

They follow each other, so that pytest-xdist is not for them: `nox -s docs` runs them. What cannot run here says why in
the page's source: `<!--- skip: next if(True, reason="it needs an AMD GPU") -->`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from sybil import Example, Sybil
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser, SkipParser

collect_ignore = ["examples"]  # repositories of their own, whose tests run against an installed wheel
ROOT = Path(__file__).resolve().parent.parent


def run_shell(example: Example) -> None:
    """A block of `sh`: every line has to succeed. `attn-oracle` and `python` are those of this environment."""
    folder = example.namespace["folder"]
    path = os.pathsep.join([str(folder / "bin"), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-e", "-c", example.parsed],
        cwd=folder,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise AssertionError(f"exit {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")


def set_up(namespace: dict[str, Any]) -> None:
    """A fresh folder for each page, with the two commands in it."""
    import tempfile

    folder = Path(tempfile.mkdtemp(prefix="docs-"))
    (folder / "bin").mkdir()
    for name, command in {"python": "", "attn-oracle": "-m attn_oracle_cli"}.items():
        script = folder / "bin" / name
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {command} "$@"\n')
        script.chmod(0o755)
    namespace["folder"] = folder


def tear_down(namespace: dict[str, Any]) -> None:
    import shutil

    shutil.rmtree(namespace["folder"])


pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser(), CodeBlockParser("sh", run_shell), SkipParser()],
    patterns=["how-to/*.md", "explanation/*.md", "tutorial.md"],
    setup=set_up,
    teardown=tear_down,
).pytest()
