"""The tutorial and the example repositories from the source tree; CI runs them against a wheel as well."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from suites.fuzz.plugin.repository import ROOT


def script() -> ModuleType:
    """What CI runs: it knows the examples and their mistakes."""
    spec = importlib.util.spec_from_file_location("check_examples", ROOT / ".ci" / "check_examples.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


SCRIPT = script()
NEEDS = {"onnxruntime_attention": ("onnx", "onnxruntime")}


@pytest.mark.parametrize("example", SCRIPT.EXAMPLES, ids=lambda example: example.name)
def test_the_mistake_can_be_made(example: Any, tmp_path: Path) -> None:
    example.copy(tmp_path)
    assert (tmp_path / example.file).read_text().count(example.right) == 1


@pytest.mark.slow
@pytest.mark.parametrize("example", SCRIPT.EXAMPLES, ids=lambda example: example.name)
def test_it_passes_and_with_a_window_off_by_one_the_text_says_so(example: Any, tmp_path: Path) -> None:
    for module in NEEDS.get(example.name, ()):
        pytest.importorskip(module)
    assert SCRIPT.faults(example, tmp_path, SCRIPT.How(source=True, engine="emulator")) == []


def test_the_script_tells_what_did_not_run(tmp_path: Path) -> None:
    example = next(one for one in SCRIPT.EXAMPLES if one.kernel == "decode")
    said = "triton_decode.decode: 28 cases (pass 28) on {}, 60672 elements\n"
    assert SCRIPT.not_run(example, said.format("emulator"), tmp_path, "auto") == []
    assert SCRIPT.not_run(example, said.format("emulator"), tmp_path, "emulator") == []
    assert len(SCRIPT.not_run(example, "1 skipped\n", tmp_path, "auto")) == 1
    assert len(SCRIPT.not_run(example, said.format("emulator"), tmp_path, "cuda")) == 2
    assert SCRIPT.not_run(example, said.format("cuda"), tmp_path, "cuda") == ["Triton compiled no decode for cuda"]
    (tmp_path / "key").mkdir()
    (tmp_path / "key" / "decode.cubin").touch()
    assert SCRIPT.not_run(example, said.format("cuda"), tmp_path, "cuda") == []


def test_the_script_tells_a_text_that_does_not_name_the_window() -> None:
    assert SCRIPT.SAID.search("E  oracle.failure.WindowMismatch: a.b: values: window: 2 keys where 1 key is asked for")
    assert not SCRIPT.SAID.search("E  oracle.failure.ValuesMismatch: a.b: values: 3 of 4 elements beyond their budget")


def test_the_tutorial_is_complete() -> None:
    names = [name for name, _ in SCRIPT.BLOCK.findall((SCRIPT.DOCS / "tutorial.md").read_text())]
    assert names == ["mine.py", "test_mine.py", "test_by_hand.py"]
