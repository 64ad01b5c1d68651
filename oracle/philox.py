"""Reproducible values: Philox4x32-10 in integers, and distributions read from it through exact tables.

Philox is counter-based (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC11):
block i of a stream is a pure function of (seed, stream, i). Everything here is integer arithmetic up to a
last, exact conversion: the values are the same on every machine, device and version of torch or NumPy.

A seed and a stream are integers in [0, 2^64): the seed is the key, the stream the upper half of the counter,
and the lower half counts blocks of four 32-bit words. Two functions that read one stream give correlated
values: use one stream for one purpose.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

Shape = int | tuple[int, ...]

_MASK = 0xFFFFFFFF
_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
# Words made at a time, whole blocks: few enough for a CPU's cache, enough to fill an accelerator.
_CHUNK_CPU = 1 << 16
_CHUNK_DEVICE = 1 << 24


def philox4x32(counter: Sequence[Any], key: tuple[int, int]) -> list[Any]:
    """Ten rounds on four counter words of 32 bits: Python integers, or arrays, NumPy uint64 or torch int64.

    Returns four of the same type. A product of two words fills 64 bits; in int64 it wraps, which
    leaves every bit in place, and the mask after the shift drops the copies of the sign.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (p1 >> 32 & _MASK) ^ c1 ^ k0, p1 & _MASK, (p0 >> 32 & _MASK) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
    return [c0, c1, c2, c3]


def block(seed: int, stream: int, index: int) -> list[int]:
    """Words 4 `index` to 4 `index` + 3 of a stream, as Python integers: quicker than `raw` where few are wanted.

    Raises ValueError as `raw` does.
    """
    _check(seed, stream)
    counter = (index & _MASK, index >> 32, stream & _MASK, stream >> 32)
    return philox4x32(counter, (seed & _MASK, seed >> 32))


def raw(seed: int, stream: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """The first `count` 32-bit words of a stream: int64 [count], each in [0, 2^32).

    Raises ValueError for a seed or stream outside [0, 2^64).
    """
    return _generate(seed, stream, count, torch.int64, device, lambda words: words)


def bytes_(seed: int, stream: int, shape: Shape, device: torch.device | str = "cpu") -> Tensor:
    """Uniform bytes (uint8). Viewed as a float dtype they hold NaN payloads, infinities and subnormals too.

    Raises ValueError as `raw` does.
    """
    count = _numel(shape)
    values = _generate(seed, stream, -(-count // 4), torch.uint8, device, _bytes_of_words, per_word=4)
    return values[:count].reshape(shape)


def uniform_int(
    seed: int, stream: int, shape: Shape, low: int, high: int, device: torch.device | str = "cpu"
) -> Tensor:
    """Integers (int64) in [low, high), one word each, scaled: probabilities are within 2^-32 of equal.

    Raises ValueError unless 1 <= high - low <= 2^31, and as `raw` does.
    """
    span = high - low
    if not 1 <= span <= 1 << 31:
        raise ValueError(f"high - low: {span}, allowed are 1 .. 2^31")

    def scale(words: Tensor) -> Tensor:
        return (words * span >> 32) + low

    return _generate(seed, stream, _numel(shape), torch.int64, device, scale).reshape(shape)


def permutation(seed: int, stream: int, n: int, device: torch.device | str = "cpu") -> Tensor:
    """A permutation of 0 .. n-1 (int64 [n]): the order of 63-bit keys, equal ones in the order of index.

    Raises ValueError as `raw` does.
    """
    words = raw(seed, stream, 2 * n, device).view(n, 2)
    keys = (words[:, 0] >> 1 << 32) | words[:, 1]
    return torch.sort(keys, stable=True).indices


def normal(seed: int, stream: int, shape: Shape, device: torch.device | str = "cpu") -> Tensor:
    """Nearly normal values (float32): symmetric, variance 1.0005, none beyond 4.02.

    Each is an integer below 2^24 times 2^-21: exact in float32, and with low bits as busy as float32 allows
    (so that a cast to tf32, fp16 or bf16 on the way does show). For a narrower dtype round once, with
    `oracle.rounding.round_to(normal(...).double(), dtype)`. Raises ValueError as `raw` does.
    """
    return _generate(seed, stream, _numel(shape), torch.float32, device, _normal_of_words).reshape(shape)


def _generate(
    seed: int,
    stream: int,
    words: int,
    dtype: torch.dtype,
    device: torch.device | str,
    convert: Callable[[Tensor], Tensor],
    per_word: int = 1,
) -> Tensor:
    """`convert` applied to the first `words` words of a stream, a chunk at a time: [words * per_word]."""
    _check(seed, stream)
    device = torch.device(device)
    chunk = _CHUNK_CPU if device.type == "cpu" else _CHUNK_DEVICE
    out = torch.empty(words * per_word, dtype=dtype, device=device)
    for start in range(0, words, chunk):
        stop = min(start + chunk, words)
        blocks = range(start // 4, -(-stop // 4))
        out[start * per_word : stop * per_word] = convert(_words(seed, stream, blocks, device)[: stop - start])
    return out


def _check(seed: int, stream: int) -> None:
    for name, value in (("seed", seed), ("stream", stream)):
        if not 0 <= value < 1 << 64:
            raise ValueError(f"{name}: {value}, allowed are 0 .. 2^64 - 1")


def _words(seed: int, stream: int, blocks: range, device: torch.device) -> Tensor:
    """The words of some blocks of a stream, in order: int64 [4 * len(blocks)]."""
    key = (seed & _MASK, seed >> 32)
    high = (stream & _MASK, stream >> 32)
    if device.type == "cpu":
        index = np.arange(blocks.start, blocks.stop, dtype=np.uint64)
        c2, c3 = (np.full(1, word, dtype=np.uint64) for word in high)
        block = philox4x32((index & _MASK, index >> 32, c2, c3), key)
        return torch.from_numpy(np.stack(block, axis=-1).reshape(-1).view(np.int64))
    count = torch.arange(blocks.start, blocks.stop, device=device)
    d2, d3 = (torch.full((1,), word, dtype=torch.int64, device=device) for word in high)
    return torch.stack(philox4x32((count & _MASK, count >> 32, d2, d3), key), dim=-1).reshape(-1)


def _bytes_of_words(words: Tensor) -> Tensor:
    # The low half of each int64, on the little-endian machines that torch runs on.
    return words.view(torch.uint8).view(-1, 8)[:, :4].reshape(-1)


# A word's bits, from the top: step in the table, place within the step, sign.
_STEP_BITS = 11
_PLACE_BITS = 20
# Unit of the table: 2^-21 standard deviations.
_UNIT_BITS = 21
# The last step would end at infinity; it ends where this fraction of the step's probability is left.
_LAST_BITS = 5


def _normal_of_words(words: Tensor) -> Tensor:
    start, width = _half_normal_table(words.device)
    step, value = words >> (_PLACE_BITS + 1), words >> 1
    value &= (1 << _PLACE_BITS) - 1
    value *= width.index_select(0, step)
    value >>= _PLACE_BITS
    value += start.index_select(0, step)
    # Two's complement: x ^ -1 is -x - 1.
    negative = (words & 1).neg_()
    value ^= negative
    value -= negative
    return value.to(torch.float32).mul_(2.0**-_UNIT_BITS)


@cache
def _half_normal_table(device: torch.device) -> tuple[Tensor, Tensor]:
    """Where each step of the table starts, and how wide it is."""
    quantiles = torch.tensor(half_normal_quantiles(), dtype=torch.int64, device=device)
    return quantiles[:-1].contiguous(), quantiles.diff()


@cache
def half_normal_quantiles() -> tuple[int, ...]:
    """Quantiles of abs(Z) at i / 2^11, i = 0 .. 2^11 (the last one capped), in units of 2^-21.

    Z is the sum of twelve uniform bytes, centred and divided by 256: variance 1 - 2^-16, and a distribution
    that integers express exactly. Each byte sum s is spread evenly over s - 1/2 .. s + 1/2.
    """
    counts = [1]
    for _ in range(12):
        sums = list(accumulate(counts + [0] * 255))
        counts = [total - (sums[s - 256] if s >= 256 else 0) for s, total in enumerate(sums)]
    cumulative = list(accumulate(counts))
    total, centre, bits = cumulative[-1], (len(counts) - 1) // 2, _STEP_BITS + 1 + _LAST_BITS
    quantiles = []
    for i in range((1 << _STEP_BITS) + 1):
        step = (i << _LAST_BITS) if i < 1 << _STEP_BITS else (i << _LAST_BITS) - 1
        rank = total // 2 + (total >> bits) * step
        s = bisect_left(cumulative, rank)
        within = rank - (cumulative[s] - counts[s])
        # Units of a byte are 2^-8 standard deviations; half a byte is 2^(21 - 8 - 1) units of the table.
        half_byte = 1 << (_UNIT_BITS - 9)
        quantiles.append((2 * (s - centre) - 1) * half_byte + 2 * half_byte * within // counts[s])
    return tuple(quantiles)


def _numel(shape: Shape) -> int:
    return shape if isinstance(shape, int) else prod(shape)
