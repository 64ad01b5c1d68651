"""What every reproducer script carries: it rebuilds tensors from data, runs calls on them, and compares.

The text below this docstring is copied into the scripts as it stands, so that it may use torch and Python's own library
and nothing else. ``script`` writes what stands around it: the calls, and ``CASE``.
"""

# --- copied from here
from __future__ import annotations

import base64
import importlib  # noqa: F401 - for calls
import os
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial  # noqa: F401 - for calls
from pathlib import Path
from types import SimpleNamespace  # noqa: F401 - for calls
from typing import Any

import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
GUARD_BYTES = 4096
SHOWN = 4


def integers(tensor: Tensor) -> Tensor:
    """The same memory as integers of the same width."""
    return tensor.view(INTEGERS[tensor.element_size()])


def constantly(answer: Any) -> Callable[..., Any]:
    """A function that always gives the same."""
    return lambda *args, **kwargs: answer


@dataclass(frozen=True)
class Data:
    """Elements, packed: text in the script, or a place in the file beside it."""

    dtype: torch.dtype
    packed: str | tuple[str, int, int]

    def tensor(self) -> Tensor:
        """One dimension, on the CPU."""
        if isinstance(self.packed, str):
            compressed = base64.b64decode(self.packed)
        else:
            name, start, length = self.packed
            with open(Path(__file__).with_name(name), "rb") as file:
                file.seek(start)
                compressed = file.read(length)
        raw = bytearray(zlib.decompress(compressed))
        return torch.frombuffer(raw, dtype=torch.uint8).view(self.dtype) if raw else torch.empty(0, dtype=self.dtype)


@dataclass(frozen=True)
class Buffer:
    """An argument: a view into a storage whose other elements are poison. ``pieces``: what the storage holds, where;
    ``wanted``: what it holds after the call, where that is not what it held before.
    """

    elements: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    pieces: tuple[tuple[int, Data], ...]
    wanted: tuple[Data, ...] | None = None

    def built(self) -> Tensor:
        """The storage, one dimension."""
        storage = torch.empty(self.elements, dtype=self.dtype, device=DEVICE)
        for start, data in self.pieces:
            values = data.tensor()
            integers(storage)[start : start + len(values)] = integers(values).to(DEVICE)
        return storage

    def view(self, storage: Tensor) -> Tensor:
        """The argument."""
        return torch.as_strided(storage, self.shape, self.strides, self.offset)

    def image(self, storage: Tensor) -> list[Tensor]:
        """A copy of what the pieces of the storage hold, as integers on the CPU."""
        lengths = [len(data.tensor()) for _, data in self.pieces]
        starts = [start for start, _ in self.pieces]
        return [integers(storage)[a : a + n].cpu().clone() for a, n in zip(starts, lengths, strict=True)]

    def inside(self, position: int) -> str:
        """An element of the storage in words."""
        first = position - self.offset
        reach = (
            1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)) if 0 not in self.shape else 0
        )
        return f"element {first}" + ("" if 0 <= first < reach else ", outside of the argument")


@dataclass(frozen=True)
class Expected:
    """An output. ``allowed``: how far each element may be from ``values``, inf where anything is right, before it is
    rounded by ``step`` of a step of its dtype; None: not at all."""

    dtype: torch.dtype | None
    shape: tuple[int, ...]
    values: Data
    allowed: Data | None
    step: float = 0.5


@dataclass(frozen=True)
class Run:
    """One execution of ``call`` on its own tensors. ``poison``: what memory holds that the call itself allocates."""

    name: str
    call: Callable[[dict[str, Tensor]], dict[str, Tensor]]
    buffers: dict[str, Buffer]
    constants: dict[str, Buffer]
    expected: dict[str, Expected]
    poison: dict[torch.dtype, int]


@dataclass(frozen=True)
class Case:
    """Everything that a script runs. ``same``: pairs of runs whose outputs must have the same bits, as far as the
    second goes, and what it means if they do not."""

    title: str
    runs: list[Run]
    same: list[tuple[str, str, str]]
    gpu: bool
    raises: bool
    """an exception is what was found"""
    note: str = ""
    timeout_s: float = 120.0


@dataclass
class Done:
    """What came of a run."""

    outputs: dict[str, Tensor]
    wrong: list[str] = field(default_factory=list)
    unwritten: dict[str, Tensor] = field(default_factory=dict)


@contextmanager
def poisoned(pattern: dict[torch.dtype, int]) -> Iterator[list[tuple[Tensor, int]]]:
    """Within the block torch.empty and its kin give memory that holds ``pattern``, between guards that do; yields
    the guards."""
    guards: list[tuple[Tensor, int]] = []

    def wrapped(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def allocate(*args: Any, **kwargs: Any) -> Tensor:
            plain = original(*args, **kwargs)
            if plain.layout is not torch.strided or plain.dtype not in pattern or not plain.numel():
                return plain
            reach = 1 + sum((n - 1) * s for n, s in zip(plain.shape, plain.stride(), strict=True))
            guard = -(-max(GUARD_BYTES, plain.stride(0) * plain.element_size() if plain.dim() else 0) // 256) * 256
            guard //= plain.element_size()
            storage = saved["empty"](reach + 2 * guard, dtype=plain.dtype, device=plain.device)
            integers(storage).fill_(pattern[plain.dtype])
            guards.extend(
                (side, pattern[plain.dtype]) for side in (integers(storage)[:guard], integers(storage)[guard + reach :])
            )
            return torch.as_strided(storage, plain.shape, plain.stride(), guard)

        return allocate

    saved = {name: getattr(torch, name) for name in ("empty", "empty_like", "empty_strided")}
    saved_new = Tensor.new_empty
    try:
        for name, original in saved.items():
            setattr(torch, name, wrapped(original))
        Tensor.new_empty = wrapped(saved_new)  # type: ignore[method-assign]
        yield guards
    finally:
        for name, original in saved.items():
            setattr(torch, name, original)
        Tensor.new_empty = saved_new  # type: ignore[method-assign]


def execute(run: Run) -> Done:
    """Build the tensors, call, and compare with what is expected. What the call raises passes through."""
    storages = {name: buffer.built() for name, buffer in (run.buffers | run.constants).items()}
    views = {name: buffer.view(storages[name]) for name, buffer in (run.buffers | run.constants).items()}
    before = {name: buffer.image(storages[name]) for name, buffer in run.buffers.items()}
    with poisoned(run.poison) as guards:
        done = Done(run.call(views))
        if DEVICE == "cuda":
            torch.cuda.synchronize()
    for name, buffer in run.buffers.items():
        done.wrong += changed(name, buffer, before[name], buffer.image(storages[name]))
    spilled = sum(int((guard != value).sum()) for guard, value in guards)
    if spilled:
        done.wrong.append(f"{spilled} elements around memory that the call allocated were overwritten")
    for name, value in done.outputs.items():
        done.wrong += compared(name, run.expected[name], value) if name in run.expected else []
        done.unwritten[name] = integers(value.contiguous()).cpu() == run.poison.get(value.dtype, 0)
    return done


def changed(name: str, buffer: Buffer, before: list[Tensor], after: list[Tensor]) -> list[str]:
    """What an argument holds after the call that it should not."""
    wanted = before if buffer.wanted is None else [integers(data.tensor()) for data in buffer.wanted]
    found = []
    for (start, _), old, want, new in zip(buffer.pieces, before, wanted, after, strict=True):
        wrong = (new != want).nonzero().flatten()
        if not len(wrong):
            continue
        first = int(wrong[0])
        untouched = int((new == old)[wrong].sum())
        where, bits = buffer.inside(start + first), f"bits {int(new[first]):#x} instead of {int(want[first]):#x}"
        what = f"{name}: {len(wrong)} elements are not what they must be ({untouched} of them unchanged by the call)"
        found.append(f"{what}, the first at {where}: {bits}")
    return found


def compared(name: str, expected: Expected, value: Tensor) -> list[str]:
    """The worst elements of an output that are not what is expected."""
    if tuple(value.shape) != expected.shape or expected.dtype not in (None, value.dtype):
        return [f"{name}: {value.dtype} {list(value.shape)}; expected {expected.dtype} {list(expected.shape)}"]
    actual, wanted = value.cpu().contiguous(), expected.values.tensor().view(expected.shape)
    if expected.allowed is None:
        exact = wanted.dtype is torch.int64 and not actual.is_floating_point()
        same = actual.long() == wanted if exact else integers(actual) == integers(wanted)
        wrong, excess = ~same, (~same).double()
        allowed = torch.zeros(expected.shape, dtype=torch.float64)
    else:
        info, seen = torch.finfo(actual.dtype), actual.double()
        allowed = expected.allowed.tensor().view(expected.shape)
        reach = wanted.abs().nan_to_num(nan=0.0, posinf=0.0) + allowed
        allowed = allowed + reach * info.eps * expected.step + info.smallest_normal * info.eps
        allowed = allowed.masked_fill(reach >= info.max * (1 - info.eps), float("inf"))
        right = ((seen - wanted).abs() <= allowed) | (seen == wanted) | (allowed == float("inf"))
        wrong = ~torch.where(wanted.isnan(), ~seen.isfinite(), right)
        excess = ((seen - wanted).abs() / allowed).nan_to_num(nan=float("inf"), posinf=float("inf"))
    if not bool(wrong.any()):
        return []
    places = wrong.nonzero()
    order = excess[wrong].argsort(descending=True, stable=True)
    lines = [f"{name}: {len(places)} of {wrong.numel()} elements are wrong; the worst:"]
    for place in places[order[:SHOWN]].tolist():
        at = tuple(place)
        said = f"expected {shown(wanted[at])}, got {shown(actual[at])}, allowed {float(allowed[at]):.3g}"
        lines.append(f"    {name}{place}: {said}")
    return lines


def shown(element: Tensor) -> str:
    """A number."""
    return f"{float(element):.7g}" if element.is_floating_point() else str(int(element))


def main(case: Case, prepare: Callable[[], None] = lambda: None) -> int:
    """Run everything in a process of its own. 1: something is wrong, 0: nothing is, 2: it cannot run here."""
    if "--here" not in sys.argv:
        return apart(case)
    print(case.title)
    if case.gpu and DEVICE != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        print("this kernel needs a GPU that torch can use; on a CPU: attn-oracle replay finding.json")
        return 2
    prepare()
    done: dict[str, Done] = {}
    wrong: list[str] = []
    for run in case.runs:
        try:
            done[run.name] = execute(run)
        except ImportError as error:
            print(f"cannot be imported: {error}")
            return 2
        except Exception as error:  # noqa: BLE001 - whatever the call raises is what is shown
            said = f"{run.name}: the call raises {type(error).__name__}: {' '.join(str(error).split())[:300]}"
            if not (case.raises or wrong or of_the_device(error)):
                print(f"{said}; that is not what was found")
                return 2
            wrong.append(said)
            break
        wrong += [f"{run.name}: {line}" for line in done[run.name].wrong]
    wrong += between(case, done)
    print("\n".join(wrong) if wrong else "nothing is wrong: the fault does not show")
    if case.note:
        print(case.note)
    return 1 if wrong else 0


def of_the_device(error: Exception) -> bool:
    """Whether a GPU says that a kernel went wrong, such as by an illegal access."""
    return any(words in str(error) for words in ("CUDA error: ", "HIP error: ", "Triton Error ["))


def between(case: Case, done: dict[str, Done]) -> list[str]:
    """What two runs say together. Where identical calls differ, other differences say nothing."""
    found: list[str] = []
    for first, second, words in case.same:
        if first in done and second in done and not found:
            found += differences(done[first].outputs, done[second].outputs, words)
    if "first" in done and "second" in done:
        for name, mask in done["first"].unwritten.items():
            both = mask & done["second"].unwritten[name]
            places = both.nonzero()
            if len(places):
                where = f"the first at {places[0].tolist()}"
                found.append(f"{name}: {len(places)} of {both.numel()} elements were not written, {where}")
    return found


def differences(a: dict[str, Tensor], b: dict[str, Tensor], words: str) -> list[str]:
    """Elements of the outputs ``b`` that are not those of ``a``, bit for bit."""
    found = []
    for name, value in b.items():
        if a[name].shape[1:] != value.shape[1:]:
            continue
        x, y = (integers(side[: len(value)].contiguous()).cpu() for side in (a[name], value))
        differ = (x != y).nonzero()
        if len(differ):
            found.append(f"{name}: {len(differ)} of {y.numel()} elements {words}, the first at {differ[0].tolist()}")
    return found


def apart(case: Case) -> int:
    """The same in a process of its own, whose death or silence shows the fault, too."""
    command = [sys.executable, os.path.abspath(__file__), "--here"]
    try:
        ended = subprocess.run(command, timeout=case.timeout_s, check=False).returncode
    except subprocess.TimeoutExpired:
        print(f"the call does not return within {case.timeout_s:.0f} s")
        return 1
    if ended < 0:
        print(f"the process was killed by signal {-ended}")
        return 1
    return ended
