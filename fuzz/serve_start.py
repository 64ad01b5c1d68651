"""Starts ``fuzz.serve``. Where it lacks a package, each request is answered with the line that says so."""

from __future__ import annotations

import json
import sys

from oracle.dependencies import said_of


def main() -> None:
    """Serve until standard input ends."""
    try:
        from fuzz.serve import main as serve
    except ModuleNotFoundError as error:
        if (said := said_of(error)) is None:
            raise
        for _ in sys.stdin:
            print(json.dumps({"stop": f"attn-oracle {said}"}), flush=True)
        return
    serve()


if __name__ == "__main__":
    main()
