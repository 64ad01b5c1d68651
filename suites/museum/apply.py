"""Put a mistake into the text of a file: at one place, or not at all."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256

from fuzz.errors import Exit, Stop
from suites.museum.mutation import Fragment, Mutation, Place, Structure


class MutationError(Stop):
    """A mutation that does not fit its file: it matches nothing, or more than once, or changes nothing. One line.

    Where the file is another version its code is NOTHING: nothing asked for can run here.
    """

    def __init__(self, message: str, code: Exit = Exit.HARNESS) -> None:
        super().__init__(code, message)


@dataclass(frozen=True)
class Mutant:
    """A file's text with the mistake in it. ``lines``: of the statements that hold it, any of which shows it ran."""

    text: str
    lines: frozenset[int]


def apply(mutation: Mutation, source: str) -> Mutant:
    """The mutated file. Raises ``MutationError``."""
    place = mutation.place
    if place.sha256 not in (None, found := sha256(source.encode()).hexdigest()):
        wanted = f"its SHA-256 is {found[:12]}..., its mutations are for {place.sha256[:12]}..."
        raise MutationError(f"{place.file}: {wanted}: another version", Exit.NOTHING)
    function = _function(ast.parse(source), place)
    if isinstance(mutation, Fragment):
        start, end, new = _quoted(mutation, source, function)
    else:
        start, end, new = _found(mutation, source, function)
    text = source[:start] + new + source[end:]
    try:
        changed = ast.parse(text)
    except SyntaxError as error:
        raise MutationError(f"{place.file}, {place.function}: what it becomes is no Python: {error.msg}") from None
    if ast.dump(changed) == ast.dump(ast.parse(source)):
        raise MutationError(f"{place.file}, {place.function}: the mutation changes nothing")
    first = source.count("\n", 0, start) + 1
    return Mutant(text, _lines(_function(changed, place), first, first + new.count("\n")))


def _function(tree: ast.Module, place: Place) -> ast.FunctionDef:
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == place.function]
    if len(found) != 1:
        raise MutationError(f"{place.file} defines {place.function} {len(found)} times; a mutation needs it once")
    return found[0]


def _quoted(mutation: Fragment, source: str, function: ast.FunctionDef) -> tuple[int, int, str]:
    start, end = span(source, function)
    count = source.count(mutation.old, start, end)
    if count != 1:
        where = f"{mutation.place.file}, {mutation.place.function}"
        raise MutationError(f"{where} has {mutation.old.strip()!r} {count} times; a mutation needs it once")
    begin = source.index(mutation.old, start, end)
    return begin, begin + len(mutation.old), mutation.new


def _found(mutation: Structure, source: str, function: ast.FunctionDef) -> tuple[int, int, str]:
    node: ast.AST = function
    for step in mutation.at:
        node = _step(node, step, mutation.place)
    parts = [ast.get_source_segment(source, part) or "" for part in _parts(node)]
    text = ast.get_source_segment(source, node) or ""
    # Further statements begin where the first does.
    indent = " " * node.col_offset if isinstance(node, ast.stmt) else ""
    new = mutation.new.replace("\n", "\n" + indent).format(*parts, self=text)
    return (*span(source, node), new)


def _step(within: ast.AST, step: str, place: Place) -> ast.AST:
    kind, _, rest = step.partition(" ")
    name, _, nth = rest.partition("#")
    if kind == "argument":
        found = list(_arguments(within, name))
    else:
        found = [node for node in ast.walk(within) if node is not within and _is(node, kind, name)]
    found.sort(key=lambda node: (node.lineno, node.col_offset, -node.end_lineno, -node.end_col_offset))  # type: ignore[attr-defined]
    if nth and int(nth) < len(found):
        return found[int(nth)]
    if nth or len(found) != 1:
        raise MutationError(f"{place.file}, {place.function}: {step!r} is there {len(found)} times")
    return found[0]


def _arguments(call: ast.AST, name: str) -> Iterator[ast.AST]:
    if isinstance(call, ast.Call):
        yield from (k.value for k in call.keywords if k.arg == name)
        if name.isdecimal() and int(name) < len(call.args):
            yield call.args[int(name)]


_OPERATORS: dict[type[ast.AST], str] = {
    **{ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.FloorDiv: "//", ast.Div: "/", ast.Mod: "%"},
    **{ast.BitAnd: "&", ast.BitOr: "|"},
    **{ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!="},
}


def _is(node: ast.AST, kind: str, name: str) -> bool:
    if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return kind == "assign" and [ast.unparse(target) for target in targets] == [name]
    if isinstance(node, ast.Call):
        function = node.func.value if isinstance(node.func, ast.Subscript) else node.func
        return kind == "call" and ast.unparse(function).rpartition(".")[2] == name
    if isinstance(node, ast.Compare):
        return kind == "compare" and [_OPERATORS.get(type(o)) for o in node.ops] == [name]
    if isinstance(node, ast.BinOp):
        return kind == "binop" and _OPERATORS.get(type(node.op)) == name
    if isinstance(node, ast.Name):
        return kind == "name" and node.id == name
    return (kind, type(node)) in (("return", ast.Return), ("if", ast.If))


def _parts(node: ast.AST) -> list[ast.AST]:
    match node:
        case ast.Call(args=args):
            return list(args)
        case ast.Compare(left=left, comparators=others):
            return [left, *others]
        case ast.BinOp(left=left, right=right):
            return [left, right]
        case ast.If(test=test):
            return [test]
        case (
            ast.Assign(value=value) | ast.AugAssign(value=value) | ast.AnnAssign(value=value) | ast.Return(value=value)
        ):
            return [] if value is None else [value]
    return []


def span(source: str, node: ast.AST) -> tuple[int, int]:
    """Offsets of a node's first character and of that after its last. Columns of ``ast`` count bytes."""
    lines = source.splitlines(True)

    def offset(line: int, column: int) -> int:
        own = lines[line - 1].encode()[:column].decode()
        return sum(map(len, lines[: line - 1])) + len(own)

    return (
        offset(node.lineno, node.col_offset),  # type: ignore[attr-defined]
        offset(node.end_lineno, node.end_col_offset),  # type: ignore[attr-defined]
    )


def _lines(function: ast.FunctionDef, first: int, last: int) -> frozenset[int]:
    """Lines of the statements that reach into the lines from ``first`` to ``last``; of compound ones the header."""
    found: set[int] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.stmt) and node is not function:
            body = getattr(node, "body", None)
            end = max(node.lineno, body[0].lineno - 1) if body else node.end_lineno or node.lineno
            if node.lineno <= last and end >= first:
                found.update(range(node.lineno, end + 1))
    return frozenset(found)
