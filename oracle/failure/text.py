"""The text itself. One line for each thing to know, the first of which says what is wrong."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from oracle.diagnose.model import Kind
from oracle.failure.words import count

_WIDTH = 11
_STAGES_SHOWN = 3
_SMALL = 0.01
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (\S+)$', re.M)
"""As Python's faulthandler prints one."""
_ONLY_NAN = (
    "with finite numbers there the result is right: keys that are masked are computed with, and 0 times NaN is NaN"
)


@dataclass(frozen=True, kw_only=True)
class Failed:
    """One failed check: its name, its one line, and its evidence."""

    check: str
    message: str
    evidence: Mapping[str, Any] = field(default_factory=dict)


def render(subject: str, description: str, failed: Sequence[Failed], replay: str | None = None) -> str:
    """The text of what failed on one case, the most telling check first.

    subject: the target, or what was asserted. description: the case in one line. replay: the command that shows the
    failure again.
    """
    ranked = by_telling(failed)
    first = ranked[0]
    diagnosis = next((d for f in ranked if (d := _diagnosis(f)) is not None), None)
    lines = [
        f"{subject}: {first.check}: {_named(diagnosis) if diagnosis and _explained(first) else first.message}",
        *_line("case", description),
        *_line("where", _where(first.evidence)),
    ]
    drawn: list[Sequence[str]] = []
    for one in ranked:
        # A relation that fails compares the same result once more.
        if _judged(one) and (one is first or one.check in ("values", "lse")):
            lines += _numbers(one, len(ranked) > 1, drawn)
        elif one is not first:
            lines += _line("also", f"{one.check}: {one.message}")
    if {f.check for f in failed} == {"nan"}:
        lines += _line("means", _ONLY_NAN)
    if diagnosis is not None and (_explained(first) or first.check != "written"):
        lines += _explanations(diagnosis)
    for text in _decoded(ranked):
        lines += _line("decoded", text)
    return "\n".join([*lines, *_line("replay", replay or "")])


def _where(evidence: Mapping[str, Any]) -> str:
    """Where the target was when it raised, or when its process died and printed its stack, innermost frame first."""
    if evidence.get("where"):
        return str(evidence["where"])
    frames = [frame for frame in _FRAME.findall(str(evidence.get("output", ""))) if "/torch/" not in frame[0]]
    return "{}, line {}, in {}".format(PurePath(frames[0][0]).name, *frames[0][1:]) if frames else ""


def by_telling(failed: Sequence[Failed]) -> list[Failed]:
    """The most telling first: what is explained, then what needs no explanation, such as a row that nobody wrote."""
    return sorted(failed, key=lambda f: 0 if _explained(f) else 2 if _judged(f) else 1)


def _explained(failed: Failed) -> bool:
    diagnosis = _diagnosis(failed)
    return diagnosis is not None and diagnosis["kind"] != Kind.UNEXPLAINED


def _judged(failed: Failed) -> bool:
    """Whether its evidence is that of `oracle.failure.evidence`."""
    return "request" in failed.evidence


def _diagnosis(failed: Failed) -> Mapping[str, Any] | None:
    diagnosis = failed.evidence.get("diagnosis")
    return diagnosis if isinstance(diagnosis, Mapping) and diagnosis["kind"] != Kind.NONE else None


def _named(diagnosis: Mapping[str, Any]) -> str:
    """The best explanation, and whether others of its class are as good: the text's last lines say which."""
    same = sum(other["kind"] == diagnosis["kind"] for other in diagnosis["runners_up"])
    others = f" (or {'another' if same == 1 else f'{same} others'} of its class)" if same else ""
    return f"{diagnosis['detail']}{others}"


def _explanations(diagnosis: Mapping[str, Any]) -> Iterator[str]:
    """The best explanation, how well it fits, and those that fit too."""
    if diagnosis["kind"] == Kind.UNEXPLAINED:
        yield from _line("diagnosis", diagnosis["detail"])
        return
    fits = f"with that, the worst error/budget is {float(diagnosis['ratio']):.2g}"
    yield from _line("diagnosis", f"{diagnosis['detail']}; {fits}")
    for other in diagnosis["runners_up"]:
        yield from _line("", f"or {other['detail']}")


def _decoded(failed: Sequence[Failed]) -> list[str]:
    return next((list(f.evidence["decoded"]) for f in failed if f.evidence.get("decoded")), [])


def _numbers(failed: Failed, several: bool, drawn: list[Sequence[str]]) -> Iterator[str]:
    """What one judgement says. drawn: the maps that the text has so far; the same one is not drawn again."""
    found = failed.evidence
    yield from _line("wrong", f"{failed.check}: {_wrong(found)}" if several else _wrong(found))
    yield from _line("worst", _worst(found))
    if found.get("dims") and not found["dims"].startswith("all"):
        yield from _line("dims", f"wrong in that row: {found['dims']}")
    if found.get("stages"):
        yield from _line("budget", _budget(found))
    if "grid" in found and found["grid"] not in drawn:
        drawn.append(found["grid"])
        yield from _line("rows", found["grid"][0])
        yield from (f"  {'':<{_WIDTH}}{row}" for row in found["grid"][1:])


def _wrong(found: Mapping[str, Any]) -> str:
    beyond = found["failures"] + found["suspects"]
    said = f"{beyond} of {found['elements']} elements, {count(found['rows'], 'row')} (a query and a head)"
    if found.get("not_finite"):
        said += f", {found['not_finite']} of them not finite"
    if beyond and not found["failures"]:
        said += ", all within the worst case"
    return said


def _worst(found: Mapping[str, Any]) -> str:
    names = ("head", "dim")[: len(found["index"]) - 1]
    where = [f"request {found['request']}", f"row {found['row']}"]
    if found.get("position", -1) >= 0:  # a query of a request without keys has none
        where[-1] += f" (position {found['position']})"
    where += [f"{name} {i}" for name, i in zip(names, found["index"][1:], strict=True)]
    expected, actual, bound, ratio = (float(found[name]) for name in ("expected", "actual", "bound", "ratio"))
    said = f"expected {expected:.5g}, actual {actual:.5g}, budget {bound:.2g}, error/budget {ratio:.2g}"
    return f"{', '.join(where)}: {said}"


def _budget(found: Mapping[str, Any]) -> str:
    total = sum(found["stages"].values())
    shares = [(name, share / total) for name, share in found["stages"].items() if share / total >= _SMALL]
    shown = ", ".join(f"{name} {share:.0%}" for name, share in shares[:_STAGES_SHOWN])
    assumed = f" (assuming the loosest {', '.join(found['loosest'][:_STAGES_SHOWN])}, ...)" if found["loosest"] else ""
    return f"made of {shown}{assumed}"


def _line(name: str, text: str) -> Iterator[str]:
    if text:
        yield f"  {name:<{_WIDTH}}{text}"
