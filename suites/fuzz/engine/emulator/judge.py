"""What the tests of attention kernels demand of a result."""

from torch import Tensor

from suites.fuzz.engine.emulator.ragged import ROUNDING, Result, Shape
from suites.fuzz.engine.emulator.reference import Rules, batch


def judge(result: Result, lengths: list[int], shape: Shape, rules: Rules, q: Tensor | None = None) -> None:
    """No finding; output within the rounding of the weights, of the output and, at fp32, of the sums; LSE within
    that of fp32. `q`: what stands for the query where the kernel rounds it.
    """
    assert result.log.findings == ()
    expected, lse = batch(result.q if q is None else q, result.keys, result.values, lengths, rules)
    rounding = ROUNDING[shape.dtype] + ROUNDING[shape.cached]
    largest = max(float(v.abs().max()) for v in result.values if v.numel())
    assert (result.out.double() - expected).abs().max() <= rounding * largest
    if result.lse is not None and shape.cached is shape.dtype:
        assert (result.lse.double() - lse).abs().max() < 2.0**-17
