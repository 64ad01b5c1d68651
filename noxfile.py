"""Set-up and sessions. `nox -s gpu_diff` is the main job and `nox -s tests` the framework's own tests.

Where torch comes from is decided once for all sessions. If the torch of the system's Python sees a GPU,
every environment uses that one, and neither torch nor triton is installed over it: on ROCm the vendor's
build is the only right one. A path file does it, where `--system-site-packages` would miss a Python that is
itself a virtual environment, as in many vendors' images. Otherwise one environment, `.nox/runtime-*`, gets
torch, and the sessions' own environments look it up there, so that a second session costs seconds and no
second torch.

With `--no-venv` nothing is installed: the sessions run from this source tree with a Python that has torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import nox

nox.options.default_venv_backend = "virtualenv"  # uv would not see what path files add
nox.options.reuse_venv = "yes"
nox.options.sessions = ["lint", "tests"]

ROOT = Path(__file__).parent
TORCH = "torch==2.13.0"  # triton is not pinned beside it: torch names the version that it was built with
OLDEST_TORCH = (2, 9)  # as pyproject.toml says
SGLANG = "sglang==0.5.15"  # its kernels' source; its dependencies (a whole serving stack) are not needed
PROJECT = nox.project.load_toml("pyproject.toml")["project"]
DEPENDENCIES = [name for name in PROJECT["dependencies"] if not name.startswith("torch")]
DEV = PROJECT["optional-dependencies"]["dev"]
DOCS = PROJECT["optional-dependencies"]["docs"]

# What a Python has to offer, without importing torch: that takes seconds.
PROBE = """
import importlib.metadata, importlib.util, json, os, site, sys, sysconfig
def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
dirs = site.getsitepackages() + ([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])
torch = importlib.util.find_spec("torch")
if torch and torch.origin:
    dirs.append(os.path.dirname(os.path.dirname(torch.origin)))
print(json.dumps({
    "executable": sys.executable,
    "tag": sys.implementation.cache_tag,
    "purelib": sysconfig.get_path("purelib"),
    "dirs": [d for d in dict.fromkeys(dirs) if os.path.isdir(d)],
    "torch": version("torch"),
    "sglang": version("sglang"),
    "xdist": version("pytest-xdist"),
}))
"""
SEES_GPU = "import sys, torch; sys.exit(not torch.cuda.is_available())"


@dataclass(frozen=True)
class Python:
    """An interpreter and what it sees: `dirs` are its site-packages, `tag` its ABI (`cpython-311`)."""

    executable: str
    tag: str
    purelib: str
    dirs: list[str]
    torch: str | None
    sglang: str | None
    xdist: str | None

    def sees_gpu(self) -> bool:
        """Whether its torch imports and finds a CUDA or ROCm device."""
        return bool(self.torch) and subprocess.run([self.executable, "-c", SEES_GPU], check=False).returncode == 0


@dataclass(frozen=True)
class Sandbox:
    """Where a session runs: an interpreter, and the variables that make our packages importable there."""

    session: nox.Session
    python: Python
    env: dict[str, str] = field(default_factory=dict)

    def run(self, *args: str, **env: str) -> None:
        self.session.run(self.python.executable, *args, env={**self.env, **env}, external=True)

    def attn_oracle(self, *args: str) -> None:
        """The command line, by its module: with --no-venv there is no installed script."""
        self.run("-m", "attn_oracle_cli", *args)


def probe(executable: str | Path) -> Python | None:
    """What `executable` sees, or None if it does not start."""
    done = subprocess.run([str(executable), "-c", PROBE], stdout=subprocess.PIPE, text=True, check=False)
    return Python(**json.loads(done.stdout.splitlines()[-1])) if done.returncode == 0 else None


def probe_venv(session: nox.Session, place: Path) -> Python:
    found = probe(place / "bin" / "python")
    if found is None:
        session.error(f"the Python of {place} does not start; remove that folder and try again")
    return found


def pythons() -> list[Python]:
    """The interpreter that runs nox, the one that its environment was made from, and `python3` outside it."""
    own = Path(sys.prefix, "bin")
    outside = [d for d in os.environ.get("PATH", "").split(os.pathsep) if d and Path(d) != own]
    system = shutil.which("python3", path=os.pathsep.join(outside))
    names = [sys.executable, getattr(sys, "_base_executable", None), system]
    return [found for name in dict.fromkeys(names) if name and (found := probe(name))]


def with_gpu(session: nox.Session, tag: str) -> Python | None:
    """The system's Python whose torch sees a GPU, if an environment of ABI `tag` can use that torch."""
    for python in pythons():
        if python.torch is None or not python.sees_gpu():
            continue
        has = f"{python.executable} has torch {python.torch}, which sees a GPU"
        if python.tag != tag:
            session.warn(f"{has}, but is {python.tag}, not {tag}: run nox with it")
        elif tuple(int(part) for part in python.torch.split(".")[:2]) < OLDEST_TORCH:
            session.error(f"{has}, but torch {'.'.join(map(str, OLDEST_TORCH))} is the oldest supported")
        else:
            return python
    return None


def once(place: Path, recipe: list[str], build: Callable[[], None]) -> None:
    """Run `build` unless `place` was built by this recipe before."""
    stamp = place / "attn-oracle.stamp"
    key = hashlib.sha256("\n".join(recipe).encode()).hexdigest()
    if stamp.exists() and stamp.read_text() == key:
        return
    stamp.unlink(missing_ok=True)
    build()
    stamp.write_text(key)


def look_up_in(purelib: str, dirs: list[str]) -> None:
    """Let the environment that owns `purelib` import from `dirs` too, after its own packages."""
    lines = [f"import site; site.addsitedir({folder!r})\n" for folder in dirs]
    Path(purelib, "attn_oracle_runtime.pth").write_text("".join(lines))


def runtime(session: nox.Session, own: Python) -> list[str]:
    """The folders that hold torch, our other dependencies and sglang's files: made, or the system's."""
    system = with_gpu(session, own.tag)
    session.log(f"torch: {system.torch} of {system.executable}" if system else f"{TORCH} (no GPU seen)")
    place = Path(session.virtualenv.location).parent / f"runtime-{own.tag}-{'system' if system else 'own'}"
    python = str(place / "bin" / "python")
    shared = system.dirs if system else []
    wanted = DEPENDENCIES if system else [TORCH, *DEPENDENCIES]
    # A real installation is what its owner wants tested; ours only stands in for a missing one.
    sglang = [] if system and system.sglang else [SGLANG]

    def build() -> None:
        session.run(sys.executable, "-m", "virtualenv", "-q", "-p", own.executable, str(place), external=True)
        look_up_in(probe_venv(session, place).purelib, shared)
        session.run(python, "-m", "pip", "install", "-q", *wanted, external=True)
        for name in sglang:
            session.run(python, "-m", "pip", "install", "-q", "--no-deps", name, external=True)

    once(place, [*wanted, *sglang, *shared], build)
    made = probe_venv(session, place)
    if made.torch is None or (system and made.torch != system.torch):
        session.error(f"{place} sees torch {made.torch}; remove that folder and try again")
    return [*made.dirs, *shared]


def without_venv(session: nox.Session) -> Sandbox:
    """Run from the source tree with what is installed: nothing can be fetched."""
    with_torch = [python for python in pythons() if python.torch]
    python = next((python for python in with_torch if python.sees_gpu()), None) or next(iter(with_torch), None)
    if python is None:
        session.error("--no-venv needs a Python with torch: run nox with that Python")
    session.log(f"torch: {python.torch} of {python.executable}")
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return Sandbox(session, python, {"PYTHONPATH": path})


def prepare(session: nox.Session, *extra: str) -> Sandbox:
    """Install what the session needs, `extra` requirements included, and say how to run Python there."""
    if session.virtualenv.venv_backend == "none":
        return without_venv(session)
    place = Path(session.virtualenv.location)
    own = probe_venv(session, place)
    dirs = runtime(session, own)

    def build() -> None:
        look_up_in(own.purelib, dirs)
        if extra:
            session.install("-q", *extra)
        session.install("-q", "--no-deps", "--editable", ".")

    once(place, [*dirs, *extra, (ROOT / "pyproject.toml").read_text()], build)
    return Sandbox(session, probe_venv(session, place))


@nox.session
def lint(session: nox.Session) -> None:
    """ruff and mypy."""
    box = prepare(session, *DEV)
    box.run("-m", "ruff", "check", ".")
    box.run("-m", "ruff", "format", "--check", ".")
    box.run("-m", "mypy")


@nox.session
def tests(session: nox.Session) -> None:
    """The framework's own tests; arguments after -- go to pytest (`-- -m slow` for the slow ones)."""
    box = prepare(session, *DEV)
    # Two workers: the machine that must stay quick has two cores. One thread each, so that they don't fight.
    workers = ["-n", "2"] if box.python.xdist else []
    box.run("-m", "pytest", *workers, *session.posargs, OMP_NUM_THREADS="1")


@nox.session
def docs(session: nox.Session) -> None:
    """Links resolve, the CLI reference is the code's, the guides' code blocks run, and the site builds, into site/."""
    box = prepare(session, *DEV, *DOCS)
    box.run(".ci/check_docs.py")
    box.run("-m", "mkdocs", "build", "--quiet", "--site-dir", "site", NO_MKDOCS_2_WARNING="1")
    box.run("-m", "pytest", "docs", OMP_NUM_THREADS="1")


@nox.session
def gpu_diff(session: nox.Session) -> None:
    """The differential tests: compiled kernels where there is a GPU, the emulator elsewhere."""
    prepare(session).run("-m", "suites.gpu_diff", *session.posargs)


@nox.session
def dcp(session: nox.Session) -> None:
    """Decode context parallel, all of it in under four minutes on two cores: its tests, then its differential tests."""
    box = prepare(session, *DEV)
    workers = ["-n", "2"] if box.python.xdist else []
    box.run("-m", "pytest", *workers, "-m", "dcp and not slow", OMP_NUM_THREADS="1")
    box.run(
        "-m", "suites.gpu_diff", "sglang.dcp*", "sglang.merge*", "portable.merge", "--time", "150s", *session.posargs
    )


@nox.session
def fuzz(session: nox.Session) -> None:
    """A campaign of ten minutes, or as the arguments after -- say."""
    prepare(session).attn_oracle("fuzz", *(session.posargs or ["--time", "10m"]))


@nox.session
def attn_oracle(session: nox.Session) -> None:
    """Any command of attn-oracle, with the arguments after -- (`-- report .attn-oracle`)."""
    prepare(session).attn_oracle(*session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """The performance figures."""
    prepare(session).attn_oracle("bench", *session.posargs)
