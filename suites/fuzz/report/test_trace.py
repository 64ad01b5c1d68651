"""What a target does, as statements: they can be executed, and do the same."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fuzz.report.trace import NotTraced, Program, is_foreign, module_name, trace

KERNELS = """
import torch

def add_into(out, x, *more, factor=2.0, name=None):
    out.copy_(x * factor + sum(more))

def pair(x):
    return x + 1, x - 1

def refuse(x):
    raise ValueError("planted")

class Scaler:
    def __init__(self, factor):
        self.factor = factor

    def scaled(self, x):
        return x * self.factor

def with_state(state, x):
    state.calls = state.calls + 1
    return x * state.calls + state.offset
"""


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    file = tmp_path / "traced_kernels.py"
    file.write_text(KERNELS)
    monkeypatch.syspath_prepend(str(tmp_path))
    spec = importlib.util.spec_from_file_location("traced_kernels", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.modules.pop("traced_kernels", None)


def traced(function: Any, **arguments: Any) -> Program:
    def named(result: Any) -> Mapping[str, Tensor]:
        values = result if isinstance(result, tuple) else () if result is None else (result,)
        return {f"r{i}": value for i, value in enumerate(values)}

    return trace(function, arguments, named)


def executed(program: Program, **arguments: Any) -> dict[str, Tensor]:
    """The program's outputs when its statements are executed."""
    scope: dict[str, Any] = {"torch": torch, "DEVICE": torch.device("cpu"), "SimpleNamespace": SimpleNamespace}
    scope |= {"constantly": lambda answer: lambda *_, **__: answer}
    scope |= {variable: importlib.import_module(dotted) for variable, dotted in program.modules.items()}
    scope |= arguments | program.constants
    exec("\n".join(statement.text for statement in program.needed), scope)
    return {name: scope[variable] for name, variable in program.outputs.items()}


X = torch.arange(12.0).view(3, 4)


def test_calls_and_torch_between_them_are_executed_again(kernels: ModuleType) -> None:
    def target(x: Tensor, y: Tensor) -> Tensor:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        rows = int(y.max())
        kernels.add_into(out, x[:rows].repeat(3, 1)[:3], y, 1, factor=3.0)
        a, _ = kernels.pair(out)
        a[0, 1:] = 7
        return kernels.Scaler(2).scaled(a).T.contiguous()

    y = torch.tensor([1.0, 1.0, 0.0, 1.0])
    program = traced(target, x=X, y=y)
    assert set(program.modules.values()) == {"traced_kernels"}
    assert torch.equal(executed(program, x=X, y=y)["r0"], target(X, y))
    texts = [statement.text for statement in program.needed]
    assert any(".add_into(" in text and "factor=3.0" in text and "name" not in text for text in texts)
    assert not any("max" in text for text in texts), "what nobody reads is left out"


def test_objects_of_an_adapter_are_followed(kernels: ModuleType) -> None:
    def target(x: Tensor) -> Tensor:
        state = SimpleNamespace(calls=1, offset=x[0], ask=lambda layer: 5)
        first = kernels.with_state(state, x)
        state.offset = first[1]
        return kernels.with_state(state, x)

    program = traced(target, x=X)
    assert torch.equal(executed(program, x=X)["r0"], target(X))
    assert sum(".calls = " in statement.text for statement in program.needed) == 1
    assert sum(".offset = " in statement.text for statement in program.needed) == 2


def test_a_call_that_raises_is_the_last(kernels: ModuleType) -> None:
    def target(x: Tensor) -> Tensor:
        return kernels.refuse(x + 1) * 2

    program = traced(target, x=X)
    assert program.raised
    assert program.outputs == {}
    with pytest.raises(ValueError, match="planted"):
        executed(program, x=X)


def test_an_adapter_that_goes_on_after_a_call_has_raised_is_refused(kernels: ModuleType) -> None:
    def target(x: Tensor) -> Tensor:
        try:
            kernels.refuse(x)
        except ValueError:
            x = kernels.pair(x)[0]
        return x

    with pytest.raises(NotTraced, match="goes on after a call has raised"):
        traced(target, x=X)


def test_what_cannot_be_written_down_is_named(kernels: ModuleType) -> None:
    def target(x: Tensor) -> Tensor:
        result: Tensor = kernels.with_state(SimpleNamespace(calls=1, offset=lambda a, b: a), x)
        return result

    with pytest.raises(NotTraced, match="a function that cannot be written down"):
        traced(target, x=X)

    def without_a_call(x: Tensor) -> Tensor:
        raise KeyError("early")

    with pytest.raises(NotTraced, match="raises before it calls a kernel"):
        traced(without_a_call, x=X)


def test_whose_a_file_is(kernels: ModuleType, tmp_path: Path) -> None:
    assert is_foreign(str(tmp_path / "traced_kernels.py"))
    assert not any(map(is_foreign, (__file__, torch.__file__, importlib.util.__file__, "<string>")))
    assert module_name(tmp_path / "traced_kernels.py") == "traced_kernels"
    assert module_name(Path("/nowhere/at/all.py")) is None
