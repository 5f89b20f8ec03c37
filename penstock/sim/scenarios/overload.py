"""Scenarios of overload: spikes, tenants of unequal size, priority, quotas, downgrade, memory."""

from collections.abc import Sequence
from dataclasses import replace

from penstock.clock import NS_PER_S
from penstock.policy.flow import Outcome
from penstock.policy.tenant import Tenant
from penstock.sim.report.figures import Objective
from penstock.sim.scenarios.scenario import (
    ANSWER,
    QUESTION,
    WORKER_RPS,
    Finding,
    answered,
    at_least,
    at_most,
    chat,
    finished_share,
    good_share,
    no_failures,
    pool,
    scenario,
    setup,
    share_good,
    ttft_p95,
)
from penstock.sim.scenarios.setup import Knobs, Played, Setup, with_settings
from penstock.sim.traffic.prompts import RequestRecord
from penstock.sim.traffic.workload import (
    Callers,
    Chat,
    Gamma,
    LengthDistribution,
    Poisson,
    Spike,
    Stampede,
    even,
)
from penstock.types import TenantId


def _viral(knobs: Knobs, factor: float) -> Setup:
    source = replace(
        chat(knobs, 0.5, 2), arrivals=Spike(WORKER_RPS * 2 * 0.5 * knobs.load, factor, 15.0, 25.0)
    )
    source = replace(source, callers=replace(source.callers, patience_s=20.0))
    return setup(knobs, [pool(knobs, workers=2)], [source], seconds=60)


def _quiet(knobs: Knobs) -> Setup:
    return _viral(knobs, 1.0)


def _check_spike(played: Played, baseline: Played | None) -> Sequence[Finding]:
    assert baseline is not None
    records = played.records
    late = [r for r in records if r.at_ns > 45 * NS_PER_S]
    good_late = sum(played.good(r) for r in late) / max(1, len(late))
    (rps, tps), (usual_rps, usual_tps) = _good_during(played), _good_during(baseline)
    return (
        answered(played), no_failures(played),
        at_least("goodput during the spike, requests/s, of the usual", rps / usual_rps, 1.3),
        at_least("goodput during the spike, tokens/s, of the usual", tps / usual_tps, 1.0),
        at_least("of what was answered during the spike, what was in time", _in_time_during(played), 0.9),
        at_least("good share of requests 20 s after the spike", good_late, 0.9),
    )  # fmt: skip


def _answered_during(played: Played) -> list[RequestRecord]:
    """Answers that ended while the spike lasted, after its first second."""
    begins, ends = 16 * NS_PER_S, 26 * NS_PER_S
    return [r for r in played.records if begins < r.end_ns <= ends and r.outcome is Outcome.FINISHED]


def _good_during(played: Played) -> tuple[float, float]:
    """Requests, and their tokens, per second."""
    good = [record for record in _answered_during(played) if played.good(record)]
    return len(good) / 10, sum(record.completion_tokens for record in good) / 10


def _in_time_during(played: Played) -> float:
    records = _answered_during(played)
    return sum(played.good(record) for record in records) / max(1, len(records))


@scenario(_check_spike, baseline=_quiet)
def spike_20x(knobs: Knobs) -> Setup:
    """How do you handle a 20x viral spike?

    Everybody sends 20 times as much for 10 seconds, and leaves after 20 s without a token. The queue holds
    what can still be answered, turns the rest away at once with a time to come back, works at full speed for
    those it took, and is back to normal soon after.
    """
    return _viral(knobs, 20.0)


def _noisy(knobs: Knobs, factor: float) -> Setup:
    others = chat(knobs, 0.45, 3, name="others", callers=Callers(tenants=even(9, "small-")))
    big = replace(
        chat(knobs, 0.05, 3, name="big", callers=Callers(tenants=(("big", 1.0),), patience_s=30.0)),
        arrivals=Poisson(WORKER_RPS * 3 * 0.05 * factor * knobs.load),
    )
    return setup(knobs, [pool(knobs, workers=3)], [others, big], seconds=40)


def _noisy_quiet(knobs: Knobs) -> Setup:
    return _noisy(knobs, 1.0)


def _check_noisy(played: Played, baseline: Played | None) -> Sequence[Finding]:
    assert baseline is not None

    def others(record: RequestRecord) -> bool:
        return record.tenant != "big"

    ratio = ttft_p95(played.records, others) / ttft_p95(baseline.records, others)
    before = share_good(baseline.figures, lambda name: name != "big")
    return (
        answered(played), no_failures(played),
        at_most("the others' TTFT p95, times what it was", ratio, 3.0),
        at_least("the others' good share, of what it was",
            share_good(played.figures, lambda n: n != "big") / before, 0.9),
        at_least("fairness (Jain)", played.figures.jain, 0.85),
    )  # fmt: skip


@scenario(_check_noisy, baseline=_noisy_quiet)
def noisy_tenant(knobs: Knobs) -> Setup:
    """One tenant sends 20 times as much: what do the other nine notice?

    Tenants have their own lines in the queue, served by what each has got; some rows are kept free for the
    others.
    """
    return _noisy(knobs, 20.0)


_NEIGHBOUR_S = 10
"""When the neighbour's streams come: within a second of this."""


def _flooded(knobs: Knobs, streams: int) -> Setup:
    polite = Chat(
        name="polite", arrivals=Gamma(knobs.load, cv=0.1), callers=Callers(tenants=(("polite", 1.0),)),
        prompt=LengthDistribution(100, 0.3, maximum=256), output=LengthDistribution(8, 0.0),
    )  # fmt: skip
    flood = Chat(
        name="flood", arrivals=Stampede(streams, float(_NEIGHBOUR_S)),
        callers=Callers(tenants=(("flood", 1.0),)), prompt=LengthDistribution(32, 0.0),
        output=LengthDistribution(2000, 0.0),
    )  # fmt: skip
    return setup(knobs, [pool(knobs, workers=1)], [polite, flood], seconds=60)


def _check_flood(played: Played, baseline: Played | None) -> Sequence[Finding]:
    assert baseline is not None, "it is compared with the run without a neighbour"

    def polite(record: RequestRecord) -> bool:
        return record.tenant == "polite" and record.at_ns > (_NEIGHBOUR_S + 1) * NS_PER_S

    alone_ms = ttft_p95(baseline.records, polite)
    flood = [record for record in played.records if record.tenant == "flood" and record.first_ns >= 0]
    ended_s = min((record.end_ns / NS_PER_S for record in flood), default=0.0)
    return (
        answered(played), no_failures(played),
        at_least("streams of the neighbour that began", len(flood), 32),
        at_least("seconds until its first stream ended", ended_s, 40.0),
        at_least("the polite tenant's finished share", finished_share(played, polite), 1.0),
        at_most("its TTFT p95, ms: 1.5 times that of alone, or 200 ms more",
            ttft_p95(played.records, polite), max(1.5 * alone_ms, alone_ms + 200)),
    )  # fmt: skip


@scenario(_check_flood, baseline=lambda knobs: _flooded(knobs, 0))
def neighbour_flood(knobs: Knobs) -> Setup:
    """One tenant's streams of 2,000 tokens have every row: does another tenant wait for one of them to end?

    Twice as many streams as there are rows come at once. A request of a tenant that runs nothing is started
    beyond the slots, and a stream yields its row at a token boundary. For comparison: the tenant alone.
    """
    return _flooded(knobs, 64)


def _check_large(played: Played, _: Played | None) -> Sequence[Finding]:
    figures = played.figures
    return (
        answered(played), no_failures(played),
        at_least("small tenants' good share", share_good(figures, lambda name: name.startswith("small")),
            0.85),
        at_least("large tenants' finished share",
            finished_share(played, lambda r: r.tenant.startswith("large")), 0.5),
        at_least("fairness (Jain)", figures.jain, 0.85),
    )  # fmt: skip


@scenario(_check_large)
def large_tenants(knobs: Knobs) -> Setup:
    """How do you isolate large-tenant traffic from small tenants?

    Two tenants send 3,000-token prompts, all the time more than their share; eight small ones ask short
    questions. Service is counted in tokens, so a large prompt uses up a large share.
    """
    small = chat(knobs, 0.3, 3, name="small", callers=Callers(tenants=even(8, "small-")))
    large = Chat(
        name="large", arrivals=Poisson(1.6 * knobs.load),
        callers=Callers(tenants=even(2, "large-"), patience_s=60.0),
        prompt=LengthDistribution(3000, 0.3, maximum=8192), output=ANSWER,
    )  # fmt: skip
    return setup(
        knobs,
        [pool(knobs, workers=3)],
        [small, large],
        seconds=40,
        objective=Objective(ttft_ms=3000, tpot_ms=200),
    )


def _check_priority(played: Played, _: Played | None) -> Sequence[Finding]:
    figures = played.figures
    return (
        answered(played), no_failures(played),
        at_least("priority tenants' good share", share_good(figures, lambda name: name.startswith("paid")),
            0.9),
        at_least("default tenants' finished share",
            finished_share(played, lambda r: r.tenant.startswith("free")), 0.2),
    )  # fmt: skip


@scenario(_check_priority)
def priority_overload(knobs: Knobs) -> Setup:
    """Twice the capacity is asked for: do the paying tenants notice?

    A third is of the priority band, which goes first, in the gateway's queue and in the engines';
    the default band keeps its floor of a tenth and never starves.
    """
    paid = chat(knobs, 0.6, 2, name="paid", callers=Callers(tenants=even(3, "paid-"), band="priority"))
    free = chat(knobs, 1.4, 2, name="free", callers=Callers(tenants=even(6, "free-"), patience_s=20.0))
    return setup(knobs, [pool(knobs, workers=2)], [paid, free], seconds=40)


def _check_quota(played: Played, _: Played | None) -> Sequence[Finding]:
    rejected = [record for record in played.records if record.outcome is Outcome.REJECTED]
    return (
        answered(played), no_failures(played),
        at_least("the spiking tenant's refused requests", sum(r.tenant == "big" for r in rejected), 1),
        at_most("other tenants' refused requests", sum(r.tenant != "big" for r in rejected), 0),
        at_least("other tenants' good share", share_good(played.figures, lambda name: name != "big"), 0.97),
    )  # fmt: skip


@scenario(_check_quota)
def tenant_quota(knobs: Knobs) -> Setup:
    """A tenant spikes traffic: does its quota protect the other tenants?

    It has 20,000 tokens a minute and sends ten times as many: 429 for it alone.
    """
    made = _noisy(knobs, 10.0)
    big = Tenant(id=TenantId("big"), tokens_per_minute=20_000, cache_salt=b"big", fairness_key="big")
    return replace(made, world=replace(made.world, tenants={"big": big}))


def _check_downgrade(played: Played, _: Played | None) -> Sequence[Finding]:
    diverted = [r for r in played.records if r.model == "small"]
    strict = [r for r in played.records if r.tenant.startswith("strict")]
    return (
        answered(played), no_failures(played),
        at_least("requests that the smaller model answered", len(diverted), 20),
        at_most("of those, from tenants that never want that",
            sum(r.tenant.startswith("strict") for r in diverted), 0),
        at_least("SLO attainment of those that allow it",
            good_share(played, lambda r: not r.tenant.startswith("strict")), 0.8),
        at_least("strict requests", len(strict), 1),
    )  # fmt: skip


@scenario(_check_downgrade)
def downgrade(knobs: Knobs) -> Setup:
    """The large model is saturated: does a smaller one take over, for those who allow it only?

    Half as much again as the large model can do; a request that would be late goes to the small one, says so,
    and stays inside of its tenant's rules.
    """
    knobs = with_settings(
        knobs,
        {
            "routing.models": "[{model: model, fallback: small}, {model: small}]",
            "admission.ttft_target_ms": "1200",
        },
    )
    tenants = {
        name: Tenant(id=TenantId(name), degrade="never", cache_salt=name.encode(), fairness_key=name)
        for name, _ in even(2, "strict-")
    }
    callers = Callers(tenants=(*even(6, "free-"), *even(2, "strict-")))
    return setup(
        knobs, [pool(knobs, workers=2), pool(knobs, workers=2, name="small", shape="0.5b")],
        [chat(knobs, 1.6, 2, callers=callers)], seconds=60, tenants=tenants,
        objective=Objective(ttft_ms=5000, tpot_ms=150),
    )  # fmt: skip


def _check_long(played: Played, _: Played | None) -> Sequence[Finding]:
    return (
        answered(played), no_failures(played),
        at_least("short requests' good share", good_share(played, lambda r: r.tenant.startswith("small")),
            0.75),
        at_least("long requests' finished or refused share", _ended_clean(played), 1.0),
    )  # fmt: skip


def _ended_clean(played: Played) -> float:
    found = [record for record in played.records if record.tenant == "long"]
    clean = (Outcome.FINISHED, Outcome.REJECTED, Outcome.EVICTED, Outcome.CANCELLED)
    return sum(record.outcome in clean for record in found) / max(1, len(found))


@scenario(_check_long)
def long_context(knobs: Knobs) -> Setup:
    """One worker would run out of memory under long contexts: is that refused or routed before it happens?

    Prompts of up to 30,000 tokens beside short ones, on caches of 45,000 tokens. A request starts where its
    blocks fit; none ever fails for memory.
    """
    small = chat(knobs, 0.3, 3, name="small", callers=Callers(tenants=even(6, "small-")))
    long = Chat(
        name="long", arrivals=Poisson(0.12 * knobs.load), callers=Callers(tenants=(("long", 1.0),)),
        prompt=LengthDistribution(14_000, 0.5, minimum=6000, maximum=30_000), output=ANSWER,
    )  # fmt: skip
    return setup(
        knobs,
        [pool(knobs, workers=3)],
        [small, long],
        seconds=60,
        objective=Objective(ttft_ms=4000, tpot_ms=250),
    )


def _check_kv_full(played: Played, _: Played | None) -> Sequence[Finding]:
    lost = [record for record in played.records if record.outcome is not Outcome.FINISHED]
    shed = [record for record in lost if record.outcome is Outcome.EVICTED and record.reason == "memory"]
    return (
        answered(played), no_failures(played),
        at_least("priority requests' good share", good_share(played, lambda r: r.band == "priority"), 0.9),
        at_least("requests that were shed for memory", len(shed), 1),
        at_most("of those, such as are no long answers of the lowest band",
            sum(not _is_long(r) for r in shed), 0),
        at_most("requests that were lost in any other way", len(lost) - len(shed), 0),
    )  # fmt: skip


def _is_long(record: RequestRecord) -> bool:
    """Of those whose answers fill the cache."""
    return record.band == "bulk" and record.tenant.startswith("bulk-")


@scenario(_check_kv_full)
def kv_full(knobs: Knobs) -> Setup:
    """The KV cache fills: is low-priority and long-output traffic shed, and nothing else?

    Bulk tenants write long answers until memory is short, and others of their band write short ones; the
    priority band keeps its pace. The request of the lowest band with the longest answer still to come gives
    way. Nothing is promised, so that only memory is short.
    """
    knobs = with_settings(
        knobs, {"admission.ttft_target_ms": "0", "admission.tpot_target_ms": "0", "admission.targets": "[]"}
    )
    paid = chat(knobs, 0.3, 2, name="paid", callers=Callers(tenants=even(3, "paid-"), band="priority"))
    bulk = Chat(
        name="bulk", arrivals=Poisson(1.3 * knobs.load),
        callers=Callers(tenants=even(3, "bulk-"), band="bulk"),
        prompt=LengthDistribution(1500, 0.4, maximum=4096),
        output=LengthDistribution(1000, 0.3, maximum=1500),
    )  # fmt: skip
    brief = Chat(
        name="brief", arrivals=Poisson(0.5 * knobs.load),
        callers=Callers(tenants=even(3, "brief-"), band="bulk"), prompt=QUESTION,
        output=LengthDistribution(40, 0.4, maximum=80),
    )  # fmt: skip
    return setup(
        knobs,
        [pool(knobs, workers=2)],
        [paid, bulk, brief],
        seconds=40,
        objective=Objective(ttft_ms=3000, tpot_ms=250),
    )
