"""Precisions cite what they were read from, and it is told where that is not what is here."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest

from fuzz import registry
from fuzz.report.targets import by_dtype, lines, to_dict
from fuzz.sources import Reading, folder, reading
from oracle import Convention, Precision, declare
from oracle.declare import Declaration, declaration_of
from oracle.kinds import Engine
from oracle.precision import EXACT_COPY, Citation

TARGETS = registry.load()
CITED = {
    f"{name}, {dtype}": precision
    for name, declaration in TARGETS.items()
    for dtype, precision in by_dtype(declaration).items()
    if name.startswith(("sglang.", "aiter.", "tokenspeed."))
    and precision is not EXACT_COPY
    # Under sglang's backend run kernels of ours; who assumes the loosest has read nothing.
    and not precision.source.startswith("suites/")
    and replace(precision, source="") != Precision(source="")
}


@pytest.mark.parametrize("name", CITED)
def test_production_precisions_cite_files_that_are_as_they_were_read(name: str) -> None:
    precision = CITED[name]
    assert precision.cited
    if (reason := registry.why_not(TARGETS[name.partition(", ")[0]], Engine.EMULATOR)) is not None:
        pytest.skip(reason)
    found = reading(precision)
    if found is Reading.ABSENT:
        pytest.skip(f"{precision.cited[0].file} is not here")
    assert found is Reading.SAME


@pytest.mark.parametrize("name", CITED)
def test_cited_lines_are_lines_of_their_file(name: str) -> None:
    for citation in CITED[name].cited:
        assert len(citation.sha256) == 64
        spans = [tuple(map(int, span.split("-"))) for span in citation.lines.split(", ")]
        assert all(first < last for first, last in spans)
        package = folder(citation.file.partition("/")[0])
        path = None if package is None else package.parent / citation.file
        if path is not None and path.is_file() and sha256(path.read_bytes()).hexdigest() == citation.sha256:
            assert max(last for _, last in spans) <= len(path.read_text(encoding="utf-8").splitlines())


@pytest.fixture
def cited(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Precision:
    """A precision that cites a file of 'aiter', which is here."""
    (tmp_path / "aiter").mkdir()
    (tmp_path / "aiter" / "kernel.py").write_text("x = 1\n")
    monkeypatch.setenv("ATTN_ORACLE_AITER", str(tmp_path))
    digest = sha256(b"x = 1\n").hexdigest()
    return Precision(source="here", p_dtype=None, cited=(Citation(file="aiter/kernel.py", lines="1-1", sha256=digest),))


def of(precision: Precision | None) -> Declaration:
    def gather(k_cache: object, v_cache: object, slots: object) -> None: ...

    declare.kv_gather(name="x", convention=Convention(source="here"), precision=precision)(gather)
    declaration = declaration_of(gather)
    assert declaration is not None
    return declaration


def test_a_changed_source_is_told(cited: Precision) -> None:
    reasons: dict[Engine, str | None] = {Engine.EMULATOR: None}
    assert reading(cited) is Reading.SAME
    assert list(lines(of(cited), reasons)) == ["x  kv_gather  emulator"]
    other = replace(cited, cited=(replace(cited.cited[0], sha256="0" * 64),))
    assert reading(other) is Reading.OTHER
    assert list(lines(of(other), reasons))[1:] == ["    precision read from another version of aiter/kernel.py"]
    # Several versions may have been read.
    assert reading(replace(other, cited=(*other.cited, *cited.cited))) is Reading.SAME


def test_a_source_that_is_absent_or_not_cited_is_neither(cited: Precision) -> None:
    absent = replace(cited, cited=(replace(cited.cited[0], file="aiter/none.py"),))
    assert (reading(absent), reading(Precision())) == (Reading.ABSENT, Reading.UNCITED)


def test_a_target_tells_where_it_runs_and_what_is_loose(cited: Precision) -> None:
    found = to_dict(of(cited), {Engine.EMULATOR: None})
    assert found["precision"]["any"]["installed"] == "same"
    assert "qk" in found["precision"]["any"]["loosest"]
    assert "p_dtype" not in found["precision"]["any"]["loosest"]
    assert to_dict(of(None), {})["precision"] is None
    assert list(lines(of(None), {}))[1:] == ["    no precision declared: every budget is the loosest"]
    target = TARGETS["aiter.pa_decode_gluon.ps.gfx950"]
    assert next(lines(target, {Engine.EMULATOR: None})).endswith("emulator as gfx950")
