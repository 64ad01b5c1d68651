"""Problems: what they accept, what they refuse and how they say so, and calls that see only some keys."""

from typing import Any

import pytest
import torch
from torch import Tensor

from oracle.problem import Problem, ProblemError


def fields(**changes: Any) -> dict[str, Any]:
    """Fields of a valid problem of 2 requests, 4 query heads, 2 kv heads, D_qk 8, D_v 6."""
    valid = {
        "q": torch.ones(3, 4, 8),
        "k": torch.arange(5.0).view(5, 1, 1).expand(5, 2, 8),
        "v": torch.ones(5, 2, 6),
        "q_lens": (1, 2),
        "kv_lens": (2, 3),
        "scale": 0.5,
    }
    return valid | changes


def test_counts_and_offsets() -> None:
    p = Problem(**fields())
    assert (p.requests, p.q_heads, p.kv_heads, p.group, p.dim_qk, p.dim_v) == (2, 4, 2, 2, 8, 6)
    assert p.q_starts == (0, 1, 3)
    assert p.kv_starts == (0, 2, 5)
    assert p.contexts == (2, 3)
    assert p.positions().tolist() == [0, 1, 0, 1, 2]


def test_a_call_without_requests() -> None:
    p = Problem(**fields(q=torch.ones(0, 4, 8), k=torch.ones(0, 2, 8), v=torch.ones(0, 2, 6), q_lens=(), kv_lens=()))
    assert p.positions().shape == (0,)


REFUSED = {
    "q": [
        torch.ones(3, 4),
        torch.ones(3, 4, 8, dtype=torch.int32),
        torch.ones(3, 3, 8),
        "q",
        torch.ones(3, 0, 8),
    ],
    "k": [torch.ones(5, 2, 7), torch.ones(5, 2, 8, dtype=torch.bool), torch.ones(5, 2, 8, device="meta")],
    "v": [torch.ones(4, 2, 6), torch.ones(5, 1, 6), torch.ones(5, 2, 0)],
    "q_lens": [(1, 1), [1, 2], (4, -1), (1.0, 2.0), (True, 2)],
    "kv_lens": [(5,), (2, 2), (6, -1)],
    "context_lens": [(2,), (2, 2), (2, -3)],
    "kv_positions": [
        torch.tensor([0, 1, 0, 1]),
        torch.tensor([0.0, 1.0, 0.0, 1.0, 2.0]),
        torch.tensor([0, 2, 0, 1, 2]),
        torch.tensor([0, -1, 0, 1, 2]),
        torch.tensor([0, 0, 0, 1, 2]),
    ],
    "scale": [float("inf"), float("nan"), "1", None],
    "causal": [1, None],
    "window": [0, -1, 2.0, True],
    "sinks": [torch.ones(2), torch.ones(4, dtype=torch.int64), 1.0],
    "soft_cap": [0.0, -1.0, float("inf"), float("nan")],
    "q_descale": [torch.ones(5, 1), torch.ones(4), "2"],
    "k_descale": [torch.ones(3, 1), torch.ones(5, 4), torch.ones(5, 2, 1)],
    "v_descale": [torch.ones(5, 3), torch.ones(5, 2, dtype=torch.int64)],
}


@pytest.mark.parametrize(("field", "value"), [(f, v) for f, values in REFUSED.items() for v in values])
def test_refusals_name_the_field_in_one_line(field: str, value: object) -> None:
    with pytest.raises(ProblemError) as caught:
        Problem(**fields(**{field: value}))
    message = str(caught.value)
    assert message.startswith(f"{field}: allowed ")
    assert "\n" not in message


@pytest.mark.parametrize(
    "descale",
    [None, 2, 2.0, torch.tensor(2.0), torch.ones(1), torch.ones(1, 2), torch.ones(5, 1), torch.ones(5, 2)],
)
def test_descales_that_broadcast_are_accepted(descale: float | Tensor | None) -> None:
    Problem(**fields(k_descale=descale, v_descale=descale))


def test_subset_keeps_positions_context_and_descales() -> None:
    descale = torch.arange(10.0).view(5, 2)
    p = Problem(**fields(k_descale=descale, v_descale=torch.ones(1, 2)))
    part = p.subset(torch.tensor([False, True, True, False, True]))
    assert part.kv_lens == (1, 2)
    assert part.contexts == (2, 3)
    assert part.positions().tolist() == [1, 0, 2]
    assert part.k[:, 0, 0].tolist() == [1.0, 2.0, 4.0]
    assert isinstance(part.k_descale, Tensor)
    assert part.k_descale.tolist() == [[2.0, 3.0], [4.0, 5.0], [8.0, 9.0]]
    assert part.v_descale is p.v_descale


def test_subset_of_a_subset_keeps_the_original_positions() -> None:
    p = Problem(**fields())
    part = p.subset(torch.tensor([True, False, False, True, True])).subset(torch.tensor([False, False, True]))
    assert part.kv_lens == (0, 1)
    assert part.positions().tolist() == [2]


@pytest.mark.parametrize("keep", [torch.ones(5), torch.ones(4, dtype=torch.bool)])
def test_subset_refuses_what_is_not_a_mask_of_the_keys(keep: Tensor) -> None:
    with pytest.raises(ProblemError, match="keep: allowed"):
        Problem(**fields()).subset(keep)
