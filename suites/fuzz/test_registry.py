"""Finding targets by name."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from fuzz import registry
from oracle.convention import CausalAlignment, Descales, Granularity, SinkUnits
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


@pytest.mark.parametrize(("name", "word"), [("no.such.module", "no module named"), ("absent.py", "no such file")])
def test_modules_that_are_not_there(name: str, word: str) -> None:
    with pytest.raises(registry.RegistryError, match=word):
        registry.load([name])


def test_a_module_that_lacks_something_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needs_something.py").write_text("import something_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(registry.RegistryError, match="something_that_is_not_there, which is missing"):
        registry.load(["needs_something"])


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("x = 1\nif True print()\n", "line 2: SyntaxError: "),
        ("\nraise ValueError('a\\nb')\n", "line 2: ValueError: a b"),
        ("import sys\nsys.exit('no GPU')\n", "line 2: SystemExit: no GPU"),
        ("from oracle import nothing_of_this_name\n", "line 1: ImportError: cannot import name"),
        ("import oracle\nimport not_there_at_all\n", "line 2: needs the module not_there_at_all, which is missing"),
        ("def f():\n    raise RuntimeError\n\nf()\n", "line 2: RuntimeError"),
        ("import json\n\njson.loads('{')\n", "line 3: JSONDecodeError: "),
        (MODULE.format(name="a b"), "line 4: DeclarationError: declare.kv_gather: name 'a b'"),
        ("x = 1\n", "declares no target"),
    ],
)
def test_what_a_users_file_raises_is_one_line(source: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(source)
    with pytest.raises(registry.RegistryError) as raised:
        registry.load([str(path)])
    message = str(raised.value)
    assert message.startswith(f"--targets {path}: {told}")
    assert "\n" not in message
    left = [module for module in sys.modules.values() if getattr(module, "__file__", None) == str(path)]
    assert not left or told == "declares no target"


def test_what_a_users_module_raises_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_when_imported.py").write_text("\n1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(registry.RegistryError, match="broken_when_imported: line 2: ZeroDivisionError: division by"):
        registry.load(["broken_when_imported"])


def test_a_module_given_twice_is_loaded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "given_twice.py"
    path.write_text(MODULE.format(name="mine.twice"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    for names in (["given_twice.py", str(path), "given_twice"], ["given_twice", "given_twice.py", "given_twice"]):
        assert "mine.twice" in registry.load(names)


def test_files_of_one_name_are_two_modules(tmp_path: Path) -> None:
    paths = [tmp_path / folder / "mine.py" for folder in ("a", "b")]
    for path in paths:
        path.parent.mkdir()
        path.write_text(MODULE.format(name=f"mine.{path.parent.name}"))
    known = registry.load([str(path) for path in paths])
    assert known["mine.a"].function.__module__ != known["mine.b"].function.__module__


def test_a_broken_entry_point_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_entry.py").write_text("raise OSError('cannot')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "entry_points", lambda group: [EntryPoint("theirs", "broken_entry", group)])
    with pytest.raises(registry.RegistryError, match="entry point theirs: broken_entry: line 1: OSError: cannot"):
        registry.load()


@pytest.mark.parametrize(
    ("answer", "told"), [(ValueError("no driver"), "ValueError: no driver"), (True, "returned True")]
)
def test_an_unavailable_that_fails_is_a_reason(answer: Any, told: str) -> None:
    def unavailable(engine: Engine) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    declaration = replace(registry.load()["torch.sdpa"], unavailable=unavailable)
    reason = registry.why_not(declaration, Engine.EMULATOR)
    assert reason is not None
    assert told in reason


def test_globs() -> None:
    known = registry.load()
    assert [t.name for t in registry.select(known, ["sglang.*.gather"])] == ["sglang.shuffle_5d.gather"]
    assert len(registry.select(known, [])) == len(known)
    with pytest.raises(registry.RegistryError, match=r"'nothing\.\*' is unknown; attn-oracle targets"):
        registry.select(known, ["nothing.*"])
    with pytest.raises(registry.RegistryError) as raised:
        registry.select(known, ["torch.spda"])
    assert str(raised.value).startswith("target 'torch.spda' is unknown; nearest: torch.sdpa")
    assert str(raised.value).endswith("; one of your own needs --targets mine.py, the file that declares it")
    assert len(str(raised.value)) < 200


def test_an_engine_that_is_not_declared_is_a_reason() -> None:
    declaration = registry.load()["torch.sdpa"]
    assert registry.why_not(declaration, Engine.EMULATOR) is None
    gpu_only = replace(declaration, engines=(Engine.CUDA,))
    assert registry.why_not(gpu_only, Engine.EMULATOR) == "runs on cuda only"


@pytest.mark.parametrize(
    "changes",
    [
        {"sink": SinkUnits.SCALED},
        {"causal_alignment": CausalAlignment.TOP_LEFT},
        {"sink_dtype": "bf16"},
        {"descales": Descales(k=Granularity.PAGE)},
    ],
)
def test_what_is_declared_and_not_handled_yet_is_never_judged(changes: dict[str, Any]) -> None:
    declaration = registry.load()["torch.sdpa"]
    changed = replace(declaration, convention=replace(declaration.convention, **changes))
    reason = registry.why_not(changed, Engine.EMULATOR)
    assert reason is not None
    assert "not handled yet" in reason
