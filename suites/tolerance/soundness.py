"""The soundness campaign: kernels that are believed right, judged until every combination has its elements.

    python -m suites.tolerance soundness --time 10m --device cpu --seed 1 --jobs 2 --out FILE

Each case is a function of (seed, combination, its number there), so that what is found replays. The next case is
always one of the combination with the fewest elements; of several, of the cheapest. Results add up: a run whose FILE
exists goes on from it. Several processes keep their results in the folder FILE.parts, whose sum FILE is; a process that
dies is started again, and the case that it died of is an error.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from fuzz import engine as engines
from fuzz.errors import Exit, Expected, Stop
from fuzz.options import duration
from fuzz.versions import versions
from oracle.kinds import Engine
from suites.tolerance.believed_right import CONTEXTS, digest
from suites.tolerance.files import read, write
from suites.tolerance.tallies import Combination, Tally, row, total
from suites.tolerance.trials import Impossible, combinations, evaluate, kernels, key_of, possible_case
from suites.tolerance.workers import marker_of, parts_of, work

SCHEMA = 1
GOAL = 10_000
"""Elements that are not vacuous, for each combination."""
LONGEST = CONTEXTS["32k-128k"][1]
_KEPT = 100
"""Findings and errors that a result keeps in full; all of them are counted."""
_EVERY_S = 5.0
DEVICES = {"cpu": Engine.EMULATOR, "cuda": Engine.CUDA}


@dataclass(eq=False)
class Results:
    """What one or several runs counted. runs: seed, device, shard, seconds by context and versions of each; findings:
    cases with an element beyond a bound; errors: cases whose kernel raised; impossible: combinations that no case
    shows, and why."""

    runs: list[dict[str, Any]] = field(default_factory=list)
    tallies: dict[Combination, Tally] = field(default_factory=dict)
    findings: list[dict[str, Any]] = field(default_factory=list)
    errors: list[dict[str, Any]] = field(default_factory=list)
    error_count: int = 0
    impossible: dict[Combination, str] = field(default_factory=dict)
    skipped: dict[str, dict[str, str]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, combinations in order."""
        return {
            "schema": SCHEMA,
            "list": digest(),
            "runs": self.runs,
            "combinations": [[*key, tally.to_dict()] for key, tally in sorted(self.tallies.items())],
            "findings": self.findings,
            "errors": self.errors,
            "error_count": self.error_count,
            "impossible": [[*key, reason] for key, reason in sorted(self.impossible.items())],
            "skipped": self.skipped,
        }

    @staticmethod
    def from_dict(plain: Any) -> Results:
        """The inverse of `to_dict`. Raises `Stop` for results of another schema or of another list of kernels."""
        if not isinstance(plain, dict) or plain.get("schema") != SCHEMA:
            raise Stop(Exit.USAGE, f"schema: allowed is {SCHEMA}, results of a soundness campaign")
        if plain.get("list") != digest():
            raise Stop(Exit.USAGE, "list: these results are of another list of kernels that are believed right")
        try:
            return Results(
                runs=list(plain["runs"]),
                tallies={Combination(*key): Tally.from_dict(tally) for *key, tally in plain["combinations"]},
                findings=list(plain["findings"]),
                errors=list(plain["errors"]),
                error_count=int(plain["error_count"]),
                impossible={Combination(*key[:3]): str(*key[3:]) for key in plain["impossible"]},
                skipped=dict(plain["skipped"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise Stop(Exit.USAGE, f"results: a field is missing or malformed: {error!r}") from None

    def add(self, other: Results) -> None:
        """Count `other` too. Raises `Stop` if both hold the same run."""
        mine = {_identity(run) for run in self.runs}
        for run in other.runs:
            if _identity(run) in mine:
                raise Stop(Exit.USAGE, f"runs: {_identity(run)} would be counted twice")
        self.runs += other.runs
        for key, tally in other.tallies.items():
            self.tallies.setdefault(key, Tally()).add(tally)
        self.findings = (self.findings + other.findings)[:_KEPT]
        self.errors = (self.errors + other.errors)[:_KEPT]
        self.error_count += other.error_count
        self.impossible |= other.impossible
        for device, reasons in other.skipped.items():
            self.skipped.setdefault(device, {}).update(reasons)


def _identity(run: dict[str, Any]) -> tuple[Any, ...]:
    return run.get("seed"), run.get("device"), run.get("shard")


def load(path: Path) -> Results:
    """Results of a file. Raises `Stop` naming it."""
    try:
        return Results.from_dict(read(path))
    except Stop as error:
        raise Stop(error.code, f"{path}: {str(error).removeprefix(f'{path}: ')}") from None


# -------------------------------------------------------------------- search


class Campaign:
    """One process' share: combination number i belongs to shard i modulo `shards`."""

    def __init__(self, device: str, seed: int, longest: int, shard: int = 0, shards: int = 1) -> None:
        self.device, self.seed = device, seed
        self.kernels, skipped = kernels(DEVICES[device])
        mine = sorted(combinations(self.kernels, longest), key=lambda c: key_of(seed, *c))
        self.order = sorted(mine[shard::shards], key=self._rank)
        self.known: Mapping[Combination, Tally] = {}
        self.results = Results(skipped={device: skipped})
        self.run = {
            "seed": seed,
            "device": device,
            "shard": f"{shard}/{shards}",
            "cases": 0,
            "seconds": 0.0,
            "by_context": {},
            "versions": versions(),
        }
        self.results.runs.append(self.run)

    def _rank(self, combination: Combination) -> tuple[bool, int]:
        """What is cheap, and what only this device can try, comes first."""
        variant = self.kernels[combination.precision].variant is not None
        return variant and self.device != "cpu", list(CONTEXTS).index(combination.context)

    def resume(self, earlier: Results) -> None:
        """Go on from the results of the same seed, device and shard."""
        runs = [run for run in earlier.runs if _identity(run) == _identity(self.run)]
        if len(runs) != 1 or len(earlier.runs) != 1:
            raise Stop(Exit.USAGE, f"--out: holds other runs than {_identity(self.run)}; name another file")
        earlier.skipped = self.results.skipped
        self.results = earlier
        self.run = runs[0]

    def search(self, deadline: float, out: Path | None = None) -> Results:
        """Cases until the clock (`time.monotonic`) reaches the deadline, or the next one would pass it; the file is
        kept up to date."""
        start, before, told = time.monotonic(), self.run["seconds"], time.monotonic()
        slowest: dict[str, float] = {}
        while (now := time.monotonic()) < deadline and (combination := self.thinnest()) is not None:
            if now + slowest.get(combination.context, 0.0) > deadline:
                break
            if out is not None:
                write(marker_of(out), {"combination": list(combination)})
            self.step(combination)
            took = time.monotonic() - now
            slowest[combination.context] = max(took, slowest.get(combination.context, 0.0))
            cases, seconds = self.run["by_context"].get(combination.context, (0, 0.0))
            self.run["by_context"][combination.context] = [cases + 1, round(seconds + took, 3)]
            self.run["seconds"] = round(before + now + took - start, 1)
            if now - told > _EVERY_S:
                told = now
                print(self.line(), file=sys.stderr, flush=True)
                if out is not None:
                    write(out, self.results.to_dict())
        if out is not None:
            write(out, self.results.to_dict())
            marker_of(out).unlink(missing_ok=True)
        return self.results

    def survived(self, part: Path) -> None:
        """Count the case that an earlier process did not survive, if there is one, as an error."""
        if not marker_of(part).exists():
            return
        combination = Combination(*read(marker_of(part))["combination"])
        where = {"combination": list(combination), "device": self.device, "case": None}
        self._failed(where, "the process ended in it", self.results.tallies.setdefault(combination, Tally()))
        self.run["cases"] += 1
        write(part, self.results.to_dict())
        marker_of(part).unlink()

    def thinnest(self) -> Combination | None:
        """The combination with the fewest elements, the first of those in the seed's order."""
        possible = [c for c in self.order if c not in self.results.impossible]
        return min(possible, key=self.fullness, default=None)

    def fullness(self, combination: Combination) -> float:
        """Elements that are not vacuous. Where nearly all are, the bound is useless, and half of them count: no
        run would fill such a combination. A case that raised counts as a full one. What is known from elsewhere counts
        too."""
        found = (tallies.get(combination) for tallies in (self.results.tallies, self.known))
        return sum(max(t.evidence, t.elements / 2) + t.errors * GOAL for t in found if t is not None)

    def step(self, combination: Combination) -> None:
        """One more case of the combination."""
        tally = self.results.tallies.get(combination, Tally())
        kernel = self.kernels[combination.precision]
        try:
            case = possible_case(kernel, combination, key_of(self.seed, *combination, tally.cases), self.device)
        except Impossible as reason:
            self.results.impossible[combination] = str(reason)
            return
        where = {"combination": list(combination), "device": self.device, "case": case.to_dict()}
        self.results.tallies[combination] = tally
        self.run["cases"] += 1
        try:
            outcome = kernel.run(case, self.device)
            found = evaluate(outcome)
        except Expected as error:
            self._failed(where, str(error), tally)
            return
        except Exception as error:  # noqa: BLE001 - kernels raise what they like
            self._failed(where, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}", tally)
            return
        tally.add(found)
        if found.alarms and len(self.results.findings) < _KEPT:
            self.results.findings.append({**where, **found.to_dict(), "choices": outcome.choices})

    def _failed(self, where: dict[str, Any], message: str, tally: Tally) -> None:
        self.results.error_count += 1
        tally.add(Tally(cases=1, errors=1))
        if len(self.results.errors) < _KEPT:
            self.results.errors.append({**where, "message": message})

    def line(self) -> str:
        """Where the campaign stands, in one line."""
        whole = total(self.results.tallies.values())
        filled = sum(t.evidence >= GOAL for t in self.results.tallies.values())
        return (
            f"{self.run['cases']} cases, {whole.evidence:.3g} elements, {filled} of {len(self.order)} combinations "
            f"filled, {whole.false_alarms} false alarms, {self.results.error_count} errors"
        )


def run(
    device: str,
    seed: int,
    seconds: float,
    *,
    jobs: int = 1,
    shard: tuple[int, int] = (0, 1),
    longest: int = LONGEST,
    out: Path | None = None,
    known: Sequence[Path] = (),
    deadline: float | None = None,
) -> Results:
    """A campaign in this process, or in `jobs` of them; `shard` (i, n) takes one part of n of the combinations.

    longest: context classes that begin beyond are left out. known: results of other runs, whose elements count when the
    thinnest combination is chosen, and not in the results. deadline: `time.monotonic` at the end, for processes that
    others started.

    Raises `Stop` or `EngineError` if the device cannot be used or `out` holds something else.
    """
    deadline = time.monotonic() + seconds if deadline is None else deadline
    if jobs > 1:
        return _in_processes(device, seed, deadline, jobs, shard, longest, out, known)
    torch.set_num_threads(1)
    engines.start(DEVICES[device])
    campaign = Campaign(device, seed, longest, *shard)
    campaign.known = merge(known).tallies
    if out is not None and out.exists():
        campaign.resume(load(out))
    if out is not None:
        campaign.survived(out)
    return campaign.search(deadline, out)


def _in_processes(
    device: str,
    seed: int,
    deadline: float,
    jobs: int,
    shard: tuple[int, int],
    longest: int,
    out: Path | None,
    known: Sequence[Path],
) -> Results:
    """Shards of the shard in processes of their own, whose results are added up."""
    (own, shards), step = shard, shard[1] * jobs
    with tempfile.TemporaryDirectory() as scratch:
        file = out or Path(scratch) / "soundness.json"
        folder = parts_of(file)
        if file.exists() and not folder.exists():
            write(folder / "before.json", read(file))
        parts = [folder / f"{device}-{seed}-{own + shards * i}of{step}.json" for i in range(jobs)]
        others = merge(part for part in sorted(folder.glob("*.json")) if part not in parts)
        if any((run["seed"], run["device"]) == (seed, device) for run in others.runs):
            raise Stop(Exit.USAGE, f"--seed: {file} has other shards of seed {seed}, which would try the same cases")
        command = ["-m", "suites.tolerance.soundness", "--device", device, "--seed", str(seed)]
        known = [*known, *(path for path in [folder / "before.json"] if path.exists())]
        command += ["--until", repr(deadline), "--longest", str(longest), *(f"--known={path}" for path in known)]

        def collect() -> Results:
            results = merge(sorted(folder.glob("*.json")))
            write(file, results.to_dict())
            print(_line(results), file=sys.stderr, flush=True)
            return results

        starts = work(
            [[*command, "--shard", f"{own + shards * i}/{step}", "--out", str(part)] for i, part in enumerate(parts)],
            deadline,
            collect,
        )
        if missing := [part.name for part in parts if not part.exists()]:
            raise Stop(Exit.HARNESS, f"--jobs: no results of {', '.join(missing)}, begun {starts} times")
        return collect()


def _line(results: Results) -> str:
    """Where all processes together stand, in one line."""
    whole = total(results.tallies.values())
    filled = sum(t.evidence >= GOAL for t in results.tallies.values())
    return (
        f"{whole.cases} cases, {whole.evidence:.4g} elements, {len(results.tallies)} combinations, {filled} of them "
        f"filled, {whole.false_alarms} false alarms, {results.error_count} errors"
    )


# ------------------------------------------------------------------- summary


def summary(results: Results) -> dict[str, Any]:
    """The tables of a report: everything, and by precision, probe and context class; what is thin or missing."""
    tallies = results.tallies
    thin = {key: tally.evidence for key, tally in tallies.items() if tally.evidence < GOAL}
    return {
        "schema": SCHEMA,
        "list": digest(),
        "runs": results.runs,
        "all": row(total(tallies.values())),
        "combinations": {
            "tried": len(tallies),
            "filled": len(tallies) - len(thin),
            "impossible": len(results.impossible),
            "why_impossible": dict(Counter(results.impossible.values()).most_common(12)),
            "mostly_vacuous": sum(2 * t.vacuous > t.elements for t in tallies.values()),
        },
        **{name: _by(tallies, name) for name in Combination._fields},
        "seconds_by_context": _seconds(results),
        "thinnest": [[*key, count] for key, count in sorted(thin.items(), key=lambda item: item[1])[:20]],
        "findings": results.findings,
        "errors": results.errors[:10],
        "error_count": results.error_count,
        "skipped": results.skipped,
    }


def _seconds(results: Results) -> dict[str, dict[str, float]]:
    """Of each context class the cases, the seconds that they took, and those that the first case of each combination
    that is not filled would take."""
    spent: dict[str, list[float]] = {}
    for run_ in results.runs:
        for context, (cases, seconds) in run_.get("by_context", {}).items():
            had = spent.setdefault(context, [0, 0.0])
            spent[context] = [had[0] + cases, had[1] + seconds]
    thin = Counter(key.context for key, tally in results.tallies.items() if tally.evidence < GOAL)
    return {
        context: {
            "cases": cases,
            "seconds": round(seconds, 1),
            "thin": thin[context],
            "seconds_to_fill": round(thin[context] * seconds / max(1, cases), 1),
        }
        for context, (cases, seconds) in sorted(spent.items(), key=lambda item: list(CONTEXTS).index(item[0]))
    }


def _by(tallies: dict[Combination, Tally], name: str) -> dict[str, dict[str, Any]]:
    labels = dict.fromkeys(getattr(key, name) for key in tallies)
    return {
        label: row(total(tally for key, tally in tallies.items() if getattr(key, name) == label))
        for label in sorted(labels)
    }


# ------------------------------------------------------------------- command


def merge(files: Iterable[Path]) -> Results:
    """The sum of several files. Raises `Stop`."""
    results = Results()
    for path in files:
        results.add(load(path))
    return results


def soundness(
    time_: Annotated[str, typer.Option("--time", help="How long, such as 90s or 10m.")] = "10m",
    device: Annotated[str, typer.Option(help="cpu (kernels of others in the emulator) or cuda.")] = "cpu",
    seed: Annotated[int, typer.Option(min=0, max=(1 << 62) - 1)] = 1,
    jobs: Annotated[int, typer.Option(min=1, max=256, help="Processes.")] = 1,
    shard: Annotated[str, typer.Option(help="I/N: only this part of the combinations.")] = "0/1",
    longest: Annotated[int, typer.Option(min=0, help="Leave out classes of longer contexts.")] = LONGEST,
    out: Annotated[Path | None, typer.Option(help="Results; a run goes on from a file that exists.")] = None,
    known: Annotated[
        list[Path] | None, typer.Option(help="Results of other runs: what they filled comes last.")
    ] = None,
    until: Annotated[float | None, typer.Option(hidden=True)] = None,
    add: Annotated[list[Path] | None, typer.Option(help="Run nothing: add up these files into --out.")] = None,
) -> None:
    """Judge kernels that are believed right: every alarm is false. Prints a summary as JSON."""
    try:
        if device not in DEVICES:
            raise Stop(Exit.USAGE, f"--device: {device!r}; allowed: {', '.join(DEVICES)}")
        if add:
            results = merge(add)
            if out is not None:
                write(out, results.to_dict())
        else:
            results = run(
                device,
                seed,
                duration("--time", time_),
                jobs=jobs,
                shard=_shard(shard),
                longest=longest,
                out=out,
                known=known or (),
                deadline=until,
            )
    except Expected as error:
        print(error, file=sys.stderr)
        raise typer.Exit(error.exit_code if not isinstance(error, Stop) else error.code) from None
    print(json.dumps(summary(results), indent=1))
    raise typer.Exit(exit_code(results))


def exit_code(results: Results) -> Exit:
    """What the command ends with: harness errors before findings."""
    if results.error_count:
        return Exit.HARNESS
    return Exit.FINDINGS if any(tally.alarms for tally in results.tallies.values()) else Exit.CLEAN


def _shard(text: str) -> tuple[int, int]:
    parts = text.split("/")
    if len(parts) != 2 or not all(p.isdecimal() for p in parts) or not int(parts[0]) < int(parts[1]):
        raise Stop(Exit.USAGE, f"--shard: {text!r}; allowed: I/N with 0 <= I < N")
    return int(parts[0]), int(parts[1])


if __name__ == "__main__":
    typer.run(soundness)
