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
    """A name of a module that is not executed: a function that gives one answer, or none."""

    def __init__(self, name: str, answers: Sequence[Any]) -> None:
        self.name, self.answers = name, answers

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The answer."""
        if not self.answers:
            raise RuntimeError(f"{self.name} is needed: install the package with everything that it needs")
        return self.answers[0]

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[Any, ...]:
        """As a base class it adds nothing."""
        return ()


class StandInModule(ModuleType):
    """A module that is not executed."""

    def __init__(self, name: str, answers: Mapping[str, Any]) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self._answers = answers

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn(f"{self.__name__}.{name}", [self._answers[name]] if name in self._answers else [])


class Alone(MetaPathFinder, Loader):
    """Finds modules of an installed package without what the package itself needs: ``files`` are executed, what they
    ask of other modules is answered from ``answers``."""

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


def importable(files: Sequence[str], answers: Mapping[str, Mapping[str, Any]]) -> None:
    """Make sure that ``files`` can be imported: with their whole package, or alone."""
    try:
        for name in files:
            importlib.import_module(name)
    except Exception as error:  # noqa: BLE001 - a package may fail in any way where it is not at home
        alone = Alone(files, answers)
        print(f"the package cannot be imported as a whole ({error}); its files are, alone")
        for name in [name for name in sys.modules if name.partition(".")[0] in alone.packages]:
            del sys.modules[name]
        sys.meta_path.insert(0, alone)
