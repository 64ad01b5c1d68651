"""The comparison of engines, with the emulator on both sides."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from suites.gpu_diff import engines


def test_the_emulator_agrees_with_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.json"
    arguments = ["torch.sdpa_with_lse", "--gpu", "emulator", "--cases", "6", "--jobs", "2", "--out", str(out)]
    engines.app(arguments, standalone_mode=False)
    (row,) = json.loads(out.read_text())["rows"]
    assert row == {"target": "torch.sdpa_with_lse", "outcomes": {"identical": 6}, "ratio": 0.0, "notes": []}
    assert "| all | 6 | 6 | 0 | 0 | 0 | 0 | 0.00 |" in capsys.readouterr().out
