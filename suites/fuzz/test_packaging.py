"""What the package promises by its shape: import directions, import costs, and what a wheel holds."""

from __future__ import annotations

import ast
import json
import os
import re
import runpy
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]

# Room -> the rooms above it, which it must not import.
ABOVE = {
    "oracle": {"fuzz", "suites", "attn_oracle"},
    "fuzz": {"suites", "attn_oracle"},
    "attn_oracle": {"fuzz", "suites"},
}

# Declaring a kernel costs nothing: a repository can do it without torch.
LIGHT = ["kinds", "declare", "dependencies", "convention", "precision", "verdict"]


def imported_packages(source: str) -> Iterator[tuple[str, int]]:
    """The top-level package and line of each absolute import, in functions and type-checking blocks too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((name.name.split(".")[0], node.lineno) for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.split(".")[0], node.lineno


def wrong_way(source: str, room: str) -> list[tuple[str, int]]:
    return [(name, line) for name, line in imported_packages(source) if name in ABOVE[room]]


def undeclared(source: str, declared: set[str]) -> set[str]:
    """The third-party packages that `source` imports, if it is none of ours, without being in `declared`."""
    names = third_party({name for name, _ in imported_packages(source)})
    return names - declared - {"attn_oracle", "oracle", "fuzz", "suites"}


def modules_after(*statements: str, path: Path = ROOT) -> list[set[str]]:
    """The top-level modules that are loaded after each statement, run in turn in one fresh process."""
    script = "import sys, json\nloaded = []\n" + "".join(
        f"{statement}\nloaded.append(sorted({{name.partition('.')[0] for name in sys.modules}}))\n"
        for statement in statements
    )
    # -P: neither the working directory nor a script's folder is on the path, only what PYTHONPATH says.
    done = subprocess.run(
        [sys.executable, "-P", "-c", script + "print(json.dumps(loaded))"],
        env={**os.environ, "PYTHONPATH": str(path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [set(names) for names in json.loads(done.stdout)]


def third_party(names: set[str]) -> set[str]:
    return {name for name in names if name not in sys.stdlib_module_names and not name.startswith("_")}


@pytest.mark.parametrize("room", ABOVE)
def test_imports_point_one_way(room: str) -> None:
    files = sorted((ROOT / room).rglob("*.py"))
    assert files
    wrong = [(str(f.relative_to(ROOT)), *hit) for f in files for hit in wrong_way(f.read_text(), room)]
    assert wrong == []


@pytest.mark.parametrize(
    "source",
    [
        "import fuzz",
        "import os, fuzz.case as case",
        "from suites.targets import sglang",
        "def late():\n    from fuzz import case",
        "if TYPE_CHECKING:\n    import suites",
    ],
)
def test_import_checker_sees_a_wrong_import(source: str) -> None:
    assert len(wrong_way(source, "oracle")) == 1


@pytest.mark.parametrize(
    "source", ["import oracle.fuzz", "from . import fuzz", "from oracle import suites", "fuzz = 1"]
)
def test_import_checker_lets_right_imports_pass(source: str) -> None:
    assert wrong_way(source, "oracle") == []


def test_the_map_of_rooms_is_that_of_the_tree() -> None:
    """Every room named in CONTRIBUTING.md is there, and every folder or module of code is named."""
    page = (ROOT / "CONTRIBUTING.md").read_text()
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    named = {room.rstrip("/") for row in rows for room in re.findall(r"`(.+?)`", row)}
    there = {
        str(path.relative_to(ROOT))
        for top in (ROOT, ROOT / "suites")
        for path in (*(f.parent for f in top.glob("*/__init__.py")), *top.glob("attn_oracle*.py"))
    }
    assert named == there - {"suites"}


def test_every_import_is_a_declared_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    texts = [*project["dependencies"], *optional["triton"], *optional["aiter"]]
    declared = {Requirement(text).name for text in texts}
    files = [file for room in ABOVE for file in sorted((ROOT / room).rglob("*.py"))]
    missing = {str(f.relative_to(ROOT)): undeclared(f.read_text(), declared) for f in files}
    assert {file: names for file, names in missing.items() if names} == {}


def test_dependency_checker_sees_an_undeclared_import() -> None:
    source = "import json, torch\nfrom oracle import fp8\ndef late():\n    import yaml"
    assert undeclared(source, {"torch"}) == {"yaml"}


def test_importing_oracle_costs_torch_and_nothing_else() -> None:
    torch_only, with_oracle = modules_after("import torch", "import oracle")
    assert third_party(with_oracle - torch_only) <= {"oracle"}


def test_cost_check_sees_a_costly_import(tmp_path: Path) -> None:
    (tmp_path / "costly.py").write_text("import hypothesis\n")
    before, after = modules_after("import json", "import costly", path=tmp_path)
    assert {"costly", "hypothesis"} <= third_party(after - before)


@pytest.mark.parametrize("name", LIGHT)
def test_declarations_need_nothing(name: str) -> None:
    if not (ROOT / "oracle" / f"{name}.py").exists():
        pytest.skip(f"oracle.{name} is not there yet")
    before, after = modules_after("import json", f"import oracle.{name}")
    assert third_party(after - before) == {"oracle"}


def test_plugin_costs_pytest_and_nothing_else() -> None:
    before, after = modules_after("import pytest", "import attn_oracle_pytest")
    assert after - before == {"attn_oracle_pytest"}


def test_plugin_beside_packages_of_the_same_names(tmp_path: Path) -> None:
    """A repository's own fuzz/ and suites/ are the ones its tests import; `oracle` is ours."""
    for package in ("fuzz", "suites"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("OWNER = 'repository'\n")
    (tmp_path / "test_own.py").write_text(
        "import fuzz, suites\n"
        "def test_own(attn_oracle):\n"
        "    assert fuzz.OWNER == suites.OWNER == 'repository'\n"
        "    assert attn_oracle.assert_attention_close.__module__.startswith('oracle.')\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "attn_oracle_pytest", "-p", "no:cacheprovider"],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTEST_ADDOPTS": "",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


def command(folder: Path, first: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The installed command's start, with `first` before us on PYTHONPATH."""
    return subprocess.run(
        [sys.executable, "-P", "-c", "import sys; from attn_oracle_cli import main; sys.exit(main())", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(first), str(ROOT)])},
        capture_output=True,
        text=True,
        check=False,
    )


def test_command_beside_packages_of_the_same_names(tmp_path: Path) -> None:
    for package in ("fuzz", "suites", "oracle"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("raise RuntimeError('the wrong one')\n")
    done = command(tmp_path, tmp_path, "targets")
    assert done.returncode == 0, done.stderr
    assert "torch.sdpa" in done.stdout


def test_ctrl_c_while_the_command_is_loaded_shows_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt\n")
    done = subprocess.run(
        [
            sys.executable,
            "-P",
            "-c",
            "import sys; sys.path.insert(0, sys.argv.pop(1)); from attn_oracle_cli import main; sys.exit(main())",
            str(tmp_path),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (130, "")


def test_wheel_holds_the_packages_without_our_tests(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="hatchling builds the wheel")
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("attn_oracle-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = next(name for name in names if name.endswith("entry_points.txt"))
        entry_points = archive.read(metadata).decode()
    expected = {"attn_oracle_cli.py", "attn_oracle_pytest.py"} | {
        str(path.relative_to(ROOT))
        for room in ("attn_oracle", "oracle", "fuzz", "suites")
        for path in (ROOT / room).rglob("*.py")
        if path.relative_to(ROOT).parts[:2] not in (("suites", "oracle"), ("suites", "fuzz"), ("suites", "museum"))
        and not path.name.startswith("test_")
    }
    assert {name for name in names if name.endswith(".py")} == expected
    assert {"attn_oracle/py.typed", "oracle/py.typed", "fuzz/py.typed"} <= names
    assert "attn-oracle = attn_oracle_cli:main" in entry_points
    assert "attn_oracle_pytest = attn_oracle_pytest" in entry_points


def test_distribution_checker_sees_what_is_missing_and_what_is_too_much() -> None:
    script: dict[str, Any] = runpy.run_path(str(ROOT / ".ci" / "check_dist.py"))
    needed = script["NEEDED"]
    assert script["wheel_faults"](needed) == []
    assert script["wheel_faults"]([*needed[1:], "suites/museum/apply.py", "suites/gpu_diff/test_x.py"]) == [
        f"the wheel lacks {needed[0]}",
        "the wheel has suites/gpu_diff/test_x.py",
        "the wheel has suites/museum/apply.py",
    ]
    held = [f"attn_oracle-1/{name}" for name in (*needed, *script["SOURCES"])]
    assert script["source_faults"](held) == []
    assert script["source_faults"](held[1:]) == [f"the source distribution lacks {needed[0]}"]
    assert script["differences"]({"a": b"1", "b": b"1"}, {"a": b"1", "b": b"2", "c": b""}) == [
        "the two wheels differ in b",
        "the two wheels differ in c",
    ]
