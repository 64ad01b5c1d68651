"""The self-check passes here, and finds a fault when one is planted."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import fuzz.certify.compiled as compiled_room
import fuzz.certify.device as device_room
import fuzz.certify.oracle as oracle_room
from fuzz import engine as engines
from fuzz.certify import Check, certify, rows
from fuzz.certify.problems import examples
from fuzz.certify.trial import Trial, judge
from fuzz.engine.emulator.certify import certify as certify_emulator
from oracle.fp8 import FORMATS, decode
from oracle.kinds import Engine
from oracle.layout import pack
from oracle.rounding import round_to

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def checks() -> list[Check]:
    return certify(Engine.EMULATOR)


def test_everything_passes_here(checks: list[Check]) -> None:
    assert [c for c in checks if not c.passed] == []
    assert {c.room for c in checks} == {"oracle", "engine"}
    assert len({c.name for c in checks}) == len(checks)


def test_each_check_says_what_it_rejects(checks: list[Check]) -> None:
    assert all("; rejects " in c.detail for c in checks if c.name.partition(":")[0] in ("scipy", "torch sdpa"))


def test_checks_are_plain_data(checks: list[Check]) -> None:
    again = [Check(**json.loads(json.dumps(c.to_dict()))) for c in checks]
    assert again == checks
    assert rows(checks)[0][:3] == ("oracle", checks[0].name, "pass")
    assert rows([replace(checks[0], passed=False)])[0][2] == "FAIL"


def test_the_emulator_s_own_checks_are_among_them(checks: list[Check]) -> None:
    assert {c.name for c in certify_emulator()} <= {c.name for c in checks if c.room == "engine"}


def is_two(answer: int) -> str | None:
    return None if answer == 2 else f"{answer} is not 2"


@pytest.mark.parametrize(
    ("trial", "passed", "detail"),
    [
        (Trial(is_two, {"two": 2}, {"three": 3}), True, "accepts two; rejects three"),
        (Trial(is_two, {"three": 3}, {"one": 1}), False, "three: 3 is not 2"),
        (Trial(lambda _: None, {"two": 2}, {"three": 3}), False, "this check cannot fail: it accepts three"),
        (Trial(is_two, {"two": 2}, {}), False, "this check cannot fail"),
        (Trial(is_two, {}, {"three": 3}), False, "this check cannot fail"),
    ],
)
def test_a_trial_has_to_accept_and_to_reject(trial: Trial[int], passed: bool, detail: str) -> None:
    check = judge("name", "room", lambda: trial)
    assert check.passed is passed
    assert check.detail.startswith(detail)


def test_a_trial_that_raises_did_not_pass() -> None:
    def broken() -> Trial[int]:
        raise RuntimeError("no device\nsecond line")

    assert judge("name", "room", broken) == Check("name", "room", False, "raised RuntimeError: no device")


def failing(found: list[Check]) -> set[str]:
    return {c.name for c in found if not c.passed}


def test_a_wrong_oracle_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = oracle_room.solve

    def wrong(problem: Any, **blocks: Any) -> Any:
        wider = problem if problem.window is None else replace(problem, window=problem.window + 1)
        return right(wider, **blocks)

    monkeypatch.setattr(oracle_room, "solve", wrong)
    assert failing(oracle_room.certify_oracle()) == {"scipy: window", "torch sdpa: window"}


def test_a_last_bit_beyond_the_tolerance_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = oracle_room.solve

    def wrong(problem: Any, **blocks: Any) -> Any:
        solution = right(problem, **blocks)
        return replace(solution, out=solution.out * (1 + 1e-12))

    monkeypatch.setattr(oracle_room, "solve", wrong)
    names = failing(oracle_room.certify_oracle())
    assert {f"scipy: {e.name}" for e in examples()} <= names


def ties_away(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return round_to(x.nextafter(torch.full_like(x, torch.inf)), dtype)


PLANTED: list[tuple[str, Callable[..., Any], Callable[[], Trial[Any]]]] = [
    ("round_to", lambda x, dtype: x.to(torch.float32).to(dtype), partial(oracle_room._midpoints, torch.bfloat16)),
    ("round_to", ties_away, partial(oracle_room._midpoints, torch.float16)),
    ("decode", lambda codes, fmt: decode(codes, FORMATS[0]), partial(oracle_room._codes, FORMATS[1])),
    ("pack", lambda linear, g: pack(linear.flip(2), g), partial(oracle_room._layout, "shuffle_5d keys")),
    ("unpack", lambda cache, g: oracle_room.pack(cache.reshape(48, 2, 24), g), partial(oracle_room._layout, "nhd")),
    ("merge_states", lambda outs, lses: (outs.mean(0), lses.logsumexp(0)), oracle_room._split_and_merge),
]


@pytest.mark.parametrize(("name", "wrong", "trial"), PLANTED)
def test_a_planted_fault_is_found(
    monkeypatch: pytest.MonkeyPatch, name: str, wrong: Callable[..., Any], trial: Callable[[], Trial[Any]]
) -> None:
    assert judge("right", "oracle", trial).passed
    monkeypatch.setattr(oracle_room, name, wrong)
    assert not judge("wrong", "oracle", trial).passed


def test_another_generator_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = oracle_room.philox.normal
    monkeypatch.setattr(oracle_room.philox, "normal", lambda seed, stream, shape: right(seed, stream + 1, shape))
    assert not judge("philox", "oracle", oracle_room._philox).passed


def test_bits_differ_counts_signs_of_zero_but_not_payloads_of_nan() -> None:
    differ = oracle_room.bits_differ
    nan = torch.tensor([0x7FC1, 0x7FC2], dtype=torch.int16).view(torch.bfloat16)
    assert differ(nan[:1], nan[1:]) is None
    assert differ(torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0])) == "1 of 2 values differ"
    assert differ(torch.zeros(2), torch.zeros(3)) is not None


def test_a_mistaken_emulator_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Floor division and truncation are what the built-in counter-examples stand for; here they come from the run."""
    right = compiled_room._run(Engine.EMULATOR, CPU, (torch.float32, *compiled_room._NARROW))
    for label, wrong in compiled_room._mistaken(right).items():
        monkeypatch.setattr(compiled_room, "_run", lambda *_, wrong=wrong: wrong)
        assert not judge(label, "engine", compiled_room.emulated).passed


@pytest.mark.parametrize("part", [device_room._rounded, device_room._fp8, device_room._philox])
def test_device_comparisons_reject_one_flipped_bit(part: device_room.Part) -> None:
    trial = device_room._same(part, CPU)
    assert judge("same", "engine", lambda: trial).passed
    assert len(trial.wrong) == len(part(CPU))


def test_device_solutions_are_compared() -> None:
    found = [judge(e.name, "engine", partial(device_room._solve, e, CPU)) for e in examples()]
    assert failing(found) == set()


def test_hard_values_hold_midpoints_of_every_narrow_format() -> None:
    values = compiled_room.hard_values().double()
    for dtype in compiled_room._NARROW:
        above, below = (round_to(values * (1 + sign * 2.0**-40), dtype) for sign in (1, -1))
        assert int((above.double() != below.double()).sum()) > 100, dtype


def test_an_engine_that_does_not_run_here_is_refused() -> None:
    absent = Engine.CUDA if torch.version.hip or not torch.cuda.is_available() else Engine.HIP
    with pytest.raises(engines.EngineError, match=absent.value):
        certify(absent)


def test_on_a_gpu() -> None:
    engine = engines.detect()
    if engine is Engine.EMULATOR:
        pytest.skip("no GPU")
    assert failing(certify(engine)) == set()
