"""Source files of packages, found without importing anything, and whether a precision was read from those here."""

from __future__ import annotations

import importlib.util
import os
from enum import StrEnum
from functools import cache
from hashlib import sha256
from pathlib import Path

from oracle.precision import Precision

VARIABLES = {"aiter": "ATTN_ORACLE_AITER", "tokenspeed_kernel_amd": "ATTN_ORACLE_TOKENSPEED"}
"""The variable that names a package's folder, or the one that holds it, where a package need not be installed."""


def folder(package: str) -> Path | None:
    """The folder of a package: the one that its variable names, else the installed one's; None where neither is."""
    given = os.environ.get(VARIABLES.get(package, ""))
    if given:
        outer = Path(given)
        return next((f for f in (outer / package, outer) if f.is_dir() and f.name == package), None)
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


class Reading(StrEnum):
    """Whether the source that is here is the one that a precision was read from."""

    SAME = "same"
    OTHER = "other version"
    """the file is here, and is none of those that were read: the precision may not hold for it"""
    ABSENT = "not here"
    UNCITED = "uncited"


def reading(precision: Precision) -> Reading:
    """Compare the cited files with those here."""
    if not precision.cited:
        return Reading.UNCITED
    found = {}
    for citation in precision.cited:
        package = folder(citation.file.partition("/")[0])
        path = None if package is None else package.parent / citation.file
        if path is not None and path.is_file():
            found[citation] = _hash(path) == citation.sha256
    if not found:
        return Reading.ABSENT
    return Reading.SAME if any(found.values()) else Reading.OTHER


@cache
def _hash(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest()
