"""Triton's front end where it differs from Python: an AST pass over jitted functions, and what it calls.

A number that is assigned becomes a scalar of the language; `and`, `or`, `not` work on scalars and blocks;
`range`, `min`, `max`, `print` mean the language's; `assert` is a debug aid that compiles to nothing.
"""

import ast
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fuzz.engine.emulator.casts import cast
from fuzz.engine.emulator.dtypes import DType, int1, int32, promote_integers
from fuzz.engine.emulator.errors import SOURCE_MARK, Divergence, KernelError
from fuzz.engine.emulator.operators import bitwise, invert
from fuzz.engine.emulator.sanitizer import FindingKind, report
from fuzz.engine.emulator.value import Number, Value, as_value

_BUILTINS = ("range", "min", "max", "print")


def compile_source(source: str, filename: str) -> Any:
    """Code of a module with its jitted functions rewritten; lines stay those of the source."""
    tree = ast.parse(source, filename)
    rewriter = _Rewriter(_jitted_by_call(tree))
    return compile(ast.fix_missing_locations(rewriter.visit(tree)), filename, "exec")


def _is_jit(node: ast.expr) -> bool:
    function = node.func if isinstance(node, ast.Call) else node
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name == "jit"


def _jitted_by_call(tree: ast.AST) -> set[str]:
    """Names of functions handed to jit as `g = triton.jit(f)`."""
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and _is_jit(node))
    return {argument.id for call in calls for argument in call.args if isinstance(argument, ast.Name)}


class _Rewriter(ast.NodeTransformer):
    def __init__(self, jitted: set[str]) -> None:
        self.jitted = jitted

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        if node.name in self.jitted or any(_is_jit(decorator) for decorator in node.decorator_list):
            body = _BodyRewriter()
            node.body = [body.visit(statement) for statement in node.body]
            return node
        return self.generic_visit(node)


class _BodyRewriter(ast.NodeTransformer):
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
        if isinstance(node.func, ast.Name) and node.func.id in _BUILTINS:
            node.func = _runtime(f"language_{node.func.id}", node.func)
        return node


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
        if type(x) in (bool, int, float):
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

    @staticmethod
    def language_range(*arguments: Value | Number, **_: Any) -> Iterator[Value]:
        """`range` of a kernel: its index is a scalar. Raises Divergence where trip counts differ."""
        if not 1 <= len(arguments) <= 3:
            raise KernelError("range takes one to three arguments")
        values = [as_value(argument) for argument in arguments]
        start = values[0] if len(values) > 1 else as_value(0)
        stop, step = values[len(values) > 1], values[2] if len(values) > 2 else as_value(1)
        dtype = int32
        for value in (start, stop, step):
            if not isinstance(value.dtype, DType) or not value.dtype.is_int() or value.shape:
                raise KernelError("range takes integer scalars")
            dtype = promote_integers(dtype, value.dtype)
            if value.undefined is not None:
                report(FindingKind.UNDEFINED_BRANCH, value.undefined, None, None)
        trips = _trips(start.data.long(), stop.data.long(), step.data.long())
        first, stride = cast(start, dtype).data, cast(step, dtype).data
        (low, high), (near, far) = start.range(), step.range()
        for trip in range(trips):
            bounds = low + min(trip * near, trip * far), high + max(trip * near, trip * far)
            yield Value(first + trip * stride, dtype, bounds=bounds)


def _truth(x: Any) -> Value:
    value = as_value(x)
    return value if value.dtype is int1 else cast(value, int1)


def _trips(start: Tensor, stop: Tensor, step: Tensor) -> int:
    """Iterations of a loop, the same for all programs of the batch."""
    if bool((step == 0).any()):
        raise KernelError("range with a step of zero")
    ahead = torch.where(step > 0, stop - start, start - stop)
    size = step.abs()
    trips = torch.div(ahead + size - 1, size, rounding_mode="floor").clamp(min=0)
    low, high = torch.aminmax(trips)
    if low != high:
        raise Divergence(trips)
    return int(low)
