"""What a reader is shown of fourteen public bugs: the texts are kept, `--update-golden` writes them anew."""

from __future__ import annotations

import pytest

from fuzz import engine
from oracle.failure import Failed, mismatch_type, render
from oracle.kinds import Engine
from oracle.verdict import Verdict
from suites.fuzz.failures.bugs import GOLDEN, judged, text
from suites.fuzz.failures.kernel import REFERENCES, Bug

WORDS = {
    Bug.WINDOW_ONE_SHORT: "window: 5 keys where 6 keys are asked for",
    Bug.NO_LENGTH_MASK: "past the request's last key",
    Bug.TOP_LEFT: "aligned to the top left",
    Bug.EMPTY_IS_NAN: "rows without a visible key hold NaN",
    Bug.SINK_OF_FIRST_HEAD: "sink: that of the first head of the group",
    Bug.LSE_BASE_2: "lse_base: 2 where natural is asked for",
    Bug.FIRST_SPLITS_ONLY: "keys 32 to 40 are lost",
    Bug.TAIL_TIMES_ZERO: "keys that are masked are computed with, and 0 times NaN is NaN",
    Bug.NO_TABLE: "pages 0, 1, ... are read in order: the page table is not followed",
    Bug.LAST_PAGE: "were not written",
    Bug.ONE_DESCALE: "k_descale: that of the first head for all",
    Bug.FNUZ_AS_FN: "bytes of k and v are read as e4m3fn",
    Bug.CAP_AFTER_MASK: "soft_cap: applied after the mask",
    Bug.HEAD_BLOCKS: "K and V of another kv head is read: 1 where 0 belongs",
}
"""What names the fault."""


@pytest.fixture(autouse=True)
def _engine() -> None:
    engine.start(Engine.EMULATOR)


@pytest.mark.parametrize("bug", Bug)
def test_the_text_names_the_fault(bug: Bug, pytestconfig: pytest.Config) -> None:
    shown = text(bug)
    golden = GOLDEN / f"{bug}.txt"
    if pytestconfig.getoption("--update-golden"):
        golden.write_text(shown)
    assert shown == golden.read_text(), f"{golden.name} is out of date: look at it, then --update-golden"
    assert WORDS[bug] in shown
    assert bug.value not in shown
    assert bug.name.lower() not in shown


@pytest.mark.parametrize("bug", Bug)
def test_the_kernel_without_the_bug_passes_on_its_case(bug: Bug) -> None:
    assert judged(bug, right=True).verdict is Verdict.PASS


def test_every_bug_has_a_reference_and_every_file_a_bug() -> None:
    assert set(REFERENCES) == set(WORDS) == set(Bug)
    assert {path.stem for path in GOLDEN.glob("*")} == set(Bug)


def test_what_has_no_numbers_is_one_line_and_the_case() -> None:
    said = render("t", "a case", [Failed(check="crash", message="killed by SIGSEGV")], "attn-oracle replay x")
    assert said.splitlines() == [
        "t: crash: killed by SIGSEGV",
        "  case       a case",
        "  replay     attn-oracle replay x",
    ]


def test_the_first_line_does_not_take_one_of_several_names_for_the_fault() -> None:
    def said(*others: tuple[str, str]) -> str:
        runners_up = [{"kind": kind, "detail": detail} for kind, detail in others]
        diagnosis = {"kind": "window", "detail": "window: a", "ratio": 0.5, "runners_up": runners_up}
        return render("t", "a case", [Failed(check="values", message="wrong", evidence={"diagnosis": diagnosis})])

    assert said(("window", "window: b"), ("page", "page: c")).startswith(
        "t: values: window: a (or another of its class)\n"
    )
    assert said(("window", "window: b"), ("window", "window: c")).startswith(
        "t: values: window: a (or 2 others of its class)\n"
    )
    assert said(("page", "page: c")).startswith("t: values: window: a\n")


def test_nan_beside_wrong_values_means_no_more_than_it_says() -> None:
    nan, values = Failed(check="nan", message="nan where no data is"), Failed(check="values", message="wrong")
    assert "means" in render("t", "a case", [nan])
    assert "means" not in render("t", "a case", [nan, values])


def test_a_class_of_failure_is_a_type() -> None:
    window = mismatch_type("values", "window")
    assert window is mismatch_type("lse", "window")
    assert window is not mismatch_type("values", "causal")
    assert mismatch_type("values", "unexplained") is mismatch_type("values")
    assert mismatch_type("int32_wrap").__name__ == "Int32WrapMismatch"
    assert issubclass(window, AssertionError)
