"""One file with everything that a run of the differential tests said, for its owner to send to somebody else.

It holds versions, cases, verdicts and findings as JSON that can be read before it is sent: no tensors, no text of a
source file, no path of the machine beyond a file's folder. Whoever gets it replays what matters from the cases alone:

python -m suites.gpu_diff.bundle FILE             what it says, a line for each target
python -m suites.gpu_diff.bundle FILE --cases DIR one case file for each finding, for `attn-oracle run`
"""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from fuzz.campaign.finding import Finding
from fuzz.campaign.run import Campaign, Outcome
from fuzz.case import Case, CaseError, case_from_dict
from fuzz.cli import guarded
from fuzz.doctor import doctor
from fuzz.errors import Exit, Stop
from fuzz.ledger import Defect
from fuzz.plain import Fields, PlainError, read_json, shown
from fuzz.report import summary as summaries
from fuzz.whole import write_whole
from oracle.kinds import Engine

SCHEMA = 1
KIND = "attn-oracle result bundle"
NAME = "bundle.json"
LONGEST = 300
"""Characters of a message that are kept: compilers quote what they compile, from the second line on."""

SAFE_EVIDENCE = (int, float, bool, type(None))
FIELDS = tuple(f.name for f in fields(Case))


def destination(given: Path | None, engine: Engine, out: Path) -> Path | None:
    """Where to write: as given, on hip beside the findings, or nowhere. Raises ``Stop`` for a bad place."""
    if given is None:
        return out / NAME if engine is Engine.HIP else None
    if given.is_dir():
        raise Stop(Exit.USAGE, f"--bundle {given}: is a folder; allowed: a file's name")
    if not given.parent.is_dir():
        raise Stop(Exit.USAGE, f"--bundle {given}: there is no folder {given.parent}")
    if not os.access(given if given.exists() else given.parent, os.W_OK):
        raise Stop(Exit.USAGE, f"--bundle {given}: cannot be written")
    return given


@dataclass
class Recorder:
    """Listens to a campaign, and keeps what each case ended with: verdict, worst error over budget, the case."""

    results: dict[str, list[tuple[str, float | None, Case]]] = field(default_factory=lambda: defaultdict(list))
    findings: list[Finding] = field(default_factory=list)

    def __call__(self, outcome: Outcome, found: list[Finding]) -> None:
        """To be the campaign's ``on_outcome``."""
        if outcome.harness is None:
            row = (outcome.result.verdict.value, outcome.result.worst_ratio, outcome.case)
            self.results[outcome.target].append(row)
        self.findings += found


def bundle(
    campaign: Campaign,
    recorder: Recorder,
    skipped: Mapping[str, str],
    shown: Sequence[Defect],
    stale: Sequence[Defect],
    arguments: Sequence[str],
) -> dict[str, Any]:
    """The file as plain data. ``shown`` and ``stale``: ledger entries by whether their own case failed again."""
    summary = summaries.to_dict(campaign, skipped, {})
    for name, target in summary["targets"].items():
        results = recorder.results.get(name, [])
        target["results"] = [[verdict, ratio, list(_values(case))] for verdict, ratio, case in results]
        target["findings"] = [finding["id"] for finding in target["findings"]]
        target["skipped"] = {scrubbed(reason): count for reason, count in target["skipped"].items()}
    report = doctor()
    return {
        "schema": SCHEMA,
        "kind": KIND,
        "machine": {
            "platform": f"{platform.system()} {platform.release()}, {platform.machine()}",
            "torch_build": report.torch_build,
            "gpus": [{"name": gpu.name, "arch": gpu.arch, "memory": gpu.memory} for gpu in report.gpus],
        },
        "packages": report.packages,
        "versions": summary["versions"],
        "engine": summary["engine"],
        "seed": summary["seed"],
        "arguments": [scrubbed(argument) for argument in arguments],
        "ledger": {"shown": [d.id for d in shown], "stale": [d.id for d in stale]},
        "case_fields": list(FIELDS),
        "targets": summary["targets"],
        "findings": [_finding(finding) for finding in recorder.findings],
        "harness_errors": [
            {"target": e.target, "message": scrubbed(e.message), "case": e.case.to_dict()}
            for e in campaign.harness_errors
        ],
    }


def _values(case: Case) -> Sequence[Any]:
    plain = case.to_dict()
    return [plain[name] for name in FIELDS]


def _finding(finding: Finding) -> dict[str, Any]:
    plain = finding.to_dict()
    kept = ("id", "target", "check", "verdict", "diagnosis", "worst_ratio", "known", "case")
    evidence = {name: value for name, value in finding.evidence.items() if _harmless(value)}
    return {name: plain[name] for name in kept} | {"message": scrubbed(finding.message), "evidence": evidence}


def _harmless(value: object) -> bool:
    """Whether evidence is a number, or numbers: what a program printed may be anything."""
    if isinstance(value, list):
        return all(_harmless(one) for one in value)
    return isinstance(value, SAFE_EVIDENCE)


_PATH = re.compile(r"(?<![\w.~/-])(?:~|\.{0,2})(?:/[^/\s:'\",;]+){3,}")


def scrubbed(text: str) -> str:
    """The first line, not too long; of a path, the file and its folder alone."""
    line = next(iter(text.splitlines()), "")
    return _PATH.sub(lambda match: "/".join(match[0].split("/")[-2:]), line)[:LONGEST]


def write(path: Path, data: Mapping[str, Any]) -> None:
    """Write at once or not at all. Raises ``Stop``."""
    try:
        write_whole(path, json.dumps(data, separators=(",", ":")) + "\n")
    except OSError as error:
        raise Stop(Exit.USAGE, f"--bundle {path}: cannot be written: {error.strerror}") from None


def read(path: Path) -> dict[str, Any]:
    """The data of a bundle. Raises ``Stop`` with one line for a file that is none."""
    return read_json(path, _bundle)


def _bundle(data: Any) -> dict[str, Any]:
    own = Fields(data, "bundle")
    if own.text("kind") != KIND:
        raise PlainError(f"bundle.kind: {shown(own.data['kind'])}; allowed: {KIND}")
    own.schema(SCHEMA)
    for name in ("versions", "targets"):
        own.fields(name)
    for name in ("findings", "case_fields"):
        own.list(name)
    return dict(own.data)


def cases(path: Path, data: Mapping[str, Any], target: str) -> list[tuple[str, Case]]:
    """Verdict and case of everything that was tried on a target. Raises ``Stop`` for a case that is none."""
    try:
        return [
            (verdict, case_from_dict({"schema": 1} | dict(zip(data["case_fields"], values, strict=True))))
            for verdict, _, values in data["targets"][target]["results"]
        ]
    except (CaseError, KeyError, TypeError, ValueError) as error:
        raise Stop(Exit.USAGE, f"{path}: targets.{target}.results: {error}") from None


def lines(data: Mapping[str, Any]) -> list[str]:
    """What the bundle says, for a terminal."""
    versions = ", ".join(f"{name} {version}" for name, version in data["versions"].items() if version)
    found = [f"{data['engine']}: {versions}"]
    for name, target in data["targets"].items():
        verdicts = ", ".join(f"{count} {verdict}" for verdict, count in target["verdicts"].items())
        found.append(f"{name}: {verdicts or next(iter(target['skipped']), 'no case')}")
    new = [f"{f['target']}: {f['check']}: {f['message']}" for f in data["findings"] if f["known"] is None]
    return [*found, f"{len(data['findings'])} findings, {len(new)} not in the ledger", *new]


def show(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A result bundle.")],
    to: Annotated[Path | None, typer.Option("--cases", metavar="DIR", help="Write each finding's case here.")] = None,
) -> None:
    """See the module's text."""
    data = read(file)
    print("\n".join(lines(data)))
    if to is None:
        return
    try:
        to.mkdir(parents=True, exist_ok=True)
        for finding in data["findings"]:
            case = case_from_dict(finding["case"])
            (to / f"case-{re.sub('[^0-9a-f]', '', finding['id'])}.json").write_text(case.to_json(), encoding="utf-8")
    except OSError as error:
        raise Stop(Exit.USAGE, f"--cases {to}: cannot be written: {error.strerror}") from None
    except (CaseError, KeyError, TypeError) as error:
        raise Stop(Exit.USAGE, f"{file}: findings: {error}") from None


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(help=__doc__)(show)
    sys.exit(guarded(app))
