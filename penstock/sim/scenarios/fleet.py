"""Scenarios in which the fleet changes: cold starts, restarts, spot capacity, everybody coming back at
once.
"""

from collections.abc import Sequence
from dataclasses import replace

from penstock.clock import NS_PER_S
from penstock.sim.report.figures import Objective
from penstock.sim.scenarios.parts import (
    ANSWER,
    WORKER_RPS,
    answered,
    chat,
    no_failures,
    scenario,
)
from penstock.sim.scenarios.scenario import Check, Finding, at_least, pool, setup
from penstock.sim.scenarios.setup import Knobs, Played, Setup
from penstock.sim.traffic.arrivals import Poisson, Spike, Stampede
from penstock.sim.traffic.workload import Callers, Conversations, LengthDistribution, even


def _check_recovers(after_s: float, share: float = 0.9) -> Check:
    def check(played: Played, _: Played | None) -> Sequence[Finding]:
        late = [record for record in played.records if record.at_ns > after_s * NS_PER_S]
        good = sum(played.good(record) for record in late) / max(1, len(late))
        return (
            answered(played), no_failures(played),
            at_least(f"good share of requests after {after_s:g} s", good, share),
        )  # fmt: skip

    return check


@scenario(_check_recovers(75))
def cold_start(knobs: Knobs) -> Setup:
    """Load doubles and a new worker takes 30 seconds to load: do requests wait, or time out?

    The queue holds them (nobody leaves within 40 s); the fleet grows by schedule, as an autoscaler would ask
    for it 5 s after the step.
    """
    source = replace(
        chat(knobs, 0.8, 2, callers=Callers(tenants=even(8), patience_s=40.0)),
        arrivals=Spike(WORKER_RPS * 2 * 0.7 * knobs.load, 2.0, 15.0, 200.0),
    )
    main = replace(pool(knobs, workers=2, cold_start_s=30), schedule=((20 * NS_PER_S, 5),))
    return setup(knobs, [main], [source], seconds=95, objective=Objective(ttft_ms=3000, tpot_ms=150))


@scenario(_check_recovers(60))
def rolling_restart(knobs: Knobs) -> Setup:
    """Every worker is replaced by one with a cold cache: what do conversations pay?

    Four new workers are ready before the four old ones drain; no stream is aborted by a drain.
    """
    source = Conversations(
        arrivals=Poisson(0.9 * knobs.load), callers=Callers(tenants=even(6)), system_tokens=480,
        output=ANSWER, message=LengthDistribution(60, 0.8, maximum=2048), think_s=6, context_max=6000,
    )  # fmt: skip
    new = replace(pool(knobs, workers=0, cold_start_s=10), count=0, schedule=((20 * NS_PER_S, 4),))
    old = replace(pool(knobs, workers=4), schedule=((32 * NS_PER_S, 0),))
    return setup(knobs, [old, new], [source], seconds=90)


@scenario(_check_recovers(60))
def spot_revocation(knobs: Knobs) -> Setup:
    """Half of the fleet is spot capacity and is taken back with a notice: is anything lost?

    Two of four workers drain at 15 s, others are there 20 s later; what runs goes on, what waits goes
    elsewhere.
    """
    source = chat(knobs, 0.4, 4, callers=Callers(tenants=even(8), patience_s=30.0))
    main = replace(pool(knobs, workers=4, cold_start_s=15), schedule=((15 * NS_PER_S, 2), (20 * NS_PER_S, 4)))
    return setup(knobs, [main], [source], seconds=70)


@scenario(_check_recovers(40))
def thundering_herd(knobs: Knobs) -> Setup:
    """Everybody comes back at once after an outage: how soon is it over?

    200 requests within a second on top of the usual load; their clients wait 45 s.
    """
    usual = chat(knobs, 0.35, 2)
    herd = replace(
        chat(knobs, 1, 4, name="herd", callers=Callers(tenants=even(8), patience_s=45.0)),
        arrivals=Stampede(round(200 * knobs.load), 10.0),
    )
    return setup(knobs, [pool(knobs, workers=2)], [usual, herd], seconds=60)
