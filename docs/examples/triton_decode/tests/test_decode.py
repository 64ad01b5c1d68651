"""The declared kernel is searched for a case on which it is wrong; on a GPU also one call as users make it."""

import pytest
import torch
from triton_decode.decode import paged_decode
from triton_decode.target import decode

import attn_oracle


def test_decode():
    attn_oracle.check(decode, cases=30)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="compiled Triton needs a GPU")
def test_two_requests_by_hand():
    q, k_cache, v_cache = (torch.randn(*shape, device="cuda") for shape in ((2, 4, 64), (5, 16, 2, 64), (5, 16, 2, 64)))
    page_table, lengths = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([[3, 0], [4, 1]], [20, 17]))
    out = paged_decode(q, k_cache, v_cache, page_table, lengths, window=7)
    attn_oracle.assert_attention_close(
        out, q=q, k_cache=k_cache, v_cache=v_cache, page_table=page_table, lengths=lengths, window=7
    )
