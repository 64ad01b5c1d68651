"""A mistake as data: where in a source file, and what stands there instead.

``Fragment`` quotes text and is for our own files. ``Structure`` finds a place by kinds of syntax, names and operators,
and is for files of others, of which nothing is quoted; it is pinned by the file's hash.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Place:
    """A file, as a path below the folder of its top-level package (``suites/...``, ``sglang/...``), and the function.

    ``sha256`` pins a file that is not ours.
    """

    file: str
    function: str
    sha256: str | None = None


@dataclass(frozen=True)
class Fragment:
    """``old``, which the function has exactly once, becomes ``new``."""

    place: Place
    old: str
    new: str


@dataclass(frozen=True)
class Structure:
    """The node that ``at`` leads to becomes ``new``.

    Each step of ``at`` is ``KIND``, ``KIND NAME`` or ``KIND NAME#N`` and finds nodes within the one before, in the
    order of the source, outer ones first; without ``#N`` there has to be one, with it there are more than N, from 0.
    Kinds: ``assign`` (the target), ``return`` and ``if`` are statements; ``call`` (last part of the function's name,
    launches of a kernel too), ``compare`` and ``binop`` (operator), ``name`` (identifier) and ``argument`` (of the call
    found before: a keyword, or a position) are expressions.

    In ``new``, ``{self}`` is the node's own text, ``{0}``, ``{1}``, ... its parts: both sides of an operator,
    positional arguments of a call, the value of an assignment or a return, the condition of an if.
    """

    place: Place
    at: tuple[str, ...]
    new: str


Mutation = Fragment | Structure
