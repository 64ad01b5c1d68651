"""The packages that attn-oracle needs, and what to say where one is missing. Needs the standard library only."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

NEEDED = ("torch", "numpy", "scipy", "hypothesis", "typer", "rich", "pytest", "packaging", "jinja2", "safetensors")
"""As pyproject.toml declares them; each is imported by the name of its distribution."""


def missing(names: Sequence[str] = NEEDED) -> list[str]:
    """Those that cannot be imported, found without importing them."""
    return [name for name in names if importlib.util.find_spec(name) is None]


def said_of(error: ModuleNotFoundError) -> str | None:
    """One line for a module that is not there, None if it is none of a package that attn-oracle needs."""
    gone = missing()
    if (error.name or "").partition(".")[0] not in gone:
        return None
    build = " (of torch the build for your GPU)" if "torch" in gone else ""
    return f"needs {', '.join(gone)}, not installed here: pip install {' '.join(gone)}{build}"


def how(name: str) -> str:
    """How to get a package. A torch for a GPU is its vendor's build."""
    return "pip install torch, or its build for your GPU" if name == "torch" else f"pip install {name}"
