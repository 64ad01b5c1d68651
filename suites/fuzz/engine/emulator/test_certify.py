"""The self-check passes, and notices a function that is wrong in one lane or lacks a reference."""

import pytest
import torch

from fuzz.engine.emulator import certify, lang, references
from fuzz.engine.emulator.value import Value


def test_everything_is_certified() -> None:
    checks = certify.certify()
    assert [f"{check.name}: {check.detail}" for check in checks if not check.passed] == []
    assert {f"function {name}" for name in lang.FUNCTIONS} <= {check.name for check in checks}


def test_a_wrong_lane_is_noticed() -> None:
    row = next(row for row in references.ROWS if row.name == "exp2")

    def off_by_one_bit(x: Value) -> Value:
        result = row.call(x)
        bits = result.data.view(torch.int32).clone()
        bits[0, 20] += 1
        return Value(bits.view(torch.float32), result.dtype)

    changed = references.Row("exp2", row.inputs, off_by_one_bit, row.reference, row.wrong)
    assert not certify._function(changed).passed
    assert certify._function(row).passed


def test_a_wrong_answer_that_is_right_is_noticed() -> None:
    row = next(row for row in references.ROWS if row.name == "exp2")
    toothless = references.Row("exp2", row.inputs, row.call, row.reference, row.reference)
    assert certify._function(toothless).detail == "the counter-example was not told apart"


def test_a_function_without_reference_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(lang.FUNCTIONS, "brand_new", lambda x: x)
    table = next(check for check in certify.certify() if check.name == "table")
    assert not table.passed
    assert table.detail == "without reference: brand_new"
