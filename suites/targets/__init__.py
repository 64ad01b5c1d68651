"""Adapters: the kernels under test, each declared with its convention, precision and capabilities."""

MODULES = ("suites.targets.sglang_shuffle_5d", "suites.targets.torch_native")
"""Every module that declares targets. Importing one costs nothing of the kernels' own packages."""
