"""Every probe: how it is built, what it aims at, what it needs."""

from __future__ import annotations

from functools import lru_cache

from fuzz.case import Case, CaseError, Probe, Sink
from fuzz.features import labels
from fuzz.probes import deep, needle, plain_designs, uniform
from fuzz.probes.assemble import DESIGNED_SINKS
from fuzz.probes.geometry import Geometry
from fuzz.probes.model import Design, Fault, Inputs
from oracle.convention import Granularity

SOME_DESCALE = (Granularity.TENSOR.value, Granularity.HEAD.value)
WIDE = ("fp32", "bf16", "fp16", "e5m2", "e5m2fnuz")
"""dtypes of a query whose range holds a product of one channel that decides a row."""
FP8 = ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz")

DESIGNS: dict[Probe, Design] = {
    design.probe: design
    for design in (
        Design(
            Probe.NORMAL,
            plain_designs.normal_values,
            (
                Fault.KEY_SET,
                Fault.STALE_SLOT,
                Fault.WRONG_PAGE,
                Fault.PAIRING,
                Fault.HEAD_MAP,
                Fault.CHANNELS,
                Fault.SCALE,
                Fault.LOGIT_PRECISION,
                Fault.WEIGHT_PRECISION,
                Fault.ACCUMULATION,
            ),
        ),
        Design(Probe.CONSTANT_V, plain_designs.constant_v, (Fault.NORMALISATION, Fault.MERGE, Fault.DESCALE)),
        Design(
            Probe.NEEDLE_POISON,
            needle.needle_poison,
            (
                Fault.WINDOW,
                Fault.CAUSAL,
                Fault.STALE_SLOT,
                Fault.SPLIT_EDGE,
                Fault.SINK,
                Fault.SCALE,
                Fault.SOFT_CAP,
                Fault.LOGIT_PRECISION,
                Fault.RESCALE,
            ),
            needs=DESIGNED_SINKS,
            refuses=needle.no_needle_poison,
        ),
        Design(
            Probe.CODE,
            uniform.code,
            (
                Fault.KEY_SET,
                Fault.WINDOW,
                Fault.CAUSAL,
                Fault.STALE_SLOT,
                Fault.WRONG_PAGE,
                Fault.SPLIT_EDGE,
                Fault.MERGE,
                Fault.SINK,
                Fault.CHANNELS,
            ),
            needs=DESIGNED_SINKS,
            refuses=uniform.no_code,
            exact_weights=True,
        ),
        Design(
            Probe.GATE,
            uniform.gate,
            (
                Fault.PAIRING,
                Fault.WRONG_PAGE,
                Fault.HEAD_MAP,
                Fault.KEY_SET,
                Fault.WINDOW,
                Fault.CAUSAL,
                Fault.STALE_SLOT,
                Fault.SINK,
            ),
            needs=DESIGNED_SINKS | {"soft_cap": ("off",), "dtype": WIDE},
            refuses=uniform.no_gate,
            exact_weights=True,
        ),
        Design(
            Probe.DEEP_NEGATIVE,
            deep.deep_negative,
            (Fault.MASK_ORDER, Fault.SOFT_CAP, Fault.WINDOW, Fault.CAUSAL, Fault.STALE_SLOT, Fault.SINK),
            needs=DESIGNED_SINKS | {"soft_cap": ("on",)},
            refuses=deep.no_deep_negative,
        ),
        Design(
            Probe.DEEP_NEGATIVE_UNCAPPED,
            deep.deep_negative_uncapped,
            (Fault.MAX_START, Fault.UNDERFLOW, Fault.SCALE, Fault.MASK_ORDER, Fault.SINK),
            needs=DESIGNED_SINKS | {"soft_cap": ("off",), "dtype": WIDE},
            refuses=deep.no_depth,
        ),
        Design(
            Probe.RAMP,
            plain_designs.ramp,
            (Fault.RESCALE, Fault.CAUSAL, Fault.STALE_SLOT, Fault.SOFT_CAP, Fault.LOGIT_PRECISION),
            needs=DESIGNED_SINKS,
            refuses=plain_designs.no_ramp,
        ),
        Design(
            Probe.VALUE_NEEDLE,
            uniform.value_needle,
            (Fault.KEY_SET, Fault.WINDOW, Fault.CAUSAL, Fault.STALE_SLOT, Fault.SPLIT_EDGE, Fault.SINK),
            needs=DESIGNED_SINKS,
            refuses=uniform.no_code,
            exact_weights=True,
        ),
        Design(
            Probe.SIGNATURES,
            uniform.signatures,
            (Fault.HEAD_MAP, Fault.WRONG_PAGE, Fault.MERGE, Fault.SINK, Fault.CHANNELS),
            needs=DESIGNED_SINKS,
            refuses=uniform.no_code,
            exact_weights=True,
        ),
        Design(
            Probe.INTEGERS,
            uniform.integers,
            (Fault.ACCUMULATION, Fault.WEIGHT_PRECISION, Fault.KEY_SET, Fault.STALE_SLOT, Fault.NORMALISATION),
            exact_weights=True,
        ),
        Design(Probe.CANCELLING, plain_designs.cancelling, (Fault.ACCUMULATION, Fault.KEY_SET, Fault.WEIGHT_PRECISION)),
        Design(Probe.OUTLIERS, plain_designs.outliers, (Fault.LOGIT_PRECISION, Fault.ACCUMULATION, Fault.CHANNELS)),
        Design(Probe.NEAR_TIES, plain_designs.near_ties, (Fault.WEIGHT_PRECISION, Fault.ACCUMULATION, Fault.RESCALE)),
        Design(Probe.HUGE_SCALE, plain_designs.huge_scale, (Fault.OVERFLOW, Fault.ACCUMULATION)),
        Design(Probe.TINY_SCALE, plain_designs.tiny_scale, (Fault.UNDERFLOW,)),
        Design(
            Probe.SINK_NEAR_LSE,
            plain_designs.sink_near_lse,
            (Fault.SINK, Fault.MERGE),
            needs={"sinks": (Sink.NORMAL.value,)},
        ),
        Design(
            Probe.UNEQUAL_DESCALES,
            plain_designs.unequal_descales,
            (Fault.DESCALE, Fault.HEAD_MAP),
            needs={"k_descale": SOME_DESCALE, "v_descale": SOME_DESCALE},
        ),
        Design(Probe.FP8_EDGES, plain_designs.fp8_edges, (Fault.FP8_FORMAT, Fault.OVERFLOW), needs={"kv_dtype": FP8}),
    )
}
"""The designs for attention. Other operations know the probes normal, and copies also bytes."""

RECOMMENDED: tuple[Probe, ...] = (
    Probe.NORMAL,
    Probe.NEEDLE_POISON,
    Probe.CODE,
    Probe.GATE,
    Probe.DEEP_NEGATIVE,
    Probe.DEEP_NEGATIVE_UNCAPPED,
)
"""Together they made every one of 41 planted faults visible, at contexts of 8k and 32k, in every seed."""


def exact_weights(probe: Probe) -> bool:
    """Whether softmax weights before normalisation are 0 or 1, so that results depend neither on P's dtype nor on
    the length of the context."""
    return probe in DESIGNS and DESIGNS[probe].exact_weights


def unfit(case: Case) -> str | None:
    """Why the probe of ``case`` cannot be built for it, or None."""
    if not case.is_attention:
        return None
    if case.probe not in DESIGNS:
        return f"the probe {case.probe} is not for attention"
    design = DESIGNS[case.probe]
    shown = labels(case) if design.needs else set()
    for name, allowed in design.needs.items():
        if not any((name, label) in shown for label in allowed):
            return f"the probe {case.probe} needs {name} {' or '.join(allowed)}"
    return design.refuses(Geometry(case))


@lru_cache(maxsize=2)
def design(case: Case) -> Inputs:
    """Values of every operand of an attention case. Raises ``CaseError`` where its probe cannot be built.

    Not to be written to: a case is built with one poison after the other, and its values are designed once.
    """
    reason = unfit(case)
    if reason is not None:
        raise CaseError(f"case.probe: {reason}")
    return DESIGNS[case.probe].build(Geometry(case))
