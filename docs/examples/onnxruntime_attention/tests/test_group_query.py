"""Two ways: a search over cases, and one line in a test that was there before."""

import torch
from ort_attention.attention import attention
from ort_attention.target import group_query

import attn_oracle


def test_group_query():
    attn_oracle.check(group_query, cases=30)


def test_one_prompt():
    q, k, v = torch.randn(5, 4, 64), torch.randn(12, 2, 64), torch.randn(12, 2, 64)
    out = attention(q, k, v, window=4)
    attn_oracle.assert_attention_close(out, q=q, k=k, v=v, q_lens=[5], lengths=[12], causal=True, window=4)
