"""The smallest case that shows each bug, and the text that a reader gets."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fuzz.case import Case
from fuzz.check.result import CaseResult
from fuzz.check.run import check_case
from fuzz.report.failure import failure_text, replay_command
from oracle.declare import Declaration
from oracle.kinds import Engine, Operation
from suites.fuzz.cases import decode_case, extend_case
from suites.fuzz.failures.kernel import Bug, decode_target, extend_target

GOLDEN = Path(__file__).with_name("golden")

_DECODE = {
    "kv_layout": "nhd",
    "index_form": "page_table",
    "index_dtype": "int32",
    "page_size": 8,
    "head_dim": 64,
    "v_head_dim": 64,
    "placement": "shuffled",
    "pool": "spare",
    "context_lens": [19, 6],
}
_EXTEND = {"head_dim": 64, "v_head_dim": 64, "index_dtype": "int32", "context_lens": [11, 6], "query_lens": [4, 6]}

CASES: Mapping[Bug, Case] = {
    Bug.WINDOW_ONE_SHORT: decode_case(**_DECODE | {"window": 6, "probe": "code"}),
    Bug.NO_LENGTH_MASK: decode_case(**_DECODE),
    Bug.TOP_LEFT: extend_case(**_EXTEND),
    Bug.EMPTY_IS_NAN: decode_case(**_DECODE | {"context_lens": [0, 6]}),
    Bug.SINK_OF_FIRST_HEAD: decode_case(**_DECODE | {"sinks": "normal"}),
    Bug.LSE_BASE_2: decode_case(**_DECODE),
    Bug.FIRST_SPLITS_ONLY: decode_case(**_DECODE | {"context_lens": [41, 6]}),
    Bug.TAIL_TIMES_ZERO: decode_case(**_DECODE),
    Bug.NO_TABLE: decode_case(**_DECODE | {"pool": "tight", "context_lens": [24, 16]}),
    Bug.LAST_PAGE: decode_case(**_DECODE | {"context_lens": [16, 6]}),
    Bug.ONE_DESCALE: decode_case(**_DECODE | {"kv_dtype": "e4m3fnuz", "k_descale": "head", "v_descale": "head"}),
    Bug.FNUZ_AS_FN: decode_case(**_DECODE | {"kv_dtype": "e4m3fnuz"}),
    Bug.CAP_AFTER_MASK: extend_case(**_EXTEND | {"soft_cap": 5.0}),
    Bug.HEAD_BLOCKS: decode_case(**_DECODE | {"group_size": 3}),
}


def target(bug: Bug, *, right: bool = False) -> Declaration:
    """The kernel with the bug, or without."""
    make = decode_target if CASES[bug].operation is Operation.PAGED_DECODE else extend_target
    return make(None if right else bug)


def judged(bug: Bug, *, right: bool = False) -> CaseResult:
    """The case of a bug on the kernel with it, or without. Needs the emulator started."""
    return check_case(target(bug, right=right), CASES[bug], Engine.EMULATOR, lambda phase: None)


def text(bug: Bug) -> str:
    """What a reader is shown of a bug; nothing in it says which bug it is."""
    failures = judged(bug).failures
    command = replay_command("finding.json", ["--targets", "kernel.py"])
    return failure_text("example.attention", CASES[bug], failures, command) + "\n"
