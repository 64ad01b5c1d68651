"""Mutations are found, applied once, and refused where they do not fit; the tree around a mutant is the real one."""

from __future__ import annotations

import ast
from hashlib import sha256
from pathlib import Path

import pytest

from fuzz.errors import Exit, Stop
from suites.museum import overlay
from suites.museum.apply import MutationError, apply, span
from suites.museum.mutation import Fragment, Mutation, Place, Structure

SOURCE = '''\
def other(x):
    return x < 1


def f(x, y):
    """Grüße: columns count bytes."""
    a = g(x, y, mask=x < y) + x * y  # é
    a += x * y * x
    kernel[(1,)](a, y)
    if a < y:
        a = h(
            x,
            other=0,
        )
    return a
'''
PLACE = Place(file="package/file.py", function="f")


def changed(mutation: Mutation, source: str = SOURCE) -> tuple[list[str], set[int]]:
    """The lines that the mutant has and the source has not, and those that show that it ran."""
    mutant = apply(mutation, source)
    return [line for line in mutant.text.splitlines() if line not in source.splitlines()], set(mutant.lines)


@pytest.mark.parametrize(
    ("at", "new", "line", "lines"),
    [
        (("compare <#0",), "{0} <= {1}", "    a = g(x, y, mask=x <= y) + x * y  # é", {7}),
        (("assign a#0", "binop *"), "{1}", "    a = g(x, y, mask=x < y) + y  # é", {7}),
        (("assign a#1", "binop *#0"), "{0} + {1}", "    a += x * y + x", {8}),
        (("assign a#1", "binop *#1"), "({self} + 1)", "    a += (x * y + 1) * x", {8}),
        (("call g", "argument mask"), "True", "    a = g(x, y, mask=True) + x * y  # é", {7}),
        (("call g", "argument 1"), "None", "    a = g(x, None, mask=x < y) + x * y  # é", {7}),
        (("call g",), "g({1}, {0})", "    a = g(y, x) + x * y  # é", {7}),
        (("call kernel", "argument 1"), "x", "    kernel[(1,)](a, x)", {9}),
        (("call h", "argument other"), "None", "            other=None,", {11, 12, 13, 14}),
        (("if", "compare <"), "a > y", "    if a > y:", {10}),
        (("return",), "return {0}, 1", "    return a, 1", {15}),
        (("assign a#1", "name y"), "a", "    a += x * a * x", {8}),
    ],
)
def test_a_place_is_found_by_its_syntax(at: tuple[str, ...], new: str, line: str, lines: set[int]) -> None:
    assert changed(Structure(PLACE, at, new)) == ([line], lines)


def test_spans_are_in_characters_whatever_a_line_holds_before() -> None:
    source = 'a = "ü\U0001d538" + g(x) + b  # ß\n' + SOURCE
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.expr | ast.stmt):
            start, end = span(source, node)
            assert source[start:end] == ast.get_source_segment(source, node)


def test_a_statement_may_become_several() -> None:
    added, lines = changed(Structure(PLACE, ("assign a#2",), "{self}\na = -a"))
    assert added == ["        a = -a"]
    assert lines == {11, 12, 13, 14, 15}


def test_a_fragment_is_replaced_in_its_function_alone() -> None:
    added, lines = changed(Fragment(PLACE, "mask=x < y", "mask=x > y"))
    assert (added, lines) == (["    a = g(x, y, mask=x > y) + x * y  # é"], {7})
    with pytest.raises(MutationError, match="0 times"):
        apply(Fragment(PLACE, "x < 1", "x < 2"), SOURCE)


@pytest.mark.parametrize(
    ("mutation", "message"),
    [
        (Structure(PLACE, ("compare <",), "{0}"), r"package/file.py, f: 'compare <' is there 2 times"),
        (Structure(PLACE, ("compare >",), "{0}"), r"'compare >' is there 0 times"),
        (Structure(PLACE, ("compare <#2",), "{0}"), r"'compare <#2' is there 2 times"),
        (Structure(PLACE, ("assign a#0", "argument mask"), "1"), r"'argument mask' is there 0 times"),
        (Structure(PLACE, ("if",), "if ("), r"no Python"),
        (Structure(PLACE, ("if", "compare <"), "({self})"), r"changes nothing"),
        (Structure(Place(file="a.py", function="none"), ("if",), "pass"), r"a.py defines none 0 times"),
        (Fragment(PLACE, "x * y", "x"), r"has 'x \* y' 2 times"),
        (Fragment(Place(file="a.py", function="f", sha256="0" * 64), "g(", "h("), r"a.py: its SHA-256 is"),
    ],
)
def test_what_does_not_fit_is_refused(mutation: Mutation, message: str) -> None:
    with pytest.raises(Stop, match=message):
        apply(mutation, SOURCE)


def test_a_pinned_file_is_mutated_in_its_own_version() -> None:
    pinned = Place(file="a.py", function="f", sha256=sha256(SOURCE.encode()).hexdigest())
    assert changed(Fragment(pinned, "mask=x < y", "mask=y"))[1] == {7}


def test_the_tree_around_a_mutant_is_the_real_one(tmp_path: Path) -> None:
    file = "suites/museum/mutation.py"
    made = overlay.build(file, "X = 1\n", tmp_path / "tree")
    assert made == tmp_path / "tree" / file
    assert made.read_text() == "X = 1\n"
    assert not made.is_symlink()
    assert (made.parent / "overlay.py").resolve() == overlay.original("suites/museum/overlay.py").resolve()
    assert (tmp_path / "tree" / "suites" / "targets").is_symlink()
    assert overlay.original(file).read_text() != "X = 1\n"


def test_a_package_that_is_missing_is_named() -> None:
    with pytest.raises(Stop, match="no_such_package is not installed") as stopped:
        overlay.original("no_such_package/file.py")
    assert stopped.value.code is Exit.NOTHING
