"""Ten lines: the declared kernel is searched for a case on which it is wrong."""

from triton_decode.target import decode

import attn_oracle


def test_decode():
    attn_oracle.check(decode, cases=30)
