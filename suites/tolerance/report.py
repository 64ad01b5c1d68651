"""docs/results/tolerance.md from the results beside it, which may come from different days and machines."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fuzz.errors import Expected
from oracle.diagnose import Kind
from suites.tolerance import adversarial, soundness
from suites.tolerance.chart import Chart
from suites.tolerance.detection import DEFAULT, PROBABLE, SHIPPED, SUITE, WORST, Table
from suites.tolerance.faults import CONTROLS, COUNTED, FAULTS, OUTSIDE
from suites.tolerance.files import read
from suites.tolerance.peers import PEERS

SCHEMA = 1

COLUMNS: Mapping[str, Sequence[str]] = {
    "probable, out and lse": SHIPPED,
    "probable, out alone": (f"{PROBABLE} out",),
    "worst case": (f"{WORST} out", f"{WORST} lse"),
    "default precision": (f"{DEFAULT} out", f"{DEFAULT} lse"),
    **{rule.name: (rule.name,) for rule in PEERS},
}
"""The columns of the tables: a result is rejected if one of the rules fires."""


class ResultError(Expected, ValueError):
    """A file of results that cannot be read. One line: which, and why."""


@dataclass(frozen=True)
class Results:
    """What there is. made: for each part but soundness, when, where and with what it was made."""

    made: Mapping[str, Mapping[str, Any]]
    detection: Mapping[int, Table]
    diagnosis: Sequence[Mapping[str, Any]]
    soundness: Mapping[str, Any] | None
    searches: Sequence[Mapping[str, Any]]


def folder_of(report: Path) -> Path:
    """Where the parts of a report are kept."""
    return report.with_suffix("")


def save(report: Path, part: str, data: Mapping[str, Any], made: Mapping[str, Any]) -> Path:
    """Keep one part beside the report; one of the same name is replaced."""
    path = folder_of(report) / f"{part}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_compact({"schema": SCHEMA, "made": made, **data}), encoding="utf-8")
    return path


def _compact(data: Mapping[str, Any]) -> str:
    """JSON, the elements of lists of objects one a line: changes are seen, and files stay short."""
    lines = []
    for name, value in data.items():
        rows = isinstance(value, list) and value and isinstance(value[0], dict)
        text = "[\n" + ",\n".join(json.dumps(row) for row in value) + "\n]" if rows else json.dumps(value)
        lines.append(f"{json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def load(report: Path) -> Results:
    """Every part beside the report; files named soundness* are added up. Raises ResultError, or Stop.

    Campaigns and searches (adversarial*) have files of their own, from which they go on.
    """
    made: dict[str, Mapping[str, Any]] = {}
    tables: dict[int, Table] = {}
    diagnosis: list[Mapping[str, Any]] = []
    files = sorted(folder_of(report).glob("*.json"))
    campaigns, searches = ([p for p in files if p.stem.startswith(name)] for name in ("soundness", "adversarial"))
    for path in (p for p in files if p not in (*campaigns, *searches)):
        data = _read(path)
        made[path.stem] = data["made"]
        if path.stem.startswith("detection-"):
            table = Table.from_dict(data)
            tables[table.context] = table
        elif path.stem.startswith("diagnosis-"):
            diagnosis += data["named"]
    return Results(
        made,
        dict(sorted(tables.items())),
        diagnosis,
        soundness.summary(soundness.merge(campaigns)) if campaigns else None,
        [adversarial.summary(adversarial.Search.from_dict(read(path))) for path in searches],
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ResultError(f"{path}: cannot be read: {str(error)[:100]}") from None
    if not isinstance(data, dict) or data.get("schema") != SCHEMA or not isinstance(data.get("made"), dict):
        raise ResultError(f"{path}: not a part of a tolerance report of schema {SCHEMA}")
    return data


def write(report: Path) -> None:
    """Make the report and its plot of the parts beside it. Raises ResultError."""
    results = load(report)
    report.parent.mkdir(parents=True, exist_ok=True)
    report.write_text(text(results, folder_of(report).name), encoding="utf-8")
    if results.detection:
        (folder_of(report) / "detected.svg").write_text(plot(results), encoding="utf-8")


def text(results: Results, folder: str) -> str:
    """The page. folder: of the parts and the plot, as the page refers to it."""
    lines = [*_head(results), *_detection(results, folder), *_diagnosis(results)]
    lines += [*_soundness(results), *_searches(results)]
    return "\n".join(lines).rstrip() + "\n"


def _row(cells: Iterable[object]) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def _table(header: Sequence[object], rows: Iterable[Sequence[object]]) -> list[str]:
    return [_row(header), "|" + "---|" * len(header), *(_row(row) for row in rows), ""]


def _head(results: Results) -> list[str]:
    rows = [(part, *(made.get(name, "-") for name in MADE)) for part, made in results.made.items()]
    return [
        "# What the budgets are worth",
        "",
        "Emulated float32 kernels, honest and faulty, on fixed probes; every output is judged by our budgets and by",
        "the rules of other projects. `python -m suites.tolerance all` remakes everything; each part can be made",
        "alone, on another machine, and `python -m suites.tolerance report` writes this page of the parts beside it.",
        "",
        *_table(("part", *MADE), rows),
    ]


MADE = ("date", "device", "python", "torch", "seeds", "seconds")


def _detection(results: Results, folder: str) -> list[str]:
    if not results.detection:
        return []
    lines = [
        "## Faults detected",
        "",
        f"{len(COUNTED)} faults. One counts as detected if a rule rejects it in every seed in which it was executed.",
        "The kernel counts what a fault changes; a fault that changed nothing was not executed, and is left out.",
        "",
    ]
    rows = []
    for context, table in results.detection.items():
        for name, probes in (("normal", ("normal",)), (f"suite of {len(SUITE)}", SUITE)):
            if not set(probes) <= set(table.probes):
                continue
            executed = len(table.rates(probes, SHIPPED))
            rows.append((context, name, executed, *(table.caught(probes, rules) for rules in COLUMNS.values())))
    lines += _table(("keys", "probes", "executed", *COLUMNS), rows)
    lines += [f"![Faults detected]({folder}/detected.svg)", ""]
    for context, table in results.detection.items():
        lines += _left_over(context, table)
    lines += _alarms(results) + _margins(results)
    for context, table in results.detection.items():
        lines += _by_probe(context, table)
    return lines


def _left_over(context: int, table: Table) -> list[str]:
    rates = table.rates(table.probes, SHIPPED)
    alone = table.rates(table.probes, COLUMNS["probable, out alone"])
    idle = [f.name for f in COUNTED if f.name not in rates]
    missed = [f"{name} ({rate:.0%} of seeds)" for name, rate in rates.items() if rate < 1]
    blind = [name for name, rate in alone.items() if rate < 1]
    return [
        f"{context} keys: not executed: {', '.join(idle) or 'none'}. Missed: {', '.join(missed) or 'none'}. "
        f"Missed without the log-sum-exp: {', '.join(blind) or 'none'}.",
        "",
    ]


def _alarms(results: Results) -> list[str]:
    lines = [
        "### False alarms",
        "",
        "Of the kernel without a fault, and with its weights rounded twice, which is legal: the units in which a rule",
        "rejects it, of all units.",
        "",
    ]
    rows = []
    for context, table in results.detection.items():
        counts = (table.alarms(table.probes, rules) for rules in COLUMNS.values())
        rows.append((context, *(f"{alarms} of {units}" for alarms, units in counts)))
    return lines + _table(("keys", *COLUMNS), rows)


def _margins(results: Results) -> list[str]:
    lines = [
        "### Margins",
        "",
        "Largest error over budget of the kernel without a fault, any element, any seed: out / log-sum-exp.",
        "",
    ]
    probes = list(dict.fromkeys(probe for table in results.detection.values() for probe in table.probes))
    rows = []
    for context, table in results.detection.items():
        for budget in (PROBABLE, WORST, DEFAULT):
            pairs = [
                [table.largest_ratio(CONTROLS[0].name, (probe,), f"{budget} {of}") for of in ("out", "lse")]
                for probe in probes
            ]
            if any(math.isfinite(x) for pair in pairs for x in pair):
                rows.append((context, budget, *(" / ".join(f"{x:.2g}" for x in pair) for pair in pairs)))
    return lines + _table(("keys", "budget", *probes), rows)


def _by_probe(context: int, table: Table) -> list[str]:
    lines = [
        f"### By probe, {context} keys",
        "",
        f"Share of {len(table.seeds)} seeds in which the probable budget rejects, by out or log-sum-exp; blank: 0, -:",
        "not executed. Last columns: all probes together, by out and log-sum-exp, and by out alone.",
        "",
    ]
    rows = []
    for name, fault in FAULTS.items():
        if fault.kind is Kind.NONE:
            continue
        by_probe = [_percent(table.rate(name, (probe,), SHIPPED)) for probe in table.probes]
        suite = [_percent(table.rate(name, table.probes, COLUMNS[c])) for c in list(COLUMNS)[:2]]
        rows.append((name, *by_probe, *suite))
    header = ("fault", *(p.replace("_", " ") for p in table.probes), "all", "all, out alone")
    return lines + _table(header, rows)


def _percent(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.2g}" if rate else ""


def _diagnosis(results: Results) -> list[str]:
    if not results.diagnosis:
        return []
    lines = ["## Diagnosis", ""]
    for context in sorted({named["context"] for named in results.diagnosis}):
        named = [n for n in results.diagnosis if n["context"] == context]
        for faults, what in ((COUNTED, "counted faults named"), (OUTSIDE, "faults of other kinds left unexplained")):
            mine = [n for n in named if FAULTS[n["fault"]] in faults]
            right = sum(n["right"] for n in mine)
            lines.append(f"- {context} keys: {right} of {len(mine)} {what} rightly.")
    lines += [
        "",
        "Each fault once, on the first probe of the suite that detects it. The class that is named first counts.",
        "",
    ]
    wrong = [n for n in results.diagnosis if not n["right"]]
    rows = [(n["context"], n["fault"], n["probe"], n["expected"], n["named"], n["detail"]) for n in wrong]
    return lines + (
        ["Named otherwise:", "", *_table(("keys", "fault", "probe", "is", "named", "detail"), rows)] if rows else []
    )


def _soundness(results: Results) -> list[str]:
    if results.soundness is None:
        return []
    data = results.soundness
    whole, cells = data["all"], data["combinations"]
    facts = ("device", "seed", "shard", "cases", "seconds")
    runs = [(*(run[fact] for fact in facts), _versions(run["versions"])) for run in data["runs"]]
    lines = [
        "## Soundness",
        "",
        "Kernels that are believed right, from a list frozen before the run: every alarm is false.",
        "",
        f"- {whole['not_vacuous']:,} elements that are not vacuous, in {whole['cases']:,} cases;",
        f"- {sum(whole['alarms'].values())} elements beyond a bound;",
        f"- of {cells['tried']} combinations of precision, probe and context, {cells['filled']} with at least",
        f"  {soundness.GOAL:,} such elements, {cells['mostly_vacuous']} in which most are vacuous, and",
        f"  {cells['impossible']} not to be built;",
        f"- {data['error_count']} cases that raised.",
        "",
        *_table((*facts, "with"), runs),
    ]
    if data["findings"]:
        found = [(*f["combination"], f["device"], _shown(f["alarms"])) for f in data["findings"]]
        lines += _table(("precision", "probe", "context", "device", "alarms"), found)
    columns = ("cases", "not_vacuous", "vacuous_share", "suspect_share", "alarms", *RATIOS)
    for name in ("precision", "probe", "context"):
        rows = [(label, *(_shown(row[c]) for c in columns)) for label, row in data[name].items()]
        lines += _table((name, *(c.replace("_", " ") for c in columns)), rows)
    return lines


def _searches(results: Results) -> list[str]:
    if not results.searches:
        return []
    facts = ("device", "seed", "conspire", "candidates", "seconds", "beyond_probable")
    rows = []
    for search in results.searches:
        worst = search["worst"]["ratio"] if search["worst"] else math.nan
        rows.append((*(search[fact] for fact in facts), f"{worst:.3g}", _shown(search["worst_case_ratio"])))
    return [
        "## Adversarial search",
        "",
        "Correct kernels whose inputs are changed to come as near to the probable budget as they can, or beyond. With",
        "conspire, values follow the very errors of casting weights: no probable bound can hold then, the worst case",
        "must.",
        "",
        *_table((*(f.replace("_", " ") for f in facts), "worst error / probable", "worst error / worst case"), rows),
    ]


RATIOS = ("median_ratio", "median_of_worst", "worst", "lse_worst")


def _versions(found: Mapping[str, str | None]) -> str:
    return ", ".join(f"{name} {version}" for name, version in found.items() if version)


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {count}" for name, count in value.items() if count) or "0"
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def plot(results: Results) -> str:
    """The plot of the page: SVG."""
    groups = {
        f"{context} keys, {name}": [table.caught(probes, rules) for rules in COLUMNS.values()]
        for context, table in results.detection.items()
        for name, probes in (("normal", ("normal",)), ("suite", SUITE))
        if set(probes) <= set(table.probes)
    }
    return Chart(f"Faults detected in every seed, of {len(COUNTED)}", list(COLUMNS), groups, 44.0).svg()
