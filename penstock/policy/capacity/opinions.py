"""Three advisers, each with its reason: the load as it is, the load to come, and the least number.

    reactive   what comes now, and what waits, at the rate that is safe for one worker; one more if answers
               are late, or KV memory is nearly full, whatever that rate is thought to be
    capacity   the forecast for the moment at which a worker would be ready that was asked for now
    floor      `min`, the schedule (times of the week, by UTC), and what a request needs that finds nobody

The largest is what is wanted.
"""

import math
from collections.abc import Iterable

import msgspec

from penstock.clock import NS_PER_S
from penstock.config.scale import MINUTES, ScaleConfig, WeekSpan, parse_span
from penstock.policy.capacity.forecast import Demand
from penstock.policy.capacity.learn import LATE_MAX, ColdStartTimes, ServiceRate
from penstock.policy.capacity.signals import Signals

_THURSDAY = 3
"""The Unix epoch began on one."""


def spans_of(texts: Iterable[str]) -> tuple[WeekSpan, ...]:
    """Of texts that the configuration's checks let through."""
    found = [parse_span(text) for text in texts]
    assert all(span is not None for span in found), "the configuration was checked"
    return tuple(span for span in found if span is not None)


def is_within(span: WeekSpan, wall_ns: int) -> bool:
    """Whether the moment lies in the span: at its beginning it does, at its end it does not."""
    minute = wall_ns // (60 * NS_PER_S)
    day, minute_of_day = (minute // MINUTES + _THURSDAY) % 7, minute % MINUTES
    if span.begin < span.end:
        return day in span.days and span.begin <= minute_of_day < span.end
    began_today = day in span.days and minute_of_day >= span.begin
    return began_today or ((day - 1) % 7 in span.days and minute_of_day < span.end)


def scheduled(spans: Iterable[WeekSpan], wall_ns: int, ahead_s: float) -> int:
    """Workers that the schedule wants now, or `ahead_s` from now: they take so long to start."""
    moments = (wall_ns, wall_ns + int(ahead_s * NS_PER_S))
    return max((span.workers for span in spans if any(is_within(span, at) for at in moments)), default=0)


DRAIN_S = 30.0
"""The requests that wait are to be gone after so long."""
ROUNDED = 0.15
"""Of a worker: a load that is so little over what some can do needs no further one."""
KV_FULL = 0.9
CHANCE_S, SPREAD = 60.0, 1.2
"""The fast level is about a mean over so long; the square of a request's size varies about so much."""
HEADROOM_MIN = 0.05
"""Of memory: with less on some worker none leaves, for its requests would go to those; and if requests wait
there is one more."""
DUE_MIN = 10
"""Answers, of which the late ones say something."""
AHEAD_S = 15.0
"""Beyond the cold start: the time between two looks, and what a new worker takes to be found."""
HEDGED = 0.5
"""Of what forecasts were off by in the mean, so much is planned for."""
CONSOLIDATED = 0.8
"""Of what is safe for the workers that are left: more, and none leaves."""
KV_CONSOLIDATED = 0.7
_SPREAD = (0.25, 0.5, 0.75, 1.0)
"""Parts of the time ahead at which a smaller fleet is looked at."""


class Opinion(msgspec.Struct, frozen=True, kw_only=True):
    """Of one adviser."""

    of: str
    workers: int
    why: str


class Learned(msgspec.Struct, kw_only=True):
    """The learned state of a model, kept over a restart."""

    demand: Demand = msgspec.field(default_factory=Demand)
    rate: ServiceRate = msgspec.field(default_factory=ServiceRate)
    cold: ColdStartTimes = msgspec.field(default_factory=ColdStartTimes)
    tokens: float = 0.0
    """Mean work of an answered request."""
    protected: float = 0.0
    """Share of the work that is of bands which go before others."""
    asked_ns: int = 0
    """When somebody last wanted the model; 0: never."""

    def take(self, seen: Signals) -> None:
        """Learn from one look."""
        if seen.answered:
            mean = seen.work / seen.answered
            share = min(1.0, seen.answered / 50)
            self.tokens = mean if not self.tokens else self.tokens + (mean - self.tokens) * share
            self.protected += (seen.protected_share - self.protected) * share
        if seen.arrived or seen.waiting or seen.running:
            self.asked_ns = seen.now_ns
        self.cold.take(seen.cold_starts_s)
        self.rate.take(seen)
        at_s = seen.wall_ns / NS_PER_S
        self.demand.take(at_s, seen.window_s, seen.arrived * self.tokens)
        self.demand.promise(self.ahead_s)

    @property
    def comes(self) -> float:
        """The work per second that comes now: the fast level, where it is above the smooth one by more than
        chance.
        """
        fast, level = self.demand.fast, self.demand.level
        assert fast >= 0 <= level, (fast, level)
        requests = CHANCE_S * level / self.tokens if self.tokens else 0.0
        return fast if fast > level * (1 + 2 * math.sqrt(SPREAD / max(1.0, requests))) else level

    @property
    def ahead_s(self) -> float:
        """How far ahead is planned."""
        return self.cold.expected_s + AHEAD_S


def reactive(seen: Signals, known: Learned) -> Opinion:
    """By the load as it is."""
    there, safe = seen.ready + seen.pending, known.rate.safe
    backlog = seen.waiting * known.tokens
    wanted, why = 0, "nothing comes"
    if safe:
        wanted = math.ceil(known.comes / safe + backlog / (safe * DRAIN_S) - ROUNDED)
        why = f"{known.comes:.0f} tokens/s come and {seen.waiting} requests wait; {safe:.0f} are safe"
    elif seen.waiting or seen.running:
        wanted, why = max(1, seen.ready), "it has work, and what a worker can do is not known yet"
    if seen.ready + 1 > max(wanted, there) and seen.ready and (trouble := suffers(seen)):
        wanted, why = seen.ready + 1, trouble
    return Opinion(of="reactive", workers=wanted, why=why)


def suffers(seen: Signals) -> str:
    """The trouble that requests have now, whatever a worker is thought to do; empty: none."""
    is_late = seen.due >= DUE_MIN and seen.late > 2 * LATE_MAX * seen.due
    if is_late or seen.shed:
        return f"{seen.late} of {seen.due} answers were late, {seen.shed} requests shed"
    if seen.kv_use > KV_FULL:
        return f"{seen.kv_use:.0%} of the KV memory is in use"
    if seen.waiting and seen.memory_headroom < HEADROOM_MIN:
        return f"a worker has {seen.memory_headroom:.1%} of its memory left"
    return ""


def capacity(known: Learned) -> Opinion:
    """By the load to come."""
    ahead_s, safe = known.ahead_s, known.rate.safe
    if not safe:
        return Opinion(of="capacity", workers=0, why="what a worker can do is not known yet")
    expected = known.demand.expected(ahead_s)
    why = f"{expected:.0f} tokens/s are expected in {ahead_s:.0f} s, give or take {known.demand.error:.0f}"
    come = max(expected + HEDGED * known.demand.error, known.demand.level)
    return Opinion(of="capacity", workers=math.ceil(come / safe - ROUNDED), why=why)


def lasting(known: Learned) -> int:
    """Workers for the smooth load: by the load of each moment one too many would be kept, always."""
    safe = known.rate.safe
    assert safe >= 0, safe
    return math.ceil(known.demand.level / safe - ROUNDED) if safe else 0


def floor(scale: ScaleConfig, seen: Signals, known: Learned) -> Opinion:
    """By the configuration."""
    least, why = scale.min, f"min is {scale.min}"
    by_time = scheduled(spans_of(scale.schedule), seen.wall_ns, known.ahead_s)
    if by_time > least:
        least, why = by_time, f"the schedule wants {by_time}"
    idle_s = (seen.now_ns - known.asked_ns) / NS_PER_S if known.asked_ns else math.inf
    if not least and (idle_s < scale.in_after_s or seen.waiting or seen.running):
        least, why = 1, "somebody asks for the model"
    return Opinion(of="floor", workers=least, why=why)


def keeps_enough(seen: Signals, known: Learned, left: int) -> str:
    """Why `left` workers would be too few for what the present ones do; empty: they would do."""
    assert 0 <= left < seen.ready, (left, seen.ready)
    if not left:
        return "requests run" if seen.running or seen.waiting else ""
    if seen.waiting:
        return f"{seen.waiting} requests wait"
    if seen.due >= DUE_MIN and seen.late > LATE_MAX * seen.due:
        return "answers are late as it is"
    more, safe = seen.ready / left, known.rate.safe
    now = max(known.demand.fast, known.demand.level)
    if safe and now > CONSOLIDATED * safe * left:
        return f"{now:.0f} tokens/s are over {CONSOLIDATED:.0%} of what {left} can do"
    if seen.kv_use * more > KV_CONSOLIDATED:
        return f"KV memory would be {seen.kv_use * more:.0%} full"
    if seen.memory_headroom < HEADROOM_MIN:
        return f"a worker has {seen.memory_headroom:.1%} of its memory left"
    if seen.slots and seen.running * more > CONSOLIDATED * seen.slots:
        return f"{seen.running} requests would fill the rows"
    for share in _SPREAD:
        later = known.demand.expected(2 * share * known.ahead_s)
        if safe and later > safe * left:
            return f"{later:.0f} tokens/s are expected soon"
    return ""
