"""Counters, gauges and histograms, and their page in Prometheus' text format (0.0.4).

They belong to one thread, the event loop's, so counting takes no lock: a dictionary look-up for the labels,
where they are not resolved beforehand, and an addition. That is why they are ours and not the client
library's, whose locks and checks cost a request more than everything else that is counted of it. A page may
be written by any thread.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Generic, TypeVar

from penstock.telemetry.catalog import Metric


class Counter:
    """A number that grows."""

    __slots__ = ("begins", "value")

    def __init__(self, begins: Sequence[str], _: Sequence[float] = ()) -> None:
        """`begins`: what its lines begin with, each with the space before the number."""
        self.begins, self.value = begins, 0.0

    def inc(self, by: float = 1.0) -> None:
        """Count so much more."""
        assert by >= 0, by
        self.value += by

    def numbers(self) -> Iterable[float]:
        """One for each of its lines."""
        return (self.value,)


class Gauge:
    """A number as of now."""

    __slots__ = ("begins", "value")

    def __init__(self, begins: Sequence[str], _: Sequence[float] = ()) -> None:
        """`begins`: what its lines begin with, each with the space before the number."""
        self.begins, self.value = begins, 0.0

    def set(self, value: float) -> None:
        """It is so much now."""
        self.value = value

    def inc(self, by: float = 1.0) -> None:
        """It is so much more."""
        self.value += by

    def dec(self, by: float = 1.0) -> None:
        """It is so much less."""
        self.value -= by

    def numbers(self) -> Iterable[float]:
        """One for each of its lines."""
        return (self.value,)


class Histogram:
    """How many observations were at most how large."""

    __slots__ = ("_bounds", "begins", "counts", "sum")

    def __init__(self, begins: Sequence[str], bounds: Sequence[float]) -> None:
        """`bounds` are the buckets' upper ones, which belong to them; a last bucket has no bound."""
        self.begins, self._bounds = begins, bounds
        self.counts = [0] * (len(bounds) + 1)
        """Of each bucket by itself."""
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count one observation."""
        self.counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def observe_all(self, values: Sequence[float]) -> None:
        """Count several observations, which are sorted: a search for each bucket that has some."""
        bounds, counts, num, below = self._bounds, self.counts, len(values), 0
        bucket = bisect_left(bounds, values[0]) if num else 0
        while below < num and bucket < len(bounds):
            upto = bisect_right(values, bounds[bucket], below)
            counts[bucket] += upto - below
            below, bucket = upto, bucket + 1
        counts[-1] += num - below
        self.sum += sum(values)

    @property
    def count(self) -> int:
        """How many observations there are."""
        return sum(self.counts)

    def numbers(self) -> Iterable[float]:
        """One for each of its lines: the buckets, each with all below it; the count; the sum."""
        upto = list(accumulate(self.counts))
        return (*upto, upto[-1], self.sum)


Kind = TypeVar("Kind", Counter, Gauge, Histogram)


class MetricFamily(Generic[Kind]):
    """A metric of the catalog: what is counted, by the values of its labels."""

    __slots__ = ("_children", "_head", "_kind", "_metric")

    def __init__(self, metric: Metric, kind: type[Kind]) -> None:
        self._metric, self._kind = metric, kind
        self._children: dict[tuple[str, ...], Kind] = {}
        text = metric.help.replace("\\", r"\\").replace("\n", r"\n")
        self._head = f"# HELP {metric.name} {text}\n# TYPE {metric.name} {metric.kind}\n"
        if not metric.labels:
            self.labels()  # It is on the page from the start.

    def labels(self, *values: str) -> Kind:
        """The counter under these values, in the order of the catalog's labels."""
        child = self._children.get(values)
        if child is None:
            assert len(values) == len(self._metric.labels), (self._metric.name, values)
            child = self._children[values] = self._kind(self._begins(values), self._metric.buckets)
        return child

    def remove(self, *values: str) -> None:
        """Show it no more. Nothing happens if it was never shown."""
        self._children.pop(values, None)

    def is_of(self, kind: type[Counter | Gauge | Histogram]) -> bool:
        """Whether this is what is counted."""
        return self._kind is kind

    def write(self, lines: list[str]) -> None:
        """Add what the page has of it."""
        lines.append(self._head)
        for child in [*self._children.values()]:  # Another thread that counts may add one meanwhile.
            for begin, number in zip(child.begins, child.numbers(), strict=True):
                lines.append(f"{begin}{float(number)!r}\n")

    def _begins(self, values: tuple[str, ...]) -> tuple[str, ...]:
        name, buckets = self._metric.name, self._metric.buckets
        given = [*zip(self._metric.labels, values, strict=True)]
        if not buckets:
            return (f"{name}{_labels(given)} ",)
        bounds = [*(repr(float(bound)) for bound in buckets), "+Inf"]
        rows = [f"{name}_bucket{_labels([*given, ('le', bound)])} " for bound in bounds]
        return (*rows, f"{name}_count{_labels(given)} ", f"{name}_sum{_labels(given)} ")


def _labels(pairs: Iterable[tuple[str, str]]) -> str:
    text = ",".join(f'{name}="{_escaped(str(value))}"' for name, value in sorted(pairs))
    return f"{{{text}}}" if text else ""


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


class Instruments:
    """All metrics of a catalog; the typed getters make sure that a name has the kind it should."""

    def __init__(self, catalog: Iterable[Metric]) -> None:
        self._families = {metric.name: _family(metric) for metric in catalog}

    def page(self, names: Iterable[str] | None = None) -> bytes:
        """All of it in the catalog's order, or these metrics."""
        lines = list[str]()
        for name in self._families if names is None else names:
            self._families[name].write(lines)
        return "".join(lines).encode()

    def counter(self, name: str) -> MetricFamily[Counter]:
        """A counter of the catalog."""
        return self._get(name, Counter)

    def gauge(self, name: str) -> MetricFamily[Gauge]:
        """A gauge of the catalog."""
        return self._get(name, Gauge)

    def histogram(self, name: str) -> MetricFamily[Histogram]:
        """A histogram of the catalog."""
        return self._get(name, Histogram)

    def _get(self, name: str, kind: type[Kind]) -> MetricFamily[Kind]:
        family = self._families[name]
        assert family.is_of(kind), name
        return family  # pyright: ignore[reportReturnType]


def _family(metric: Metric) -> MetricFamily[Counter] | MetricFamily[Gauge] | MetricFamily[Histogram]:
    match metric.kind:
        case "counter":
            return MetricFamily(metric, Counter)
        case "gauge":
            return MetricFamily(metric, Gauge)
        case "histogram":
            return MetricFamily(metric, Histogram)
