"""Files of ours, damaged at random: each must be read, or refused with one clear line, whatever was done to it.

    python -m suites.fuzz.corruptions --count 100000

tries cases, findings, ledgers and captured calls in turn, in one process, and exits 1 at the first that is neither.
Damage is done to bytes, and to the structure: fields go, change their type, trade places, come twice, nest deeply.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import struct
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fuzz import ledger
from fuzz.captured.call import understand
from fuzz.captured.load import load
from fuzz.case import load_case
from fuzz.errors import Exit, Expected, Stop
from fuzz.finding_files import read_case
from fuzz.report import digest, html, junit
from fuzz.report_command import load as load_report
from suites.fuzz.captured.calls import capture, target
from suites.fuzz.cases import extend_case, gather_case
from suites.fuzz.report.samples import finding_objects

Damage = Callable[[random.Random, bytes], bytes]

_BYTES = (
    b"\0",
    b"\xff",
    b"\n",
    b"\r\n",
    b'"',
    b"\\",
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b"-",
    b"e9",
    b"NaN",
    b"\xf0\x9f\x92\xa9",
)
_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 10**40, -(10**400), 0.5, -0.0, 1e308, float("nan"), float("inf")),
    *("", " ", "x" * 5000, "\ud800", "\x00", "\u202e", "<script>", "a\nb", "../../etc", "%s{}", "1", "fp32"),
    *([], {}, [[]], {"": {}}, [None] * 300, {"schema": 1}, "values", "planted.extend.key"),
)


# --------------------------------------------------------------------- bytes


def bytes_damaged(rng: random.Random, data: bytes) -> bytes:
    """One to four changes of bytes."""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at, size = rng.randrange(len(data) + 1), min(rng.choice((1, 1, 2, 8, 64)), len(data))
        kind = rng.randrange(6)
        if kind == 0 and data:
            place = rng.randrange(len(data))
            data = data[:place] + bytes([data[place] ^ 1 << rng.randrange(8)]) + data[place + 1 :]
        elif kind == 1:
            data = data[:at] + data[at + size :]
        elif kind == 2:
            data = data[:at] + rng.choice(_BYTES) * rng.choice((1, 1, 3, 200)) + data[at:]
        elif kind == 3:
            other = rng.randrange(len(data) + 1)
            data = data[:at] + data[other : other + size] + data[at:]
        elif kind == 4:
            data = data[:at]
        else:
            data = data[:at] + rng.randbytes(size) + data[at + size :]
    return data


# ----------------------------------------------------------------- structure


def json_damaged(rng: random.Random, data: bytes) -> bytes:
    """One to three changes of a JSON text's structure."""
    tree = json.loads(data)
    for _ in range(rng.choice((1, 1, 2, 3))):
        tree = _changed(rng, tree)
    text = json.dumps(tree)
    kind = rng.randrange(20)
    if kind == 0:
        deep = rng.choice((500, 5_000, 100_000))
        text = text.replace(rng.choice(("null", "[]", "1")), "[" * deep + "]" * deep, 1)
    elif kind == 1:
        text = text.replace("{", '{"schema": 1, ', 1)
    return text.encode("utf-8", "surrogatepass")


def _value(rng: random.Random) -> Any:
    # A copy: the next change may be made to it.
    return copy.deepcopy(rng.choice(_VALUES))


def _changed(rng: random.Random, tree: Any) -> Any:
    places = list(_places(tree))
    if not places:
        return _value(rng)
    holder, key = rng.choice(places)
    kind = rng.randrange(6)
    if kind == 0:
        del holder[key]
    elif kind == 1:
        other, there = rng.choice(places)
        holder[key], other[there] = other[there], holder[key]
    elif kind == 2 and isinstance(holder, dict):
        holder[rng.choice(("more", "", "schema", "case", "x" * 300, "\ud800"))] = copy.deepcopy(holder[key])
    elif kind == 3 and isinstance(holder, list):
        holder += copy.deepcopy(holder[: rng.choice((1, 5, 300))])
    elif kind == 4 and isinstance(holder[key], int | float) and not isinstance(holder[key], bool):
        holder[key] = rng.choice((holder[key] + 1, -holder[key], holder[key] * 1000, str(holder[key]), [holder[key]]))
    else:
        holder[key] = _value(rng)
    # A swap with one's own parent makes a loop, which no text can hold.
    return tree if _finite(tree, 60) else _value(rng)


def _finite(node: Any, room: int) -> bool:
    inner = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    return room > 0 and all(_finite(one, room - 1) for one in inner)


def _places(node: Any) -> Any:
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in list(items):
        yield node, key
        yield from _places(value)


def lines_damaged(rng: random.Random, data: bytes) -> bytes:
    """One to three changes of a TOML text's lines."""
    lines = data.decode().split("\n")
    for _ in range(rng.choice((1, 1, 2, 3))):
        at, other = rng.randrange(len(lines)), rng.randrange(len(lines))
        name, equals, _ = lines[at].partition("=")
        kind = rng.randrange(5)
        if kind == 0:
            del lines[at]
            lines = lines or [""]
        elif kind == 1:
            lines[at], lines[other] = lines[other], lines[at]
        elif kind == 2:
            lines.insert(at, lines[other])
        elif kind == 3 and equals:
            value = rng.choice(
                (
                    "1",
                    "-1",
                    '""',
                    "[]",
                    "[1]",
                    "{}",
                    "nan",
                    "2020-01-01",
                    "true",
                    '["x"]',
                    '"\\ud800"',
                    "'a'",
                    '"../../x"',
                )
            )
            lines[at] = f"{name}= {value}"
        else:
            lines[at] = rng.choice(("[[defect]]", "[defect]", "schema = 2", "[x]", "=", "x = 1", "[" * 3000))
    return "\n".join(lines).encode()


def header_damaged(rng: random.Random, data: bytes) -> bytes:
    """A safetensors file with another header: of the library's part of it, or of ours."""
    (size,) = struct.unpack("<Q", data[:8])
    header, rest = data[8 : 8 + size], data[8 + size :]
    if rng.random() < 0.5:
        header = json_damaged(rng, header)
    else:
        tree = json.loads(header)
        own = json_damaged(rng, tree["__metadata__"]["attn_oracle"].encode())
        tree["__metadata__"]["attn_oracle"] = own.decode("utf-8", "replace")
        header = json.dumps(tree).encode()
    told = len(header) if rng.random() < 0.9 else rng.choice((0, 1, len(header) - 1, 2**40, 2**64 - 1))
    return struct.pack("<Q", told) + header + rest


# --------------------------------------------------------------------- kinds


@dataclass(frozen=True)
class Kind:
    """A kind of file: whole ones, the damage that its structure takes, and what reads it.

    ``read`` raises ``Expected`` for what it refuses.
    """

    name: str
    file: str
    whole: tuple[bytes, ...]
    damage: Damage
    read: Callable[[Path], object]


_LEDGER = """schema = 1

[[defect]]
id = "one"
target = "planted.extend.key"
summary = "a key is lost"
checks = ["values", "lse"]
diagnosis = "missing_key"
features = { window = ["on"] }
engines = ["emulator"]
packages = { torch = ">=2" }
upstream = "unreported"
severity = "wrong"
reachability = "always"
case = "whole.json"

[[defect]]
id = "two"
target = ["planted.extend.lse", "planted.extend.window"]
summary = "another"
checks = ["lse"]
features = {}
engines = ["cuda", "hip"]
packages = {}
upstream = "https://example.invalid/1"
severity = "wrong"
reachability = "never"
case = "whole.json"
"""


def kinds(folder: Path) -> tuple[Kind, ...]:
    """The kinds of files; ``folder`` is where their files will lie."""
    small = extend_case(context_lens=(3, 5), query_lens=(3, 2), head_dim=32, v_head_dim=32, window=4)
    cases = tuple(case.to_json().encode() for case in (small, gather_case()))
    (folder / "whole.json").write_bytes(cases[0])
    (folder / "reports").mkdir(exist_ok=True)
    findings = tuple(json.dumps(one).encode() for one in finding_objects())
    record = capture(folder / "whole.safetensors", "planted.extend.key", small).read_bytes()
    known = {name: target(name) for name in ("planted.extend.key", "planted.gather.clean")}

    def finding(path: Path) -> object:
        read_case(path, known)
        return path

    def report(path: Path) -> None:
        made = load_report(path.parent, [])
        if made.bad:
            raise Stop(Exit.USAGE, "\n".join(made.bad))
        for render in (html.render, digest.render, junit.render):
            render(made).encode()
        json.dumps(made.plain)

    return (
        Kind("case", "damaged.json", cases, json_damaged, load_case),
        Kind("finding", "damaged-finding.json", findings, json_damaged, finding),
        Kind("report", "reports/finding-damaged.json", findings, json_damaged, report),
        Kind("ledger", "damaged.toml", (_LEDGER.encode(),), lines_damaged, ledger.load),
        Kind(
            "record",
            "damaged.safetensors",
            (record,),
            header_damaged,
            lambda p: understand(load(p), known["planted.extend.key"]),
        ),
    )


class Unclear(AssertionError):
    """A damaged file was neither read nor refused with one clear line."""


def refused(kind: Kind, path: Path) -> str | None:
    """The line with which a file is refused, None where it is read. Raises ``Unclear`` for any other end."""
    before = path.read_bytes()
    try:
        kind.read(path)
        line = None
    except Expected as error:
        line = str(error)
        if not line.strip() or "\n" in line or "\r" in line or len(line) > 2000:
            raise Unclear(f"{kind.name}: no clear line: {line[:300]!r}") from error
        stop = error.code if isinstance(error, Stop) else error.exit_code
        if stop is not Exit.USAGE:
            raise Unclear(f"{kind.name}: exit code {stop}: {line}") from error
    except (Exception, RecursionError) as error:
        raise Unclear(f"{kind.name}: {type(error).__name__}: {error}") from error
    if path.read_bytes() != before:
        raise Unclear(f"{kind.name}: reading changed the file")
    return line


def damaged(kind: Kind, seed: int, index: int) -> bytes:
    """The damaged file of an index: a function of both numbers."""
    rng = random.Random(f"{seed}/{kind.name}/{index}")
    whole = rng.choice(kind.whole)
    return bytes_damaged(rng, whole) if rng.random() < 0.4 else kind.damage(rng, whole)


SHARES = {"case": 0.45, "finding": 0.3, "ledger": 0.15, "record": 0.08, "report": 0.02}
"""Of all files, how many are of each kind: the slower are fewer."""


def attempt(folder: Path, count: int, seed: int, every: Callable[[str, str | None], None]) -> None:
    """Damage ``count`` files and read them; ``every`` hears of each kind and line. Raises ``Unclear``."""
    made = {kind.name: kind for kind in kinds(folder)}
    for kind in (made[name] for name in SHARES):
        path = folder / kind.file
        for whole in kind.whole:
            path.write_bytes(whole)
            if (line := refused(kind, path)) is not None:
                raise Unclear(f"{kind.name}: a whole file is refused: {line}")
        for index in range(round(count * SHARES[kind.name])):
            path.write_bytes(damaged(kind, seed, index))
            try:
                every(kind.name, refused(kind, path))
            except Unclear as error:
                raise Unclear(f"{error} (seed {seed}, index {index})") from error


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description="Read damaged files.")
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    counts: Counter[tuple[str, bool]] = Counter()

    def every(name: str, line: str | None) -> None:
        counts[name, line is None] += 1
        refused_, read = counts[name, False], counts[name, True]
        if refused_ + read == round(options.count * SHARES[name]):
            print(f"{name}: {refused_} refused, each with one line; {read} still read", flush=True)

    with tempfile.TemporaryDirectory(prefix="attn-oracle-corruptions-") as folder:
        try:
            attempt(Path(folder), options.count, options.seed, every)
        except Unclear as error:
            print(f"{error}\n{error.__cause__!r:.2000}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
