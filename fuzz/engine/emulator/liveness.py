"""Which variables of a kernel matter to a branch or a loop of it: read there, set there, needed afterwards."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from typing import NamedTuple

_Names = frozenset[str]
_NONE: _Names = frozenset()
Region = ast.If | ast.For | ast.While
Site = tuple[str, tuple[str, ...], tuple[str, ...], tuple[str, ...], tuple[str, ...]]

# What a region does not survive: leaving it half way, or changing what no variable of the function holds.
_JUMPS = (ast.Return, ast.Break, ast.Continue, ast.Try, ast.Yield, ast.YieldFrom)
_SCOPES = (ast.FunctionDef, ast.ClassDef, ast.Global, ast.Nonlocal, ast.Delete, ast.Import, ast.ImportFrom)


def sites(function: ast.FunctionDef) -> dict[Region, Site]:
    """The regions of a function, as `regions.Site` has them: place, names only read, needed after, carried, passing."""
    found = _Liveness(function)
    found.before(function.body, _NONE)
    return found.sites


class _Node(NamedTuple):
    """Names that a node reads, and those that it sets, apart from what functions within it set for themselves.
    `alone`: no region may hold it.
    """

    read: _Names
    stored: _Names
    alone: bool


class _Liveness:
    def __init__(self, function: ast.FunctionDef) -> None:
        arguments = function.args
        given = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
        self.known: dict[ast.AST, _Node] = {}
        self.local = frozenset(a.arg for a in given if a is not None) | self._stored(function.body)
        self.constants = frozenset(a.arg for a in given if a is not None and _is_constant(a.annotation))
        self.constants |= self._stored(
            n.target for n in ast.walk(function) if isinstance(n, ast.AnnAssign) and _is_constant(n.annotation)
        )
        self.name = function.name
        self.sites: dict[Region, Site] = {}

    def before(self, statements: Sequence[ast.stmt], after: _Names) -> _Names:
        """Names that may be read by the statements, or are in `after`, before they are set."""
        for statement in reversed(statements):
            after = self._before(statement, after)
        return after

    def _before(self, node: ast.stmt, after: _Names) -> _Names:
        if isinstance(node, ast.If):
            self._note(node, after)
            return self._read([node.test]) | self.before(node.body, after) | self.before(node.orelse, after)
        if isinstance(node, (ast.For, ast.While)):
            head = after | self._exposed(node)
            self._note(node, after)
            self.before(node.body, head)
            rest = self.before(node.orelse, after)
            return head | rest | (self._read([node.iter]) if isinstance(node, ast.For) else _NONE)
        if isinstance(node, ast.With):
            return self._read(item.context_expr for item in node.items) | self.before(node.body, after)
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            set_here = self._stored(targets) if node.value is not None else _NONE
            return after - set_here | self._read([node])
        if isinstance(node, ast.AugAssign):
            return after | self._read([node]) | self._stored([node.target]) & self.local
        if isinstance(node, ast.Return):
            return self._read([node])
        if isinstance(node, (ast.Break, ast.Continue)):
            return self.local
        return after | self._read([node])

    def _exposed(self, node: ast.For | ast.While) -> _Names:
        """Names that an iteration may read before it sets them."""
        read = self.before(node.body, _NONE)
        return read - self._stored([node.target]) if isinstance(node, ast.For) else read | self._read([node.test])

    def _read(self, nodes: Iterable[ast.AST]) -> _Names:
        return _NONE.union(*(self._look(node).read for node in nodes)) & self.local

    def _stored(self, nodes: Iterable[ast.AST]) -> _Names:
        return _NONE.union(*(self._look(node).stored for node in nodes))

    def _is_decided(self, test: ast.expr) -> bool:
        """Whether a condition is known at compile time, and so the same for all programs."""
        called = any(isinstance(n, ast.Call) for n in ast.walk(test))
        return not called and self._read([test]) <= self.constants

    def _look(self, node: ast.AST) -> _Node:
        """What is said of a node, found once."""
        found = self.known.get(node)
        if found is None:
            found = self.known[node] = _name(node) if isinstance(node, ast.Name) else self._sum(node)
        return found

    def _sum(self, node: ast.AST) -> _Node:
        parts = [self._look(part) for part in ast.iter_child_nodes(node) if not isinstance(part, ast.expr_context)]
        read, stored = (_NONE.union(*(getattr(part, name) for part in parts)) for name in ("read", "stored"))
        if isinstance(node, (ast.Lambda, ast.FunctionDef, ast.ClassDef)):
            stored = _NONE
        elif isinstance(node, ast.comprehension):
            stored -= self._look(node.target).stored
        in_place = isinstance(node, (ast.Attribute, ast.Subscript)) and not isinstance(node.ctx, ast.Load)
        alone = in_place or isinstance(node, (*_JUMPS, *_SCOPES)) or any(part.alone for part in parts)
        return _Node(read, stored, alone)

    def _note(self, node: Region, after: _Names) -> None:
        if isinstance(node, ast.If) and self._is_decided(node.test):
            return
        inner: list[ast.AST] = [*node.body, *node.orelse]
        if isinstance(node, ast.If):
            exposed = self.before(node.body, _NONE) | self.before(node.orelse, _NONE)
        else:
            exposed = self._exposed(node)
            inner.append(node.target if isinstance(node, ast.For) else node.test)
        stored = self._stored(inner)
        read = self._read(inner) | exposed
        loop_else = not isinstance(node, ast.If) and node.orelse
        if loop_else or any(self._look(n).alone for n in inner) or any(n.startswith("__") for n in read | stored):
            return
        merged = stored & after
        carried = stored & exposed - merged
        groups = read - stored, merged, carried, stored - merged - carried
        same, needed, later, passing = (tuple(sorted(group)) for group in groups)
        self.sites[node] = (f"{self.name}:{node.lineno}:{node.col_offset}", same, needed, later, passing)


def _is_constant(annotation: ast.expr | None) -> bool:
    return annotation is not None and ast.unparse(annotation).strip("'\"").endswith("constexpr")


def _name(node: ast.Name) -> _Node:
    names = frozenset((node.id,))
    return _Node(names, _NONE, False) if isinstance(node.ctx, ast.Load) else _Node(_NONE, names, False)
