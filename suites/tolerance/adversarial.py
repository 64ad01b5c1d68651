"""A search for inputs and correct kernels whose error comes as near to the probable bound as it can, or beyond.

    python -m suites.tolerance adversarial --time 8m --device cpu --seed 1 --jobs 8 --out FILE

The bounds are the shipped ones: `budgets()` with its default confidence. A candidate is a short description of
inputs and of one kernel of `believed_right.VARIANTS`: values that follow the logits, few distinct logits, maxima
that rise from tile to tile, single elements changed. The search climbs: of each variant it keeps the best candidate
and tries changes of it, and begins anew when nothing helps. Candidate i is a function of (seed, i, what was best
before), so that a search that goes on from its FILE takes the same way as one that never stopped.

What is left out by default, and tried with --conspire: values whose signs are those of the very errors that casting
the weights makes. No probable bound can hold then; the worst case must.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from fuzz.errors import Exit, Expected, Stop
from fuzz.options import duration
from fuzz.plan import CounterChooser
from oracle import philox
from oracle.attention import solve
from oracle.budget import budgets
from oracle.problem import Problem
from oracle.rounding import round_to, widen
from suites.tolerance import variants
from suites.tolerance.believed_right import FREE, VARIANTS, Variant, digest
from suites.tolerance.files import read, write
from suites.tolerance.trials import key_of
from suites.tolerance.workers import parts_of, work

SCHEMA = 1
PATIENCE = 80
"""Candidates in a row that do not help, after which a climb ends."""
_CHANCE = 0.8
"""Probable bounds below this share of the worst case are a matter of chance."""
_KEPT = 20
_EVERY_S = 5.0
HEADS, DIM_V = 4, 8

GENES: dict[str, tuple[Any, ...]] = {
    "keys": (64, 256, 1024, 1024, 4096, 8192),
    "dim": (64, 16, 128),
    "size": tuple(x / 2 for x in range(-24, 11)),
    "levels": (0, 0, 0, 1, 2, 3, 5, 17),
    "arrangement": ("random", "ascending", "descending", "rising tiles", "last"),
    "values": ("normal", "logits", "steps", "waves", "one", "alternating", "first half"),
    "follow": (0.0, 0.5, 1.0, 1.0),
    "offset": (0.0, 0.0, 1.0, 5.0),
    "spread": tuple(2.0**-x for x in range(0, 9, 2)),
    "frequency": tuple(2.0**x for x in range(-2, 10)),
    "phase": tuple(x / 16 for x in range(16)),
    "sink": (None, None, -8.0, -1.0, 0.0, 1.0, 8.0),
    "soft_cap": (None, None, None, 2.0, 30.0),
}
"""Of a description: what each field may be.

size: power of two of the logits' standard deviation. levels: distinct keys, 0: all. arrangement: by the logits of the
first head; last: the largest at the end. values: what they are made of; waves: the sine of `frequency` times the logit,
plus `phase`. follow: how much of that, beside normal values. sink: above the log-sum-exp of head 0.
"""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Inputs and a kernel, as JSON. edits: (tensor, flat index, factor): single elements multiplied at the end."""

    variant: str
    seed: int
    genes: dict[str, Any]
    choices: dict[str, Any]
    edits: tuple[tuple[str, int, float], ...] = ()

    @staticmethod
    def from_dict(plain: Mapping[str, Any]) -> Candidate:
        """The inverse of `dataclasses.asdict`. Raises `Stop` naming what does not fit."""
        names = {f.name for f in fields(Candidate)}
        if set(plain) != names or plain["variant"] not in _VARIANTS or set(plain["genes"]) - {"cast"} != set(GENES):
            raise Stop(Exit.USAGE, "candidate: allowed are the fields of a candidate that a search wrote")
        edits = tuple((str(t), int(i), float(x)) for t, i, x in plain["edits"])
        return Candidate(**{**plain, "edits": edits})


@dataclass(frozen=True)
class Score:
    """Largest error over the probable bound, of out and of lse, and over the worst case (the larger of both).

    Where the probable bound is the worst case, or nearly, chance plays no part: these elements
    count for the latter alone.
    """

    out: float
    lse: float
    worst_case: float

    @property
    def ratio(self) -> float:
        """What the search climbs by."""
        return max(self.out, self.lse, self.worst_case if self.worst_case > 1 else 0.0)


_VARIANTS: Mapping[str, Variant] = {variant.name: variant for variant in VARIANTS}


# -------------------------------------------------------------------- inputs


def problem_of(candidate: Candidate, device: str) -> Problem:
    """The inputs that a candidate describes: one query of `HEADS` heads over one kv head's keys."""
    g, variant, seed = candidate.genes, _VARIANTS[candidate.variant], candidate.seed
    stored, own = variants.DTYPES[variant.kv_dtype or variant.dtype], variants.DTYPES[variant.dtype]
    n, dim = g["keys"], g["dim"]

    def normal(stream: int, *shape: int) -> Tensor:
        return philox.normal(seed, stream, shape, device).double()

    q, k = normal(0, HEADS, dim) * 2.0 ** g["size"], normal(1, n, dim)
    if g["levels"]:
        k = k[philox.uniform_int(seed, 2, (n,), 0, min(n, g["levels"]), device)]
    q, k = round_to(q, own), _stored(k, stored)
    scale = 1 / math.sqrt(dim)
    logits = widen(k) @ widen(q)[0] * scale
    order = _arrange(logits, g["arrangement"], seed, candidate.choices["tile"])
    k, logits = k[order], logits[order]
    if g["soft_cap"] is not None:
        logits = g["soft_cap"] * torch.tanh(logits / g["soft_cap"])
    mixed = g["follow"] * _values(logits, candidate).unsqueeze(1) + (1 - g["follow"]) * normal(3, n, DIM_V)
    v = _stored(g["offset"] + g["spread"] * mixed, stored)
    tensors = {"q": q, "k": k, "v": v}
    for name, index, factor in candidate.edits:
        flat = tensors[name].reshape(-1)
        changed = widen(flat[index % flat.numel()].reshape(1)) * factor
        flat[index % flat.numel()] = _stored(changed, flat.dtype)[0]
    sinks = None
    if g["sink"] is not None:
        sinks = (torch.logsumexp(logits, 0) + g["sink"]).float().expand(HEADS).contiguous()
    return Problem(
        q=tensors["q"].unsqueeze(0),
        k=tensors["k"].unsqueeze(1),
        v=tensors["v"].unsqueeze(1),
        q_lens=(1,),
        kv_lens=(n,),
        scale=scale,
        sinks=sinks,
        soft_cap=g["soft_cap"],
    )


def _stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    limit = torch.finfo(dtype).max
    return round_to(x.clamp(-limit, limit), dtype)


def _arrange(logits: Tensor, how: str, seed: int, tile: int) -> Tensor:
    """The order that keys are given in."""
    ascending = logits.argsort(stable=True)
    match how:
        case "ascending":
            return ascending
        case "descending":
            return ascending.flip(0)
        case "last":
            order = philox.permutation(seed, 4, len(logits), logits.device)
            top = logits[order].argmax()
            return torch.cat([order[:top], order[top + 1 :], order[top : top + 1]])
        case "rising tiles":
            # Each tile holds one of the largest logits, in ascending order, and otherwise any.
            tiles = -(-len(logits) // tile)
            heads, rest = ascending[-tiles:], ascending[:-tiles]
            rest = rest[philox.permutation(seed, 4, len(rest), logits.device)]
            return torch.cat([torch.cat([heads[i : i + 1], rest[i::tiles]]) for i in range(tiles)])
    return philox.permutation(seed, 4, len(logits), logits.device)


def _values(logits: Tensor, candidate: Candidate) -> Tensor:
    """What values follow, one for each key."""
    g, n = candidate.genes, len(logits)
    position = torch.arange(n, device=logits.device)
    if g.get("cast"):
        return _cast_errors(logits, candidate)
    match g["values"]:
        case "logits":
            return (logits - logits.mean()) / (logits.std(correction=0) + 1e-9)
        case "steps":
            return torch.sign(logits - logits.median())
        case "waves":
            return torch.sin(g["frequency"] * logits + 2 * math.pi * g["phase"])
        case "one":
            return torch.ones_like(logits)
        case "alternating":
            return (1 - 2 * (position % 2)).double()
        case "first half":
            return torch.where(position < n // 2, 1.0, -1.0).double()
    return philox.normal(candidate.seed, 5, (n,), logits.device).double()


def _cast_errors(logits: Tensor, candidate: Candidate) -> Tensor:
    """Signs of the errors of casting weights against the running maxima of the first head, tile by tile."""
    c = candidate.choices
    tile, n = c["tile"], len(logits)
    padded = torch.nn.functional.pad(logits, (0, -n % tile), value=-math.inf).view(-1, tile)
    if c["order"] == "descending":
        top = padded.flip(0).amax(1).cummax(0).values.flip(0)
    else:
        top = padded.amax(1).cummax(0).values
    weight = ((padded - top.unsqueeze(1)).exp() * c.get("p_scale", 1.0)).flatten()[:n].float()
    return torch.sign(variants.cast(weight, c.get("p_dtype")) - weight).double()


# ------------------------------------------------------------------- scoring


def score(candidate: Candidate, device: str) -> Score:
    """Run the kernel, and compare its errors before the output is rounded with both bounds."""
    problem = problem_of(candidate, device)
    choices = variants.Choices(**candidate.choices, seed=candidate.seed)
    found = variants.run(problem, choices)
    solution = solve(problem)
    own = _VARIANTS[candidate.variant].dtype
    both = budgets(problem, choices.precision(), input_dtype=own, solution=solution)
    error = (found.wide.double() - solution.out).abs()
    # The log-sum-exp is float32: what rounding it adds is no error.
    lse_error = (found.lse.double() - solution.lse).abs() - solution.lse.abs() * 2.0**-24
    likely, worst = both.probable, both.worst_case
    chance, lse_chance = likely.out < _CHANCE * worst.out, likely.lse < _CHANCE * worst.lse
    return Score(
        out=_ratio(error * chance, likely.out),
        lse=_ratio(lse_error * lse_chance, likely.lse),
        worst_case=max(_ratio(error, worst.out), _ratio(lse_error, worst.lse)),
    )


def _ratio(error: Tensor, bound: Tensor) -> float:
    """The largest; where nothing is promised, 0. An error that is not a number is beyond every finite bound."""
    ratio = torch.where(error <= 0, 0.0, error / bound)
    ratio = ratio.nan_to_num(nan=math.inf, posinf=math.inf).masked_fill(bound == math.inf, 0.0)
    return float(ratio.max())


# ------------------------------------------------------------------ changing


def _options(variant: Variant) -> dict[str, tuple[Any, ...]]:
    return {**FREE, **variant.options}


def begin(variant: Variant, chooser: CounterChooser, conspire: bool) -> Candidate:
    """A candidate at random."""
    genes = {name: chooser.choose(name, options) for name, options in GENES.items()}
    if conspire:
        genes["cast"] = True
    choices = {name: chooser.choose(name, options) for name, options in _options(variant).items()}
    seed = chooser.integer("seed", 0, (1 << 31) - 1)
    return _settled(Candidate(variant=variant.name, seed=seed, genes=genes, choices=choices))


def change(candidate: Candidate, chooser: CounterChooser) -> Candidate:
    """A neighbour: a gene, a choice of the kernel, the seed, or single elements changed."""
    variant = _VARIANTS[candidate.variant]
    genes, choices, seed, edits = dict(candidate.genes), dict(candidate.choices), candidate.seed, candidate.edits
    for _ in range(chooser.integer("changes", 1, 2)):
        match chooser.choose("what", ("gene", "gene", "near", "choice", "seed", "edit", "edit")):
            case "gene":
                name = chooser.choose("gene", tuple(GENES))
                genes[name] = chooser.choose("value", GENES[name])
            case "near":
                name = chooser.choose("gene", ("size", "spread", "frequency", "phase", "keys"))
                at = GENES[name].index(genes[name]) + chooser.choose("side", (-1, 1))
                genes[name] = GENES[name][max(0, min(at, len(GENES[name]) - 1))]
            case "choice":
                name = chooser.choose("choice", tuple(_options(variant)))
                choices[name] = chooser.choose("value", _options(variant)[name])
            case "seed":
                seed = chooser.integer("seed", 0, (1 << 31) - 1)
            case _ if len(edits) < 24:
                index = chooser.integer("index", 0, (1 << 20) - 1)
                factor = chooser.choose("factor", (0.0, -1.0, 0.5, 2.0, 0.9, 1.1, 4.0))
                edits = (*edits, (chooser.choose("tensor", ("q", "k", "v")), index, factor))
            case _:
                edits = edits[1:]
    return _settled(replace(candidate, genes=genes, choices=choices, seed=seed, edits=edits))


def _settled(candidate: Candidate) -> Candidate:
    """Without what contradicts itself, or takes too long."""
    choices = dict(candidate.choices)
    if choices.get("p_dtype") is None:
        choices |= {"p_truncated": False, "sum_rounded": False}
    tiles = [t for t in _options(_VARIANTS[candidate.variant])["tile"] if candidate.genes["keys"] / t <= 1024]
    if choices["tile"] not in tiles:
        choices["tile"] = min(tiles)
    return replace(candidate, choices=choices)


# ---------------------------------------------------------------- the search


@dataclass(eq=False)
class Search:
    """The state that a file holds. best: of each variant the best candidate ever and its score; climbs: where each
    variant's present climb is, and for how long nothing has helped."""

    device: str
    seed: int
    conspire: bool
    evaluations: int
    seconds: float
    best: dict[str, dict[str, Any]]
    climbs: dict[str, dict[str, Any]]
    counterexamples: list[dict[str, Any]]
    counted: int = 0
    """Candidates beyond the probable bound, of which the worst are kept."""
    joined: int = 1
    """Searches that this is the sum of: one goes on, a sum does not."""

    @staticmethod
    def new(device: str, seed: int, conspire: bool) -> Search:
        """A search that has tried nothing."""
        return Search(device, seed, conspire, 0, 0.0, {}, {}, [])

    @staticmethod
    def sum_of(searches: Sequence[Search]) -> Search:
        """What several searches of one device and kind found together; the seed of the first."""
        first = searches[0]
        found = Search(first.device, first.seed, first.conspire, 0, 0.0, {}, {}, [], joined=0)
        for one in searches:
            found.joined += one.joined
            found.evaluations += one.evaluations
            found.seconds = round(found.seconds + one.seconds, 1)
            found.counted += one.counted
            for name, entry in one.best.items():
                if entry["ratio"] > found.best.get(name, {"ratio": -1.0})["ratio"]:
                    found.best[name] = entry
            found.counterexamples += one.counterexamples
        found.counterexamples = sorted(found.counterexamples, key=lambda e: -e["ratio"])[:_KEPT]
        return found

    def step(self) -> None:
        """One candidate of the next variant in turn."""
        variant = VARIANTS[self.evaluations % len(VARIANTS)]
        chooser = CounterChooser(key_of("adversary", self.seed, self.conspire), self.evaluations)
        self.evaluations += 1
        climb = self.climbs.get(variant.name)
        if climb is None or climb["idle"] >= PATIENCE:
            climb = None
            candidate = begin(variant, chooser, self.conspire)
        else:
            candidate = change(Candidate.from_dict(climb["candidate"]), chooser)
        found = score(candidate, self.device)
        entry = {"ratio": found.ratio, "score": asdict(found), "candidate": asdict(candidate)}
        if climb is None or found.ratio >= climb["ratio"]:
            idle = climb["idle"] + 1 if climb is not None and found.ratio == climb["ratio"] else 0
            self.climbs[variant.name] = {**entry, "idle": idle}
        else:
            climb["idle"] += 1
        if found.ratio > self.best.get(variant.name, {"ratio": -1.0})["ratio"]:
            self.best[variant.name] = entry
        if found.ratio > 1:
            self.counted += 1
            self.counterexamples = sorted([*self.counterexamples, entry], key=lambda e: -e["ratio"])[:_KEPT]

    def run(self, deadline: float, out: Path | None) -> None:
        """Candidates until the clock (`time.monotonic`) reaches the deadline; the file is kept up to date."""
        start, before, told = time.monotonic(), self.seconds, time.monotonic()
        while (now := time.monotonic()) < deadline:
            self.step()
            self.seconds = round(before + now - start, 1)
            if now - told > _EVERY_S:
                told = now
                print(self.line(), file=sys.stderr, flush=True)
                if out is not None:
                    write(out, self.to_dict())
        if out is not None:
            write(out, self.to_dict())

    def line(self) -> str:
        """Where the search stands, in one line."""
        worst = max((entry["ratio"] for entry in self.best.values()), default=0.0)
        return f"{self.evaluations} candidates, {self.seconds} s, {self.counted} beyond, worst ratio {worst:.3g}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"schema": SCHEMA, "list": digest(), **asdict(self)}

    @staticmethod
    def from_dict(plain: Mapping[str, Any]) -> Search:
        """The inverse of `to_dict`. Raises `Stop`."""
        if plain.get("schema") != SCHEMA or plain.get("list") != digest():
            raise Stop(Exit.USAGE, "schema, list: this search is of another version or another list of kernels")
        names = {f.name for f in fields(Search)}
        plain = {"joined": 1, **plain}
        if set(plain) != names | {"schema", "list"}:
            raise Stop(Exit.USAGE, f"search: allowed are the fields {', '.join(sorted(names))}")
        return Search(**{name: plain[name] for name in names})


def summary(search: Search) -> dict[str, Any]:
    """The worst of each variant, without the climbs."""
    ratios = {name: round(entry["ratio"], 4) for name, entry in sorted(search.best.items())}
    worst = max(search.best.values(), key=lambda e: e["ratio"], default=None)
    return {
        "schema": SCHEMA,
        "list": digest(),
        "device": search.device,
        "seed": search.seed,
        "conspire": search.conspire,
        "searches": search.joined,
        "candidates": search.evaluations,
        "seconds": search.seconds,
        "beyond_probable": search.counted,
        "worst": worst,
        "by_precision": ratios,
        "worst_case_ratio": max((e["score"]["worst_case"] for e in search.best.values()), default=None),
        "counterexamples": search.counterexamples[:5],
    }


def replay(entries: Sequence[Mapping[str, Any]], device: str) -> list[Score]:
    """Scores of candidates that a search kept."""
    return [score(Candidate.from_dict(entry["candidate"]), device) for entry in entries]


def _load(path: Path) -> Search:
    try:
        return Search.from_dict(read(path))
    except Stop as error:
        raise Stop(error.code, f"{path}: {str(error).removeprefix(f'{path}: ')}") from None


def _in_processes(device: str, seed: int, conspire: bool, deadline: float, jobs: int, out: Path | None) -> Search:
    """Searches of seeds of their own, each of which goes on from its file in `out`.parts; `out` is their sum."""
    with tempfile.TemporaryDirectory() as scratch:
        file = out or Path(scratch) / "adversarial.json"
        kind = f"{device}-{'conspire' if conspire else 'chance'}"
        seeds = [key_of("adversary", seed, i) >> 2 for i in range(jobs)]
        parts = [parts_of(file) / f"{kind}-{seed}-{i}.json" for i in range(jobs)]
        if file.exists() and not parts_of(file).exists():
            raise Stop(Exit.USAGE, f"--out: {file} is there without its parts; name another file")

        def collect() -> Search:
            found = [_load(part) for part in sorted(parts_of(file).glob(f"{kind}-{seed}-*.json"))]
            search = Search.sum_of(found) if found else Search.new(device, seed, conspire)
            search.seed = seed
            write(file, search.to_dict())
            print(search.line(), file=sys.stderr, flush=True)
            return search

        command = ["-m", "suites.tolerance.adversarial", "--device", device, "--until", repr(deadline)]
        command += ["--conspire"] if conspire else []
        work(
            [[*command, "--seed", str(own), "--out", str(part)] for own, part in zip(seeds, parts, strict=True)],
            deadline,
            collect,
        )
        if missing := [part.name for part in parts if not part.exists()]:
            raise Stop(Exit.HARNESS, f"--jobs: no results of {', '.join(missing)}")
        return collect()


def adversarial(
    time_: Annotated[str, typer.Option("--time", help="How long, such as 90s or 60m.")] = "60m",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    seed: Annotated[int, typer.Option(min=0, max=(1 << 62) - 1)] = 1,
    conspire: Annotated[bool, typer.Option(help="Values made of the errors of casts: see the module.")] = False,
    jobs: Annotated[int, typer.Option(min=1, max=256, help="Processes, each with a search of its own.")] = 1,
    out: Annotated[Path | None, typer.Option(help="The search; one that exists goes on.")] = None,
    until: Annotated[float | None, typer.Option(hidden=True)] = None,
) -> None:
    """Search for a correct kernel beyond the probable bound. Prints a summary as JSON."""
    try:
        if device not in ("cpu", "cuda"):
            raise Stop(Exit.USAGE, f"--device: {device!r}; allowed: cpu, cuda")
        if device == "cuda" and not torch.cuda.is_available():
            raise Stop(Exit.NOTHING, "--device: cuda, but torch sees no GPU")
        seconds = duration("--time", time_)
        deadline = time.monotonic() + seconds if until is None else until
        if jobs > 1:
            search = _in_processes(device, seed, conspire, deadline, jobs, out)
        else:
            torch.set_num_threads(1)
            search = Search.new(device, seed, conspire) if out is None or not out.exists() else _load(out)
            if (search.device, search.seed, search.conspire, search.joined) != (device, seed, conspire, 1):
                raise Stop(Exit.USAGE, f"--out: {out} is a search of another device, seed or kind, or a sum of several")
            search.run(deadline, out)
    except Expected as error:
        print(error, file=sys.stderr)
        raise typer.Exit(error.code if isinstance(error, Stop) else error.exit_code) from None
    print(json.dumps(summary(search), indent=1))
    raise typer.Exit(Exit.FINDINGS if search.counted else Exit.CLEAN)


if __name__ == "__main__":
    typer.run(adversarial)
