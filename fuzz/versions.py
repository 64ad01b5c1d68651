"""What is installed here, as every JSON report names it."""

from __future__ import annotations

import importlib.util
import platform
import tomllib
from importlib import metadata
from pathlib import Path

# torch is imported where it is needed: the version of the product, and what is missing, is said without it.

PRODUCT = "attn-oracle"
AITER = "amd-aiter"
_TRITON = ("triton", "pytorch-triton", "pytorch-triton-rocm", "triton-rocm")
"""Distributions of Triton: its own, and those that builds of torch have brought with them."""


def versions() -> dict[str, str | None]:
    """Version of each part that a verdict depends on, None where it is missing; ``gpu`` is the first one's name."""
    import torch

    return {
        PRODUCT: own(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "triton": next((found for name in _TRITON if (found := installed(name))), None),
        "sglang": installed("sglang"),
        AITER: installed(AITER),
        "gpu": gpu_name(),
    }


def installed(distribution: str) -> str | None:
    """Version of an installed distribution, found without importing it, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def gpu_name() -> str | None:
    """Name of the GPU that torch uses, or None."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def aiter_is_amds() -> bool | None:
    """Whether the importable package ``aiter`` is AMD's kernels; None if there is none.

    PyPI's distribution of that name is about asynchronous iterators. AMD's has a subpackage ``ops``, however
    it was installed.
    """
    spec = importlib.util.find_spec("aiter")
    if spec is None:
        return None
    return any((Path(folder) / "ops").is_dir() for folder in spec.submodule_search_locations or ())


def own() -> str | None:
    """This program's version: of the installed distribution, else what its source tree says where there is no git."""
    try:
        project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return installed(PRODUCT)
    if project.get("project", {}).get("name") != PRODUCT:
        return installed(PRODUCT)
    return installed(PRODUCT) or str(project["tool"]["hatch"]["version"]["raw-options"]["fallback_version"])
