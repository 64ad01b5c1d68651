"""Philox against its published answers, and the distributions against exact arithmetic."""

import hashlib
import math
from collections import Counter
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oracle import philox
from oracle.rounding import round_to

# Random123's known answers for Philox4x32-10: counter, key, output.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def parse(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def scalar_philox(counter: list[int], key: list[int]) -> list[int]:
    """The definition in Python integers, one counter at a time."""
    x, k = list(counter), list(key)
    for _ in range(10):
        p0, p1 = 0xD2511F53 * x[0], 0xCD9E8D57 * x[2]
        x = [(p1 >> 32) ^ x[1] ^ k[0], p1 % 2**32, (p0 >> 32) ^ x[3] ^ k[1], p0 % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return x


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_known_answers(counter: str, key: str, expected: str) -> None:
    words, (k0, k1) = parse(counter), parse(key)
    arrays = [np.array([word], dtype=np.uint64) for word in words]
    tensors = [torch.tensor([word]) for word in words]
    assert [int(word[0]) for word in philox.philox4x32(arrays, (k0, k1))] == parse(expected)
    assert [int(word[0]) for word in philox.philox4x32(tensors, (k0, k1))] == parse(expected)
    assert scalar_philox(words, [k0, k1]) == parse(expected)


def test_raw_counts_blocks_from_zero() -> None:
    assert philox.raw(0, 0, 4).tolist() == parse(KNOWN[0][2])


def test_raw_places_seed_and_stream() -> None:
    seed, stream = 0x299F31D0_A4093822, 0x03707344_13198A2E
    words = philox.raw(seed, stream, 11).tolist()
    blocks = [scalar_philox([i, 0, 0x13198A2E, 0x03707344], [0xA4093822, 0x299F31D0]) for i in range(3)]
    assert words == [word for block in blocks for word in block][:11]


def test_block_numbers_beyond_32_bits_use_the_next_counter_word() -> None:
    first = (5 << 32) + 7
    words = philox._words(1, 2, range(first, first + 1), torch.device("cpu")).tolist()
    assert words == scalar_philox([7, 5, 2, 0], [1, 0])


def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    def everything() -> list[torch.Tensor]:
        return [
            philox.raw(3, 4, 1001),
            philox.bytes_(3, 4, 1001),
            philox.normal(3, 4, (7, 143)),
            philox.uniform_int(3, 4, 1001, -5, 17),
        ]

    whole = everything()
    monkeypatch.setattr(philox, "_CHUNK_CPU", 64)
    for a, b in zip(whole, everything(), strict=True):
        assert torch.equal(a, b)


def test_a_longer_stream_starts_with_the_shorter() -> None:
    assert torch.equal(philox.raw(1, 1, 1000)[:10], philox.raw(1, 1, 10))
    assert torch.equal(philox.normal(1, 1, 1000)[:10], philox.normal(1, 1, 10))


@given(seed=st.integers(0, 2**64 - 1), stream=st.integers(0, 2**64 - 1), index=st.integers(0, 300))
def test_a_block_is_four_words_of_the_stream(seed: int, stream: int, index: int) -> None:
    words = philox.raw(seed, stream, 4 * index + 4).tolist()
    assert philox.block(seed, stream, index) == words[4 * index :]


def test_seeds_and_streams_differ() -> None:
    rows = {tuple(philox.raw(seed, stream, 8).tolist()) for seed in range(8) for stream in range(8)}
    assert len(rows) == 64


def test_values_never_change() -> None:
    """Replay depends on these: a change of any value orphans every stored case."""

    def digest(tensor: torch.Tensor) -> str:
        return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()[:16]

    assert {
        "raw": digest(philox.raw(12345, 678, 4099)),
        "bytes": digest(philox.bytes_(12345, 678, (17, 241))),
        "uniform_int": digest(philox.uniform_int(12345, 678, 4099, -3, 1000)),
        "permutation": digest(philox.permutation(12345, 678, 4099)),
        "normal": digest(philox.normal(12345, 678, (4099,))),
        "quantiles": digest(torch.tensor(philox.half_normal_quantiles())),
    } == {
        "raw": "31a37a40d1fdcb73",
        "bytes": "280e0efd5660a859",
        "uniform_int": "308f7f8a8d15b5f9",
        "permutation": "42bf2c03654660f9",
        "normal": "ab8da41161fc2164",
        "quantiles": "bb5e2339900a1ae2",
    }


def test_bytes_are_the_words_little_endian() -> None:
    words, values = philox.raw(9, 9, 3).tolist(), philox.bytes_(9, 9, 10).tolist()
    assert bytes(values) == b"".join(word.to_bytes(4, "little") for word in words)[:10]


def test_bytes_reach_every_pattern() -> None:
    values = philox.bytes_(0, 1, (64, 256))
    assert values.shape == (64, 256)
    assert len(values.unique()) == 256
    patterns = philox.bytes_(0, 2, (1 << 20,)).view(torch.bfloat16)
    nan_payloads = patterns[patterns.isnan()].view(torch.int16).unique()
    assert len(nan_payloads) == 2 * 127
    assert patterns.isinf().any()


def test_uniform_int_stays_in_range_and_reaches_it() -> None:
    values = philox.uniform_int(5, 6, (100, 70), -3, 4)
    assert values.dtype == torch.int64
    assert values.shape == (100, 70)
    counts = Counter(values.reshape(-1).tolist())
    assert sorted(counts) == list(range(-3, 4))
    assert max(abs(count - 1000) for count in counts.values()) < 150
    words = philox.raw(5, 6, 5).tolist()
    wide = philox.uniform_int(5, 6, 5, 10, 10 + 2**31).tolist()
    assert wide == [10 + word // 2 for word in words]
    assert philox.uniform_int(5, 6, 4, 7, 8).tolist() == [7] * 4


@pytest.mark.parametrize("n", [0, 1, 2, 1000])
def test_permutations(n: int) -> None:
    order = philox.permutation(8, n, n)
    assert torch.equal(order.sort().values, torch.arange(n))
    words = philox.raw(8, n, 2 * n).tolist()
    keys = [(words[2 * i] // 2, words[2 * i + 1], i) for i in range(n)]
    assert order.tolist() == [i for _, _, i in sorted(keys)]


def test_quantiles_invert_the_exact_distribution() -> None:
    """At each tabulated value the distribution of byte sums, by counting, has the tabulated probability."""
    pmf = {0: 1}
    for _ in range(12):
        wider: dict[int, int] = {}
        for s, count in pmf.items():
            for byte in range(256):
                wider[s + byte] = wider.get(s + byte, 0) + count
        pmf = wider
    assert sum(pmf.values()) == 256**12
    table = philox.half_normal_quantiles()
    assert len(table) == 2049
    assert table[0] == 0
    assert list(table) == sorted(set(table))
    for i in (1, 2, 100, 1024, 2047):
        q = Fraction(table[i], 2**13) + 1530  # in bytes; sum s is spread over s - 1/2 .. s + 1/2
        below = sum(count for s, count in pmf.items() if s + Fraction(1, 2) <= q)
        s = math.floor(q + Fraction(1, 2))
        probability = (below + pmf[s] * (q - s + Fraction(1, 2))) / 256**12
        wanted = Fraction(1, 2) + Fraction(i, 4096)
        assert 0 <= wanted - probability <= Fraction(1, 2**20)


def test_moments_of_the_table() -> None:
    """Exact moments of the piecewise uniform distribution that `normal` draws from."""
    q = [Fraction(value, 2**21) for value in philox.half_normal_quantiles()]
    steps = list(pairwise(q))
    variance = sum((a * a + a * b + b * b) / 3 for a, b in steps) / len(steps)
    fourth = sum((b**5 - a**5) / (5 * (b - a)) for a, b in steps) / len(steps)
    assert abs(float(variance) - 1.0005) < 1e-4
    assert abs(float(fourth) - 2.913) < 1e-2
    assert 4.01 < float(q[-1]) < 4.02


def test_normal_values_are_table_entries_interpolated_exactly() -> None:
    table = philox.half_normal_quantiles()
    for word, value in zip(philox.raw(2, 3, 500).tolist(), philox.normal(2, 3, 500).tolist(), strict=True):
        step, place, negative = word >> 21, (word >> 1) % 2**20, word % 2
        units = table[step] + (table[step + 1] - table[step]) * place // 2**20
        assert value == (-units if negative else units) / 2**21


def test_the_extreme_words() -> None:
    words = torch.tensor([0, 1, 0xFFFFFFFE, 0xFFFFFFFF])
    values = philox._normal_of_words(words).tolist()
    assert values[0] == values[1] == 0.0
    assert values[2] == -values[3]
    assert 4.01 < values[2] < philox.half_normal_quantiles()[-1] / 2**21


def test_normal_looks_normal() -> None:
    values = philox.normal(1, 2, (1000, 200)).double()
    assert values.shape == (1000, 200)
    assert abs(float(values.mean())) < 0.01
    assert abs(float(values.var()) - 1) < 0.02
    for limit, share in ((0.6745, 0.5), (1.96, 0.05), (3.29, 0.001)):
        assert abs(float((values.abs() > limit).double().mean()) - share) < 0.005
    neighbours = torch.corrcoef(torch.stack([values[:, 1:].reshape(-1), values[:, :-1].reshape(-1)]))
    assert abs(float(neighbours[0, 1])) < 0.01


def test_normal_fills_float32_and_rounds_once_to_narrower_types() -> None:
    values = philox.normal(1, 2, 4096)
    assert values.dtype == torch.float32
    low_bits = values.view(torch.int32) & 0x1FFF  # what tf32 drops
    assert (low_bits != 0).double().mean() > 0.9
    assert (round_to(values.double(), torch.float32) == values).all()
    for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn):
        assert round_to(values.double(), dtype).dtype == dtype


@pytest.mark.parametrize("bad", [-1, 1 << 64])
def test_out_of_range_keys_are_refused(bad: int) -> None:
    with pytest.raises(ValueError, match=rf"seed: {bad}, allowed are 0 \.\. 2\^64 - 1"):
        philox.raw(bad, 0, 1)
    with pytest.raises(ValueError, match="seed"):
        philox.block(bad, 0, 0)
    with pytest.raises(ValueError, match="stream: "):
        philox.normal(0, bad, 1)


@pytest.mark.parametrize(("low", "high"), [(3, 3), (3, 2), (0, 2**31 + 1)])
def test_impossible_ranges_are_refused(low: int, high: int) -> None:
    with pytest.raises(ValueError, match="high - low: "):
        philox.uniform_int(0, 0, 1, low, high)


def test_empty_shapes() -> None:
    assert philox.raw(0, 0, 0).shape == (0,)
    assert philox.normal(0, 0, (3, 0)).shape == (3, 0)
    assert philox.bytes_(0, 0, (0, 2)).shape == (0, 2)
    assert philox.normal(0, 0, ()).shape == ()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gives_the_same_values() -> None:
    key = (2**63 + 12345, 2**40 + 9)
    assert torch.equal(philox.raw(*key, 100001, "cuda").cpu(), philox.raw(*key, 100001))
    assert torch.equal(philox.bytes_(*key, 100001, "cuda").cpu(), philox.bytes_(*key, 100001))
    assert torch.equal(philox.normal(*key, (11, 9091), "cuda").cpu(), philox.normal(*key, (11, 9091)))
    assert torch.equal(philox.permutation(*key, 5000, "cuda").cpu(), philox.permutation(*key, 5000))
    assert torch.equal(philox.uniform_int(*key, 5000, -9, 9, "cuda").cpu(), philox.uniform_int(*key, 5000, -9, 9))
