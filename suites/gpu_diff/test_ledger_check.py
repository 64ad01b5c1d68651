"""gpu_diff runs each known defect's own case first: one that passes is stale."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from fuzz.commands import built_in_ledger, prepare
from fuzz.ledger import Defect
from oracle.kinds import Engine
from suites.gpu_diff.__main__ import check_ledger

DEFECT = "sglang-merge-state-two-empty-states"


@pytest.fixture
def defect() -> Defect:
    return next(d for d in built_in_ledger() if d.id == DEFECT)


def stale(defect: Defect) -> Any:
    prepared = prepare(defect.targets, engine=Engine.EMULATOR, modules=(), jobs=1)
    prepared = replace(prepared, settings=replace(prepared.settings, ledger=(defect,)))
    if not prepared.targets:
        pytest.skip(prepared.skipped[defect.targets[0]])
    with prepared.pool() as pool:
        shown, passed = check_ledger(pool, prepared, Console(stderr=True))
    assert {entry.id for entry in shown} == {defect.id} - {entry.id for entry in passed}
    return [entry.id for entry in passed]


def test_an_entry_whose_case_fails_is_shown_again(defect: Defect) -> None:
    assert stale(defect) == []


def test_an_entry_whose_case_passes_is_stale(defect: Defect) -> None:
    harmless = replace(defect.case, states=type(defect.case.states).FULL)
    assert stale(replace(defect, case=harmless, features={})) == [DEFECT]


def test_a_class_of_diagnosis_is_shown_again_too() -> None:
    window = next(d for d in built_in_ledger() if d.id == "sglang-extend-window-of-one-key")
    assert stale(replace(window, diagnosis="window")) == []
    assert stale(replace(window, diagnosis="sink")) == [window.id]
