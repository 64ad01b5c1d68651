"""The oracle against references that share no code with it.

mpmath at 50 digits on tiny problems, SciPy on medium ones, torch's float64 SDPA with an explicit mask on
larger ones, and relations on large ones.
"""

import math
from dataclasses import replace
from typing import Any

import mpmath
import numpy as np
import pytest
import scipy.special
import torch
import torch.nn.functional as F
from torch import Tensor

from oracle.attention import SAFE_LOGIT, solve
from oracle.kinds import LseBase
from oracle.merge import merge_states
from oracle.problem import Problem


def random_problem(
    seed: int,
    q_lens: tuple[int, ...],
    kv_lens: tuple[int, ...],
    *,
    heads: tuple[int, int] = (2, 1),
    dims: tuple[int, int] = (4, 3),
    size: float = 1.0,
    **fields: Any,
) -> Problem:
    g = torch.Generator().manual_seed(seed)

    def draw(tokens: int, count: int, dim: int) -> Tensor:
        return torch.randn(tokens, count, dim, generator=g, dtype=torch.float64)

    return Problem(
        q=draw(sum(q_lens), heads[0], dims[0]) * size,
        k=draw(sum(kv_lens), heads[1], dims[0]),
        v=draw(sum(kv_lens), heads[1], dims[1]),
        q_lens=q_lens,
        kv_lens=kv_lens,
        **({"scale": dims[0] ** -0.5} | fields),
    )


def visible_pairs(p: Problem) -> list[tuple[int, list[int]]]:
    """For every query row, its request and the rows of the keys that it sees, pair by pair from the
    definition.
    """
    positions, rows = p.positions().tolist(), []
    for i, (q_len, kv_len, context) in enumerate(zip(p.q_lens, p.kv_lens, p.contexts, strict=True)):
        keys = range(sum(p.kv_lens[:i]), sum(p.kv_lens[:i]) + kv_len)
        for n in range(q_len):
            at = context - q_len + n
            seen = [j for j in keys if not p.causal or positions[j] <= at]
            rows.append((i, [j for j in seen if p.window is None or at - p.window < positions[j]]))
    return rows


def factor(descale: float | Tensor | None, token: int, head: int) -> float:
    if descale is None:
        return 1.0
    if not isinstance(descale, Tensor):
        return descale
    if descale.numel() == 1:
        return float(descale)
    return float(descale[token % descale.shape[0], head % descale.shape[1]])


def check_against_mpmath(p: Problem, **options: Any) -> None:
    """Relative error 1e-13: of an output, relative to the sum of its terms' magnitudes (float64 sums may
    cancel).
    """
    solution = solve(p, **options)
    assert solution.out.dtype == solution.lse.dtype == torch.float64
    for row, (_, keys) in enumerate(visible_pairs(p)):
        for h in range(p.q_heads):
            kv = h // (p.q_heads // p.kv_heads)
            with mpmath.workdps(50):
                logits = [mp_logit(p, row, h, j, kv) for j in keys]
                weights = [mpmath.exp(s) for s in logits]
                total = mpmath.fsum(weights)
                below = total + (0 if p.sinks is None else mpmath.exp(mpmath.mpf(float(p.sinks[h]))))
                check_row(p, solution.out[row, h], keys, weights, below, kv)
                lse = float(solution.lse[row, h])
                if keys:
                    error = abs(mpmath.mpf(lse) - mpmath.log(total))
                    assert error <= 1e-13 * max(1, abs(mpmath.log(total)))
                else:
                    assert lse == -math.inf


def mp_logit(p: Problem, row: int, h: int, j: int, kv: int) -> Any:
    dot = mpmath.fsum(mpmath.mpf(float(a)) * mpmath.mpf(float(b)) for a, b in zip(p.q[row, h], p.k[j, kv], strict=True))
    s = mpmath.mpf(p.scale) * mpmath.mpf(factor(p.q_descale, row, h)) * mpmath.mpf(factor(p.k_descale, j, kv)) * dot
    return s if p.soft_cap is None else p.soft_cap * mpmath.tanh(s / p.soft_cap)


def check_row(p: Problem, out: Tensor, keys: list[int], weights: list[Any], below: Any, kv: int) -> None:
    for d in range(p.dim_v):
        terms = [
            w * mpmath.mpf(float(p.v[j, kv, d])) * mpmath.mpf(factor(p.v_descale, j, kv)) / below
            for w, j in zip(weights, keys, strict=True)
        ]
        error = abs(mpmath.mpf(float(out[d])) - mpmath.fsum(terms))
        assert error <= 1e-13 * mpmath.fsum(abs(t) for t in terms)


TENSORS = torch.Generator().manual_seed(7)


def positive(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=TENSORS, dtype=torch.float64) + 0.5


MPMATH_CASES = {
    "plain": random_problem(0, (3,), (5,)),
    "not causal": random_problem(1, (3,), (5,), causal=False),
    "window": random_problem(2, (6,), (8,), window=3),
    "window not causal": random_problem(3, (6,), (8,), window=3, causal=False),
    "window 1": random_problem(4, (4,), (6,), window=1),
    "sinks": random_problem(5, (3,), (5,), sinks=torch.tensor([0.7, -1.1])),
    "soft cap": random_problem(6, (3,), (5,), soft_cap=1.5, size=3.0),
    "soft cap beyond the safe logits": random_problem(6, (3,), (5,), soft_cap=700.0, size=900.0),
    "cap, sinks and window": random_problem(7, (5,), (9,), soft_cap=2.0, window=4, sinks=torch.tensor([0.5, 2.0])),
    "groups": random_problem(8, (3,), (5,), heads=(6, 2)),
    "one kv head": random_problem(9, (2,), (4,), heads=(4, 1)),
    "D_qk < D_v": random_problem(10, (3,), (5,), dims=(3, 7)),
    "ragged": random_problem(11, (3, 1, 0, 2), (5, 7, 3, 2), heads=(4, 2)),
    "empty requests": random_problem(12, (2, 0, 3, 1), (0, 0, 4, 0)),
    "decode": random_problem(13, (1, 1, 1), (6, 1, 9), heads=(4, 2)),
    "q_len > L": random_problem(14, (7, 3), (4, 0)),
    "q_len > L, not causal": random_problem(15, (7,), (4,), causal=False),
    "negative scale": random_problem(16, (3,), (5,), scale=-0.7),
    "zero scale": random_problem(16, (3,), (5,), scale=0.0),
    "one number descales": random_problem(
        17, (3,), (5,), q_descale=1.3, k_descale=torch.tensor(0.6), v_descale=torch.tensor([2.5])
    ),
    "descales per head": random_problem(
        18,
        (3,),
        (5,),
        heads=(4, 2),
        q_descale=positive(1, 4),
        k_descale=positive(1, 2),
        v_descale=positive(1, 2),
    ),
    "descales per token": random_problem(
        19, (3, 2), (5, 3), q_descale=positive(5, 1), k_descale=positive(8, 1), v_descale=positive(8, 1)
    ),
    "descales per token and head": random_problem(
        20,
        (3, 2),
        (5, 3),
        heads=(4, 2),
        q_descale=positive(5, 4),
        k_descale=positive(8, 2),
        v_descale=positive(8, 2),
    ),
    "prefix of the context": random_problem(21, (3,), (5,), context_lens=(9,)),
    "some keys": random_problem(
        22, (4,), (5,), context_lens=(12,), kv_positions=torch.tensor([0, 3, 7, 9, 11]), window=5
    ),
    "some keys, unordered": random_problem(
        23,
        (4, 3),
        (5, 3),
        context_lens=(12, 4),
        kv_positions=torch.tensor([9, 0, 11, 3, 7, 2, 0, 3]),
        k_descale=positive(8, 1),
        v_descale=positive(8, 1),
        window=5,
    ),
    "logits of some hundreds": random_problem(24, (4,), (9,), size=100.0),
    "logits just within the safe ones": random_problem(25, (4,), (9,), size=40.0),
}


@pytest.mark.parametrize("blocks", [{}, {"block_q": 2, "block_k": 2, "block_heads": 1}], ids=["default", "tiny blocks"])
@pytest.mark.parametrize("name", MPMATH_CASES)
def test_against_mpmath(name: str, blocks: dict[str, int]) -> None:
    check_against_mpmath(MPMATH_CASES[name], **blocks)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_operands_are_read_as_they_are(dtype: torch.dtype) -> None:
    p = random_problem(26, (3,), (5,))
    check_against_mpmath(replace(p, q=p.q.to(dtype), k=p.k.to(dtype), v=p.v.to(dtype)))


def test_the_mpmath_check_notices_an_error_of_one_part_in_a_million() -> None:
    p = MPMATH_CASES["plain"]
    (_, keys), *_ = visible_pairs(p)
    weights = [mpmath.mpf(1)] * len(keys)
    right = torch.stack([p.v[j, 0] for j in keys]).mean(0)
    check_row(p, right, keys, weights, mpmath.mpf(len(keys)), 0)
    with pytest.raises(AssertionError):
        check_row(p, right * (1 + 1e-6), keys, weights, mpmath.mpf(len(keys)), 0)


@pytest.mark.parametrize("size", [1.0, 60.0], ids=["bounded", "running maximum"])
@pytest.mark.parametrize("sinks", [None, torch.linspace(-3.0, 3.0, 4)], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("window", [None, 50])
def test_against_scipy(size: float, sinks: Tensor | None, window: int | None) -> None:
    p = random_problem(
        30, (40, 1, 70), (90, 33, 64), heads=(4, 2), dims=(16, 24), size=size, window=window, sinks=sinks
    )
    solution = solve(p, block_q=32, block_k=16)
    for row, (_, keys) in enumerate(visible_pairs(p)):
        if not keys:
            assert bool((solution.out[row] == 0).all())
            assert bool((solution.lse[row] == -math.inf).all())
            continue
        for h in range(4):
            logits = (p.k[keys, h // 2] @ p.q[row, h]).numpy() * p.scale
            lse = scipy.special.logsumexp(logits)
            with_sink = logits if sinks is None else np.append(logits, float(sinks[h]))
            weights = scipy.special.softmax(with_sink)[: len(keys)]
            values = p.v[keys, h // 2].numpy()
            # Logits of hundreds differ by their own rounding, 1e-13, between two orders of summation.
            scale = 1e-13 if size == 1.0 else 2e-12
            np.testing.assert_allclose(solution.lse[row, h], lse, rtol=1e-13, atol=1e-13)
            error = np.abs(solution.out[row, h].numpy() - weights @ values)
            assert (error <= scale * (weights @ np.abs(values)) + 1e-300).all()


def sdpa(p: Problem) -> Tensor:
    """torch's float64 SDPA of one request with an explicit mask; rows that see nothing are 0."""
    mask = torch.zeros(p.q_lens[0], p.kv_lens[0], dtype=torch.bool)
    for row, (_, keys) in enumerate(visible_pairs(p)):
        mask[row, keys] = True
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (p.q, p.k, p.v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=p.scale, enable_gqa=True)
    return out[0].transpose(0, 1).masked_fill(~mask.any(1)[:, None, None], 0.0)


@pytest.mark.parametrize(
    "blocks", [{}, {"block_q": 48, "block_k": 80, "block_heads": 1}], ids=["default", "odd blocks"]
)
@pytest.mark.parametrize("window", [None, 1, 130])
@pytest.mark.parametrize(("queries", "keys"), [(300, 300), (64, 700), (1, 1000), (300, 200)])
def test_against_sdpa(queries: int, keys: int, window: int | None, blocks: dict[str, int]) -> None:
    p = random_problem(40, (queries,), (keys,), heads=(4, 2), dims=(32, 32), window=window)
    torch.testing.assert_close(solve(p, **blocks).out, sdpa(p), rtol=1e-12, atol=1e-14)


def test_against_sdpa_with_a_running_maximum() -> None:
    p = random_problem(41, (300,), (300,), heads=(2, 2), dims=(32, 32), size=40.0)
    assert float((p.q[-1, 0] @ p.k[:, 0].T).abs().max()) * p.scale > SAFE_LOGIT / 4
    torch.testing.assert_close(solve(p).out, sdpa(p), rtol=1e-10, atol=1e-12)


@pytest.fixture(scope="module")
def large() -> Problem:
    return random_problem(
        50,
        (600, 1, 33),
        (900, 500, 33),
        heads=(4, 2),
        dims=(32, 16),
        window=333,
        sinks=torch.linspace(-1.0, 4.0, 4),
    )


def assert_same(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-13, atol=1e-14)


def solved(p: Problem) -> tuple[Tensor, Tensor]:
    solution = solve(p)
    return solution.out, solution.lse


@pytest.mark.parametrize("base", LseBase)
def test_split_and_merge_is_the_whole(large: Problem, base: LseBase) -> None:
    p = replace(large, sinks=None)
    splits = [solve(p.subset(p.positions() % 3 == r)) for r in range(3)]
    unit = math.log(2.0) if base is LseBase.TWO else 1.0
    outs, lses = torch.stack([s.out for s in splits]), torch.stack([s.lse for s in splits]) / unit
    out, lse = merge_states(outs, lses, base)
    assert_same((out, lse * unit), solved(p))


def test_prefix_and_new_part_merge_to_the_whole(large: Problem) -> None:
    p = replace(large, sinks=None)
    prefix = torch.cat([torch.arange(n) < n - q for n, q in zip(p.kv_lens, p.q_lens, strict=True)])
    parts = [solve(p.subset(prefix)), solve(p.subset(~prefix))]
    merged = merge_states(torch.stack([s.out for s in parts]), torch.stack([s.lse for s in parts]))
    assert_same(merged, solved(p))


def test_requests_do_not_depend_on_their_order(large: Problem) -> None:
    order = (2, 0, 1)
    pick = lambda x, starts: torch.cat([x[starts[i] : starts[i + 1]] for i in order])  # noqa: E731
    p = replace(
        large,
        q=pick(large.q, large.q_starts),
        k=pick(large.k, large.kv_starts),
        v=pick(large.v, large.kv_starts),
        q_lens=tuple(large.q_lens[i] for i in order),
        kv_lens=tuple(large.kv_lens[i] for i in order),
    )
    out, lse = solved(large)
    assert_same(solved(p), (pick(out, large.q_starts), pick(lse, large.q_starts)))


def test_a_request_does_not_depend_on_its_neighbours() -> None:
    together = random_problem(51, (3, 5, 2, 4), (9, 5, 40, 8), heads=(4, 2))
    out, lse = solved(together)
    for i in range(4):
        q, k = slice(*together.q_starts[i : i + 2]), slice(*together.kv_starts[i : i + 2])
        alone = replace(
            together,
            q=together.q[q],
            k=together.k[k],
            v=together.v[k],
            q_lens=together.q_lens[i : i + 1],
            kv_lens=together.kv_lens[i : i + 1],
        )
        assert_same(solved(alone), (out[q], lse[q]))


def test_keys_do_not_depend_on_their_order(large: Problem) -> None:
    g = torch.Generator().manual_seed(1)
    order = torch.cat(
        [torch.randperm(n, generator=g) + start for n, start in zip(large.kv_lens, large.kv_starts, strict=False)]
    )
    assert_same(solved(large.take_keys(order, large.kv_lens)), solved(large))


def test_a_window_of_the_context_or_more_is_no_window(large: Problem) -> None:
    expected = solved(replace(large, window=None))
    for window in (max(large.kv_lens), 10**9):
        assert_same(solved(replace(large, window=window)), expected)


def test_a_window_one_shorter_than_the_context_is_a_window(large: Problem) -> None:
    out, _ = solved(replace(large, window=max(large.kv_lens) - 1))
    assert not torch.equal(out, solved(replace(large, window=None))[0])


def test_shifting_all_logits_shifts_the_lse_only() -> None:
    p = random_problem(52, (200,), (300,), dims=(33, 16), scale=0.25)
    q, k = p.q.clone(), p.k.clone()
    q[..., -1], k[..., -1] = 0.0, 1.0
    out, lse = solved(replace(p, q=q, k=k))
    for shift in (8.0, -500.0, 1e4):
        q[..., -1] = shift * 4
        shifted_out, shifted_lse = solved(replace(p, q=q, k=k))
        tolerance = 1e-14 + abs(shift) * 4e-15
        torch.testing.assert_close(shifted_out, out, rtol=0, atol=tolerance)
        torch.testing.assert_close(shifted_lse - shift, lse, rtol=0, atol=tolerance)


def test_extend_equals_decode_of_the_same_last_token() -> None:
    p = random_problem(53, (50,), (200,), heads=(4, 2), dims=(16, 16), window=77)
    last = replace(p, q=p.q[-1:], q_lens=(1,))
    out, lse = solved(p)
    assert_same(solved(last), (out[-1:], lse[-1:]))


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz]
)
def test_float8_operands_are_read_as_their_bytes_say(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    exponent_bits, bias, fnuz = {
        torch.float8_e4m3fn: (4, 7, False),
        torch.float8_e4m3fnuz: (4, 8, True),
        torch.float8_e5m2: (5, 15, False),
        torch.float8_e5m2fnuz: (5, 16, True),
    }[dtype]
    v = codes.view(dtype).view(256, 1, 1)
    one = torch.ones(256, 1, 1)
    # Every query sees one key with weight one, so the outputs are the values.
    out = solve(Problem(q=one, k=one, v=v, q_lens=(1,) * 256, kv_lens=(1,) * 256, scale=1.0)).out.flatten()
    fraction_bits = 7 - exponent_bits
    for code in range(256):
        exponent, fraction = (code & 0x7F) >> fraction_bits, (code & 0x7F) % (1 << fraction_bits)
        step = fraction / (1 << fraction_bits)
        value = math.ldexp(1 + step, exponent - bias) if exponent else math.ldexp(step, 1 - bias)
        special = code == 0x80 if fnuz else code & 0x7F == 0x7F
        if dtype == torch.float8_e5m2 and exponent == 31:
            value, special = math.inf, fraction != 0
        if special:
            assert math.isnan(out[code])
        else:
            assert float(out[code]) == (-value if code & 0x80 else value)
