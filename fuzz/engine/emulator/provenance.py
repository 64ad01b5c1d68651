"""Masks of undefined lanes that remember why: memory that nobody wrote, or an earlier finding.

Operators of the language combine such masks as they combine any: `|`, `&`, `where`, reductions, rearrangements.
A `TracedMask` answers each of these itself, and does the same to the mask of every origin, so that no operator
needs to know of it. What it does not understand gives a plain mask: the lanes stay undefined, their origin is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fuzz.engine.emulator.masks import some

Key = tuple[object, ...]
Bounds = tuple[int, int]


@dataclass(frozen=True)
class Origin:
    """Why lanes are undefined: `argument` was loaded from at `file`:`line` where nobody had written, or, if
    `cause` is given, the finding with that key came first.
    """

    file: str
    line: int
    argument: str | None = None
    extent: Bounds | None = None
    cause: Key | None = None

    @property
    def rank(self) -> tuple[object, ...]:
        """Order among origins, the same in every batch."""
        return self.line, self.file, self.argument or "", self.cause is None, repr(self.cause)


class Source(NamedTuple):
    """`lanes` (bool) come from one origin; `low` and `high` (int64 [P or 1]): elements of its argument."""

    lanes: Tensor
    low: Tensor
    high: Tensor


Sources = dict[Origin, Source]


class TracedMask(Tensor):
    """A mask of undefined lanes [P or 1, ...] with its sources."""

    sources: Sources

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*(plain(a) for a in args), **kwargs)
            if not isinstance(result, Tensor) or result.dtype is not torch.bool or func in _FORGET:
                return result
            found: Sources = {}
            for position, mask in _traced(func, args):
                for origin, source in mask.sources.items():
                    lanes = func(*_only(func, args, position, source.lanes), **kwargs) & result
                    _join(found, origin, Source(lanes, source.low, source.high))
            return traced(result, found)


_FORGET = frozenset(
    (
        *(torch.bitwise_not, torch.logical_not, Tensor.__invert__, Tensor.bitwise_not, Tensor.logical_not),
        *(torch.eq, torch.ne, Tensor.eq, Tensor.ne, Tensor.__eq__, Tensor.__ne__),
        *(torch.bitwise_xor, torch.logical_xor, Tensor.__xor__, Tensor.__rxor__),
    )
)
_UNIONS = frozenset(
    (
        *(torch.bitwise_or, torch.logical_or, Tensor.__or__, Tensor.__ror__, Tensor.bitwise_or, Tensor.logical_or),
        *(torch.stack, torch.cat, torch.where, Tensor.where),
    )
)
_Place = tuple[int, int | None]  # an argument, or an item of one that is a list


def traced(mask: Tensor, sources: Sources) -> Tensor:
    """`mask` with those of the sources that have lanes in it; `mask` itself if none has. Shapes broadcast."""
    kept = {origin: source for origin, source in sources.items() if some(source.lanes)}
    if not kept:
        return mask
    result: TracedMask = plain(mask).as_subclass(TracedMask)
    result.sources = kept
    return result


def from_origin(lanes: Tensor, origin: Origin, offsets: Tensor | None = None) -> Tensor:
    """`lanes` [P or 1, ...] as coming from `origin` alone; `offsets` (of the same shape): its elements."""
    size, lanes = lanes.shape[0], plain(lanes)
    if offsets is None:
        low = high = torch.zeros(size, dtype=torch.int64)
    else:
        flat, off = offsets.expand(lanes.shape).reshape(size, -1), ~lanes.reshape(size, -1)
        limits = torch.iinfo(torch.int64)
        low, high = flat.masked_fill(off, limits.max).amin(1), flat.masked_fill(off, limits.min).amax(1)
    return traced(lanes, {origin: Source(lanes, low, high)})


def sources(mask: Tensor) -> list[tuple[Origin, Source]]:
    """Where the lanes of a mask come from, in an order that does not depend on the batch."""
    if not isinstance(mask, TracedMask):
        return []
    return sorted(mask.sources.items(), key=lambda item: item[0].rank)


def plain(x: Any) -> Any:
    """A mask, or a list of masks, without sources; anything else as it is."""
    if isinstance(x, TracedMask):
        return x.as_subclass(Tensor)
    if isinstance(x, (list, tuple)):
        return type(x)(plain(item) for item in x)
    return x


def rows_of(mask: Tensor, rows: Tensor) -> Tensor:
    """The rows of a mask, or of any tensor [P or 1, ...], that belong to the programs in `rows`."""
    taken = _rows(plain(mask), rows)
    if not isinstance(mask, TracedMask):
        return mask if taken is plain(mask) else taken
    return traced(taken, {key: Source(*(_rows(x, rows) for x in source)) for key, source in mask.sources.items()})


def _rows(x: Tensor, rows: Tensor) -> Tensor:
    if len(x) == 1:
        return x
    first, last = int(rows[0]), int(rows[-1])
    if last - first + 1 == len(rows):
        return x[first : last + 1]
    narrow = x
    for axis in range(1, x.ndim):  # what is repeated along an axis is taken once
        if x.stride(axis) == 0:
            narrow = narrow.narrow(axis, 0, 1)
    return narrow.index_select(0, rows).expand(len(rows), *x.shape[1:])


def united_masks(parts: Sequence[tuple[Tensor, Tensor | None]], shape: tuple[int, ...]) -> Tensor | None:
    """Inverse of `rows_of` for masks of blocks [P, ...] in `shape`; None for masks without lanes."""
    if all(mask is None for _, mask in parts):
        return None
    limits = torch.iinfo(torch.int64)
    whole, found = torch.zeros(shape, dtype=torch.bool), dict[Origin, Source]()
    for rows, mask in parts:
        if mask is None:
            continue
        whole[rows] = plain(mask)
        for key, source in sources(mask):
            if key not in found:
                low, high = torch.full(shape[:1], limits.max), torch.full(shape[:1], limits.min)
                found[key] = Source(torch.zeros(shape, dtype=torch.bool), low, high)
            for united, own in zip(found[key], source, strict=True):
                united[rows] = own
    return traced(whole, found)


def _traced(func: Callable[..., Any], args: Sequence[Any]) -> Iterator[tuple[_Place, TracedMask]]:
    for i, argument in enumerate(args):
        if isinstance(argument, TracedMask) and not (func is torch.where and i == 0):
            yield (i, None), argument
        elif isinstance(argument, (list, tuple)):
            yield from (((i, j), item) for j, item in enumerate(argument) if isinstance(item, TracedMask))


def _only(func: Callable[..., Any], args: Sequence[Any], place: _Place, lanes: Tensor) -> list[Any]:
    """The arguments with one mask replaced by that of one origin; where masks are united, the others empty."""
    position, item = place
    emptied = func in _UNIONS

    def other(x: Any, condition: bool) -> Any:
        x = plain(x)
        if emptied and not condition and isinstance(x, Tensor):
            return torch.zeros_like(x)
        return x

    result: list[Any] = []
    for i, argument in enumerate(args):
        condition = (func is torch.where and i == 0) or (func is Tensor.where and i == 1)
        if i != position:
            result.append(other(argument, condition))
        elif item is None:
            result.append(lanes.expand(argument.shape))
        else:
            items = [lanes.expand(x.shape) if j == item else other(x, False) for j, x in enumerate(argument)]
            result.append(type(argument)(items))
    return result


def _join(found: Sources, origin: Origin, source: Source) -> None:
    known = found.get(origin)
    if known is not None:
        lanes, low, high = known
        low, high = torch.minimum(low, source.low), torch.maximum(high, source.high)
        source = Source(lanes | source.lanes, low, high)
    found[origin] = source
