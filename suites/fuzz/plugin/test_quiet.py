"""What the plugin says and costs where no test searches: nothing; and what it says of options that are wrong."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attn_oracle.options import OptionError, parse
from fuzz.cli import CASES, SEED
from fuzz.errors import Stop
from suites.fuzz.plugin.repository import Repository

UNUSED = """
import sys

def test_nothing():
    ours = ("attn_oracle", "oracle", "fuzz", "torch", "hypothesis")
    assert not {name for name in sys.modules if name.split(".")[0] in ours}
"""


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path)


def test_a_run_that_does_not_use_it_loads_and_says_nothing(repository: Repository) -> None:
    repository.write(test_unused=UNUSED)
    done = repository.pytest()
    assert done.returncode == 0, done.stdout + done.stderr
    without = repository.pytest(plugin=False)
    # pytest itself lists what is installed.
    lines = [line for line in done.stdout.splitlines() if not line.startswith("plugins: ")]
    assert [line for line in lines if "attn" in line.replace(str(repository.folder), "")] == []
    assert len(lines) == len([line for line in without.stdout.splitlines() if not line.startswith("plugins: ")])


def test_that_check_sees_what_is_loaded(repository: Repository) -> None:
    repository.write(test_unused="import attn_oracle\n" + UNUSED)
    assert "1 failed" in repository.pytest().stdout


def test_options_have_one_group_and_a_line_each(repository: Repository) -> None:
    said = repository.pytest("--help").stdout
    group = said.split("attn-oracle: correctness of attention kernels:\n")[1].split("\n\n")[0]
    for name in ("cases", "time", "seed", "engine", "out", "replay"):
        assert f"--attn-{name}=" in group
        assert f"  attn_{name} " in said
    assert len(group.splitlines()) <= 12


def test_the_marker_and_the_fixture_are_explained(repository: Repository) -> None:
    assert "@pytest.mark.attn_oracle(*, target, cases, time, seed, engine, modules): what" in (
        repository.pytest("--markers").stdout
    )
    repository.write(test_unused=UNUSED)
    assert "attn_oracle [session scope]" in repository.pytest("--fixtures").stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--attn-cases=none",), "--attn-cases: 'none'; allowed: an integer from 1 to 1000000000"),
        (("--attn-cases=0",), "--attn-cases: '0'; allowed: an integer from 1 to 1000000000"),
        (("--attn-time=soon",), "--attn-time: 'soon'; allowed: a time such as 90s, 10m or 2h"),
        (("--attn-seed=-1",), "--attn-seed: '-1'; allowed: an integer from 0 to 9223372036854775807"),
        (("--attn-cases=1000000001",), "--attn-cases: '1000000001'; allowed: an integer from 1 to 1000000000"),
        (
            ("--attn-seed=" + "9" * 5000,),
            f"--attn-seed: '{'9' * 57}...'; allowed: an integer from 0 to 9223372036854775807",
        ),
        (("--attn-engine=tpu",), "--attn-engine: 'tpu'; allowed: auto, emulator, cuda, hip"),
        (("--attn-out=",), "--attn-out: ''; allowed: a folder, which need not exist"),
        (("--attn-out=test_unused.py",), "--attn-out: 'test_unused.py'; allowed: a folder, which need not exist"),
        (("--attn-out=/proc/x",), "--attn-out /proc/x: cannot be written: No such file or directory"),
        (("--attn-out=" + "x" * 300,), f"--attn-out {'x' * 300}: cannot be written: File name too long"),
        (
            ("--attn-replay=gone",),
            "--attn-replay: 'gone'; allowed: the file of a finding, or a folder of them, that exists",
        ),
        (
            ("--attn-replay=test_unused.py",),
            "--attn-replay: 'test_unused.py'; allowed: the file of a finding: a JSON object with target and case",
        ),
        (
            ("--attn-replay=.",),
            "--attn-replay: '.'; allowed: a folder that holds finding-*.json, or one of these files",
        ),
        (
            ("--attn-engine=cuda",),
            "--attn-engine: 'cuda' cannot run here: torch ... sees no GPU; allowed: auto, emulator",
        ),
        (
            ("--attn-engine=hip",),
            "--attn-engine: 'hip' cannot run here: torch ... sees no GPU; allowed: auto, emulator",
        ),
        (("-o", "attn_time=1d"), "attn_time: '1d'; allowed: a time such as 90s, 10m or 2h"),
        (("-o", "attn_seed=x"), "attn_seed: 'x'; allowed: an integer from 0 to 9223372036854775807"),
        (
            ("-o", "attn_seed=9223372036854775808"),
            "attn_seed: '9223372036854775808'; allowed: an integer from 0 to 9223372036854775807",
        ),
        (("-o", "attn_engine=gpu"), "attn_engine: 'gpu'; allowed: auto, emulator, cuda, hip"),
        (("-o", "attn_out="), "attn_out: ''; allowed: a folder, which need not exist"),
        (("-o", "attn_seed="), "attn_seed: ''; allowed: an integer from 0 to 9223372036854775807"),
        (("-o", "attn_out=test_unused.py"), "attn_out: 'test_unused.py'; allowed: a folder, which need not exist"),
        (
            ("-o", "attn_replay=gone"),
            "attn_replay: 'gone'; allowed: the file of a finding, or a folder of them, that exists",
        ),
        (("-o", "attn_cases=many"), "attn_cases: 'many'; allowed: an integer from 1 to 1000000000"),
    ],
)
def test_a_bad_option_is_one_line(repository: Repository, arguments: tuple[str, ...], said: str) -> None:
    repository.write(test_unused=UNUSED)
    done = repository.pytest(*arguments, CUDA_VISIBLE_DEVICES="", HIP_VISIBLE_DEVICES="")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert re.sub(r"torch \S+", "torch ...", done.stderr.strip()) == f"ERROR: {said}"


def test_an_option_that_is_empty_in_the_file_is_one_line(repository: Repository) -> None:
    (repository.folder / "pytest.ini").write_text("[pytest]\nattn_out =\n")
    done = repository.pytest()
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert done.stderr.strip() == "ERROR: attn_out: ''; allowed: a folder, which need not exist"


@pytest.mark.parametrize(
    ("marker", "said"),
    [
        ("case=3", "case: unknown keyword; allowed: target, cases, time, seed, engine, modules"),
        ("'mine'", "'mine'; allowed: keywords only, target, cases, time, seed, engine, modules"),
        ("cases='a'", "cases: 'a'; allowed: an integer from 1 to 1000000000"),
        ("time='soon'", "time: 'soon'; allowed: a time such as 90s, 10m or 2h"),
        ("seed=True", "seed: True; allowed: an integer from 0 to 9223372036854775807"),
        ("cases=10**9 + 1", "cases: 1000000001; allowed: an integer from 1 to 1000000000"),
        ("seed=10**5000", "seed: an integer of 16610 bits; allowed: an integer from 0 to 9223372036854775807"),
        ("engine='tpu'", "engine: 'tpu'; allowed: auto, emulator, cuda, hip"),
        ("target=3", "target: 3; allowed: a name"),
        ("modules='mine.py'", "modules: 'mine.py'; allowed: a list of module names and of .py files"),
    ],
)
def test_a_bad_marker_is_one_line(repository: Repository, marker: str, said: str) -> None:
    repository.write(test_marked=f"import pytest\n@pytest.mark.attn_oracle({marker})\ndef test_it(): pass\n")
    done = repository.pytest()
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert done.stderr.strip() == f"ERROR: test_marked.py::test_it: mark.attn_oracle: {said}"


@pytest.mark.parametrize(("name", "command"), [("cases", CASES), ("seed", SEED)])
@given(value=st.integers(-(10**31), 10**31) | st.sampled_from([0, 1, 10**9, 10**9 + 1, 2**63 - 1, 2**63]))
def test_numbers_are_taken_and_refused_as_the_command_line_does(
    name: str, command: Callable[[object], int], value: int
) -> None:
    try:
        wanted: int | str = command(str(value))
    except Stop as said:
        wanted = str(said)
    try:
        taken: int | str = parse(f"--{name}", name, str(value))
    except OptionError as said:
        taken = str(said)
    assert taken == wanted
    if isinstance(wanted, int):
        assert parse(name, name, value) == wanted
    else:
        with pytest.raises(OptionError):
            parse(name, name, value)


def test_the_header_says_what_was_asked_for(repository: Repository) -> None:
    repository.write(test_unused="def test_nothing(): pass\n")
    done = repository.pytest("--attn-cases=7", "-o", "attn_seed=3")
    assert "attn-oracle: seed 3, cases 7" in done.stdout.splitlines()
