"""The evidence about two versions, and whether it is enough to say that the new one is worse, or is not.

Every number is looked at every second, and a test that may be looked at once would cry wolf. So intervals
are confidence sequences, which hold at all times together: those of a mixture of normal distributions over
the size of the effect (Robbins 1970; Johari et al. 2022, "Always valid inference"), asymptotically for means
of anything (Waudby-Smith et al. 2024, "Time-uniform central limit theory"). Failures are too rare for that:
there the bet grows with each one that the new version has (Shafer 2021, "Testing by betting"; Ville 1939),
exactly, from the first on.

    time per token        log, at equal numbers of rows on the worker
    prefill               log, at equal numbers of uncached tokens
    length of answers     log
    answers cut off       share
    machine time          log, of a row for each token of work, at equal numbers of rows
    probe score           mean of what an operator's own probes say of answers, 0 to 1; only if there are such
    failures              share

A new version has few requests at first, so its workers are empty, and faster: comparing times as they are
would call a slow version fast. So times are compared by an analysis of covariance: what a row or a token more
costs is estimated within the cohorts, and taken off their difference. How sure a difference is comes from
groups of conversations, not of requests: requests of one conversation are alike.
"""

import enum
import math
from collections.abc import Iterable, Sequence

import msgspec

from penstock.policy.rollout.cohorts import GROUPS

ALPHA = 0.05
"""Of equal versions at most so many are taken back, in all looks at all metrics together."""
_EFFECT = 0.1
"""The size of differences that intervals are narrowest for; it costs width and no validity."""
GROUPS_MIN = 8
REQUESTS_MIN = 30
"""Of each cohort: with less nothing is said of means."""
_ODDS = (2.0, 5.0, 20.0)
"""The bets on failures: that a failure is so many times as likely in the new version."""
FAILED_GROUPS_MIN = 3
"""Failures of fewer groups of conversations may be one client's."""


class RolloutMetric(enum.StrEnum):
    """The compared figures."""

    TPOT = "time per token"
    PREFILL = "prefill per uncached token"
    LENGTH = "length of answers"
    CUT_OFF = "answers cut off"
    COST = "machine time per token of work"
    SCORE = "probe score"
    FAILED = "failures"


MARGINS = {
    RolloutMetric.TPOT: math.log(1.05),
    RolloutMetric.PREFILL: math.log(1.10),
    RolloutMetric.LENGTH: math.log(1.20),
    RolloutMetric.CUT_OFF: 0.05,
    RolloutMetric.COST: math.log(1.10),
    RolloutMetric.SCORE: 0.02,
    RolloutMetric.FAILED: 0.002,
}
"""The size of a difference that counts as worse: above. Times and lengths are logarithms."""
_TWO_SIDED = (RolloutMetric.LENGTH, RolloutMetric.CUT_OFF)
"""Less is as suspicious as more."""
_LOGARITHMS = (RolloutMetric.TPOT, RolloutMetric.PREFILL, RolloutMetric.LENGTH, RolloutMetric.COST)
_OUTPUT_WEIGHT = 4
"""Prompt tokens that a generated one is worth (policy/capacity/signals.py)."""
HARD_STOPS = {RolloutMetric.TPOT: math.log(2), RolloutMetric.PREFILL: math.log(4)}
"""Differences of means that end a rollout at once: nothing that is equal differs so much by chance."""
HARD_REQUESTS = 10
"""Of each cohort, for that; and the last ones of the canary, of which half may not fail."""
_ALPHA = ALPHA / len(RolloutMetric)


class Observation(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One request that ended, of the canary or of the control cohort."""

    rollout: str
    is_canary: bool
    group: int
    failed: bool = False
    cut_off: bool = False
    """It ended for another reason than its own end, or tool calls."""
    tokens: int = 0
    tpot_ns: int = 0
    """0: it had no second token; likewise below."""
    rows: int = 0
    """That its worker computed together when it ended."""
    prefill_ns: int = 0
    uncached_tokens: int = 0
    score: float = -1.0
    """A probe's verdict on an answer; below 0: this is a request."""


class Sums(msgspec.Struct, array_like=True, gc=False):
    """Of pairs of a covariate x and a metric y."""

    n: int = 0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0
    yy: float = 0.0

    def add(self, x: float, y: float) -> None:
        """One pair."""
        self.n += 1
        self.x += x
        self.y += y
        self.xx += x * x
        self.xy += x * y
        self.yy += y * y


def total(groups: Iterable[Sums]) -> Sums:
    """Of all groups."""
    found = Sums()
    for each in groups:
        found.n += each.n
        found.x, found.y = found.x + each.x, found.y + each.y
        found.xx, found.xy, found.yy = found.xx + each.xx, found.xy + each.xy, found.yy + each.yy
    return found


class RolloutVerdict(enum.StrEnum):
    """On one metric."""

    OPEN = "open"
    FINE = "fine"
    """It is not worse by more than the margin, surely."""
    WORSE = "worse"
    """It is, surely."""


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """One metric, now. Differences are ratios less one for times and lengths, else of shares."""

    metric: RolloutMetric
    canary_requests: int
    control_requests: int
    difference: float | None = None
    """None: too few requests, or too few conversations."""
    low: float | None = None
    high: float | None = None
    margin: float
    verdict: RolloutVerdict = RolloutVerdict.OPEN


class Evidence(msgspec.Struct):
    """Of one rollout: some kilobytes, however long it runs."""

    canary: dict[RolloutMetric, list[Sums]] = {}
    control: dict[RolloutMetric, list[Sums]] = {}
    bets: list[float] = msgspec.field(default_factory=lambda: [0.0] * len(_ODDS))
    """Logarithms of what each bet has become."""
    last: list[tuple[int, bool]] = []
    """(group, whether it failed) of the canary's last requests."""

    def add(self, seen: Observation, *, only_failures: bool = False) -> None:
        """Another request. `only_failures`: its times do not count, for a version is cold at first."""
        if seen.score >= 0:
            assert seen.score <= 1, "the endpoint lets nothing else through"
            self._count(seen, RolloutMetric.SCORE, 0.0, seen.score)
            return
        if seen.is_canary:
            self.last = [*self.last, (seen.group, seen.failed)][-HARD_REQUESTS:]
        self._bet(seen)
        self._count(seen, RolloutMetric.FAILED, 0.0, float(seen.failed))
        if seen.failed or only_failures:
            return
        self._count(seen, RolloutMetric.CUT_OFF, 0.0, float(seen.cut_off))
        self._count(seen, RolloutMetric.LENGTH, 0.0, math.log1p(seen.tokens))
        if seen.tpot_ns:
            self._count(seen, RolloutMetric.TPOT, float(seen.rows), math.log(seen.tpot_ns))
        if seen.prefill_ns:
            self._count(
                seen, RolloutMetric.PREFILL, math.log1p(seen.uncached_tokens), math.log(seen.prefill_ns)
            )
        if seen.prefill_ns and seen.tpot_ns:
            work = seen.uncached_tokens + _OUTPUT_WEIGHT * seen.tokens
            on_row_ns = seen.prefill_ns + seen.tpot_ns * max(0, seen.tokens - 1)
            self._count(seen, RolloutMetric.COST, float(seen.rows), math.log(on_row_ns / max(1, work)))

    @property
    def metrics(self) -> list[RolloutMetric]:
        """Those that count: a score only if somebody gives one."""
        return [
            each
            for each in RolloutMetric
            if each is not RolloutMetric.SCORE or each in self.canary or each in self.control
        ]

    def hard_stop(self) -> str:
        """Why the new version may serve nobody any more, whatever is sure; empty: it may."""
        assert len(self.last) <= HARD_REQUESTS, "the last ones"
        failed = [group for group, has_failed in self.last if has_failed]
        control = total(self._groups(False, RolloutMetric.FAILED))
        if (
            2 * len(failed) >= HARD_REQUESTS
            and len(set(failed)) >= FAILED_GROUPS_MIN
            and 10 * control.y < control.n
        ):
            return f"hard stop: {len(failed)} of its last {len(self.last)} requests failed"
        for metric, limit in HARD_STOPS.items():
            new, old = (total(self._groups(canary, metric)) for canary in (True, False))
            if min(new.n, old.n) >= HARD_REQUESTS and new.y / new.n - old.y / old.n > limit:
                times = math.exp(new.y / new.n - old.y / old.n)
                return f"hard stop: {metric} is {times:.1f} times as long"
        return ""

    def requests(self, *, canary: bool) -> int:
        """That ended in a cohort."""
        return total(self._groups(canary, RolloutMetric.FAILED)).n

    def read(self, metric: RolloutMetric) -> Reading:
        """The evidence about a metric."""
        canary, control = self._groups(True, metric), self._groups(False, metric)
        reading = Reading(
            metric=metric,
            canary_requests=total(canary).n,
            control_requests=total(control).n,
            margin=_shown(metric, MARGINS[metric]),
        )
        if metric is RolloutMetric.FAILED:
            return self._read_failures(reading, canary, control)
        compared = compare(canary, control)
        if compared is None:
            return reading
        difference, variance = compared
        width = half_width(variance, _ALPHA)
        low, high, margin = difference - width, difference + width, MARGINS[metric]
        verdict = RolloutVerdict.OPEN
        if metric is RolloutMetric.SCORE:  # More is better.
            low_worse, high_fine = high < -margin, low >= -margin
            verdict = RolloutVerdict.WORSE if low_worse else RolloutVerdict.FINE if high_fine else verdict
        elif low > margin or (metric in _TWO_SIDED and high < -margin):
            verdict = RolloutVerdict.WORSE
        elif high <= margin and (metric not in _TWO_SIDED or low >= -margin):
            verdict = RolloutVerdict.FINE
        return msgspec.structs.replace(
            reading,
            difference=_shown(metric, difference),
            low=_shown(metric, low),
            high=_shown(metric, high),
            verdict=verdict,
        )

    def _read_failures(self, reading: Reading, canary: Sequence[Sums], control: Sequence[Sums]) -> Reading:
        new, old = total(canary), total(control)
        if not new.n or not old.n:
            return reading
        margin = MARGINS[RolloutMetric.FAILED]
        difference = new.y / new.n - old.y / old.n
        share = (new.y + old.y + 1) / (new.n + old.n + 2)
        width = half_width(share * (1 - share) * (1 / new.n + 1 / old.n), _ALPHA)
        wealth = sum(map(math.exp, self.bets)) / len(self.bets)
        verdict = RolloutVerdict.OPEN
        if (
            wealth >= 1 / _ALPHA
            and difference > margin
            and sum(each.y > 0 for each in canary) >= FAILED_GROUPS_MIN
        ):
            verdict = RolloutVerdict.WORSE
        elif difference + width <= margin:
            verdict = RolloutVerdict.FINE
        return msgspec.structs.replace(
            reading, difference=difference, low=difference - width, high=difference + width, verdict=verdict
        )

    def _bet(self, seen: Observation) -> None:
        """A failure is the canary's with the probability of its share of the requests, if it is no worse."""
        if not seen.failed:
            return
        new, old = self.requests(canary=True), self.requests(canary=False)
        share = (new + 1) / (new + old + 2)
        for i, odds in enumerate(_ODDS):
            wager = odds * share / (odds * share + 1 - share)
            won = wager / share if seen.is_canary else (1 - wager) / (1 - share)
            self.bets[i] = min(self.bets[i] + math.log(won), 600.0)  # Of which `exp` is still a number.

    def _count(self, seen: Observation, metric: RolloutMetric, x: float, y: float) -> None:
        self._groups(seen.is_canary, metric)[seen.group % GROUPS].add(x, y)

    def _groups(self, canary: bool, metric: RolloutMetric) -> list[Sums]:
        side = self.canary if canary else self.control
        if metric not in side:
            side[metric] = [Sums() for _ in range(GROUPS)]
        return side[metric]


def _shown(metric: RolloutMetric, value: float) -> float:
    """As people read it. Intervals may be very wide at first."""
    return math.expm1(min(value, 50.0)) if metric in _LOGARITHMS else value


def compare(canary: Sequence[Sums], control: Sequence[Sums]) -> tuple[float, float] | None:
    """By how much the mean of y differs at equal x, and the variance of that; None: too little is known.

    The variance is the larger one of two: as if requests were independent, and from how much groups of
    conversations differ (the ratio estimator of cluster sampling).
    """
    new, old = total(canary), total(control)
    if min(new.n, old.n) < REQUESTS_MIN:
        return None
    if min(sum(each.n > 0 for each in side) for side in (canary, control)) < GROUPS_MIN:
        return None
    sxx = sum(each.xx - each.x**2 / each.n for each in (new, old))
    sxy = sum(each.xy - each.x * each.y / each.n for each in (new, old))
    syy = sum(each.yy - each.y**2 / each.n for each in (new, old))
    apart = new.x / new.n - old.x / old.n
    explains = sxx > 1e-9 * (new.xx + old.xx + 1e-9)
    slope = sxy / sxx if explains else 0.0
    left = max(0.0, syy - slope * sxy) / (new.n + old.n - 3)
    variance = left * (1 / new.n + 1 / old.n + (apart**2 / sxx if explains else 0.0))
    clustered = _clustered(canary, new, slope) + _clustered(control, old, slope)
    return new.y / new.n - old.y / old.n - slope * apart, max(variance, clustered)


def _clustered(groups: Sequence[Sums], whole: Sums, slope: float) -> float:
    """The variance of a cohort's mean, from its groups."""
    mean = (whole.y - slope * whole.x) / whole.n
    left = [(each.y - slope * each.x) - each.n * mean for each in groups if each.n]
    return len(left) / (len(left) - 1) * sum(each**2 for each in left) / whole.n**2


def half_width(variance: float, alpha: float) -> float:
    """Of an interval around a mean that holds at all times together, with probability 1 - alpha."""
    if variance <= 0:
        return 0.0
    mixed = variance + _EFFECT**2
    return math.sqrt(
        2 * variance * mixed / _EFFECT**2 * (math.log(1 / alpha) + math.log(mixed / variance) / 2)
    )
