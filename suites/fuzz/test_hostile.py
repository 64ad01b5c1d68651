"""Whatever a target does to its process, the campaign goes on: each fault is named, none is lost, none doubled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import fuzz.campaign.run as campaign_room
from fuzz.cli import main

MODULES = ["--targets", "suites.fuzz.planted", "--targets", "suites.fuzz.hostile"]
CASES = 4
MEMORY = 1 << 30

FAULTS: dict[str, tuple[str | None, str]] = {
    "planted.gather.segfault": ("crash", "SIGSEGV"),
    "planted.gather.hang": ("hang", "no answer within 2 s"),
    "planted.gather.inputs": ("inputs", "changed"),
    "planted.gather.crash": ("crash", "ValueError: planted"),
    "planted.gather.bounds": ("bounds", ""),
    "planted.gather.result": ("result", "expected"),
    "hostile.exhausts": ("crash", "bytes resident"),
    "hostile.exits": ("crash", ""),
    "hostile.system_exit": ("crash", "SystemExit: enough"),
    "hostile.wrong_dtype": ("result", "torch.float64"),
    "hostile.returns_nothing": ("result", "returned (None)"),
    "hostile.nan": ("values", ""),
    "hostile.corrupts_the_heap": ("crash", "SIG"),
    "hostile.prints_garbage": (None, ""),
    "hostile.forks": (None, ""),
    "hostile.leaks": (None, ""),
}
"""The check that names each fault and a part of what it says; None where the kernel's results are right."""


def searched(target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, Any]:
    """A campaign over one hostile target and a harmless one beside it."""
    timeout = "2s" if target.endswith("hang") else "60s"
    where = ["--engine", "emulator", "--out", str(tmp_path), "--timeout", timeout, "--jobs", "2", "--json"]
    code = main(["fuzz", target, "hostile.bystander", *MODULES, "--cases", str(CASES), "--minimise-time", "0s", *where])
    return code, json.loads(capsys.readouterr().out)["targets"]


LONG = (
    "hostile.exhausts",
    "hostile.exits",
    "hostile.leaks",
    "hostile.corrupts_the_heap",
    "planted.gather.hang",
    "planted.gather.segfault",
)


@pytest.mark.parametrize("target", [pytest.param(t, marks=pytest.mark.slow) if t in LONG else t for t in FAULTS])
def test_a_fault_is_named_and_harms_nothing_else(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(campaign_room, "fair_memory_bytes", lambda jobs: MEMORY)
    check, said = FAULTS[target]
    code, targets = searched(target, tmp_path, capsys)
    found = targets[target]["findings"]
    assert targets["hostile.bystander"]["verdicts"] == {"pass": CASES}
    assert targets[target]["cases"] == sum(targets[target]["verdicts"].values()) == CASES
    if check is None:
        assert (code, found) == (0, [])
        return
    assert code == 1
    assert {f["check"] for f in found} >= {check}
    assert any(said in f["message"] for f in found if f["check"] == check)
    assert len({f["id"] for f in found}) == len(found)
    assert all(Path(f["case"]).is_file() for f in found)
