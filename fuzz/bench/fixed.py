"""The committed cases that figures of the emulator are measured on: one file each, named after its target.

What follows a plus in a name tells cases of one target apart. The case without one is the target's own.
"""

from __future__ import annotations

from pathlib import Path

from fuzz.case import Case, load_case

FOLDER = Path(__file__).with_name("cases")


def names() -> list[str]:
    """All cases, sorted."""
    return sorted(path.name.removesuffix(".json") for path in FOLDER.glob("*.json"))


def target_of(name: str) -> str:
    """Name of the target that a case is for."""
    return name.partition("+")[0]


def case_of(name: str) -> Case:
    """The case."""
    return load_case(FOLDER / f"{name}.json")
