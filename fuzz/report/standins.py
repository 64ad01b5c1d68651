"""What a reproducer script carries whose kernel's package cannot be imported as a whole.

The text below this docstring is copied into the script as it stands.
"""

# --- copied from here
import importlib
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any


class StandIn:
    """A name of a module that is not executed, and that nothing is known of."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """It has no answer."""
        raise RuntimeError(f"{self.name} is needed: install the package with everything that it needs")

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[Any, ...]:
        """As a base class it adds nothing."""
        return ()


class Variables:
    """A table of environment variables, all of which say the same."""

    def __init__(self, answer: Any) -> None:
        self.get = lambda: answer

    def __getattr__(self, name: str) -> Any:
        return self


class StandInModule(ModuleType):
    """A module that is not executed: the names that are known of it."""

    def __init__(self, name: str, answers: Mapping[str, Any]) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        vars(self).update(answers)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn(f"{self.__name__}.{name}")


class Alone(MetaPathFinder, Loader):
    """Finds modules of an installed package without what the package itself needs: ``files`` are executed, what they
    ask of other modules is in ``answers``."""

    def __init__(self, files: Sequence[str], answers: Mapping[str, Mapping[str, Any]]) -> None:
        self.files, self.answers = files, answers
        self.packages = {name.partition(".")[0] for name in (*files, *answers)}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Where a module comes from."""
        top, *rest = fullname.split(".")
        if top not in self.packages:
            return None
        if fullname in self.files:
            for place in sys.path:
                file = Path(place or ".", top, *rest).with_suffix(".py")
                if file.is_file():
                    return importlib.util.spec_from_file_location(fullname, file)
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """A stand-in."""
        return StandInModule(spec.name, self.answers.get(spec.name, {}))

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: it is not executed."""


def importable(files: Sequence[str], answers: Mapping[str, Mapping[str, Any]], whole: Sequence[str]) -> None:
    """Make sure that ``files`` can be imported: with their package and the modules ``whole``, or alone."""
    try:
        for name in (*files, *whole):
            importlib.import_module(name)
    except Exception as error:  # noqa: BLE001 - a package may fail in any way where it is not at home
        alone = Alone(files, answers)
        stood = f", over plain torch functions in the place of {', '.join(whole)}" if whole else ""
        print(f"not everything can be imported ({error}): the kernel's files alone{stood}")
        for name in [name for name in sys.modules if name.partition(".")[0] in alone.packages]:
            del sys.modules[name]
        sys.meta_path.insert(0, alone)
