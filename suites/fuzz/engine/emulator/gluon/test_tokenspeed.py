"""The gfx950 Gluon kernels of tokenspeed-kernel-amd, unmodified: right against float64, batched as one by one.

Their window argument counts keys to the left (its files say so): a query sees window + 1 keys.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fuzz.engine import emulator
from suites.fuzz.engine.emulator.gluon import kernels_tokenspeed
from suites.fuzz.engine.emulator.gluon.exact import allowance, attend, window_of

PACKAGE = kernels_tokenspeed.package()
pytestmark = pytest.mark.skipif(PACKAGE is None, reason="tokenspeed-kernel-amd is not installed, nor at the given path")

PAGE = 64  # the only size that decode and extend take
FN = torch.float8_e4m3fn


@pytest.fixture(scope="module")
def package() -> Path:
    assert PACKAGE is not None
    return PACKAGE


@dataclass(frozen=True)
class Paged:
    """One call of decode or extend: `queries` new tokens of each request, whose `lengths` include them.

    `left`: keys to the left that a query sees (-1: all). `dtype` is that of query and cache.
    """

    lengths: tuple[int, ...] = (70, 5)
    queries: tuple[int, ...] = (1, 1)
    kv_heads: int = 2
    group: int = 4
    dim: int = 64
    dtype: torch.dtype = torch.float16
    left: int = -1
    sinks: bool = False
    causal: bool = True


@dataclass(frozen=True)
class Answer:
    """Output [T, Hq, D] and log-sum-exp [T, Hq] (None: not asked for), as they came and as they should be."""

    out: Tensor
    lse: Tensor | None
    expected: Tensor
    expected_lse: Tensor
    allowed: Tensor
    log: emulator.Log

    def check(self) -> None:
        assert self.log.findings == ()
        worst = ((self.out.double() - self.expected).abs() / self.allowed[:, None, None]).nan_to_num(torch.inf)
        assert float(worst.amax()) <= 1
        if self.lse is not None:
            assert torch.allclose(self.lse.double(), self.expected_lse, rtol=0, atol=1e-5)


def _reference(q: Tensor, keys: list[tuple[Tensor, Tensor]], sink: Tensor | None, result: Tensor) -> tuple[Tensor, ...]:
    """Expected outputs, log-sum-exp with the sink, and bounds, of query rows and the keys and values that each sees."""
    outs, lses, bounds = [], [], []
    for row, (k, v) in zip(q, keys, strict=True):
        out, lse = attend(row, k, v, q.shape[-1] ** -0.5, sink)
        outs.append(out)
        lses.append(lse if sink is None else torch.logaddexp(lse, sink.double()))
        bounds.append(allowance(v, q.dtype, result.dtype))
    return torch.stack(outs), torch.stack(lses), torch.tensor(bounds, dtype=torch.float64)


def paged(package: Path, case: Paged, *, kernel: str, serial: bool = False) -> Answer:
    """Run decode or extend."""
    g = torch.Generator().manual_seed(0)
    widths = [max(1, -(-length // PAGE)) for length in case.lengths]
    blocks, heads = sum(widths) + 1, case.kv_heads * case.group
    order, table = torch.randperm(blocks, generator=g).int(), torch.zeros(len(widths), max(widths), dtype=torch.int32)
    for row, width in enumerate(widths):
        table[row, :width] = order[sum(widths[:row]) :][:width]
    k, v = (torch.randn(blocks, PAGE, case.kv_heads, case.dim, generator=g).to(case.dtype) for _ in range(2))
    q = torch.randn(sum(case.queries), heads, case.dim, generator=g).to(case.dtype)
    sinks = torch.randn(heads, generator=g) * 2 if case.sinks else None
    lengths = torch.tensor(case.lengths, dtype=torch.int32)
    seen, keys = case.left + 1 if case.left >= 0 else None, []
    for request, count in enumerate(case.queries):
        own = [torch.cat([x[page] for page in table[request]])[: case.lengths[request]] for x in (k, v)]
        for token in range(count):
            window = window_of(case.lengths[request] - count + token, seen) if case.causal else slice(None)
            keys.append((own[0][window], own[1][window]))
    with emulator.session(emulator.Options(serial=serial)) as log:
        if kernel == "decode":
            assert len(set(case.queries)) == 1
            out, lse = (
                kernels_tokenspeed.decode(package)(
                    q, k, v, table, lengths, max(1, *case.lengths), case.queries[0], case.left, sinks=sinks
                ),
                None,
            )
        else:
            starts = [
                torch.tensor([0, *values], dtype=torch.int32).cumsum(0).int() for values in (case.queries, case.lengths)
            ]
            out, lse = kernels_tokenspeed.extend(package)(
                q,
                *starts,
                k,
                v,
                table,
                lengths,
                is_causal=case.causal,
                window_left=case.left,
                sinks=sinks,
                return_lse=True,
                max_seqlen_q=max(case.queries),
                max_seqlen_k=max(case.lengths),
            )
    return Answer(out, lse, *_reference(q, keys, sinks, out), log)


def prefilled(package: Path, case: Paged, *, serial: bool = False, skip: float = 0.0) -> Answer:
    """Run prefill: every token of a request is a query."""
    g = torch.Generator().manual_seed(0)
    total, heads = sum(case.lengths), case.kv_heads * case.group
    sizes = (heads, case.kv_heads, case.kv_heads)
    q, k, v = (torch.randn(total, size, case.dim, generator=g).to(case.dtype) for size in sizes)
    sinks = torch.randn(heads, generator=g) * 2 if case.sinks else None
    starts = torch.tensor([0, *case.lengths]).cumsum(0).tolist()
    seen, keys = case.left + 1 if case.left >= 0 else None, []
    for start, length in zip(starts, case.lengths, strict=False):
        for position in range(length):
            window = window_of(position, seen)
            keys.append((k[start : start + length][window], v[start : start + length][window]))
    with emulator.session(emulator.Options(serial=serial)) as log:
        out, lse = kernels_tokenspeed.prefill(package)(
            q,
            k,
            v,
            torch.tensor(starts, dtype=torch.int32),
            starts,
            max(case.lengths),
            window_left=case.left,
            sinks=sinks,
            return_lse=True,
            skip_softmax_threshold=skip,
        )
    return Answer(out, lse, *_reference(q, keys, sinks, out), log)


DECODE = {
    "fp16": Paged(),
    "bf16": Paged(dtype=torch.bfloat16, dim=128),
    "fp8": Paged(dtype=FN),
    "three queries": Paged(queries=(3, 3)),
    "sinks": Paged(sinks=True),
    "window": Paged(left=10, queries=(2, 2)),
    "window of one": Paged(left=0),
    "window and sinks": Paged(left=63, lengths=(64, 65, 66, 200), queries=(1,) * 4, sinks=True),
    "page boundaries": Paged(lengths=(63, 64, 65, 128), queries=(1,) * 4),
    "split to the limit": Paged(lengths=(1000,), queries=(1,)),
    "odd group": Paged(group=3),
    "group of two blocks": Paged(group=20),
    "empty request with sinks": Paged(lengths=(0, 3), sinks=True),
}
EXTEND = {
    "fp16": Paged(queries=(3, 2)),
    "bf16": Paged(queries=(3, 2), dtype=torch.bfloat16, dim=128),
    "fp8": Paged(queries=(3, 2), dtype=FN),
    "all keys": Paged(queries=(3, 2), causal=False),
    "sinks": Paged(queries=(3, 2), sinks=True),
    "window": Paged(queries=(20, 2), left=5),
    "window of one": Paged(queries=(3, 2), left=0),
    "window and sinks": Paged(queries=(3, 2), left=16, sinks=True),
    "ragged": Paged(queries=(20, 1, 1), lengths=(70, 30, 200)),
    "without prefix": Paged(queries=(3,), lengths=(3,)),
    "request without queries": Paged(queries=(0, 3), lengths=(20, 30)),
    "long": Paged(queries=(130,), lengths=(200,), group=1),
}
PREFILL = {
    "fp16": Paged(),
    "bf16": Paged(dtype=torch.bfloat16, dim=128),
    "fp8": Paged(dtype=FN),
    "sinks": Paged(sinks=True),
    "window": Paged(left=16),
    "window of one": Paged(left=0, lengths=(130,)),
    "window and sinks": Paged(left=100, lengths=(200,), sinks=True),
    "tile boundaries": Paged(lengths=(64, 65, 1)),
    "empty request": Paged(lengths=(0, 5)),
    "odd group": Paged(lengths=(129,), group=3),
}


@pytest.mark.parametrize("name", DECODE)
def test_decode(package: Path, name: str) -> None:
    paged(package, DECODE[name], kernel="decode").check()


@pytest.mark.parametrize("name", EXTEND)
def test_extend(package: Path, name: str) -> None:
    """The log-sum-exp is natural and includes the sink."""
    paged(package, EXTEND[name], kernel="extend").check()


@pytest.mark.parametrize("name", PREFILL)
def test_prefill(package: Path, name: str) -> None:
    """Likewise."""
    prefilled(package, PREFILL[name]).check()


@pytest.mark.slow
def test_prefill_that_skips_blocks_draws_its_work_in_turn(package: Path) -> None:
    """A ticket counter orders the programs, so they run one by one; a low threshold skips nothing that counts."""
    result = prefilled(package, Paged(lengths=(200,)), skip=1e-9)
    result.check()
    assert result.log.launches[0].batches == result.log.launches[0].programs


@pytest.mark.parametrize("kernel", ["decode", "extend", "prefill"])
def test_serial_and_batched_are_one(package: Path, kernel: str) -> None:
    case = Paged(lengths=(70, 70), queries=(2, 2), sinks=True)
    if kernel == "prefill":
        batched, serial = (prefilled(package, case, serial=serial) for serial in (False, True))
    else:
        batched, serial = (paged(package, case, kernel=kernel, serial=serial) for serial in (False, True))
    assert torch.equal(batched.out.view(torch.int16), serial.out.view(torch.int16))
    assert batched.lse is None or (serial.lse is not None and torch.equal(batched.lse, serial.lse))
    assert batched.log.launches[0].batches < serial.log.launches[0].batches


def test_a_wrong_window_is_told_apart(package: Path) -> None:
    case = replace(DECODE["window"], left=10)
    result = paged(package, case, kernel="decode")
    for left in (9, 11):
        wrong = paged(package, replace(case, left=left), kernel="decode").expected
        assert float(((result.out.double() - wrong).abs() / result.allowed[:, None, None]).amax()) > 5


# What version 0.1.4 gets wrong: right answers are asked for.
WRONG = {
    "decode, empty request: NaN": ("decode", Paged(lengths=(0, 3))),
    "decode, empty request and window: NaN": ("decode", Paged(lengths=(0, 3), left=5)),
    "decode, query before the first key: NaN": ("decode", Paged(lengths=(1, 3), queries=(2, 2))),
    "extend, query before the first key: NaN": ("extend", Paged(lengths=(2, 5), queries=(3, 2))),
    "extend, odd group: refused": ("extend", Paged(lengths=(60,), queries=(50,), group=3)),
}


@pytest.mark.parametrize("defect", WRONG)
def test_known_defect(package: Path, defect: str) -> None:
    kernel, case = WRONG[defect]
    try:
        result = paged(package, case, kernel=kernel)
    except emulator.KernelError as error:
        pytest.xfail(f"{defect}: {error}")
    if not bool(((result.out.double() - result.expected).abs() <= result.allowed[:, None, None]).all()):
        pytest.xfail(defect)
