"""The adversarial search: it repeats itself, goes on where it ended, and finds what is there to be found."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from fuzz.errors import Exit, Stop
from fuzz.plan import CounterChooser
from oracle.precision import Precision
from suites.tolerance import variants
from suites.tolerance.__main__ import app
from suites.tolerance.adversarial import GENES, Candidate, Search, begin, change, problem_of, replay, score, summary
from suites.tolerance.believed_right import VARIANTS


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contexts that take milliseconds."""
    torch.set_num_threads(1)
    monkeypatch.setitem(GENES, "keys", (16, 64))


def searched(steps: int, **options: bool) -> Search:
    search = Search.new("cpu", 2, options.get("conspire", False))
    for _ in range(steps):
        search.step()
    return search


def test_the_same_seed_finds_the_same() -> None:
    assert searched(30).to_dict() == searched(30).to_dict()


def test_a_search_goes_on_where_it_ended() -> None:
    whole, half = searched(60), searched(30)
    half = Search.from_dict(json.loads(json.dumps(half.to_dict())))
    for _ in range(30):
        half.step()
    assert json.dumps(half.to_dict()) == json.dumps(whole.to_dict())


def test_searches_add_up() -> None:
    one, other = searched(40), Search.new("cpu", 5, False)
    for _ in range(30):
        other.step()
    both = Search.from_dict(json.loads(json.dumps(Search.sum_of([one, other]).to_dict())))
    assert (both.evaluations, both.joined, both.seed) == (70, 2, one.seed)
    for name, entry in both.best.items():
        assert entry["ratio"] == max(s.best[name]["ratio"] for s in (one, other) if name in s.best)
    assert set(both.best) == set(one.best) | set(other.best)


@pytest.mark.slow
def test_several_processes_search_and_go_on(tmp_path: Path) -> None:
    out = tmp_path / "a.json"
    options = ["adversarial", "--jobs", "2", "--seed", "4", "--out", str(out), "--time"]
    assert CliRunner().invoke(app, [*options, "40s"]).exit_code == Exit.CLEAN
    first = Search.from_dict(json.loads(out.read_text()))
    assert first.joined == 2
    assert first.evaluations > 0
    assert CliRunner().invoke(app, [*options, "30s"]).exit_code == Exit.CLEAN
    assert json.loads(out.read_text())["evaluations"] >= first.evaluations
    alone = CliRunner().invoke(app, ["adversarial", "--seed", "4", "--out", str(out), "--time", "1s"])
    assert alone.exit_code == Exit.USAGE
    assert "sum of several" in alone.output


def test_climbs_never_descend() -> None:
    search, seen = Search.new("cpu", 3, False), {}
    for _ in range(5 * len(VARIANTS)):
        search.step()
        for name, entry in search.best.items():
            assert entry["ratio"] >= seen.get(name, 0.0)
            seen[name] = entry["ratio"]
    assert set(seen) == {v.name for v in VARIANTS}
    assert max(seen.values()) > 0.1
    assert summary(search)["worst"]["ratio"] == max(seen.values())


def test_what_is_kept_replays() -> None:
    search = searched(len(VARIANTS))
    entries = json.loads(json.dumps(list(search.best.values())))
    for entry, again in zip(entries, replay(entries, "cpu"), strict=True):
        assert again.ratio == entry["ratio"]
    with pytest.raises(Stop, match="candidate"):
        Candidate.from_dict({"variant": "no such"})


def test_every_gene_matters() -> None:
    for name, options in GENES.items():
        different = 0
        for seed in range(40):
            candidate = begin(VARIANTS[1], CounterChooser(seed, 0), False)
            genes = candidate.genes | {"follow": 1.0, "values": "waves", "levels": 3, "spread": 0.25}
            problems = [
                problem_of(replace(candidate, genes=genes | {name: option}), "cpu")
                for option in (options[0], options[-1])
            ]
            different += any(
                x.shape != y.shape or not torch.equal(x, y)
                for x, y in ((getattr(problems[0], t), getattr(problems[1], t)) for t in "qkv")
            )
            different += problems[0].soft_cap != problems[1].soft_cap or problems[0].sinks is not problems[1].sinks
        assert different, name


def test_edits_change_single_elements() -> None:
    candidate = begin(VARIANTS[1], CounterChooser(1, 0), False)
    genes = candidate.genes | {"keys": 64, "values": "normal", "follow": 0.0, "offset": 1.0}
    before = problem_of(replace(candidate, genes=genes), "cpu")
    after = problem_of(replace(candidate, genes=genes, edits=(("v", 5, -1.0), ("k", 3, 2.0))), "cpu")
    assert int((before.v != after.v).sum()) == 1
    assert int((before.k != after.k).sum()) == 1


def test_neighbours_are_of_the_same_variant_and_differ() -> None:
    candidate = begin(VARIANTS[2], CounterChooser(1, 0), False)
    near = [change(candidate, CounterChooser(1, i)) for i in range(1, 30)]
    assert {c.variant for c in near} == {candidate.variant}
    assert sum(c != candidate for c in near) > 20


def test_a_precision_that_promises_too_much_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search can find something: kernels round their weights and say that they do not."""
    honest = variants.Choices.precision

    def boast(self: variants.Choices) -> Precision:
        return replace(honest(self), p_dtype=None)

    monkeypatch.setattr(variants.Choices, "precision", boast)
    search = searched(3 * len(VARIANTS))
    assert search.counted
    assert search.counterexamples[0]["ratio"] > 1
    assert summary(search)["beyond_probable"] == search.counted


def test_values_made_of_the_errors_of_casts_stay_within_the_worst_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(GENES, "keys", (1024,))
    scores = [score(begin(VARIANTS[1], CounterChooser(7, i), True), "cpu") for i in range(12)]
    assert max(s.worst_case for s in scores) <= 1
    assert max(s.out for s in scores) > 0.2


def test_the_command(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    result = CliRunner().invoke(app, ["adversarial", "--time", "1s", "--out", str(file)])
    assert result.exit_code in (Exit.CLEAN, Exit.FINDINGS), result.output
    assert Search.from_dict(json.loads(file.read_text())).evaluations
    for options, words in ((["--device", "tpu"], "--device"), (["--seed", "5", "--out", str(file)], "another device")):
        result = CliRunner().invoke(app, ["adversarial", "--time", "1s", *options])
        assert result.exit_code == Exit.USAGE, result.output
        assert words in result.output
