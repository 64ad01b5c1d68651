"""The start of the installed command `attn-oracle`.

A folder on PYTHONPATH may hold packages of the names `fuzz`, `suites` or `oracle`; the command needs its own,
which lie beside this file. Nothing is imported before they come first on the path.
"""

from __future__ import annotations

import os
import sys

INTERRUPTED = 130
NOTHING_CAN_RUN = 125


def main() -> int:
    """Run the command line; returns the exit code, 130 for Ctrl-C while it is being loaded."""
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    try:
        from fuzz.cli import main as run

        return run()
    except KeyboardInterrupt:
        return INTERRUPTED
    except ModuleNotFoundError as error:  # of what the command line itself is made with
        from oracle.dependencies import said_of

        if (said := said_of(error)) is None:
            raise
        print(f"attn-oracle: {said}", file=sys.stderr)
        return NOTHING_CAN_RUN


if __name__ == "__main__":
    sys.exit(main())
