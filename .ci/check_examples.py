"""Check the tutorial and the example repositories, against an installed wheel or this source tree.

Run by the Python of the environment that holds the wheel, pytest and pip. Each is copied to a temporary folder,
installed there if it is a project, and its tests run twice: they pass for the right kernel, and with a window that is
off by one they fail and the text says so. Exits 1 on a fault.

`--source` installs nothing: the source tree and the copy are on PYTHONPATH, and the plugin is named. `--engine NAME`
is where the kernels have to run; on a GPU what Triton compiled has to be in its cache, which is a fresh one:

    python3 .ci/check_examples.py --source --engine cuda tutorial triton_decode
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
BLOCK = re.compile(r"```python\n# (\w+\.py)\n(.*?)```", re.S)
SAID = re.compile(
    r"oracle\.failure\.WindowMismatch: [\w.]+: (values|lse): window: \d+ keys where \d+ keys? (is|are) asked for"
)
COMPILED = {"cuda": "*.cubin", "hip": "*.hsaco"}
"""What Triton leaves in its cache for each kernel that it compiled."""


@dataclass(frozen=True)
class Example:
    """A folder of docs/examples, or the tutorial's code blocks, and the mistake to make in one file.

    kernel: the name of its Triton kernel, if it has one.
    """

    name: str
    file: str
    right: str
    wrong: str
    kernel: str | None = None

    def copy(self, where: Path) -> None:
        if self.name == "tutorial":
            where.mkdir(exist_ok=True)
            for name, text in BLOCK.findall((DOCS / "tutorial.md").read_text()):
                (where / name).write_text(text)
        else:
            shutil.copytree(DOCS / "examples" / self.name, where, dirs_exist_ok=True)


EXAMPLES = (
    Example("tutorial", "mine.py", "max(length - window, 0)", "max(length - window - 1, 0)"),
    Example("triton_decode", "triton_decode/kernels.py", "length - window, 0", "length - window - 1, 0", "decode"),
    Example(
        "onnxruntime_attention",
        "ort_attention/attention.py",
        "local_window_size=window,",
        "local_window_size=window + (window > 0),",
    ),
)


@dataclass(frozen=True)
class How:
    """source: from this source tree, with nothing installed. engine: where the kernels have to run."""

    source: bool
    engine: str

    def set_up(self, example: Example, where: Path) -> None:
        example.copy(where)
        if not self.source and (where / "pyproject.toml").exists():
            run(where, {}, sys.executable, "-m", "pip", "install", "--quiet", "-e", ".", check=True)

    def pytest(self, where: Path) -> subprocess.CompletedProcess[str]:
        cache = where / "triton-cache"
        shutil.rmtree(cache, ignore_errors=True)
        env, named = {"TRITON_CACHE_DIR": str(cache)}, []
        if self.source:
            env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(where)])
            # An installed one of us must not be found instead, nor any other plugin.
            env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
            named = ["-p", "attn_oracle_pytest"]
        chosen = [] if self.engine == "auto" else [f"--attn-engine={self.engine}"]
        return run(where, env, sys.executable, "-m", "pytest", "-q", "-rs", *named, *chosen)


def run(where: Path, env: Mapping[str, str], *command: str, check: bool = False) -> subprocess.CompletedProcess[str]:
    """A command without what would put a source tree on the path, and with `env`."""
    print("+", *(f"{name}={value}" for name, value in env.items()), *command, flush=True)
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PYTEST", "ATTN_ORACLE"))}
    done = subprocess.run(
        command, cwd=where, env=inherited | {"COLUMNS": "200"} | env, capture_output=True, text=True, check=False,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    if check and done.returncode:
        raise SystemExit(f"exit {done.returncode}: {' '.join(command)}\n{done.stdout}{done.stderr}")
    return done


def faults(example: Example, where: Path, how: How) -> list[str]:
    """What is not as it should be, one line each."""
    how.set_up(example, where)
    file = where / example.file
    text = file.read_text()
    if text.count(example.right) != 1:
        return [f"{example.file}: {example.right!r} is not in it once"]
    passed = how.pytest(where)
    found = [] if passed.returncode else not_run(example, passed.stdout, where / "triton-cache", how.engine)
    file.write_text(text.replace(example.right, example.wrong))
    failed = how.pytest(where)
    if passed.returncode:
        found.append(f"the right kernel does not pass:\n{passed.stdout}{passed.stderr}")
    if failed.returncode != 1:
        found.append(f"a window off by one gives exit {failed.returncode}:\n{failed.stdout}{failed.stderr}")
    elif not SAID.search(failed.stdout):
        found.append(f"the text does not name the window:\n{failed.stdout}")
    print(*(f"  {line}" for line in re.findall(r"^[\w.]+: \d+ cases? .*", passed.stdout, re.M)), sep="\n")
    return found


def not_run(example: Example, said: str, cache: Path, engine: str) -> list[str]:
    """What a run that passed did not do: cases on the engine, and a kernel that Triton compiled for a GPU."""
    found = []
    on = r"\w+" if engine == "auto" else engine
    if not re.search(rf"^[\w.]+: \d+ cases? \(pass \d+\) on {on},", said, re.M):
        found.append(f"no cases on {engine}, or not all of them pass:\n{said}")
    compiled = COMPILED.get(engine)
    if compiled and example.kernel and not list(cache.rglob(f"{example.kernel}{compiled[1:]}")):
        found.append(f"Triton compiled no {example.kernel} for {engine}")
    return found


def main() -> int:
    """Every example, or those that the arguments name."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(example.name for example in EXAMPLES))
    parser.add_argument("--source", action="store_true", help="from this source tree: nothing is installed")
    parser.add_argument("--engine", default="auto", choices=("auto", "emulator", "cuda", "hip"))
    given = parser.parse_args()
    if unknown := sorted(set(given.names) - {example.name for example in EXAMPLES}):
        parser.error(f"{', '.join(unknown)}: unknown; allowed: {', '.join(example.name for example in EXAMPLES)}")
    bad = False
    with tempfile.TemporaryDirectory() as folder:
        for example in EXAMPLES:
            if given.names and example.name not in given.names:
                continue
            found = faults(example, Path(folder, example.name), How(given.source, given.engine))
            bad |= bool(found)
            print(f"{example.name}: {'; '.join(found) or 'passes, and fails with a window off by one'}", flush=True)
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
