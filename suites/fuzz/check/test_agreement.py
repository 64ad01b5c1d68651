"""Comparing the outputs of two engines for one case."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fuzz import engine
from fuzz.buffers import Poison
from fuzz.case import Case
from fuzz.check.agreement import Agreement, compare, outputs_of
from fuzz.check.execute import execute
from fuzz.tensor_data import from_data, to_data
from oracle.bits import bit_equal
from oracle.declare import Declaration, declaration_of
from oracle.kinds import Engine
from suites.fuzz import planted
from suites.fuzz.cases import extend_case, gather_case, write_case
from suites.targets import torch_native

Outputs = dict[str, Tensor]


@pytest.fixture(autouse=True)
def _engine() -> None:
    engine.start(Engine.EMULATOR)


def outputs(function: Any, case: Case) -> tuple[Declaration, Outputs]:
    declaration = declaration_of(function)
    assert declaration is not None
    return declaration, outputs_of(execute(declaration, case, Poison.POSITIVE, Engine.EMULATOR, lambda phase: None))


def changed(given: Outputs, name: str, change: Callable[[Tensor], Tensor]) -> Outputs:
    value = given[name].clone()
    value.view(-1)[0] = change(value.view(-1)[0])
    return given | {name: value}


@pytest.mark.parametrize(
    ("function", "case"),
    [
        (torch_native.sdpa_with_lse, extend_case(dtype="bf16", kv_dtype="bf16")),
        (planted.gather_clean, gather_case(probe="bytes", kv_dtype="uint8", dtype="uint8")),
        (planted.write_clean, write_case()),
    ],
)
def test_outputs_survive_being_sent_and_are_identical_to_themselves(function: Any, case: Case) -> None:
    declaration, found = outputs(function, case)
    assert found
    received = from_data(to_data(found))
    assert all(bool(bit_equal(found[name], received[name]).all()) for name in found)
    assert compare(declaration, case, found, received).agreement is Agreement.IDENTICAL


@pytest.mark.parametrize("name", ["out", "lse"])
def test_one_rounding_is_within_and_a_fault_is_beyond(name: str) -> None:
    case = extend_case(dtype="bf16", kv_dtype="bf16")
    declaration, found = outputs(torch_native.sdpa_with_lse, case)
    step = torch.finfo(found[name].dtype).eps
    compared = compare(declaration, case, found, changed(found, name, lambda x: x * (1 + step)))
    assert compared.agreement is Agreement.WITHIN
    assert compared.ratio is not None
    assert 0 < compared.ratio <= 1
    far = changed(found, name, lambda x: x + 1)
    for a, b in ((found, far), (far, found)):
        compared = compare(declaration, case, a, b)
        assert compared.agreement is Agreement.BEYOND
        assert compared.ratio is not None
        assert compared.ratio > 1


def test_a_nan_beside_a_number_is_beyond_and_two_nans_agree() -> None:
    case = extend_case(dtype="bf16", kv_dtype="bf16")
    declaration, found = outputs(torch_native.sdpa_with_lse, case)
    nan = changed(found, "out", lambda x: x * torch.nan)
    other = changed(found, "out", lambda x: -x * torch.nan)
    assert compare(declaration, case, found, nan).agreement is Agreement.BEYOND
    assert compare(declaration, case, nan, other).agreement is not Agreement.BEYOND


def test_one_bit_of_a_copy_is_beyond() -> None:
    case = gather_case(probe="bytes", kv_dtype="uint8", dtype="uint8")
    declaration, found = outputs(planted.gather_clean, case)
    flipped = changed(found, "key", lambda x: x ^ 1)
    assert compare(declaration, case, found, flipped).agreement is Agreement.BEYOND


def test_outputs_of_other_kinds_are_refused() -> None:
    case = extend_case(dtype="bf16", kv_dtype="bf16")
    declaration, found = outputs(torch_native.sdpa_with_lse, case)
    with pytest.raises(ValueError, match=r"outputs: .* on the other"):
        compare(declaration, case, found, {"out": found["out"]})
