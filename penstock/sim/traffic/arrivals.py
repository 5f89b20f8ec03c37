"""When requests come: arrival processes, each a sequence of seconds drawn from one random stream."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import cos, pi
from typing import Protocol

from penstock import rng


class Arrivals(Protocol):
    """An arrival process."""

    def times(self, stream: rng.Stream, seconds: float) -> Iterator[float]:
        """Rising times from 0 to before `seconds`."""
        ...


@dataclass(slots=True, frozen=True)
class Poisson:
    """Independent arrivals at a steady rate."""

    per_s: float

    def times(self, stream: rng.Stream, seconds: float) -> Iterator[float]:
        """See `Arrivals`."""
        at = stream.expovariate(self.per_s) if self.per_s > 0 else seconds
        while at < seconds:
            yield at
            at += stream.expovariate(self.per_s)


@dataclass(slots=True, frozen=True)
class Gamma:
    """Gaps from a gamma distribution: a coefficient of variation above 1 is bursty, as recorded services
    are.
    """

    per_s: float
    cv: float = 2.0

    def times(self, stream: rng.Stream, seconds: float) -> Iterator[float]:
        """See `Arrivals`."""
        shape = 1 / self.cv**2
        scale = 1 / (self.per_s * shape) if self.per_s > 0 else seconds
        at = stream.gammavariate(shape, scale) if self.per_s > 0 else seconds
        while at < seconds:
            yield at
            at += stream.gammavariate(shape, scale)


@dataclass(slots=True, frozen=True)
class Diurnal:
    """A day's rhythm: a cosine from `low` to `high`, with its trough at time 0."""

    low_per_s: float
    high_per_s: float
    day_s: float = 86_400.0

    def rate(self, at_s: float) -> float:
        """Arrivals per second at that time."""
        return self.low_per_s + (self.high_per_s - self.low_per_s) * (1 - cos(2 * pi * at_s / self.day_s)) / 2

    def times(self, stream: rng.Stream, seconds: float) -> Iterator[float]:
        """See `Arrivals`. Thinning (Lewis and Shedler, 1979)."""
        peak = max(self.low_per_s, self.high_per_s)
        for at in Poisson(peak).times(stream, seconds):
            if stream.random() * peak < self.rate(at):
                yield at


@dataclass(slots=True, frozen=True)
class Spike:
    """A steady rate that is `factor` times as high between two moments: what becomes viral comes from one
    second to the next.
    """

    per_s: float
    factor: float = 20.0
    begins_s: float = 60.0
    ends_s: float = 120.0

    def times(self, stream: rng.Stream, seconds: float) -> Iterator[float]:
        """See `Arrivals`."""
        for begins, ends, rate in (
            (0.0, self.begins_s, self.per_s),
            (self.begins_s, self.ends_s, self.per_s * self.factor),
            (self.ends_s, seconds, self.per_s),
        ):
            for at in Poisson(rate).times(stream, max(0.0, min(ends, seconds) - begins)):
                yield begins + at


@dataclass(slots=True, frozen=True)
class Stampede:
    """`count` requests within `within_s` from `at_s` on: clients that all come back at once."""

    count: int
    at_s: float
    within_s: float = 1.0

    def times(self, stream: rng.Stream, seconds: float) -> Iterator[float]:
        """See `Arrivals`."""
        yield from (
            at
            for at in sorted(self.at_s + stream.random() * self.within_s for _ in range(self.count))
            if at < seconds
        )
