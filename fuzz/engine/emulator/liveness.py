"""Which variables of a kernel matter to a branch or a loop of it: read there, set there, needed afterwards."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence

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


class _Liveness:
    def __init__(self, function: ast.FunctionDef) -> None:
        arguments = function.args
        given = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
        self.local = frozenset(a.arg for a in given if a is not None) | _stored(function.body)
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
            set_here = _stored(targets) if node.value is not None else _NONE
            return after - set_here | self._read([node])
        if isinstance(node, ast.AugAssign):
            return after | self._read([node]) | _stored([node.target]) & self.local
        if isinstance(node, ast.Return):
            return self._read([node])
        if isinstance(node, (ast.Break, ast.Continue)):
            return self.local
        return after | self._read([node])

    def _exposed(self, node: ast.For | ast.While) -> _Names:
        """Names that an iteration may read before it sets them."""
        read = self.before(node.body, _NONE)
        return read - _stored([node.target]) if isinstance(node, ast.For) else read | self._read([node.test])

    def _read(self, nodes: Iterable[ast.AST]) -> _Names:
        return frozenset(n.id for n in _names(nodes) if isinstance(n.ctx, ast.Load)) & self.local

    def _note(self, node: Region, after: _Names) -> None:
        inner: list[ast.AST] = [*node.body, *node.orelse]
        if isinstance(node, ast.If):
            exposed = self.before(node.body, _NONE) | self.before(node.orelse, _NONE)
        else:
            exposed = self._exposed(node)
            inner.append(node.target if isinstance(node, ast.For) else node.test)
        stored = _stored(inner)
        read = self._read(inner) | exposed
        if not _is_region(node, inner) or any(n.startswith("__") for n in read | stored):
            return
        merged = stored & after
        carried = stored & exposed - merged
        groups = read - stored, merged, carried, stored - merged - carried
        same, needed, later, passing = (tuple(sorted(group)) for group in groups)
        self.sites[node] = (f"{self.name}:{node.lineno}:{node.col_offset}", same, needed, later, passing)


def _is_region(node: Region, inner: Sequence[ast.AST]) -> bool:
    if not isinstance(node, ast.If) and node.orelse:
        return False
    for part in (n for statement in inner for n in ast.walk(statement)):
        if isinstance(part, (*_JUMPS, *_SCOPES)):
            return False
        if isinstance(part, (ast.Attribute, ast.Subscript)) and not isinstance(part.ctx, ast.Load):
            return False
    return True


def _names(nodes: Iterable[ast.AST]) -> Iterator[ast.Name]:
    return (n for node in nodes for n in ast.walk(node) if isinstance(n, ast.Name))


def _stored(nodes: Iterable[ast.AST]) -> _Names:
    """Names that are set, apart from those of comprehensions, which are their own."""
    found: set[str] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.comprehension):
            waiting += [node.iter, *node.ifs]
            continue
        if isinstance(node, (ast.Lambda, ast.FunctionDef, ast.ClassDef)):
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        waiting += ast.iter_child_nodes(node)
    return frozenset(found)
