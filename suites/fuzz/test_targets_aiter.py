"""Targets of AMD's kernels: what they say where there is no source, and that a plain case passes where there is."""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TypeVar

import pytest

from fuzz import engine as engines
from fuzz import registry
from fuzz.check.run import check_case
from fuzz.engine.loader import scoped_imports
from fuzz.ledger import Defect, load
from fuzz.space import Space
from fuzz.support import unsupported
from oracle.declare import Declaration
from oracle.kinds import Engine
from oracle.verdict import Verdict
from suites.targets import aiter_pa_decode, aiter_unified, tokenspeed_mha
from suites.targets.source_trees import AITER, TOKENSPEED, _Files

MODULES = (aiter_unified, aiter_pa_decode, tokenspeed_mha)
TARGETS = {d.name: d for module in MODULES for d in registry.declared_in(module)}
LEDGER = Path(__file__).parents[1] / "gpu_diff" / "ledger.toml"
T = TypeVar("T")
ENTRIES = [(target, d) for d in load(LEDGER) for target in d.targets if target in TARGETS]


class Simplest:
    """Chooses the simplest of everything."""

    def choose(self, name: str, options: Sequence[T]) -> T:
        return options[0]

    def integer(self, name: str, low: int, high: int) -> int:
        return low


def runnable(name: str) -> Declaration:
    declaration = TARGETS[name]
    reason = declaration.unavailable(Engine.EMULATOR)
    if reason is not None:
        pytest.skip(reason)
    engines.start(Engine.EMULATOR)
    return declaration


@pytest.mark.parametrize("name", TARGETS)
def test_nothing_installed_is_one_line_that_says_how_to_get_it(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(AITER.variable, str(tmp_path))
    monkeypatch.setenv(TOKENSPEED.variable, str(tmp_path))
    reason = TARGETS[name].unavailable(Engine.EMULATOR)
    assert reason is not None
    assert str(tmp_path) in reason
    assert "\n" not in reason


@pytest.mark.parametrize("inner", [True, False])
def test_the_variable_names_the_package_or_its_parent(
    inner: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "aiter").mkdir()
    monkeypatch.setenv(AITER.variable, str(tmp_path / "aiter" if inner else tmp_path))
    assert AITER.root() == tmp_path / "aiter"
    assert "has no ops/x.py" in (AITER.missing(("ops/x.py",), Engine.EMULATOR) or "")


@pytest.mark.parametrize("name", TARGETS)
def test_cuda_is_refused(name: str) -> None:
    assert "emulator, hip only" in (registry.why_not(TARGETS[name], Engine.CUDA) or "")


def test_files_find_each_other_without_running_any_init(tmp_path: Path) -> None:
    """As for an installed Triton: the same finder, over files that need none."""
    (tmp_path / "ops").mkdir()
    for folder in (tmp_path, tmp_path / "ops"):
        (folder / "__init__.py").write_text("raise RuntimeError('executed')\n")
    (tmp_path / "ops" / "a.py").write_text("from .b import B\nfrom pkg.given import C\nimport pkg.ops.b as b\n")
    (tmp_path / "ops" / "b.py").write_text("B = 1\n")
    given = ModuleType("pkg.given")
    vars(given)["C"] = 2
    files = _Files("pkg", tmp_path, {"pkg.given": given})
    with scoped_imports({"pkg": files.module}):
        module = import_module("pkg.ops.a")
        assert (module.B, module.C, module.b.B) == (1, 2, 1)
        with pytest.raises(ModuleNotFoundError, match="among the files of pkg"):
            import_module("pkg.ops.none")


@pytest.mark.parametrize(("target", "defect"), ENTRIES, ids=[f"{d.id}-{target}" for target, d in ENTRIES])
def test_the_case_of_each_entry_is_supported_and_matches_it(target: str, defect: Defect) -> None:
    assert unsupported(TARGETS[target], defect.case) is None
    assert defect.matches(target, defect.checks[0], None, defect.case)


@pytest.mark.parametrize("name", TARGETS)
def test_a_plain_case_passes(name: str) -> None:
    declaration = runnable(name)
    plain = Space(declaration).draw(Simplest())
    assert unsupported(declaration, plain) is None
    result = check_case(declaration, plain, Engine.EMULATOR, lambda phase: None)
    assert [c for c in result.checks if c.verdict is not Verdict.PASS] == []
    assert result.elements > 0
