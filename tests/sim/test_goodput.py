"""Goodput with default settings: requests per second that were answered as promised, at multiples of what can
be served.
"""

import functools
from collections import Counter

import pytest
from mixed_load import (
    BANDS,
    DRAINED_S,
    LONG,
    TIMES,
    drained_s,
    good_rate,
    goodput_of,
    mixed,
)

from penstock.clock import NS_PER_S
from penstock.config.flow import QueueConfig
from penstock.policy.flow import Outcome
from penstock.sim.scenarios.setup import Knobs, Played, play


def seeds(times: float) -> tuple[int, ...]:
    """Twenty times the load is as many requests as all the rest: once is enough."""
    return (1,) if times >= 20 else (1, 2)


@functools.cache
def run(times: float, seed: int = 1, retries: int = 0) -> Played:
    return play(mixed(Knobs(load=times), retries=retries), seed)


def mean(times: float, unit: int) -> float:
    found = [goodput_of(run(times, seed))[unit] for seed in seeds(times)]
    return sum(found) / len(found)


def test_goodput_holds_whatever_is_offered() -> None:
    for unit in (0, 1):
        knee = mean(1, unit)
        for times, share in TIMES.items():
            assert mean(times, unit) >= share * knee, f"{times}x: {mean(times, unit)} of {knee}"


def test_most_that_is_answered_is_in_time_whatever_is_offered() -> None:
    for times in (1, *TIMES):
        finished, in_time = 0, 0
        for seed in seeds(times):
            found = [r for r in run(times, seed).records if r.outcome is Outcome.FINISHED]
            finished += len(found)
            in_time += sum(run(times, seed).good(record) for record in found)
        assert in_time >= 0.75 * finished, f"{times}x: {in_time} of {finished}"


def test_hopeless_requests_leave_and_the_queue_is_empty_soon_after_the_load() -> None:
    for times in TIMES:
        assert drained_s(run(times)) <= DRAINED_S, times
        refused = [r for r in run(times).records if r.outcome is not Outcome.FINISHED]
        assert all(r.retry_after_ns > 0 for r in refused), "each is told when to come back"


def test_no_band_is_starved_and_no_length_is() -> None:
    played = run(20)
    rates = {
        band: good_rate(played, lambda r, band=band: r.tenant.startswith(band))
        for band in ("priority", "default", "bulk")
    }
    assert all(rate > 0 for rate in rates.values()), rates
    assert rates["priority"] > rates["default"]
    done = [r for r in played.records if played.good(r)]
    assert any(r.prompt_tokens >= LONG for r in done)
    assert any(r.prompt_tokens < LONG / 4 for r in done)


@pytest.mark.parametrize("times", TIMES)
def test_every_band_has_its_floor_of_what_is_answered_in_time(times: float) -> None:
    floors = {band.name: band.floor for band in QueueConfig().bands}
    good = Counter[str]()
    for seed in seeds(times):
        played = run(times, seed)
        ended = [r for r in played.records if r.end_ns <= played.setup.seconds * NS_PER_S]
        good.update(record.band or "default" for record in ended if played.good(record))
    for band, _ in BANDS:
        name = band or "default"
        assert good[name] >= 0.9 * floors[name] * good.total(), (name, good)


@pytest.mark.parametrize("times", [5, 20])
def test_every_band_and_every_tenant_gets_something_in_time(times: float) -> None:
    played = run(times)
    good = Counter(record.tenant for record in played.records if played.good(record))
    tenants = {record.tenant for record in played.records}
    assert len(tenants) == 15
    assert set(good) == tenants, f"nothing in time: {sorted(tenants - set(good))}"


def test_priority_alone_above_the_capacity_has_a_bound_too() -> None:
    alone = play(mixed(Knobs(load=20), bands=(("priority", 1.0),)), 1)
    finished = [r for r in alone.records if r.outcome is Outcome.FINISHED]
    assert sum(alone.good(record) for record in finished) >= 0.75 * len(finished)
    assert drained_s(alone) <= DRAINED_S
