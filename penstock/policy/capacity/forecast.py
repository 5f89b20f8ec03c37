"""How much work comes: measured until now, and expected some time from now.

    rate  ──> level (what comes now), trend (how that changes), season (what came at this time of the day)
    expected(h) = season at now + h, times how much more comes today than usual; before a whole season was
                  seen: level + damped trend

Level and trend are Holt's (1957), the season is a mean over days by the time of the day, known as seasonal
naive. How far forecasts were off is measured (`error`), at the horizon at which they are used.
"""

import msgspec

DAY_S = 86_400.0
BUCKETS = 96
"""Parts of a season: of a day, a quarter of an hour each."""
_LEVEL_S, _FAST_S, _TREND_S, _RATIO_S = 90.0, 30.0, 240.0, 300.0
"""Level, fast level, trend and what today is like follow what comes with these time constants."""
_SMOOTH = (0.25, 0.5, 0.25)
"""A part of the season is taken together with its neighbours: single parts are mostly chance."""
_DAMPING_S = 300.0
"""A trend is taken to last about so long."""
_RATIO = (0.5, 2.0)
"""Today is taken for this much less or more than usual, at most."""
_KEEP = 0.5
"""The weight of earlier days beside the last one."""
_ERROR_S = 1800.0
_CHECKS_MAX = 256


class ForecastCheck(msgspec.Struct, frozen=True, array_like=True):
    """A forecast that will be held against what comes."""

    at_s: float
    mean: float


class Demand(msgspec.Struct, kw_only=True):
    """One model's. Times are the wall clock's, in seconds: a season is one of days."""

    season_s: float = DAY_S
    level: float = 0.0
    fast: float = 0.0
    trend: float = 0.0
    """Per second."""
    error: float = 0.0
    """Mean difference between forecasts and what came."""
    season: list[float] = []
    """By part of the season; below 0: nothing is known."""
    today: float = 0.0
    usual: float = 0.0
    """The rate of late, and the usual one at these times."""
    at_s: float = -1.0
    bucket: int = -1
    bucket_work: float = 0.0
    bucket_s: float = 0.0
    checks: list[ForecastCheck] = []

    def take(self, at_s: float, window_s: float, work: float) -> None:
        """So much came in the `window_s` until now."""
        assert window_s > 0, "a rate needs time"
        rate = work / window_s
        if self.at_s < 0:
            self.level = self.fast = rate
        before = self.level
        self.level += (rate - self.level) * min(1.0, window_s / _LEVEL_S)
        self.fast += (rate - self.fast) * min(1.0, window_s / _FAST_S)
        change = (self.level - before) / window_s
        self.trend += (change - self.trend) * min(1.0, window_s / _TREND_S)
        if (usual := self._usual(at_s)) >= 0:
            share = min(1.0, window_s / _RATIO_S) if self.usual else 1.0
            self.today += (rate - self.today) * share if self.today else self.level
            self.usual += (usual - self.usual) * share
        self._learn_season(at_s, window_s, work)
        self._check(at_s, window_s)
        self.at_s = at_s

    def expected(self, ahead_s: float) -> float:
        """The work per second that will come, `ahead_s` from the last look."""
        assert ahead_s >= 0, "a forecast is of what comes"
        return max(0.0, self._mean(ahead_s))

    def promise(self, ahead_s: float) -> None:
        """Hold the forecast that is used against what comes."""
        if len(self.checks) < _CHECKS_MAX and self.at_s >= 0:
            self.checks.append(ForecastCheck(self.at_s + ahead_s, self._mean(ahead_s)))

    def _mean(self, ahead_s: float) -> float:
        if self.at_s < 0:
            return self.level
        then = self._usual(self.at_s + ahead_s)
        if self.usual > 0 and then >= 0:
            return then * min(_RATIO[1], max(_RATIO[0], self.today / self.usual))
        damped_s = _DAMPING_S * (1 - 2.718281828 ** (-ahead_s / _DAMPING_S))
        return self.level + self.trend * damped_s

    def _usual(self, at_s: float) -> float:
        """The work per second at that time of earlier seasons; below 0: unknown."""
        if not self.season:
            return -1.0
        place = at_s % self.season_s / self.season_s * BUCKETS - 0.5
        first = int(place // 1) % BUCKETS
        share = place - place // 1
        one, two = self._smooth(first), self._smooth(first + 1)
        return one + (two - one) * share if one >= 0 <= two else -1.0

    def _smooth(self, bucket: int) -> float:
        around = [self.season[(bucket + step) % BUCKETS] for step in (-1, 0, 1)]
        if min(around) < 0:
            return around[1]
        return sum(value * weight for value, weight in zip(around, _SMOOTH, strict=True))

    def _learn_season(self, at_s: float, window_s: float, work: float) -> None:
        bucket = int(at_s % self.season_s / self.season_s * BUCKETS)
        if bucket != self.bucket:
            self._close_bucket()
            self.bucket, self.bucket_work, self.bucket_s = bucket, 0.0, 0.0
        self.bucket_work += work
        self.bucket_s += window_s

    def _close_bucket(self) -> None:
        """The part is over. One that was seen for half its time or less says nothing."""
        if self.bucket < 0 or self.bucket_s <= self.season_s / BUCKETS / 2:
            return
        self.season = self.season or [-1.0] * BUCKETS
        mean, known = self.bucket_work / self.bucket_s, self.season[self.bucket]
        self.season[self.bucket] = mean if known < 0 else known * _KEEP + mean * (1 - _KEEP)

    def _check(self, at_s: float, window_s: float) -> None:
        while self.checks and self.checks[0].at_s <= at_s:
            check = self.checks.pop(0)
            off = abs(check.mean - self.level)
            self.error += (off - self.error) * min(1.0, window_s / _ERROR_S * 8)
