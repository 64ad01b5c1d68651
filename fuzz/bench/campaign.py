"""What a campaign spends on anything but kernels and the oracle."""

from __future__ import annotations

import time

from fuzz import registry
from fuzz.bench.report import OVERHEAD, Figure, NotMeasured
from fuzz.campaign.run import PHASES, Campaign, Settings, open_pool
from oracle.declare import Declaration
from oracle.kinds import Engine

TARGETS = ("sglang.shuffle_5d.write", "sglang.shuffle_5d.gather", "torch.sdpa_with_lse")
CASES = 16
SEED = 4


def overhead(engine: Engine) -> Figure:
    """Share of the wall time of a short campaign, on one worker that is warm, outside kernel and oracle."""
    targets = _targets(engine)
    settings = Settings(engine=engine, seed=SEED)
    with open_pool(settings) as pool:
        # Starts the worker, loads and compiles the kernels: campaigns are long, their start is not the figure.
        Campaign(targets, settings, cases=1, time_s=None).run(pool)
        campaign = Campaign(targets, settings, cases=CASES, time_s=None)
        start = time.perf_counter()
        campaign.run(pool)
        wall = time.perf_counter() - start
    if campaign.harness_errors:
        raise NotMeasured(f"the campaign failed: {campaign.harness_errors[0].harness_error}")
    spent = {phase: sum(s.seconds[phase] for s in campaign.summaries.values()) for phase in PHASES}
    share = 1 - (spent["kernel"] + spent["oracle"]) / wall
    parts = ", ".join(f"{phase} {seconds:.3g} s" for phase, seconds in spent.items())
    return Figure(
        OVERHEAD,
        share,
        "share",
        f"the wall time of {CASES} cases each of {', '.join(TARGETS)} on {engine}, 1 worker",
        False,
        f"wall {wall:.3g} s: {parts}",
    )


def _targets(engine: Engine) -> list[Declaration]:
    known = registry.load()
    for name in TARGETS:
        reason = registry.why_not(known[name], engine)
        if reason is not None:
            raise NotMeasured(f"{name}: {reason}")
    return [known[name] for name in TARGETS]
