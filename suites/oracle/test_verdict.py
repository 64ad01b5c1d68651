"""How verdicts add up, and that the light modules stay light."""

import itertools
import subprocess
import sys

import pytest

from oracle.verdict import Verdict, worst


def test_findings() -> None:
    findings = {verdict for verdict in Verdict if verdict.is_finding}
    assert findings == {Verdict.SUSPECT, Verdict.FAIL, Verdict.CRASH, Verdict.HANG}


def test_worst_is_the_later_of_the_documented_order() -> None:
    order = ["pass", "unsupported", "vacuous", "suspect", "fail", "crash", "hang"]
    assert [verdict.value for verdict in Verdict] == order
    for (i, a), (j, b) in itertools.product(enumerate(Verdict), repeat=2):
        assert worst([a, b]) is (a if i >= j else b)


def test_any_finding_outweighs_all_that_is_none() -> None:
    for finding, other in itertools.product(Verdict, repeat=2):
        if finding.is_finding and not other.is_finding:
            assert worst([other, finding, other]) is finding


def test_nothing_checked_is_not_a_pass() -> None:
    with pytest.raises(ValueError, match="nothing was checked"):
        worst([])


def test_kinds_and_verdicts_need_no_torch() -> None:
    code = "import sys, oracle.kinds, oracle.verdict; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
