"""Every adapter refuses what its kernel would read past: one line that names the argument, before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import islice
from typing import Any

import pytest
import torch

from fuzz import engine as engines
from fuzz import registry
from fuzz.buffers import Poison
from fuzz.call import arguments
from fuzz.case import Case, Prefix
from fuzz.engine.loader import KernelLoader
from fuzz.instance import build
from fuzz.plan import Plan
from fuzz.space import Space
from oracle.convention import Granularity
from oracle.declare import Declaration
from oracle.kinds import Engine, KVLayout, Operation
from suites.targets.arguments import ArgumentError
from suites.targets.sglang_backend import loading

Given = dict[str, Any]
Fault = tuple[str, Callable[[Given], None], str]

KNOWN = {
    name: declaration
    for name, declaration in registry.load().items()
    if declaration.operation not in (Operation.LSE_MERGE, Operation.INDEX_BUILD) and ".dcp." not in name
}


@pytest.fixture(autouse=True)
def _no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever an adapter could run raises."""

    def ran(*_: object, **__: object) -> None:
        raise AssertionError("something was run")

    monkeypatch.setattr(KernelLoader, "__call__", ran)
    for name in ("portable", "over_aiter", "installed_aiter"):
        monkeypatch.setattr(loading, name, ran)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", ran)


def fits(declaration: Declaration, case: Case) -> bool:
    """Whether every fault can be planted: contexts of several keys, and fp8 where the target takes it."""
    quantised = case.kv_dtype != case.dtype or not declaration.supports.kv_dtypes
    lengths, queries = case.context_lens, case.query_lens
    prefixed = case.prefix is not Prefix.POOL or sum(lengths) > sum(queries)
    return bool(lengths) and min(lengths) > 1 and case.window is None and quantised and prefixed


@cache
def case_of(declaration: Declaration) -> Case:
    return next(case for case in islice(Plan(Space(declaration), 0), 2000) if fits(declaration, case))


def given_to(declaration: Declaration) -> Given:
    engines.start(Engine.EMULATOR)
    return arguments(declaration, build(case_of(declaration), Poison.POSITIVE))


def narrow(given: Given) -> None:
    given["page_table"] = given["page_table"][:, :-1]


def out_of_range(name: str, beyond: int) -> Callable[[Given], None]:
    def change(given: Given) -> None:
        listed = given[name].clone()
        listed.view(-1)[0] = beyond
        given[name] = listed

    return change


def other_head_dim(name: str) -> Callable[[Given], None]:
    def change(given: Given) -> None:
        given[name] = given[name][..., :-4]

    return change


def odd_page(given: Given) -> None:
    k, x = given["k_cache"], given["k_cache"].shape[-1]
    given["k_cache"] = torch.empty(*k.shape[:3], x + 1, x, dtype=k.dtype)


def without(name: str) -> Callable[[Given], None]:
    def change(given: Given) -> None:
        given[name] = None

    return change


def faults(declaration: Declaration) -> list[Fault]:
    """What can be wrong with the arguments of a target, and the words for it."""
    operation, convention = declaration.operation, declaration.convention
    found: list[Fault] = []
    names = given_to(declaration).keys()
    if "page_table" in names:
        found += [
            ("table", narrow, "page_table: .* pages wide; allowed: "),
            ("page", out_of_range("page_table", 1 << 20), "page_table: 1048576; allowed: 0 to "),
        ]
    if "slots" in names:
        found.append(("slot", out_of_range("slots", 1 << 20), "slots: 1048576; allowed: 0 to "))
    head_dim_of = {Operation.KV_WRITE: "key", Operation.KV_GATHER: "v_cache"}.get(operation, "q")
    found.append(("head dim", other_head_dim(head_dim_of), "allowed: "))
    if "k_cache" in names and convention.kv_layout is KVLayout.SHUFFLE_5D and convention.v_layout == "5d":
        found.append(("page size", odd_page, "page size: .*; allowed: a multiple of "))
    if convention.descales.fp8_only and convention.descales.k is not Granularity.NONE:
        found.append(("scale", without("k_descale"), "k_descale: None; allowed: a factor for torch.float8"))
    return found


@pytest.mark.parametrize("name", KNOWN)
def test_an_adapter_refuses_bad_input_before_anything_runs(name: str) -> None:
    declaration = KNOWN[name]
    planted = faults(declaration)
    assert planted
    for what, change, told in planted:
        given = given_to(declaration)
        change(given)
        with pytest.raises(ArgumentError, match=told) as raised:
            declaration.function(**given)
        assert len(str(raised.value).splitlines()) == 1, what


@pytest.mark.slow
@pytest.mark.parametrize("name", KNOWN)
def test_an_adapter_takes_what_it_declares(name: str) -> None:
    given = given_to(KNOWN[name])
    try:
        KNOWN[name].function(**given)
    except ArgumentError:
        raise
    except Exception:  # noqa: BLE001 - past the check nothing can run here
        pass
