"""torch's attention in its several forms: each is right on cases of its own space, by its own precision."""

import pytest
import torch

from fuzz import engine as engines
from fuzz import registry
from fuzz.check.run import check_case
from fuzz.plan import CounterChooser
from fuzz.space import Space
from oracle.kinds import Engine
from oracle.verdict import Verdict
from suites.targets import torch_native

ON_CPU = ("torch.sdpa", "torch.sdpa_with_lse", "torch.sdpa_math", "torch.flex_eager")
ON_CUDA = ("torch.sdpa_flash", "torch.flex")


@pytest.mark.parametrize("name", ON_CPU)
def test_torch_is_right_by_its_own_precision(name: str) -> None:
    engines.start(Engine.EMULATOR)
    declaration = registry.load()[name]
    space, judged = Space(declaration), 0
    for stream in range(5):
        case = space.draw(CounterChooser(17, stream, {"requests": "one"}))
        result = check_case(declaration, case, Engine.EMULATOR, lambda phase: None)
        assert all(check.verdict in (Verdict.PASS, Verdict.VACUOUS) for check in result.checks), result
        judged += result.elements
    assert judged


@pytest.mark.parametrize("name", ON_CUDA)
def test_kernels_of_a_gpu_say_so(name: str) -> None:
    assert registry.why_not(registry.load()[name], Engine.EMULATOR)
    assert Engine.CUDA in registry.load()[name].engines


def attend_with_heads(count: int) -> None:
    """The compiled operator for another number of heads, which is another graph."""
    q, mask = torch.ones(1, count, 2, 16), torch.ones(2, 2, dtype=torch.bool)
    torch_native._flex(torch_native._recompiled)(q, q, q, mask, None)


def test_flex_is_compiled_for_every_shape_or_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never the eager operator in its place: that casts weights once they are normalised, the compiled one before."""
    compiled = torch_native._compiled_flex("eager")  # traces and guards as ever, but calls no C++ compiler
    monkeypatch.setattr(torch_native, "_compiled_flex", lambda: compiled)
    limit = torch._dynamo.config.recompile_limit
    for heads in range(1, limit + 3):
        attend_with_heads(heads)
    monkeypatch.setattr(torch_native, "_KERNELS", 1)
    with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
        attend_with_heads(limit + 3)
