"""A pool without processes: what it replies is a function of the case alone, as a target's result should be."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b
from typing import Any

from fuzz.campaign.reply import Raised, Reply, Status
from fuzz.case import case_from_dict
from fuzz.check.result import CaseResult, Check, CheckResult
from oracle.verdict import Verdict


def number(request: dict[str, Any], what: str) -> int:
    """A number of the case, the same each time."""
    text = f"{what} {request['target']} {case_from_dict(request['case']).to_json()}"
    return int.from_bytes(blake2b(text.encode(), digest_size=4).digest())


def reply_to(request: dict[str, Any]) -> Reply:
    """Passes, failures of two checks, unsupported ones, failures of our own code, margins and coverage."""
    kind = number(request, "kind") % 16
    if kind == 0:
        raised = Raised("ValueError", "planted", "Traceback: planted")
        return Reply(status=Status.EXCEPTION, phase="generate", seconds={"generate": 0.5}, raised=raised, harness=True)
    checks: tuple[CheckResult, ...] = ()
    if kind > 1:
        failed = {2: (Check.VALUES,), 3: (Check.NAN,), 4: (Check.VALUES, Check.NAN)}.get(kind, ())
        checks = tuple(
            CheckResult(check, Verdict.FAIL if check in failed else Verdict.PASS, "planted" if check in failed else "")
            for check in (Check.VALUES, Check.NAN)
        )
    lines = [1, 2, 3 + number(request, "line") % 50]
    function = {"lines": [*range(60)], "reached": lines, "conditions": {"2": ["true"]}, "loops": {}, "accesses": {}}
    result = CaseResult(
        checks=checks,
        elements=number(request, "elements") % 100,
        worst_ratio=number(request, "ratio") % 100 / 100 if checks else None,
        reason="" if checks else "planted",
        coverage={"kernels.py:f": function} if request["coverage"] else None,
    )
    seconds = {"kernel": 0.001 * (number(request, "seconds") % 7)}
    return Reply(status=Status.OK, phase="checks", seconds=seconds, value=result.to_dict())


class StandIn:
    """As many requests are taken ahead of the replies as with ``jobs`` workers."""

    def __init__(self, jobs: int = 1) -> None:
        self.jobs = jobs

    def __enter__(self) -> StandIn:
        return self

    def __exit__(self, *error: object) -> None: ...

    def map(self, requests: Iterable[dict[str, Any] | None], timeout_s: float) -> Iterator[tuple[int, Reply]]:
        waiting: deque[dict[str, Any]] = deque()
        source, index = iter(requests), 0
        while True:
            exhausted = False
            while len(waiting) < 2 * self.jobs:
                try:
                    request = next(source)
                except StopIteration:
                    exhausted = True
                    break
                if request is None:
                    break
                waiting.append(request)
            if not waiting:
                assert exhausted
                return
            yield index, reply_to(waiting.popleft())
            index += 1


def judge(request: dict[str, Any], progress: Callable[[str], None]) -> dict[str, Any]:
    """The same as a job of real workers."""
    progress("generate")
    reply = reply_to(request)
    if reply.value is None:
        raise ValueError("planted")
    progress("kernel")
    return reply.value
