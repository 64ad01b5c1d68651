"""The doctor's report and the versions that all reports carry."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fuzz.doctor as room
import fuzz.versions as versions_room
from fuzz.doctor import Advice, doctor
from fuzz.versions import aiter_is_amds, versions
from oracle.kinds import Engine

NOTHING: dict[str, str | None] = dict.fromkeys(versions())
ALL_PACKAGES: dict[str, str | None] = dict.fromkeys((*room.DEPENDENCIES, *room.FOR_DEVELOPERS), "1")


def test_versions_have_the_names_of_reports() -> None:
    found = versions()
    assert list(found) == ["attn-oracle", "python", "torch", "triton", "sglang", "amd-aiter", "gpu"]
    assert found["attn-oracle"]
    assert found["torch"] == torch.__version__
    json.dumps(found)


def test_a_missing_distribution_has_no_version() -> None:
    assert versions_room.installed("no-such-distribution") is None
    assert versions_room.installed("torch") is not None


@pytest.mark.parametrize(("folder", "expected"), [("ops", True), ("other", False)])
def test_the_two_packages_called_aiter(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: str, expected: bool
) -> None:
    (tmp_path / "aiter" / folder).mkdir(parents=True)
    (tmp_path / "aiter" / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "aiter", raising=False)
    assert aiter_is_amds() is expected


def test_report_is_plain_data_and_has_every_engine_once() -> None:
    report = doctor()
    plain = json.loads(json.dumps(report.to_dict()))
    assert plain["schema"] == room.SCHEMA
    assert [state["engine"] for state in plain["engines"]] == list(Engine)
    names = [name for name, _ in report.rows()]
    assert len(set(names)) == len(names)
    assert all(value for _, value in report.rows())


def test_lines_show_every_row_and_every_advice() -> None:
    found = doctor()
    report = replace(
        found, advice=(Advice("sglang", "its kernels are targets", "pip install it"), Advice("x", "y", ""))
    )
    lines = report.lines()
    assert lines[-2:] == ["sglang: its kernels are targets: pip install it", "x: y"]
    assert len(lines) == len(report.rows()) + 2
    assert replace(found, advice=()).lines()[-1] == "nothing is missing"


def test_hip_was_never_executed_and_the_emulator_works_anywhere() -> None:
    states = {state.engine: state for state in doctor().engines}
    assert room.NEVER_EXECUTED in states[Engine.HIP].detail
    assert states[Engine.EMULATOR].usable


def advice(names: dict[str, str | None], packages: dict[str, str | None]) -> list[Advice]:
    return list(room._advice(names, packages))


def test_what_is_missing_comes_with_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_about_gpu", lambda names: iter(()))
    given = {a.about: a.command for a in advice(NOTHING, {**ALL_PACKAGES, "scipy": None, "mpmath": None})}
    assert given == {
        "sglang": f"pip install --no-deps {room.SGLANG}",
        "scipy": "pip install scipy",
        "mpmath": "pip install mpmath",
    }


def test_nothing_missing_nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_about_gpu", lambda names: iter(()))
    assert advice(dict.fromkeys(versions(), "1"), ALL_PACKAGES) == []


def test_on_rocm_no_command_touches_torch_or_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")
    given = advice(NOTHING, dict.fromkeys(ALL_PACKAGES))
    assert {"triton", "amd-aiter"} <= {a.about for a in given}
    assert [a.command for a in given if "torch" in a.command or "triton" in a.command] == []


def test_the_unrelated_aiter_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(room, "aiter_is_amds", lambda: False)
    (found,) = room._about_aiter(None)
    assert found.about == "aiter"
    assert found.command.endswith("pip install amd-aiter")
    monkeypatch.setattr(room, "aiter_is_amds", lambda: True)
    assert list(room._about_aiter("0.1")) == []
