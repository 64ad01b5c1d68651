"""The table of a run on the emulator: what it counts."""

from __future__ import annotations

import pytest

from fuzz.engine.emulator import Coverage
from fuzz.engine.emulator.coverage import FunctionCoverage
from fuzz.report.markdown import counts
from suites.gpu_diff.emulated import app


def test_what_was_seen_is_counted_out_of_what_could_be() -> None:
    function = FunctionCoverage(
        lines={1, 2, 3},
        reached={1, 2},
        conditions={"1": {"true"}},
        loops={"2": {"many", "0"}},
        accesses={"load 2": {"all"}, "store 3": {"none"}},
        possible={"load 2": {"all", "some", "none"}, "store 3": {"all", "none"}},
    )
    assert counts(Coverage()) == ((0, 0), (0, 0), (0, 0))
    assert counts(Coverage({"f": function})) == ((2, 3), (3, 5), (2, 5))


def test_a_row_for_each_target(capsys: pytest.CaptureFixture[str]) -> None:
    modules = ["--targets", "suites.fuzz.planted", "--targets", "suites.fuzz.emulated"]
    with pytest.raises(SystemExit) as ended:
        app(["planted.gather.clean", "emulated.gather", *modules, "--cases", "4", "--jobs", "1"], standalone_mode=True)
    assert ended.value.code in (None, 0)
    rows = {line.split(" | ")[0].strip("| "): line.split(" | ") for line in capsys.readouterr().out.splitlines()}
    assert rows["emulated.gather"][1:4] == ["4", "pass 4", "0"]
    reached, possible = map(int, rows["emulated.gather"][7].split("/"))
    assert 0 < reached < possible
    # A target that launches no kernel has reached nothing.
    assert rows["planted.gather.clean"][7:9] == ["", ""]
