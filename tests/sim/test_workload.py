"""Traffic: same seed same requests, in order, with the rates, prefixes and mixes that were asked for."""

from collections import Counter
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import rng
from penstock.clock import NS_PER_S
from penstock.sim.traffic.prompts import Segment, SimRequest
from penstock.sim.traffic.workload import (
    Arrivals,
    Callers,
    Chat,
    Conversations,
    Diurnal,
    Gamma,
    LengthDistribution,
    Poisson,
    Spike,
    Stampede,
    agents,
    even,
    merged,
)

SOURCES = [
    Chat(arrivals=Poisson(20), callers=Callers(tenants=even(3)), system_tokens=100),
    Conversations(arrivals=Poisson(2), callers=Callers(tenants=even(2, "c"), adapters=5)),
    agents(arrivals=Gamma(0.5, cv=3.0)),
]


def reported(requests: list[SimRequest]) -> list[bytes]:
    """Requests as bytes: they have no equality of their own."""
    return [msgspec.json.encode(request) for request in requests]


@given(st.integers(0, 1000))
@settings(max_examples=10, deadline=None)
def test_the_same_seed_is_the_same_traffic_and_comes_in_order(seed: int) -> None:
    requests = list(merged(SOURCES, seed, 60))
    assert reported(requests) == reported(list(merged(SOURCES, seed, 60)))
    assert all(a.at_ns <= b.at_ns for a, b in pairwise(requests))
    assert all(0 <= request.at_ns < 60 * NS_PER_S for request in requests)
    assert len({request.id for request in requests}) == len(requests)
    assert all(segment.tokens > 0 for request in requests for segment in request.prompt)


def test_other_seeds_are_other_traffic() -> None:
    assert reported(list(merged(SOURCES, 1, 20))) != reported(list(merged(SOURCES, 2, 20)))


def test_a_source_does_not_change_when_another_joins() -> None:
    alone = list(merged(SOURCES[:1], 7, 30))
    together = [r for r in merged(SOURCES[:2], 7, 30) if r.tenant.startswith("t")]
    assert reported(alone) == reported(together)


@pytest.mark.parametrize(
    ("process", "expected"),
    [
        (Poisson(50), 50 * 400),
        (Gamma(50, cv=2.5), 50 * 400),
        (Diurnal(10, 30, day_s=400), 20 * 400),
        (Spike(10, 20, 100, 150), 10 * 350 + 200 * 50),
        (Stampede(500, 3.0), 500),
    ],
)
def test_processes_have_their_mean_rate(process: Arrivals, expected: int) -> None:
    times = list(process.times(rng.stream(3, "a"), 400))
    assert len(times) == pytest.approx(expected, rel=0.15)
    assert all(a <= b for a, b in pairwise(times))
    assert not times or (times[0] >= 0 and times[-1] < 400)


def test_bursts_are_burstier_than_poisson() -> None:
    def variation(process: Arrivals) -> float:
        gaps = [b - a for a, b in pairwise(process.times(rng.stream(1, "g"), 500))]
        mean = sum(gaps) / len(gaps)
        return (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 / mean

    assert variation(Poisson(20)) == pytest.approx(1, abs=0.1)
    assert variation(Gamma(20, cv=3)) == pytest.approx(3, abs=0.6)


def test_a_turn_repeats_what_was_said_before() -> None:
    requests = list(Conversations(arrivals=Poisson(1), turns=6, system_tokens=160).requests(5, 0, 300))
    by_session: dict[str, list[SimRequest]] = {}
    for request in requests:
        by_session.setdefault(request.session, []).append(request)
    assert max(map(len, by_session.values())) > 3
    assert len({request.prompt[0] for request in requests}) == 1, "one tenant has one system prompt"
    for turns in by_session.values():
        for before, after in pairwise(turns):
            said = Segment(before.answer, before.output_tokens)
            assert after.prompt[:-1] == (*before.prompt, said)
            assert after.at_ns > before.at_ns


def test_tenants_and_adapters_come_by_their_shares() -> None:
    callers = Callers(tenants=(("big", 9.0), ("small", 1.0)), adapters=4, zipf=1.0)
    requests = list(Chat(arrivals=Poisson(100), callers=callers).requests(1, 0, 60))
    tenants, adapters = Counter(r.tenant for r in requests), Counter(r.adapter for r in requests)
    assert tenants["big"] / len(requests) == pytest.approx(0.9, abs=0.02)
    assert adapters["lora-0"] / adapters["lora-1"] == pytest.approx(2, rel=0.15)
    assert adapters["lora-0"] / adapters["lora-3"] == pytest.approx(4, rel=0.2)


def test_lengths_keep_their_bounds_and_their_median() -> None:
    lengths, stream = LengthDistribution(100, 1.0, minimum=20, maximum=500), rng.stream(2, "l")
    drawn = sorted(lengths.draw(stream) for _ in range(2000))
    assert drawn[0] >= 20
    assert drawn[-1] <= 500
    assert drawn[1000] == pytest.approx(100, rel=0.1)
    assert LengthDistribution(64, 0).draw(stream) == 64
