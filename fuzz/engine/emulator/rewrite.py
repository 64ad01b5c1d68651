"""Triton's front end where it differs from Python: an AST pass over jitted functions, and what it calls.

A number that is assigned becomes a scalar of the language; `and`, `or`, `not` work on scalars and blocks;
`range`, `min`, `max`, `print` mean the language's; `assert` is a debug aid that compiles to nothing.
"""

import ast
from collections.abc import Callable
from typing import Any

from fuzz.engine.emulator.casts import cast
from fuzz.engine.emulator.dtypes import int1
from fuzz.engine.emulator.errors import SOURCE_MARK
from fuzz.engine.emulator.liveness import Region, Site, sites
from fuzz.engine.emulator.operators import bitwise, invert
from fuzz.engine.emulator.regions import Trips, arms, loop, loop_while
from fuzz.engine.emulator.rows import UNBOUND
from fuzz.engine.emulator.value import Number, Value, as_value

_BUILTINS = ("range", "min", "max", "print")


def compile_source(source: str, filename: str) -> Any:
    """Code of a module with its jitted functions rewritten; lines stay those of the source."""
    tree = ast.parse(source, filename)
    rewriter = _Rewriter(_jitted_by_call(tree), frozenset(_BUILTINS) - _bound(tree))
    return compile(ast.fix_missing_locations(rewriter.visit(tree)), filename, "exec")


def _is_jit(node: ast.expr) -> bool:
    function = node.func if isinstance(node, ast.Call) else node
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name == "jit"


def _jitted_by_call(tree: ast.AST) -> set[str]:
    """Names of functions handed to jit as `g = triton.jit(f)`."""
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and _is_jit(node))
    return {argument.id for call in calls for argument in call.args if isinstance(argument, ast.Name)}


def _bound(tree: ast.Module) -> set[str]:
    """Names that the module defines or imports at its top level: they are no built-ins there."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Assign):
            names.update(target.id for target in node.targets if isinstance(target, ast.Name))
    return names


class _Rewriter(ast.NodeTransformer):
    def __init__(self, jitted: set[str], builtins: frozenset[str]) -> None:
        self.jitted, self.builtins = jitted, builtins

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        if node.name in self.jitted or any(_is_jit(decorator) for decorator in node.decorator_list):
            body = _BodyRewriter(self.builtins, sites(node), node)
            node.body = body.statements(node.body)
            return node
        return self.generic_visit(node)


class _BodyRewriter(ast.NodeTransformer):
    """`sites`: branches and loops of the function that become regions (see `regions`)."""

    def __init__(self, builtins: frozenset[str], sites: dict[Region, Site], function: ast.FunctionDef) -> None:
        self.builtins, self.sites, self.function = builtins, sites, function
        self.regions = 0

    def statements(self, body: list[ast.stmt]) -> list[ast.stmt]:
        found = (self.visit(statement) for statement in body)
        return [statement for group in found for statement in (group if isinstance(group, list) else [group])]

    def visit_If(self, node: ast.If) -> Any:
        return self._region(node, _BRANCH)

    def visit_For(self, node: ast.For) -> Any:
        return self._region(node, _FOR)

    def visit_While(self, node: ast.While) -> Any:
        return self._region(node, _WHILE)

    def _region(self, node: Region, template: str) -> Any:
        """The statements of a region: a template, with what the source has put into it."""
        site = self.sites.get(node)
        both = isinstance(node, ast.If) and bool(node.orelse)
        self.generic_visit(node)
        if site is None:
            return node
        self.regions += 1
        names = [name for group in site[1:] for name in group]
        needed = [name for group in site[1:3] for name in group]
        text = template.format(
            mark=SOURCE_MARK,
            region=f"_region_{self.regions}",
            item=f"_item_{self.regions}",
            site=site,
            both=both,
            enter=_set_names(f"_region_{self.regions}.enter(locals())", names, needed, "        "),
            leave=_set_names(f"_region_{self.regions}.leave(locals())", names, needed, "    "),
        )
        return [_Filled(node, self.function.lineno).visit(statement) for statement in ast.parse(text).body]

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        self.generic_visit(node)
        node.value = _call("assigned", node.value)
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        self.generic_visit(node)
        if node.value is not None and not ast.unparse(node.annotation).endswith("constexpr"):
            node.value = _call("assigned", node.value)
        return node

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.target, ast.Name):
            return node
        loaded = ast.copy_location(ast.Name(node.target.id, ast.Load()), node.target)
        result = ast.copy_location(ast.BinOp(loaded, node.op, node.value), node)
        return ast.copy_location(ast.Assign([node.target], _call("assigned", result)), node)

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        name = "both" if isinstance(node.op, ast.And) else "either"
        result = node.values[0]
        for value in node.values[1:]:
            nothing = ast.arguments([], [], None, [], [], None, [])
            later = ast.copy_location(ast.Lambda(nothing, value), value)
            result = ast.copy_location(_call(name, result, later), node)
        return result

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        return _call("negation", node.operand) if isinstance(node.op, ast.Not) else node

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        return ast.copy_location(ast.Pass(), node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id in self.builtins:
            node.func = _runtime(f"language_{node.func.id}", node.func)
        return node


# What the source has goes where the names with `_source_` stand.
_BRANCH = """\
{region} = {mark}.arms(_source_test, {site}, {both})
for {item} in {region}:
    if {item} > 1:
{enter}
    if {item} & 1:
        _source_body
    else:
        _source_orelse
if {item} > 1:
{leave}
"""
_FOR = """\
{region} = {mark}.loop(_source_iter, {site})
for {item} in {region}:
    if {region}.changed:
{enter}
    _source_target = {item}
    _source_body
if {region}.split:
{leave}
"""
_CONDITIONS = ("arms", "loop", "more")
_WHILE = """\
{region} = {mark}.loop_while({site})
while {region}.more(_source_test):
    if {region}.changed:
{enter}
    _source_body
if {region}.split:
{leave}
"""


def _set_names(call: str, names: list[str], needed: list[str], indent: str) -> str:
    """Source that sets variables to what a call gives, and unsets those that get nothing and may be read."""
    lines = [f"[{', '.join(names)}] = {call}"]
    lines += [f"if {name} is {SOURCE_MARK}.UNBOUND: del {name}" for name in needed]
    return "\n".join(indent + line for line in lines)


class _Filled(ast.NodeTransformer):
    """Puts a region of the source into a template.

    What is added has the line of the function's header, where no statement is: coverage goes by lines.
    """

    def __init__(self, node: Any, line: int) -> None:
        self.node, self.line = node, line

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, (ast.expr, ast.stmt)):
            node.lineno = node.end_lineno = self.line
            node.col_offset = node.end_col_offset = 0
        return super().visit(node)

    def visit_Name(self, node: ast.Name) -> Any:
        _, ours, name = node.id.rpartition("_source_")
        return getattr(self.node, name) if ours and name in ("test", "iter", "target") else node

    def visit_Expr(self, node: ast.Expr) -> Any:
        _, ours, name = getattr(node.value, "id", "").rpartition("_source_")
        if ours and name in ("body", "orelse"):
            return getattr(self.node, name) or ast.copy_location(ast.Pass(), self.node)
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if getattr(node.func, "attr", "") in _CONDITIONS:  # what is found of a condition is found on its line
            for part in (node, node.func):
                part.lineno = part.end_lineno = self.node.lineno
        return node

    def visit_If(self, node: ast.If) -> ast.AST:
        arms = isinstance(node.test, ast.BinOp)
        return self.generic_visit(ast.copy_location(node, self.node) if arms else node)

    def visit_For(self, node: ast.For) -> ast.AST:
        return self.generic_visit(ast.copy_location(node, self.node) if isinstance(self.node, ast.For) else node)

    def visit_While(self, node: ast.While) -> ast.AST:
        return self.generic_visit(ast.copy_location(node, self.node))


def _runtime(name: str, like: ast.AST) -> ast.Attribute:
    attribute = ast.Attribute(ast.Name(SOURCE_MARK, ast.Load()), name, ast.Load())
    return ast.copy_location(attribute, like)


def _call(name: str, *arguments: ast.expr) -> ast.Call:
    return ast.copy_location(ast.Call(_runtime(name, arguments[0]), list(arguments), []), arguments[0])


class Runtime:
    """What rewritten code calls: found in a module's globals under SOURCE_MARK."""

    def __init__(self, minimum: Callable[..., Any], maximum: Callable[..., Any]) -> None:
        self.language_min, self.language_max = minimum, maximum

    @staticmethod
    def assigned(x: Any) -> Any:
        """A plain assignment makes a scalar of a Python number, in tuples too."""
        if isinstance(x, (bool, int, float)):
            return as_value(x)
        return tuple(Runtime.assigned(item) for item in x) if type(x) is tuple else x

    @staticmethod
    def both(a: Any, b: Callable[[], Any]) -> Any:
        """`a and b`: Python's on compile-time values, elementwise on the language's."""
        if not isinstance(a, Value):
            return a and b()
        return bitwise("and", _truth(a), _truth(b()))

    @staticmethod
    def either(a: Any, b: Callable[[], Any]) -> Any:
        """`a or b`, likewise."""
        if not isinstance(a, Value):
            return a or b()
        return bitwise("or", _truth(a), _truth(b()))

    @staticmethod
    def negation(a: Any) -> Any:
        """`not a`, likewise."""
        return invert(_truth(a)) if isinstance(a, Value) else not a

    @staticmethod
    def language_print(*_: Any, **__: Any) -> None:
        """Device output is dropped."""

    UNBOUND = UNBOUND
    arms, loop, loop_while = staticmethod(arms), staticmethod(loop), staticmethod(loop_while)

    @staticmethod
    def language_range(*arguments: Value | Number, **_: Any) -> Trips:
        """`range` of a kernel: its index is a scalar."""
        return Trips(*arguments)


def _truth(x: Any) -> Value:
    value = as_value(x)
    return value if value.dtype is int1 else cast(value, int1)
