"""sglang's backend over a SHUFFLE 5D pool: clean where nothing is known, and wrong just as the ledger says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fuzz import engine as engines
from fuzz import registry
from fuzz.buffers import Poison
from fuzz.case import Case
from fuzz.check.attention import attention_values
from fuzz.check.execute import Execution, execute
from fuzz.check.result import Check
from fuzz.check.run import check_case
from fuzz.check.variations import chunks
from fuzz.features import labels
from fuzz.instance import build
from fuzz.ledger import Defect, load
from fuzz.plan import Plan
from fuzz.space import Space
from fuzz.support import unsupported
from fuzz.versions import installed
from oracle.declare import Declaration
from oracle.kinds import Engine
from oracle.problem import Problem
from oracle.verdict import Verdict
from suites.targets import aiter_prefill
from suites.targets.portable.aiter import unified_attention
from suites.targets.sglang_backend import loading, targets

TARGETS = {d.name: d for d in registry.declared_in(targets)}
LEDGER = [d for d in load(Path(__file__).parents[1] / "gpu_diff" / "ledger.toml") if d.targets[0] in TARGETS]


NO_CLEAN_CASE = ("sglang.backend.decode_5d.plain", "sglang.backend.verify_5d", "sglang.backend.extend_5d.aiter")
"""All of its cases are known to fail, and what runs nowhere but on an AMD GPU."""


def runnable(name: str) -> Declaration:
    reason = TARGETS[name].unavailable(Engine.EMULATOR)
    if reason is not None:
        pytest.skip(reason)
    engines.start(Engine.EMULATOR)
    return TARGETS[name]


def known(target: str, case: Case) -> bool:
    """Whether the ledger has anything about such a case."""
    found = (d for d in LEDGER if target in d.targets and d.applies(Engine.EMULATOR, {"sglang": installed("sglang")}))
    shown = labels(case)
    return any(all(any((n, v) in shown for v in values) for n, values in d.features.items()) for d in found)


def clean(name: str, count: int) -> list[Case]:
    plan = islice(Plan(Space(TARGETS[name]), 0), 100 * count)
    return list(islice((case for case in plan if not known(name, case)), count))


@pytest.mark.parametrize("name", [n for n in TARGETS if n not in NO_CLEAN_CASE])
def test_cases_without_a_known_defect_pass(name: str) -> None:
    declaration = runnable(name)
    cases = clean(name, 3)
    assert len(cases) == 3
    for case in cases:
        result = check_case(declaration, case, Engine.EMULATOR, lambda _: None)
        assert result.verdict is Verdict.PASS, (case, result.failures, result.reason)


def unscaled(problem: Problem) -> Problem:
    return replace(problem, k_descale=None, v_descale=None)


def narrower(keys: int) -> Callable[[Problem], Problem]:
    return lambda problem: replace(problem, window=(problem.window or 0) - keys)


DIAGNOSES: dict[str, Callable[[Problem], Problem]] = {
    "extend-scale": lambda problem: replace(problem, scale=problem.dim_qk**-0.5),
    "decode-soft-cap": lambda problem: replace(problem, soft_cap=None),
    "decode-window": narrower(1),
    "decode-window-aiter": narrower(2),
    "decode-window-of-one": lambda problem: replace(problem, window=None),
    "extend-fresh-k-scale": unscaled,
    "extend-fresh-v-scale": unscaled,
    "extend-encoder": lambda problem: replace(problem, causal=True),
    "extend-query-scale": lambda problem: replace(problem, scale=problem.scale * float(problem.k_descale)),
}
"""By the entry's name: the smallest change with which the oracle returns what the backend returns."""


def diagnosis(entry: str) -> Callable[[Problem], Problem] | None:
    name = entry.removeprefix("sglang-backend-")
    own, plain = name.removesuffix("-fp8"), name.removesuffix("-fp8").removesuffix("-aiter").removesuffix("-plain")
    return next((DIAGNOSES[key] for key in (name, own, plain) if key in DIAGNOSES), None)


def judged(declaration: Declaration, run: Execution, change: Callable[[Problem], Problem]) -> Verdict:
    """The verdict on the run's output, were the changed problem what was asked for."""
    problem = run.instance.problem
    assert problem is not None
    changed = replace(run, instance=replace(run.instance, problem=change(problem)))
    return attention_values(declaration, changed).verdict


@pytest.mark.parametrize("entry", [d for d in LEDGER if diagnosis(d.id)], ids=lambda d: d.id)
def test_the_oracle_reproduces_each_defect_by_its_diagnosis(entry: Defect) -> None:
    declaration, change = runnable(entry.targets[0]), diagnosis(entry.id)
    assert change is not None
    if not entry.applies(Engine.EMULATOR, {"sglang": installed("sglang")}):
        pytest.skip(f"sglang {installed('sglang')} is not one of its versions")
    run = execute(declaration, entry.case, Poison.POSITIVE, Engine.EMULATOR, lambda _: None)
    assert judged(declaration, run, lambda problem: problem) is Verdict.FAIL
    assert judged(declaration, run, change) is Verdict.PASS


@pytest.mark.parametrize("entry", [d for d in LEDGER if d.checks == (Check.INPUTS,)], ids=lambda d: d.id)
def test_the_models_keys_and_values_are_divided_in_place(entry: Defect) -> None:
    declaration = runnable(entry.targets[0])
    run = execute(declaration, entry.case, Poison.POSITIVE, Engine.EMULATOR, lambda _: None)
    name = "k" if "keys" in entry.id else "v"
    factor = run.instance.buffers[f"{name}_descale"].view
    changed = run.changed(name)
    before, after = (image[name].view(torch.bfloat16)[changed] for image in (run.before, run.after))
    assert len(changed)
    assert torch.equal((before / factor).to(torch.bfloat16), after)


@pytest.mark.slow
@pytest.mark.parametrize("entry", LEDGER, ids=lambda d: d.id)
def test_the_checks_say_of_each_entrys_case_what_the_entry_says(entry: Defect) -> None:
    declaration = runnable(entry.targets[0])
    if not entry.applies(Engine.EMULATOR, {"sglang": installed("sglang")}) or entry.checks == (Check.CRASH,):
        pytest.skip("not its version, or a crash, which another test shows")
    result = check_case(declaration, entry.case, Engine.EMULATOR, lambda _: None)
    assert any(entry.matches(declaration.name, f.check, None, entry.case) for f in result.failures)


def test_every_entry_is_seen_by_its_own_case_and_lies_inside_what_is_declared() -> None:
    for entry in LEDGER:
        if entry.applies(Engine.EMULATOR, {"sglang": "0.5.15"}):
            assert unsupported(TARGETS[entry.targets[0]], entry.case) is None
            assert entry.matches(entry.targets[0], entry.checks[0], None, entry.case)


def test_decode_without_page_tables_is_refused_before_anything_is_launched() -> None:
    declaration = runnable("sglang.backend.decode_5d.plain")
    entry = next(d for d in LEDGER if d.targets[0] == declaration.name)
    if not entry.applies(Engine.EMULATOR, {"sglang": installed("sglang")}):
        pytest.skip(f"sglang {installed('sglang')} is not one of its versions")
    with pytest.raises(ValueError, match="block_tables: 1 dimensions; allowed: 2"):
        execute(declaration, entry.case, Poison.POSITIVE, Engine.EMULATOR, lambda _: None)


CRASHES = {
    "sglang-backend-extend-shared-layer": (AttributeError, "'NoneType' object has no attribute 'contiguous'"),
    "sglang-backend-narrow-values": (AssertionError, "K/V must share token-major shape"),
}


@pytest.mark.parametrize(
    ("entry", "target"),
    [pytest.param(d, target, id=target) for d in LEDGER if d.id in CRASHES for target in d.targets],
)
def test_what_is_raised_is_what_the_entry_says(entry: Defect, target: str) -> None:
    error, told = CRASHES[entry.id]
    with pytest.raises(error, match=told):
        execute(runnable(target), entry.case, Poison.POSITIVE, Engine.EMULATOR, lambda _: None)
    # Not where the entry says that it does not happen.
    other = {"context_lens": (9,)} if "shared" in entry.id else {"v_head_dim": entry.case.head_dim}
    execute(runnable(target), replace(entry.case, **other), Poison.POSITIVE, Engine.EMULATOR, lambda _: None)


def test_requests_with_different_numbers_of_drafts_are_refused() -> None:
    declaration = runnable("sglang.backend.verify_5d")
    (entry,) = (d for d in LEDGER if d.targets == (declaration.name,))
    case = replace(entry.case, context_lens=(9, 9), query_lens=(2, 3))
    with pytest.raises(ValueError, match=r"q_indptr: \[2, 3\] drafts; allowed: as many of each request"):
        execute(declaration, case, Poison.POSITIVE, Engine.EMULATOR, lambda _: None)


@pytest.mark.parametrize(("queries", "told"), [(1, False), (3, False), (1, True), (3, True)])
def test_drafts_are_verified_rightly_once_the_kernel_is_told_of_the_layout(
    queries: int, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    declaration = runnable("sglang.backend.verify_5d")
    caches: dict[str, Tensor] = {}

    def function(k_cache: Tensor, v_cache: Tensor, **given: Any) -> Any:
        caches.update(k=k_cache, v=v_cache)
        return declaration.function(k_cache=k_cache, v_cache=v_cache, **given)

    def shuffled(**given: Any) -> None:
        unified_attention(**(given | caches | {"shuffled_kv_cache": True} if told else given))

    monkeypatch.setattr(loading.portable().backend, "unified_attention", shuffled)
    (entry,) = (d for d in LEDGER if d.targets == (declaration.name,))
    case = replace(entry.case, context_lens=(20, 7), query_lens=(queries,) * 2, num_kv_heads=2)
    result = check_case(replace(declaration, function=function), case, Engine.EMULATOR, lambda _: None)
    assert result.verdict is (Verdict.PASS if told else Verdict.FAIL), result.failures
    assert {f.check for f in result.failures} <= set(entry.checks)


@pytest.mark.parametrize(("blame", "verdict"), [(0.0, Verdict.PASS), (0.05, Verdict.FAIL)])
def test_a_result_that_depends_on_how_a_prompt_is_cut_fails(blame: float, verdict: Verdict) -> None:
    declaration = runnable("sglang.backend.extend_5d")

    def step(q: Tensor, **given: Any) -> Tensor:
        out = declaration.function(q=q, **given)
        return (out.float() * (1 + blame / len(q))).to(out.dtype)

    case = backend_case(kv_dtype="bf16", k_descale="none", context_lens=(20, 5), query_lens=(9, 2))
    result = check_case(replace(declaration, function=step), case, Engine.EMULATOR, lambda _: None)
    assert {c.verdict for c in result.checks if c.check is Check.CHUNKS} == {verdict}


@pytest.mark.parametrize("queries", [(20, 2), (20, 5)])
@pytest.mark.parametrize(("blame", "verdict"), [(0.0, Verdict.PASS), (0.05, Verdict.FAIL)])
def test_a_path_of_fresh_prompts_that_gives_something_else_fails(
    blame: float, verdict: Verdict, queries: tuple[int, ...]
) -> None:
    declaration = runnable("sglang.backend.extend_5d")

    def step(q: Tensor, lengths: Tensor, **given: Any) -> Tensor:
        fresh = len(q) == int(lengths.sum())
        out = declaration.function(q=q, lengths=lengths, **given)
        return (out.float() * (1 + blame * fresh)).to(out.dtype)

    case = backend_case(kv_dtype="bf16", k_descale="none", context_lens=(20, 5), query_lens=queries)
    result = check_case(replace(declaration, function=step), case, Engine.EMULATOR, lambda _: None)
    assert {c.verdict for c in result.checks if c.check is Check.FRESH} == {verdict}


def test_the_two_steps_of_a_prompt_are_its_tokens() -> None:
    case = backend_case(context_lens=(20, 5), query_lens=(9, 2))
    whole = build(case, Poison.POSITIVE).problem
    assert whole is not None
    rows: list[int] = []
    for chunk, own in chunks(case):
        problem = build(chunk, Poison.POSITIVE).problem
        assert problem is not None
        assert torch.equal(problem.q, whole.q[own.start : own.stop])
        assert torch.equal(problem.k.view(torch.uint8), whole.k[: chunk.context_lens[0]].view(torch.uint8))
        rows += own
    assert rows == list(range(9))
    assert chunks(backend_case(context_lens=(3,), query_lens=(1,))) == []
    assert chunks(replace(case, causal=False)) == []


SEEDS = {
    "create_dcp_kv_indices",
    "create_triton_kv_indices_for_dcp_triton",
    "correct_attn_out",
    "forward_decode_vectorized_5d",
    "forward_extend_vectorized_5d",
    "launch_gather_shuffle_5d_to_linear",
    "launch_reshape_and_cache_shuffle_5d",
    "mha_batch_prefill_func",
    "pa_decode_gluon",
    "update_kv_lens_and_indices",
}


def test_every_function_that_was_asked_for_is_run_by_a_target() -> None:
    known = registry.load()
    run = {function.split()[1]: name for name, d in known.items() for function in d.runs}
    assert run.keys() >= SEEDS


def test_aiters_prefill_is_said_to_run_nowhere_but_on_amd_gpus() -> None:
    declaration = registry.load()["aiter.mha_batch_prefill_func"]
    assert declaration.engines == (Engine.HIP,)
    assert registry.why_not(declaration, Engine.EMULATOR) == "runs on hip only"
    assert aiter_prefill.missing(Engine.CUDA) == "compiled C++ that only an AMD GPU runs"


def backend_case(**fields: Any) -> Case:
    entry = next(d for d in LEDGER if d.id == "sglang-backend-extend-query-scale")
    return replace(entry.case, **fields)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_what_the_model_gives_is_exact_in_the_pool(dtype: str) -> None:
    case = backend_case(dtype=dtype, context_lens=(40,), query_lens=(33,), v_descale="tensor", num_kv_heads=2)
    instance = build(case, Poison.POSITIVE)
    assert instance.slots is not None
    new = instance.slots >= 0
    for role, stored in instance.linear.items():
        given = instance.buffers[role.value].view.double()
        factor = instance.buffers[f"{role.value}_descale"].view.double()
        assert torch.equal((given / factor).to(stored.dtype).view(torch.uint8), stored[new].view(torch.uint8))
        assert torch.equal(given / factor, stored[new].double())


def test_pages_before_every_window_have_no_slot_in_the_sub_pool() -> None:
    case = backend_case(context_lens=(70,), query_lens=(2,), window=20, slot_map="holes", page_size=16)
    instance = build(case, Poison.POSITIVE)
    listed, slot_map = instance.buffers["slots"].view, instance.buffers["slot_map"].view
    # The older query, at 68, sees 49 and later ones: page 3 holds 48 to 63.
    assert slot_map[listed[:48]].tolist() == [0] * 48
    assert int(slot_map[listed[48:]].min()) >= 16
    assert int(listed.min()) >= 16
