"""The list of functions: nothing that was asked for is missing, and what it says of a target is what runs."""

from __future__ import annotations

import json
import sys
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from fuzz import cli, registry
from fuzz import engine as engines
from fuzz.buffers import Poison
from fuzz.check.execute import execute
from fuzz.commands import built_in_ledger
from fuzz.errors import Exit, Stop
from fuzz.plan import Plan
from fuzz.report.functions import Row, read_result, rows
from fuzz.space import Space
from oracle.declare import Declaration
from oracle.kinds import Engine

SEEDS = {
    "sglang": {
        "create_dcp_kv_indices",
        "create_triton_kv_indices_for_dcp_triton",
        "correct_attn_out",
        "correct_attn_out with a CPTritonContext",
        "forward_decode_vectorized_5d",
        "forward_extend",
        "forward_extend_vectorized_5d",
        "launch_gather_shuffle_5d_to_linear",
        "launch_reshape_and_cache_shuffle_5d",
        "update_kv_lens_and_indices",
    },
    "aiter": {"mha_batch_prefill_func", "pa_decode_gluon"},
    "portable": {"mha_batch_prefill_func", "pa_decode_gluon", "unified_attention", "attention"},
}
FOLDERS = {"sglang": "/sglang/", "aiter": "/aiter/", "portable": "/suites/targets/portable/"}
KNOWN = registry.load()
RUNNING = [name for name, declaration in KNOWN.items() if declaration.runs]


def found(*results: dict[str, Any]) -> list[Row]:
    reasons = {n: {engine: registry.why_not(d, engine) for engine in Engine} for n, d in KNOWN.items()}
    return rows(list(KNOWN.values()), reasons, built_in_ledger(), results)


def test_every_function_that_was_asked_for_has_a_row_that_says_what_runs() -> None:
    listed = found()
    for package, functions in SEEDS.items():
        assert {row.function for row in listed if row.package == package} >= functions
    for row in listed:
        assert row.targets
        assert row.state
        assert row.cases is None
        assert row.new is None
    steps = {row.beneath for row in listed if row.function == "forward_extend_vectorized_5d"}
    assert steps == {("portable mha_batch_prefill_func",), ("aiter mha_batch_prefill_func",)}


def test_what_nobody_here_can_run_says_so() -> None:
    never = [row for row in found() if row.package == "aiter" and row.function == "mha_batch_prefill_func"]
    assert never
    if engines.unavailable(Engine.HIP):
        assert all(row.state.startswith("never executed by us: ") for row in never)


def test_cases_and_findings_are_those_of_the_results_and_the_ledger() -> None:
    new = {"id": "a", "known": None}
    target = {"cases": 5, "findings": [new, {"id": "b", "known": "x"}]}
    result = {"targets": {"sglang.shuffle_5d.gather": target, "sglang.backend.extend_5d": target | {"cases": 2}}}
    bundle = {"targets": {"sglang.shuffle_5d.gather": {"cases": 1, "findings": ["a"]}}, "findings": [new]}
    listed = [row for row in found(result, bundle) if row.function == "launch_gather_shuffle_5d_to_linear"]
    by_beneath = {row.beneath: row for row in listed}
    alone = by_beneath[()]
    assert (alone.cases, alone.new, alone.known) == (6, 2, ("sglang-shuffle-5d-gather-int32-slots",))
    over = by_beneath[("portable mha_batch_prefill_func",)]
    assert (over.cases, over.new) == (2, 1)
    assert "sglang-backend-extend-scale" in over.known
    assert "sglang-backend-decode-soft-cap" not in over.known


def called(declaration: Declaration, cases: int) -> set[tuple[str, str]]:
    """Name and file of every Python function that some of the target's cases enter."""
    seen: set[tuple[str, str]] = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            seen.add((frame.f_code.co_name, frame.f_code.co_filename))

    engines.start(Engine.EMULATOR)
    for case in islice(Plan(Space(declaration), 0), cases):
        sys.setprofile(note)
        try:
            execute(declaration, case, Poison.POSITIVE, Engine.EMULATOR, lambda _: None)
        except Exception:  # noqa: BLE001 - a known defect may raise; what was entered counts
            pass
        finally:
            sys.setprofile(None)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNNING)
def test_what_a_target_says_that_it_runs_is_what_it_runs(name: str) -> None:
    declaration = KNOWN[name]
    reason = registry.why_not(declaration, Engine.EMULATOR)
    if reason is not None:
        pytest.skip(reason)
    seen = called(declaration, 4)
    for named in declaration.runs:
        package, function = named.split()[:2]
        assert any(n == function and FOLDERS[package] in file for n, file in seen), named


def test_a_result_that_is_none_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "x.json"
    for text, told in (
        ("{", "not JSON"),
        ("[]", "result: "),
        ('{"schema": 2, "targets": {}}', "result.schema: 2; allowed: 1"),
        ('{"schema": 1, "targets": {"a": {"cases": "3", "findings": []}}}', "targets.a"),
        ('{"schema": 1, "targets": {"a": {"cases": 3, "findings": ["b"]}}}', "findings"),
    ):
        file.write_text(text)
        with pytest.raises(Stop, match=told):
            read_result(file)
    assert cli.main(["targets", "--functions", "--result", str(tmp_path / "none")]) == Exit.USAGE
    assert "cannot be read" in capsys.readouterr().err
    assert cli.main(["targets", "--result", str(file)]) == Exit.USAGE


def test_the_command_prints_rows(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["targets", "--functions", "--json"]) == Exit.CLEAN
    listed = json.loads(capsys.readouterr().out)["functions"]
    assert listed == [json.loads(json.dumps(row.to_dict())) for row in found()]
    assert cli.main(["targets", "--functions"]) == Exit.CLEAN
    assert "forward_decode_vectorized_5d" in capsys.readouterr().out
