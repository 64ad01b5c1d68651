"""The arguments of a captured call, asked for one by one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

from fuzz.buffers import DTYPE_NAMES
from fuzz.captured.load import RecordError
from oracle.capture import Record
from oracle.convention import Convention
from oracle.declare import Declaration, parameters


class Reader:
    """The arguments of a record, by what they have to be. Every method raises ``RecordError``."""

    def __init__(self, record: Record, declaration: Declaration) -> None:
        self.record, self.declaration = record, declaration
        names = parameters(declaration.operation, declaration.convention, declaration.task)
        optional = ("causal", "scale", "window", "sinks", "soft_cap", "k_descale", "v_descale", "q_descale")
        for name in record.arguments:
            if name not in (*names, "page_size"):
                raise RecordError(f"{name}: unknown to {declaration.name}; allowed: {', '.join(names)}")
        for name in names:
            if name not in optional and not isinstance(record.arguments.get(name), Tensor):
                raise RecordError(f"{name}: missing; {declaration.name} takes a tensor of that name")

    @property
    def convention(self) -> Convention:
        """The target's."""
        return self.declaration.convention

    def tensor(self, name: str, axes: str, dtypes: Sequence[str]) -> Tensor:
        """A tensor with as many axes as ``axes`` has words, of one of ``dtypes``."""
        value = self.record.arguments[name]
        known = DTYPE_NAMES.get(value.dtype)
        if value.ndim != len(axes.split()) or known not in dtypes:
            raise RecordError(f"{name}: {known} {list(value.shape)}; allowed: [{axes}] of {', '.join(dtypes)}")
        found: Tensor = value
        return found

    def indices(self, name: str, length: int | None = None) -> Tensor:
        """A list of integers, as int64."""
        value = self.tensor(name, "n", ("int32", "int64"))
        if length is not None and len(value) != length:
            raise RecordError(f"{name}: {len(value)} integers; allowed: {length}")
        return value.long()

    def lengths(self, name: str, total: int | None, what: str) -> tuple[int, ...]:
        """Lengths of the runs whose starts, and end, are listed."""
        starts = self.indices(name).tolist()
        if not starts or starts[0] != 0 or any(a > b for a, b in pairwise(starts)):
            raise RecordError(f"{name}: allowed: 0, then integers that never fall")
        if total is not None and starts[-1] != total:
            raise RecordError(f"{name}: ends at {starts[-1]}; allowed: {total}, the number of {what}")
        return tuple(b - a for a, b in pairwise(starts))

    def number(self, name: str) -> float | None:
        """A number, None where there is none."""
        value = self.record.arguments.get(name)
        if isinstance(value, Tensor) and value.numel() == 1:
            value = value.item()
        if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
            return None if value is None else float(value)
        raise RecordError(f"{name}: allowed: a number")

    def flag(self, name: str, default: bool) -> bool:
        """True or False."""
        value = self.record.arguments.get(name, default)
        if not isinstance(value, bool):
            raise RecordError(f"{name}: allowed: true or false")
        return value

    def window(self, causal: bool) -> int | None:
        """Keys that a query sees, itself included; None: all."""
        value, window = self.record.arguments.get("window"), self.convention.window
        if value is None:
            return None
        try:
            keys = window.keys(value)
            meant = value if keys is None else window.argument(keys, causal=causal)
        except ValueError as error:
            raise RecordError(str(error)) from None
        if meant != value:
            raise RecordError(f"window: {value!r}; allowed here: {meant!r}, for {keys} keys")
        return keys
