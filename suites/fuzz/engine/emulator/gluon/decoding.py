"""Problems for aiter's `pa_decode_gluon`: tensors in its layout, its answer, and the float64 reference."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fuzz.engine import emulator
from suites.fuzz.engine.emulator.gluon import kernels_aiter
from suites.fuzz.engine.emulator.gluon.exact import allowance, attend, window_of


@dataclass(frozen=True)
class Decode:
    """One call. `parts`: partitions of the context (1: one shot). `cache_fp8`: or like the query; its `scales`: per
    "tensor" or "token". `query_scale` makes the query fp8, likewise. `compute_fp8`: arithmetic in fp8, else in `dtype`.
    `transposed`: values as 5D. `needle`: position of a key that the first query attends before all others (group 1).
    """

    arch: str = "gfx942"
    lengths: tuple[int, ...] = (37, 300, 700)
    page: int = 16
    kv_heads: int = 2
    group: int = 8
    dim: int = 64
    query_length: int = 1
    parts: int = 1
    persistent: bool = True
    dtype: torch.dtype = torch.float16
    cache_fp8: bool = False
    scales: str = "tensor"
    query_scale: str = ""
    compute_fp8: bool = False
    transposed: bool = True
    window: int | None = None
    sinks: bool = False
    needle: int | None = None
    seed: int = 0

    @property
    def fp8(self) -> torch.dtype:
        return kernels_aiter.FP8[self.arch]

    @property
    def compute(self) -> torch.dtype:
        return self.fp8 if self.compute_fp8 else self.dtype


@dataclass(frozen=True)
class Answer:
    """Output [batch * query_length, Hq, D], the reference, the greatest allowed error of each row, and the log."""

    out: Tensor
    expected: Tensor
    allowed: Tensor
    log: emulator.Log

    @property
    def ratio(self) -> float:
        """The worst error, in units of what is allowed; infinite for a NaN."""
        worst = ((self.out.double() - self.expected).abs() / self.allowed[:, None, None]).nan_to_num(torch.inf)
        return float(worst.amax())


def _scale(kind: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Descales, unequal ones for "token": [shape, 1]."""
    if kind == "tensor":
        return torch.tensor([0.021])
    return torch.rand(*shape, 1, generator=generator) * 0.02 + 0.01


def _quantised(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes of x / scale, within range, and the float64 values that they stand for."""
    codes = (x / scale).clamp(-200, 200).to(dtype)
    return codes, codes.double() * scale.double()


def _shuffled(pages: Tensor, transposed: bool) -> Tensor:
    """[pages, Hkv, D / x, page, x] of pages [pages, page, Hkv, D]; `transposed`: [pages, Hkv, page / x, D, x]."""
    blocks, page, heads, dim = pages.shape
    x = 16 // pages.dtype.itemsize
    raw = pages.view(torch.uint8) if pages.dtype.itemsize == 1 else pages
    if transposed:
        split = raw.reshape(blocks, page // x, x, heads, dim).permute(0, 3, 1, 4, 2)
    else:
        split = raw.reshape(blocks, page, heads, dim // x, x).permute(0, 2, 3, 1, 4)
    return split.contiguous().view(pages.dtype)


def _plain(pages: Tensor) -> Tensor:
    """[pages, Hkv, D, page]."""
    raw = pages.view(torch.uint8) if pages.dtype.itemsize == 1 else pages
    return raw.permute(0, 2, 3, 1).contiguous().view(pages.dtype)


def answer(folder: kernels_aiter.Path, case: Decode, *, serial: bool = False) -> Answer:
    """Run the case through aiter's public function in the emulator."""
    g = torch.Generator().manual_seed(case.seed)
    batch, heads = len(case.lengths), case.kv_heads * case.group
    widths = [max(1, -(-length // case.page)) for length in case.lengths]
    blocks = sum(widths) + 1
    order = torch.randperm(blocks, generator=g).int()
    table = torch.zeros(batch, max(widths), dtype=torch.int32)
    for row, width in enumerate(widths):
        table[row, :width] = order[sum(widths[:row]) :][:width]
    pages = (blocks, case.page, case.kv_heads, case.dim)
    k, v = (torch.randn(pages, generator=g) for _ in range(2))
    q = torch.randn(batch * case.query_length, heads, case.dim, generator=g)
    if case.needle is not None:
        k[table[0, case.needle // case.page], case.needle % case.page] = q[0]
    key_scale = value_scale = query_scale = None
    if case.cache_fp8:
        key_scale, value_scale = (_scale(case.scales, (blocks, case.kv_heads, case.page), g) for _ in range(2))
        by_page = [s if s.ndim == 1 else s.permute(0, 2, 1, 3) for s in (key_scale, value_scale)]
        (k, k_exact), (v, v_exact) = (_quantised(x, s, case.fp8) for x, s in zip((k, v), by_page, strict=True))
    else:
        k, v = k.to(case.dtype), v.to(case.dtype)
        k_exact, v_exact = k.double(), v.double()
    if case.query_scale:
        query_scale = _scale(case.query_scale, q.shape[:2], g)
        q, q_exact = _quantised(q, query_scale, case.fp8)
    else:
        q = q.to(case.dtype)
        q_exact = q.double()
    sinks = torch.randn(heads, generator=g) * 2 if case.sinks else None
    out = torch.full(q.shape, torch.nan, dtype=case.dtype)
    partial = torch.bfloat16 if case.compute_fp8 else case.compute
    workspace = kernels_aiter.partials(
        batch, case.kv_heads, case.parts, case.query_length * case.group, case.dim, partial
    )
    scale = case.dim**-0.5
    with emulator.session(emulator.Options(serial=serial)) as log:
        kernels_aiter.entry(folder, case.arch)(
            out,
            q,
            _shuffled(k, False),
            _shuffled(v, True) if case.transposed else _plain(v),
            torch.tensor(case.lengths, dtype=torch.int32),
            table,
            scale,
            case.query_length,
            case.parts,
            kernels_aiter.PARTITION,
            case.compute,
            query_scale,
            key_scale,
            value_scale,
            **workspace,
            sinks=sinks,
            sliding_window=case.window or 0,
            ps=case.persistent,
        )
    expected, allowed = torch.zeros(q.shape, dtype=torch.float64), torch.zeros(len(q), dtype=torch.float64)
    for row in range(len(q)):
        request, token = divmod(row, case.query_length)
        length = case.lengths[request]
        seen = window_of(length - case.query_length + token, case.window)
        keys, values = (torch.cat([x[page] for page in table[request]])[seen] for x in (k_exact, v_exact))
        expected[row] = attend(q_exact[row], keys, values, scale, sinks)[0]
        allowed[row] = allowance(values, case.compute, case.dtype)
    return Answer(out, expected, allowed, log)
