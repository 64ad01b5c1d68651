"""Reproducers of planted faults, run as a stranger would: in a clean process with the kernel's package and torch."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import pytest

from fuzz import registry
from fuzz.campaign.finding import Finding, findings_of
from fuzz.campaign.minimise import minimise_finding
from fuzz.campaign.run import Settings, open_pool, run_cases
from fuzz.check.result import Check
from fuzz.plan import Plan
from fuzz.report.reproducer import ISSUE_FILE, SCRIPT_FILE, open_reproducers, reproducers, write_reproducer
from fuzz.space import Space
from oracle.kinds import Engine

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
TARGETS = "suites.fuzz.report.planted_targets"
HOW = Settings(engine=Engine.EMULATOR, jobs=2, modules=(TARGETS,), versions={"torch": "2", "triton": None})
PLANTED = {
    "package.gather": Check.VALUES,
    "package.changes": Check.INPUTS,
    "package.refuses": Check.CRASH,
    "package.write": Check.BOUNDS,
    "package.merge": Check.VALUES,
    "package.extend": Check.VALUES,
    "package.decode": Check.WRITTEN,
}


BEGINS = "    keys_seen = "


def package(folder: Path, *, mended: bool, instead: str = "") -> Path:
    """A package ``planted`` in ``folder``, with the faults or without; ``instead`` is what attention does."""
    text = (HERE / "planted_kernels.py").read_text(encoding="utf-8")
    assert "FAULTY = True" in text
    assert text.count(BEGINS) == 1
    text = text.replace(BEGINS, f"    {instead}\n{BEGINS}") if instead else text
    inside = folder / "planted"
    inside.mkdir(parents=True)
    (inside / "__init__.py").write_text("")
    (inside / "kernels.py").write_text(text.replace("FAULTY = True", f"FAULTY = {not mended}"), encoding="utf-8")
    return folder


@dataclass(frozen=True)
class Written:
    """Findings of the planted faults, their folders, and where the package is, with the faults and without."""

    findings: dict[str, Finding]
    folders: dict[str, Path]
    faulty: Path
    mended: Path


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    folder = tmp_path_factory.mktemp("planted")
    faulty, mended = package(folder / "faulty", mended=False), package(folder / "mended", mended=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(faulty))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(faulty), str(Path.cwd())]))
        found = search()
        with open_reproducers(HOW) as pool:
            made = list(reproducers(pool, list(found.values()), HOW))
    folders = {f.target: write_reproducer(folder / f"reproducer-{f.id}", f, one) for f, one in made}
    assert [one.reason for _, one in made] == [""] * len(PLANTED)
    return Written(found, folders, faulty, mended)


def search() -> dict[str, Finding]:
    """The first finding of each target by its check, on a small case."""
    known = registry.load((TARGETS,))
    found: dict[str, Finding] = {}
    with open_pool(HOW) as pool:
        for name, check in PLANTED.items():
            drawn = ((name, case) for case in islice(Plan(Space(known[name], 60), 0), 30))
            for outcome in run_cases(pool, drawn, HOW):
                own = [f for f in findings_of(name, outcome.case, outcome.result, HOW) if f.check is check]
                if own and name not in found:
                    found[name] = own[0]
            found[name] = minimise_finding(found[name], known[name], pool, HOW, time_s=None).after
    return found


def run_script(folder: Path, path: Path) -> tuple[int, str]:
    """A script's exit code and output in a process that knows ``path`` and torch, and none of us."""
    environment = {"PATH": os.defpath, "PYTHONPATH": str(path), "HOME": str(folder), "OMP_NUM_THREADS": "1"}
    script = str(folder / SCRIPT_FILE)
    done = subprocess.run(
        [sys.executable, script], env=environment, cwd=folder, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


WORDS = {
    "package.gather": "key: ",
    "package.changes": "slots: 2 elements are not what they must be",
    "package.refuses": "the call raises ValueError: no kernel for ",
    "package.write": "outside of the argument: bits 0x0 instead of ",
    "package.merge": "expected 0, got nan, allowed",
    "package.extend": "elements are wrong; the worst:",
    "package.decode": "elements were not written",
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_script_shows_its_fault(written: Written, name: str) -> None:
    code, said = run_script(written.folders[name], written.faulty)
    assert code == 1, said
    assert said.splitlines()[0].startswith(f"{name}: {PLANTED[name]}: ")
    assert WORDS[name] in said
    assert "Traceback" not in said


@pytest.mark.parametrize("name", PLANTED)
def test_a_script_says_that_a_mended_kernel_is_right(written: Written, name: str) -> None:
    code, said = run_script(written.folders[name], written.mended)
    assert code == 0, said
    assert "nothing is wrong" in said


def test_a_script_needs_none_of_us(written: Written) -> None:
    for folder in written.folders.values():
        text = (folder / SCRIPT_FILE).read_text(encoding="utf-8")
        assert not {"oracle", "fuzz", "suites", "pickle"} & imported(text)
    assert imported("import fuzz\nfrom oracle.layout import x") == {"fuzz", "oracle"}


def imported(text: str) -> set[str]:
    """Top-level names that a script imports."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(str(node.module).partition(".")[0])
    return found


def test_a_missing_package_is_one_line_and_2(written: Written, tmp_path: Path) -> None:
    code, said = run_script(written.folders["package.extend"], tmp_path)
    assert (code, said.splitlines()[1:]) == (2, ["cannot be imported: No module named 'planted'"])


def test_the_report_says_what_on_what_and_how(written: Written) -> None:
    finding, folder = written.findings["package.extend"], written.folders["package.extend"]
    text = (folder / ISSUE_FILE).read_text(encoding="utf-8")
    assert text.startswith("# package.extend: values is wrong\n")
    for wanted in (
        "| window | 1 |",
        "`python3 reproduce.py`",
        "`attn-oracle replay finding.json`",
        finding.id,
        "- severity:",
    ):
        assert wanted in text
    assert "window: 2 keys where 1 key is asked for" in text
    assert "/" not in text.replace("error/budget", "")


@pytest.mark.parametrize(
    ("instead", "code", "said"),
    [
        ("import os; os.abort()", 1, "the process was killed by signal 6"),
        ("raise RuntimeError('CUDA error: an illegal memory access was encountered')", 1, "first: the call raises Run"),
        ("raise KeyError('a plan')", 2, "first: the call raises KeyError: 'a plan'; that is not what was found"),
    ],
)
def test_a_call_that_ends_otherwise(written: Written, tmp_path: Path, instead: str, code: int, said: str) -> None:
    other = package(tmp_path / "other", mended=False, instead=instead)
    ended, told = run_script(written.folders["package.extend"], other)
    assert (ended, said in told) == (code, True), told
