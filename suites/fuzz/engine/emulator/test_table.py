"""Every function that a kernel can name, of Triton's language and of Gluon, has a reference and a counter-example."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

from fuzz.engine.emulator import certify, lang
from fuzz.engine.emulator.gluon import table

LANGUAGE, GLUON = "triton.language", "triton.experimental.gluon.language"
# What compiles to nothing, and what builds kernels rather than runs in them.
NO_FUNCTIONS = {"gdc_launch_dependents", "gdc_wait", "pointer_type", "constexpr", "builtin"}


def functions(root: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Functions that the modules under `root` offer, by path below it."""
    for name, module in table.modules().items():
        if name == root or name.startswith(f"{root}."):
            head = name[len(root) + 1 :]
            for item, value in vars(module).items():
                known = isinstance(value, (type, ModuleType)) or not callable(value)
                if not known and not item.startswith("_") and item not in NO_FUNCTIONS:
                    yield f"{head}.{item}".lstrip("."), value


def rows() -> set[str]:
    return {row.name for row in certify._ROWS}


def certified(root: str, name: str, value: Callable[..., Any]) -> bool:
    last = name.rpartition(".")[2]
    names = {name, last, f"libdevice.{last}"} if root == LANGUAGE else {f"gl.{name}", f"gl.{last}"}
    if root == GLUON and value is lang.FUNCTIONS.get(last):  # Gluon's by inheritance
        names.add(last)
    return bool(names & rows())


@pytest.mark.parametrize("root", [LANGUAGE, GLUON])
def test_every_function_has_a_row(root: str) -> None:
    found = list(functions(root))
    assert len(found) > 80
    assert [name for name, value in found if not certified(root, name, value)] == []


def test_a_function_without_row_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(lang.FUNCTIONS, "brand_new", lambda x: x)
    monkeypatch.setitem(table.FUNCTIONS, "amd.cdna4.newer", lambda x: x)
    for root, name in ((LANGUAGE, "brand_new"), (GLUON, "amd.cdna4.newer")):
        assert name in [n for n, value in functions(root) if not certified(root, n, value)]


def test_every_row_has_a_counter_example_of_its_own() -> None:
    assert all(row.reference is not row.wrong for row in certify._ROWS)
