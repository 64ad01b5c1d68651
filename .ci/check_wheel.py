"""Check an installed wheel in a repository that has its own top-level `fuzz/` and `suites/`.

Run by the Python of the environment that holds the wheel. A scratch repository is made in a temporary folder;
there pytest must find the repository's packages and our plugin, and our own command must find ours. Exits 1
on a fault.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

FILES = {
    "fuzz/__init__.py": "OWNER = 'repository'\n",
    "suites/__init__.py": "OWNER = 'repository'\n",
    "suites/test_own.py": """
import sys

import fuzz
import suites
from oracle import __file__ as oracle_file


def test_own_packages_are_imported():
    assert (fuzz.OWNER, suites.OWNER) == ("repository", "repository")


def test_oracle_is_the_installed_one(attn_oracle):
    from oracle import assert_attention_close
    assert attn_oracle.assert_attention_close is assert_attention_close
    assert oracle_file.startswith(sys.prefix)
""",
}


def clean() -> dict[str, str]:
    """The environment without what would put a source tree on the path."""
    return {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "PYTEST", "ATTN_ORACLE"))}


def must(where: Path, *command: str, **env: str) -> None:
    print("+", *command, flush=True)
    subprocess.run(command, cwd=where, env=clean() | env, check=True, stdin=subprocess.DEVNULL)


def main() -> int:
    scripts = Path(sysconfig.get_path("scripts"))
    purelib = sysconfig.get_path("purelib")
    ours = (
        "import fuzz, oracle, suites\n"
        f"assert all(m.__file__.startswith({purelib!r}) for m in (fuzz, oracle, suites))\n"
        "import importlib.util\n"
        "assert importlib.util.find_spec('suites.targets')\n"
        "assert not importlib.util.find_spec('suites.oracle'), 'our own tests are in the wheel'\n"
    )
    with tempfile.TemporaryDirectory() as name:
        where = Path(name)
        for path, text in FILES.items():
            (where / path).parent.mkdir(exist_ok=True)
            (where / path).write_text(text)
        try:
            for mode in ("prepend", "append", "importlib"):
                # -m puts the repository on the path, as most repositories have it by one way or another.
                must(where, sys.executable, "-m", "pytest", "-q", f"--import-mode={mode}")
            must(where, str(scripts / "pytest"), "-q")
            # The other side, with the path that an installed command has: the repository is not on it.
            must(where, sys.executable, "-I", "-c", ours)
            if any(Path(purelib, "fuzz").glob("cli*")):
                # Its worker processes must find ours as well: a few cases tell.
                must(where, str(scripts / "attn-oracle"), "targets")
                must(where, str(scripts / "attn-oracle"), "fuzz", "--cases", "3")
                # Also where the repository is on the path before ours.
                must(where, str(scripts / "attn-oracle"), "targets", PYTHONPATH=str(where))
            else:
                print("not checked: the command attn-oracle, which is not there yet")
        except subprocess.CalledProcessError as error:
            print(f"exit {error.returncode}: {' '.join(error.cmd)}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
