"""The compile gate: what it asks the compiler, what it makes of the answers. Compiling needs Triton, no GPU."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fuzz import registry
from fuzz.campaign.reply import Reply, Status
from fuzz.campaign.server import Server
from fuzz.campaign.worker import Job, Worker
from fuzz.check.result import Check
from fuzz.cli import main
from fuzz.commands import built_in_ledger
from fuzz.compile_command import Settings
from fuzz.engine import emulator
from fuzz.engine.compile_gate import ArchError, Compilation, Outcome, Request, compile_all, parse_arch, wire
from fuzz.engine.compile_gate.gate import judge
from fuzz.engine.compile_gate.resources import Resources, of_amdgcn, of_resource_usage
from fuzz.engine.emulator import dtypes
from fuzz.engine.emulator.specialisation import Argument, Constant, Pointer, Scalar, Specialisation, specialise
from fuzz.ledger import Defect
from fuzz.plan import Plan
from fuzz.space import Space
from oracle.kinds import Engine
from suites.fuzz.cases import merge_case
from suites.fuzz.engine import compile_faulty, compile_gluon, compile_targets
from suites.targets import sglang_dcp, sglang_wheel

ARCHS = ("gfx942", "gfx950", "sm_90")
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def launched(module: Any, kernel: str, *arguments: Any, **named: Any) -> Specialisation:
    """What the emulator records of a launch, whether or not it comes to its end."""
    with emulator.session() as log, suppress(emulator.KernelError):
        getattr(module, kernel)[(1,)](*arguments, **named)
    found = log.launches[-1].specialisation
    assert found is not None
    return found


# ------------------------------------------------------------------ architectures


def test_architectures_by_name() -> None:
    assert [(a.backend, a.target, a.warp_size) for a in map(parse_arch, (*ARCHS, "gfx1100"))] == [
        ("hip", "gfx942", 64),
        ("hip", "gfx950", 64),
        ("cuda", 90, 32),
        ("hip", "gfx1100", 32),
    ]


@pytest.mark.parametrize("name", ["", "gfx", "sm90", "sm_9", "h100", "gfx942 "])
def test_other_words_are_no_architecture(name: str) -> None:
    with pytest.raises(ArchError, match="sm_90"):
        parse_arch(name)


# ------------------------------------------------------------------ the wire

plain = st.one_of(
    st.none().map(lambda v: Constant("NoneType", v)),
    st.booleans().map(lambda v: Constant("bool", v)),
    st.integers().map(lambda v: Constant("int", v)),
    st.text(max_size=4).map(lambda v: Constant("str", v)),
)
constants = st.recursive(plain, lambda inner: st.lists(inner, max_size=3).map(lambda v: Constant("tuple", tuple(v))))
leaves = st.one_of(
    st.builds(Pointer, st.sampled_from(["bfloat16", "uint8"]), st.booleans(), st.booleans()),
    st.builds(Scalar, st.sampled_from(["int32", "float"]), st.booleans(), st.booleans()),
    constants,
)
arguments: st.SearchStrategy[Argument] = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3).map(lambda items: tuple(items))
)


@given(st.lists(st.tuples(st.text(max_size=3), arguments), max_size=4), st.integers(1, 8))
def test_a_specialisation_survives_json(pairs: list[tuple[str, Argument]], warps: int) -> None:
    recorded = Specialisation("file.py", "kernel", tuple(pairs), (("num_warps", warps),))
    text = json.dumps(wire.to_dict(recorded))
    again = wire.from_dict(json.loads(text))
    assert again == recorded
    assert json.dumps(wire.to_dict(again)) == text
    assert "\n" not in wire.words(Specialisation("f", "k", (("x", Scalar("int32")),)))


def test_words_for_people() -> None:
    bound = {"x": torch.zeros(4), "y": torch.zeros(8)[1:], "n": 32, "m": 1, "f": None, "t": (1, 2.0), "B": (4, "a")}
    recorded = specialise("file", "kernel", bound, frozenset("B"), {"num_warps": 8})
    assert wire.words(recorded) == (
        "x *float32:16, y *float32, n int32:16, m 1, f=None, t (1, float), B=(4, a), num_warps=8"
    )


# ------------------------------------------------------------------ verdicts

SOME = Specialisation("file.py", "kernel", ())


def reply(status: Status = Status.OK, **fields: Any) -> Reply:
    return Reply(status=status, phase="kernel", seconds={"boot": 9.0, "kernel": 0.5}, **fields)


@pytest.mark.parametrize(
    ("answer", "outcome", "words"),
    [
        (reply(value={"resources": {"shared": 65536}}), Outcome.COMPILES, ""),
        (reply(value={"resources": {"shared": 65537}}), Outcome.FAILS, "65537 bytes of shared memory"),
        (reply(value={"refused": "no", "line": 3}), Outcome.FAILS, "no"),
        (reply(value={"not_judged": "no kernel"}), Outcome.NOT_JUDGED, "no kernel"),
        (reply(Status.CRASH, detail="killed by SIGABRT", output="x\nLLVM ERROR: a\n"), Outcome.FAILS, "LLVM ERROR: a"),
        (reply(Status.HANG, detail="no answer within 3 s"), Outcome.FAILS, "hangs: no answer"),
        (reply(Status.OUT_OF_MEMORY, detail="more than 1 bytes"), Outcome.NOT_JUDGED, "memory"),
        (
            reply(Status.EXCEPTION, detail="RuntimeError: PassManager", output="k.py:4:8: error: 'tt.dot' op no\nx"),
            Outcome.FAILS,
            "RuntimeError: PassManager; error: 'tt.dot' op no",
        ),
        (reply(Status.EXCEPTION, detail="ImportError: x", harness=True), Outcome.NOT_JUDGED, "not loaded"),
    ],
)  # fmt: skip
def test_what_a_reply_means(answer: Reply, outcome: Outcome, words: str) -> None:
    judged = judge(SOME, parse_arch("gfx942"), answer)
    assert (judged.outcome, judged.seconds) == (outcome, 0.5)
    assert words in judged.message
    assert "\n" not in judged.message


def test_resources_of_amd() -> None:
    text = "  .private_segment_fixed_size: 12\n  .sgpr_spill_count: 1\n  .vgpr_count:     40\n  .vgpr_spill_count: 2\n"
    assert of_amdgcn(text, 64) == Resources(64, registers=40, spilled=2, scalar_spilled=1, stack=12)
    assert of_amdgcn("", 64) == Resources(shared=64)


def test_resources_of_nvidia() -> None:
    text = (
        "Resource usage:\n Common:\n  GLOBAL:0\n Function k:\n  REG:64 STACK:48 SHARED:1024 LOCAL:0 CONSTANT[0]:568\n"
    )
    assert of_resource_usage(text, 2048) == Resources(shared=2048, registers=64, stack=48)
    assert of_resource_usage(text, 0).spills
    assert of_resource_usage("", 2048) == Resources(shared=2048)
    assert not of_resource_usage("", 2048).spills


# ------------------------------------------------------------------ with the compiler


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(env={"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}) as made:
        yield made


@pytest.fixture(scope="module")
def compiled(server: Server) -> dict[str, dict[str, Compilation]]:
    """Architecture, then label, to what became of it."""
    own = emulator.load_source(compile_targets.KERNELS, "compile_kernels")
    floats, halves = torch.zeros(64), torch.zeros(1 << 16, dtype=torch.float16)
    low = torch.zeros(64, dtype=torch.float8_e4m3fnuz)
    tile = specialise(own.__file__, "product", {"a": halves, "b": halves, "out": floats, "M": 128, "N": 64, "K": 512},
                      frozenset("MNK"), {})  # fmt: skip
    wide = specialise(own.__file__, "hoard", {"source": floats, "target": floats, "WIDTH": 2048},
                      frozenset(["WIDTH"]), {"num_warps": 1, "maxnreg": 32, "waves_per_eu": 8})  # fmt: skip
    copy = launched(own, "copy", floats, halves, 64, 0.5, None, BLOCK=64, DTYPE=dtypes.float16)
    asked = {
        "copy": copy,
        "total 4": launched(own, "total", floats, floats, COUNT=4),
        "total 3": launched(own, "total", floats, floats, COUNT=3),
        "narrow": launched(own, "narrow", floats, low, BLOCK=64),
        "tile": tile,
        "wide": wide,
        "unknown": Specialisation(own.__file__, "no_such_kernel", ()),
        "object": Specialisation(copy.file, "copy", (*copy.arguments[:-1], ("DTYPE", Constant("Layout", "Layout")))),
    }
    requests = [Request(compile_targets.__name__, specialisation) for specialisation in asked.values()]
    for label, specialisation in correct_attn_out().items() if has_sglang() else ():
        asked[label] = specialisation
        requests.append(Request(sglang_dcp.__name__, specialisation))
    found = {arch: compile_all(requests, parse_arch(arch), server=server) for arch in ARCHS}
    return {arch: dict(zip(asked, compilations, strict=True)) for arch, compilations in found.items()}


def has_sglang() -> bool:
    return sglang_wheel.root() is not None and importlib.metadata.version("sglang") == "0.5.15"


def correct_attn_out() -> dict[str, Specialisation]:
    """sglang's kernel for three and four ranks, as its launcher launches it."""
    folder = sglang_wheel.root()
    assert folder is not None
    dcp, found = emulator.load_source(folder / sglang_dcp.FILES[0], "sglang_dcp"), {}
    for ranks in (3, 4):
        out, lses = torch.zeros(2, 4, 64), torch.zeros(ranks, 2, 4)
        # The emulator refuses three ranks too, after the launch is recorded.
        with emulator.session() as log, suppress(emulator.KernelError):
            dcp.correct_attn_out(out, lses, 1, None, torch.empty(4, 2, 64).transpose(0, 1))
        (launch,) = log.launches
        assert launch.specialisation is not None
        found[f"{ranks} ranks"] = launch.specialisation
    return found


@needs_triton
@pytest.mark.parametrize("arch", ARCHS)
def test_clean_kernels_compile_everywhere(compiled: dict[str, dict[str, Compilation]], arch: str) -> None:
    for label in ("copy", "total 4"):
        found = compiled[arch][label]
        assert (found.outcome, found.message) == (Outcome.COMPILES, "")
        assert found.resources is not None
        assert not found.resources.spills
        assert found.resources.registers


@needs_triton
@pytest.mark.parametrize("arch", ARCHS)
def test_a_kernel_that_fails_everywhere(compiled: dict[str, dict[str, Compilation]], arch: str) -> None:
    found = compiled[arch]["total 3"]
    assert found.outcome is Outcome.FAILS
    assert "power of 2" in found.message
    assert "tl." not in found.message, "no source text"
    source = Path(found.specialisation.file).read_text().splitlines()
    assert found.line is not None
    assert "_rows(COUNT))" in source[found.line - 1]


@needs_triton
def test_kernels_that_fail_on_one_architecture_only(compiled: dict[str, dict[str, Compilation]]) -> None:
    narrow = {arch: compiled[arch]["narrow"] for arch in ARCHS}
    assert [arch for arch, found in narrow.items() if found.outcome is Outcome.FAILS] == ["sm_90"]
    assert "fp8e4b8" in narrow["sm_90"].message
    tile = {arch: compiled[arch]["tile"] for arch in ARCHS}
    assert [arch for arch, found in tile.items() if found.outcome is Outcome.FAILS] == ["gfx942"]
    assert "shared memory" in tile["gfx942"].message


@needs_triton
@pytest.mark.parametrize("arch", ARCHS)
def test_spills_are_seen_and_are_no_failure(compiled: dict[str, dict[str, Compilation]], arch: str) -> None:
    found = compiled[arch]["wide"]
    assert found.outcome is Outcome.COMPILES
    assert found.resources is not None
    assert found.resources.spills


@needs_triton
@pytest.mark.parametrize(("label", "words"), [("unknown", "no_such_kernel"), ("object", "DTYPE is a Layout")])
def test_what_cannot_be_asked_is_not_judged(
    compiled: dict[str, dict[str, Compilation]], label: str, words: str
) -> None:
    found = compiled["sm_90"][label]
    assert found.outcome is Outcome.NOT_JUDGED
    assert words in found.message


@needs_triton
def test_a_compiler_that_dies_or_hangs(server: Server) -> None:
    target = (("target", Pointer("float32", True, True)),)
    dies, stays, fails = (
        Request(compile_faulty.__name__, Specialisation(str(compile_faulty.KERNELS), name, target))
        for name in ("aborts", "hangs", "fails")
    )
    died, failed = compile_all([dies, fails], parse_arch("gfx942"), server=server)
    (hung,) = compile_all([stays], parse_arch("gfx942"), server=server, timeout_s=1.0)
    assert {died.outcome, hung.outcome, failed.outcome} == {Outcome.FAILS}
    assert "SIGABRT" in died.message
    assert "LLVM ERROR: planted" in died.message
    assert "hangs" in hung.message
    assert "planted pass failure" in failed.message


@needs_triton
def test_gluon_layouts_are_checked_for_each_architecture(server: Server) -> None:
    pointers = tuple((name, Pointer("bfloat16", True, True)) for name in ("source", "target"))
    requests = [
        Request(
            compile_gluon.__name__,
            Specialisation(str(compile_gluon.KERNELS), "copy", (*pointers, ("LANES", Constant("int", lanes)))),
        )
        for lanes in (32, 64)
    ]
    for arch, fits in (("gfx950", 64), ("sm_90", 32)):
        found = list(compile_all(requests, parse_arch(arch), server=server))
        wanted = [Outcome.COMPILES if lanes == fits else Outcome.FAILS for lanes in (32, 64)]
        assert [compilation.outcome for compilation in found] == wanted, found
        assert "layout" in found[wanted.index(Outcome.FAILS)].message


@needs_triton
def test_triton_is_not_imported_where_the_emulator_runs(server: Server) -> None:
    job = Job("suites.fuzz.engine.compile_reference:record_and_look", "fuzz.engine.compile_gate.jobs:setup_recording",
              {"arch": "gfx942", "modules": ["suites.fuzz.engine.compile_targets"]})  # fmt: skip
    case = next(iter(Plan(Space(registry.load(job.setup["modules"])["compile.clean"], 600, False), 0)))
    with Worker(job, server) as worker:
        answer = worker.run({"target": "compile.clean", "case": case.to_dict()}, 60.0)
    assert answer.ok, answer.output
    assert answer.value is not None
    assert (answer.value["launches"], answer.value["real"]) == (1, [])


@needs_triton
@pytest.mark.parametrize("arch", ["gfx942", "sm_90"])
def test_signatures_are_those_of_the_launcher(server: Server, arch: str) -> None:
    with Worker(Job("suites.fuzz.engine.compile_reference:compare"), server) as worker:
        answer = worker.run({"arch": arch}, 60.0)
    assert answer.ok, answer.output
    assert answer.value is not None
    assert answer.value["compared"] > 30
    assert answer.value["different"] == {}


@needs_triton
@pytest.mark.parametrize("arch", ARCHS)
def test_correct_attn_out_wants_a_power_of_two_of_ranks(compiled: dict[str, dict[str, Compilation]], arch: str) -> None:
    if not has_sglang():
        pytest.skip("sglang 0.5.15 is not installed")
    three, four = compiled[arch]["3 ranks"], compiled[arch]["4 ranks"]
    assert (three.outcome, four.outcome) == (Outcome.FAILS, Outcome.COMPILES)
    assert "power of 2" in three.message
    assert three.specialisation.kernel == "_correct_attn_cp_out_kernel"


# ------------------------------------------------------------------ the command


def compile_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    options = ["--targets", "suites.fuzz.engine.compile_targets", "--cases", "2", "--jobs", "1", "--json"]
    code = main(["compile", *arguments, *options])
    return code, json.loads(capsys.readouterr().out)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@needs_triton
def test_the_command_finds_what_targets_declare(capsys: pytest.CaptureFixture[str], own_cache: None) -> None:
    code, data = compile_json(capsys, "compile.*", "--arch", "gfx942,sm_90")
    assert code == 1
    targets = data["targets"]
    assert {name: [f["arch"] for f in target["findings"]] for name, target in targets.items()} == {
        "compile.clean": [],
        "compile.refused": ["gfx942", "sm_90"],
        "compile.one_arch": ["sm_90"],
        "compile.declared": [],
        "compile.other_compiler": [],
        "compile.by_machine": [],
        "compile.no_launch": [],
    }
    widths = {c["arch"]: c["arguments"].split("COUNT=")[1] for c in targets["compile.by_machine"]["compilations"]}
    assert widths == {"gfx942": "64", "sm_90": "32"}
    assert targets["compile.declared"]["compilations"][1]["outcome"] == "fails"
    assert targets["compile.declared"]["declares"] == {"gfx942": True, "sm_90": False}
    assert targets["compile.other_compiler"]["skipped"] == {
        "its compiler is other-triton, and another's verdict on it would be false": 1
    }
    assert (targets["compile.clean"]["cases"], targets["compile.clean"]["specialisations"]) == (4, 1)
    (reason,) = targets["compile.refused"]["skipped"]
    assert "not a power of 2" in reason


@needs_triton
def test_the_command_says_when_nothing_was_judged(capsys: pytest.CaptureFixture[str], own_cache: None) -> None:
    assert compile_json(capsys, "compile.other_compiler")[0] == 125
    assert compile_json(capsys, "compile.no_launch", "--arch", "sm_90")[0] == 125


def entry(**changes: Any) -> Defect:
    """A known crash of sglang's correct_attn_out on AMD GPUs."""
    known = next(d for d in built_in_ledger() if d.id == "sglang-correct-attn-out-ranks-not-a-power-of-two")
    return replace(known, engines=(Engine.HIP,), packages={}, **changes)


@pytest.mark.parametrize(
    ("defect", "arch", "parts", "known"),
    [
        (entry(), "gfx942", (3,), True),
        (entry(), "gfx942", (3, 5), True),
        # One of the cases that fail is none of the entry's.
        (entry(), "gfx942", (3, 4), False),
        (entry(), "sm_90", (3,), False),
        (entry(checks=(Check.VALUES,)), "gfx942", (3,), False),
        (entry(targets=("other",)), "gfx942", (3,), False),
    ],
)
def test_the_ledger_explains_what_all_its_cases_share(
    defect: Defect, arch: str, parts: tuple[int, ...], known: bool
) -> None:
    settings = Settings(archs=(), cases=1, ledger=(defect,))
    users = [merge_case(parts=n) for n in parts]
    found = settings.explains("sglang.dcp.correct_attn_out", parse_arch(arch), users)
    assert (found == defect.id) is known


@needs_triton
def test_failures_that_the_ledger_knows_are_no_findings(capsys: pytest.CaptureFixture[str], own_cache: None) -> None:
    if sglang_wheel.root() is None:
        pytest.skip("sglang is not installed")
    command = ["compile", "sglang.dcp.correct_attn_out", "--cases", "12", "--jobs", "1", "--arch", "gfx942"]
    assert main([*command, "--json"]) == 0
    (target,) = json.loads(capsys.readouterr().out)["targets"].values()
    assert {f["known"] for f in target["findings"]} == {"sglang-correct-attn-out-ranks-not-a-power-of-two"}
    assert main([*command, "--no-ledger"]) == 1
    assert "FAIL _correct_attn_cp_out_kernel" in capsys.readouterr().out
    assert main(command) == 0
    assert "known defect sglang-correct-attn-out-ranks-not-a-power-of-two: _correct" in capsys.readouterr().out


@needs_triton
@pytest.mark.slow
def test_shuffle_5d_compiles_for_every_architecture(capsys: pytest.CaptureFixture[str], own_cache: None) -> None:
    if sglang_wheel.root() is None:
        pytest.skip("sglang is not installed")
    assert main(["compile", "sglang.shuffle_5d.*", "--cases", "30", "--json"]) == 0
    for target in json.loads(capsys.readouterr().out)["targets"].values():
        dtypes = {c["arguments"].split("*")[1].split(":")[0].split(",")[0] for c in target["compilations"]}
        assert len(dtypes) == 6
        assert {c["outcome"] for c in target["compilations"]} == {"compiles"}
        assert {c["arch"] for c in target["compilations"]} == set(ARCHS)


@pytest.mark.skipif(importlib.util.find_spec("triton") is not None, reason="triton is installed")
def test_without_triton_the_command_says_how_to_get_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile"]) == 125
    assert "pip install attn-oracle[triton]" in capsys.readouterr().err


def test_bad_architectures_are_bad_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile", "--arch", "gfx942,h100"]) == 2
    assert "--arch: 'h100'" in capsys.readouterr().err
