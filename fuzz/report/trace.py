"""What a target does on one case, as statements: its torch calls, and its calls into the kernels' own packages.

A target is an adapter between our arguments and a kernel. While it runs, each torch function that it calls is noted,
and so is each Python function of another package; what happens inside those is theirs. Control flow is gone: the
statements are the path that this case takes. So no target needs a hand-written example of how it is called.
"""

from __future__ import annotations

import inspect
import math
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name

from fuzz.sources import VARIABLES, folder

_OURS = Path(__file__).parents[1]


class NotTraced(Exception):
    """A call that cannot be written down. One line that says what of it."""


@dataclass(frozen=True)
class Statement:
    """One line of a program: ``text`` assigns ``makes`` and reads ``uses``. ``lasting``: it does more than that."""

    text: str
    makes: tuple[str, ...]
    uses: frozenset[str]
    lasting: bool


@dataclass(frozen=True)
class Program:
    """A target's path on one case. ``modules``: dotted name by variable; ``files``: the files of those modules.

    ``outputs`` maps an output's name to the variable that holds it; ``constants`` are tensors that the target had
    before. ``raised``: the last statement did not return.
    """

    statements: tuple[Statement, ...]
    modules: Mapping[str, str]
    files: tuple[Path, ...]
    constants: Mapping[str, Tensor]
    outputs: Mapping[str, str]
    raised: bool

    @property
    def needed(self) -> tuple[Statement, ...]:
        """The statements without those whose results nobody reads."""
        wanted, kept = set(self.outputs.values()), []
        for statement in reversed(self.statements):
            if statement.lasting or wanted.intersection(statement.makes):
                kept.append(statement)
                wanted |= statement.uses
        return tuple(reversed(kept))


def trace(
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    name_outputs: Callable[[Any], Mapping[str, Tensor]],
    *,
    home: Callable[..., Any] | None = None,
) -> Program:
    """Run ``function(**arguments)`` once and write down what it does. Raises ``NotTraced`` where that cannot be said.

    ``name_outputs`` names the tensors in its result. What the function raises ends the program, with ``raised``.
    ``home``: a function in the adapter's own file, whose functions are no other package's; None: ``function``.
    """
    recorder = _Recorder(Path(inspect.unwrap(home or function).__code__.co_filename))
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            recorder.known(value, name)
    result, raised = None, False
    with recorder.recording():
        try:
            result = function(**arguments)
        except NotTraced:
            raise
        except Exception:  # noqa: BLE001 - whatever a target raises is what the program shows
            raised = True
    if recorder.failure is not None:
        raise NotTraced(recorder.failure)
    if home is not None and not recorder.files and is_foreign(str(recorder.home)):
        # The adapter is the kernel.
        recorder.call_whole(home, arguments, result)
    if raised and not recorder.last_is_foreign:
        raise NotTraced("the target raises before it calls a kernel")
    outputs = {} if raised else {name: recorder.name_of(value) for name, value in name_outputs(result).items()}
    return recorder.program(outputs, raised)


@dataclass
class _Call:
    """A call into another package that has not returned."""

    frame: types.FrameType
    text: str
    uses: set[str]
    made: Any = None
    """the object under construction, where it is a constructor's"""


class _Recorder(TorchFunctionMode):
    """Hears of torch functions as a mode, and of other packages' functions as a profiler."""

    def __init__(self, home: Path) -> None:
        super().__init__()
        self.home = home
        self.statements: list[Statement] = []
        self.modules: dict[str, str] = {}
        self.files: dict[Path, None] = {}
        self.constants: dict[str, Tensor] = {}
        self.failure: str | None = None
        self._names: dict[int, str] = {}
        self._kept: list[Any] = []
        self._uses: set[str] = set()
        self._call: _Call | None = None
        self._busy = False
        self.last_is_foreign = False

    # ------------------------------------------------------------------ listening

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Within the block everything is heard."""
        before = sys.getprofile()
        with self:
            sys.setprofile(self._profile)
            try:
                yield
            finally:
                sys.setprofile(before)
                self._abandon()

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._busy or self._call is not None:
            return func(*args, **kwargs)
        # Written down first: what the function changes is read before.
        with self._quietly():
            self._uses = set()
            text = self._attempt(lambda: self._torch_call(func, args, kwargs))
            uses = frozenset(self._uses)
        result = func(*args, **kwargs)
        if text is not None:
            with self._quietly():
                self._note(text, result, uses, lasting=_changes(func, kwargs))
        return result

    def _profile(self, frame: types.FrameType, event: str, value: Any) -> None:
        if self._busy:
            return
        if self._call is not None:
            if event == "return" and frame is self._call.frame:
                call, self._call = self._call, None
                with self._quietly():
                    self._note(call.text, value if call.made is None else call.made, frozenset(call.uses), lasting=True)
            return
        if event == "call" and (_is_launch(frame) or self._is_foreign(frame)):
            with self._quietly():
                self._uses = set()
                text = self._attempt(lambda: self._foreign_call(frame))
            if text is not None:
                self.last_is_foreign = True
                made = next(iter(frame.f_locals.values())) if frame.f_code.co_name == "__init__" else None
                self._call = _Call(frame, text, self._uses, made)

    @contextmanager
    def _quietly(self) -> Iterator[None]:
        self._busy = True
        try:
            yield
        finally:
            self._busy = False

    def _attempt(self, write: Callable[[], str]) -> str | None:
        try:
            return write()
        except NotTraced as reason:
            self.failure = self.failure or str(reason)
            return None

    def _abandon(self) -> None:
        """A call that did not return is the last statement."""
        if self._call is not None:
            self.statements.append(Statement(self._call.text, (), frozenset(self._call.uses), True))

    def _is_foreign(self, frame: types.FrameType) -> bool:
        return frame.f_code.co_filename != str(self.home) and is_foreign(frame.f_code.co_filename)

    # -------------------------------------------------------------------- writing

    def program(self, outputs: Mapping[str, str], raised: bool) -> Program:
        """What was heard."""
        return Program(
            tuple(self.statements), dict(self.modules), tuple(self.files), dict(self.constants), outputs, raised
        )

    def call_whole(self, function: Callable[..., Any], arguments: Mapping[str, Any], result: Any) -> None:
        """Forget what was heard: the function itself is called."""
        self.statements, self._names = [], {id(v): n for n, v in arguments.items() if isinstance(v, Tensor)}
        self._uses = set()
        text = f"{self._module(self.home)}.{function.__qualname__}({self._arguments((), arguments)})"
        self._note(text, result, frozenset(self._uses), lasting=True)
        self.last_is_foreign = True

    def known(self, value: Any, name: str) -> None:
        """``value`` is called ``name`` from now on."""
        self._names[id(value)] = name
        self._kept.append(value)

    def name_of(self, tensor: Tensor) -> str:
        """The variable that holds a tensor of the result. Raises ``NotTraced`` for one that nothing made."""
        if id(tensor) not in self._names:
            raise NotTraced("a tensor of the result was made where nobody listens")
        return self._names[id(tensor)]

    def _note(self, text: str, result: Any, uses: frozenset[str], *, lasting: bool) -> None:
        """A statement that assigns ``result``, if there is anything in it that can be named."""
        if not lasting:
            self.last_is_foreign = False
        values = result if isinstance(result, tuple | list) else (result,)
        fresh = [value for value in values if _is_named(value, lasting) and id(value) not in self._names]
        if not fresh:
            if lasting:
                self.statements.append(Statement(text, (), uses, True))
            return
        names = []
        for value in values:
            if id(value) not in self._names and _is_named(value, lasting):
                self.known(value, f"t{len(self._kept)}")
                names.append(self._names[id(value)])
            else:
                names.append("_")
        if isinstance(result, tuple | list):
            target = f"{', '.join(names)}," if len(names) == 1 else ", ".join(names)
        else:
            target = names[0]
        makes = tuple(name for name in names if name != "_")
        self.statements.append(Statement(f"{target} = {text}", makes, uses, lasting))

    def _torch_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        name = resolve_name(func) or getattr(func, "__name__", "?")
        if isinstance(func, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
            return f"torch.ops.{str(func).replace('::', '.')}({self._arguments(args, kwargs)})"
        if name.startswith("torch.Tensor."):
            own, method = args[0], name.removeprefix("torch.Tensor.")
            # Properties and questions: whatever they answer is no tensor, or is the property.
            subject = self._value(own)
            if method.endswith(".__get__"):
                return f"{subject}.{method.removesuffix('.__get__')}"
            if method == "__getitem__":
                return f"{subject}[{self._index(args[1])}]"
            if method == "__setitem__":
                return f"{subject}[{self._index(args[1])}] = {self._value(args[2])}"
            return f"{subject}.{method}({self._arguments(args[1:], kwargs)})"
        return f"{name}({self._arguments(args, kwargs)})"

    def _foreign_call(self, frame: types.FrameType) -> str:
        local = dict(frame.f_locals)
        if _is_launch(frame):
            kernel, grid = local["self"], local.get("grid")
            inner = kernel.fn
            where = self._module(Path(inner.__code__.co_filename))
            given = {name: value for name, value in local["kwargs"].items() if name not in ("grid", "warmup")}
            called = self._arguments(local["args"], given)
            return f"{where}.{inner.__name__}[{self._value(_grid(grid, local))}]({called})"
        code = frame.f_code
        if "<" in code.co_qualname:
            raise NotTraced(f"{code.co_qualname} is no function of a module")
        where = self._module(Path(code.co_filename))
        function = _function(frame)
        positional, named = _given(frame, function)
        if code.co_name == "__init__":
            return f"{where}.{code.co_qualname.removesuffix('.__init__')}({self._arguments(positional[1:], named)})"
        return f"{where}.{code.co_qualname}({self._arguments(positional, named)})"

    def _module(self, file: Path) -> str:
        """The variable of the module that is executed from ``file``."""
        dotted = module_name(file)
        if dotted is None:
            raise NotTraced(f"{file.name} lies in no package that could be imported")
        self.files[file] = None
        variable = dotted.rpartition(".")[2]
        while self.modules.get(variable, dotted) != dotted or variable in self._names.values():
            variable += "_"
        self.modules[variable] = dotted
        return variable

    def _arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        parts = [self._value(value) for value in args]
        parts += [f"{name}={self._device_or_value(name, value)}" for name, value in kwargs.items()]
        return ", ".join(parts)

    def _device_or_value(self, name: str, value: Any) -> str:
        return "DEVICE" if name == "device" and value is not None else self._value(value)

    def _index(self, index: Any) -> str:
        if isinstance(index, tuple):
            return ", ".join(map(self._value, index)) + ("," if len(index) == 1 else "") if index else "()"
        return self._value(index)

    def _value(self, value: Any) -> str:
        if id(value) in self._names and not isinstance(value, int | float | str | bool | types.NoneType):
            name = self._names[id(value)]
            self._uses.add(name)
            return name
        if isinstance(value, Tensor):
            name = f"c{len(self.constants)}"
            self.constants[name] = value.detach().clone()
            self.known(value, name)
            self._uses.add(name)
            return name
        return self._plain(value)

    def _plain(self, value: Any) -> str:
        if value is None or value is Ellipsis or isinstance(value, bool | int | str):
            return repr(value) if value is not Ellipsis else "..."
        if isinstance(value, float):
            return repr(value) if math.isfinite(value) else f'float("{value}")'
        if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
            return str(value)
        if isinstance(value, torch.device):
            return "DEVICE"
        if isinstance(value, slice):
            return f"slice({', '.join(map(self._value, (value.start, value.stop, value.step)))})"
        if isinstance(value, tuple | list):
            parts = [self._value(item) for item in value]
            if isinstance(value, list):
                return f"[{', '.join(parts)}]"
            return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"
        if isinstance(value, dict) and all(isinstance(key, str) for key in value):
            return f"{{{', '.join(f'{key!r}: {self._value(item)}' for key, item in value.items())}}}"
        raise NotTraced(
            f"an argument of type {type(value).__module__}.{type(value).__qualname__} cannot be written down"
        )


def _is_named(value: Any, foreign: bool) -> bool:
    """Whether a result gets a variable: a tensor, or an object that another package made."""
    plain = isinstance(value, int | float | str | bool | types.NoneType | tuple | list | dict | torch.dtype)
    return isinstance(value, Tensor) or (foreign and not plain and is_foreign(_file_of(type(value))))


def _file_of(kind: type) -> str:
    module = sys.modules.get(kind.__module__)
    found = getattr(module, "__file__", None)
    if found is None:
        functions = [value for value in vars(kind).values() if isinstance(value, types.FunctionType)]
        found = functions[0].__code__.co_filename if functions else None
    return found or "<unknown>"


def _changes(func: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether a torch function changes one of its arguments."""
    name = getattr(func, "__name__", "").partition(".")[0]
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or "out" in kwargs


def _is_launch(frame: types.FrameType) -> bool:
    """A kernel launched by its grid, in our emulator or by the installed Triton."""
    if frame.f_code.co_qualname != "JITFunction.run":
        return False
    caller = frame.f_back
    return caller is None or caller.f_code.co_qualname != "CompiledKernel._run"


def _grid(grid: Any, local: Mapping[str, Any]) -> Any:
    if callable(grid):
        raise NotTraced("a grid that is a function")
    return local["kwargs"].get("grid", grid) if grid is None else grid


def _function(frame: types.FrameType) -> Callable[..., Any] | None:
    """The function of a frame, found by its name in its module; None where that is another."""
    found: Any = frame.f_globals
    for part in frame.f_code.co_qualname.split("."):
        found = found.get(part) if isinstance(found, dict) else getattr(found, part, None)
    found = inspect.unwrap(found) if callable(found) else None
    return found if getattr(found, "__code__", None) is frame.f_code else None


def _given(frame: types.FrameType, function: Callable[..., Any] | None) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a call that has just begun, without those that are their defaults."""
    code, local = frame.f_code, frame.f_locals
    names = code.co_varnames
    count, only = code.co_argcount, code.co_kwonlyargcount
    defaults: dict[str, Any] = {}
    if function is not None:
        parameters = inspect.signature(function).parameters.values()
        defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    kept = [n for n in names[:count] if n not in defaults or not _is_default(local[n], defaults[n])]
    rest_at = count + only
    rest = list(local[names[rest_at]]) if code.co_flags & inspect.CO_VARARGS else []
    if rest:
        return [local[n] for n in names[:count]] + rest, _keywords(frame, defaults, rest_at + 1)
    leading = next((i for i, n in enumerate(names[:count]) if n not in kept), count)
    positional = [local[n] for n in names[:leading]]
    named = {n: local[n] for n in names[leading:count] if n in kept}
    return positional, named | _keywords(frame, defaults, rest_at + bool(code.co_flags & inspect.CO_VARARGS))


def _keywords(frame: types.FrameType, defaults: Mapping[str, Any], starred_at: int) -> dict[str, Any]:
    code, local = frame.f_code, frame.f_locals
    first = code.co_argcount
    only = code.co_varnames[first : first + code.co_kwonlyargcount]
    found = {n: local[n] for n in only if n not in defaults or not _is_default(local[n], defaults[n])}
    if code.co_flags & inspect.CO_VARKEYWORDS:
        found |= local[code.co_varnames[starred_at]]
    return found


def _is_default(value: Any, default: Any) -> bool:
    plain = isinstance(value, int | float | str | bool | types.NoneType)
    return value is default or (plain and type(value) is type(default) and value == default)


# ---------------------------------------------------------------------------- packages


@cache
def is_foreign(file: str) -> bool:
    """Whether a source file belongs to a package that is neither ours, nor torch, nor Python's own."""
    if file.startswith("<"):
        return False
    path = Path(file)
    apart = [_OURS, *(_OURS.parent / name for name in ("oracle", "suites")), Path(torch.__file__).parent]
    compilers = [found for name in ("triton", "tokenspeed_triton") if (found := folder(name)) is not None]
    if any(place in path.parents for place in (*apart, *compilers)):
        return False
    library = {Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")}
    packages = {Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")}
    return any(p in path.parents for p in packages) or not any(p in path.parents for p in library)


def module_name(file: Path) -> str | None:
    """The dotted name by which a source file is imported, or None if it is on no path."""
    places = [Path(entry or ".").resolve() for entry in sys.path]
    places += [found.parent for package in VARIABLES if (found := folder(package)) is not None]
    inside = [place for place in places if place in file.parents]
    if not inside:
        return None
    deepest = max(inside, key=lambda place: len(place.parts))
    parts = file.relative_to(deepest).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
