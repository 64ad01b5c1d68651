"""Check what is in a wheel and a source distribution: `check_dist.py FOLDER WHEEL`.

FOLDER holds the source distribution and the wheel that was built from it, WHEEL was built from the tree. The two
wheels hold the same files, with the types' markers, and neither our tests nor the bugs that these make again, which
the source distribution has. Exits 1 on a fault.
"""

from __future__ import annotations

import sys
import tarfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

NEEDED = ("oracle/py.typed", "fuzz/py.typed", "attn_oracle/py.typed", "attn_oracle_pytest.py", "attn_oracle_cli.py")
NEEDED += ("fuzz/report/page/report.css", "suites/gpu_diff/ledger.toml", "suites/targets/__init__.py")
TESTS = ("suites/oracle/", "suites/fuzz/", "suites/museum/")
SOURCES = ("suites/fuzz/test_cli.py", "suites/museum/__main__.py", "docs/tutorial.md", "LICENSE", "pyproject.toml")


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def wheel_faults(names: Iterable[str]) -> list[str]:
    """One line for each file that is missing, and each that is a test."""
    held = set(names)
    found = [f"the wheel lacks {name}" for name in NEEDED if name not in held]
    found += [f"the wheel has {name}" for name in sorted(held) if _ours(name)]
    return found


def _ours(name: str) -> bool:
    return name.startswith(TESTS) or name.split("/")[-1].startswith(("test_", "conftest"))


def source_faults(names: Iterable[str]) -> list[str]:
    """One line for each file that is missing. names: with the archive's folder."""
    held = {name.partition("/")[2] for name in names}
    return [f"the source distribution lacks {name}" for name in (*NEEDED, *SOURCES) if name not in held]


def differences(one: dict[str, bytes], other: dict[str, bytes]) -> list[str]:
    """One line for each file that the two wheels do not share."""
    return [f"the two wheels differ in {name}" for name in sorted({*one, *other}) if one.get(name) != other.get(name)]


def main() -> int:
    folder, wheel = map(Path, sys.argv[1:])
    (built,), (source,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        names = archive.getnames()
    own = contents(built)
    found = source_faults(names) + wheel_faults(own) + differences(own, contents(wheel))
    for fault in found:
        print(fault)
    print(f"{built.name}: {len(own)} files, {source.name}: {len(names)}, {len(found)} faults")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
