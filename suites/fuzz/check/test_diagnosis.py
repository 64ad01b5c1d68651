"""Failing values carry their diagnosis: in evidence, findings, the ledger, reports and on the command line."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from fuzz import engine
from fuzz.buffers import Poison
from fuzz.campaign.finding import Finding, findings_of
from fuzz.campaign.run import Settings
from fuzz.case import Case
from fuzz.check.diagnosis import class_of, detail_of, diagnosed, kind_of, others_of, surroundings, told_of
from fuzz.check.execute import Execution
from fuzz.check.result import CaseResult, Check, CheckResult
from fuzz.check.run import check_case
from fuzz.cli import main
from fuzz.instance import build
from fuzz.instance.pool import own_pages
from fuzz.ledger import Defect
from fuzz.report.summary import print_findings
from oracle.declare import declaration_of
from oracle.kinds import Engine
from oracle.verdict import Verdict
from suites.fuzz import planted
from suites.fuzz.cases import decode_case, extend_case
from suites.fuzz.report.samples import finding as sample

PLANTED = ["--targets", "suites.fuzz.planted", "--engine", "emulator"]
CASE = extend_case(context_lens=[12, 9], query_lens=[2, 9], window=5)


@pytest.fixture(autouse=True)
def _engine() -> None:
    engine.start(Engine.EMULATOR)
    planted.forget()


def judge(function: Any, case: Case = CASE) -> CaseResult:
    declaration = declaration_of(function)
    assert declaration is not None
    return check_case(declaration, case, Engine.EMULATOR, lambda phase: None)


def settings(*defects: Defect) -> Settings:
    return Settings(engine=Engine.EMULATOR, seed=0, jobs=1, modules=(), ledger=defects, versions={})


def findings(function: Any, *defects: Defect) -> list[Finding]:
    return findings_of("planted", CASE, judge(function), settings(*defects))


def defect(diagnosis: str | None) -> Defect:
    return Defect(
        id="it",
        targets=("planted",),
        summary="s",
        checks=(Check.VALUES, Check.LSE),
        diagnosis=diagnosis,
        features={},
        engines=(Engine.EMULATOR,),
        packages={},
        upstream="unreported",
        severity="s",
        reachability="r",
        case=CASE,
    )


def test_failing_values_and_sums_carry_their_diagnosis() -> None:
    result = judge(planted.extend_window)
    assert {check.check for check in result.failures} == {Check.VALUES, Check.LSE}
    for check in result.failures:
        assert kind_of(check.evidence) == "window"
        assert detail_of(check.evidence) == "window: 6 keys where 5 keys are asked for"
        json.dumps(check.to_dict())
    assert all(kind_of(check.evidence) is None for check in result.checks if check.verdict is Verdict.PASS)


def test_a_clean_target_is_not_diagnosed() -> None:
    assert all(kind_of(check.evidence) is None for check in judge(planted.extend_clean).checks)


def test_a_finding_and_its_signature_name_the_class() -> None:
    found = findings(planted.extend_lse)
    assert [(f.check, f.diagnosis) for f in found] == [(Check.LSE, "lse_base")]
    assert found[0].signature["diagnosis"] == "lse_base"
    assert found[0].to_dict()["diagnosis"] == "lse_base"
    assert found[0].fault == ("planted", Check.LSE, "lse_base", None)


def test_checks_that_compare_outputs_share_the_diagnosis_of_the_values() -> None:
    told = {"diagnosis": {"kind": "window", "detail": "window: 1 key"}}
    values = CheckResult(Check.VALUES, Verdict.FAIL, "", told)
    poison, bounds = CheckResult(Check.POISON, Verdict.FAIL), CheckResult(Check.BOUNDS, Verdict.FAIL)
    assert class_of((values, poison), Check.POISON) == "window"
    assert class_of((values, bounds), Check.BOUNDS) is None
    assert class_of((poison,), Check.POISON) is None


def test_a_defect_with_a_class_explains_only_that_class() -> None:
    assert [f.known for f in findings(planted.extend_window, defect("window"))] == ["it", "it"]
    assert [f.known for f in findings(planted.extend_window, defect("sink"))] == [None, None]
    assert [f.known for f in findings(planted.extend_window, defect(None))] == ["it", "it"]


def test_a_report_says_it_in_one_line() -> None:
    console = Console(file=io.StringIO(), width=200)
    print_findings(findings(planted.extend_window), {}, console)
    assert isinstance(console.file, io.StringIO)
    assert "    diagnosis: window: 6 keys where 5 keys are asked for\n" in console.file.getvalue()


def explained(*others: str) -> dict[str, Any]:
    """Evidence with a diagnosis, and what explains it as well."""
    runners_up = [{"kind": other.partition(":")[0], "detail": other, "ratio": 0.5} for other in others]
    return {"diagnosis": {"kind": "window", "detail": "window: a", "ratio": 0.5, "runners_up": runners_up}}


def test_what_explains_it_as_well_is_said_wherever_the_diagnosis_is() -> None:
    several = explained("window: b", "extra_key: c", "page: d", "page: e")
    assert others_of(several) == ("window: b", "extra_key: c", "page: d")
    assert list(told_of(several)) == ["diagnosis: window: a", "or: window: b; extra_key: c; page: d"]
    assert list(told_of(explained())) == ["diagnosis: window: a"]
    assert list(told_of({})) == []
    console = Console(file=io.StringIO(), width=200)
    print_findings([sample(CASE, evidence=several, diagnosis="window")], {}, console)
    assert isinstance(console.file, io.StringIO)
    said = "    diagnosis: window: a\n    or: window: b; extra_key: c; page: d\n"
    assert said in console.file.getvalue()


def saved(tmp_path: Path, target: str, case: Case = CASE) -> str:
    path = tmp_path / "finding.json"
    path.write_text(json.dumps({"schema": 1, "target": target, "case": case.to_dict()}))
    return str(path)


def test_the_command_ranks_what_explains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved(tmp_path, "planted.extend.window")
    assert main(["diagnose", path, *PLANTED]) == 1
    assert "    1. window: 6 keys where 5 keys are asked for" in capsys.readouterr().out
    assert main(["diagnose", path, *PLANTED, "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["failed"] == ["values", "lse"]
    assert data["diagnoses"]["values"]["parameters"] == {"keys": 6, "asked": 5}


def test_the_command_says_when_nothing_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", saved(tmp_path, "planted.extend.clean"), *PLANTED]) == 0
    assert "nothing fails" in capsys.readouterr().out
    assert main(["diagnose", str(tmp_path / "absent.json"), *PLANTED]) == 2


def test_surroundings_are_the_slots_behind_the_keys() -> None:
    case = extend_case(
        operation="paged_decode",
        context_lens=[17, 0, 16],
        query_lens=[1, 1, 1],
        kv_layout="nhd",
        page_size=16,
        index_form="page_table",
        pool="spare",
        index_dtype="int32",
    )
    instance = build(case, Poison.POSITIVE, "cpu")
    run = Execution(Poison.POSITIVE, instance, {}, {}, {}, 0, ())
    around = surroundings(run)
    assert around.page_size == 16
    assert around.pages == tuple(tuple(pages) for pages in own_pages(case))
    assert around.stale is not None
    assert [len(k) for k, _ in around.stale] == [15, 0, 0]
    page = own_pages(case)[0][1]
    assert torch.equal(around.stale[0][1], instance.buffers["v_cache"].view[page, 1:])
    assert (
        surroundings(Execution(Poison.POSITIVE, build(CASE, Poison.POSITIVE, "cpu"), {}, {}, {}, 0, ())).stale is None
    )


def test_of_a_huge_pool_the_pages_are_known_and_no_slot_is_read() -> None:
    case = decode_case(context_lens=[17, 3], index_form="page_table", pool="huge", dtype="bf16", kv_dtype="bf16")
    run = Execution(Poison.POSITIVE, build(case, Poison.POSITIVE, "cpu"), {}, {}, {}, 0, ())
    around = surroundings(run)
    assert around.pages == tuple(tuple(pages) for pages in own_pages(case))
    assert around.stale is None


def test_what_did_not_fail_is_left_as_it_is() -> None:
    declaration = declaration_of(planted.extend_clean)
    assert declaration is not None
    instance = build(CASE, Poison.POSITIVE, "cpu")
    run = Execution(Poison.POSITIVE, instance, {}, {}, {}, 0, ())
    results = (CheckResult(Check.VALUES, Verdict.VACUOUS), CheckResult(Check.BOUNDS, Verdict.FAIL))
    assert diagnosed(declaration, run, results) == results
