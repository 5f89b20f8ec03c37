"""How many failed requests may be tried again: a share of those that succeed, so that retries never multiply
an overload.

A token bucket: every success pays in a tenth of a token, every retry takes one, and a few a second are always
there, for a fleet that is nearly idle. Over any time the retries are at most `share` x successes +
`floor_per_s` x seconds + what was saved up (after Finagle's retry budgets). Pure; integers, so that nothing
drifts.
"""

from dataclasses import dataclass

from penstock.clock import NS_PER_S

_UNIT = NS_PER_S
"""Of the level, per token: a token a second is one unit a nanosecond."""


@dataclass(slots=True, frozen=True, kw_only=True)
class RetryTerms:
    """How many requests that failed before their first byte may be tried again, on another worker.

    `RETRIES_MAX` of policy/queue_terms.py bounds the tries of each.
    """

    share: float = 0.1
    """Of the requests that end well."""
    floor_per_s: int = 3
    """So many a second are granted in any case."""
    saved_max: int = 100
    """What good times can save up."""


class RetryBudget:
    """One for a gateway. Begins with its floor."""

    __slots__ = ("_cap", "_floor", "_level", "_rate", "_seen_ns", "_share")

    def __init__(self, config: RetryTerms) -> None:
        self._rate = config.floor_per_s
        self._floor, self._cap = config.floor_per_s * _UNIT, max(config.saved_max, config.floor_per_s) * _UNIT
        self._share = round(config.share * _UNIT)
        self._level, self._seen_ns = self._floor, 0

    def succeeded(self) -> None:
        """A request has ended well."""
        assert self._share >= 0, self._share
        self._level = min(self._cap, self._level + self._share)

    def take(self, now_ns: int) -> bool:
        """Whether one more may be tried again; then it counts."""
        self._refill(now_ns)
        if self._level < _UNIT:
            return False
        self._level -= _UNIT
        assert 0 <= self._level <= self._cap, "a retry is taken from those that are there"
        return True

    def level(self, now_ns: int) -> float:
        """Retries that are there."""
        self._refill(now_ns)
        return self._level / _UNIT

    def _refill(self, now_ns: int) -> None:
        """Up to the floor by time, beyond it only by successes."""
        elapsed_ns, self._seen_ns = max(0, now_ns - self._seen_ns), max(now_ns, self._seen_ns)
        if self._level < self._floor:
            self._level = min(self._floor, self._level + elapsed_ns * self._rate)
