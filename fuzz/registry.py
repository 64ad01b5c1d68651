"""Known targets, by name: a visible list of modules, entry points, and modules that the user names."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from fnmatch import fnmatchcase
from hashlib import blake2b
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType

from fuzz import engine as engines
from fuzz.errors import Expected
from oracle.convention import CausalAlignment, Granularity, SinkUnits
from oracle.declare import Declaration, declaration_of
from oracle.kinds import Engine

BUILT_IN = "suites.targets"
GROUP = "attn_oracle.targets"


class RegistryError(Expected, ValueError):
    """Targets that cannot be loaded or found. One line: what, and what there is instead."""


def _import(name: str, origin: str) -> ModuleType:
    with _told(f"{origin}: {name}", name):
        return importlib.import_module(name)


def _load_file(path: Path) -> ModuleType:
    # Two files of one name are two modules; the name is the same in every process.
    key = blake2b(str(path.resolve()).encode(), digest_size=4).hexdigest()
    spec = importlib.util.spec_from_file_location(f"attn_oracle_targets_{path.stem}_{key}", path)
    if not path.exists():
        raise RegistryError(f"--targets: {path}: there is no such file")
    if spec is None or spec.loader is None or not path.is_file():
        raise RegistryError(f"--targets: {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    if (folder := str(path.resolve().parent)) not in sys.path:
        sys.path.append(folder)  # last: what lies beside the file is found, and hides nothing
    try:
        with _told(f"--targets {path}", spec.name):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[spec.name]
        raise
    return module


@contextmanager
def _told(origin: str, name: str) -> Iterator[None]:
    """Whatever the code of a module raises while it is imported becomes one line: where and what."""
    try:
        yield
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's code: anything
        if isinstance(error, ModuleNotFoundError) and error.name is not None:
            if name == error.name or name.startswith(error.name + "."):
                raise RegistryError(f"{origin.removesuffix(': ' + name)}: no module named {name}") from None
            what = f"needs the module {error.name}, which is missing"
        else:
            what = _shown(error)
        line = _line_of(error)
        raise RegistryError(f"{origin}: {'' if line is None else f'line {line}: '}{what}") from None


def _shown(error: BaseException) -> str:
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    first = " ".join(text.split())[:300]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _line_of(error: BaseException) -> int | None:
    """The line of the imported file, from which everything else was called, that led to ``error``."""
    steps = [
        step
        for step in traceback.extract_tb(error.__traceback__)
        if step.filename != __file__ and not step.filename.startswith(("<frozen importlib", _IMPORTLIB))
    ]
    if steps:
        return [step for step in steps if step.filename == steps[0].filename][-1].lineno
    return error.lineno if isinstance(error, SyntaxError) else None


_IMPORTLIB = str(Path(importlib.__file__).parent)


def declared_in(module: ModuleType) -> list[Declaration]:
    """Declarations attached to the functions of a module, in the order of their definition."""
    found = [declaration_of(value) for value in vars(module).values()]
    return [d for d in dict.fromkeys(found) if d is not None]


def load(extra: Sequence[str] = ()) -> dict[str, Declaration]:
    """Every known target by name.

    ``extra`` are module names or paths of Python files; one that is given twice is loaded once. Raises
    ``RegistryError`` for a module that cannot be found or imported, or that declares nothing, and for a name that
    is declared twice.
    """
    built_in: tuple[str, ...] = _import(BUILT_IN, "attn-oracle").MODULES
    modules = [_import(name, BUILT_IN) for name in built_in]
    for point in entry_points(group=GROUP):
        modules.append(_declaring(_import(point.module, f"entry point {point.name}"), f"entry point {point.name}"))
    for name in extra:
        modules.append(_declaring(_users(name, modules), f"--targets {name}"))
    targets: dict[str, Declaration] = {}
    for module in {id(module): module for module in modules}.values():
        for declaration in declared_in(module):
            known = targets.setdefault(declaration.name, declaration)
            if known is not declaration:
                raise RegistryError(f"target {declaration.name} is declared twice, in {module.__name__} too")
    return targets


def _users(name: str, loaded: Sequence[ModuleType]) -> ModuleType:
    """The module that ``--targets`` names, by its path or its name: the one loaded before, if it is the same file."""
    by_file = {Path(m.__file__).resolve(): m for m in loaded if m.__file__ is not None}
    if name.endswith(".py"):
        path = Path(name)
        return by_file.get(path.resolve()) or _load_file(path)
    if "/" in name:
        raise RegistryError(f"--targets: {name}: allowed: a module's name or a .py file")
    module = _import(name, "--targets")
    file = getattr(module, "__file__", None)  # a folder without __init__.py has none
    return module if file is None else by_file.get(Path(file).resolve(), module)


def _declaring(module: ModuleType, origin: str) -> ModuleType:
    if not declared_in(module):
        raise RegistryError(f"{origin}: declares no target; see oracle.declare")
    return module


GIVE = "one of your own needs --targets mine.py, the file that declares it"
"""What to write on the command line for a target that is not among those known."""


def unknown(name: str, known: Iterable[str], give: str = GIVE) -> str:
    """That no target has this name, which names are like it, and what to write for one that was not looked for."""
    like = get_close_matches(name, known, n=3, cutoff=0.5)
    nearest = f"; nearest: {', '.join(like)}" if like else ""
    return f"{name[:60]!r} is unknown{nearest}; attn-oracle targets lists them; {give}"


def select(targets: dict[str, Declaration], patterns: Sequence[str]) -> list[Declaration]:
    """Targets whose name matches one of the globs, all where there are none.

    Raises ``RegistryError`` for a pattern that matches nothing.
    """
    if not patterns:
        return list(targets.values())
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in targets):
            raise RegistryError(f"target {unknown(pattern, targets)}")
    return [t for name, t in targets.items() if any(fnmatchcase(name, p) for p in patterns)]


def why_not(declaration: Declaration, engine: Engine) -> str | None:
    """Why a target cannot run on ``engine`` here, or None."""
    if engine not in declaration.engines:
        return f"runs on {', '.join(declaration.engines)} only"
    return engines.unavailable(engine) or _not_handled(declaration) or _own_reason(declaration, engine)


def _own_reason(declaration: Declaration, engine: Engine) -> str | None:
    """What the declaration's own ``unavailable`` says. It is the user's code: what it raises is a reason."""
    try:
        reason = declaration.unavailable(engine)
    except Exception as error:  # noqa: BLE001 - anything
        return f"its unavailable({engine}) raised {_shown(error)}"
    if reason is None or isinstance(reason, str):
        return reason or None
    return f"its unavailable({engine}) returned {reason!r}; allowed: a reason or None"


def _not_handled(declaration: Declaration) -> str | None:
    """What a declaration says that nothing of ours acts on yet: judging it all the same would be wrong."""
    convention = declaration.convention
    if convention.causal_alignment is not CausalAlignment.BOTTOM_RIGHT:
        return f"causal_alignment {convention.causal_alignment} is not handled yet"
    if convention.sink is SinkUnits.SCALED:
        return "sink units scaled are not handled yet"
    if convention.sink_dtype != "fp32":
        return f"sink_dtype {convention.sink_dtype} is not handled yet"
    handled = (Granularity.NONE, Granularity.TENSOR, Granularity.HEAD, Granularity.TOKEN)
    descales = convention.descales
    if descales.q is not Granularity.NONE or descales.k not in handled or descales.v not in handled:
        return "descales of q, of a request or of a page are not handled yet"
    return None
