"""Masks that remember origins behave as masks, and lanes carry their origin through what operators do."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fuzz.engine.emulator.provenance import Origin, TracedMask, from_origin, plain, sources

A, B = Origin("k.py", 3, "x"), Origin("k.py", 5, "y")


def mask(*lanes: int) -> torch.Tensor:
    return torch.tensor([lanes], dtype=torch.bool)


def lanes_of(traced: torch.Tensor) -> dict[str, list[int]]:
    return {str(o.argument): plain(s.lanes).expand(traced.shape).int().flatten().tolist() for o, s in sources(traced)}


BITS = st.lists(st.booleans(), min_size=6, max_size=6).map(lambda bits: torch.tensor([bits]))


@given(a=BITS, b=BITS, plain_mask=BITS, chooser=BITS)
def test_what_operators_do_to_the_mask_they_do_to_each_origin(
    a: torch.Tensor, b: torch.Tensor, plain_mask: torch.Tensor, chooser: torch.Tensor
) -> None:
    x, y = from_origin(a, A), from_origin(b, B)
    united = x | y | plain_mask
    assert torch.equal(plain(united), a | b | plain_mask)
    expected = {"x": a, "y": b}
    assert lanes_of(united) == {n: m.int().flatten().tolist() for n, m in expected.items() if bool(m.any())}
    chosen = torch.where(chooser, x, torch.where(plain_mask, y, torch.zeros(1, dtype=torch.bool)))
    assert torch.equal(plain(chosen), torch.where(chooser, a, plain_mask & b))
    kept = {"x": a & chooser, "y": b & plain_mask & ~chooser}
    assert lanes_of(chosen) == {n: m.int().flatten().tolist() for n, m in kept.items() if bool(m.any())}
    moved = (united & chooser).reshape(1, 2, 3).permute(0, 2, 1)
    for name, m in expected.items():
        lanes = (m & chooser).reshape(1, 2, 3).permute(0, 2, 1).int().flatten().tolist()
        assert lanes_of(moved).get(name, [0] * 6) == lanes
    reduced = torch.stack([united.any(1), torch.cat([x, y], 1).any(1)], -1)
    assert plain(reduced).tolist() == [[bool((a | b | plain_mask).any()), bool((a | b).any())]]
    assert ("x" in lanes_of(reduced)) == bool(a.any())


def test_an_inverse_has_no_origin_and_an_origin_without_lanes_goes() -> None:
    traced = from_origin(mask(1, 0, 1), A)
    assert isinstance(traced, TracedMask)
    for inverse in (~traced, traced == mask(0, 0, 0), torch.logical_not(traced)):
        assert not isinstance(inverse, TracedMask)
    assert not isinstance(traced & mask(0, 1, 0), TracedMask)
    assert int(traced.sum()) == 2


def test_indices_are_kept_for_each_program() -> None:
    lanes = torch.tensor([[True, False], [True, True]])
    traced = from_origin(lanes, A, torch.tensor([[3, 9], [5, 7]]))
    ((origin, source),) = sources(traced | torch.zeros(1, 2, dtype=torch.bool))
    assert (origin, source.low.tolist(), source.high.tolist()) == (A, [3, 5], [3, 7])
    ((_, source),) = sources(traced | from_origin(mask(1, 0), A, torch.tensor([[4, 100]])))
    assert (source.low.tolist(), source.high.tolist()) == ([3, 4], [4, 7])


def test_order_of_origins_does_not_depend_on_who_came_first() -> None:
    x, y = from_origin(mask(1, 1), A), from_origin(mask(1, 1), B)
    assert [origin for origin, _ in sources(x | y)] == [origin for origin, _ in sources(y | x)] == [A, B]


@pytest.mark.parametrize("wrong", [Origin("k.py", 3, "z"), Origin("k.py", 4, "x")])
def test_origins_differ_by_line_and_argument(wrong: Origin) -> None:
    assert len(sources(from_origin(mask(1), A) | from_origin(mask(1), wrong))) == 2
