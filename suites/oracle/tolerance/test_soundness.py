"""The soundness campaign: what it picks, counts, keeps and adds up, and that it can find something."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from fuzz import engine as engines
from fuzz.errors import Exit, Stop
from oracle.kinds import Engine
from suites.tolerance import soundness as room
from suites.tolerance import trials
from suites.tolerance.__main__ import app
from suites.tolerance.believed_right import CONTEXTS, NATIVE, VARIANTS, digest
from suites.tolerance.files import write
from suites.tolerance.soundness import Campaign, Results, exit_code, merge, summary
from suites.tolerance.tallies import Combination, Tally
from suites.tolerance.trials import Kernel, Outcome, combinations, draw_case, evaluate, kernels, key_of
from suites.tolerance.workers import marker_of

KERNELS = ("bf16", "torch.sdpa_with_lse bf16")
SHORT = 16


@pytest.fixture(autouse=True)
def _emulator() -> None:
    engines.start(Engine.EMULATOR)
    torch.set_num_threads(1)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two kernels only, and small cases."""
    known, _ = kernels(Engine.EMULATOR)
    monkeypatch.setattr(room, "kernels", lambda _: ({name: known[name] for name in KERNELS}, {"other": "left out"}))
    monkeypatch.setattr(trials, "ELEMENTS", 500)


def campaign(seed: int = 3, **shards: int) -> Campaign:
    return Campaign("cpu", seed, SHORT, **shards)


def stepped(steps: int, **options: Any) -> Campaign:
    made = campaign(**options)
    for _ in range(steps):
        combination = made.thinnest()
        assert combination is not None
        made.step(combination)
    return made


def plain(results: Results) -> str:
    return json.dumps({**results.to_dict(), "runs": None})


def test_the_list_names_what_there_is() -> None:
    known, skipped = kernels(Engine.EMULATOR)
    assert {v.name for v in VARIANTS} <= set(known)
    named = {name.split(" ", 1)[0] for name in known} | set(skipped)
    assert {n.target for n in NATIVE} <= named
    assert "no such target" not in skipped.values()


@pytest.mark.usefixtures("few")
def test_the_thinnest_combination_comes_first() -> None:
    made = campaign()
    for _ in range(2 * len(made.order)):
        combination = made.thinnest()
        assert combination is not None
        least = min(made.fullness(c) for c in made.order if c not in made.results.impossible)
        assert made.fullness(combination) == least
        made.step(combination)
    tallies = made.results.tallies
    assert set(tallies) | made.results.impossible.keys() == set(made.order)
    assert all(t.evidence for t in tallies.values())
    assert not any(t.alarms for t in tallies.values()), made.results.findings


@pytest.mark.usefixtures("few")
def test_the_same_seed_finds_the_same() -> None:
    assert plain(stepped(12).results) == plain(stepped(12).results)
    assert plain(stepped(12).results) != plain(stepped(12, seed=4).results)


@pytest.mark.usefixtures("few")
def test_a_run_goes_on_where_it_ended(tmp_path: Path) -> None:
    whole, first = stepped(9), stepped(4)
    write(tmp_path / "r.json", first.results.to_dict())
    second = campaign()
    second.resume(room.load(tmp_path / "r.json"))
    for _ in range(5):
        second.step(second.thinnest() or second.order[0])
    assert second.run["cases"] == whole.run["cases"]
    for key, tally in whole.results.tallies.items():
        assert second.results.tallies[key].elements == tally.elements
    with pytest.raises(Stop, match="other runs"):
        campaign(seed=9).resume(room.load(tmp_path / "r.json"))


@pytest.mark.usefixtures("few")
def test_a_case_that_no_process_survives_is_an_error(tmp_path: Path) -> None:
    part, made = tmp_path / "r.json", stepped(2)
    combination = made.thinnest()
    assert combination is not None
    made.survived(part)
    assert made.results.error_count == 0
    write(marker_of(part), {"combination": list(combination)})
    made.survived(part)
    assert made.results.error_count == 1
    assert made.results.errors[0]["message"] == "the process ended in it"
    assert made.thinnest() != combination
    assert not marker_of(part).exists()
    assert room.load(part).tallies[combination].errors == 1


@pytest.mark.usefixtures("few")
def test_what_others_filled_comes_last() -> None:
    made, other = campaign(), stepped(3)
    first = made.thinnest()
    assert first in other.results.tallies
    made.known = other.results.tallies
    assert made.thinnest() not in other.results.tallies


@pytest.mark.usefixtures("few")
def test_cheap_combinations_come_first() -> None:
    ranks = [list(CONTEXTS).index(combination.context) for combination in campaign().order]
    assert ranks == sorted(ranks)
    assert len(set(ranks)) > 1


@pytest.mark.slow
def test_processes_share_the_combinations_and_go_on(tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    first = room.run("cpu", 1, 60, jobs=2, longest=0, out=out)
    counted = sum(t.cases for t in first.tallies.values())
    assert counted > 0
    assert {run["shard"] for run in first.runs} == {"0/2", "1/2"}
    second = room.run("cpu", 1, 40, jobs=2, longest=0, out=out)
    assert sum(t.cases for t in second.tallies.values()) >= counted
    assert room.load(out).to_dict() == second.to_dict()
    with pytest.raises(Stop, match="other shards"):
        room.run("cpu", 1, 10, jobs=3, longest=0, out=out)


@pytest.mark.usefixtures("few")
def test_shards_share_the_combinations(tmp_path: Path) -> None:
    shards = [stepped(3, shard=i, shards=2) for i in range(2)]
    assert sorted(shards[0].order + shards[1].order) == sorted(campaign().order)
    files = [tmp_path / f"{i}.json" for i in range(2)]
    for shard, file in zip(shards, files, strict=True):
        write(file, shard.results.to_dict())
    both = merge(files)
    for key, tally in both.tallies.items():
        assert tally.elements == sum(s.results.tallies[key].elements for s in shards if key in s.results.tallies)
    with pytest.raises(Stop, match="counted twice"):
        merge([*files, files[0]])


@pytest.mark.usefixtures("few")
def test_results_of_another_list_are_refused(tmp_path: Path) -> None:
    data = stepped(1).results.to_dict()
    for field, value, words in (("list", "0" * 64, "list"), ("schema", 0, "schema"), ("runs", 3, "malformed")):
        write(tmp_path / "r.json", {**data, field: value})
        with pytest.raises(Stop, match=words):
            room.load(tmp_path / "r.json")
    (tmp_path / "r.json").write_text("{")
    with pytest.raises(Stop, match="not JSON"):
        room.load(tmp_path / "r.json")


def _wrong(change: Callable[[Outcome], Outcome]) -> Callable[[Kernel, Any, str], Outcome]:
    def run(self: Kernel, case: Any, device: str) -> Outcome:
        return change(RUN(self, case, device))

    return run


RUN = Kernel.run


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("factor", [1.02, 1.2])
def test_a_wrong_kernel_is_an_alarm(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    def scaled(o: Outcome) -> Outcome:
        return replace(
            o, out=(o.out.float() * factor).to(o.out.dtype), wide=None if o.wide is None else o.wide * factor
        )

    monkeypatch.setattr(Kernel, "run", _wrong(scaled))
    made = stepped(60)
    assert made.results.findings
    assert exit_code(made.results) is Exit.FINDINGS
    found = made.results.findings[0]
    assert found["alarms"]["worst_case.out"] > 0
    shown = summary(made.results)
    assert shown["all"]["alarms"]["probable.out"] >= shown["all"]["alarms"]["worst_case.out"]


@pytest.mark.usefixtures("few")
def test_a_wrong_log_sum_exp_is_an_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Kernel, "run", _wrong(lambda o: replace(o, lse=o.lse + 0.01 if o.lse is not None else None)))
    assert any("worst_case.lse" in f["alarms"] for f in stepped(60).results.findings)


@pytest.mark.usefixtures("few")
def test_a_kernel_that_raises_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(o: Outcome) -> Outcome:
        raise ArithmeticError("no")

    monkeypatch.setattr(Kernel, "run", _wrong(fails))
    made = stepped(4)
    assert made.results.error_count == made.run["cases"] == 4
    assert made.results.errors[0]["message"] == "ArithmeticError: no"
    assert exit_code(made.results) is Exit.HARNESS
    assert not sum(t.evidence for t in made.results.tallies.values())


@pytest.mark.slow
def test_cases_are_of_their_combination() -> None:
    known, _ = kernels(Engine.EMULATOR)
    names = ("bf16", "e4m3fn weights", "torch.flex_eager fp16", "sglang.triton.decode_grouped bf16")
    chosen = {name: known[name] for name in names if name in known}
    for index, combination in enumerate(combinations(chosen)):
        kernel = chosen[combination.precision]
        case = draw_case(kernel, combination, key_of(index), "cpu")
        if case is None:
            continue
        low, high = CONTEXTS[combination.context]
        assert all(low <= n <= min(high, kernel.longest) for n in case.context_lens)
        assert case.probe == combination.probe
        assert case.dtype == kernel.pins["dtype"]
        assert case.kv_dtype == {"same": case.dtype}.get(kernel.pins["kv_dtype"], kernel.pins["kv_dtype"])
        assert case == draw_case(kernel, combination, key_of(index), "cpu")


def test_known_defects_are_not_believed_right() -> None:
    known, _ = kernels(Engine.EMULATOR)
    if "sglang.triton.extend bf16" not in known:
        pytest.skip("sglang is not installed")
    kernel = known["sglang.triton.extend bf16"]
    combination = Combination(kernel.precision, "normal", "17-256")
    drawn = [draw_case(kernel, combination, key_of(i), "cpu") for i in range(80)]
    windows = {case.window for case in drawn if case is not None}
    assert 1 not in windows
    assert len(windows) > 3


def test_rounded_errors_are_counted_once() -> None:
    known, _ = kernels(Engine.EMULATOR)
    combination = Combination("bf16", "normal", "17-256")
    case = draw_case(known["bf16"], combination, 5, "cpu")
    assert case is not None
    tally = evaluate(known["bf16"].run(case, "cpu"))
    assert tally.exact + sum(tally.ratios.values()) <= tally.elements
    assert tally.worst[0] <= 1
    ratio = tally.median_ratio()
    assert ratio is not None
    assert 0 < ratio <= tally.worst[0] * 2**0.5


@given(st.lists(st.floats(1e-4, 10), min_size=1, max_size=60), st.lists(st.floats(1e-4, 10), max_size=60))
def test_tallies_add_up(a: list[float], b: list[float]) -> None:
    parts = []
    for values in (a, b):
        tally = Tally(cases=1, elements=len(values), worst=values[:1])
        tally.count_ratios(torch.tensor(values, dtype=torch.float64))
        parts.append(tally)
    whole = Tally.from_dict(json.loads(json.dumps(parts[0].to_dict())))
    whole.add(parts[1])
    at_once = Tally(cases=2, elements=len(a) + len(b))
    at_once.count_ratios(torch.tensor(a + b, dtype=torch.float64))
    assert whole.ratios == at_once.ratios
    assert whole.elements == at_once.elements
    middle, found = sorted(a + b)[(len(a + b) - 1) // 2], whole.median_ratio()
    assert found is not None
    assert middle * 0.999 <= found <= middle * 2**0.5 * 1.001


def test_options_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    for options, words in (
        (["--device", "tpu"], "--device"),
        (["--time", "never"], "--time"),
        (["--shard", "2/2"], "--shard"),
    ):
        result = CliRunner().invoke(app, ["soundness", *options])
        assert result.exit_code == Exit.USAGE, result.output
        assert words in result.output


def test_digest_is_of_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    before = digest()
    monkeypatch.setattr("suites.tolerance.believed_right.VARIANTS", VARIANTS[1:])
    assert digest() != before
