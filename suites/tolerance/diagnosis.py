"""Whether a fault is called by its name: each one that is detected is diagnosed, and what was said is kept."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import torch

from fuzz.instance.pool import geometry, own_pages
from oracle.convention import Convention
from oracle.diagnose import Surroundings, diagnose
from oracle.kinds import Role
from oracle.layout import unpack
from suites.tolerance.detection import SHIPPED, SUITE, Subject, Unit, examine
from suites.tolerance.faults import COUNTED, OUTSIDE, Fault


@dataclass(frozen=True)
class Named:
    """What the diagnosis said of one fault. probe: the first of the suite that detects it, None if none does."""

    context: int
    seed: int
    fault: str
    probe: str | None
    expected: str
    named: str
    detail: str
    right: bool


def surroundings(subject: Subject) -> Surroundings:
    """What a caller knows of the paged call beside its problem."""
    case, recipe = subject.instance.case, subject.recipe

    def pool(role: Role) -> torch.Tensor:
        g = geometry(case, role)
        rows = unpack(subject.instance.buffers[f"{role.value}_cache"].view, g).cpu()
        return rows.view(-1, case.page_size, *rows.shape[1:])

    return Surroundings(
        page_size=case.page_size,
        stale=tuple(
            (x.k[:, x.context :].transpose(0, 1).cpu(), x.v[:, x.context :].transpose(0, 1).cpu())
            for x in subject.operands
        ),
        pages=tuple(tuple(pages) for pages in own_pages(case)),
        pool_k=pool(Role.K),
        pool_v=pool(Role.V),
        splits=tuple(tuple(cut.start for cut in recipe.cuts(x.columns)) for x in subject.operands),
        tile=recipe.tile,
    )


def name(subject: Subject, fault: Fault) -> Named:
    """Diagnose what the kernel with `fault` returns."""
    result = subject.run(fault)
    assert subject.instance.problem is not None
    found = diagnose(
        subject.instance.problem,
        result.out,
        result.lse,
        precision=subject.recipe.precision(),
        input_dtype=subject.instance.case.dtype,
        convention=Convention(source="the emulated kernel", lse_includes_sink=True),
        around=surroundings(subject),
    )
    unit = subject.unit
    right = found.kind in (fault.kind, *fault.alike)
    return Named(
        unit.context, unit.seed, fault.name, unit.probe, fault.kind.value, found.kind.value, found.detail, right
    )


def name_all(
    context: int, seed: int = 1, device: str = "cpu", faults: Sequence[Fault] = (*COUNTED, *OUTSIDE)
) -> Iterator[Named]:
    """Each fault once, on the first probe of the suite that detects it; what no probe executes is left out."""
    subjects: dict[str, Subject] = {}
    for fault in faults:
        executed = False
        for probe in SUITE:
            if probe not in subjects:
                subjects[probe] = Subject.of(Unit(context, probe, seed), device)
            subject = subjects[probe]
            (record,) = examine(subject, (fault,))
            executed |= record.executed
            if record.executed and not record.fired.isdisjoint(SHIPPED):
                yield name(subject, fault)
                break
        else:
            if executed:
                yield Named(context, seed, fault.name, None, fault.kind.value, "not detected", "", False)


def to_dict(named: Sequence[Named]) -> dict[str, object]:
    """Plain data."""
    return {"named": [asdict(one) for one in named]}
