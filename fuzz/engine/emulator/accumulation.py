"""Matrix products of fp32 inputs under a chosen order and width of their sums (`options.Accumulation`)."""

from collections.abc import Callable

import torch
from torch import Tensor

from fuzz.engine.emulator.options import Accumulation, Options

Product = Callable[[Tensor, Tensor], Tensor]


def accumulated(x: Tensor, y: Tensor, start: Tensor | None, options: Options, product: Product) -> Tensor:
    """`start` + x @ y in fp32; x is [P or 1, .., M, K], y [P or 1, .., K, N], `start` broadcasts to the result.

    `product` multiplies fp32 or float64 matrices by a routine that does not depend on the batch.
    """
    if options.accumulation is Accumulation.SEQUENTIAL:
        chunk = options.dot_chunk
        total = start
        for k in range(0, x.shape[-1], chunk):
            step = product(x[..., k : k + chunk].double(), y[..., k : k + chunk, :].double())
            total = step.float() if total is None else (total.double() + step).float()
        assert total is not None
        return total
    if options.accumulation is Accumulation.TREE:
        result = _tree(x, y, 0, x.shape[-1])
    elif options.accumulation is Accumulation.FLOAT64:
        exact = product(x.double(), y.double())
        return (exact if start is None else exact + start.double()).float()
    else:
        result = product(x, y)
    return result if start is None else torch.add(start, result)


def _tree(x: Tensor, y: Tensor, low: int, high: int) -> Tensor:
    if high - low == 1:
        return x[..., low:high] * y[..., low:high, :]
    middle = (low + high) // 2
    return _tree(x, y, low, middle) + _tree(x, y, middle, high)
