"""Cases: exact round trip through JSON, and one clear line for everything that does not fit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuzz.case import STORAGE_BYTES, CaseError, case_from_dict, case_from_json, load_case
from fuzz.features import labels
from oracle.declare import DTYPES, DeclarationError, Supports
from suites.fuzz.cases import extend_case, gather_case, write_case


@pytest.mark.parametrize("case", [gather_case(), write_case(skip="some"), extend_case(window=3, scale=0.25)])
def test_json_round_trip(case: Any) -> None:
    assert case_from_json(case.to_json()) == case
    assert hash(case_from_json(case.to_json())) == hash(case)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_kv_heads": 0}, ["case.num_kv_heads", "1 to 1024"]),
        ({"num_kv_heads": "2"}, ["case.num_kv_heads", "an integer"]),
        ({"num_kv_heads": True}, ["case.num_kv_heads"]),
        ({"num_kv_heads": 2.0}, ["case.num_kv_heads"]),
        ({"context_lens": [1, -1]}, ["case.context_lens[1]"]),
        ({"context_lens": 5}, ["case.context_lens", "a list"]),
        ({"kv_dtype": "fp64"}, ["case.kv_dtype", "bf16"]),
        ({"strided": 1}, ["case.strided", "true or false"]),
        ({"window": 0}, ["case.window", "or null"]),
        ({"pool": "vast"}, ["case.pool", "tight, spare, huge"]),
        ({"scale": 0.5}, ["case.scale", "null for kv_gather"]),
        ({"query_lens": [1, 1]}, ["case.query_lens", "[]"]),
        ({"dtype": "fp16"}, ["case.dtype", "bf16"]),
        ({"page_size": 12}, ["case.page_size", "multiple of 8"]),
        ({"head_dim": 36}, ["case.head_dim", "multiple of 8"]),
        ({"skip": "some"}, ["case.skip", '"none" for kv_gather']),
        ({"context_lens": [1 << 20, 1]}, ["case.context_lens", "at most"]),
        ({"seed": 1 << 63}, ["case.seed"]),
    ],
)
def test_what_cannot_be_is_named(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(CaseError) as raised:
        gather_case(**changes)
    message = str(raised.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("changes", "word"),
    [({"query_lens": [1]}, "query_lens"), ({"probe": "bytes"}, "probe"), ({"scale": float("nan")}, "scale")],
)
def test_what_attention_cannot_be(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(CaseError, match=word):
        extend_case(**changes)


def test_missing_unknown_and_repeated_fields() -> None:
    plain = gather_case().to_dict()
    with pytest.raises(CaseError, match=r"case.page_size: missing"):
        case_from_dict({k: v for k, v in plain.items() if k != "page_size"})
    with pytest.raises(CaseError, match=r"case.colour: unknown"):
        case_from_dict(plain | {"colour": 1})
    with pytest.raises(CaseError, match=r"case.schema: 2"):
        case_from_dict(plain | {"schema": 2})
    with pytest.raises(CaseError, match=r"case.schema: missing"):
        case_from_dict({})
    with pytest.raises(CaseError, match="given twice"):
        case_from_json('{"schema": 1, "schema": 1}')


@pytest.mark.parametrize("text", ["", "[]", "null", "{", '"x"', "9" * 5000, "[" * 100_000])
def test_what_is_no_case_at_all(text: str) -> None:
    with pytest.raises(CaseError):
        case_from_json(text)


def test_what_a_target_may_declare_is_what_a_case_may_hold() -> None:
    assert tuple(STORAGE_BYTES) == DTYPES
    case = extend_case()
    for name, most in (("head_dim", 4096), ("page_size", 4096), ("num_kv_heads", 1024), ("group_size", 1024)):
        Supports(**{name if name.endswith("heads") else f"{name}s": (most,)})
        replace(case, **{name: most})
        with pytest.raises(CaseError):
            replace(case, **{name: most + 1})
        with pytest.raises(DeclarationError):
            Supports(**{name if name.endswith("heads") else f"{name}s": (most + 1,)})


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "case.json"
    path.write_text(gather_case().to_json())
    assert load_case(path) == gather_case()
    path.write_bytes(b"\xff\xfe{}")
    with pytest.raises(CaseError, match="UTF-8"):
        load_case(path)
    with pytest.raises(CaseError, match="cannot be read"):
        load_case(tmp_path / "absent.json")


def refused_in_one_line_or_round_trips(text: str) -> None:
    message = ""
    try:
        case = case_from_json(text)
    except CaseError as error:
        message = str(error)
    else:
        assert case_from_json(case.to_json()) == case
    assert "\n" not in message
    assert len(message) < 600


_TEXT = gather_case().to_json()


@given(st.integers(0, len(_TEXT) - 1), st.binary(max_size=4))
def test_a_corrupted_file_is_refused_in_one_line_or_still_a_case(at: int, patch: bytes) -> None:
    raw = _TEXT.encode()[:at] + patch + _TEXT.encode()[at + len(patch) :]
    refused_in_one_line_or_round_trips(raw.decode("utf-8", "replace"))


@given(
    st.sampled_from(sorted(gather_case().to_dict())),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=2),
        max_leaves=5,
    ),
)
def test_any_value_in_any_field_is_refused_in_one_line_or_fits(name: str, value: Any) -> None:
    refused_in_one_line_or_round_trips(json.dumps(gather_case().to_dict() | {name: value}))


def test_causal_rows_without_keys_show_the_label_empty() -> None:
    def queries(**changes: Any) -> set[str]:
        return {label for name, label in labels(extend_case(**changes)) if name == "query"}

    assert queries(context_lens=[3], query_lens=[5]) == {"empty"}
    assert queries(context_lens=[0], query_lens=[1]) == {"empty"}
    assert queries(context_lens=[0], query_lens=[1], causal=False) == {"empty"}
    assert queries(context_lens=[3], query_lens=[5], causal=False) == {"some"}
    assert queries(context_lens=[5, 3], query_lens=[5, 1]) == {"full", "one"}
