"""How evenly tenants were served: Jain's index beside the max-min fair share, and the largest gap between two
that wait.

Service is counted as the queue counts it (policy/queueing/band.py), in prompt tokens that must be computed: a
cached one counts 0.1, one of an answer 2.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import combinations

from penstock.schedule.fair_share import PROMPT_COST, cost
from penstock.sim.traffic.request import RequestRecord

GRID = 240
"""Moments at which service is compared."""
TENANTS_MAX = 24
"""Tenants compared pair by pair: those with the most requests."""


def served_by(record: RequestRecord) -> float:
    """What a request was served; 0 if it never started."""
    if not record.attempts or record.first_ns < 0:
        return 0.0
    return cost(record.prompt_tokens, record.cached_tokens, record.completion_tokens) / PROMPT_COST


def fair_shares(total: float, wanted: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Max-min fair shares of `total`: (wanted, weight) by name.

    Who wants little gets all of it, the rest share alike.
    """
    left, shares = total, dict[str, float]()
    open_to = dict(wanted)
    while open_to:
        level = left / sum(weight for _, weight in open_to.values())
        content = [name for name, (want, weight) in open_to.items() if want <= level * weight]
        if not content:
            return shares | {name: level * weight for name, (_, weight) in open_to.items()}
        for name in content:
            shares[name] = open_to.pop(name)[0]
            left -= shares[name]
        left = max(left, 0.0)
    return shares


def jain(tenants: Mapping[str, tuple[float, float, float]]) -> float:
    """Jain's index (Jain, Chiu and Hawe, 1984) of service over fair share: (served, wanted, weight) by
    tenant.

    1: everybody got its max-min fair share of what was served; 1 / n: one tenant got everything.
    """
    total = sum(served for served, _, _ in tenants.values())
    shares = fair_shares(total, {name: (wanted, weight) for name, (_, wanted, weight) in tenants.items()})
    parts = [served / shares[name] for name, (served, _, _) in tenants.items() if shares[name] > 0]
    squares = sum(part * part for part in parts)
    return sum(parts) ** 2 / (len(parts) * squares) if squares else 1.0


def largest_gap(records: Sequence[RequestRecord], weights: Mapping[str, float]) -> float:
    """Over all times in which two tenants of one band and model both had requests queued: the most that one
    was served more.

    Each over its weight. 0 if never two waited at once. Prompts count when the first token came, answers
    evenly from then to their end; so a gap below the cost of the largest requests says nothing.
    """
    gap = 0.0
    lanes: dict[tuple[str, str], list[RequestRecord]] = {}
    for record in records:
        if record.attempts:
            lanes.setdefault((record.model, record.band), []).append(record)
    for lane in lanes.values():
        gap = max(gap, _lane_gap(lane, weights))
    return gap


def _lane_gap(records: list[RequestRecord], weights: Mapping[str, float]) -> float:
    by_tenant: dict[str, list[RequestRecord]] = {}
    for record in records:
        by_tenant.setdefault(record.tenant, []).append(record)
    busiest = sorted(by_tenant, key=lambda name: (-len(by_tenant[name]), name))[:TENANTS_MAX]
    if len(busiest) < 2:
        return 0.0
    begins, ends = min(r.at_ns for r in records), max(r.end_ns for r in records)
    moments = [begins + (ends - begins) * i // GRID for i in range(GRID + 1)]
    service = {name: _service(by_tenant[name], moments, weights.get(name, 1.0)) for name in busiest}
    waits = {name: _waits(by_tenant[name], moments) for name in busiest}
    gap = 0.0
    for one, other in combinations(busiest, 2):
        low = high = ahead = 0.0
        for i in range(1, len(moments)):
            if not (waits[one][i] and waits[other][i] and waits[one][i - 1] and waits[other][i - 1]):
                low = high = ahead = 0.0
                continue
            ahead += service[one][i] - service[one][i - 1] - service[other][i] + service[other][i - 1]
            low, high = min(low, ahead), max(high, ahead)
            gap = max(gap, high - low)
    return gap


def _service(records: list[RequestRecord], moments: list[int], weight: float) -> list[float]:
    """What was served until each moment."""
    steps, slopes = [0.0] * (len(moments) + 1), [0.0] * (len(moments) + 1)
    for record in records:
        if record.first_ns < 0:
            continue
        prompt = cost(record.prompt_tokens, record.cached_tokens, 0) / PROMPT_COST / weight
        answer = cost(0, 0, record.completion_tokens) / PROMPT_COST / weight
        first = bisect_left(moments, record.first_ns)
        last = max(first, bisect_left(moments, record.end_ns))
        steps[first] += prompt
        if last == first:
            steps[first] += answer
            continue
        # Evenly over the moments between: `slopes` is what is added at each of them.
        slopes[first + 1] += answer / (last - first)
        slopes[min(last + 1, len(moments))] -= answer / (last - first)
    total, slope, served = 0.0, 0.0, list[float]()
    for i in range(len(moments)):
        slope += slopes[i]
        total += steps[i] + slope
        served.append(total)
    return served


def _waits(records: list[RequestRecord], moments: list[int]) -> list[bool]:
    """Whether a request of the tenant was queued at each moment."""
    change = [0] * (len(moments) + 1)
    for record in records:
        change[bisect_left(moments, record.at_ns)] += 1
        change[bisect_left(moments, record.at_ns + record.queue_ns)] -= 1
    waiting, found = 0, list[bool]()
    for i in range(len(moments)):
        waiting += change[i]
        found.append(waiting > 0)
    return found
