"""A token bucket in whole numbers, and the line of those that were refused.

The level is counted in sixty-billionths of a token: rates are per minute and time is in nanoseconds, so a
refill is one exact product and nothing ever drifts. GCRA (ITU-T I.371, the algorithm behind ATM policing) is
the same bucket, seen as the time at which it is full again.

The level may fall below zero: a request that was admitted is never stopped, so an answer that is longer than
what was reserved for it is charged as debt, and the next request waits for it.
"""

from typing import Protocol

from penstock.clock import NS_PER_S

UNIT = 60 * NS_PER_S
"""One token (or request): a rate of one per minute refills exactly this in a minute's nanoseconds."""


class TokenSource(Protocol):
    """The source that a limit spends from: a bucket of this process alone, or one filled by leases
    (policy/limits/lease.py).
    """

    @property
    def burst(self) -> int:
        """Its capacity: more than this at once never passes."""
        ...

    def has(self, now_ns: int, amount: int) -> bool:
        """Whether `amount` may be spent now."""
        ...

    def lacks(self, now_ns: int, amount: int) -> bool:
        """Whether a store is asked first, since what is here does not cover `amount`. Never waits."""
        ...

    def take(self, now_ns: int, amount: int) -> None:
        """Spend `amount`, into debt if need be."""
        ...

    def give(self, now_ns: int, amount: int) -> None:
        """Put back what was taken and not used; over `burst` it is lost."""
        ...

    def wait_ns(self, now_ns: int, amount: int) -> int:
        """How long until `amount` is there if none is taken: exact, 0 if it is there."""
        ...

    def place_ns(self, now_ns: int, amount: int, ahead_max_ns: int) -> int:
        """Hand out the next place in the refill to one that was refused: how long it should stay away."""
        ...

    def standing(self, now_ns: int) -> tuple[int, int]:
        """Whole tokens that are there (0 while in debt), and how long until it is full if none are taken."""
        ...

    def change(self, now_ns: int, rate: int, burst: int) -> None:
        """Take a new rate per minute and a new burst; what was used stays used."""
        ...


def ceil_div(dividend: int, divisor: int) -> int:
    """The quotient, rounded up."""
    assert divisor > 0, divisor
    return -(-dividend // divisor)


class Line:
    """Places in the refill that were handed out to those that were refused.

    It is the virtual arrival time of GCRA, kept for the refused: the first is asked to come when the bucket
    has what it needs, the next when the bucket has had that and its own besides. So clients that wait as
    asked are admitted at the first try, in any number, and never come as one wave. Places that are not
    taken pass by themselves.
    """

    __slots__ = ("_end_ns",)

    def __init__(self) -> None:
        self._end_ns = 0

    def place_ns(self, now_ns: int, wait_ns: int, length_ns: int, ahead_max_ns: int) -> int:
        """How long one should stay away that could come after `wait_ns` and takes `length_ns` of refill.

        Never less than `wait_ns`; the line itself is at most `ahead_max_ns` long.
        """
        end_ns = now_ns + wait_ns
        if self._end_ns > now_ns:
            end_ns = max(end_ns, min(self._end_ns + length_ns, now_ns + ahead_max_ns))
        self._end_ns = end_ns
        assert end_ns - now_ns >= wait_ns, "no client is asked to come before there is enough"
        return end_ns - now_ns


class Bucket:
    """`rate` tokens per minute, in bursts of up to `burst`. Begins full."""

    __slots__ = ("_cap", "_level", "_line", "_rate", "_seen_ns", "burst")

    def __init__(self, now_ns: int, rate: int, burst: int) -> None:
        assert rate > 0, rate
        assert burst > 0, burst
        self.burst, self._rate, self._cap, self._seen_ns = burst, rate, burst * UNIT, now_ns
        self._level = self._cap
        self._line = Line()

    def level(self, now_ns: int) -> int:
        """The content, in units of `UNIT` per token; negative is debt."""
        elapsed_ns = now_ns - self._seen_ns
        if elapsed_ns > 0:
            self._level = min(self._cap, self._level + elapsed_ns * self._rate)
            self._seen_ns = now_ns
        assert self._level <= self._cap, "a bucket is never more than full"
        return self._level

    def has(self, now_ns: int, amount: int) -> bool:
        """See `TokenSource.has`."""
        return self.level(now_ns) >= amount * UNIT

    def lacks(self, now_ns: int, amount: int) -> bool:
        """See `TokenSource.lacks`: all there is to know is here."""
        del now_ns, amount
        return False

    def take(self, now_ns: int, amount: int) -> None:
        """See `TokenSource.take`."""
        assert amount >= 0, amount
        self._level = self.level(now_ns) - amount * UNIT

    def give(self, now_ns: int, amount: int) -> None:
        """See `TokenSource.give`."""
        assert amount >= 0, amount
        self._level = min(self._cap, self.level(now_ns) + amount * UNIT)

    def wait_ns(self, now_ns: int, amount: int) -> int:
        """See `TokenSource.wait_ns`."""
        return max(0, ceil_div(amount * UNIT - self.level(now_ns), self._rate))

    def place_ns(self, now_ns: int, amount: int, ahead_max_ns: int) -> int:
        """See `TokenSource.place_ns`."""
        length_ns = ceil_div(amount * UNIT, self._rate)
        return self._line.place_ns(now_ns, self.wait_ns(now_ns, amount), length_ns, ahead_max_ns)

    def standing(self, now_ns: int) -> tuple[int, int]:
        """See `TokenSource.standing`."""
        level = self.level(now_ns)
        return (level // UNIT if level > 0 else 0), -((level - self._cap) // self._rate)

    def change(self, now_ns: int, rate: int, burst: int) -> None:
        """See `TokenSource.change`.

        A smaller burst can empty the bucket; it makes no debt that was not there.
        """
        assert rate > 0, rate
        assert burst > 0, burst
        level, cap = self.level(now_ns), burst * UNIT
        self._level = max(level + cap - self._cap, min(level, 0))
        self.burst, self._rate, self._cap = burst, rate, cap
