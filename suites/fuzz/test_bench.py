"""Every figure is measured or accounted for; the clockwork is fair. What the clock says is never asserted."""

from __future__ import annotations

import ast
import importlib.util
import json
import math
import os
import subprocess
from itertools import islice
from pathlib import Path

import pytest
import torch

import fuzz.bench.budget as budget_figures
import fuzz.bench.emulator as emulator_figures
import fuzz.bench.naive as naive_figures
import fuzz.bench.oracle as oracle_figures
import fuzz.bench.plugin as plugin_figure
import fuzz.bench.run as run_room
from fuzz import registry
from fuzz.bench import NAMES, BenchReport, Figure, UnknownFigure, bench, fixed
from fuzz.bench.alone import Way, process
from fuzz.bench.report import NotMeasured
from fuzz.bench.run import measure, select
from fuzz.bench.timing import Times, ratio, shown, take_turns, threads
from fuzz.case import Case
from fuzz.engine import EngineError
from fuzz.plan import Plan
from fuzz.space import Space
from fuzz.support import unsupported
from oracle.attention import solve
from oracle.declare import Declaration
from oracle.kinds import Engine, Operation

# The names that users script against.
STABLE = [
    "oracle.cpu.vs_sdpa",
    "oracle.cuda.vs_sdpa",
    "oracle.cuda.vs_matmul",
    "oracle.cuda.memory_vs_sdpa",
    "budget.worst_case.cost",
    "budget.worst_case.cost.cuda",
    "budget.probable.cost",
    "budget.probable.cost.cuda",
    "budget.worst_case.launches",
    "budget.probable.launches",
    "budget.tightness",
    "budget.detected",
    "emulator.vs_interpreter",
    "emulator.batched_vs_serial",
    "fuzz.cpu.vs_naive",
    "fuzz.cuda.vs_naive",
    "fuzz.overhead",
    "plugin.import_ms",
]


def figure(name: str) -> Figure:
    return Figure(name, 2.0, "times", "nothing", True, "1 ms")


def test_names_are_those_that_users_know() -> None:
    assert sorted(NAMES) == sorted(STABLE)


def test_every_name_has_one_measure() -> None:
    known = [*run_room._ON_CPU, *run_room._ON_GPU, "fuzz.overhead"]
    assert sorted(known) == sorted(NAMES)


def test_a_report_accounts_for_every_name(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def half(name: str, engine: Engine) -> Figure:
        if len(name) % 2:
            raise NotMeasured("odd")
        return figure(name)

    monkeypatch.setattr(run_room, "measure", half)
    report = bench(Engine.EMULATOR)
    plain = json.loads(json.dumps(report.to_dict()))
    assert list(plain) == ["schema", "figures", "not_measured"]
    assert {f["name"] for f in plain["figures"]} == {name for name in NAMES if len(name) % 2 == 0}
    assert plain["not_measured"] == {name: "odd" for name in NAMES if len(name) % 2}
    assert all(list(f) == ["name", "value", "unit", "against", "higher_is_better"] for f in plain["figures"])
    assert sorted(row[0] for row in report.rows()) == sorted(NAMES)
    out, err = capsys.readouterr()
    assert out == ""
    assert all(name in err for name in NAMES)


def test_rows_show_value_and_reason() -> None:
    report = BenchReport((figure("a"),), {"b": "no GPU"})
    assert report.rows() == [("a", "2 times", "against nothing; 1 ms"), ("b", "-", "no GPU")]
    assert [line.split() for line in report.lines()][1] == ["b", "-", "no", "GPU"]


def test_globs_select_figures() -> None:
    assert select(["oracle.cpu.*", "plugin.*"]) == ["oracle.cpu.vs_sdpa", "plugin.import_ms"]
    assert select([]) == list(NAMES)
    with pytest.raises(UnknownFigure, match=r"figure 'oracle\.gpu': unknown; known: oracle\.cpu"):
        select(["oracle.*", "oracle.gpu"])


@pytest.mark.parametrize("name", list(run_room._ON_GPU))
def test_what_cannot_be_had_on_the_emulator_has_a_reason(name: str) -> None:
    with pytest.raises(NotMeasured, match=r".{10}"):
        measure(name, Engine.EMULATOR)


def test_an_engine_that_does_not_run_here_is_refused() -> None:
    absent = Engine.CUDA if torch.version.hip or not torch.cuda.is_available() else Engine.HIP
    with pytest.raises(EngineError, match=absent.value):
        bench(absent)


def test_candidates_take_turns_and_the_first_turn_does_not_count() -> None:
    order: list[str] = []
    candidates = {name: lambda name=name: order.append(name) for name in "ab"}
    found = take_turns(candidates, 3, lambda: order.append("wait"))
    assert order == ["wait", "a", "wait", "wait", "b", "wait"] * 4
    assert [len(times.seconds) for times in found.values()] == [3, 3]


def test_medians_are_compared() -> None:
    times = {"a": Times([1.0, 9.0, 2.0]), "b": Times([4.0, 4.0, 400.0])}
    assert ratio(times, "b", "a") == 2.0
    assert shown(times) == "a 2000 ms (best 1000), b 4000 ms (best 4000)"


def test_threads_are_put_back() -> None:
    before = torch.get_num_threads()
    with threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before


def test_the_oracle_and_sdpa_solve_the_same_problem() -> None:
    problem = oracle_figures.causal_problem(33, "cpu")
    out = oracle_figures.sdpa(problem)()[0].transpose(0, 1)
    assert float((out - solve(problem).out).abs().max()) < 1e-13


def test_a_figure_on_small_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oracle_figures, "CPU_LENGTH", 32)
    monkeypatch.setattr(oracle_figures, "CPU_LONGER", 64)
    found = oracle_figures.cpu_vs_sdpa()
    assert math.isfinite(found.value)
    assert found.value > 0
    assert "64 tokens" in found.detail


def test_decode_rows_have_one_query_over_a_long_context(monkeypatch: pytest.MonkeyPatch) -> None:
    assert budget_figures.CONTEXT == 8192
    monkeypatch.setattr(budget_figures, "CONTEXT", 48)
    problem = budget_figures.decode_problem("cpu")
    assert set(problem.q_lens) == {1}
    assert set(problem.kv_lens) == {48}
    assert problem.group > 1
    assert budget_figures.worst_case_cost("cpu").value > 0


def test_fixed_cases_are_within_what_their_targets_declare() -> None:
    known = registry.load()
    assert len(fixed.names()) > 20
    for name in fixed.names():
        assert unsupported(known[fixed.target_of(name)], fixed.case_of(name)) is None, name


def test_the_gather_is_64_tokens_by_8_heads_by_128() -> None:
    case = fixed.case_of("sglang.shuffle_5d.gather")
    assert case.operation is Operation.KV_GATHER
    assert (case.context_lens, case.num_kv_heads, case.head_dim, case.v_head_dim) == ((64,), 8, 128, 128)


@pytest.mark.parametrize("name", ["no_such.target", "sglang.merge_state+few"])
def test_a_process_answers_or_its_last_line_is_the_reason(name: str) -> None:
    with process(name) as one:
        if name == "no_such.target":
            with pytest.raises(NotMeasured, match=r"^KeyError: 'no_such.target'$"):
                one.once(Way.BATCHED)
            return
        if registry.why_not(registry.load()[fixed.target_of(name)], Engine.EMULATOR) is not None:
            pytest.skip("sglang is not installed")
        answers = [one.once(way) for way in (Way.SERIAL, Way.BATCHED)]
    assert [answer["programs"] for answer in answers] == [3, 3]
    assert all(answer["seconds"] > 0 for answer in answers)
    assert answers[0]["outputs"] == answers[1]["outputs"]


def rows(monkeypatch: pytest.MonkeyPatch, gains: dict[str, tuple[float, int, str | None]]) -> None:
    """Pretend that the cases named were measured, and that there are no others."""

    def row(name: str, target: Declaration, ways: tuple[Way, Way]) -> emulator_figures.Row:
        gain, programs, wrong = gains[name]
        times = {ways[0].value: Times([gain]), ways[1].value: Times([1.0])}
        return emulator_figures.Row(name, times, programs, wrong)

    monkeypatch.setattr(fixed, "names", lambda: sorted(gains))
    monkeypatch.setattr(emulator_figures, "measured", row)
    monkeypatch.setattr(registry, "why_not", lambda target, engine: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())


def test_the_least_gain_of_large_grids_is_shown_with_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    gains = {"sglang.merge_state": (9.0, 32, None), "sglang.triton.decode": (6.0, 99, None)}
    rows(monkeypatch, {**gains, "sglang.triton.decode+few": (0.9, 31, None)})
    found = emulator_figures.batched_vs_serial()
    assert found.value == 6.0
    assert "sglang.merge_state 9 (serial 9e+03 ms, batched 1e+03 ms, 32 programs)" in found.detail
    assert "fewer programs, least 0.9: sglang.triton.decode+few 0.9" in found.detail


def test_batches_that_change_results_are_no_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    rows(monkeypatch, {"sglang.merge_state": (9.0, 32, "other results")})
    with pytest.raises(NotMeasured, match=r"differ: sglang\.merge_state: other results"):
        emulator_figures.batched_vs_serial()


def test_the_median_is_over_targets_that_the_interpreter_runs_right(monkeypatch: pytest.MonkeyPatch) -> None:
    gains = {f"sglang.dcp.{name}": (gain, 32, None) for name, gain in (("kv_indices", 20.0), ("local_indices", 40.0))}
    rows(
        monkeypatch,
        {**gains, "sglang.merge_state": (90.0, 32, "other results"), "sglang.triton.decode+few": (1, 2, None)},
    )
    found = emulator_figures.vs_interpreter()
    assert found.value == 30.0
    assert "the median of 2 targets" in found.against
    assert "left out: sglang.merge_state (other results)" in found.detail


def test_without_triton_there_is_no_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(NotMeasured, match="triton is not installed"):
        emulator_figures.vs_interpreter()


@pytest.fixture
def looped(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """What the loop is said to have done, for a figure to compare with."""
    case = fixed.case_of("sglang.shuffle_5d.gather").to_dict()
    said: dict[str, object] = {"ran": [("sglang.shuffle_5d.gather", case, 3.0, 4.0)] * 2, "raised": []}
    monkeypatch.setattr(naive_figures, "_check", lambda engine: None)
    monkeypatch.setattr(naive_figures, "_loop", lambda engine, cases: said)
    monkeypatch.setattr(naive_figures, "_campaign", lambda ran, engine, jobs: len(ran) / 2)
    return said


def test_a_campaign_is_compared_with_the_loop_over_what_the_loop_ran(looped: dict[str, object]) -> None:
    looped["raised"] = ["ValueError: odd"]
    found = naive_figures.cpu_vs_naive()
    assert found.value == 8.0
    assert "the same 2 cases" in found.against
    assert found.detail.endswith(
        "6 s of it in calls; 1 left out, on which the loop's calls raise, the first: ValueError: odd"
    )


def test_the_loop_takes_the_first_cases_of_each_plan_by_turns() -> None:
    known = registry.load()
    found = list(naive_figures.by_turns(known, 3))
    assert [name for name, _ in found] == list(naive_figures.TARGETS) * 3
    for name in naive_figures.TARGETS:
        plan = Plan(Space(known[name], naive_figures.MOST_TOKENS), naive_figures.SEED)
        assert [case for own, case in found if own == name] == list(islice(plan, 3))


def test_the_loop_ends_in_time_and_says_what_ran(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter([0.0, *(t for case in range(4) for t in (30.0 * case, 30.0 * case + 20.0))])
    monkeypatch.setattr(naive_figures.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(naive_figures, "_one", lambda target, case, device: 5.0)
    monkeypatch.setattr(naive_figures.engines, "start", lambda engine, compile_only: None)
    monkeypatch.setattr(naive_figures.loader, "pretend", lambda device: None)
    naive_figures.loop("emulator", 4, 0, naive_figures.LOOP_S)
    said = json.loads(capsys.readouterr().out)
    # Of cases begun at 0, 30, 60 and 90 s the last is too late.
    assert naive_figures.LOOP_S == 80
    assert [(called, whole) for _, _, called, whole in said["ran"]] == [(5.0, 20.0)] * 3
    assert said["raised"] == []


def test_after_a_broken_device_the_loop_goes_on_in_another_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Cases 1 and 2 raise; the first of them breaks the device of the process it runs in."""
    tried: list[int] = []

    def one(target: Declaration, case: Case, device: str) -> float:
        tried.append(len(tried))
        if tried[-1] in (1, 2):
            raise RuntimeError(f"case {tried[-1]}")
        return 1.0

    def process(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        engine, cases, first, seconds = ast.literal_eval(command[-1].partition("; loop")[2])
        naive_figures.loop(engine, cases, first, seconds)
        return subprocess.CompletedProcess(command, 0, capsys.readouterr().out, "")

    monkeypatch.setattr(naive_figures, "_one", one)
    monkeypatch.setattr(naive_figures.engines, "start", lambda engine, compile_only: None)
    monkeypatch.setattr(naive_figures.engines, "warm", lambda engine: None)
    monkeypatch.setattr(naive_figures.engines, "works", lambda engine: len(tried) != 2)
    monkeypatch.setattr(naive_figures.subprocess, "run", process)
    found = naive_figures._loop(Engine.CUDA, 2)
    assert found["raised"] == ["RuntimeError: case 1", "RuntimeError: case 2"]
    known = registry.load()
    wanted = [(name, case.to_dict()) for name, case in naive_figures.by_turns(known, 2)]
    assert [(name, case) for name, case, *_ in found["ran"]] == [wanted[i] for i in (0, 3, 4, 5)]


def test_kernels_that_were_compiled_are_counted(looped: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    def compiles(count: int) -> None:
        for number in range(count):
            folder = Path(os.environ[naive_figures.CACHE]) / str(number)
            folder.mkdir()
            (folder / "__grp__kernel.json").write_text("{}")
            (folder / "kernel.cubin").write_text("")

    def loop(engine: Engine, cases: int) -> dict[str, object]:
        compiles(2)
        return looped

    def campaign(ran: list[object], engine: Engine, jobs: int) -> float:
        compiles(3)
        return 1.0

    monkeypatch.setattr(naive_figures, "_loop", loop)
    monkeypatch.setattr(naive_figures, "_campaign", campaign)
    assert naive_figures.cpu_vs_naive().detail.startswith("3 kernels compiled, 2 by the loop; ")


def test_a_loop_that_only_raises_is_no_figure(looped: dict[str, object]) -> None:
    looped |= {"ran": [], "raised": ["ValueError: odd"]}
    with pytest.raises(NotMeasured, match="every call of the loop raised; the first: ValueError: odd"):
        naive_figures.cpu_vs_naive()


def test_the_plugin_imports_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin_figure, "STARTS", 1)
    found = plugin_figure.import_ms()
    assert found.value > 0
    assert found.detail.endswith("torch is not imported")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["emulator.batched_vs_serial", "fuzz.cpu.vs_naive", "fuzz.overhead"])
def test_measured_in_processes_of_their_own(name: str) -> None:
    assert measure(name, Engine.EMULATOR).value > 0
