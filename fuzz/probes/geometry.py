"""What a design has to know about a case: which keys each row sees, and what a logit is made of."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fuzz.buffers import DTYPES
from fuzz.case import Case, Prefix
from fuzz.probes.exact import power_above
from fuzz.probes.plain import descale_of
from oracle.fp8 import FORMAT_OF_DTYPE
from oracle.kinds import Operation, Role

BLOCK = 16
"""Keys in one block of a code: aligned in the request, whatever the page size."""


def largest(dtype_name: str) -> float:
    """Largest finite value of a dtype."""
    dtype = DTYPES[dtype_name]
    return FORMAT_OF_DTYPE[dtype].max if dtype in FORMAT_OF_DTYPE else float(torch.finfo(dtype).max)


def smallest_normal(dtype_name: str) -> float:
    """Smallest positive number of a dtype with all its bits."""
    dtype = DTYPES[dtype_name]
    return FORMAT_OF_DTYPE[dtype].smallest_normal if dtype in FORMAT_OF_DTYPE else float(torch.finfo(dtype).tiny)


@dataclass(frozen=True, eq=False)
class Geometry:
    """An attention case, seen by a design. Keys are counted through all requests, rows likewise."""

    case: Case

    # ------------------------------------------------------------- numbers

    @cached_property
    def scale(self) -> float:
        """The softmax scale in force."""
        return 1.0 / math.sqrt(self.case.head_dim) if self.case.scale is None else self.case.scale

    @cached_property
    def factor(self) -> Tensor:
        """Logit over q . stored k, before the cap: float64 [1, Hkv], or [Tk, Hkv] where descales are of tokens."""
        descale = descale_of(self.case, Role.K)
        ones = torch.ones(1, self.case.num_kv_heads, dtype=torch.float64)
        if descale is None or not descale.numel():
            return ones * self.scale
        return ones * descale.double() * self.scale

    @cached_property
    def sign(self) -> float:
        """Sign of the scale."""
        return -1.0 if self.scale < 0 else 1.0

    def amplitudes(self, logit: float) -> tuple[float, float] | None:
        """Powers of two for one channel of q and of k whose product is a logit of at least ``logit`` > 0.

        They have the sign of the scale between them, so that the logit is positive. None where no such pair fits
        the dtypes, and the dtype that a kernel may round their product to.
        """
        least = float(self.factor.abs().min())
        if least == 0.0 or not math.isfinite(logit / least):
            return None
        q_most, k_most = (power_above(largest(name)) - 2 for name in (self.case.dtype, self.case.kv_dtype))
        total = power_above(logit / least)
        if total > min(q_most + k_most, power_above(largest(self.case.dtype)) - 2):
            return None
        k = min(total // 2, k_most)
        if total - k > q_most:
            k = total - q_most
        return 2.0 ** (total - k), self.sign * 2.0**k

    def channel(self, logit: float) -> tuple[float, float]:
        """``amplitudes`` where a probe has been found to fit. Raises ValueError where they do not exist."""
        found = self.amplitudes(logit)
        if found is None:
            raise ValueError(self.no_amplitude(logit))
        return found

    def no_amplitude(self, logit: float) -> str:
        """What to say where ``amplitudes`` finds none."""
        return f"no product of one channel reaches {logit:g} nats at this scale and these dtypes"

    # ----------------------------------------------------- rows and keys

    @cached_property
    def row_request(self) -> Tensor:
        """Request of each row: int64 [Tq]."""
        return _request_of(self.case.query_lens)

    @cached_property
    def key_request(self) -> Tensor:
        """Request of each key: int64 [Tk]."""
        return _request_of(self.case.context_lens)

    @cached_property
    def key_starts(self) -> Tensor:
        """First key of each request: int64 [R]."""
        lens = torch.tensor(self.case.context_lens, dtype=torch.int64)
        return lens.cumsum(0) - lens

    @cached_property
    def row_in_request(self) -> Tensor:
        """Index of each row among its request's: int64 [Tq]."""
        return _within(self.case.query_lens)

    @cached_property
    def position(self) -> Tensor:
        """Position of each key in its request: int64 [Tk]."""
        return _within(self.case.context_lens)

    @cached_property
    def ranges(self) -> tuple[Tensor, Tensor]:
        """(lo, hi): row i sees the positions lo[i] .. hi[i] - 1 of its request: int64 [Tq] each; 0, 0 if none."""
        case = self.case
        length = torch.tensor(case.context_lens, dtype=torch.int64)[self.row_request]
        queries = torch.tensor(case.query_lens, dtype=torch.int64)[self.row_request]
        at = length - queries + self.row_in_request
        hi = torch.minimum(at + 1, length).clamp(min=0) if case.causal else length
        lo = torch.zeros_like(at) if case.window is None else (at - case.window + 1).clamp(min=0)
        some = lo < hi
        return lo * some, hi * some

    @cached_property
    def most_keys(self) -> tuple[int, ...]:
        """The most keys that a row of each request sees; at least 1."""
        lo, hi = self.ranges
        found = torch.ones(len(self.case.query_lens), dtype=torch.int64)
        return tuple(found.scatter_reduce(0, self.row_request, hi - lo, "amax").tolist())

    @cached_property
    def longest(self) -> int:
        """The most keys that any row sees; at least 1."""
        return max(self.most_keys, default=1)

    @cached_property
    def _seen(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of each request: where the rows that see a key start and end, least and greatest each: int64 [R]."""
        lo, hi = self.ranges
        some = lo < hi
        request, lo, hi = self.row_request[some], lo[some], hi[some]
        none = torch.zeros(len(self.case.query_lens), dtype=torch.int64)

        def reduce(x: Tensor, how: str) -> Tensor:
            return none.scatter_reduce(0, request, x, how, include_self=False)

        return reduce(lo, "amin"), reduce(lo, "amax"), reduce(hi, "amin"), reduce(hi, "amax")

    @cached_property
    def seen_by_none(self) -> Tensor:
        """Keys that no row of their own request sees: bool [Tk]. Rows are neighbours: together they see one range."""
        first, _, _, last = (x[self.key_request] for x in self._seen)
        return (self.position < first) | (self.position >= last)

    @cached_property
    def seen_by_all(self) -> Tensor:
        """Keys that every row that sees any key of their request sees: bool [Tk]."""
        _, first, last, _ = (x[self.key_request] for x in self._seen)
        return (self.position >= first) & (self.position < last)

    @cached_property
    def page(self) -> int:
        """Keys in one unit of an index: a page, or a block where there are no pages or smaller ones."""
        case = self.case
        in_pages = case.operation is Operation.PAGED_DECODE or case.prefix is not Prefix.INLINE
        return case.page_size if in_pages and case.page_size > BLOCK else BLOCK

    def blocks(self, size: int) -> tuple[Tensor, int]:
        """Which block of ``size`` positions each key is in, counted through all requests: int64 [Tk], and how many."""
        counts = torch.tensor([-(-n // size) for n in self.case.context_lens], dtype=torch.int64)
        start = counts.cumsum(0) - counts
        return start[self.key_request] + self.position // size, int(counts.sum())


def _request_of(lens: tuple[int, ...]) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(lens)), torch.tensor(lens, dtype=torch.int64))


def _within(lens: tuple[int, ...]) -> Tensor:
    return torch.cat([torch.arange(n) for n in (*lens, 0)])
