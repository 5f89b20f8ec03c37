"""Scenarios in which workers fail, slow down, come and go: crashes, gray failures, bad rollouts, a lost
region, poison requests, slow moments that hedges avoid, cold starts, restarts, spot capacity, and all clients
back at once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec

from penstock.clock import NS_PER_S
from penstock.config.routing import ModelRoute, RoutingConfig
from penstock.policy.flow import Outcome
from penstock.sim.report.figures import Objective, Spread
from penstock.sim.scenarios.scenario import (
    ANSWER,
    WORKER_RPS,
    Check,
    Finding,
    answered,
    at_least,
    at_most,
    chat,
    no_failures,
    pool,
    scenario,
    setup,
)
from penstock.sim.scenarios.setup import Knobs, Played, Setup
from penstock.sim.traffic.prompts import SimRequest
from penstock.sim.traffic.workload import (
    Callers,
    Conversations,
    LengthDistribution,
    Poisson,
    Spike,
    Stampede,
    TrafficSource,
    even,
    merged,
)
from penstock.sim.world.faults import FaultKind, InjectedFault

BEGINS, ENDS, RECOVERED = 15, 30, 40
"""Seconds: when the fault begins and is over, and from when on everything must be well again."""


def fault(kind: FaultKind, *, target: int = 0, amount: float = 1.0, until: int = ENDS) -> InjectedFault:
    """A failure at the usual time; with `until` 0 nothing ends it."""
    return InjectedFault(kind, BEGINS * NS_PER_S, until * NS_PER_S, target, amount)


def late_share(played: Played) -> float:
    """The good share of what came after everything should be well again."""
    late = [record for record in played.records if record.at_ns > RECOVERED * NS_PER_S]
    return sum(played.good(record) for record in late) / max(1, len(late))


def failed_share(played: Played) -> float:
    """Requests that ended with an error of ours."""
    return sum(record.outcome is Outcome.FAILED for record in played.records) / max(1, len(played.records))


def _check_crash(played: Played, _: Played | None) -> Sequence[Finding]:
    return (
        answered(played),
        at_most("failed share", failed_share(played), 0),
        at_least("streams that moved", sum(record.migrations > 0 for record in played.records), 1),
        at_least("good share of requests that came 10 s after it was replaced", late_share(played), 0.95),
    )


@scenario(_check_crash)
def worker_crash(knobs: Knobs) -> Setup:
    """One of three workers crashes: what is lost, and is the rest served?

    Requests without a token start elsewhere, streams move and continue behind their last token; the queue
    holds what the two others cannot take at once; a new worker comes.
    """
    source = chat(knobs, 0.55, 3, callers=Callers(tenants=even(8), patience_s=30.0))
    faults = [fault(FaultKind.WORKER_CRASH)]
    return setup(knobs, [pool(knobs, workers=3, cold_start_s=5)], [source], seconds=55, faults=faults)


def _check_external_crash(played: Played, baseline: Played | None) -> Sequence[Finding]:
    assert baseline is not None, "it is compared with the run with engines that return text only"
    moved = [record for record in played.records if record.migrations]
    asked = merged(played.setup.sources, played.seed, played.setup.seconds)
    lengths = {request.id: request.output_tokens for request in asked}
    return (
        answered(played),
        at_most("failed share", failed_share(played), 0),
        at_least("streams that moved", len(moved), 1),
        at_most("moves of one stream", max((record.migrations for record in moved), default=0), 1),
        at_most(
            "moved streams with other tokens than their whole answer's",
            sum(r.outcome is Outcome.FINISHED and r.completion_tokens != lengths[r.id] for r in moved), 0,
        ),
        at_least("failed share where engines return text only", failed_share(baseline), 0.005),
        at_most("streams that moved there", sum(r.migrations for r in baseline.records), 0),
        at_least("good share of requests that came 10 s after it was replaced", late_share(played), 0.95),
    )  # fmt: skip


def _external_crash(knobs: Knobs, *, resumes: bool) -> Setup:
    source = chat(knobs, 0.55, 3, callers=Callers(tenants=even(8), patience_s=30.0))
    main = pool(knobs, workers=3, cold_start_s=5)
    main = replace(main, worker=replace(main.worker, is_external=True, resumes=resumes))
    return setup(knobs, [main], [source], seconds=55, faults=[fault(FaultKind.WORKER_CRASH)])


@scenario(_check_external_crash, baseline=lambda knobs: _external_crash(knobs, resumes=False))
def external_crash(knobs: Knobs) -> Setup:
    """One of three engines of others (vLLM, SGLang) dies in the middle of its streams: do they continue?

    They return token ids, so each stream continues on another one behind its last token, once, and counts
    once. For comparison: the same with engines that return text only, whose streams end with an error.
    """
    return _external_crash(knobs, resumes=True)


def _check_slow(played: Played, _: Played | None) -> Sequence[Finding]:
    figures = played.figures
    return (
        answered(played),
        at_most("failed requests", figures.outcomes.get(Outcome.FAILED.value, 0), 0),
        at_least("SLO attainment, the slow time included", figures.attainment, 0.7),
        at_least("good share of requests that came 10 s later", late_share(played), 0.95),
    )


@scenario(_check_slow)
def slow_worker(knobs: Knobs) -> Setup:
    """One of four workers (a provider's route) becomes five times slower: do others take over?

    A slow worker keeps its rows longer, so it is given less: late binding gives work to workers with room.
    """
    source = chat(knobs, 0.4, 4, callers=Callers(tenants=even(8), patience_s=30.0))
    faults = [fault(FaultKind.WORKER_SLOW, amount=5.0)]
    return setup(knobs, [pool(knobs, workers=4)], [source], seconds=55, faults=faults)


def _check_slow_route(played: Played, baseline: Played | None) -> Sequence[Finding]:
    assert baseline is not None, "it is compared with the run without a fallback"
    during = [r for r in played.records if BEGINS + 5 <= r.at_ns / NS_PER_S < ENDS]
    alone = [r for r in baseline.records if BEGINS + 5 <= r.at_ns / NS_PER_S < ENDS]
    good = sum(played.good(record) for record in during) / max(1, len(during))
    # The last probe that fails may begin just before the end: its breaker then waits for up to 12 s.
    back = [record for record in played.records if record.at_ns > (ENDS + 15) * NS_PER_S]
    return (
        answered(played),
        at_most("failed requests", played.figures.outcomes.get(Outcome.FAILED.value, 0), 0),
        at_least("good share of requests from 5 s after it became slow", good, 0.9),
        at_most("the same without a fallback", sum(map(baseline.good, alone)) / max(1, len(alone)), 0.3),
        at_least("good share of requests that came 10 s after it was well", late_share(played), 0.95),
        at_least(
            "share that its own model answered, from 15 s after it was well",
            sum(record.model == "model" for record in back) / max(1, len(back)), 0.95,
        ),
    )  # fmt: skip


def _slow_route(knobs: Knobs, *, fallback: str) -> Setup:
    routing = RoutingConfig(models=(ModelRoute(model="model", fallback=fallback),))
    config = msgspec.structs.replace(knobs.config, routing=routing)
    knobs = msgspec.structs.replace(knobs, config=config)
    source = chat(knobs, 0.5, 1, callers=Callers(tenants=even(4), patience_s=30.0))
    pools = [pool(knobs, workers=1), pool(knobs, workers=1, name="spare")]
    pools[0] = replace(pools[0], worker=replace(pools[0].worker, is_external=True))
    faults = [fault(FaultKind.WORKER_SLOW, amount=40.0)]
    return setup(knobs, pools, [source], seconds=60, faults=faults)


@scenario(_check_slow_route, baseline=lambda knobs: _slow_route(knobs, fallback=""))
def slow_route(knobs: Knobs) -> Setup:
    """The only worker of a model, a provider's, becomes forty times slower: is it waited for?

    It has no peers, so it is held against its own history: attempts are given up, its breaker opens, and the
    fallback model answers; probes find when it is well again. For comparison: the same without a fallback.
    """
    return _slow_route(knobs, fallback="spare")


def _check_gray(played: Played, _: Played | None) -> Sequence[Finding]:
    return (
        answered(played),
        at_most("failed share", failed_share(played), 0.03),
        at_least("good share of requests that came 10 s later", late_share(played), 0.95),
    )


@scenario(_check_gray)
def gray_failure(knobs: Knobs) -> Setup:
    """One of four workers says that all is well and fails every request at once: does it swallow the traffic?

    A worker that fails fast always has room, so it would get nearly everything. Its breaker opens after ten
    attempts; those are tried again elsewhere while the retry budget lasts; probes find when it is well again.
    """
    source = chat(knobs, 0.4, 4, callers=Callers(tenants=even(8), patience_s=30.0))
    faults = [fault(FaultKind.GRAY)]
    return setup(knobs, [pool(knobs, workers=4)], [source], seconds=55, faults=faults)


def _check_rollout(played: Played, _: Played | None) -> Sequence[Finding]:
    late = [record for record in played.records if record.at_ns > RECOVERED * NS_PER_S]
    bad = {f"model-{number}" for number in range(0, played.setup.world.pools[0].count, 2)}
    return (
        answered(played),
        at_most("failed share", failed_share(played), 0),
        at_least("SLO attainment, the bad time included", played.figures.attainment, 0.9),
        at_least("good share of requests that came 25 s after it began", late_share(played), 0.9),
        at_most(
            "share of those that the bad half got",
            sum(record.worker in bad for record in late) / max(1, len(late)), 0.25,
        ),
    )  # fmt: skip


@scenario(_check_rollout)
def rollout_bad(knobs: Knobs) -> Setup:
    """What is the model rollout pattern, and what if the new version is four times slower?

    Half of the workers get it, and nothing takes it back. A slow worker keeps its rows longer and has more to
    do, so new requests go to the other half, and the damage is bounded. (Versions that are tried, and taken
    back, are in versions.py.)
    """
    source = chat(knobs, 0.4, 4, callers=Callers(tenants=even(8), patience_s=30.0))
    faults = [fault(FaultKind.BAD_ROLLOUT, amount=4.0, until=0)]
    return setup(knobs, [pool(knobs, workers=4)], [source], seconds=55, faults=faults)


@dataclass(slots=True, frozen=True)
class InRegion:
    """A source whose clients are in one region."""

    source: TrafficSource
    region: str

    @property
    def name(self) -> str:
        """See `TrafficSource`."""
        return f"{self.source.name}@{self.region}"

    def requests(self, seed: int, first: int, seconds: float) -> Iterator[SimRequest]:
        """See `TrafficSource`."""
        for request in self.source.requests(seed, first, seconds):
            yield msgspec.structs.replace(request, region=self.region)


def _check_region(played: Played, _: Played | None) -> Sequence[Finding]:
    during = [r for r in played.records if BEGINS + 3 <= r.at_ns / NS_PER_S < ENDS]
    done = sum(record.outcome is Outcome.FINISHED for record in during) / max(1, len(during))
    return (
        answered(played),
        at_least("answered share of requests while the region was gone", done, 0.8),
        at_least("good share of requests that came 10 s after it was back", late_share(played), 0.9),
    )


@scenario(_check_region)
def region_failover(knobs: Knobs) -> Setup:
    """What's the multi-region failover plan: one of two regions is lost for 15 seconds?

    Every region can serve by itself and runs below half of its load, so the other takes everything; clients
    that lost their answer ask again there, and go back when the region is back.
    """
    places = ("east", "west")
    callers = Callers(tenants=even(8), patience_s=40.0)
    sources = [
        InRegion(chat(knobs, 0.4, 2, name=f"chat-{place}", callers=callers), place) for place in places
    ]
    pools = [replace(pool(knobs, workers=2, cold_start_s=2), region=place) for place in places]
    faults = [fault(FaultKind.REGION_LOSS)]
    return setup(
        knobs, pools, sources, seconds=55, faults=faults, objective=Objective(ttft_ms=3000, tpot_ms=150)
    )


def _check_poison(played: Played, _: Played | None) -> Sequence[Finding]:
    found = [record for record in played.records if record.reason == "quarantine"]
    return (
        answered(played),
        at_least("requests that were found to be the cause", len(found), 1),
        at_most("workers that it took", max((record.attempts for record in found), default=0), 2),
        at_most("requests that ended with an error of ours", failed_share(played) * len(played.records), 0),
        at_least("good share of requests that came later", late_share(played), 0.95),
    )


@scenario(_check_poison)
def poison_request(knobs: Knobs) -> Setup:
    """One request brings down every worker that computes it: does it take the fleet with it?

    A request that was starting when the first worker died starts again alone, so the second death has one
    cause, which is refused. Streams that ran there too move and continue, and workers come back.
    """
    source = chat(knobs, 0.5, 4, callers=Callers(tenants=even(8), patience_s=30.0))
    faults = [fault(FaultKind.POISON, target=100)]
    return setup(knobs, [pool(knobs, workers=4, cold_start_s=5)], [source], seconds=55, faults=faults)


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
        InjectedFault(
            FaultKind.WORKER_SLOW, int(at * NS_PER_S), int((at + _LASTS) * NS_PER_S), 5 * number, 20.0
        )
        for number, at in enumerate(5 + _EVERY * i for i in range(int((seconds - 8) / _EVERY)))
    ]
    return setup(knobs, [pool(knobs, workers=8)], [source], seconds=_SECONDS, faults=faults)


def _unhedged(knobs: Knobs) -> Setup:
    return _spells(knobs, hedged=False)


def _p99_ms(played: Played) -> float:
    return Spread.of([record.ttft_ns for record in played.records if record.first_ns >= 0]).p99


def _check(played: Played, baseline: Played | None) -> Sequence[Finding]:
    assert baseline is not None
    starts = sum(record.attempts for record in played.records)
    extra = sum(max(0, record.attempts - 1) for record in played.records)
    return (
        answered(played),
        no_failures(played),
        at_most(
            "p99 of the time to first token over that without hedges",
            _p99_ms(played) / _p99_ms(baseline),
            0.9,
        ),
        at_most("second attempts per start", extra / max(1, starts), 0.02),
    )


@scenario(_check, baseline=_unhedged)
def slow_spells(knobs: Knobs) -> Setup:
    """One of eight workers after the other is twenty times slower for a second and a half: who waits for it?

    Breakers learn too late of what is over so soon. A request that has no output for longer than 98 of 100
    requests like it is started on a second worker too (`health.hedge_share`), at most two in a hundred.
    """
    return _spells(knobs, hedged=True)


def _check_recovers(after_s: float) -> Check:
    def check(played: Played, _: Played | None) -> Sequence[Finding]:
        late = [record for record in played.records if record.at_ns > after_s * NS_PER_S]
        good = sum(played.good(record) for record in late) / max(1, len(late))
        return (
            answered(played), no_failures(played),
            at_least(f"good share of requests after {after_s:g} s", good, 0.9),
        )  # fmt: skip

    return check


@scenario(_check_recovers(75))
def cold_start(knobs: Knobs) -> Setup:
    """Load doubles and a new worker takes 30 seconds to load: do requests wait, or time out?

    The queue holds them (no client leaves within 40 s); the fleet grows by schedule, as an autoscaler would
    ask for it 5 s after the step.
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

    Two of four workers drain at 15 s, others are there 20 s later; running requests continue, waiting ones
    move elsewhere.
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
