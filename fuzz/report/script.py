"""The text of a reproducer script: calls as a target makes them, tensors as data, and what must come of them."""

from __future__ import annotations

import base64
import textwrap
import types
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fuzz import buffers
from fuzz.engine import loader
from fuzz.report import standalone, standins
from fuzz.report.expected import Expectation
from fuzz.report.trace import Program, is_foreign, module_name
from oracle.bits import bits

MOST_EMBEDDED = 256 * 1024
"""Bytes of packed tensors, as text, that a script holds; more go into a file beside it."""
DATA_FILE = "tensors.bin"
MARK = "# --- copied from here\n"
WIDTH = 110


@dataclass(frozen=True)
class Argument:
    """A buffer as a run finds it, and what an operation that writes in place must leave in it."""

    buffer: buffers.Buffer
    wanted: Tensor | None = None
    """the image that it must have afterwards, where that is another"""


@dataclass(frozen=True)
class TracedRun:
    """One execution: its program, its arguments by name, and what its outputs must be."""

    name: str
    program: Program
    arguments: Mapping[str, Argument]
    expected: Mapping[str, Expectation]
    poison: buffers.Poison


@dataclass(frozen=True)
class Reproduction:
    """What a script is made of. ``same``: pairs of runs with the same bits, and what else is the case."""

    title: str
    about: Sequence[str]
    runs: Sequence[TracedRun]
    same: Sequence[tuple[str, str, str]]
    asked: Mapping[str, types.ModuleType]
    """modules that were imported while the calls ran"""
    gpu: bool
    raises: bool
    note: str


@dataclass
class _Store:
    """Tensors packed, each distinct one once."""

    texts: dict[bytes, str] = field(default_factory=dict)

    def add(self, tensor: Tensor) -> str:
        """The expression of a tensor's elements."""
        flat = tensor.detach().cpu().contiguous().flatten()
        packed = zlib.compress(flat.view(torch.uint8).numpy().tobytes(), 9) if flat.numel() else zlib.compress(b"", 9)
        name = self.texts.setdefault(packed, f"D{len(self.texts)}")
        return f"Data({tensor.dtype}, {name})"

    def render(self) -> tuple[str, bytes]:
        """The definitions, and the file beside the script, empty where the text holds everything."""
        if sum(map(len, self.texts)) * 4 // 3 <= MOST_EMBEDDED:
            lines = [f"{name} = {_wrapped(base64.b64encode(packed).decode())}" for packed, name in self.texts.items()]
            return "\n".join(lines), b""
        lines, start = [], 0
        for packed, name in self.texts.items():
            lines.append(f"{name} = ({DATA_FILE!r}, {start}, {len(packed)})")
            start += len(packed)
        return "\n".join(lines), b"".join(self.texts)


def _wrapped(text: str) -> str:
    if len(text) <= WIDTH:
        return repr(text)
    parts = [f"    {text[i : i + WIDTH]!r}" for i in range(0, len(text), WIDTH)]
    return "(\n" + "\n".join(parts) + "\n)"


def render(what: Reproduction) -> tuple[str, bytes]:
    """The script, and the bytes of ``DATA_FILE`` beside it, if it needs any."""
    store = _Store()
    calls: dict[str, str] = {}
    runs = [_run(run, calls, store) for run in what.runs]
    tables = _imports(what.runs, what.asked)
    definitions, beside = store.render()
    parts = [
        _head(what),
        "# --- the call",
        *calls.values(),
        "# --- how it is shown",
        _copied(standalone.__file__),
        *([_copied(standins.__file__)] if tables is not None else []),
        *(_copied(path) for path in (tables.texts if tables is not None else ())),
        "# --- the tensors: dtype, then elements as bytes, compressed",
        definitions,
        "# --- the runs",
        *_case(what, runs),
        _tail(tables),
    ]
    return "\n\n".join(parts) + "\n", beside


def _head(what: Reproduction) -> str:
    about = "\n".join(textwrap.fill(line, WIDTH, break_long_words=False) for line in what.about)
    text = f"{what.title}\n\n{about}".replace("\\", "\\\\").replace('"""', "'''")
    return f'#!/usr/bin/env python3\n"""{text}\n"""\n\nfrom __future__ import annotations'


def _copied(file: str | Path) -> str:
    text = Path(file).read_text(encoding="utf-8")
    return text.partition(MARK)[2].replace("from __future__ import annotations\n", "").strip()


def _run(run: TracedRun, calls: dict[str, str], store: _Store) -> str:
    """The expression of a run; its call goes to ``calls``, each text once."""
    body = _call_body(run.program)
    name = next((known for known, text in calls.items() if text.partition("\n")[2] == body), f"call_{run.name}")
    calls.setdefault(name, f"def {name}(t: dict[str, Tensor]) -> dict[str, Tensor]:\n{body}")
    used = {name for statement in run.program.needed for name in statement.uses}
    arguments = {key: _buffer(a.buffer, a.wanted, store) for key, a in run.arguments.items()}
    constants = {key: _constant(c, store) for key, c in run.program.constants.items() if key in used}
    expected = {key: _expected(e, store) for key, e in run.expected.items()}
    return (
        f"Run(\n    {run.name!r},\n    {name},\n    {_table(arguments)},\n    {_table(constants)},\n"
        f"    {_table(expected)},\n    POISON[{run.poison.value!r}],\n)"
    )


def _call_body(program: Program) -> str:
    lines = [f"    {_import(variable, dotted)}" for variable, dotted in sorted(program.modules.items())]
    used = {name for statement in program.needed for name in statement.uses} | set(program.outputs.values())
    made = {name for statement in program.needed for name in statement.makes}
    lines += [f"    {name} = t[{name!r}]" for name in sorted(used - made)]
    lines += [f"    {statement.text}" for statement in program.needed]
    outputs = ", ".join(f"{name!r}: {variable}" for name, variable in program.outputs.items())
    return "\n".join([*lines, f"    return {{{outputs}}}"])


def _import(variable: str, dotted: str) -> str:
    return f"import {dotted}" if variable == dotted else f"import {dotted} as {variable}"


def _buffer(buffer: buffers.Buffer, wanted: Tensor | None, store: _Store) -> str:
    view, lengths = buffer.view, [high - low for low, high in buffer.watched]
    storage = buffer.storage.view(view.dtype)
    pieces = [f"({low}, {store.add(storage[low:high])})" for low, high in buffer.watched]
    after = "None"
    if wanted is not None:
        after = _tuple([store.add(part.view(view.dtype)) for part in wanted.split(lengths)])
    place = f"{tuple(view.shape)}, {view.stride()}, {view.storage_offset()}"
    return f"Buffer({storage.numel()}, {view.dtype}, {place}, {_tuple(pieces)}, {after})"


def _constant(tensor: Tensor, store: _Store) -> str:
    flat = tensor.contiguous()
    return f"Buffer({flat.numel()}, {flat.dtype}, {tuple(flat.shape)}, {flat.stride()}, 0, ((0, {store.add(flat)}),))"


def _expected(found: Expectation, store: _Store) -> str:
    allowed = "None" if found.allowed is None else store.add(found.allowed)
    shape = tuple(found.values.shape)
    return f"Expected({found.dtype}, {shape}, {store.add(found.values)}, {allowed}, {found.step})"


def _tuple(parts: Sequence[str]) -> str:
    return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"


def _table(entries: Mapping[str, str]) -> str:
    lines = [f"        {name!r}: {text}," for name, text in entries.items()]
    return "\n".join(["{", *lines, "    }"]) if lines else "{}"


def _case(what: Reproduction, runs: Sequence[str]) -> list[str]:
    lines = ["POISON: dict[str, dict[torch.dtype, int]] = {"]
    for poison in dict.fromkeys(run.poison for run in what.runs):
        patterns = {str(dtype): f"{buffers.pattern(dtype, poison):#x}" for dtype in _POISONED}
        lines.append(f"    {poison.value!r}: {{{', '.join(f'{name}: {value}' for name, value in patterns.items())}}},")
    listed = textwrap.indent(",\n".join(runs), "        ")
    same = "".join(f"\n        {pair!r}," for pair in what.same)
    case = (
        f"CASE = Case(\n    title={what.title!r},\n    runs=[\n{listed},\n    ],\n    same=[{same}\n    ],\n"
        f"    gpu={what.gpu},\n    raises={what.raises},\n    note={what.note!r},\n)"
    )
    return ["\n".join([*lines, "}"]), case]


_POISONED = tuple(dtype for dtype in buffers.DTYPE_NAMES if bits(torch.empty(0, dtype=dtype)) is not None)


def _tail(tables: _Imports | None) -> str:
    if tables is None:
        return 'if __name__ == "__main__":\n    sys.exit(main(CASE))'
    return f'{tables.render()}\n\n\nif __name__ == "__main__":\n    sys.exit(main(CASE, prepare))'


# ------------------------------------------------------------------- stand-ins of imports


@dataclass
class _Imports:
    """What a script needs to know of imports: the files to execute, by module; what others of their imports find, as
    expressions; texts that define functions; and modules whose functions those stand for."""

    files: list[str] = field(default_factory=list)
    answers: dict[str, dict[str, str]] = field(default_factory=dict)
    texts: dict[Path, None] = field(default_factory=dict)
    whole: dict[str, None] = field(default_factory=dict)

    def render(self) -> str:
        """The function that prepares them."""
        lines = [f"    {name!r}: {_table(found)}," for name, found in self.answers.items()]
        answers = "\n".join(["ANSWERS: dict[str, dict[str, Any]] = {", *lines, "}"])
        return f"{answers}\n\n\ndef prepare() -> None:\n    importable({self.files!r}, ANSWERS, {list(self.whole)!r})"


def _imports(runs: Iterable[TracedRun], asked: Mapping[str, types.ModuleType]) -> _Imports | None:
    """What the adapter's own loader gave the files that it executed, as far as it can be written down: constants,
    functions of ours that return one, and such as say which text defines them. None where no file was."""
    todo = [file for run in runs for file in run.program.files if file in loader.imported]
    found = _Imports()
    done: set[Path] = set()
    while todo:
        file = todo.pop(0)
        dotted = module_name(file)
        if file in done or dotted is None:
            continue
        done.add(file)
        found.files.append(dotted)
        for name, module in loader.imported.get(file, {}).items():
            sources = {path for value in vars(module).values() if (path := _source(value)) is not None}
            todo += sources
            if not any(module_name(path) == name for path in sources):
                _answer_for(name, module, found)
    for name, module in asked.items():
        if name not in found.answers:
            _answer_for(name, module, found)
    for run in runs:
        for where, kind in run.program.classes:
            found.answers.setdefault(where, {})[kind] = f"type({kind!r}, (), {{}})"
    found.answers = {name: answers for name, answers in found.answers.items() if name not in found.files}
    return found if found.files else None


def _source(value: object) -> Path | None:
    """The file of a function of another package."""
    function = getattr(value, "fn", value)
    code = getattr(function, "__code__", None)
    return Path(code.co_filename) if code is not None and is_foreign(code.co_filename) else None


def _answer_for(name: str, module: types.ModuleType, found: _Imports) -> None:
    for key, value in vars(module).items():
        if key.startswith("__") or _source(value) is not None:
            continue
        text = getattr(value, "standalone", None)
        if isinstance(text, Path):
            found.texts[text] = None
            found.whole[name] = None
            answer: str | None = value.__name__
        else:
            answer = _answer(value)
        if answer is not None:
            found.answers.setdefault(name, {})[key] = answer


def _answer(value: object) -> str | None:
    """The expression of what a module of ours holds, if it is as simple as that."""
    if isinstance(value, bool | int | str | torch.dtype):
        return str(value) if isinstance(value, torch.dtype) else repr(value)
    if isinstance(value, types.ModuleType | type):
        return None
    function: Any = value if isinstance(value, types.FunctionType) else None
    kind = "constantly"
    if function is None and "__getattr__" in vars(type(value)):
        # A table of variables: each is asked for what it holds.
        function, kind = getattr(getattr(value, "ANY", None), "get", None), "Variables"
    try:
        answer = function()
    except Exception:  # noqa: BLE001 - asked out of its place it may fail in any way
        return None
    return f"{kind}({answer!r})" if answer is None or isinstance(answer, bool | int | str) else None
