"""Declarations: data on a function; a wrong one says what to write instead."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from oracle import Convention, Precision, Supports, declare
from oracle.convention import SinkUnits, Window, WindowMeaning
from oracle.declare import DeclarationError, declaration_of
from oracle.kinds import Engine, IndexForm, KVLayout, LseBase
from oracle.precision import UNDECLARED, MatrixUnit

CONVENTION = Convention(source="a test")


def test_the_function_is_returned_unchanged_with_its_declaration() -> None:
    def gather(k_cache: Any, v_cache: Any, slots: Any) -> None: ...

    decorated = declare.kv_gather(name="mine.gather", convention=CONVENTION)(gather)
    assert decorated is gather
    declaration = declaration_of(gather)
    assert declaration is not None
    assert declaration.name == "mine.gather"
    assert declaration.function is gather
    assert declaration_of(print) is None


def test_wrong_parameters_say_what_to_write() -> None:
    def gather(cache: Any, slots: Any) -> None: ...

    with pytest.raises(DeclarationError, match=r"write def gather\(k_cache, v_cache, slots\)"):
        declare.kv_gather(name="x", convention=CONVENTION)(gather)


def test_extra_parameters_need_defaults() -> None:
    def extra(k_cache: Any, v_cache: Any, slots: Any, stream: Any) -> None: ...
    def fine(k_cache: Any, v_cache: Any, slots: Any, stream: Any = None) -> None: ...
    def open_ended(**anything: Any) -> None: ...

    with pytest.raises(DeclarationError, match="unknown stream"):
        declare.kv_gather(name="x", convention=CONVENTION)(extra)
    declare.kv_gather(name="x", convention=CONVENTION)(fine)
    declare.kv_gather(name="x", convention=CONVENTION)(open_ended)


def test_a_decorator_without_its_arguments_says_what_to_write() -> None:
    def gather(k_cache: Any, v_cache: Any, slots: Any) -> None: ...

    wrong: Any = declare.kv_gather
    for use in (lambda: wrong(gather), lambda: wrong(name="x"), lambda: wrong()):
        with pytest.raises(DeclarationError, match=r"write @declare.kv_gather\(name=..., convention="):
            use()
    with pytest.raises(AttributeError, match=r"declare.decode: no operation; allowed: paged_decode, varlen_extend"):
        getattr(declare, "decode")  # noqa: B009 - the name is unknown to the type checker


@pytest.mark.parametrize("name", ["", "a b", "a*"])
def test_names_are_words(name: str) -> None:
    with pytest.raises(DeclarationError, match="dotted words"):
        declare.kv_gather(name=name, convention=CONVENTION)


def test_features_belong_to_the_operation() -> None:
    with pytest.raises(DeclarationError, match=r"sinks; allowed: strided, skip, slot_map"):
        declare.kv_write(name="x", convention=CONVENTION, supports=Supports(features=frozenset({"sinks"})))


def test_a_convention_needs_a_source_and_known_index_dtypes() -> None:
    with pytest.raises(ValueError, match="source"):
        Convention(source=" ")
    with pytest.raises(ValueError, match="int32, int64"):
        Convention(source="x", index_dtypes=("int16",))


@pytest.mark.parametrize(
    ("meaning", "keys", "argument"),
    [
        (WindowMeaning.KEYS, 5, 5),
        (WindowMeaning.LEFT, 5, 4),
        (WindowMeaning.LEFT_RIGHT, 5, (4, 0)),
        (WindowMeaning.KEYS, None, -1),
        (WindowMeaning.LEFT_RIGHT, None, (-1, -1)),
    ],
)
def test_window_arguments(meaning: WindowMeaning, keys: int | None, argument: Any) -> None:
    assert Window(meaning=meaning, off=(-1,)).argument(keys) == argument


@pytest.mark.parametrize(
    ("window", "keys", "word"),
    [
        (Window(), 5, "takes none"),
        (Window(meaning=WindowMeaning.KEYS), None, "means off"),
        (Window(meaning=WindowMeaning.KEYS, off=(0,)), 0, "at least 1"),
        (Window(meaning=WindowMeaning.LEFT, off=(0,)), 1, "means off here"),
    ],
)
def test_windows_that_cannot_be_said(window: Window, keys: int | None, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        window.argument(keys)


def test_precision_by_dtype() -> None:
    def gather(k_cache: Any, v_cache: Any, slots: Any) -> None: ...

    exact = Precision(source="here", p_dtype=None)
    declare.kv_gather(name="x", convention=CONVENTION, precision={"fp32": exact})(gather)
    declaration = declaration_of(gather)
    assert declaration is not None
    assert declaration.precision_for("fp32") is exact
    assert declaration.precision_for("bf16") is UNDECLARED
    assert declaration.precision_for("bf16", "fp32") is exact
    assert declaration.precision_for("fp32", "e4m3fn") is exact
    assert declaration.precision_for("bf16", "e4m3fn") is UNDECLARED


def test_loose_assumptions_are_named() -> None:
    assert {"p_dtype", "qk", "tile"} <= set(Precision().loosest())
    assert set(Precision().loosest()) - set(Precision(p_dtype=None, tile=32, qk=MatrixUnit(block=4)).loosest()) == {
        "p_dtype",
        "qk",
        "tile",
    }
    # Nothing is assumed of what a target does not do.
    assert not {"max_splits", "ranks", "q_cast", "source"} & set(Precision().loosest())


@pytest.mark.parametrize(
    "changes",
    [
        *({"tile": 0}, {"max_splits": 0}, {"ranks": 0}, {"p_scale": 0.0}),
        *({"p_dtype": "float32"}, {"kv_cast": 16}, {"lse_dtype": None}, {"logit_dtype": ""}),
    ],
)
def test_precision_is_checked(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"precision.{next(iter(changes))}"):
        Precision(**changes)


@pytest.mark.parametrize(
    ("changes", "allowed"),
    [
        ({"dtypes": ()}, "at least one of fp32, bf16"),
        ({"dtypes": ("float16",)}, "fp32, bf16, fp16"),
        ({"dtypes": "bf16"}, "a tuple of fp32"),
        ({"dtypes": ["bf16"]}, "a tuple of fp32"),
        ({"dtypes": ([],)}, "fp32, bf16, fp16"),
        ({"kv_dtypes": ("fp8",)}, "e4m3fn"),
        ({"head_dims": ()}, "at least one of integers from 1 to 4096"),
        ({"head_dims": 64}, "a tuple of integers from 1 to 4096"),
        ({"head_dims": ("64",)}, "integers from 1 to 4096"),
        ({"head_dims": (0,)}, "integers from 1 to 4096"),
        ({"v_head_dims": (64.0,)}, "integers from 1 to 4096"),
        ({"page_sizes": (True,)}, "integers from 1 to 4096"),
        ({"num_kv_heads": ()}, "at least one"),
        ({"group_sizes": ()}, "at least one"),
        ({"parts": (65,)}, "integers from 1 to 64"),
        ({"features": "window"}, "a set of names"),
        ({"features": ["window"]}, "a set of names"),
        ({"features": {1}}, "a set of names"),
        ({"max_query_len": 0}, "an integer, 1 up; None"),
        ({"deterministic": 1}, "True, False"),
        ({"archs": "gfx942"}, "a tuple of names"),
        ({"compiler": 3}, "a distribution's name or None"),
    ],
)
def test_supports_names_the_field_and_what_is_allowed(changes: dict[str, Any], allowed: str) -> None:
    with pytest.raises(DeclarationError) as raised:
        Supports(**changes)
    message = str(raised.value)
    assert message.startswith(f"supports.{next(iter(changes))}: ")
    assert allowed in message
    assert "\n" not in message


def test_a_plain_set_of_features_becomes_a_frozen_one() -> None:
    supports = Supports(features={"strided"})  # type: ignore[arg-type]
    assert supports.features == frozenset({"strided"})
    assert hash(supports) == hash(Supports(features=frozenset({"strided"})))


@pytest.mark.parametrize(
    ("changes", "allowed"),
    [
        ({"convention": "my README"}, "a Convention"),
        ({"supports": {"dtypes": ("bf16",)}}, "a Supports or None"),
        ({"precision": "exact"}, "a Precision, a mapping"),
        ({"precision": {"bf16": 3}}, "a Precision, a mapping"),
        ({"precision": {"half": Precision()}}, "fp32, bf16"),
        ({"engines": ()}, "Engine.CUDA"),
        ({"engines": Engine.CUDA}, "a tuple of Engine.CUDA"),
        ({"engines": ("cuda",)}, "Engine.CUDA"),
        ({"unavailable": "no GPU"}, "returns a reason or None"),
        ({"task": "local"}, "IndexTask.LOCAL"),
        ({"reset": 1}, "a function without parameters"),
        ({"name": 3}, "dotted words"),
    ],
)
def test_arguments_name_the_field_and_what_is_allowed(changes: dict[str, Any], allowed: str) -> None:
    with pytest.raises(DeclarationError) as raised:
        declare.kv_gather(**({"name": "x", "convention": CONVENTION} | changes))
    message = str(raised.value)
    assert message.startswith(f"declare.kv_gather: {next(iter(changes))}")
    assert allowed in message


def test_only_functions_are_declared() -> None:
    with pytest.raises(DeclarationError, match="allowed: a function"):
        declare.kv_gather(name="x", convention=CONVENTION)(3)  # type: ignore[type-var]


def decode(q, k_cache, v_cache, page_table, lengths, **options):  # type: ignore[no-untyped-def]
    return q


def misspelt(q, kcache, v_cache, page_table, lengths, **options):  # type: ignore[no-untyped-def]
    return q


def positional(q, k_cache, v_cache, page_table, lengths, /, **options):  # type: ignore[no-untyped-def]
    return q


TABLE = Convention(source="this test", index_form=IndexForm.PAGE_TABLE)


def test_what_is_left_over_hides_no_misspelling() -> None:
    declare.paged_decode(name="x", convention=TABLE)(decode)
    with pytest.raises(
        DeclarationError, match=r"has unknown kcache; write def misspelt\(q, k_cache, v_cache, page_table"
    ):
        declare.paged_decode(name="x", convention=TABLE)(misspelt)
    with pytest.raises(DeclarationError, match=r"takes q, k_cache, .* by position only, and is called by keyword"):
        declare.paged_decode(name="x", convention=TABLE)(positional)


@pytest.mark.parametrize(
    ("feature", "said", "write"),
    [
        ("window", {"window": Window(meaning=WindowMeaning.LEFT, off=(-1,))}, r"window=Window\(meaning="),
        ("sinks", {"sink": SinkUnits.NATURAL}, r"sink=SinkUnits\.NATURAL"),
        ("soft_cap", {"soft_cap": True}, "soft_cap=True"),
    ],
)
def test_a_feature_that_the_convention_does_not_explain_is_refused(feature: str, said: Any, write: str) -> None:
    """It would never be tried, and the run would look as if it had been."""
    supports = Supports(features=frozenset({feature}))
    with pytest.raises(DeclarationError, match=rf"supports\.features: '{feature}', of which .* write .*{write}"):
        declare.paged_decode(name="x", convention=TABLE, supports=supports)
    declare.paged_decode(name="x", convention=replace(TABLE, **said), supports=supports)(decode)


def test_members_may_be_text_and_others_are_refused() -> None:
    said: Any = {"kv_layout": "hnd", "index_form": "page_table", "lse_base": "two"}
    convention = Convention(source="this test", **said)
    assert convention.kv_layout is KVLayout.HND
    assert convention.index_form is IndexForm.PAGE_TABLE
    assert convention.lse_base is LseBase.TWO
    for field, value, allowed in (
        ("kv_layout", "nhwd", "allowed: KVLayout.LINEAR, KVLayout.NHD"),
        ("window", 4, r"allowed: Window\(...\)"),
        ("index_dtypes", "int32", "allowed: a tuple of int32, int64"),
    ):
        wrong: Any = {field: value}
        with pytest.raises(ValueError, match=rf"convention\.{field}: {value!r}; {allowed}"):
            Convention(source="this test", **wrong)
    wrong = {"meaning": "right"}
    with pytest.raises(ValueError, match=r"window\.meaning: 'right'; allowed: WindowMeaning\.KEYS"):
        Window(**wrong)
