"""Failures as data, drawn from a seed: which, when, how long, where. What they do is in chaos.py.

Swarm testing (Groce et al., ISSTA 2012): every run draws first which kinds may happen in it at all. Runs with
few kinds find what is hidden when everything fails at once.
"""

import enum

import msgspec

from penstock import rng


class FaultKind(enum.StrEnum):
    """What can go wrong."""

    WORKER_CRASH = "worker-crash"
    """A worker is gone at once; another is started in its place."""
    WORKER_SLOW = "worker-slow"
    """Its steps take `amount` times as long."""
    GRAY = "gray-failure"
    """It reports that all is well, and fails every request that it is given."""
    STUCK = "stuck-stream"
    """Nothing is heard any more of the next request that it is given, until that one is aborted."""
    LATE = "late-messages"
    """Messages to and from it take `amount` milliseconds more."""
    LINK_RESET = "link-reset"
    """A gateway loses its connection to a worker, and what streams over it; both are well."""
    NO_REPORTS = "lost-metrics"
    """What it says of itself is lost."""
    KV_GAP = "kv-event-gap"
    """What it says of its cache is lost, until it is heard again: what the gateways miss then they are told,
    or ask for (kv_event_channel.py)."""
    STORE_LOSS = "store-loss"
    """The store of shared limits does not answer; with `amount` over 1 it comes back empty."""
    REGION_LOSS = "region-loss"
    """Gateways and workers of a region are gone; clients go elsewhere."""
    SPOT = "spot-revocation"
    """A worker will be taken away at the end of the fault, and is told so at its begin."""
    BAD_ROLLOUT = "bad-rollout"
    """A part of the workers gets a version with steps `amount` times as long, or, below 1, with answers that
    are not numbers."""
    CLOCK_SKEW = "clock-skew"
    """A gateway's date is `amount` seconds off, the whole run long."""
    GATEWAY_CRASH = "thundering-herd"
    """A gateway is gone; when it is back all its clients ask again at once."""
    POISON = "poison-request"
    """The request with number `target` brings down every worker that computes it."""


class Fault(msgspec.Struct, frozen=True, array_like=True):
    """One failure."""

    kind: FaultKind
    at_ns: int
    until_ns: int
    """0: nothing ends it."""
    target: int
    """Which worker, gateway, region or request, counted from 0 and taken modulo how many there are."""
    amount: float = 1.0


_AMOUNTS: dict[FaultKind, tuple[float, float]] = {
    FaultKind.WORKER_SLOW: (2, 20),
    FaultKind.LATE: (20, 2000),
    FaultKind.STORE_LOSS: (0, 2),
    FaultKind.BAD_ROLLOUT: (0, 4),
    FaultKind.CLOCK_SKEW: (-3600, 3600),
}


def draw_faults(seed: int, *, until_ns: int, requests: int, count_max: int = 3) -> tuple[Fault, ...]:
    """The faults of one run, in order of time: each kind with even chance, then up to `most` of it.

    They begin in the first two thirds of the time until `until_ns`, and are over by then.
    """
    random, faults = rng.stream(seed, "sim/faults"), list[Fault]()
    for kind in FaultKind:
        if random.random() < 0.5:
            continue
        low, high = _AMOUNTS.get(kind, (1.0, 1.0))
        for _ in range(random.randint(1, count_max)):
            begin_ns = random.randrange(until_ns // 10, 2 * until_ns // 3)
            end_ns = begin_ns + random.randrange(1, until_ns - begin_ns)
            target = random.randrange(requests) if kind is FaultKind.POISON else random.randrange(1 << 16)
            faults.append(Fault(kind, begin_ns, end_ns, target, round(random.uniform(low, high), 3)))
    return tuple(sorted(faults, key=lambda fault: (fault.at_ns, fault.kind, fault.target)))
