"""Scenarios in which the number of workers follows the load: a day, a sudden spike, a steady load, workers
that leave under load, spot machines that are all taken back, and a zone that is lost.

A worker here takes a second for every three hundred tokens of a prompt, so a few requests fill it, and a
fleet is a few dozen requests: minutes of cold starts are simulated in seconds.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from penstock.clock import NS_PER_S
from penstock.config.scale import ScaleConfig, ScalePoolConfig
from penstock.planning.step_time import LinearStepTime
from penstock.policy.capacity.autoscaler import Autoscaler, ScaleDecision
from penstock.policy.capacity.opinions import Opinion, floor, reactive
from penstock.policy.capacity.signals import Signals
from penstock.policy.flow import Outcome
from penstock.rng import Stream
from penstock.sim.report.figures import Objective
from penstock.sim.scenarios.scenario import (
    Finding,
    answered,
    at_least,
    at_most,
    no_failures,
    pool,
    scenario,
    setup,
)
from penstock.sim.scenarios.setup import Knobs, Played, Setup
from penstock.sim.traffic.prompts import RequestRecord
from penstock.sim.traffic.workload import Arrivals, Callers, Chat, LengthDistribution, Poisson, Spike, even
from penstock.sim.world.scaling import Decider, Outage, ScalingSpec

LAW = LinearStepTime(fixed_ns=240_000_000, row_ns=16_000_000, prefill_ns=3_000_000)
OBJECTIVE = Objective(ttft_ms=10_000, tpot_ms=1200)
PROMPT, ANSWER = LengthDistribution(300, 0.4, maximum=1024), LengthDistribution(20, 0.4, maximum=64)
COLD_S = (45.0, 90.0)
DAY_S = 3600.0
LOST_BELOW = 0.95
"""A minute is lost if fewer of its requests were answered as promised."""
MAX = 14
BEGINS, ENDS = 300.0, 570.0
"""Seconds: the spike."""
TAKEN_AT_S = 300.0
"""When machines are taken away."""


class Mornings:
    """An office's day, in an hour: quiet, a steep morning, a dip at noon, a slow evening."""

    SHAPE = (
        (0.0, 0.10), (0.30, 0.12), (0.36, 0.70), (0.40, 1.0), (0.50, 0.80), (0.54, 0.95), (0.70, 0.85),
        (0.80, 0.45), (0.92, 0.20), (1.0, 0.10),
    )  # fmt: skip

    def __init__(self, peak: float) -> None:
        self.peak = peak

    def rate(self, at_s: float) -> float:
        """Requests per second."""
        share = at_s % DAY_S / DAY_S
        for (x0, y0), (x1, y1) in itertools.pairwise(self.SHAPE):
            if x0 <= share <= x1:
                return self.peak * (y0 + (y1 - y0) * (share - x0) / (x1 - x0))
        raise AssertionError(share)

    def times(self, stream: Stream, seconds: float) -> Iterator[float]:
        """Thinned; every day is drawn up to 15 % larger or smaller than the shape."""
        sizes = [stream.uniform(0.85, 1.15) for _ in range(math.ceil(seconds / DAY_S))]
        top = self.peak * 1.15
        for at in Poisson(top).times(stream, seconds):
            if stream.random() * top < self.rate(at) * sizes[int(at / DAY_S)]:
                yield at


class Reactive(Autoscaler):
    """The product's rule without a forecast: what it is held against."""

    def advise(self, seen: Signals) -> tuple[Opinion, Opinion, Opinion]:
        """Two of the three."""
        known = self.state.learned
        none = Opinion(of="capacity", workers=0, why="not asked")
        return reactive(seen, known), none, floor(self.scale, seen, known)

    def lasting(self) -> int:
        """It leaves as soon as those that stay keep enough."""
        return 0


class Swings:
    """One more, one fewer, at every look: workers leave all the time."""

    def __init__(self, model: str, scale: ScaleConfig) -> None:
        del model, scale

    def decide(self, seen: Signals) -> ScaleDecision:
        """See `Decider`."""
        there = seen.ready + seen.pending
        workers = 2 if there > 2 else 3
        return ScaleDecision(
            wall_ns=seen.wall_ns, move="out" if workers > there else "in", acts=True, why="swings",
            ready=seen.ready, pending=seen.pending, wanted=workers, workers=workers, pools={"": workers},
            opinions=(),
        )  # fmt: skip


def scaled(
    knobs: Knobs, arrivals: Arrivals, seconds: float, spec: ScalingSpec, start: Sequence[int] = (1,),
    *, priority: float = 0.0,
) -> Setup:  # fmt: skip
    """One fleet that scales; `start` workers in each pool, and requests of the priority band at a rate of
    their own.
    """
    sources = [
        Chat(
            name="chat", arrivals=arrivals, callers=Callers(tenants=even(4)), prompt=PROMPT, output=ANSWER,
            system_tokens=0,
        ),
        *(
            Chat(
                name="urgent", arrivals=Poisson(priority * knobs.load), prompt=PROMPT, output=ANSWER,
                callers=Callers(tenants=even(2), band="priority"), system_tokens=0,
            )
            for _ in range(priority > 0)
        ),
    ]  # fmt: skip
    pools = [pool(knobs, workers=count) for count in start]
    pools = [
        replace(each, worker=replace(each.worker, step_time=knobs.step_time or LAW), count=count)
        for each, count in zip(pools, start, strict=True)
    ]
    made = setup(knobs, pools, sources, seconds=seconds, objective=OBJECTIVE)
    return replace(made, scaling=spec)


# --- what is looked at ------------------------------------------------------------------------------


def minutes_lost(played: Played, since_s: float = 0.0) -> int:
    """Minutes in which fewer than `LOST_BELOW` of the requests that came were answered as promised."""
    good: dict[int, list[bool]] = defaultdict(list)
    for record in played.records:
        if record.at_ns >= since_s * NS_PER_S:
            good[record.at_ns // (60 * NS_PER_S)].append(played.good(record))
    return sum(sum(each) < LOST_BELOW * len(each) for each in good.values())


def machine_hours(played: Played, since_s: float = 0.0) -> float:
    """Of workers that were there, ready or not."""
    assert played.scaling is not None, "it scales"
    seen = [each for each in played.scaling.seen if each.now_ns >= since_s * NS_PER_S]
    return sum((each.ready + each.pending + each.draining) * each.window_s for each in seen) / 3600


def turns(played: Played, within_s: float = 300.0) -> int:
    """The most changes of direction within so long."""
    assert played.scaling is not None, "it scales"
    moves = [(each.wall_ns / NS_PER_S, each.move) for each in played.scaling.decisions if each.move != "hold"]
    changes = [now for (_, one), (now, two) in itertools.pairwise(moves) if one != two]
    return max((sum(at <= each < at + within_s for each in changes) for at in changes), default=0)


def good_during(played: Played, begins: float, ends: float) -> float:
    """The good share of what came in that time."""
    return _good_of(played, lambda each: begins <= each.at_ns / NS_PER_S < ends)


def recovery_s(played: Played, begins: float, ends: float, step_s: float = 10.0) -> float:
    """From the spike's begin until 95 % of the requests of every further 10 s are answered as promised."""
    at = ends
    while at > begins:
        inside = [played.good(each) for each in played.records if at - step_s <= each.at_ns / NS_PER_S < at]
        if sum(inside) < LOST_BELOW * len(inside):
            break
        at -= step_s
    return at - begins


def _good_of(played: Played, which: Callable[[RequestRecord], bool]) -> float:
    found = [played.good(each) for each in played.records if which(each)]
    return sum(found) / max(1, len(found))


# --- scenarios --------------------------------------------------------------------------------------


def _spec(decider: Callable[[str, ScaleConfig], Decider] | None = None, **spec: object) -> ScalingSpec:
    made = ScalingSpec(scale=ScaleConfig(max=MAX), cold_start_s=COLD_S, season_s=DAY_S, decider=decider)
    return replace(made, **spec)  # type: ignore[arg-type]


def _day(knobs: Knobs, decider: Callable[[str, ScaleConfig], Decider] | None = None) -> Setup:
    return scaled(knobs, Mornings(2.6 * knobs.load), 2 * DAY_S, _spec(decider))


def _check_day(played: Played, baseline: Played | None) -> Sequence[Finding]:
    assert baseline is not None, "it is held against the rule without a forecast"
    return (
        answered(played), no_failures(played),
        at_most("minutes lost on the second day", minutes_lost(played, DAY_S), 3),
        at_most("machine hours, of those without a forecast",
                machine_hours(played, DAY_S) / machine_hours(baseline, DAY_S), 1.35),
    )  # fmt: skip


@scenario(_check_day, baseline=lambda knobs: _day(knobs, Reactive))
def autoscale_day(knobs: Knobs) -> Setup:
    """Are a morning's requests answered in time when a worker takes a minute or more to start?

    The first day teaches, the second one counts. Against the same rule without its forecast.
    """
    return _day(knobs)


def _spike(knobs: Knobs, decider: Callable[[str, ScaleConfig], Decider] | None = None) -> Setup:
    arrivals = Spike(0.15 * knobs.load, 20.0, BEGINS, ENDS)
    return scaled(knobs, arrivals, ENDS + 60, _spec(decider, cold_start_s=(30.0, 120.0)))


def _check_spike(played: Played, baseline: Played | None) -> Sequence[Finding]:
    assert baseline is not None, "it is held against the rule without a forecast"
    good, before = good_during(played, BEGINS, ENDS), good_during(baseline, BEGINS, ENDS)
    return (
        answered(played), no_failures(played),
        at_least("good share during the spike, of that without a forecast", good / max(before, 0.01), 0.95),
        at_most("seconds to recovery (the longest cold start and a minute)",
                recovery_s(played, BEGINS, ENDS), 180),
    )  # fmt: skip


@scenario(_check_spike, baseline=lambda knobs: _spike(knobs, Reactive))
def autoscale_spike(knobs: Knobs) -> Setup:
    """How long do twenty times as many requests at once hurt, when workers take 30 to 120 s to start?

    Admission refuses what cannot be answered in time, so what is admitted is; new workers come as many as are
    needed at once.
    """
    return _spike(knobs)


def _check_steady(played: Played, _: Played | None) -> Sequence[Finding]:
    return (
        answered(played), no_failures(played),
        at_most("changes of direction within five minutes", turns(played), 1),
        at_least("SLO attainment after ten minutes", good_during(played, 600, math.inf), 0.95),
    )  # fmt: skip


@scenario(_check_steady)
def autoscale_steady(knobs: Knobs) -> Setup:
    """Does the number of workers rest under a steady load?

    Requests come by chance, so rates over seconds swing by a third.
    """
    return scaled(knobs, Poisson(1.3 * knobs.load), 1200.0, _spec(), (4,))


def _check_drains(played: Played, _: Played | None) -> Sequence[Finding]:
    assert played.scaling is not None, "it scales"
    left = sum(each.move == "in" for each in played.scaling.decisions)
    finished = sum(each.outcome is Outcome.FINISHED for each in played.records)
    return (
        answered(played), no_failures(played),
        at_least("workers that left", left, 50),
        at_most("requests that were not answered", len(played.records) - finished, 0),
        at_least("workers that did work", len({each.worker for each in played.records}), 26),
    )  # fmt: skip


@scenario(_check_drains)
def drain_under_load(knobs: Knobs) -> Setup:
    """Is a stream ever cut when fifty workers leave under load?

    One worker comes and one leaves, at every look.
    """
    spec = ScalingSpec(scale=ScaleConfig(max=3), cold_start_s=(1.0, 4.0), decider=Swings)
    return scaled(knobs, Poisson(0.6 * knobs.load), 520.0, spec, (2,))


def _check_spot(played: Played, _: Played | None) -> Sequence[Finding]:
    assert played.scaling is not None, "it scales"
    spot = [each.pools[1].ready for each in played.scaling.seen]
    urgent = [each for each in played.records if each.band == "priority"]
    away = [each for each in urgent if each.at_ns >= TAKEN_AT_S * NS_PER_S]
    return (
        answered(played),
        at_least("spot workers before", max(spot), 2),
        at_most("spot workers at the end", spot[-1], 0),
        at_least("good share of the priority band", _good_of(played, lambda r: r.band == "priority"), 0.95),
        at_least("the same, since they were taken", sum(map(played.good, away)) / max(1, len(away)), 0.95),
        at_least("good share of all, five minutes later",
                 good_during(played, TAKEN_AT_S + 300, math.inf), 0.85),
    )  # fmt: skip


@scenario(_check_spot)
def spot_all_revoked(knobs: Knobs) -> Setup:
    """Does the priority band keep its promises when all spot machines are taken back at once?

    With half a minute's notice. As many workers are firm as the priority band needs; others are spot as long
    as there are such, and firm ones take their place.
    """
    pools = (ScalePoolConfig(name="firm", price=4.0), ScalePoolConfig(name="spot", price=1.0, spot=True))
    outage = Outage(pool="spot", at_s=TAKEN_AT_S, notice_s=30.0, lasts_s=3600.0)
    scale = ScaleConfig(max=10, min=2, pools=pools)
    spec = _spec(scale=scale, pools=("firm", "spot"), outages=(outage,))
    return scaled(knobs, Poisson(0.9 * knobs.load), 780.0, spec, (2, 3), priority=0.3)


def _check_zone(played: Played, _: Played | None) -> Sequence[Finding]:
    assert played.scaling is not None, "it scales"
    gone = played.scaling.seen[-1].pools[0]
    failed = sum(each.outcome is Outcome.FAILED for each in played.records)
    return (
        answered(played),
        at_most("failed share", failed / max(1, len(played.records)), 0),
        at_most("workers in the zone that is gone", gone.ready + gone.pending, 0),
        at_least("good share before", good_during(played, 0, TAKEN_AT_S), 0.95),
        at_least("good share, four minutes later", good_during(played, TAKEN_AT_S + 240, math.inf), 0.95),
    )  # fmt: skip


@scenario(_check_zone)
def zone_loss(knobs: Knobs) -> Setup:
    """What happens when one of three zones is lost, without notice and for good?

    Streams of its workers go on in the other zones, whose pools grow in its place.
    """
    zones = tuple(f"zone-{name}" for name in "abc")
    scale = ScaleConfig(max=12, min=3, pools=tuple(ScalePoolConfig(name=zone, max=6) for zone in zones))
    outage = Outage(pool="zone-a", at_s=TAKEN_AT_S, lasts_s=3600.0)
    spec = _spec(scale=scale, pools=zones, outages=(outage,))
    return scaled(knobs, Poisson(1.2 * knobs.load), 720.0, spec, (2, 2, 2))
