"""The ledger: entries match what they name, and a bad file says which entry and field."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fuzz import registry
from fuzz.campaign.minimise import readable
from fuzz.check.result import Check
from fuzz.commands import built_in_ledger
from fuzz.ledger import Defect, LedgerError, load
from fuzz.support import unsupported
from oracle.kinds import Engine
from suites.fuzz.cases import gather_case
from suites.gpu_diff.rediscovered import LARGER

KNOWN = registry.load()
ENTRY = """
schema = 1
[[defect]]
id = "x"
target = "t"
summary = "s"
checks = ["bounds", "crash"]
features = { index_dtype = ["int32"] }
engines = ["emulator"]
packages = { sglang = ">=0.5.15,<0.6" }
upstream = "unreported"
severity = "s"
reachability = "r"
case = "case.json"
"""


def write(tmp_path: Path, text: str) -> Path:
    (tmp_path / "case.json").write_text(gather_case(index_dtype="int32").to_json())
    path = tmp_path / "ledger.toml"
    path.write_text(text)
    return path


def test_an_entry_matches_target_check_and_features(tmp_path: Path) -> None:
    (defect,) = load(write(tmp_path, ENTRY))
    narrow = gather_case(index_dtype="int32")
    assert defect.matches("t", Check.BOUNDS, None, narrow)
    assert defect.matches("t", Check.CRASH, "window", narrow)
    assert not defect.matches("t", Check.VALUES, None, narrow)
    assert not defect.matches("u", Check.BOUNDS, None, narrow)
    assert not defect.matches("t", Check.BOUNDS, None, gather_case(index_dtype="int64"))


def test_an_entry_may_name_several_targets(tmp_path: Path) -> None:
    (defect,) = load(write(tmp_path, ENTRY.replace('"t"', '["t", "u"]')))
    narrow = gather_case(index_dtype="int32")
    assert [defect.matches(target, Check.BOUNDS, None, narrow) for target in ("t", "u", "v")] == [True, True, False]


def test_a_diagnosis_class_must_agree(tmp_path: Path) -> None:
    (defect,) = load(write(tmp_path, ENTRY + 'diagnosis = "window"\n'))
    narrow = gather_case(index_dtype="int32")
    assert defect.matches("t", Check.BOUNDS, "window", narrow)
    assert not defect.matches("t", Check.BOUNDS, None, narrow)


def test_an_entry_applies_to_its_engines_and_versions(tmp_path: Path) -> None:
    (defect,) = load(write(tmp_path, ENTRY))
    assert defect.applies(Engine.EMULATOR, {"sglang": "0.5.23"})
    assert not defect.applies(Engine.CUDA, {"sglang": "0.5.23"})
    assert not defect.applies(Engine.EMULATOR, {"sglang": "0.6.1"})
    assert not defect.applies(Engine.EMULATOR, {"sglang": None})
    assert not defect.applies(Engine.EMULATOR, {})


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("schema = 1", "schema = 9", ["schema", "allowed: 1"]),
        ('id = "x"', "", ["defect 1", "id", "missing"]),
        ('"crash"', '"cresh"', ["checks", "bounds"]),
        ('["emulator"]', '["cpu"]', ["engines", "cuda"]),
        (">=0.5.15,<0.6", "newest", ["packages", "version ranges"]),
        ('summary = "s"', 'summary = ""', ["summary", "text"]),
        ('id = "x"', 'id = "x"\ncolour = 1', ["colour", "unknown"]),
        ('"case.json"', '"absent.json"', ["case", "cannot be read"]),
        ("[[defect]]", "[[defect]", ["ledger.toml"]),
        ('"t"', "[]", ["target", "a list of them"]),
        ("[[defect]]", "x = 1\n[[defect]]", ["x", "unknown"]),
        ("[[defect]]", "defect = 3\n[d]", ["defect"]),
        ("{ index_dtype = [", "[ 3 ] #", ["features", "a table"]),
    ],
)
def test_a_bad_ledger_is_one_line(tmp_path: Path, old: str, new: str, words: list[str]) -> None:
    assert old in ENTRY
    with pytest.raises(LedgerError) as raised:
        load(write(tmp_path, ENTRY.replace(old, new)))
    assert "\n" not in str(raised.value)
    assert all(word in str(raised.value) for word in words), raised.value


def test_ids_are_unique(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="given twice"):
        load(write(tmp_path, ENTRY + ENTRY.replace("schema = 1", "")))


@pytest.mark.parametrize("defect", built_in_ledger(), ids=lambda d: d.id)
def test_each_entry_says_in_a_line_what_is_wrong_how_bad_and_who_meets_it(defect: Defect) -> None:
    told = (defect.summary, defect.severity, defect.reachability)
    assert len(set(told)) == 3
    for text in told:
        assert len(text.splitlines()) == 1
    assert readable(defect.case) is (defect.id not in LARGER)


def test_what_an_entry_says_is_one_line(tmp_path: Path) -> None:
    for field in ("summary", "severity", "reachability"):
        letter = field[0]
        text = ENTRY.replace(f'{field} = "{letter}"', f'{field} = "a\\nb"')
        assert text != ENTRY
        with pytest.raises(LedgerError, match=f"{field}: .*allowed: text of one line"):
            load(write(tmp_path, text))


def test_a_target_of_another_fp8_runs_the_case_in_its_own() -> None:
    defect = next(d for d in built_in_ledger() if d.id == "sglang-backend-extend-query-scale")
    fn, fnuz = (defect.case_for(KNOWN[target]) for target in defect.targets)
    assert fn == defect.case
    assert fnuz == replace(defect.case, kv_dtype="e4m3fnuz")
    plain = next(d for d in built_in_ledger() if d.id == "sglang-backend-extend-scale")
    assert plain.case_for(KNOWN["sglang.backend.extend_5d.fp8"]) == plain.case


def test_the_ledger_that_ships_is_valid_and_its_cases_have_its_features() -> None:
    defects = built_in_ledger()
    assert defects
    for defect in defects:
        for target in defect.targets:
            case = defect.case_for(KNOWN[target])
            assert defect.matches(target, defect.checks[0], defect.diagnosis, case), defect.id
            if ".dcp." not in target:
                # Ranks in processes of their own take fewer cases than they are given here.
                assert unsupported(KNOWN[target], case) is None, (defect.id, target)
