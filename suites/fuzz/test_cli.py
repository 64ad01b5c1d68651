"""The command line on real targets in real worker processes: results, exit codes, one line for each error."""

from __future__ import annotations

import errno
import io
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from fuzz.campaign.reply import Reply, Status
from fuzz.campaign.store import StoreError
from fuzz.case import Case
from fuzz.check.result import CaseResult, Check, CheckResult
from fuzz.cli import main
from fuzz.errors import Exit, Stop
from fuzz.options import duration
from oracle.verdict import Verdict
from suites.fuzz.cases import extend_case, gather_case

PLANTED = ["--targets", "suites.fuzz.planted"]
EMULATOR = ["--engine", "emulator"]


def write(tmp_path: Path, case: Case) -> str:
    path = tmp_path / "case.json"
    path.write_text(case.to_json())
    return str(path)


def result(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    assert captured.err.startswith("attn-oracle: ")
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    return captured.err


def test_run_judges_a_case_on_every_target_of_its_operation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["run", write(tmp_path, extend_case(head_dim=64, v_head_dim=64, group_size=1)), *EMULATOR, "--json"]) == 0
    )
    data = result(capsys)
    assert data["schema"] == 1
    assert data["engine"] == "emulator"
    assert data["targets"]["torch.sdpa"]["verdicts"] == {"pass": 1}
    assert data["targets"]["torch.sdpa"]["elements"] > 0


def test_run_finds_planted_faults_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, gather_case())
    assert main(["run", path, *EMULATOR, *PLANTED, "--target", "planted.gather.values"]) == 1
    assert "fail     values" in capsys.readouterr().out
    assert main(["run", path, *EMULATOR, *PLANTED, "--target", "planted.gather.clean", "--bisect"]) == 0


def test_run_takes_several_cases_and_says_what_they_never_reached(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = []
    for name, lens in (("one", [3]), ("two", [40, 1])):
        path = tmp_path / f"{name}.json"
        path.write_text(gather_case(context_lens=lens).to_json())
        paths.append(str(path))
    arguments = ["run", *paths, *EMULATOR, "--targets", "suites.fuzz.emulated", "--target", "emulated.*", "--coverage"]
    assert main([*arguments, "--json"]) == 0
    data = result(capsys)
    (target,) = data["targets"].values()
    assert target["cases"] == 2
    (function,) = data["coverage"].values()
    assert len(function["missing"]["lines"]) == 1
    assert set(function["lines"]) - set(function["reached"]) == set(function["missing"]["lines"])
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert f"never: lines {function['missing']['lines'][0]}" in printed
    assert "condition never true" in printed


def test_crashes_are_survived(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["planted.gather.segfault", "planted.gather.crash", "planted.gather.clean"]
    arguments = [argument for name in names for argument in ("--target", name)]
    assert main(["run", write(tmp_path, gather_case()), *EMULATOR, *PLANTED, *arguments, "--json"]) == 1
    targets = result(capsys)["targets"]
    assert targets["planted.gather.segfault"]["verdicts"] == {"crash": 1}
    assert "SIGSEGV" in targets["planted.gather.segfault"]["findings"][0]["message"]
    assert targets["planted.gather.crash"]["verdicts"] == {"crash": 1}
    assert "planted" in targets["planted.gather.crash"]["findings"][0]["message"]
    assert targets["planted.gather.clean"]["verdicts"] == {"pass": 1}


def test_a_case_outside_the_declared_capabilities_is_unsupported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, gather_case(head_dim=40, v_head_dim=40))
    assert main(["run", path, *EMULATOR, *PLANTED, "--target", "planted.gather.clean"]) == 125
    assert "head_dim 40 is not declared; declared: 32" in capsys.readouterr().out


def test_fuzz_repeats_itself_and_keeps_its_findings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "fuzz",
        "planted.gather.nan",
        "planted.gather.clean",
        *PLANTED,
        *EMULATOR,
        "--cases",
        "12",
        "--json",
        "--minimise-time",
        "0s",
    ]
    assert main([*arguments, "--jobs", "1", "--out", str(tmp_path / "a")]) == 1
    first = result(capsys)
    assert main([*arguments, "--jobs", "2", "--out", str(tmp_path / "b")]) == 1
    second = result(capsys)
    for data in (first, second):
        for target in data["targets"].values():
            del target["time"]
            for finding in target["findings"]:
                assert Path(finding.pop("case")).is_file()
    assert first == second
    clean = first["targets"]["planted.gather.clean"]
    assert clean["findings"] == []
    assert clean["verdicts"] == {"pass": 12}
    assert {f["check"] for f in first["targets"]["planted.gather.nan"]["findings"]} == {"nan"}
    saved = min((tmp_path / "a").glob("finding-*.json"))
    assert main(["replay", str(saved), *PLANTED, *EMULATOR]) == 1
    assert main(["replay", str(tmp_path / "a"), *PLANTED, *EMULATOR]) == 1


def finding(tmp_path: Path, name: str, **changes: Any) -> Path:
    path = tmp_path / f"finding-{name}.json"
    data = {"schema": 1, "target": "planted.gather.clean", "case": gather_case().to_dict()}
    path.write_text(json.dumps(data | changes))
    return path


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"schema": 2}, "finding.schema: 2; allowed: 1"),
        ({"schema": None}, "finding.schema"),
        ({"target": "planted.gather.*"}, "'planted.gather.*' is unknown"),
        ({"target": "planted.gather.nobody"}, "'planted.gather.nobody' is unknown"),
        ({"target": 3}, "finding.target: 3; allowed: text"),
        ({"case": {}}, "case.schema"),
    ],
)
def test_replay_names_what_is_wrong_with_a_finding(
    changes: dict[str, Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(finding(tmp_path, "x", **changes)), *PLANTED, *EMULATOR]) == 2
    assert words in one_line(capsys)


def test_cases_and_findings_are_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(finding(tmp_path, "x")), *EMULATOR]) == 2
    assert "this is a finding: use attn-oracle replay" in one_line(capsys)
    assert main(["replay", write(tmp_path, gather_case()), *EMULATOR]) == 2
    assert "this is a case: use attn-oracle run" in one_line(capsys)


def test_a_finding_outside_what_its_target_declares_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(monkeypatch, lambda index: pytest.fail("it ran"))
    path = finding(tmp_path, "x", case=gather_case(head_dim=40, v_head_dim=40).to_dict())
    assert main(["replay", str(path), *PLANTED, *EMULATOR]) == 125
    assert "unsupported: head_dim 40 is not declared; declared: 32" in capsys.readouterr().out


def test_a_bad_file_in_a_folder_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(monkeypatch, lambda index: FAILED)
    finding(tmp_path, "a", schema=2)
    finding(tmp_path, "b")
    assert main(["replay", str(tmp_path), *PLANTED, *EMULATOR]) == 2
    captured = capsys.readouterr()
    assert "planted.gather.clean: fail" in captured.out
    told = captured.err.splitlines()
    assert "finding-a.json" in told[0]
    assert told[-1].endswith("1 of 2 files are no findings of known targets")


def test_the_printed_replay_has_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(monkeypatch, lambda index: FAILED)
    assert main([*FUZZ, "--out", str(tmp_path / "my findings")]) == 1
    line = next(line for line in capsys.readouterr().out.splitlines() if "attn-oracle replay" in line)
    _, command, path, *options = shlex.split(line)
    assert command == "replay"
    assert options == ["--targets", "suites.fuzz.planted", "--engine", "emulator"]
    assert json.loads(Path(path).read_text())["modules"] == ["suites.fuzz.planted"]
    assert main(["replay", path, *options]) == 1


class StandIn:
    """In place of a pool: replies that a function makes, without processes."""

    def __init__(self, reply: Callable[[int], dict[str, Any]]) -> None:
        self.reply = reply

    def __enter__(self) -> StandIn:
        return self

    def __exit__(self, *error: object) -> None: ...

    def map(self, requests: Iterable[dict[str, Any]], timeout_s: float) -> Iterator[tuple[int, Reply]]:
        for index, _ in enumerate(requests):
            yield index, Reply(status=Status.OK, phase="checks", seconds={}, value=self.reply(index))


FAILED = CaseResult(checks=(CheckResult(Check.NAN, Verdict.FAIL, "planted"),)).to_dict()


def stand_in(monkeypatch: pytest.MonkeyPatch, reply: Callable[[int], dict[str, Any]]) -> None:
    monkeypatch.setattr("fuzz.commands.open_pool", lambda settings: StandIn(reply))


FUZZ = ["fuzz", "planted.gather.clean", *PLANTED, *EMULATOR, "--cases", "4", "--jobs", "1"]


def test_findings_are_on_disk_while_the_search_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept: list[int] = []

    def reply(index: int) -> dict[str, Any]:
        kept.append(len(list(tmp_path.glob("finding-*.json"))))
        return FAILED

    stand_in(monkeypatch, reply)
    assert main([*FUZZ, "--out", str(tmp_path), "--json"]) == 1
    assert kept[0] == 0
    assert kept[1] == 1
    cases = {f["case"] for f in result(capsys)["targets"]["planted.gather.clean"]["findings"]}
    assert {str(path) for path in tmp_path.glob("finding-*")} == cases
    assert not list(tmp_path.glob(".*"))


def test_sigterm_ends_a_search_with_what_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def reply(index: int) -> dict[str, Any]:
        if index == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return FAILED

    stand_in(monkeypatch, reply)
    before = signal.getsignal(signal.SIGTERM)
    assert main([*FUZZ, "--out", str(tmp_path), "--json"]) == 1
    assert signal.getsignal(signal.SIGTERM) == before
    captured = capsys.readouterr()
    assert json.loads(captured.out)["targets"]["planted.gather.clean"]["cases"] == 2
    assert "interrupted" in captured.err


def test_a_folder_that_cannot_be_written_is_told_before_the_first_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    stand_in(monkeypatch, lambda index: pytest.fail("a case ran"))
    assert main([*FUZZ, "--out", str(tmp_path / "file")]) == 2
    assert "--out" in one_line(capsys)


def test_a_finding_that_cannot_be_kept_is_shown_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"

    def reply(index: int) -> dict[str, Any]:
        if not (tmp_path / "moved").exists():
            out.rename(tmp_path / "moved")
            out.write_text("in the way")
        return FAILED

    stand_in(monkeypatch, reply)
    assert main([*FUZZ, "--out", str(out)]) == 2
    captured = capsys.readouterr()
    assert "planted.gather.clean: nan: NEW" in captured.out
    assert "cannot be written" in captured.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["run", "absent.json"], 2, ["absent.json", "cannot be read"]),
        (["run", "absent.json", "--bisect"], 128, ["absent.json"]),
        (["fuzz", "no.such", "--cases", "1", *EMULATOR], 2, ["no.such", "unknown"]),
        (["fuzz", *EMULATOR], 2, ["--cases", "--time"]),
        (["fuzz", "--time", "soon", *EMULATOR], 2, ["--time", "'soon'", "90s"]),
        (["fuzz", "--cases", "1", "--engine", "tpu"], 2, ["--engine", "'tpu'", "auto"]),
        (["targets", "--targets", "no_such_module"], 2, ["no_such_module"]),
        (["replay", "absent.json", *EMULATOR], 2, ["absent.json", "cannot be read"]),
        (["replay", "absent.json", "--timeout", "0.0001"], 2, ["--timeout", "'0.0001'", "at least 1 s"]),
        (["fuzz", "--cases", "1", "--sglang", ","], 2, ["--sglang", "','", "0.5.15"]),
        (["fuzz", "--cases", "1", "--sglang", "0.5.15,"], 2, ["--sglang", "'0.5.15,'"]),
        (["targets", "--targets", "absent.py"], 2, ["--targets", "absent.py", "there is no such file"]),
        (["targets", "--targets", "/"], 2, ["--targets", "/", "a module's name or a .py file"]),
    ],
)
def test_bad_usage_is_one_line(
    arguments: list[str], code: int, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == code
    line = one_line(capsys)
    assert all(word in line for word in words), line


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["fuzz", "--cases", "1", "--out", ""], 2, "--out ''"),
        (["fuzz", "--cases", "1", "--out="], 2, "--out ''"),
        (["reproducer", "finding.json", "--out", " "], 2, "--out ''"),
        (["minimize", "finding.json", "--out", ""], 2, "--out ''"),
        (["report", "--html", ""], 2, "--html ''"),
        (["report", ""], 2, "''"),
        (["targets", "--targets", ""], 2, "--targets ''"),
        (["run", "case.json", "", "--bisect"], 128, "''"),
    ],
)
def test_an_empty_path_is_not_the_current_directory(
    arguments: list[str],
    code: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == code
    assert one_line(capsys) == f"attn-oracle: {said}: an empty text; no option or argument takes one\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_an_engine_that_is_not_here_is_125(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fuzz", "--cases", "1", "--engine", "cuda"]) == 125
    assert "sees no GPU" in one_line(capsys)


def test_a_corrupted_case_names_its_field(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "case.json"
    path.write_text(gather_case().to_json().replace('"page_size": 16', '"page_size": "x"'))
    assert main(["run", str(path), *EMULATOR]) == 2
    assert "case.page_size" in one_line(capsys)


@pytest.mark.parametrize("text", ["{}", '{"target": 3}', '{"target": "torch.sdpa", "case": {}}', "nonsense", "[]"])
def test_a_corrupted_finding_is_one_line(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "finding-1.json"
    path.write_text(text)
    assert main(["replay", str(path), *EMULATOR]) == 2
    assert "finding-1.json" in one_line(capsys)


def test_an_unknown_option_is_bad_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fuzz", "--colour"]) == 2
    assert "--colour" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["fuzz", "--cases", "0"], "--cases: '0'; allowed: an integer from 1 to 1000000000"),
        (["fuzz", "--cases", "1" + 24 * "0"], "--cases: '1000000000000000000000000'; allowed: an integer from 1 to "),
        (["fuzz", "--cases", "many"], "--cases: 'many'; allowed: an integer from 1 to 1000000000"),
        (["fuzz", "--cases", "1", "--jobs", "9999999"], "--jobs: '9999999'; allowed: an integer from 1 to 1024"),
        (["compile", "--jobs", "-1"], "--jobs: '-1'; allowed: an integer from 1 to 1024"),
        (["fuzz", "--colour"], "No such option: --colour"),
        (["fuzz", "--cases"], "--cases"),
        (["fuz"], "No such command 'fuz'"),
        (["replay"], "Missing argument 'FINDING|DIR'; see attn-oracle replay --help"),
    ],
)
def test_options_that_cannot_be_are_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert said in one_line(capsys)


def test_every_bad_case_file_has_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = write(tmp_path, gather_case()), tmp_path / "bad.json"
    bad.write_text("{")
    for option, code in (([], 2), (["--bisect"], 128)):
        assert main(["run", str(tmp_path / "absent.json"), good, str(bad), *EMULATOR, *option]) == code
        captured = capsys.readouterr()
        first, second = captured.err.splitlines()
        assert first.startswith(f"attn-oracle: {tmp_path / 'absent.json'}: cannot be read")
        assert second.startswith(f"attn-oracle: {bad}: ")
        assert captured.out == ""


def test_no_command_at_all_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "--version" in capsys.readouterr().out


def test_targets_say_why_they_cannot_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["targets", "--json"]) == 0
    listed = result(capsys)["targets"]
    assert listed["torch.sdpa"]["engines"]["emulator"] is None
    assert listed["torch.sdpa"]["engines"]["hip"]


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for command in ("doctor", "targets", "certify", "run", "fuzz", "replay", "bench"):
        assert command in text


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("attn-oracle 0.")


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("1.5m", 90), ("2h", 7200), ("7", 7), ("10000000", 1e7)])
def test_durations(text: str, seconds: float) -> None:
    assert duration("--time", text) == seconds


@pytest.mark.parametrize("text", ["0", "-1", "", "nan", "1e3", "10000001", "9" * 400, "3000h", "1 m"])
def test_durations_that_are_none(text: str) -> None:
    with pytest.raises(Stop, match=r"--time: .*at most 10000000 s"):
        duration("--time", text)


def test_the_timeout_reaches_the_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[float] = []

    class Noting(StandIn):
        def map(self, requests: Iterable[dict[str, Any]], timeout_s: float) -> Iterator[tuple[int, Reply]]:
            seen.append(timeout_s)
            return super().map(requests, timeout_s)

    monkeypatch.setattr("fuzz.commands.open_pool", lambda settings: Noting(lambda index: FAILED))
    path = finding(tmp_path, "x")
    search = [*FUZZ, "--minimise-time", "0s", "--out", str(tmp_path)]
    assert main([*search, "--timeout", "7"]) == 1
    assert main(["replay", str(path), *PLANTED, *EMULATOR, "--timeout", "2m"]) == 1
    case = write(tmp_path, gather_case())
    assert main(["run", case, *PLANTED, *EMULATOR, "--target", "planted.gather.clean", "--timeout", "8"]) == 1
    assert main(search) == 1
    assert seen == [7, 120, 8, 120]


def test_a_long_case_is_not_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = threading.Event()
    shown = Console.print
    monkeypatch.setattr("fuzz.progress.LINE_EVERY_S", 0.01)
    monkeypatch.setattr(Console, "print", lambda *args, **kwargs: (shown(*args, **kwargs), said.set()))

    def reply(index: int) -> dict[str, Any]:
        assert index or said.wait(60)
        return FAILED

    stand_in(monkeypatch, reply)
    assert main([*FUZZ, "--out", str(tmp_path)]) == 1
    assert "0 of 4 cases, " in capsys.readouterr().err


def start(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    code = "import sys; from fuzz.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False, **options)


def test_a_full_standard_output_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        done = start("targets", stdout=full)
    assert (done.returncode, done.stderr) == (3, "attn-oracle: standard output: No space left on device\n")


class Full(io.StringIO):
    """As a file on a full disk."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_standard_error_hides_nothing_and_changes_no_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(monkeypatch, lambda index: FAILED)
    with redirect_stderr(Full()):
        assert main([*FUZZ, "--out", str(tmp_path)]) == 1
        assert main(["fuzz", "no.such.target"]) == 2
    assert "planted.gather.clean: nan: NEW" in capsys.readouterr().out


def test_a_pipe_that_nobody_reads_is_one_line() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = start("--help", stdout=writing)
    os.close(writing)
    assert (done.returncode, done.stderr) == (3, "attn-oracle: standard output: Broken pipe\n")


def test_a_closed_standard_output_is_one_line() -> None:
    done = start("--version", preexec_fn=lambda: os.close(1))
    assert (done.returncode, done.stderr) == (3, "attn-oracle: standard output: closed\n")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--help"], 0),
        (["fuzz", "--help"], 0),
        (["fuzz", "--colour"], 2),
        (["fuzz", "--time", "soon"], 2),
        (["run", "absent.json"], 2),
        (["replay", "absent.json"], 2),
    ],
)
def test_what_needs_no_torch_comes_without(arguments: list[str], code: int) -> None:
    ask = "import sys; from fuzz.cli import main; code = main(); print('torch' in sys.modules); sys.exit(code)"
    command = [sys.executable, "-c", ask, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert done.stdout.endswith("False\n")


def test_a_refused_merge_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(monkeypatch, lambda index: FAILED)
    for name, seed in (("one", "1"), ("two", "2")):
        out = ["--out", str(tmp_path / name)]
        assert main([*FUZZ, *out, "--minimise-time", "0s", "--seed", seed, "--shard", "1/2"]) == 1
    capsys.readouterr()
    merge, out = ["store", "merge"], ["--out", str(tmp_path / "out")]
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    (tmp_path / "two" / "bad").mkdir()
    (tmp_path / "two" / "bad" / "store.sqlite").write_bytes(b"SQLite format 3\0" + b"x" * 500)
    for folders, said in (
        ([one, two], "two/store.sqlite: no part of the run of "),
        ([one, str(tmp_path / "none")], "none/store.sqlite: there is no store"),
        ([one, f"{two}/bad"], "bad/store.sqlite: "),
    ):
        assert main([*merge, *folders, *out, *PLANTED]) == 2
        assert said in one_line(capsys)
        assert not (tmp_path / "out").exists()
    assert main([*merge, one, *out]) == 2
    assert "one/store.sqlite: target 'planted.gather.clean' is unknown here" in one_line(capsys)
    assert not (tmp_path / "out").exists()


def test_a_merge_that_ends_half_way_names_its_input_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(monkeypatch, lambda index: FAILED)
    assert main([*FUZZ, "--out", str(tmp_path / "one"), "--minimise-time", "0s"]) == 1
    capsys.readouterr()

    def fails(*_: object) -> None:
        raise StoreError(Exit.USAGE, "planted")

    monkeypatch.setattr("fuzz.campaign.merge._take_campaign", fails)
    assert main(["store", "merge", str(tmp_path / "one"), "--out", str(tmp_path / "out"), *PLANTED]) == 2
    assert "one/store.sqlite: cannot be joined: planted" in one_line(capsys)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("number", "code"), [(errno.ENOSPC, 3), (errno.EDQUOT, 3), (errno.EACCES, 2)])
def test_a_full_disk_is_no_bad_usage(
    number: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fuzz.report.keep.tempfile.TemporaryFile", full)
    assert main([*FUZZ, "--out", str(tmp_path), "--resume"]) == code
    assert f"--out {tmp_path}: cannot be written: {os.strerror(number)}" in one_line(capsys)


def test_more_queries_than_keys_and_nothing_compared_are_said_in_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = ["--targets", "suites.fuzz.planted", "--target", "planted.extend.clean", *EMULATOR]
    path = write(tmp_path, extend_case(context_lens=(3,), query_lens=(5,), head_dim=64, v_head_dim=64, group_size=1))
    assert main(["run", path, "--target", "torch.sdpa", *EMULATOR]) == 125
    assert "a request has more queries than keys" in capsys.readouterr().out
    path = write(tmp_path, extend_case(context_lens=(), query_lens=(), index_dtype="int32"))
    assert main(["run", path, *target]) == 0
    assert "nothing compared" in capsys.readouterr().out
