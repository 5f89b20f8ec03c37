"""The results of a simulated run, as numbers: latencies, goodput, reuse, fairness, money, and their course
over time.

A request is *good* when it was answered as promised: first token and mean time per further token
(`Judge` in sim/scenarios/setup.py). Goodput is requests per second that met both promises, also told as their
output tokens per second; throughput counts the output tokens of all.
Attainment is the share of good ones among all that came, each counted once however often it came, so that
refusing does not look like serving. Percentiles are over requests that had a first token, and never without
the attainment beside them.

How evenly tenants were served: Jain's index beside the max-min fair share, and the largest gap between two
that wait.

Service is counted as the queue counts it (policy/queueing/band.py), in prompt tokens that must be computed: a
cached one counts 0.1, one of an answer 2.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import msgspec

from penstock.clock import NS_PER_MS, NS_PER_S
from penstock.config.routing import TPOT_TARGET_MS, TTFT_TARGET_MS
from penstock.policy.flow import Outcome
from penstock.schedule.fair_share import PROMPT_COST, cost
from penstock.sim.traffic.prompts import RequestRecord, SimRequest

GRID = 240
"""Moments at which service is compared."""
TENANTS_MAX = 24
"""Tenants compared pair by pair: those with the most requests."""


def served_by(record: RequestRecord) -> float:
    """The service of a request; 0 if it never started."""
    if not record.attempts or record.first_ns < 0:
        return 0.0
    return cost(record.prompt_tokens, record.cached_tokens, record.completion_tokens) / PROMPT_COST


def fair_shares(total: float, wanted: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Max-min fair shares of `total`: (wanted, weight) by name.

    A tenant that wants little gets all of it, the rest share alike.
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
    """Over all times in which two tenants of one band and model both had requests queued: the largest
    difference in service.

    Each over its weight. 0 if never two waited at once. Prompts count when the first token came, answers
    evenly from then to their end; so a gap below the cost of the largest requests says nothing.
    """
    gap = 0.0
    model_queues: dict[tuple[str, str], list[RequestRecord]] = {}
    for record in records:
        if record.attempts:
            model_queues.setdefault((record.model, record.band), []).append(record)
    for model_queue in model_queues.values():
        gap = max(gap, _queue_gap(model_queue, weights))
    return gap


def _queue_gap(records: list[RequestRecord], weights: Mapping[str, float]) -> float:
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
    """The service until each moment."""
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


WINDOWS = 120
"""Points of a course over time."""
WINDOW_MIN_S = 1.0


class Objective(msgspec.Struct, frozen=True, kw_only=True):
    """A service level: what is promised to a request, and to how many of them."""

    ttft_ms: float = TTFT_TARGET_MS
    tpot_ms: float = TPOT_TARGET_MS
    """0: nothing is promised."""
    share: float = 0.95
    """Of requests; a window in which fewer are good is lost."""

    def good(self, record: RequestRecord) -> bool:
        """Whether this request was answered as promised."""
        if record.outcome is not Outcome.FINISHED or record.first_ns < 0:
            return False
        in_time = record.ttft_ns <= self.ttft_ms * NS_PER_MS
        return in_time and (not self.tpot_ms or record.tpot_ns <= self.tpot_ms * NS_PER_MS)


IsGood = Callable[[RequestRecord], bool]


class WorkerUse(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's time."""

    id: str
    model: str
    kind: str = ""
    paid_ns: int
    """From being asked for to being gone."""
    busy_ns: int
    """In steps."""
    price_per_hour: float = 0.0


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """A distribution in milliseconds."""

    count: int = 0
    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p95: float = 0.0
    p99: float = 0.0
    max: float = 0.0

    @classmethod
    def of(cls, values_ns: list[int]) -> "Spread":
        """Of nanoseconds; sorts them. All zero without values."""
        if not values_ns:
            return cls()
        values_ns.sort()
        last = len(values_ns) - 1

        def at(share: float) -> float:
            place = share * last
            low = int(place)
            high = min(low + 1, last)
            return (values_ns[low] + (values_ns[high] - values_ns[low]) * (place - low)) / NS_PER_MS

        mean = sum(values_ns) / len(values_ns) / NS_PER_MS
        return cls(
            count=len(values_ns), mean=mean, p50=at(0.5), p90=at(0.9), p95=at(0.95), p99=at(0.99),
            max=values_ns[-1] / NS_PER_MS,
        )  # fmt: skip


class TenantFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One tenant's part."""

    requests: int
    good: int
    served: float
    """In prompt tokens that must be computed, as the queue counts them (policy/queueing/band.py)."""
    wanted: float
    ttft_ms: Spread


class GoodputWindow(msgspec.Struct, frozen=True, kw_only=True):
    """One piece of the course over time; requests count where they came."""

    begins_s: float
    arrived: int = 0
    good: int = 0
    refused: int = 0
    """Rejected, evicted or failed."""
    ttft_p50_ms: float = 0.0
    ttft_p95_ms: float = 0.0
    queued: int = 0
    """Requests in gateways' queues at the window's end."""
    output_tokens: int = 0
    """Of requests that ended in it."""


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """One run. Rates are over `seconds`, from the first arrival to the last end."""

    seconds: float
    requests: int
    outcomes: dict[str, int]
    reasons: dict[str, int]
    """Why requests were refused, evicted or failed."""
    good: int
    attainment: float
    goodput_rps: float
    goodput_tps: float
    """Output tokens per second of good requests."""
    throughput_tps: float
    """Output tokens per second of all."""
    ttft_ms: Spread
    tpot_ms: Spread
    e2e_ms: Spread
    queue_ms: Spread
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    hit_rate: float
    """Cached share of the prompt tokens of requests that had a first token."""
    jain: float
    """Of what tenants were served, beside their max-min fair share: 1 is fair."""
    service_gap: float
    """Largest gap of service between two tenants that both waited all the while, in weighted tokens."""
    attempts: float
    """Starts per request that was started."""
    cost: float
    cost_per_million: float
    """Per million output tokens; 0 if nothing has a price."""
    utilisation: float
    """Of the workers' paid time, what was in steps."""
    slo_minutes_lost: float
    """Time in which fewer requests were good than promised."""
    objective: Objective
    tenants: dict[str, TenantFigures]
    windows: list[GoodputWindow]


@dataclass(slots=True, kw_only=True)
class Run:
    """The facts of a run."""

    records: Sequence[RequestRecord]
    workers: Sequence[WorkerUse] = ()
    wanted: Mapping[str, float] = field(default_factory=dict[str, float])
    """Of every tenant, what its requests would take if all were served (`wanted_of`)."""
    weights: Mapping[str, float] = field(default_factory=dict[str, float])
    """Of tenants; 1 where none is said."""
    is_good: IsGood | None = None
    """The requests that were answered as promised; None: those within the objective."""


def wanted_of(request: SimRequest) -> float:
    """The service of a request, in prompt tokens that must be computed."""
    return cost(request.prompt_tokens, 0, request.output_tokens) / PROMPT_COST


def figures(run: Run, objective: Objective | None = None) -> Figures:
    """Count a run. O(n log n)."""
    objective, records = objective or Objective(), run.records
    is_good = run.is_good or objective.good
    begins = min((record.at_ns for record in records), default=0)
    ends = max((record.end_ns for record in records), default=0)
    seconds = max((ends - begins) / NS_PER_S, 1e-9)
    good = [record for record in records if is_good(record)]
    asked = sum(not record.is_retry for record in records)
    begun = [record for record in records if record.first_ns >= 0]
    prompt, cached = sum(r.prompt_tokens for r in begun), sum(r.cached_tokens for r in begun)
    output = sum(r.completion_tokens for r in records)
    spent = sum(each.price_per_hour * each.paid_ns for each in run.workers) / (3600 * NS_PER_S)
    paid = sum(each.paid_ns for each in run.workers)
    windows = _windows(records, is_good, begins, seconds)
    tenants = _tenants(run, is_good)
    started = [record.attempts for record in records if record.attempts]
    return Figures(
        seconds=seconds,
        requests=asked,
        outcomes=_counted(record.outcome.value for record in records),
        reasons=_counted(r.reason for r in records if r.outcome is not Outcome.FINISHED and r.reason),
        good=len(good),
        attainment=len(good) / asked if asked else 1.0,
        goodput_rps=len(good) / seconds,
        goodput_tps=sum(record.completion_tokens for record in good) / seconds,
        throughput_tps=output / seconds,
        ttft_ms=Spread.of([record.ttft_ns for record in begun]),
        tpot_ms=Spread.of([record.tpot_ns for record in begun if record.completion_tokens > 1]),
        e2e_ms=Spread.of([r.end_ns - r.at_ns for r in records if r.outcome is Outcome.FINISHED]),
        queue_ms=Spread.of([record.queue_ns for record in begun]),
        prompt_tokens=prompt,
        cached_tokens=cached,
        output_tokens=output,
        hit_rate=cached / prompt if prompt else 0.0,
        jain=jain({name: (t.served, t.wanted, run.weights.get(name, 1.0)) for name, t in tenants.items()}),
        service_gap=largest_gap(records, run.weights),
        attempts=sum(started) / len(started) if started else 0.0,
        cost=spent,
        cost_per_million=spent / output * 1e6 if output else 0.0,
        utilisation=sum(each.busy_ns for each in run.workers) / paid if paid else 0.0,
        slo_minutes_lost=sum(
            (window.arrived > 0 and window.good < objective.share * window.arrived) for window in windows
        ) * (seconds / max(1, len(windows))) / 60,
        objective=objective,
        tenants=tenants,
        windows=windows,
    )  # fmt: skip


def _counted(words: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(words).items(), key=lambda item: (-item[1], item[0])))


def _tenants(run: Run, is_good: IsGood) -> dict[str, TenantFigures]:
    parts: dict[str, list[RequestRecord]] = {}
    for record in run.records:
        parts.setdefault(record.tenant, []).append(record)
    found: dict[str, TenantFigures] = {}
    for name, records in sorted(parts.items()):
        served = sum(served_by(record) for record in records)
        found[name] = TenantFigures(
            requests=sum(not record.is_retry for record in records),
            good=sum(is_good(record) for record in records),
            served=served,
            # A cached prefix is cheaper than what was wanted; no tenant is served more than it wants.
            wanted=max(served, run.wanted.get(name, 0.0)),
            ttft_ms=Spread.of([record.ttft_ns for record in records if record.first_ns >= 0]),
        )
    return found


def _windows(
    records: Sequence[RequestRecord], is_good: IsGood, begins: int, seconds: float
) -> list[GoodputWindow]:
    count = max(1, min(WINDOWS, int(seconds / WINDOW_MIN_S)))
    width = max(1, round(seconds * NS_PER_S / count))
    came: list[list[RequestRecord]] = [[] for _ in range(count)]
    tokens, queued = [0] * count, [0] * (count + 1)

    def place(at_ns: int) -> int:
        return min(count - 1, max(0, (at_ns - begins) // width))

    for record in records:
        came[place(record.at_ns)].append(record)
        tokens[place(record.end_ns)] += record.completion_tokens
        # Waiting at the end of every window from the one it came in to the one before it left the queue.
        left = record.at_ns + record.queue_ns if record.attempts else record.end_ns
        queued[place(record.at_ns)] += 1
        queued[place(left)] -= 1
    windows: list[GoodputWindow] = []
    waiting = 0
    for index, each in enumerate(came):
        waiting += queued[index]
        ttft = Spread.of([record.ttft_ns for record in each if record.first_ns >= 0])
        windows.append(
            GoodputWindow(
                begins_s=index * width / NS_PER_S,
                arrived=len(each),
                good=sum(is_good(record) for record in each),
                refused=sum(record.outcome in _REFUSED for record in each),
                ttft_p50_ms=ttft.p50,
                ttft_p95_ms=ttft.p95,
                queued=waiting,
                output_tokens=tokens[index],
            )
        )
    return windows


_REFUSED = (Outcome.REJECTED, Outcome.EVICTED, Outcome.FAILED)


SHARES_MAX = 200


def ttft_shares(records: Iterable[RequestRecord]) -> list[tuple[float, float]]:
    """Of the requests that had a first token, which share had it within how many milliseconds: at most
    `SHARES_MAX` points and one, by rising share.
    """
    values = sorted(record.ttft_ns / NS_PER_MS for record in records if record.first_ns >= 0)
    last = len(values) - 1
    places = (
        {min(last, len(values) * i // SHARES_MAX) for i in range(SHARES_MAX + 1)} if values else set[int]()
    )
    return [(max(values[place], 0.1), (place + 1) / len(values)) for place in sorted(places)]
