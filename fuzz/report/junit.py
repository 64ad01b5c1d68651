"""A run as JUnit XML: a suite a target, a failure for each new finding, a skipped test for each known one."""

from __future__ import annotations

import re
from xml.etree import ElementTree as ET

from fuzz.report.model import FindingView, Report, TargetView

_FORBIDDEN = re.compile("[^\\t\\n\\r\\x20-\\ud7ff\\ue000-\\ufffd\\U00010000-\\U0010ffff]")
"""Characters that XML has no way to write."""


def render(report: Report) -> str:
    """The XML text."""
    root = ET.Element("testsuites", name="attn-oracle")
    targets = {target.name: target for target in report.run.targets} if report.run else {}
    for name in dict.fromkeys([*targets, *(finding.target for finding in report.findings)]):
        own = [finding for finding in report.findings if finding.target == name]
        root.append(_suite(name, targets.get(name), own))
    if report.run is not None and report.run.harness_errors:
        root.append(_harness(report.run.harness_errors))
    for counted in ("tests", "failures", "errors", "skipped"):
        root.set(counted, str(sum(int(suite.get(counted, "0")) for suite in root)))
    ET.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def _clean(text: str) -> str:
    return _FORBIDDEN.sub("\ufffd", text)


def _suite(name: str, target: TargetView | None, findings: list[FindingView]) -> ET.Element:
    tests = [_finding(finding) for finding in findings]
    if target is not None and target.cases:
        passed = target.verdicts.get("pass", 0)
        tests.insert(0, _case(name, f"{passed} of {target.cases} cases passed", target.seconds))
    elif target is not None:
        absent = _case(name, "not run")
        ET.SubElement(absent, "skipped", message=_clean("; ".join(target.skipped) or "no case"))
        tests.append(absent)
    suite = ET.Element("testsuite", name=_clean(name), time=f"{target.seconds if target else 0:.3f}")
    suite.extend(tests)
    return _counted(suite)


def _counted(suite: ET.Element) -> ET.Element:
    suite.set("tests", str(len(suite)))
    for kind, counted in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
        suite.set(counted, str(sum(test.find(kind) is not None for test in suite)))
    return suite


def _case(target: str, name: str, seconds: float = 0.0) -> ET.Element:
    return ET.Element("testcase", classname=_clean(target), name=_clean(name), time=f"{seconds:.3f}")


def _finding(finding: FindingView) -> ET.Element:
    test = _case(finding.target, f"{finding.check} {finding.id}")
    if finding.known is not None:
        ET.SubElement(test, "skipped", message=_clean(f"known defect {finding.known}: {finding.message}"))
        return test
    failure = ET.SubElement(
        test, "failure", type=_clean(finding.diagnosis or finding.check), message=_clean(finding.message)
    )
    told = [
        finding.message,
        finding.detail and f"diagnosis: {finding.detail}",
        finding.others and f"or: {'; '.join(finding.others)}",
        finding.path and f"file: {finding.path}",
    ]
    failure.text = _clean("\n".join(line for line in told if line))
    return test


def _harness(messages: tuple[str, ...]) -> ET.Element:
    suite = ET.Element("testsuite", name="harness", time="0.000")
    for index, message in enumerate(messages):
        test = _case("harness", f"failure {index}")
        ET.SubElement(test, "error", message=_clean(message))
        suite.append(test)
    return _counted(suite)
