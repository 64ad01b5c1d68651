"""What a target does on one case, as statements: its torch calls, and its calls into the kernels' own packages.

A target is an adapter between our arguments and a kernel. While it runs, each torch function that it calls is noted,
and so is each Python function of another package; what happens inside those is theirs. Control flow is gone: the
statements are the path that this case takes. So no target needs a hand-written example of how it is called.
"""

from __future__ import annotations

import dis
import inspect
import math
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name

from fuzz.engine import loader
from fuzz.sources import VARIABLES, folder

T = TypeVar("T")

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
    before; ``classes`` are module and name of those that an adapter's own stand for. ``raised``: the last statement did
    not return.
    """

    statements: tuple[Statement, ...]
    modules: Mapping[str, str]
    files: tuple[Path, ...]
    constants: Mapping[str, Tensor]
    classes: tuple[tuple[str, str], ...]
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
        self.classes: dict[tuple[str, str], None] = {}
        self._state: dict[str, dict[str, Any]] = {}
        self._names: dict[int, str] = {}
        self._kept: list[Any] = []
        self._uses: set[str] = set()
        self._call: _Call | None = None
        self._busy = False
        self.raised: _Call | None = None
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
                if _raises(frame):
                    self.raised = call
                    return
                with self._quietly():
                    self._seen_all()
                    self._note(call.text, value if call.made is None else call.made, frozenset(call.uses), lasting=True)
            return
        if event == "call" and (_is_launch(frame) or self._is_foreign(frame)):
            with self._quietly():
                self._uses = set()
                self._attempt(self._follow_all)
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

    def _attempt(self, write: Callable[[], T]) -> T | None:
        if self.raised is not None:
            self.failure = self.failure or "the adapter goes on after a call has raised, as ranks do that wait"
        try:
            return write()
        except NotTraced as reason:
            self.failure = self.failure or str(reason)
            return None

    def _abandon(self) -> None:
        """A call that did not return is the last statement."""
        call = self._call or self.raised
        if call is not None:
            self.statements.append(Statement(call.text, (), frozenset(call.uses), True))

    def _is_foreign(self, frame: types.FrameType) -> bool:
        return frame.f_code.co_filename != str(self.home) and is_foreign(frame.f_code.co_filename)

    # -------------------------------------------------------------------- writing

    def program(self, outputs: Mapping[str, str], raised: bool) -> Program:
        """What was heard."""
        return Program(
            statements=tuple(self.statements),
            modules=dict(self.modules),
            files=tuple(self.files),
            constants=dict(self.constants),
            classes=tuple(self.classes),
            outputs=outputs,
            raised=raised,
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
        """What stands between the brackets."""
        if isinstance(index, tuple) and index:
            return ", ".join(map(self._index, index)) + ("," if len(index) == 1 else "")
        if isinstance(index, slice):
            start, stop = ("" if end is None else self._value(end) for end in (index.start, index.stop))
            return f"{start}:{stop}" + ("" if index.step is None else f":{self._value(index.step)}")
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
        if isinstance(value, torch.Size):
            return str(tuple(value))
        return self._object(value)

    # -------------------------------------------------------------------- objects

    def _object(self, value: Any) -> str:
        """A function of another package, or an object, which gets a variable and its attributes one by one."""
        if isinstance(value, _Constantly):
            return f"constantly({self._value(value.answer)})"
        if isinstance(value, types.MethodType):
            return f"{self._value(value.__self__)}.{value.__name__}"
        if isinstance(value, partial):
            called = self._arguments(value.args, value.keywords)
            return f"partial({self._value(value.func)}, {called})"
        if (path := self._path_of(value)) is not None:
            return path
        if isinstance(value, types.FunctionType):
            return f"constantly({self._value(_constant(value))})"
        name = f"o{len(self._kept)}"
        kind = self._kind_of(value)
        self.known(value, name)
        self.statements.append(Statement(f"{name} = {kind}", (name,), frozenset(), False))
        self._state[name] = {}
        self._follow(value, name)
        self._uses.add(name)
        return name

    def _path_of(self, value: Any) -> str | None:
        """A function, kernel or class of another package by its module."""
        inner = getattr(value, "fn", value)
        code = getattr(inspect.unwrap(inner) if callable(inner) else inner, "__code__", None)
        if isinstance(value, type):
            file = _file_of(value)
        elif code is not None and not isinstance(value, types.MethodType):
            file = code.co_filename
        else:
            return None
        if not is_foreign(file) or file == str(self.home) or "<" in inner.__qualname__:
            return None
        return f"{self._module(Path(file))}.{inner.__qualname__}"

    def _kind_of(self, value: Any) -> str:
        """The expression of an object without attributes: of its class, or plain where the class is an adapter's."""
        kind = type(value)
        if (path := self._path_of(kind)) is not None:
            return f"{path}.__new__({path})"
        stands_for = loader.stands_for(kind)
        if stands_for is not None:
            module, name = stands_for
            self.classes[stands_for] = None
            return f"importlib.import_module({module!r}).{name}()"
        if kind is types.SimpleNamespace or is_dataclass(value) or not is_foreign(_file_of(kind)):
            return "SimpleNamespace()"
        raise NotTraced(f"an argument of type {kind.__module__}.{kind.__qualname__} cannot be written down")

    def _follow(self, value: Any, name: str) -> None:
        """Write down the attributes of an object that are not what they were when it was seen last."""
        seen, before = self._state[name], self._uses
        for attribute, held in _attributes(value).items():
            if attribute in seen and _is_default(held, seen[attribute]):
                continue
            self._uses = set()
            text = f"{name}.{attribute} = {self._value(held)}"
            self.statements.append(Statement(text, (), frozenset(self._uses | {name}), True))
            seen[attribute] = held
        self._uses = before

    def _follow_all(self) -> None:
        """Before another package sees them: what the adapter has changed in objects that it has seen."""
        for value in self._objects():
            self._follow(value, self._names[id(value)])

    def _seen_all(self) -> None:
        """After another package has had them: what it has made of objects is its own affair."""
        for value in self._objects():
            self._state[self._names[id(value)]] = dict(_attributes(value))

    def _objects(self) -> list[Any]:
        """Objects that were written down and whose attributes can change."""
        return [v for v in self._kept if self._names[id(v)] in self._state and not is_dataclass(v)]


def _attributes(value: Any) -> dict[str, Any]:
    """What an object of an adapter answers: attributes, and of a dataclass properties and methods without arguments."""
    found = dict(getattr(value, "__dict__", {}))
    if not is_dataclass(value):
        return found
    for name, member in inspect.getmembers(type(value)):
        if name.startswith("__") or name in found:
            continue
        if isinstance(member, property):
            found[name] = getattr(value, name)
        elif isinstance(member, types.FunctionType):
            found[name] = _Constantly(_constant(partial(member, value)))
    return found


@dataclass(frozen=True, eq=False)
class _Constantly:
    """A method that always gives the same."""

    answer: Any


def _constant(function: Callable[..., Any]) -> Any:
    """What a function of an adapter gives, whatever it is asked. Raises ``NotTraced`` if it is not that simple."""
    for arguments in ((), (None,)):
        try:
            return function(*arguments)
        except Exception:  # noqa: BLE001 - it was not meant to be called like this
            continue
    raise NotTraced("an argument is a function that cannot be written down")


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


def _raises(frame: types.FrameType) -> bool:
    """Whether a frame that is left is left by an exception."""
    last = dis.opname[frame.f_code.co_code[frame.f_lasti]]
    return "RETURN" not in last and "YIELD" not in last


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
