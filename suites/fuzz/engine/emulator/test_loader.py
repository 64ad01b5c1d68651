"""Loading is scoped: substitutes exist while a file executes, and nothing real is shadowed afterwards."""

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from fuzz.engine import emulator

SOURCE = """
import triton
import triton.language as tl
from triton.language.extra import libdevice
from outer.inner.leaf import present, absent as also_absent
from outer.inner import leaf

@triton.jit
def kernel(out, K: tl.constexpr):
    tl.store(out, present + K)

def call(n):
    return triton.cdiv(n, 4), triton.next_power_of_2(n), also_absent(n)
"""


def leaf() -> dict[str, ModuleType]:
    return {"outer.inner.leaf": emulator.stub("outer.inner.leaf", present=5)}


def test_substitutes_are_gone_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    real, real_child = ModuleType("triton"), ModuleType("triton.language")
    monkeypatch.setitem(sys.modules, "triton", real)
    monkeypatch.setitem(sys.modules, "triton.language", real_child)
    before = dict(sys.modules)
    module = emulator.load_text(SOURCE, "loaded_source", imports=leaf())
    assert dict(sys.modules) == before
    assert sys.modules["triton"] is real
    assert vars(real).keys() == vars(ModuleType("triton")).keys()
    out = torch.zeros(1, dtype=torch.int32)
    module.kernel[(1,)](out, 2)
    assert out.item() == 7


def test_substitutes_are_gone_after_a_failure() -> None:
    before = dict(sys.modules)
    with pytest.raises(ZeroDivisionError):
        emulator.load_text("import triton\n1 / 0", "failing")
    with pytest.raises(ImportError, match=r"outer"):
        emulator.load_text("import outer.other", "failing", imports=leaf())
    assert dict(sys.modules) == before


def test_a_stub_complains_only_when_used() -> None:
    module = emulator.load_text(SOURCE, "loaded_source", imports=leaf())
    with pytest.raises(emulator.UnknownName, match=r"outer\.inner\.leaf\.absent is not known"):
        module.call(3)


def test_host_helpers() -> None:
    source = """import triton
values = [triton.next_power_of_2(n) for n in (0, 1, 2, 3, 4, 5, 1023)], triton.cdiv(9, 4)"""
    assert emulator.load_text(source, "helpers").values == ([0, 1, 2, 4, 4, 8, 1024], 3)


def test_a_file_keeps_its_lines_and_name(tmp_path: Path) -> None:
    path = tmp_path / "kernels.py"
    path.write_text("import triton\n\n@triton.jit\ndef fails(x):\n    y = 1\n    raise_here(y)\n")
    module = emulator.load_source(path, "file_kernels")
    assert (module.__file__, module.__name__) == (str(path), "file_kernels")
    with pytest.raises(NameError) as caught:
        module.fails[(1,)](torch.zeros(1))
    assert caught.traceback[-1].lineno + 1 == 6


def test_a_missing_file_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ImportError, match=r"cannot read kernel source .*gone\.py: No such file"):
        emulator.load_source(tmp_path / "gone.py", "gone")


def test_triton_itself_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    emulator.load_text("import triton\nimport triton.language as tl\nx = tl.float32", "no_triton")
    assert sys.modules["triton"] is None
