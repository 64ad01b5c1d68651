"""Reading plain data of which nothing is known yet: every field is asked for by its type, and an error names it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from fuzz.errors import Exit, Expected, Stop

Kind = TypeVar("Kind", bound=StrEnum)
Read = TypeVar("Read")

_REQUIRED: Any = object()


class PlainError(Expected, ValueError):
    """Plain data that is not what it should be. One line: the field and what is allowed."""


def shown(value: object) -> str:
    """A value as it may stand in an error's line."""
    text = json.dumps(value, default=repr)
    return text if len(text) <= 60 else text[:57] + "..."


def read_json(path: Path, read: Callable[[Any], Read]) -> Read:
    """What ``read`` makes of the JSON in a file. Raises ``Stop`` with the file's name in front of what is wrong."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise Stop(Exit.USAGE, f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise Stop(Exit.USAGE, f"{path}: not UTF-8 text") from None
    except (ValueError, RecursionError) as error:
        raise Stop(Exit.USAGE, f"{path}: not JSON: {str(error)[:120]}") from None
    try:
        return read(data)
    except Expected as error:
        raise Stop(error.exit_code, f"{path}: {error}") from None


class Fields:
    """The fields of a JSON object that is called ``where``. Every method raises ``PlainError``.

    A field that has a default may be missing, and may be null. What is not asked for is passed over.
    """

    def __init__(self, data: object, where: str) -> None:
        if not isinstance(data, Mapping):
            raise PlainError(f"{where}: {shown(data)}; allowed: a JSON object")
        self.data, self.where = data, where

    def _get(self, name: str, default: Any) -> Any:
        value = self.data.get(name)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise PlainError(f"{self._place(name)}: {'null' if name in self.data else 'missing'}")
        return default

    def _fail(self, name: str, value: object, allowed: str) -> PlainError:
        return PlainError(f"{self._place(name)}: {shown(value)}; allowed: {allowed}")

    def _place(self, name: str) -> str:
        # A name may be the data's own, and hold anything.
        return f"{self.where}.{name if name.isprintable() and len(name) <= 60 else shown(name)}"

    def schema(self, allowed: int) -> None:
        """Refuse every version but one."""
        value = self.data.get("schema")
        if type(value) is not int or value != allowed:
            raise self._fail("schema", value, f"{allowed}, the version that this release reads")

    def text(self, name: str, default: Any = _REQUIRED) -> Any:
        """A text."""
        value = self._get(name, default)
        if value is not default and not isinstance(value, str):
            raise self._fail(name, value, "text")
        return value

    def one_of(self, name: str, kind: type[Kind]) -> Kind:
        """A text out of an enumeration."""
        value = self._get(name, _REQUIRED)
        if not isinstance(value, str) or value not in tuple(kind):
            raise self._fail(name, value, ", ".join(kind))
        return kind(value)

    def count(self, name: str, default: Any = _REQUIRED) -> Any:
        """An integer, not negative."""
        value = self._get(name, default)
        return value if value is default else self._count(name, value)

    def _count(self, name: str, value: object) -> int:
        if type(value) is not int or not 0 <= value < 1 << 63:
            raise self._fail(name, value, "an integer, 0 or more")
        return value

    def number(self, name: str, default: Any = _REQUIRED) -> Any:
        """A number as a float."""
        value = self._get(name, default)
        return value if value is default else self._number(name, value)

    def _number(self, name: str, value: object) -> float:
        if isinstance(value, float) or (type(value) is int and abs(value) < 1 << 63):
            return float(value)
        raise self._fail(name, value, "a number")

    def flag(self, name: str, default: Any = _REQUIRED) -> Any:
        """True or false."""
        value = self._get(name, default)
        if type(value) is not bool:
            raise self._fail(name, value, "true, false")
        return value

    def fields(self, name: str, default: Any = _REQUIRED) -> Fields:
        """An object."""
        return Fields(self._get(name, default), self._place(name))

    def counts(self, name: str) -> dict[str, int]:
        """An object of counts; none where it is missing."""
        inner = self.fields(name, {})
        return {str(key): inner._count(key, value) for key, value in inner.data.items()}

    def numbers(self, name: str) -> dict[str, float]:
        """An object of numbers; none where it is missing."""
        inner = self.fields(name, {})
        return {str(key): inner._number(key, value) for key, value in inner.data.items()}

    def list(self, name: str, default: Any = _REQUIRED) -> list[Any]:
        """A list of anything."""
        value = self._get(name, default)
        if not isinstance(value, list):
            raise self._fail(name, value, "a list")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of texts; empty where it is missing."""
        values = self.list(name, [])
        if not all(isinstance(value, str) for value in values):
            raise self._fail(name, values, "a list of text")
        return tuple(values)

    def each(self, name: str) -> Iterator[Fields]:
        """The objects of a list, none where it is missing."""
        for index, value in enumerate(self.list(name, [])):
            yield Fields(value, f"{self.where}.{name}[{index}]")

    def integers(self, name: str, length: int | None = None) -> tuple[int, ...]:
        """A list of counts, of a length if one is given; empty where it is missing."""
        values = self.list(name, [])
        if length is not None and len(values) != length:
            raise self._fail(name, values, f"{length} integers")
        return tuple(self._count(f"{name}[{i}]", value) for i, value in enumerate(values))
