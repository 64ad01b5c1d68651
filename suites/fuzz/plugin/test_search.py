"""Searches in a repository with its own `fuzz/` and `suites/`: what passes, what fails, and what is said."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from attn_oracle.process import UsageError
from attn_oracle.target import Named, named
from suites.fuzz.cases import extend_case
from suites.fuzz.plugin.repository import CHECK, ROOT, Repository, kernel

SEARCH = ["--attn-cases=25", "--attn-seed=1"]

GIVEN = """
import hypothesis
from hypothesis import given, settings
import attn_oracle
from mine import attention

@settings(max_examples=25, deadline=None, database=None, derandomize=True)
@given(case=attn_oracle.cases(attention))
def test_given(case):
    attn_oracle.judge(case)

def test_words():
    assert repr(attn_oracle.cases("mine.attention", ("mine.py",))) == (
        "cases(target='mine.attention', modules=('mine.py',))"
    )
"""

MARKED = """
import pytest

@pytest.mark.attn_oracle(target="mine.attention", modules=["mine.py"], cases=3, engine="emulator")
class TestMarked:
    def test_all(self, attn_oracle):
        assert attn_oracle.check().seed == 0

    @pytest.mark.attn_oracle(seed=5)
    def test_seed(self, attn_oracle):
        assert attn_oracle.check().seed == 5

    def test_call(self, attn_oracle):
        assert attn_oracle.check(seed=6, cases=1).cases == 1
"""


OTHER = """
import sys

def test_other():
    assert "torch" not in sys.modules
"""
CASE = extend_case().to_dict()
OUR_FRAME = re.compile(r"attn_oracle/\w+\.py:\d")


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    made = Repository(tmp_path)
    made.own_packages()
    return made


def finding(folder: Path) -> tuple[Path, dict[str, Any]]:
    (path,) = folder.glob("finding-*.json")
    return path, json.loads(path.read_text())


def test_the_right_kernel_passes_beside_packages_of_our_names(repository: Repository) -> None:
    repository.write(mine=kernel(), test_mine=CHECK)
    done = repository.pytest("-v")
    assert done.returncode == 0, done.stdout + done.stderr
    (section,) = [line for line in done.stdout.splitlines() if line.startswith("mine.attention: ")]
    assert "cases (pass " in section
    assert not list(repository.folder.glob(".attn-oracle/*"))


@pytest.mark.slow
def test_a_window_off_by_one_fails_and_the_text_says_so(repository: Repository) -> None:
    repository.write(mine=kernel(wrong=True), test_mine=CHECK)
    done = repository.pytest(*SEARCH, "--attn-out=found", "--junitxml=report.xml")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "oracle.failure.WindowMismatch: mine.attention: values: window: " in done.stdout
    path, data = finding(repository.folder / "found")
    assert data["diagnosis"] == "window"
    assert f"attn-oracle replay {path.relative_to(repository.folder)} --targets mine.py" in done.stdout
    assert "----- Captured attn-oracle call -----" in done.stdout
    assert data["case"]["context_lens"] == [3]
    assert data["case"]["window"] == 1
    assert done.stdout.count("= attn-oracle =") == 1
    assert data["id"] in (repository.folder / "report.xml").read_text()

    again = repository.pytest(f"--attn-replay={path}")
    assert again.returncode == 1
    assert "mine.attention: 1 case (fail 1) on emulator" in again.stdout
    repository.write(mine=kernel())
    mended = repository.pytest(f"--attn-replay={path}")
    assert mended.returncode == 0, mended.stdout
    assert "mine.attention: 1 case (pass 1) on emulator" in mended.stdout


@pytest.mark.slow
def test_the_printed_command_replays(repository: Repository) -> None:
    repository.write(mine=kernel(wrong=True), test_mine=CHECK)
    done = repository.pytest(*SEARCH)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("replay: ")]
    words = shlex.split(line.removeprefix("replay: "))
    program = words.index("attn-oracle")
    given = dict(word.split("=", 1) for word in words[:program])
    if "PYTHONPATH" in given:
        given["PYTHONPATH"] += f":{ROOT}"
    replayed = subprocess.run(
        [sys.executable, "-P", str(ROOT / "attn_oracle_cli.py"), *words[program + 1 :]],
        env={**os.environ, **given},
        cwd=repository.folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert replayed.returncode == 1, replayed.stdout + replayed.stderr
    assert "mine.attention: values: window: " in replayed.stdout


@pytest.mark.slow
def test_with_xdist_one_summary_has_the_findings_of_every_worker(repository: Repository) -> None:
    pytest.importorskip("xdist")
    repository.write(mine=kernel(wrong=True), test_mine=CHECK, test_again=CHECK)
    done = repository.pytest(*SEARCH, "-p", "xdist", "-n", "2")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "2 failed" in done.stdout
    assert done.stdout.count("= attn-oracle =") == 1
    first, second, both = map(int, re.findall(r"^mine\.attention: (\d+) cases", done.stdout, re.M))
    assert both == first + second
    finding(repository.folder / ".attn-oracle")


@pytest.mark.slow
def test_hypothesis_draws_and_shrinks_where_a_test_asks_for_cases(repository: Repository) -> None:
    repository.write(mine=kernel(wrong=True), test_given=GIVEN)
    done = repository.pytest()
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed, 1 passed" in done.stdout
    assert "oracle.failure.WindowMismatch: mine.attention: " in done.stdout
    assert "case=<case for mine.attention: varlen_extend of " in done.stdout
    _, data = finding(repository.folder / ".attn-oracle")
    assert data["diagnosis"] == "window"


@pytest.mark.slow
def test_the_marker_says_what_a_call_does_not(repository: Repository) -> None:
    repository.write(mine=kernel(), test_marked=MARKED)
    done = repository.pytest()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout


BY_NAME = """
import attn_oracle
import pytest
from mine import attention as mine_attention

def test_call():
    attn_oracle.check("mine.attention", cases=2, engine="emulator")

@pytest.mark.attn_oracle(target="mine.attention", cases=1, engine="emulator")
def test_marker():
    attn_oracle.check()
"""


@pytest.mark.slow
def test_a_name_that_this_session_declares_is_found_and_replays_from_its_file(repository: Repository) -> None:
    repository.write(mine=kernel(), test_mine=BY_NAME)
    done = repository.pytest()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "mine.attention: 3 cases (pass 3) on emulator" in done.stdout
    repository.write(mine=kernel(wrong=True))
    done = repository.pytest("--attn-cases=25", "-k", "call")
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(r"attn-oracle replay \S+ --targets mine.py --engine emulator", done.stdout)


def test_a_name_is_of_the_module_that_declares_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("name_one", "name_two"):
        monkeypatch.delitem(sys.modules, name, raising=False)
        (tmp_path / f"{name}.py").write_text(kernel().replace('"mine.attention"', '"by.name"'))
    assert named("by.name", None) == Named("by.name", ())
    one = importlib.import_module("name_one")
    assert named("by.name", None) == named(one.attention, None) == Named("by.name", ("name_one.py",))
    assert named("by.name", ["other.py"]) == Named("by.name", ("other.py",))
    importlib.reload(one)
    assert named("by.name", None).modules == ("name_one.py",)
    two = importlib.import_module("name_two")
    with pytest.raises(
        UsageError, match=r"by.name: declared in name_one.py and name_two.py; give the function, or mod"
    ):
        named("by.name", None)
    assert named(two.attention, None).modules == ("name_two.py",)


@pytest.mark.slow
def test_without_the_plugin_the_function_still_searches(repository: Repository) -> None:
    repository.write(
        mine=kernel(),
        test_mine="import attn_oracle\nfrom mine import attention\n"
        "def test_it():\n    assert attn_oracle.check(attention, cases=2).verdicts\n",
    )
    done = repository.pytest(plugin=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "attn-oracle" not in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("test", [CHECK.replace("(attn_oracle)", "()"), GIVEN], ids=["check", "given"])
def test_without_the_plugin_the_finding_that_the_text_names_is_written(repository: Repository, test: str) -> None:
    repository.write(mine=kernel(wrong=True), test_mine="import attn_oracle\n" + test.replace("cases=8", "cases=25"))
    done = repository.pytest(plugin=False)
    assert done.returncode == 1, done.stdout + done.stderr
    path, data = finding(repository.folder / ".attn-oracle")
    assert data["diagnosis"] == "window"
    assert f"attn-oracle replay {path.relative_to(repository.folder)} --targets mine.py" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("plugin", [True, False])
def test_a_finding_whose_file_cannot_be_written_is_told_and_ends_no_session(
    repository: Repository, plugin: bool
) -> None:
    checks = "import attn_oracle\n" + CHECK.replace("(attn_oracle)", "()").replace("cases=8", "cases=25")
    repository.write(mine=kernel(wrong=True), test_mine=checks + "\ndef test_later():\n    pass\n")
    (repository.folder / ".attn-oracle").write_text("in the way")
    done = repository.pytest(plugin=plugin)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed, 1 passed" in done.stdout
    assert "window: " in done.stdout
    told = r"not kept: \.attn" if plugin else r"  not kept   \.attn"
    assert re.search(told + r"-oracle/finding-\w+\.json: cannot be written: File exists\n", done.stdout)


CRASHES = "import os\n" + kernel().replace("    out = torch.empty", "    os.abort()\n    out = torch.empty", 1)
RAISES = kernel().replace("    out = torch.empty", "    lengths[9]\n    out = torch.empty", 1)
CLASH = "from fuzz.own import it\n" + kernel()
WRONG_CALLS = {
    "attn_oracle.check('mine.attention', modules=['mine.py'], cases=2)": (
        CRASHES,
        "CrashMismatch: mine.attention: crash: killed by SIGABRT",
    ),
    "attn_oracle.check('mine.attention', modules=['mine.py'], cases=1)": (
        RAISES,
        f"  where      mine.py, line {RAISES[: RAISES.index('    lengths[9]')].count(chr(10)) + 1}, in attention\n",
    ),
    "attn_oracle.check('mine.attention', modules=['mine.py'])": (
        CLASH,
        "needs the module fuzz.own, which is missing; where kernels are judged, fuzz is attn-oracle's own package",
    ),
    "attn_oracle.check('mine.other', modules=['mine.py'])": (
        kernel(),
        "UsageError: target 'mine.other' is unknown; nearest: mine.attention",
    ),
    "attn_oracle.check('mine.attention')": (
        kernel(),
        'lists them; one of your own: give its function, or modules=["mine.py"], the file that declares it\n',
    ),
    "attn_oracle.check(len)": (
        kernel(),
        "UsageError: target: len is not declared; write @declare.paged_decode(...) above it",
    ),
    "attn_oracle.check()": (kernel(), "UsageError: check: no target; give one, or mark the test"),
    "attn_oracle.check('mine.attention', cases=0)": (
        kernel(),
        "check: cases: 0; allowed: an integer from 1 to 1000000000",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("test", WRONG_CALLS)
def test_what_goes_wrong_is_said_in_a_line(repository: Repository, test: str) -> None:
    mine, said = WRONG_CALLS[test]
    repository.write(mine=mine, test_mine=f"def test_it(attn_oracle):\n    {test}\n")
    done = repository.pytest("-p", "no:faulthandler")
    assert done.returncode == 1, done.stdout + done.stderr
    assert said in done.stdout
    assert not OUR_FRAME.search(done.stdout)


@pytest.mark.slow
def test_a_broken_finding_is_said_in_a_line(repository: Repository) -> None:
    repository.write(mine=kernel(), test_mine=CHECK)
    (repository.folder / "broken.json").write_text('{"schema": 1, "target": "mine.attention", "case": {}}')
    done = repository.pytest("--attn-replay=broken.json")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "UsageError: broken.json: case.schema: missing; allowed: 1\n" in done.stdout
    assert not OUR_FRAME.search(done.stdout)
    assert "nothing was replayed" not in done.stdout


NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
GIVEN_ONLY = GIVEN.split("def test_words")[0]


@pytest.mark.slow
def test_an_engine_that_a_test_names_and_that_cannot_run_here_skips_the_test(repository: Repository) -> None:
    repository.write(mine=kernel(), test_mine=CHECK.replace("emulator", "hip"))
    done = repository.pytest("-rs", "-o", "attn_engine=cuda", **NO_GPU)
    assert done.returncode == 0, done.stdout
    assert "SKIPPED" in done.stdout
    assert "hip: torch" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("test", [CHECK.replace(', engine="emulator"', ""), GIVEN_ONLY], ids=["check", "given"])
@pytest.mark.parametrize("workers", [(), ("-p", "xdist", "-n", "1")], ids=["alone", "xdist"])
def test_an_engine_of_the_configuration_file_that_cannot_run_here_is_an_error(
    repository: Repository, test: str, workers: tuple[str, ...]
) -> None:
    if workers:
        pytest.importorskip("xdist")
    repository.write(mine=kernel(), test_mine=test, test_other="def test_other(): pass\n")
    done = repository.pytest("-o", "attn_engine=hip", *workers, **NO_GPU)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR, done.stdout + done.stderr
    assert "1 failed, 1 passed" in done.stdout
    said = re.sub(r"torch \S+", "torch ...", done.stdout)
    assert "attn_engine: 'hip' cannot run here: torch ... sees no GPU; allowed: auto, emulator (--attn-engine" in said


@pytest.mark.slow
def test_an_engine_of_the_configuration_file_concerns_searches_alone(repository: Repository) -> None:
    repository.write(mine=kernel(), test_mine=CHECK.replace(', engine="emulator"', ""), test_other=OTHER)
    named = ("-o", "attn_engine=hip")
    assert repository.pytest(*named, "test_other.py", **NO_GPU).returncode == 0
    assert repository.pytest(*named, "--collect-only", **NO_GPU).returncode == 0
    done = repository.pytest(*named, "--attn-engine=auto", "--attn-cases=2", "test_mine.py", **NO_GPU)
    assert done.returncode == 0, done.stdout
    assert "mine.attention: 2 cases (pass 2) on emulator" in done.stdout


@pytest.mark.parametrize("test", [CHECK, GIVEN_ONLY], ids=["check", "given"])
def test_a_folder_of_the_configuration_file_that_cannot_be_written_is_said_when_a_test_searches(
    repository: Repository, test: str
) -> None:
    repository.write(mine=kernel(), test_mine=test, test_other=OTHER)
    assert repository.pytest("-o", "attn_out=/proc/x", "test_other.py").returncode == 0
    done = repository.pytest("-o", "attn_out=/proc/x", "test_mine.py")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "UsageError: attn_out /proc/x: cannot be written: No such file or directory\n" in done.stdout
    if test is CHECK:  # Hypothesis shows what its strategies call
        assert not OUR_FRAME.search(done.stdout)


@pytest.mark.slow
def test_a_target_that_cannot_run_here_skips_the_test_that_draws_its_cases(repository: Repository) -> None:
    only = "    unavailable=lambda engine: 'not on a Tuesday',\n)\ndef attention("
    mine = kernel().replace(")\ndef attention(", only)
    assert mine != kernel()
    repository.write(mine=mine, test_given=GIVEN_ONLY, test_mine=CHECK)
    done = repository.pytest("-rs")
    assert done.returncode == 0, done.stdout
    assert "SKIPPED [2]" in done.stdout
    assert "attention: not on a Tuesday" in done.stdout


@pytest.mark.slow
def test_a_finding_that_no_test_judges_is_no_pass(repository: Repository) -> None:
    repository.write(mine=kernel(), test_mine=CHECK)
    case = {"schema": 1, "target": "mine.other", "case": CASE}
    (repository.folder / "finding-x.json").write_text(json.dumps(case))
    done = repository.pytest("--attn-replay=finding-x.json", "-rs")
    assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED, done.stdout
    assert "nothing was replayed: no test that ran searches the target of these findings" in done.stdout
    assert "mine.attention: no finding of it in finding-x.json" in done.stdout


def test_a_frame_of_ours_is_seen() -> None:
    assert OUR_FRAME.search("../site-packages/attn_oracle/process.py:88: UsageError")
    assert not OUR_FRAME.search("attn_oracle = <module 'attn_oracle' from '/site-packages/attn_oracle/__init__.py'>")
