"""What a user's own targets are made of: a digest of their source, which stands for a version that they do not have.

Followed are the imports of Python files that lie with the named module: below its folder, or below the folder of
its package. What is installed elsewhere has a version of its own; what a program finds at run time is not followed.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

_OURS = tuple(Path(__file__).resolve().parents[1] / name for name in ("fuzz", "oracle"))


def digest(module: str) -> str | None:
    """The digest of a module that ``--targets`` names, by its path or its name, and of what it imports beside it.

    The same wherever the files lie. None where the module has no source.
    """
    file = _file_of(module)
    if file is None:
        return None
    root = file.parent if module.endswith(".py") else _above(file, module)
    total = sha256()
    for name, text in sorted(_sources(file, (file.parent, root), root)):
        total.update(f"{name}\0{len(text)}\0".encode() + text)
    return total.hexdigest()[:16]


def _file_of(module: str) -> Path | None:
    if module.endswith(".py"):
        path = Path(module).resolve()
        return path if path.is_file() else None
    loaded = sys.modules.get(module)
    try:
        spec = loaded.__spec__ if loaded is not None else importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    origin = None if spec is None or not spec.has_location else spec.origin
    return Path(origin).resolve() if origin is not None and origin.endswith(".py") else None


def _above(file: Path, module: str) -> Path:
    """The folder on the path from which a module of this dotted name was loaded."""
    depth = module.count(".") + (file.name == "__init__.py")
    return file.parents[depth]


def _sources(file: Path, roots: tuple[Path, ...], root: Path) -> Iterator[tuple[str, bytes]]:
    todo, seen = [file], {file}
    while todo:
        here = todo.pop()
        text = here.read_bytes()
        yield here.relative_to(root).as_posix(), text
        for found in _imported(text, here, roots):
            if found not in seen and not any(found.is_relative_to(own) for own in _OURS):
                seen.add(found)
                todo.append(found)


def _imported(text: bytes, here: Path, roots: tuple[Path, ...]) -> Iterator[Path]:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _files(alias.name, roots)
        elif isinstance(node, ast.ImportFrom):
            folders = roots if not node.level else (here.parents[node.level - 1],)
            base = node.module or ""
            yield from _files(base, folders)
            for alias in node.names:
                yield from _files(f"{base}.{alias.name}".strip("."), folders)


def _files(name: str, folders: tuple[Path, ...]) -> Iterator[Path]:
    """The file of a module, and those of the packages around it."""
    parts = name.split(".") if name else []
    for folder in folders:
        for depth in range(1, len(parts) + 1):
            stem = folder.joinpath(*parts[:depth])
            yield from (
                path.resolve()
                for path in (stem / "__init__.py", stem.with_name(f"{stem.name}.py"))
                if path.is_file() and path.resolve().is_relative_to(folder)
            )
