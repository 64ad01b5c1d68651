"""Open or update one issue for each new fault that a night found.

    python3 .github/file_issues.py DIR --repo OWNER/NAME [--dry-run] [--most 10]

DIR holds what `attn-oracle fuzz --out` left: finding-*.json and, for each new finding, reproducer-ID/ISSUE.md. A fault
is a target, a check and a class of diagnosis: findings that share these share an issue, night after night, with the
smallest case of tonight. What a person writes into the issue, below the generated part, stays. A closed issue whose
fault shows again is opened again. Known defects (of the ledger) are left alone.

Needs Python and, but for --dry-run, the command `gh`. Exits 0, 2 for bad input, 3 where `gh` fails.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LABEL = "attn-oracle"
BEGIN, END = "<!-- attn-oracle: begin -->", "<!-- attn-oracle: end -->"
PERSON = "## For a person to fill in"
MOST_BODY = 60_000
"""Characters: an issue holds 65536."""


@dataclass(frozen=True)
class Fault:
    """What becomes one issue. ``key`` finds it again, ``body`` is the generated part, ``rest`` is for a person."""

    key: str
    title: str
    body: str
    rest: str

    @property
    def marker(self) -> str:
        """A line that no reader sees and a search finds."""
        return f"<!-- attn-oracle-fault: {self.key} -->"

    def text(self, before: str = "") -> str:
        """The whole issue; what stands outside of the generated part of ``before`` stays."""
        made = f"{BEGIN}\n{self.marker}\n{self.body.strip()}\n{END}"
        start, end = before.find(BEGIN), before.find(END)
        if 0 <= start < end:
            return before[:start] + made + before[end + len(END) :]
        return f"{made}\n\n{self.rest.strip()}\n"


class Bad(Exception):
    """What cannot be filed, in one line."""


# --------------------------------------------------------------------- faults


def faults(folder: Path) -> list[Fault]:
    """One for each new fault of a folder. Raises ``Bad`` where there is no folder; a bad file is told on stderr."""
    if not folder.is_dir():
        raise Bad(f"{folder}: no folder")
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for path in sorted(folder.glob("finding-*.json")):
        finding = _read(path)
        if finding is not None and finding.get("known") is None:
            kind = (finding["target"], finding["check"], finding.get("diagnosis") or "")
            groups.setdefault(kind, []).append(finding)
    return [_fault(kind, sorted(found, key=_size), folder) for kind, found in sorted(groups.items())]


def _read(path: Path) -> dict[str, Any] | None:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        texts = (data["id"], data["target"], data["check"], data["message"])
        if not all(isinstance(text, str) for text in texts) or not str(data["id"]).isalnum():
            raise ValueError("id, target, check and message are text")
        if not isinstance(data.get("diagnosis"), str | None) or not isinstance(data["case"], dict):
            raise ValueError("diagnosis is text, case an object")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        print(f"{path}: no finding: {type(error).__name__}: {str(error)[:120]}", file=sys.stderr)
        return None
    found: dict[str, Any] = data
    return found


def _size(finding: dict[str, Any]) -> tuple[int, int, str]:
    lengths = finding["case"].get("context_lens")
    lengths = [n for n in lengths if isinstance(n, int)] if isinstance(lengths, list) else []
    return len(lengths), sum(lengths), finding["id"]


def _fault(kind: tuple[str, str, str], found: Sequence[dict[str, Any]], folder: Path) -> Fault:
    target, check, diagnosis = kind
    key = hashlib.sha256("\0".join(kind).encode("utf-8", "replace")).hexdigest()[:16]
    smallest = found[0]
    report = folder / f"reproducer-{smallest['id']}" / "ISSUE.md"
    text = report.read_text(encoding="utf-8") if report.is_file() else _plain(smallest)
    body, _, rest = text.partition(PERSON)
    body = body.partition("\n")[2] if body.startswith("# ") else body
    if len(found) > 1:
        others = ", ".join(f"`{finding['id']}`" for finding in found[1:20])
        body += f"\n{len(found)} findings of this night show it; the others: {others}\n"
    title = f"{target}: {check} is wrong" + (f" ({diagnosis})" if diagnosis else "")
    rest = PERSON + (rest if rest.strip() else "\n\n- severity:\n- reachability:\n")
    return Fault(key, _quiet(_one_line(title)[:200]), _quiet(body)[:MOST_BODY], rest)


def _plain(finding: dict[str, Any]) -> str:
    """The report where no reproducer could be made."""
    case = json.dumps(finding["case"], indent=2).replace("```", "")
    told = f"{_escaped(finding['message'])}\n\nFinding `{finding['id']}`; no script was made. The case:"
    return f"\n{told}\n\n```json\n{case}\n```\n"


def _one_line(text: str) -> str:
    return " ".join(text.encode("utf-8", "replace").decode().split())


def _escaped(text: str) -> str:
    return "".join(f"\\{c}" if c in "\\`*_<>[]#|" else c for c in _one_line(text))


def _quiet(text: str) -> str:
    """Text that mentions nobody and holds none of our own marks."""
    text = text.encode("utf-8", "replace").decode().replace("@", "@\u200b")
    return text.replace("<!--", "&lt;!--")


# --------------------------------------------------------------------- issues

Run = Callable[[Sequence[str]], str]
"""Run a command; its output. Raises ``Bad``."""


def run_gh(arguments: Sequence[str]) -> str:
    """Run ``gh`` with a list of arguments: no shell reads them."""
    try:
        done = subprocess.run(["gh", *arguments], capture_output=True, text=True, check=False, timeout=120)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Bad(f"gh: {error}") from None
    if done.returncode:
        raise Bad(f"gh {arguments[0]} {arguments[1]}: {' '.join(done.stderr.split())[:300]}")
    return done.stdout


def file_all(found: Sequence[Fault], repo: str, most: int, run: Run) -> list[str]:
    """Open and update issues; a line for each thing that was done. Raises ``Bad``."""
    asked = ["--label", LABEL, "--state", "all", "--limit", "1000", "--json", "number,title,body,state"]
    known = json.loads(run(["issue", "list", "--repo", repo, *asked]) or "[]")
    told, opened = [], 0
    for fault in found:
        issue = next((one for one in known if fault.marker in (one["body"] or "")), None)
        if issue is not None:
            told.append(_update(fault, issue, repo, run))
        elif opened == most:
            told.append(f"left for another night, after {most} new issues: {fault.title}")
        else:
            opened += 1
            if opened == 1:
                run(["label", "create", LABEL, "--repo", repo, "--force", "--description", "found by attn-oracle"])
            made = ["--title", fault.title, "--label", LABEL, "--body", fault.text()]
            run(["issue", "create", "--repo", repo, *made])
            told.append(f"opened: {fault.title}")
    return told


def _update(fault: Fault, issue: dict[str, Any], repo: str, run: Run) -> str:
    number, text, did = str(issue["number"]), fault.text(issue["body"]), []
    if issue["state"].upper() == "CLOSED":
        run(["issue", "reopen", number, "--repo", repo, "--comment", "It shows again: see the description."])
        did.append("opened again")
    if text != issue["body"]:
        run(["issue", "edit", number, "--repo", repo, "--body", text])
        did.append("updated")
    return f"#{number} {' and '.join(did) or 'is as it was'}: {fault.title}"


def dry(arguments: Sequence[str]) -> str:
    """Say what would be run; no issue is known."""
    print("would run: " + shlex.join(["gh", *arguments]))
    return "[]"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description="Open or update one issue for each new fault.")
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--repo", required=True, metavar="OWNER/NAME")
    parser.add_argument("--most", type=int, default=10, help="new issues in one night")
    parser.add_argument("--dry-run", action="store_true", help="say what would be done, ask nobody")
    options = parser.parse_args(arguments)
    try:
        found = faults(options.folder)
    except Bad as error:
        print(error, file=sys.stderr)
        return 2
    try:
        lines = file_all(found, options.repo, options.most, dry if options.dry_run else run_gh)
    except (Bad, ValueError, KeyError, TypeError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 3
    print("\n".join(lines) or "no new fault")
    return 0


if __name__ == "__main__":
    sys.exit(main())
