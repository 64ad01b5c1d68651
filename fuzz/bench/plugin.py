"""What the pytest plugin adds to the start of every test run in an environment that has it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from statistics import median

from fuzz.bench.report import PLUGIN, Figure

STARTS = 9
# pytest has loaded itself before it loads a plugin: what remains is the plugin's own.
_SCRIPT = """
import sys, time, pytest
start = time.perf_counter()
import attn_oracle_pytest
print(1e3 * (time.perf_counter() - start), "torch" in sys.modules)
"""


def import_ms() -> Figure:
    """Milliseconds that the import takes in a fresh process, beyond pytest itself."""
    found = [_once() for _ in range(STARTS)]
    times = [milliseconds for milliseconds, _ in found]
    torch = "torch is imported" if any(has_torch for _, has_torch in found) else "torch is not imported"
    return Figure(
        PLUGIN,
        median(times),
        "ms",
        f"a process that has imported pytest, {STARTS} starts",
        False,
        f"{min(times):.3g} to {max(times):.3g} ms; {torch}",
    )


def _once() -> tuple[float, bool]:
    done = subprocess.run(
        [sys.executable, "-P", "-c", _SCRIPT],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=True,
    )
    milliseconds, has_torch = done.stdout.split()
    return float(milliseconds), has_torch == "True"
