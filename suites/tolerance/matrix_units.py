"""What arithmetic does a matrix unit do? Measured with sums whose right answer is known and whose wrong ones tell.

A probe is one sum of products, all of them powers of two. A large term cancels, and what is left of the small ones
beside it shows how far below the largest term the unit still adds, which terms it adds at once, and how it rounds. The
model is that of fused products (MMA-Sim, arXiv 2511.10909): each term of a block is truncated at `fraction_bits` below
the block's largest, and the block's sum is rounded once.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Annotated

import torch
import typer
from torch import Tensor

from fuzz import engine as engines
from fuzz.certify.compiled import fp8_dtypes, load_kernels
from fuzz.cli import Json, guarded
from fuzz.commands import parse_engine
from fuzz.versions import versions
from oracle.rounding import round_to

DEPTH = 128
"""Products of a probe."""
DEEPEST = 27
"""The smallest term is 2**-DEEPEST times the largest: what e4m3 products reach below `_TOP`."""
_TOP = 10
"""Exponent of the term called 1."""

Terms = dict[int, float]
"""A probe: index of a product to its value, +-2**n in units of the term called 1."""
Product = Callable[[Tensor, Tensor], Tensor]
"""Row sums of products of two float64 [P, DEPTH], as float64 [P]."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Measured:
    """A matrix unit, as its sums show it; None: not to be seen with `DEPTH` products of `DEEPEST` binary places.

    fraction_bits: terms are kept down to 2**-fraction_bits of the block's largest. block: products added at once.
    kept_bits: fraction bits of a block's rounded sum. rounding: of that sum, "nearest" or "toward zero".
    small_terms: truncated "toward zero" or "down".
    """

    fraction_bits: int | None
    block: int | None
    kept_bits: int | None
    rounding: str | None
    small_terms: str | None


def measure(product: Product) -> Measured:
    """Find out what `product` does."""

    def sums(*probes: Terms) -> list[float]:
        return _sums(product, probes)

    places = range(1, DEEPEST + 1)
    seen = sums(*({0: 2.0**-j, 1: 1.0, 2: -1.0} for j in places))
    fraction = max((j for j, left in zip(places, seen, strict=True) if left != 0), default=0)
    if fraction in (0, DEEPEST):
        return Measured(None, None, None, None, None)
    small = 2.0 ** -(fraction + 1)
    others = range(2, DEPTH)
    lost = [
        i for i, left in zip(others, sums(*({0: 1.0, 1: -1.0, i: small} for i in others)), strict=True) if left == 0
    ]
    block = 2 + len(lost)
    down, up = sums({0: -small, 1: 1.0, 2: -1.0}, {0: small, 1: 1.0, 2: -1.0})
    small_terms = {(0.0, 0.0): "toward zero", (-(2.0**-fraction), 0.0): "down"}.get((down, up))
    later = next((i for i in others if i > 3 and i not in lost), None)
    if later is None:
        return Measured(fraction, block, None, None, small_terms)
    kept = max((j for j in range(1, fraction + 1) if sums({0: 1.0, 1: 2.0**-j, later: -1.0})[0] != 0), default=0)
    # Beside a sum of 2, one and a half of its last places: a tie, which nearest-even takes to the second.
    places_left = sums({0: 1.0, 1: 1.0, 2: 2.0 ** (1 - kept), 3: 2.0**-kept, later: -2.0})[0] * 2.0 ** (kept - 1)
    return Measured(fraction, block, kept, {2.0: "nearest", 1.0: "toward zero"}.get(places_left), small_terms)


def _sums(product: Product, probes: tuple[Terms, ...]) -> list[float]:
    """The sum of each probe, in units of the term called 1."""
    a, b = torch.zeros(2, len(probes), DEPTH, dtype=torch.float64)
    for row, probe in enumerate(probes):
        for index, value in probe.items():
            exponent = round(torch.tensor(abs(value), dtype=torch.float64).log2().item()) + _TOP
            half = exponent // 2
            a[row, index] = 2.0 ** (exponent - half) * (1 if value > 0 else -1)
            b[row, index] = 2.0**half
    return [float(x) * 2.0**-_TOP for x in product(a, b)]


def on_device(engine: engines.Engine, dtype: torch.dtype, warps: int) -> Product:
    """`tl.dot` of our own kernel, compiled for `engine` (or emulated), on operands of `dtype`."""
    kernels, tile, device = load_kernels(engine), 64, engines.device(engine)

    def product(a: Tensor, b: Tensor) -> Tensor:
        found = []
        for rows in range(0, len(a), tile):
            left = torch.zeros(tile, DEPTH, dtype=torch.float64)
            right = torch.zeros_like(left)
            count = len(a[rows : rows + tile])
            left[:count], right[:count] = a[rows : rows + tile], b[rows : rows + tile]
            operands = (round_to(x.contiguous(), dtype).to(device) for x in (left, right.T))
            out = kernels.multiply(*operands, torch.zeros(tile, tile, device=device), warps)
            found.append(out.diagonal()[:count].double().cpu())
        return torch.cat(found)

    return product


@app.command(help=__doc__)
def matrix_units(
    engine: Annotated[
        str, typer.Option(metavar="auto|emulator|cuda|hip", help="auto: the GPU, if torch sees one.")
    ] = "auto",
    as_json: Json = False,
) -> None:
    """See the module's text."""
    chosen = parse_engine(engine)
    engines.start(chosen)
    dtypes = [torch.bfloat16, torch.float16, *(fp8_dtypes(chosen) if chosen is not engines.Engine.EMULATOR else ())]
    rows = [
        {"dtype": str(dtype).removeprefix("torch."), "warps": warps, **asdict(measure(on_device(chosen, dtype, warps)))}
        for dtype in dtypes
        for warps in (1, 4)
    ]
    if as_json:
        print(json.dumps({"schema": 1, "engine": chosen, "versions": versions(), "units": rows}, indent=1))
        return
    print("| " + " | ".join(rows[0]) + " |\n|" + "---|" * len(rows[0]))
    for row in rows:
        print("| " + " | ".join("" if value is None else str(value) for value in row.values()) + " |")


if __name__ == "__main__":
    sys.exit(guarded(app))
