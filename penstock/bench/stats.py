"""Samples and their percentiles, in bounded memory."""

from array import array
from dataclasses import dataclass

from penstock.rng import Stream

SAMPLES_MAX = 1_000_000


@dataclass(slots=True, frozen=True)
class Distribution:
    """What is reported of a set of samples; the unit is that of the samples. All zero if there are none."""

    count: int
    mean: float
    min: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


class Samples:
    """Integer samples. Exact up to `bound` of them; beyond that a uniform random subset (reservoir).

    Vitter, "Random sampling with a reservoir", 1985, algorithm R. Count, mean, min and max stay exact.
    """

    def __init__(self, chance: Stream, *, bound: int = SAMPLES_MAX) -> None:
        assert bound > 0
        self._kept, self._bound, self._chance = array("q"), bound, chance
        self._count, self._sum, self._min, self._max = 0, 0, 0, 0

    def __len__(self) -> int:
        return self._count

    def add(self, value: int) -> None:
        """Take one sample."""
        self._min = value if self._count == 0 else min(self._min, value)
        self._max = value if self._count == 0 else max(self._max, value)
        self._count += 1
        self._sum += value
        if self._count <= self._bound:
            self._kept.append(value)
        elif (place := self._chance.randrange(self._count)) < self._bound:
            self._kept[place] = value

    def summary(self, *, divisor: float = 1.0) -> Distribution:
        """The distribution, each sample divided by `divisor` (a change of unit)."""
        if not self._count:
            return Distribution(0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        ordered = sorted(self._kept)
        p50, p90, p95, p99 = (percentile(ordered, share) / divisor for share in (0.50, 0.90, 0.95, 0.99))
        mean = self._sum / self._count / divisor
        return Distribution(self._count, mean, self._min / divisor, p50, p90, p95, p99, self._max / divisor)


def percentile(ordered: list[int], share: float) -> float:
    """The sample quantile at `share`, linear between neighbours (Hyndman and Fan 1996, type 7; numpy's
    default).
    """
    assert ordered
    assert 0.0 <= share <= 1.0
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)
