"""attn-oracle in a test suite: search a declared kernel for a case on which it is wrong.

    import attn_oracle
    from mine import attention                      # declared with oracle.declare

    def test_attention():
        attn_oracle.check(attention, cases=40)

`check` draws cases inside the declared capabilities, judges each, and raises the text of the smallest failing one.
`cases` is the Hypothesis strategy behind it and `judge` what it does with a case, for tests with more arguments:

    @given(case=attn_oracle.cases(attention), extra=...)
    def test_attention(case, extra):
        attn_oracle.judge(case)

Cases run in a process of ours, so that a crash ends a case and not the session, and a repository may have its own
`fuzz` or `suites`. Results of `assert_attention_close` are judged where they are.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from oracle.dependencies import said_of

if TYPE_CHECKING:
    from attn_oracle.drawn import DrawnCase, cases
    from attn_oracle.search import check, judge
    from oracle.assertion import assert_attention_close

_LAZY = {
    "DrawnCase": "attn_oracle.drawn",
    "assert_attention_close": "oracle.assertion",
    "cases": "attn_oracle.drawn",
    "check": "attn_oracle.search",
    "judge": "attn_oracle.search",
}

__all__ = ["DrawnCase", "assert_attention_close", "cases", "check", "judge"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        __tracebackhide__ = True
        try:
            return getattr(import_module(_LAZY[name]), name)
        except ModuleNotFoundError as error:
            if (said := said_of(error)) is None:
                raise
            raise ModuleNotFoundError(f"attn-oracle {said}", name=error.name) from None
    raise AttributeError(f"module 'attn_oracle' has no attribute {name!r}")
