"""What the detection table counts, and that the page says what the parts hold."""

import json
import math
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fuzz.buffers import Poison
from fuzz.errors import Stop
from fuzz.instance import build
from fuzz.probes import unfit
from oracle.diagnose import Kind
from suites.tolerance import __main__ as command
from suites.tolerance import files, report
from suites.tolerance.__main__ import contexts_of
from suites.tolerance.adversarial import Search
from suites.tolerance.chart import Chart
from suites.tolerance.detection import (
    RULES,
    SHIPPED,
    SUITE,
    Record,
    Subject,
    Table,
    Unit,
    examine,
    examine_all,
    share_detected,
    units,
)
from suites.tolerance.diagnosis import Named, name, to_dict
from suites.tolerance.faults import CLEAN, CONTROLS, COUNTED, FAULTS
from suites.tolerance.kernel import read
from suites.tolerance.soundness import Results
from suites.tolerance.tallies import Combination, Tally

A, B = SHIPPED


def record(fault: str, probe: str, seed: int, *fired: str, executed: bool = True, **ratios: float) -> Record:
    return Record(Unit(123, probe, seed), fault, executed, frozenset(fired), ratios)


@pytest.fixture(scope="module")
def subject() -> Subject:
    return Subject.of(Unit(123, "normal", 1))


def test_a_fault_fires_and_a_clean_kernel_does_not(subject: Subject) -> None:
    clean, window, lse, idle = examine(
        subject, [FAULTS[n] for n in ("clean", "window + 1", "lse in base 2", "last tile not rescaled")]
    )
    assert clean.fired == frozenset()
    assert not clean.executed
    assert set(SHIPPED) <= window.fired <= set(RULES)
    assert max(window.ratios.values()) > 1 > max(clean.ratios.values())
    assert A not in lse.fired
    assert B in lse.fired
    assert (idle.executed, idle.fired) == (False, frozenset())


def test_the_same_unit_gives_the_same_records() -> None:
    unit = Unit(123, "normal", 2)
    faults = [FAULTS["stale token"], CLEAN]
    assert list(examine(Subject.of(unit), faults)) == list(examine(Subject.of(unit), faults))


@pytest.mark.slow
def test_processes_change_nothing() -> None:
    wanted = units(123, ("normal", "code"), 2)
    assert list(examine_all(wanted, jobs=2)) == list(examine_all(wanted))


def test_a_rate_is_over_the_seeds_that_executed_the_fault_on_any_probe() -> None:
    table = Table(
        123,
        (
            record("window + 1", "normal", 1),
            record("window + 1", "code", 1, A),
            record("window + 1", "normal", 2, B),
            record("window + 1", "code", 2, executed=False),
            record("window + 1", "normal", 3, A, executed=False),
            record("window + 1", "code", 3, executed=False),
        ),
    )
    both = ("normal", "code")
    assert table.rate("window + 1", both, SHIPPED) == 1
    assert table.rate("window + 1", both, (A,)) == 0.5
    assert table.rate("window + 1", ("code",), SHIPPED) == 1
    assert table.rate("window + 1", ("normal",), SHIPPED) == 0.5
    assert table.rate("window - 1", both, SHIPPED) is None
    assert table.rate("window + 1", ("gate",), SHIPPED) is None
    assert table.caught(both, SHIPPED) == 1
    assert table.caught(both, (B,)) == 0


def test_alarms_count_controls_only() -> None:
    table = Table(
        123,
        (
            record("clean", "normal", 1, "vLLM"),
            record("clean", "normal", 2, executed=False),
            record("p double rounded", "normal", 1, A, B),
            record("window + 1", "normal", 1, A),
        ),
    )
    assert table.alarms(("normal",), SHIPPED) == (1, 3)
    assert table.alarms(("normal",), ("vLLM",)) == (1, 3)
    assert table.alarms(("normal",), ("aiter",)) == (0, 3)


RATIO = st.sampled_from([0.0, 0.125, 0.33, 7.25, math.inf])


@settings(max_examples=25)
@given(
    st.lists(
        st.tuples(st.booleans(), st.frozensets(st.sampled_from(RULES)), RATIO),
        min_size=12,
        max_size=12,
    )
)
def test_a_table_survives_json(drawn: list[tuple[bool, frozenset[str], float]]) -> None:
    keys = [(f, p, s) for f in ("clean", "window + 1") for p in ("normal", "code") for s in (1, 2, 3)]
    table = Table(
        123,
        tuple(
            Record(Unit(123, probe, seed), fault, executed, fired, {A: ratio} if fault == "clean" else {})
            for (fault, probe, seed), (executed, fired, ratio) in zip(keys, drawn, strict=True)
        ),
    )
    again = Table.from_dict(json.loads(json.dumps(table.to_dict())))
    assert again.records == table.records
    assert again.seeds == (1, 2, 3)


def small_parts(out: Path) -> None:
    made = {"date": "2026-01-02", "device": "cpu", "python": "3", "torch": "2", "seeds": 1, "seconds": 0}
    records = []
    for probe in SUITE:
        records += [replace(record(f.name, probe, 1), ratios={A: 0.25, B: 0.5}) for f in CONTROLS]
        records += [record(f.name, probe, 1, A, B, "vLLM") for f in COUNTED[:7]]
        records += [record(f.name, probe, 1, B) for f in COUNTED[7:20]]
        records += [record(f.name, probe, 1) for f in COUNTED[20:21]]
        records += [record(f.name, probe, 1, executed=False) for f in COUNTED[21:]]
    report.save(out, "detection-123", Table(123, tuple(records)).to_dict(), made)
    named = [
        Named(123, 1, "window + 1", "normal", "window", "window", "window: 83", True),
        Named(123, 1, "no sink", "code", "sink", "split", "split: one lost", False),
        Named(123, 1, "V of a tile halved", "normal", "unexplained", "unexplained", "", True),
    ]
    report.save(out, "diagnosis-123", to_dict(named), made)


def test_the_page_says_what_the_parts_hold(tmp_path: Path) -> None:
    out = tmp_path / "tolerance.md"
    small_parts(out)
    report.write(out)
    text = out.read_text()
    assert "| detection-123 | 2026-01-02 | cpu | 3 | 2 | 1 | 0 |" in text
    assert "| 123 | suite of 6 | 21 | 20 | 7 | 0 | 0 | 0 | 7 | 0 | 0 | 0 |" in text
    assert f"Missed: {COUNTED[20].name} (0% of seeds)" in text
    assert "0 of 12" in text
    assert "0.25 / 0.5" in text
    assert "1 of 2 counted faults named rightly" in text
    assert "1 of 1 faults of other kinds left unexplained rightly" in text
    assert "| 123 | no sink | code | sink | split | split: one lost |" in text
    ElementTree.parse(tmp_path / "tolerance" / "detected.svg")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": 2, "made": {}}', '{"schema": 1}'])
def test_a_part_that_is_none_is_named(tmp_path: Path, text: str) -> None:
    out = tmp_path / "tolerance.md"
    small_parts(out)
    bad = tmp_path / "tolerance" / "detection-7.json"
    bad.write_text(text)
    with pytest.raises(report.ResultError, match=r"detection-7\.json: ") as error:
        report.write(out)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["", "x", "123,", "4", "123,-5", str(1 << 21)])
def test_contexts_that_cannot_be_are_refused(text: str) -> None:
    with pytest.raises(Stop, match=r"^--contexts: .*allowed"):
        contexts_of(text)


def test_contexts() -> None:
    assert contexts_of("123,8187") == [123, 8187]


def test_bars_stand_for_numbers() -> None:
    svg = Chart("A <title>", ("one", "two"), {"left": [1, 4], "right": [None, 2]}, 4.0).svg()
    tree = ElementTree.fromstring(svg)
    heights = [float(bar.get("height", 0)) for bar in tree.iter("{http://www.w3.org/2000/svg}rect")][1:4]
    assert heights == [50, 200, 100]


def test_a_fault_is_named_and_one_of_no_known_kind_is_not(subject: Subject) -> None:
    window, strange = (name(subject, FAULTS[n]) for n in ("window + 1", "sign of one output dim"))
    assert (window.named, window.right) == (Kind.WINDOW.value, True)
    assert (strange.named, strange.right) == (Kind.UNEXPLAINED.value, True)
    assert not name(subject, replace(CLEAN, kind=Kind.SINK)).right


@pytest.mark.slow
def test_the_figure_is_the_share_of_executed_faults() -> None:
    figure = share_detected(123)
    assert 0.9 < figure.value <= 1
    assert " of 40" in figure.detail


def test_the_page_in_the_documentation_is_what_its_parts_say() -> None:
    page = Path(__file__).parents[3] / "docs" / "results" / "tolerance.md"
    results = report.load(page)
    assert page.read_text(encoding="utf-8") == report.text(results, "tolerance")
    assert (page.parent / "tolerance" / "detected.svg").read_text(encoding="utf-8") == report.plot(results)


def test_campaigns_and_searches_have_their_sections(tmp_path: Path) -> None:
    out = tmp_path / "tolerance.md"
    small_parts(out)
    tally = Tally(cases=3, elements=20_000, vacuous=500, suspect=1, alarms={"probable out": 1}, worst=[0.5, 1.25])
    run = {
        "seed": 1,
        "device": "cpu",
        "shard": "0/1",
        "cases": 3,
        "seconds": 2.0,
        "versions": {"torch": "2", "x": None},
    }
    key = Combination("bf16", "code", "2k")
    finding = {"combination": list(key), "device": "cpu", "alarms": {"probable out": 1}}
    campaign = Results(runs=[run], tallies={key: tally}, findings=[finding])
    files.write(report.folder_of(out) / "soundness.json", campaign.to_dict())
    search = Search.new("cpu", 3, conspire=False)
    search.best["bf16"] = {"ratio": 0.987, "score": {"worst_case": 0.5}}
    files.write(report.folder_of(out) / "adversarial-3.json", search.to_dict())
    report.write(out)
    page = out.read_text()
    assert "- 19,500 elements that are not vacuous, in 3 cases;" in page
    assert "- 1 elements beyond a bound;" in page
    assert "| cpu | 1 | 0/1 | 3 | 2.0 | torch 2 |" in page
    assert "| bf16 | code | 2k | cpu | probable out 1 |" in page
    assert "| code | 3 | 19500 | 0.025 |" in page
    assert "| cpu | 3 | False | 0 | 0.0 | 0 | 0.987 | 0.5 |" in page


def test_unused_slots_of_the_normal_probe_hold_normal_numbers(subject: Subject) -> None:
    (x,) = subject.operands
    assert float(x.v[:, x.context :].abs().max()) < 5
    assert float(x.v[:, x.context :].abs().min()) > 0
    again = build(subject.unit.case(), Poison.POSITIVE)
    assert float(read(again)[0].v[:, x.context :].abs().min()) > 1e20
    assert torch.equal(read(again)[0].v[:, : x.context], x.v[:, : x.context])


@pytest.mark.parametrize("probe", SUITE)
def test_every_probe_of_the_suite_fits_the_case(probe: str) -> None:
    case = Unit(123, probe, 1).case()
    assert (case.soft_cap is None) == (probe in ("gate", "deep_negative_uncapped"))
    assert unfit(case) is None


def test_the_command_makes_a_part_and_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "SUITE", ("normal",))
    out = tmp_path / "new" / "page.md"
    command.detection(out, "123", seeds=1)
    assert "| 123 | normal | 40 |" in out.read_text()
    table = report.load(out).detection[123]
    assert (table.probes, table.seeds) == (("normal",), (1,))
    assert table.caught(("normal",), SHIPPED) > 30
    assert table.alarms(("normal",), RULES) == (0, 2)


def test_a_device_that_is_none_is_refused() -> None:
    with pytest.raises(Stop, match=r"^--device: 'tpu'; allowed: cpu, cuda$"):
        command.usable("tpu")
