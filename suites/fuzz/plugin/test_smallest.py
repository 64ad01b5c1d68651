"""What counts as the same fault while a failing case is made smaller."""

from __future__ import annotations

from typing import Any

from fuzz.serve import _alike, _ways


def finding(*kinds: str, check: str = "values") -> dict[str, Any]:
    """A finding with the best explanation's class, and those of the others that fit."""
    first, *others = kinds or (None,)
    runners_up = [{"kind": kind} for kind in others]
    evidence = {} if first is None else {"diagnosis": {"kind": first, "runners_up": runners_up}}
    return {"check": check, "diagnosis": first, "evidence": evidence}


def test_ways_are_explanations_of_the_diagnosed_class() -> None:
    assert _ways(finding()) == 0
    assert _ways(finding("unexplained")) == 1
    assert _ways(finding("window", "extra_key")) == 1
    assert _ways(finding("window", "window", "extra_key", "window")) == 3


def test_a_smaller_case_is_explained_as_clearly() -> None:
    like = finding("window", "extra_key")
    assert _alike(finding("window"), like)
    assert _alike(finding("window", "split", "missing_key"), like)
    assert not _alike(finding("window", "window"), like)
    assert not _alike(finding("causal"), like)
    assert not _alike(finding("window", check="lse"), like)
    assert _alike(finding(check="crash"), finding(check="crash"))
