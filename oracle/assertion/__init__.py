"""One assertion for an existing test suite: a kernel's result is attention, within what its arithmetic allows."""

from oracle.assertion.arguments import ArgumentsError
from oracle.assertion.check import assert_attention_close

__all__ = ["ArgumentsError", "assert_attention_close"]
