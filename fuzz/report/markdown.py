"""A campaign on the emulator as a Markdown table: targets, cases, verdicts, seconds, coverage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fuzz.campaign.run import Campaign
from fuzz.engine.emulator import Coverage
from oracle.verdict import Verdict

_HEAD = ("target", "cases", "verdicts", "new", "seconds", "pairs", "boundaries", "lines", "branches", "masks")


def table(campaign: Campaign, reached: Mapping[str, Coverage]) -> Iterator[str]:
    """The lines of the table; ``reached``: what the kernels of each target's cases reached.

    ``seconds`` are those of the target's workers; ``new`` counts failing cases that the ledger does not explain.
    ``lines``, ``branches`` (outcomes of conditions and trip counts of loops, where they ran) and ``masks`` (all, some
    or none of the lanes of each load and store) are out of what the functions that ran could show.
    """
    yield _row(_HEAD)
    yield _row(["---"] * len(_HEAD))
    for name, summary in campaign.summaries.items():
        boundaries, declared = summary.coverage.boundary_classes()
        seen = reached.get(name, Coverage())
        yield _row(
            [
                name,
                str(summary.cases),
                ", ".join(f"{verdict} {n}" for verdict in Verdict if (n := summary.verdicts[verdict])),
                str(len({finding.case.to_json() for finding in summary.unknown})),
                f"{sum(summary.seconds.values()):.0f}",
                f"{len(summary.coverage.seen)}/{len(summary.coverage.wanted)}",
                f"{len(boundaries)}/{len(declared)}",
                *(_share(*counted) for counted in counts(seen)),
            ]
        )


def defects(campaign: Campaign) -> Iterator[str]:
    """One line for each known defect that showed: its id, and in how many cases."""
    found: dict[str, set[str]] = {}
    for summary in campaign.summaries.values():
        for finding in summary.findings:
            if finding.known is not None:
                found.setdefault(finding.known, set()).add(f"{finding.target} {finding.case.to_json()}")
    for name, cases in sorted(found.items()):
        yield f"- {name}: {len(cases)}"


def counts(coverage: Coverage) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
    """Seen and possible: statements, outcomes of conditions and loops, outcomes of masks."""
    lines = branches = masks = (0, 0)
    for function in coverage.functions.values():
        missing = function.missing()
        lines = _plus(lines, len(function.reached), len(missing["lines"]))
        for seen, kind in ((function.conditions, "conditions"), (function.loops, "loops")):
            branches = _plus(branches, sum(map(len, seen.values())), sum(map(len, missing[kind].values())))
        masks = _plus(masks, sum(map(len, function.accesses.values())), sum(map(len, missing["masks"].values())))
    return lines, branches, masks


def _plus(total: tuple[int, int], seen: int, missing: int) -> tuple[int, int]:
    return total[0] + seen, total[1] + seen + missing


def _share(seen: int, possible: int) -> str:
    return f"{seen}/{possible}" if possible else ""


def _row(cells: list[str] | tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"
