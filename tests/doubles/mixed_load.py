"""The workload that goodput is asked of, and what is asked: with default settings, at multiples of what can
be served (tests/sim/test_goodput.py).
"""

from collections.abc import Callable, Mapping, Sequence

from penstock.clock import NS_PER_S
from penstock.sim.report.figures import Objective
from penstock.sim.scenarios.scenario import ANSWER, WORKER_RPS, pool, setup
from penstock.sim.scenarios.setup import Knobs, Played, Setup
from penstock.sim.traffic.prompts import RequestRecord
from penstock.sim.traffic.workload import Callers, Chat, LengthDistribution, Poisson, TrafficSource, even

WORKERS = 3
KNEE = 0.95
"""The load, in `WORKER_RPS` per worker, from which on more of it is not answered more."""
SECONDS = 30.0
TIMES: Mapping[float, float] = {2: 0.95, 5: 0.90, 20: 0.85}
"""Times the knee, and the share of the peak that goodput must have there."""
DRAINED_S = 10.0
PROMPTS = LengthDistribution(250, 1.0, maximum=8192)
LONG = 1024
"""Prompts from so many tokens on are long."""
BANDS = (("priority", 0.25), ("", 0.6), ("bulk", 0.15))
"""Of the requests; all have prompts and answers of all lengths."""


def mixed(knobs: Knobs, *, bands: Sequence[tuple[str, float]] = BANDS, retries: int = 0) -> Setup:
    """Three bands of tenants of several sizes; with `retries` half of the clients come again when told, and
    half after a second.
    """
    rate = WORKER_RPS * WORKERS * KNEE * knobs.load
    sources: list[TrafficSource] = []
    for band, share in bands:
        name = band or "default"
        tenants = (*even(4, f"{name}-"), (f"{name}-big", 4.0))
        for part, retry_s in (("obeys", 0.0), ("hurries", 1.0)):
            callers = Callers(tenants=tenants, band=band, retries=retries, retry_s=retry_s)
            sources.append(
                Chat(
                    name=f"{name}-{part}", arrivals=Poisson(rate * share / 2), callers=callers,
                    prompt=PROMPTS, output=ANSWER, system_tokens=160,
                )
            )  # fmt: skip
    return setup(knobs, [pool(knobs, workers=WORKERS)], sources, seconds=SECONDS, objective=Objective())


def goodput_of(played: Played) -> tuple[float, float]:
    """Requests per second that met both promises while the load lasted, and their output tokens."""
    seconds = played.setup.seconds
    good = [r for r in played.records if r.end_ns <= seconds * NS_PER_S and played.good(r)]
    return len(good) / seconds, sum(r.completion_tokens for r in good) / seconds


def drained_s(played: Played) -> float:
    """How long after the load the last first token came, or the last request that waited left: streams may
    continue.
    """
    ends = (r.at_ns + r.queue_ns if r.first_ns >= 0 else r.end_ns for r in played.records if not r.is_retry)
    return max(0.0, max(ends, default=0) / NS_PER_S - played.setup.seconds)


def good_rate(played: Played, of: Callable[[RequestRecord], bool]) -> float:
    """The share of some requests, each counted once, that were answered as promised."""
    asked = sum(of(record) and not record.is_retry for record in played.records)
    return sum(of(record) and played.good(record) for record in played.records) / max(1, asked)
