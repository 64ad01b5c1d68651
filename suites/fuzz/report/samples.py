"""Findings and runs as plain data, made by the framework itself, for tests of what shows them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from fuzz.campaign.finding import Finding
from fuzz.campaign.run import Campaign, Outcome, Settings
from fuzz.case import Case, Probe
from fuzz.check.result import CaseResult, Check, CheckResult
from fuzz.check.run import check_case
from fuzz.report import summary
from oracle.declare import declaration_of
from oracle.kinds import Engine
from oracle.verdict import Verdict
from suites.fuzz import planted
from suites.fuzz.cases import extend_case, gather_case

SETTINGS = Settings(engine=Engine.EMULATOR, seed=5, versions={"attn-oracle": "0.1.0", "triton": None})
SCRIPT = "<script>document.title='struck'</script>\"'><img src=x onerror=alert(1)>"


def campaign() -> Campaign:
    """A campaign of three cases: one right, one with a key too few, one crash."""
    found = Campaign([], SETTINGS, None, None)
    small = extend_case(context_lens=(9, 17), query_lens=(9, 17), head_dim=32, v_head_dim=32, probe=Probe.CODE)
    for function in (planted.extend_clean, planted.extend_key):
        declaration = declaration_of(function)
        assert declaration is not None
        result = check_case(declaration, small, Engine.EMULATOR, lambda phase: None)
        outcome = Outcome(declaration.name, small, result, {"generate": 0.25, "kernel": 0.5})
        found.count(declaration, outcome)
    crashed = declaration_of(planted.gather_clean)
    assert crashed is not None
    check = CheckResult(Check.CRASH, Verdict.CRASH, "killed by SIGSEGV", {"signal": "SIGSEGV"})
    found.count(crashed, Outcome(crashed.name, gather_case(), CaseResult(checks=(check,)), {"kernel": 0.1}))
    return found


@cache
def _texts() -> tuple[str, tuple[str, ...]]:
    run = campaign()
    findings = [finding for target in run.summaries.values() for finding in target.findings]
    data = summary.to_dict(run, {"absent.target": "no GPU here"}, {})
    return json.dumps(data), tuple(json.dumps(finding.to_dict()) for finding in findings)


def run_object() -> dict[str, Any]:
    """The ``--json`` object of ``campaign``."""
    data: dict[str, Any] = json.loads(_texts()[0])
    return data


def finding_objects() -> list[dict[str, Any]]:
    """Its findings, the crash last."""
    return [json.loads(text) for text in _texts()[1]]


def keep(folder: Path) -> list[Path]:
    """Its findings as files in ``folder``."""
    paths = []
    for data in finding_objects():
        paths.append(folder / f"finding-{data['id']}.json")
        paths[-1].write_text(json.dumps(data))
    return paths


def finding(case: Case, **changes: Any) -> Finding:
    """A finding, by keyword."""
    plain: dict[str, Any] = {
        "target": "planted.extend.key",
        "check": Check.VALUES,
        "verdict": Verdict.FAIL,
        "message": "wrong",
        "evidence": {},
        "diagnosis": None,
        "worst_ratio": 2.0,
        "engine": Engine.EMULATOR,
        "versions": {},
        "known": None,
        "case": case,
    }
    return Finding(**(plain | changes))
