"""Finding targets by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from fuzz import registry
from oracle.kinds import Engine

PLANTED = "suites.fuzz.planted"

MODULE = """
from oracle import Convention, declare

@declare.kv_gather(name="{name}", convention=Convention(source="x"))
def gather(k_cache, v_cache, slots): ...
"""


def test_built_in_targets_and_a_users_module() -> None:
    built_in = registry.load()
    assert {"sglang.shuffle_5d.write", "sglang.shuffle_5d.gather", "torch.sdpa"} <= set(built_in)
    assert "planted.gather.clean" in registry.load([PLANTED])


def test_a_users_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(MODULE.format(name="mine.gather"))
    assert "mine.gather" in registry.load([str(path)])


def test_a_name_declared_twice_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "again.py"
    path.write_text(MODULE.format(name="torch.sdpa"))
    with pytest.raises(registry.RegistryError, match=r"torch.sdpa is declared twice"):
        registry.load([str(path)])


@pytest.mark.parametrize(("name", "word"), [("no.such.module", "no module named"), ("absent.py", "not a Python file")])
def test_modules_that_are_not_there(name: str, word: str) -> None:
    with pytest.raises(registry.RegistryError, match=word):
        registry.load([name])


def test_a_module_that_lacks_something_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needs_something.py").write_text("import something_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(registry.RegistryError, match="something_that_is_not_there, which is missing"):
        registry.load(["needs_something"])


def test_globs() -> None:
    known = registry.load()
    assert [t.name for t in registry.select(known, ["sglang.*.gather"])] == ["sglang.shuffle_5d.gather"]
    assert len(registry.select(known, [])) == len(known)
    with pytest.raises(registry.RegistryError, match=r"'nothing\.\*': unknown; known: sglang"):
        registry.select(known, ["nothing.*"])


def test_an_engine_that_is_not_declared_is_a_reason() -> None:
    declaration = registry.load()["torch.sdpa"]
    assert registry.why_not(declaration, Engine.EMULATOR) is None
