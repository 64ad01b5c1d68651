"""Check the tutorial and the example repositories against an installed wheel.

Run by the Python of the environment that holds the wheel, pytest and pip. Each is copied to a temporary folder,
installed there if it is a project, and its tests run twice: they pass for the right kernel, and with a window that is
off by one they fail and the text says so. Exits 1 on a fault.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"
BLOCK = re.compile(r"```python\n# (\w+\.py)\n(.*?)```", re.S)
SAID = re.compile(
    r"oracle\.failure\.WindowMismatch: [\w.]+: (values|lse): window: \d+ keys where \d+ keys? (is|are) asked for"
)


@dataclass(frozen=True)
class Example:
    """A folder of docs/examples, or the tutorial's code blocks, and the mistake to make in one file."""

    name: str
    file: str
    right: str
    wrong: str

    def copy(self, where: Path) -> None:
        if self.name == "tutorial":
            where.mkdir()
            for name, text in BLOCK.findall((DOCS / "tutorial.md").read_text()):
                (where / name).write_text(text)
        else:
            shutil.copytree(DOCS / "examples" / self.name, where)
            run(where, sys.executable, "-m", "pip", "install", "--quiet", "-e", ".")


EXAMPLES = (
    Example("tutorial", "mine.py", "max(length - window, 0)", "max(length - window - 1, 0)"),
    Example("triton_decode", "triton_decode/kernels.py", "length - window, 0", "length - window - 1, 0"),
    Example(
        "onnxruntime_attention",
        "ort_attention/attention.py",
        "local_window_size=window,",
        "local_window_size=window + (window > 0),",
    ),
)


def run(where: Path, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """A command without what would put a source tree on the path."""
    print("+", *command, flush=True)
    env = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "PYTEST", "ATTN_ORACLE"))}
    done = subprocess.run(
        command, cwd=where, env=env | {"COLUMNS": "200"}, capture_output=True, text=True, check=False,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    if check and done.returncode:
        raise SystemExit(f"exit {done.returncode}: {' '.join(command)}\n{done.stdout}{done.stderr}")
    return done


def faults(example: Example, where: Path) -> list[str]:
    """What is not as it should be, one line each."""
    example.copy(where)
    file = where / example.file
    text = file.read_text()
    if text.count(example.right) != 1:
        return [f"{example.file}: {example.right!r} is not in it once"]
    passed = run(where, sys.executable, "-m", "pytest", "-q", check=False)
    file.write_text(text.replace(example.right, example.wrong))
    failed = run(where, sys.executable, "-m", "pytest", "-q", check=False)
    found = []
    if passed.returncode:
        found.append(f"the right kernel does not pass:\n{passed.stdout}{passed.stderr}")
    if failed.returncode != 1:
        found.append(f"a window off by one gives exit {failed.returncode}:\n{failed.stdout}{failed.stderr}")
    elif not SAID.search(failed.stdout):
        found.append(f"the text does not name the window:\n{failed.stdout}")
    return found


def main() -> int:
    """Every example, or those that the arguments name."""
    chosen = [example for example in EXAMPLES if not sys.argv[1:] or example.name in sys.argv[1:]]
    bad = 0
    with tempfile.TemporaryDirectory() as folder:
        for example in chosen:
            found = faults(example, Path(folder, example.name))
            bad += bool(found)
            print(f"{example.name}: {'; '.join(found) or 'passes, and fails with a window off by one'}")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
