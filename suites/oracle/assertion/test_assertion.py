"""The assertion: whatever the layout, right results pass and wrong ones raise the class of their fault."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from oracle import Convention, Precision, Problem, assert_attention_close, failure, solve
from oracle.assertion import ArgumentsError
from oracle.attention import lse_with_sink
from oracle.convention import (
    CausalAlignment,
    DefaultScale,
    EmptyLse,
    EmptyOut,
    LseLayout,
    SinkUnits,
    Window,
    WindowMeaning,
)
from oracle.failure import AttentionMismatch, BudgetSaysNothing
from oracle.kinds import KVLayout, LseBase, Role, VLayout
from oracle.layout import CacheGeometry, pack
from oracle.verdict import Verdict

HQ, HKV, D, SIZE = 4, 2, 16, 16


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def problem(q_lens: tuple[int, ...], kv_lens: tuple[int, ...], seed: int = 0, **options: Any) -> Problem:
    tokens = sum(kv_lens)
    q, k, v = (
        normal(n, h, D, seed=seed + i) for i, (n, h) in enumerate(((sum(q_lens), HQ), (tokens, HKV), (tokens, HKV)))
    )
    return Problem(q=q, k=k, v=v, q_lens=q_lens, kv_lens=kv_lens, scale=D**-0.5, **options)


def answer(p: Problem) -> tuple[Tensor, Tensor]:
    found = solve(p)
    return found.out.float(), found.lse.float()


def padded(x: Tensor, lens: tuple[int, ...], layout: str) -> Tensor:
    """Ragged [T, H, D] or [T, H] as [B, S, ...] with NaN in the padding, heads first for bhsd."""
    found = x.new_full((len(lens), max(lens), *x.shape[1:]), float("nan"))
    for b, own in enumerate(x.split(list(lens))):
        found[b, : len(own)] = own
    return found.transpose(1, 2) if layout == "bhsd" else found


def ragged(p: Problem) -> dict[str, Any]:
    return {"q": p.q, "k": p.k, "v": p.v, "q_lens": p.q_lens, "lengths": list(p.kv_lens)}


def dense(p: Problem, layout: str) -> dict[str, Any]:
    kv = {name: padded(getattr(p, name), p.kv_lens, layout) for name in ("k", "v")}
    lens = {"q_lens": torch.tensor(p.q_lens), "lengths": torch.tensor(p.kv_lens)}
    return {"q": padded(p.q, p.q_lens, layout), **kv, **lens, "layout": layout}


def paged(p: Problem, layout: KVLayout, v_layout: VLayout = VLayout.V5D, *, table: bool = True) -> dict[str, Any]:
    """Shuffled pages of a pool that holds NaN elsewhere."""
    counts = [-(-n // SIZE) for n in p.kv_lens]
    blocks = sum(counts) + 2
    order = torch.randperm(blocks, generator=torch.Generator().manual_seed(1))
    pages, own = torch.full((len(counts), max(counts)), 10**6), order.split([*counts, 2])
    slots = []
    for r, (mine, n) in enumerate(zip(own, p.kv_lens, strict=False)):
        pages[r, : len(mine)] = mine
        slots.append((mine[:, None] * SIZE + torch.arange(SIZE)).flatten()[:n])
    found: dict[str, Any] = {"q": p.q, "q_lens": p.q_lens, "lengths": p.kv_lens}
    for role, x in ((Role.K, p.k), (Role.V, p.v)):
        linear = torch.full((blocks * SIZE, HKV, D), float("nan"))
        linear[torch.cat(slots)] = x
        found[f"{role}_cache"] = pack(linear, CacheGeometry(layout, role, blocks, HKV, SIZE, D, x.dtype, v_layout))
    found |= {"kv_layout": layout, "v_layout": v_layout}
    found |= {"page_table": pages.int()} if table else {"slots": torch.cat(slots)}
    return found | ({"page_size": SIZE} if layout is KVLayout.LINEAR and table else {})


FORMS = {
    "ragged": ragged,
    "bhsd": lambda p: dense(p, "bhsd"),
    "bshd": lambda p: dense(p, "bshd"),
    "nhd": lambda p: paged(p, KVLayout.NHD),
    "hnd": lambda p: paged(p, KVLayout.HND),
    "linear": lambda p: paged(p, KVLayout.LINEAR),
    "slots": lambda p: paged(p, KVLayout.LINEAR, table=False),
    "5d": lambda p: paged(p, KVLayout.SHUFFLE_5D),
    "5d, v 4d": lambda p: paged(p, KVLayout.SHUFFLE_5D, VLayout.V4D),
}


def handed(form: str, p: Problem, out: Tensor, lse: Tensor | None) -> dict[str, Any]:
    """Arguments of the assertion in one of the forms; the result in the layout of q."""
    found = FORMS[form](p) | {"out": out, "lse": lse, "causal": p.causal, "window": p.window}
    if form in ("bhsd", "bshd"):
        found["out"] = padded(out, p.q_lens, form)
        found["lse"] = None if lse is None else padded(lse, p.q_lens, "bhsd")
    return found


@st.composite
def problems(draw: st.DrawFn, windows: st.SearchStrategy[int | None]) -> Problem:
    q_lens = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    kv_lens = tuple(n + draw(st.integers(0, 40)) for n in q_lens)
    causal = draw(st.booleans())
    return problem(q_lens, kv_lens, seed=draw(st.integers(0, 99)), causal=causal, window=draw(windows))


@settings(max_examples=40)
@given(st.sampled_from(sorted(FORMS)), problems(st.none() | st.integers(1, 8)))
def test_right_results_pass(form: str, p: Problem) -> None:
    judged = assert_attention_close(**handed(form, p, *answer(p)))
    assert judged.verdict is Verdict.PASS
    assert judged.out.elements == p.q.numel()


# Few: why a result is wrong takes the longest.
@settings(max_examples=8)
@given(st.sampled_from(sorted(FORMS)), problems(st.integers(1, 8)), st.booleans())
def test_wrong_windows_fail(form: str, p: Problem, with_lse: bool) -> None:
    assume(p.window is not None and any(n > p.window for n in p.kv_lens))
    out, lse = answer(replace(p, window=p.window + 1))
    with pytest.raises(AttentionMismatch):
        assert_attention_close(**handed(form, p, out, lse if with_lse else None))


def test_the_class_of_the_fault_is_the_type_and_the_text_says_it() -> None:
    p = problem((9,), (20,), window=4)
    with pytest.raises(failure.WindowMismatch, match="window: 5 keys where 4 keys are asked for") as caught:
        assert_attention_close(**handed("nhd", p, *answer(replace(p, window=5))), name="mine")
    said = str(caught.value)
    assert said.startswith("mine: values: window")
    for part in (
        "  case  ",
        "  worst      request 0, row ",
        "  budget     made of ",
        "rows 0 to 8  XXXX",
        "decoded    row 0",
    ):
        assert part in said
    assert caught.value.evidence["diagnosis"]["kind"] == "window"


def test_torch_is_right() -> None:
    q, k, v = (normal(2, h, 9, D, seed=i) for i, h in enumerate((HQ, HKV, HKV)))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        given = {"q": q.to(dtype), "k": k.to(dtype), "v": v.to(dtype)}
        out = F.scaled_dot_product_attention(*given.values(), is_causal=True, enable_gqa=True)
        assert_attention_close(out, layout="bhsd", causal=True, **given)


def test_torch_aligns_the_diagonal_top_left() -> None:
    """Of fewer queries than keys, is_causal of torch's SDPA means the first ones; a convention says so."""
    top_left = Convention(source="torch documentation", causal_alignment=CausalAlignment.TOP_LEFT)
    for queries, keys in ((3, 9), (9, 3), (5, 5)):
        q, k, v = (normal(1, HQ, n, D, seed=i) for i, n in enumerate((queries, keys, keys)))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        assert_attention_close(out, q=q, k=k, v=v, layout="bhsd", causal=True, convention=top_left)
        if queries != keys:
            with pytest.raises(AttentionMismatch, match="diagnosis  causal: aligned to the top left"):
                assert_attention_close(out, q=q, k=k, v=v, layout="bhsd", causal=True)


@pytest.mark.parametrize(
    ("meaning", "off", "argument"),
    [
        (WindowMeaning.KEYS, (0,), 4),
        (WindowMeaning.LEFT, (-1,), 3),
        (WindowMeaning.LEFT_RIGHT, (-1,), (3, 0)),
    ],
)
def test_a_window_means_what_the_convention_says(meaning: WindowMeaning, off: tuple[int, ...], argument: Any) -> None:
    p = problem((3,), (20,), window=4)
    said = Convention(source="its README", window=Window(meaning=meaning, off=off))
    given = handed("ragged", p, *answer(p)) | {"convention": said}
    assert_attention_close(**given | {"window": argument})
    unlimited = (off[0], off[0]) if meaning is WindowMeaning.LEFT_RIGHT else off[0]
    with pytest.raises(failure.WindowMismatch):
        assert_attention_close(**given | {"window": unlimited})
    with pytest.raises(ArgumentsError, match=r"window: .*allowed"):
        assert_attention_close(**given | {"window": "4"})


def test_log_sum_exps_of_other_conventions() -> None:
    p = problem((3, 2), (20, 9), sinks=normal(HQ, seed=5))
    out, _ = answer(p)
    both = lse_with_sink(solve(p).lse, p.sinks) / torch.log(torch.tensor(2.0, dtype=torch.float64))
    said = Convention(
        source="its README", lse_base=LseBase.TWO, lse_includes_sink=True, lse_layout=LseLayout.HEAD_TOKEN
    )
    given = handed("ragged", p, out, both.float().T) | {"sinks": p.sinks}
    assert_attention_close(**given, convention=said)
    with pytest.raises(ArgumentsError, match=r"lse: fp32 \[4, 5\]; allowed: \[tokens = 5, heads = 4\]"):
        assert_attention_close(**given)
    with pytest.raises(failure.LseBaseMismatch):
        assert_attention_close(**given, convention=replace(said, lse_base=LseBase.NATURAL))


def test_sinks_and_scales_of_other_conventions() -> None:
    p = problem((2,), (9,))
    sinks = normal(HQ, seed=5)
    said = Convention(source="its README", sink=SinkUnits.SCALED, default_scale=DefaultScale.ONE)
    one = replace(p, scale=1.0, sinks=sinks.double() * 1.0)
    assert_attention_close(**handed("ragged", p, *answer(one)), sinks=sinks, convention=said)
    half = replace(p, scale=0.5, sinks=sinks.double() * 0.5)
    assert_attention_close(**handed("ragged", p, *answer(half)), sinks=sinks, scale=0.5, convention=said)
    with pytest.raises(failure.SinkMismatch):
        assert_attention_close(**handed("ragged", p, *answer(half)), sinks=sinks, scale=0.5)


def test_rows_without_a_key() -> None:
    p = problem((4,), (2,))  # the first two queries are before every key
    out, lse = answer(p)
    assert_attention_close(**handed("ragged", p, out, lse))
    lse[:2] = float("inf")
    with pytest.raises(failure.EmptyRowMismatch):
        assert_attention_close(**handed("ragged", p, out, lse))
    out[:2] = float("nan")
    said = Convention(source="its README", empty_out=EmptyOut.UNDEFINED, empty_lse=EmptyLse.POSITIVE_INFINITY)
    assert_attention_close(**handed("ragged", p, out, lse), convention=said)


def test_descales_of_heads_and_tensors() -> None:
    p = problem((2,), (9,), k_descale=torch.tensor([[0.5, 3.0]]), v_descale=0.25)
    given = handed("hnd", p, *answer(p)) | {"v_descale": torch.tensor([0.25])}
    assert_attention_close(**given, k_descale=torch.tensor([0.5, 3.0]))
    with pytest.raises(AttentionMismatch):
        assert_attention_close(**given, k_descale=torch.tensor([0.5, 0.5]))


def test_a_precision_tightens_the_budget() -> None:
    p = problem((1,), (300,))
    p = replace(p, q=p.q.bfloat16(), k=p.k.bfloat16(), v=p.v.bfloat16())
    out, _ = answer(p)
    rounded = out + 0.02 * out.abs().mean()
    tight = Precision(source="float32 throughout", qk_product=None, p_dtype=None, kv_cast=None)
    assert_attention_close(**handed("ragged", p, rounded, None))
    with pytest.raises(AttentionMismatch):
        assert_attention_close(**handed("ragged", p, rounded, None), precision=tight)


def test_nan() -> None:
    p = problem((3,), (8,))
    out, lse = answer(p)
    out[1, 2, 3] = float("nan")
    with pytest.raises(failure.ValuesMismatch, match="1 of them not finite"):
        assert_attention_close(**handed("ragged", p, out, lse))
    seen = replace(p, k=p.k.clone())
    seen.k[7] = float("nan")  # only the last query sees it
    out, lse = answer(seen)
    with pytest.raises(ArgumentsError, match="row 2 of request 0 sees NaN or infinity"):
        assert_attention_close(**handed("ragged", seen, out, lse))
    assert_attention_close(**handed("ragged", seen, out, lse), nan="propagate")
    out[2] = 0.0
    with pytest.raises(AttentionMismatch):
        assert_attention_close(**handed("ragged", seen, out, lse), nan="propagate")


def test_where_the_budget_says_nothing_nothing_passes() -> None:
    p = problem((1,), (4,))
    p = replace(p, q=(p.q * 3000).half(), k=p.k.half(), v=p.v.half(), scale=30.0)
    with pytest.raises(BudgetSaysNothing, match="state the kernel's precision"):
        assert_attention_close(**handed("ragged", p, solve(p).out.half(), None), scale=30.0)


def test_no_requests_are_no_fault() -> None:
    nothing = normal(0, HQ, D)
    given = {"k": normal(0, HKV, D), "v": normal(0, HKV, D), "q_lens": [], "lengths": []}
    assert assert_attention_close(nothing, q=nothing, **given).out.elements == 0


P = problem((3, 3), (20, 20))
OUT, LSE = answer(P)


@pytest.mark.parametrize(
    ("form", "change", "said"),
    [
        ("ragged", {"q": P.q[0]}, "q: fp32 [4, 16]; allowed: a floating tensor [tokens, heads, dim]"),
        ("ragged", {"q": P.q.int()}, "q: int32 [6, 4, 16]; allowed"),
        ("bhsd", {"layout": None}, "layout: missing; allowed: bhsd, bshd, thd"),
        ("bhsd", {"layout": "thd"}, "layout: 'thd'; allowed: bhsd or bshd for a 4-D q"),
        ("ragged", {"layout": "bshd"}, "layout: 'bshd'; allowed: thd for a 3-D q"),
        ("ragged", {"q_lens": [0, 3, 6]}, "these look cumulative: take their differences"),
        ("ragged", {"q_lens": [3, 2]}, "q_lens: [3, 2]; allowed: a sum of q's 6 tokens"),
        ("ragged", {"lengths": [20, 19]}, "lengths: [20, 19]; allowed: a sum of k's 40 tokens"),
        ("bshd", {"lengths": [20, 21]}, "lengths: [20, 21]; allowed: at most 20, as in k"),
        ("ragged", {"lengths": None}, "lengths: missing; allowed: one length a request"),
        ("ragged", {"k": None}, "k: missing; allowed: one of k (with v) and k_cache (with v_cache), neither is given"),
        ("ragged", {"v": P.v[:3]}, "v: fp32 [3, 2, 16]; allowed: [tokens = 40, kv heads = 2, dim]"),
        ("ragged", {"k": P.k[:, :, :8]}, "k: allowed is q's dimension 16, got float32 [40, 2, 8]"),
        ("ragged", {"out": OUT[:5]}, "out: fp32 [5, 4, 16]; allowed: [tokens = 6, heads = 4, dim = 16]"),
        ("ragged", {"out": OUT.double()}, "out: float64 [6, 4, 16]; allowed: fp32, bf16, fp16"),
        ("ragged", {"lse": LSE.bfloat16()}, "lse: bf16 [6, 4]; allowed: fp32, which precision.lse_dtype says"),
        ("ragged", {"causal": None}, "causal: missing; allowed: True or False"),
        ("ragged", {"causal": 1}, "causal: allowed is True or False, got 1"),
        ("ragged", {"window": 0}, "window: allowed is None (off) or an integer >= 1"),
        ("ragged", {"sinks": normal(3)}, "sinks: fp32 [3]; allowed: [Hq = 4]"),
        ("ragged", {"nan": "ignore"}, "nan: 'ignore'; allowed: refuse, propagate"),
        ("ragged", {"page_table": torch.zeros(2, 2)}, "[2, 2]; allowed: nothing, unless k_cache is given"),
        ("nhd", {"kv_layout": "nhwd"}, "kv_layout: 'nhwd'; allowed: linear, nhd, hnd, shuffle_5d"),
        ("nhd", {"page_table": None}, "page_table: missing; allowed: one of page_table and slots, neither is given"),
        ("nhd", {"page_table": torch.full((2, 2), 99)}, "page_table: 99; allowed: 0 to 5 where a request has keys"),
        ("nhd", {"lengths": [20, 33]}, "lengths: [20, 33]; allowed: at most 32, as in a table of 2 pages of 16"),
        ("nhd", {"v_cache": torch.zeros(6, 16, 3, 16)}, "allowed: the pages and heads of k_cache"),
        ("nhd", {"k_cache": torch.zeros(6, 16, 2, dtype=torch.uint8)}, "of bytes that are fp8, its view in that dtype"),
        ("hnd", {"k_cache": torch.zeros(6, 16)}, "allowed: the axes of hnd, [pages, Hkv, page size, D]"),
        ("linear", {"page_size": None}, "page_size: missing; allowed: an integer that divides the 96 slots"),
        ("slots", {"slots": torch.zeros(40)}, "slots: fp32 [40]; allowed: an int32 or int64 tensor [tokens]"),
    ],
)  # fmt: skip
def test_a_wrong_argument_is_one_line_that_says_what_is_allowed(form: str, change: dict[str, Any], said: str) -> None:
    with pytest.raises(ArgumentsError) as caught:
        assert_attention_close(**handed(form, P, OUT, LSE) | change)
    line = str(caught.value)
    assert line.startswith("assert_attention_close: ")
    assert said in line
    assert "\n" not in line


def test_an_eager_kernel_that_says_nothing_of_itself_passes() -> None:
    """It divides weights by their sum before the product, which rounds what was an integer before."""
    q, v = normal(1, HQ, 255, D), torch.ones(1, HQ, 255, D)
    out = torch.softmax(q @ torch.zeros(1, HQ, 255, D).mT, -1) @ v
    given = {"q": q, "k": torch.zeros_like(v), "v": v, "layout": "bhsd", "causal": False}
    assert_attention_close(out, **given)
    with pytest.raises(AttentionMismatch):
        assert_attention_close(out * (1 + 2.0**-14), **given)
