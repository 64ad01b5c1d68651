"""A source tree like the real one but for a single file: links to everything beside it, and the mutant's text."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from fuzz.errors import Exit, Stop


def original(file: str) -> Path:
    """Where ``PACKAGE/...`` lies, found without importing the package. Raises ``Stop`` where it is missing."""
    package, _, rest = file.partition("/")
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise Stop(Exit.NOTHING, f"{package} is not installed: its mutants cannot be made")
    return Path(next(iter(spec.submodule_search_locations))) / rest


def build(file: str, text: str, folder: Path) -> Path:
    """Make the tree for ``PACKAGE/...`` with ``text`` in its place; returns the mutant's path below ``folder``."""
    source, made = original(file.partition("/")[0]), folder / file.partition("/")[0]
    for part in Path(file).parts[1:]:
        made.mkdir(parents=True)
        for sibling in source.iterdir():
            if sibling.name not in (part, "__pycache__"):
                (made / sibling.name).symlink_to(sibling)
        source, made = source / part, made / part
    made.write_text(text, encoding="utf-8")
    return made
