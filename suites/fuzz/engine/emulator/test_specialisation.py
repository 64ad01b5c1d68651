"""What a launch is recorded as: the facts that a compiler would look at."""

from types import ModuleType
from typing import Any

import pytest
import torch

from fuzz.engine import emulator
from fuzz.engine.emulator import dtypes
from fuzz.engine.emulator.specialisation import Constant, Pointer, Scalar, Specialisation, argument, constant

FLOATS = torch.zeros(64, dtype=torch.bfloat16)


def only(log: emulator.Log) -> Specialisation:
    (launch,) = log.launches
    assert launch.specialisation is not None
    return launch.specialisation


@pytest.mark.parametrize(
    ("value", "recorded"),
    [
        (FLOATS, Pointer("bfloat16", aligned=True, small=True)),
        (FLOATS[1:], Pointer("bfloat16", aligned=False, small=True)),
        (FLOATS[8:], Pointer("bfloat16", aligned=True, small=True)),
        (torch.empty((1 << 31) + 16, dtype=torch.uint8)[:4], Pointer("uint8", aligned=True, small=False)),
        (torch.zeros(1, dtype=torch.bool), Pointer("bool", aligned=True, small=True)),
        (0, Scalar("int32", divisible=True)),
        (1, Scalar("int32", one=True)),
        (-16, Scalar("int32", divisible=True)),
        (7, Scalar("int32")),
        ((1 << 31) - 1, Scalar("int32")),
        (1 << 31, Scalar("int64", divisible=True)),
        (-(1 << 31) - 1, Scalar("int64")),
        ((1 << 63) + 1, Scalar("uint64")),
        (True, Scalar("bool")),
        (1.0, Scalar("float")),
        (None, Constant("NoneType", None)),
        ((1, None), (Scalar("int32", one=True), Constant("NoneType", None))),
    ],
)
def test_arguments(value: Any, recorded: Any) -> None:
    assert argument(value) == recorded


def test_constants_that_compare_equal_stay_apart() -> None:
    assert len({constant(value) for value in (True, 1, 1.0, "1", None, (1,), dtypes.int1)}) == 7
    assert constant((1, (dtypes.float16, None))).value[1].value[0] == Constant("dtype", "fp16")
    assert constant(len).type == "builtin_function_or_method"


def test_a_launch_is_recorded_with_its_options(programs: ModuleType) -> None:
    x, lengths = torch.randn(4, 32), torch.full((4,), 32, dtype=torch.int32)
    with emulator.session() as log:
        programs.divergent[(4,)](x, lengths, torch.zeros(4, 32), 32, BLOCK=32, LIMIT=1, num_warps=8, stream=3)
    found = only(log)
    assert (found.kernel, found.file) == ("divergent", programs.__file__)
    assert found.options == (("num_warps", 8),)
    assert dict(found.arguments) == {
        **{name: Pointer(str(t.dtype)[6:], True, True) for name, t in (("x", x), ("lengths", lengths), ("out", x))},
        "width": Scalar("int32", divisible=True),
        "BLOCK": Constant("int", 32),
        "LIMIT": Constant("int", 1),
    }


def test_a_compiled_kernel_launched_again_is_not_compiled_again(programs: ModuleType) -> None:
    out = torch.zeros(8, dtype=torch.int32)
    with emulator.session() as log:
        compiled = programs.languages[(1,)](out, None, 1)
        compiled[(1,)](out.long(), None, 7)
    assert log.launches[0].specialisation == log.launches[1].specialisation


def test_a_tuned_kernel_has_the_options_of_its_configuration(programs: ModuleType) -> None:
    with emulator.session() as log:
        programs.tuned[(1,)](torch.zeros(1, dtype=torch.int32), 5)
    found = only(log)
    assert dict(found.options) == {"num_warps": 4, "num_stages": 3, "num_ctas": 1}
    assert dict(found.arguments)["EVEN"] == Constant("bool", False)
