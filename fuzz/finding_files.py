"""Files of findings: which a folder holds, and what each says of targets that are loaded."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from fuzz import registry
from fuzz.campaign.finding import Finding, finding_from_dict, saved_finding
from fuzz.case import Case
from fuzz.errors import Exit, Stop
from fuzz.plain import Fields, read_json
from fuzz.report.failure import target_options
from oracle.declare import Declaration


def finding_files(path: Path) -> list[Path]:
    """``path`` itself, or every finding below a folder. Raises ``Stop`` if there is none."""
    if not path.is_dir():
        return [path]
    found = sorted(path.rglob("finding-*.json"))
    if not found:
        raise Stop(Exit.USAGE, f"{path}: holds no finding-*.json")
    return found


def read_case(path: Path, known: Mapping[str, Declaration]) -> tuple[Declaration, Case]:
    """Target and case of a finding, which is all that a replay needs. Raises ``Stop``."""
    target, case, modules = read_json(path, _asked)
    _check_target(path, target, modules, known)
    return known[target], case


def read_finding(path: Path, known: Mapping[str, Declaration]) -> Finding:
    """A finding with everything that was kept. Raises ``Stop``."""
    finding: Finding = read_json(path, saved_finding)
    _check_target(path, finding.target, finding.modules, known)
    return finding


def _asked(data: object) -> tuple[str, Case, tuple[str, ...]]:
    return *finding_from_dict(data), Fields(data, "finding").texts("modules")


def _check_target(path: Path, target: str, modules: Sequence[str], known: Iterable[str]) -> None:
    if target in known:
        return
    said = registry.unknown(target, known)
    if modules:
        said = f"{target[:60]!r} is unknown; give {shlex.join(target_options(modules))}"
    raise Stop(Exit.USAGE, f"{path}: finding.target: {said}")
