"""What the documentation shows is run: the declared kernel passes, and its off-by-one is found."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from fuzz.cli import main

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"


def example() -> str:
    found = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    assert found is not None
    return found[1]


def fuzz(path: Path) -> int:
    arguments = [
        "fuzz",
        "mine.attention",
        "--targets",
        str(path),
        "--cases",
        "25",
        "--engine",
        "emulator",
        "--jobs",
        "1",
    ]
    return main([*arguments, "--out", str(path.parent / "out"), "--json"])


def test_the_example_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.py"
    path.write_text(example())
    assert fuzz(path) == 0
    target = json.loads(capsys.readouterr().out)["targets"]["mine.attention"]
    assert target["verdicts"] == {"pass": 25}
    assert target["worst_ratio"] > 0


def test_the_mistake_that_the_page_suggests_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    right, wrong = "position - window\n", "position - window - 1\n"
    assert right in example()
    path = tmp_path / "mine.py"
    path.write_text(example().replace(right, wrong))
    assert fuzz(path) == 1
    findings = json.loads(capsys.readouterr().out)["targets"]["mine.attention"]["findings"]
    assert {finding["check"] for finding in findings} <= {"values", "lse"}
    assert findings
