"""A scenario of workers that are slow for a moment, and of requests that are not made to wait for them."""

from collections.abc import Sequence

import msgspec

from penstock.clock import NS_PER_S
from penstock.sim.report.figures import Spread
from penstock.sim.scenarios.parts import answered, chat, no_failures, scenario
from penstock.sim.scenarios.scenario import Finding, at_most, pool, setup
from penstock.sim.scenarios.setup import Knobs, Played, Setup
from penstock.sim.traffic.workload import Callers, even
from penstock.sim.world.faults import Fault, FaultKind

_SECONDS, _EVERY, _LASTS = 90, 3.0, 1.5
"""Of traffic; a spell begins every so often on the next worker but two, and lasts so long."""
_SHARE = 0.02
"""Hedges per start, at most, where none are configured."""


def _spells(knobs: Knobs, *, hedged: bool) -> Setup:
    share = (knobs.config.health.hedge_share or _SHARE) if hedged else 0.0
    health = msgspec.structs.replace(knobs.config.health, hedge_share=share)
    knobs = msgspec.structs.replace(knobs, config=msgspec.structs.replace(knobs.config, health=health))
    source = chat(knobs, 0.4, 8, callers=Callers(tenants=even(8)))
    seconds = knobs.seconds or _SECONDS
    faults = [
        Fault(FaultKind.WORKER_SLOW, int(at * NS_PER_S), int((at + _LASTS) * NS_PER_S), 5 * number, 20.0)
        for number, at in enumerate(5 + _EVERY * i for i in range(int((seconds - 8) / _EVERY)))
    ]
    return setup(knobs, [pool(knobs, workers=8)], [source], seconds=_SECONDS, faults=faults)


def _unhedged(knobs: Knobs) -> Setup:
    return _spells(knobs, hedged=False)


def _p99_ms(played: Played) -> float:
    return Spread.of([record.ttft_ns for record in played.records if record.first_ns >= 0]).p99


def _check(played: Played, beside: Played | None) -> Sequence[Finding]:
    assert beside is not None
    starts = sum(record.attempts for record in played.records)
    extra = sum(max(0, record.attempts - 1) for record in played.records)
    return (
        answered(played),
        no_failures(played),
        at_most(
            "p99 of the time to first token over that without hedges", _p99_ms(played) / _p99_ms(beside), 0.9
        ),
        at_most("second attempts per start", extra / max(1, starts), 0.02),
    )


@scenario(_check, beside=_unhedged)
def slow_spells(knobs: Knobs) -> Setup:
    """One of eight workers after the other is twenty times slower for a second and a half: who waits for it?

    Breakers learn too late of what is over so soon. Whoever has no output for longer than 98 of 100 requests
    like it is started on a second worker too (`health.hedge_share`), at most two in a hundred.
    """
    return _spells(knobs, hedged=True)
