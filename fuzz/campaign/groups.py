"""Which case goes to which worker, so that a kernel is compiled once and then reused.

Cases of one group are expected to run the same compiled kernels. The first case of a group compiles them; until it is
done, others of the group wait, as they would only compile the same. Groups that nobody has begun come first, each on
a worker of its own: compilation runs ahead, and side by side. Then a worker prefers groups that it has run before,
whose kernels it holds; those of others it loads from the compiler's cache on disk.

The group is a guess from the case alone. Where it is wrong, a kernel is compiled twice, or a worker waits in vain:
time, and nothing else, depends on it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

_COUNTS = ("num_kv_heads", "parts")
"""Sizes that choose a block: what is compiled in is the next power of two."""

_COMPILED = (
    *("dtype", "kv_dtype", "kv_layout", "v_layout", "index_dtype", "index_form", "index_task", "prefix"),
    *("head_dim", "v_head_dim", "group_size", "page_size", "strided", "causal", "soft_cap"),
    *("k_descale", "v_descale", "slot_map"),
)
"""Fields whose value is a type or a constant of most kernels."""

_PRESENT = {"window": None, "sinks": "none"}
"""Fields of which a kernel is told at compile time whether there is one; and what they hold where there is none."""

_FIRST, _HELD, _ON_DISK, _WAITS = range(4)
"""How soon a worker takes an order: nobody has begun its group, the worker holds its kernels, others do, one compiles
them just now."""


def kernels_of(request: dict[str, Any]) -> Hashable:
    """The group of a worker's request: its target, and what of its case (plain data) becomes types and constants."""
    case = request["case"]
    return (
        request["target"],
        *(case[name] for name in _COMPILED),
        *(case[name] != absent for name, absent in _PRESENT.items()),
        *((case[name] - 1).bit_length() for name in _COUNTS),
    )


@dataclass(frozen=True)
class Order:
    """A request in a queue. ``group`` None: it shares nothing with any other."""

    index: int
    request: dict[str, Any]
    group: Hashable = None


class Queue:
    """Orders that wait for a worker. ``group`` tells a request's group; without it, the first to come is the first out.

    A worker is known by any number. It says when it is ``done``.
    """

    def __init__(self, group: Callable[[dict[str, Any]], Hashable] | None = None) -> None:
        self._group = group
        self._orders: list[Order] = []
        self._compiling: set[Hashable] = set()
        """groups whose first order is with a worker"""
        self._holders: dict[Hashable, set[int]] = {}
        """of each other group, the workers that have run an order of it"""

    def put(self, index: int, request: dict[str, Any]) -> None:
        """Add an order at the end."""
        self._orders.append(Order(index, request, self._group(request) if self._group else None))

    def take(self, worker: int) -> Order | None:
        """The order that ``worker`` is to run next; None where all that wait are to wait longer, or none does."""
        ranked = [(self._rank(order, worker), place) for place, order in enumerate(self._orders)]
        rank, place = min(ranked, default=(_WAITS, 0))
        if rank == _WAITS:
            return None
        order = self._orders.pop(place)
        if order.group is not None and order.group not in self._holders:
            self._compiling.add(order.group)
        return order

    def done(self, worker: int, order: Order) -> None:
        """``worker`` has run ``order``, however it ended."""
        if order.group is not None:
            self._compiling.discard(order.group)
            self._holders.setdefault(order.group, set()).add(worker)

    def forget(self) -> None:
        """Drop what waits. What was run stays known."""
        self._orders.clear()
        self._compiling.clear()

    def _rank(self, order: Order, worker: int) -> int:
        if order.group in self._compiling:
            return _WAITS
        holders = self._holders.get(order.group)
        if holders is None:
            return _FIRST
        return _HELD if worker in holders else _ON_DISK
