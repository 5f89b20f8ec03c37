"""The counts of ended requests, in a form that adds up: over time, over processes, over models.

Latencies are histograms with the same buckets everywhere, so percentiles of a sum are as exact as those of a
part: a bucket is at most 1/8 of its lower bound wide, and a percentile is off by half of that at most. Only
buckets with something in them are kept.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from penstock.telemetry.catalog import Endpoint, OutcomeLabel


class RequestMeasurement(msgspec.Struct, frozen=True, gc=False):
    """One ended request, as it is counted. A time that never was (no first token) is None.

    Not by keyword alone: one is made for every request, in this order.
    """

    endpoint: Endpoint
    outcome: OutcomeLabel
    duration_ns: int
    queue_ns: int | None = None
    ttft_ns: int | None = None
    tpot_ns: int | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    tenant: str = ""
    tier: str = ""
    band: str = ""
    """Its tenant's."""
    worker: str = ""
    """The last that it ran on; empty: none."""


class EndedTogether:
    """Requests that are counted at once, alike but for their times and tokens. Times are sorted, where there
    are any.
    """

    __slots__ = (
        "cached_tokens", "count", "decode_ns", "duration_ns", "generated_tokens", "like", "prefill_ns",
        "prompt_tokens", "queue_ns", "queued_ns", "tpot_ns", "ttft_ns",
    )  # fmt: skip

    def __init__(self, *records: RequestMeasurement) -> None:
        self.like, self.count = records[0], len(records)
        """One of them: endpoint, outcome, tenant, tier, band and worker are of all."""
        self.prompt_tokens = sum([each.prompt_tokens for each in records])
        self.cached_tokens = sum([each.cached_tokens for each in records])
        self.generated_tokens = sum([each.generated_tokens for each in records])
        self.duration_ns = sorted([each.duration_ns for each in records])
        self.queued_ns = sorted([each.queue_ns for each in records if each.queue_ns is not None])
        self.tpot_ns = sorted([each.tpot_ns for each in records if each.tpot_ns is not None])
        begun = [each for each in records if each.ttft_ns is not None]
        self.ttft_ns = sorted([each.ttft_ns or 0 for each in begun])
        waits = [min(each.queue_ns or 0, each.ttft_ns or 0) for each in begun]
        self.prefill_ns = sorted(
            [(each.ttft_ns or 0) - wait for each, wait in zip(begun, waits, strict=True)]
        )
        self.queue_ns = sorted(waits)
        """Of those with a first token: with `prefill_ns` it is their TTFT."""
        self.decode_ns = sorted([max(0, each.duration_ns - (each.ttft_ns or 0)) for each in begun])


US = 1_000
"""Nanoseconds; buckets count whole microseconds."""
_SUB_BITS = 3
_SUB = 1 << _SUB_BITS
_US_MAX = (1 << 32) - 1
"""More than an hour counts as this."""


class Latency(msgspec.Struct, array_like=True):
    """A histogram of durations."""

    sum_us: int = 0
    buckets: dict[int, int] = {}
    """How many, by `bucket_of`."""

    @property
    def count(self) -> int:
        """How many durations there are."""
        return sum(self.buckets.values())

    def observe_all(self, times_ns: Sequence[int]) -> None:
        """Count several durations, which are sorted: a search for each bucket that has some."""
        self.sum_us += sum([min(max(0, ns // US), _US_MAX) for ns in times_ns])
        begin, buckets = 0, self.buckets
        while begin < len(times_ns):
            bucket = bucket_of(min(max(0, times_ns[begin] // US), _US_MAX))
            end = bisect_left(times_ns, bounds_us(bucket + 1) * US, begin + 1)
            if bucket == _LAST:
                end = len(times_ns)
            buckets[bucket] = buckets.get(bucket, 0) + end - begin
            begin = end

    def add(self, other: "Latency") -> None:
        """Count all of another one's."""
        self.sum_us += other.sum_us
        for bucket, count in other.buckets.items():
            self.buckets[bucket] = self.buckets.get(bucket, 0) + count

    def mean_ms(self) -> float | None:
        """None: there is none."""
        count = self.count
        return round(self.sum_us / count / 1000, 3) if count else None

    def quantile_ms(self, share: float) -> float | None:
        """The middle of the bucket in which this share of the durations is reached; None: there is none."""
        left = share * self.count
        for bucket in sorted(self.buckets):
            left -= self.buckets[bucket]
            if left <= 0:
                lower, upper = bounds_us(bucket), bounds_us(bucket + 1)
                return round((lower + upper - 1) / 2 / 1000, 3)
        return None


def bucket_of(us: int) -> int:
    """The bucket of a duration: one for each of the first 16 microseconds, then eight for each doubling."""
    shift = us.bit_length() - _SUB_BITS - 1
    return shift * _SUB + (us >> shift) if shift > 0 else us


def bounds_us(bucket: int) -> int:
    """The least duration of a bucket."""
    shift = max(0, bucket // _SUB - 1)
    return (bucket - shift * _SUB) << shift


_LAST = bucket_of(_US_MAX)


class Counts(msgspec.Struct, array_like=True):
    """The requests that ended in some span of time, of one model and band."""

    outcomes: dict[str, int] = {}
    """Requests by `OutcomeLabel`."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    queue: Latency = msgspec.field(default_factory=Latency)
    prefill: Latency = msgspec.field(default_factory=Latency)
    """From the start on a worker to the first token. TTFT is queue and prefill."""
    ttft: Latency = msgspec.field(default_factory=Latency)
    tpot: Latency = msgspec.field(default_factory=Latency)
    ttft_due: int = 0
    """Answers to which a time to the first token is promised, and how many of them took longer."""
    ttft_late: int = 0
    tpot_due: int = 0
    tpot_late: int = 0
    ttft_far: int = 0
    """Answers that took over twice the promised time to their first token."""

    @property
    def requests(self) -> int:
        """How many ended."""
        return sum(self.outcomes.values())

    def add(self, other: "Counts") -> None:
        """Count all of another one's."""
        for outcome, count in other.outcomes.items():
            self.outcomes[outcome] = self.outcomes.get(outcome, 0) + count
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.queue.add(other.queue)
        self.prefill.add(other.prefill)
        self.ttft.add(other.ttft)
        self.tpot.add(other.tpot)


_SUMS = (
    "prompt_tokens", "cached_tokens", "generated_tokens", "ttft_due", "ttft_late", "tpot_due", "tpot_late",
    "ttft_far",
)  # fmt: skip


class Series(msgspec.Struct, frozen=True, array_like=True, order=True):
    """The owner of the numbers."""

    model: str
    band: str


OTHER = Series("other", "other")
"""All series beyond the bound together."""


class Book:
    """Counts by series, at most `series_max` of them and `OTHER`."""

    __slots__ = ("_rows", "_series_max")

    def __init__(self, series_max: int, rows: Iterable[tuple[Series, Counts]] = ()) -> None:
        self._series_max = series_max
        self._rows: dict[Series, Counts] = {}
        for series, counts in rows:
            self.of(series).add(counts)

    def __bool__(self) -> bool:
        return bool(self._rows)

    def __iter__(self) -> Iterator[tuple[Series, Counts]]:
        return iter(self._rows.items())

    def of(self, series: Series) -> Counts:
        """Where a series is counted."""
        found = self._rows.get(series)
        if found is None:
            if len(self._rows) >= self._series_max:
                series = OTHER
            found = self._rows.setdefault(series, Counts())
        return found

    def add(self, rows: Iterable[tuple[Series, Counts]]) -> None:
        """Count all of another one's."""
        for series, counts in rows:
            self.of(series).add(counts)

    def take(self) -> "Book":
        """Its content; it is empty afterwards."""
        taken = Book(self._series_max)
        taken._rows, self._rows = self._rows, {}
        return taken

    def encode(self) -> bytes:
        """As `decode_rows` reads it."""
        return _encode(list(self._rows.items()))


_encode = msgspec.msgpack.Encoder().encode
_rows = msgspec.msgpack.Decoder(list[tuple[Series, Counts]])


def decode_rows(body: bytes) -> list[tuple[Series, Counts]]:
    """The rows that `Book.encode` wrote.

    Raises:
        msgspec.MsgspecError: something else did.
    """
    return _rows.decode(body)


ANSWERED = frozenset({OutcomeLabel.STOP, OutcomeLabel.LENGTH, OutcomeLabel.TOOL_CALLS, OutcomeLabel.BUDGET})
FAILED = frozenset({OutcomeLabel.ERROR, OutcomeLabel.SHED})
"""The outcomes that count against availability: a request that was wrong and a client that left do not."""


def available_of(outcomes: Mapping[str, int]) -> tuple[int, int]:
    """Requests that were to be answered, and how many were not."""
    failed = sum(outcomes.get(each, 0) for each in FAILED)
    return failed + sum(outcomes.get(each, 0) for each in ANSWERED), failed
