"""The last 15 minutes by five seconds, the last day by the minute, and three days of what SLOs count.

    ended requests ──> Recorder, one in each gateway process
                          │ take(), for each column and look; of several processes every second
                          v
    History.add(rows)  in the process itself, or in the parent of several (cli/wiring/processes.py)
       │        │
       │        └─ when a minute is over: its counts, encoded, for `watch.py`
       v
    History.window(seconds), History.slo(...)

So the numbers are of all gateway processes together, and there is one owner of them. Models and bands are
names of the configuration; of more than `SERIES_MAX` pairs the rest are counted as `OTHER`. Time is the wall
clock's, since the numbers outlive the process.
"""

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Literal, NamedTuple

import msgspec

from penstock.clock import NS_PER_S, Clock
from penstock.policy.admission.admit import Promises
from penstock.telemetry.catalog import OutcomeLabel
from penstock.telemetry.counts import (
    Book,
    Counts,
    EndedTogether,
    Latency,
    RequestMeasurement,
    Series,
    available_of,
    decode_rows,
)
from penstock.telemetry.metrics import Metrics

SERIES_MAX = 64
RECENT_STEP_S, RECENT_S = 5, 900
MINUTE_S, DAY_S = 60, 86_400
SLO_S = 3 * DAY_S
"""The longest window of an SLO's burn rate."""
COLUMNS_MAX = 288
"""Of `window`: a day is shown by five minutes."""

Objective = Literal["availability", "ttft", "tpot", "ttft_double"]
"""The last is half an objective: first tokens within twice the promised time."""
OBJECTIVES: tuple[Objective, ...] = ("availability", "ttft", "tpot", "ttft_double")
_NUMBERS = 2 * len(OBJECTIVES)


class _Outcome(NamedTuple):
    """Of one request, as it is counted."""

    name: str
    is_due: bool
    """It was to be answered."""
    is_bad: bool
    """And was not."""


def _outcome(outcome: OutcomeLabel) -> _Outcome:
    total, bad = available_of({outcome: 1})
    return _Outcome(outcome.value, bool(total), bool(bad))


_OUTCOMES = {outcome: _outcome(outcome) for outcome in OutcomeLabel}


AT_ONCE_MAX = 256
"""Requests that are counted together: they wait until somebody asks, or so many have ended."""
_ALIKE = attrgetter("endpoint", "outcome", "tenant", "tier", "band", "worker")


class Recorder:
    """Counts the requests that have ended in this process: on the page of metrics, and for the history since
    the last `take`.

    Several at a time: what is the same of them is looked up once, and their times are sorted into the buckets
    of ten histograms at once, which costs each a third of what it would cost alone.
    """

    def __init__(self, promises: Promises, metrics: Metrics) -> None:
        """`promises` are admission's: an answer is late by the same times as it was let in by, as
        configured. They are not stretched for a slow machine or a long prompt, for an objective that gives
        way says nothing.
        """
        self._promises, self._metrics, self._book = promises, metrics, Book(SERIES_MAX)
        self._series: dict[tuple[str, str], Series] = {}
        """By model and band, of which there are as many as the configuration has."""
        self._ended: list[tuple[str, RequestMeasurement]] = []
        metrics.count_ended = self.count

    def ended(self, model: str, record: RequestMeasurement) -> None:
        """Count one request, once."""
        self._ended.append((model, record))
        if len(self._ended) >= AT_ONCE_MAX:
            self.count()

    def count(self) -> None:
        """Count those that wait for it."""
        ended, self._ended = self._ended, []
        alike: dict[tuple[object, ...], list[RequestMeasurement]] = {}
        for model, record in ended:
            key = (model, _ALIKE(record))
            if (found := alike.get(key)) is None:
                alike[key] = [record]
            else:
                found.append(record)
        for (model, _), records in alike.items():
            together = EndedTogether(*records)
            assert isinstance(model, str)
            self._metrics.model(model).requests_ended(together)
            self._metrics.tenant(together)
            self._count(model, together)

    def take(self) -> Book:
        """The requests that ended since the last time."""
        self.count()
        return self._book.take()

    def _count(self, model: str, ended: EndedTogether) -> None:
        like, judged = ended.like, self._metrics.judged
        series = self._series.get((model, like.band))
        if series is None:
            series = self._series[model, like.band] = Series(model, like.band)
        counts, outcome = self._book.of(series), _OUTCOMES[like.outcome]
        counts.outcomes[outcome.name] = counts.outcomes.get(outcome.name, 0) + ended.count
        counts.prompt_tokens += ended.prompt_tokens
        counts.cached_tokens += ended.cached_tokens
        counts.generated_tokens += ended.generated_tokens
        if outcome.is_due:
            judged(model, like.band, "availability", due=ended.count, missed=outcome.is_bad * ended.count)
        counts.queue.observe_all(ended.queue_ns)
        counts.prefill.observe_all(ended.prefill_ns)
        counts.ttft.observe_all(ended.ttft_ns)
        counts.tpot.observe_all(ended.tpot_ns)
        promise = self._promises.of(tier=like.tier, band=like.band)
        if promise.ttft_ns and ended.ttft_ns:
            due = len(ended.ttft_ns)
            late, far = (due - bisect_right(ended.ttft_ns, n * promise.ttft_ns) for n in (1, 2))
            counts.ttft_due += due
            counts.ttft_late += late
            counts.ttft_far += far
            judged(model, like.band, "ttft", due=due, missed=late)
            judged(model, like.band, "ttft_double", due=due, missed=far)
        if promise.tpot_ns and ended.tpot_ns:
            due = len(ended.tpot_ns)
            late = due - bisect_right(ended.tpot_ns, promise.tpot_ns)
            counts.tpot_due += due
            counts.tpot_late += late
            judged(model, like.band, "tpot", due=due, missed=late)


class Columns(msgspec.Struct, kw_only=True):
    """One series, column by column: lists as long as `Window.times`. A time is null where nothing was
    measured; `*_p50_ms` and the like are percentiles of that column's requests.
    """

    model: str
    """Empty, with `band`, in `Window.total`."""
    band: str
    requests: list[int]
    """That ended."""
    outcomes: dict[str, list[int]]
    """The same by how they ended (`OutcomeLabel`), only those that occur: "error" and "shed" count against
    availability; "limited" is a tenant over its own limits, "rejected" a wrong request, "abort" a client
    that left."""
    prompt_tokens: list[int]
    cached_tokens: list[int]
    generated_tokens: list[int]
    queue_mean_ms: list[float | None]
    """With `prefill_mean_ms` above it, a stack as high as the mean TTFT."""
    prefill_mean_ms: list[float | None]
    queue_p95_ms: list[float | None]
    prefill_p95_ms: list[float | None]
    ttft_p50_ms: list[float | None]
    ttft_p95_ms: list[float | None]
    ttft_p99_ms: list[float | None]
    tpot_p50_ms: list[float | None]
    tpot_p95_ms: list[float | None]
    ttft_due: list[int]
    """Answers to which a TTFT is promised (`admission`), and those that took longer; the same for TPOT."""
    ttft_late: list[int]
    tpot_due: list[int]
    tpot_late: list[int]


class Window(msgspec.Struct, kw_only=True):
    """`GET /admin/history?seconds=900`: the last so many seconds. At most `COLUMNS_MAX` columns: by 5 s up to
    900 s, beyond that by whole minutes.

        {"now": 1700000003, "step_s": 5, "times": [1699999105, ...],
         "series": [{"model": "m", "band": "default", "requests": [3, ...], ...}],
         "summary": [the same with one column: the whole window, with its own percentiles],
         "total": {the sum of all series, by column}, "total_summary": {the same, one column}}
    """

    now: int
    """Seconds since the Unix epoch."""
    step_s: int
    times: list[int]
    """When each column begins; the last one is not over yet."""
    series: list[Columns]
    summary: list[Columns]
    total: Columns
    total_summary: Columns


class SloCount(msgspec.Struct, frozen=True):
    """Of one objective in some window."""

    total: int = 0
    bad: int = 0


class History:
    """See the module. Not thread-safe: its owner's event loop uses it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._recent: dict[int, Book] = {}
        self._open_minute, self._open = -1, Book(SERIES_MAX)
        self._minutes: dict[int, bytes] = {}
        """By minute since the epoch, encoded: live objects would take ten times the memory."""
        self._closed: list[tuple[int, bytes]] = []
        self._slo = _SloMinutes()
        self.on_rows: Callable[[Sequence[tuple[Series, Counts]]], None] | None = None
        """Told of all that is added; None: nobody asks."""

    def add(self, rows: Iterable[tuple[Series, Counts]]) -> None:
        """Count what has just ended."""
        now_s = self._clock.wall_ns() // NS_PER_S
        rows = list(rows)
        if not rows:
            return
        if self.on_rows is not None:
            self.on_rows(rows)
        step = now_s // RECENT_STEP_S
        self._recent.setdefault(step, Book(SERIES_MAX)).add(rows)
        for old in [each for each in self._recent if each <= step - RECENT_S // RECENT_STEP_S]:
            del self._recent[old]
        minute = now_s // MINUTE_S
        if minute != self._open_minute:
            self._shut()
            self._open_minute = minute
        self._open.add(rows)
        self._slo.add(minute, rows)

    def take_closed(self, *, all_of_it: bool = False) -> list[tuple[int, bytes]]:
        """The minutes that are over and were not handed out before, encoded, for the disk; with `all_of_it`
        also the one that is not over.
        """
        if all_of_it or self._clock.wall_ns() // NS_PER_S // MINUTE_S != self._open_minute:
            self._shut()
        taken, self._closed = self._closed, []
        return taken

    def restore(self, minute: int, rows: Sequence[tuple[Series, Counts]]) -> None:
        """Take over a minute of before the start. Several parts of one minute add up."""
        now_minute = self._clock.wall_ns() // NS_PER_S // MINUTE_S
        if not now_minute - SLO_S // MINUTE_S < minute <= now_minute:
            return
        self._slo.add(minute, rows)
        if minute > now_minute - DAY_S // MINUTE_S:
            self._keep(minute, rows)

    def window(self, seconds: int) -> Window:
        """The last so many seconds, by column. O(minutes) to read a day: some milliseconds."""
        now_s = self._clock.wall_ns() // NS_PER_S
        is_recent = seconds <= RECENT_S
        unit_s = RECENT_STEP_S if is_recent else MINUTE_S
        units = max(1, -(-min(seconds, DAY_S) // unit_s))
        per_column = -(-units // COLUMNS_MAX)
        step_s = unit_s * per_column
        num = -(-units // per_column)
        first = now_s // step_s - num + 1
        times = [(first + i) * step_s for i in range(num)]
        table = dict[Series, list[Counts]]()
        for at_s, rows in self._recent_rows() if is_recent else self._minute_rows(times[0]):
            column = bisect_right(times, at_s) - 1
            if column >= 0 and at_s <= now_s:
                for series, counts in rows:
                    cells = table.get(series)
                    if cells is None:
                        cells = table[series] = [Counts() for _ in times]
                    cells[column].add(counts)
        total = [_summed(cells[i] for cells in table.values()) for i in range(num)]
        named = sorted(table.items())
        return Window(
            now=now_s,
            step_s=step_s,
            times=times,
            series=[_columns(series, cells) for series, cells in named],
            summary=[_columns(series, [_summed(cells)]) for series, cells in named],
            total=_columns(_ALL, total),
            total_summary=_columns(_ALL, [_summed(total)]),
        )

    @property
    def series(self) -> Sequence[Series]:
        """Those that were seen in the last three days."""
        return self._slo.series

    def slo(self, series: Series, objective: Objective, seconds: int) -> SloCount:
        """The requests that count for an objective in the last so many seconds, by whole minutes: the one
        that is not over is the last.
        """
        minute = self._clock.wall_ns() // NS_PER_S // MINUTE_S
        return self._slo.sum(series, objective, minute, max(1, seconds // MINUTE_S))

    def _recent_rows(self) -> Iterator[tuple[int, Iterable[tuple[Series, Counts]]]]:
        for step, book in self._recent.items():
            yield step * RECENT_STEP_S, book

    def _minute_rows(self, since_s: int) -> Iterator[tuple[int, Iterable[tuple[Series, Counts]]]]:
        for minute, body in self._minutes.items():
            if minute * MINUTE_S >= since_s:
                yield minute * MINUTE_S, decode_rows(body)
        if self._open:
            yield self._open_minute * MINUTE_S, self._open

    def _shut(self) -> None:
        """Keep the open minute in its short form."""
        if self._open:
            book = self._open.take()
            self._keep(self._open_minute, book)
            self._closed.append((self._open_minute, book.encode()))

    def _keep(self, minute: int, rows: Iterable[tuple[Series, Counts]]) -> None:
        book = Book(SERIES_MAX, rows)
        if (known := self._minutes.get(minute)) is not None:
            book.add(decode_rows(known))
        self._minutes[minute] = book.encode()
        while len(self._minutes) > DAY_S // MINUTE_S:
            del self._minutes[min(self._minutes)]


class _SloMinutes:
    """By series, for each minute of three days, `total` and `bad` of each objective."""

    _MINUTES = SLO_S // MINUTE_S

    def __init__(self) -> None:
        self._rings: dict[Series, array[int]] = {}
        self._last = -1
        """The latest minute."""

    @property
    def series(self) -> Sequence[Series]:
        return sorted(self._rings)

    def add(self, minute: int, rows: Iterable[tuple[Series, Counts]]) -> None:
        self._advance(minute)
        if minute <= self._last - self._MINUTES:
            return
        for series, counts in rows:
            ring = self._rings.get(series)
            if ring is None:
                ring = self._rings[series] = array("Q", bytes(8 * _NUMBERS * self._MINUTES))
            for i, number in enumerate(_slo_numbers(counts)):
                ring[i * self._MINUTES + minute % self._MINUTES] += number

    def sum(self, series: Series, objective: Objective, minute: int, minutes: int) -> SloCount:
        self._advance(minute)
        ring = self._rings.get(series)
        if ring is None:
            return SloCount()
        minutes = min(minutes, self._MINUTES)
        part = 2 * OBJECTIVES.index(objective)
        return SloCount(self._span(ring, part, minute, minutes), self._span(ring, part + 1, minute, minutes))

    def _span(self, ring: "array[int]", part: int, minute: int, minutes: int) -> int:
        base, end = part * self._MINUTES, minute % self._MINUTES + 1
        start = end - minutes
        if start >= 0:
            return sum(ring[base + start : base + end])
        return sum(ring[base : base + end]) + sum(ring[base + self._MINUTES + start : base + self._MINUTES])

    def _advance(self, minute: int) -> None:
        """Empty the cells of minutes that begin."""
        if minute <= self._last:
            return
        for each in range(max(self._last + 1, minute - self._MINUTES + 1), minute + 1):
            for ring in self._rings.values():
                for part in range(_NUMBERS):
                    ring[part * self._MINUTES + each % self._MINUTES] = 0
        self._last = minute


def _slo_numbers(counts: Counts) -> tuple[int, ...]:
    """As in `OBJECTIVES`."""
    ttft_due, tpot_due = counts.ttft_due, counts.tpot_due
    times = (ttft_due, counts.ttft_late, tpot_due, counts.tpot_late, ttft_due, counts.ttft_far)
    return (*available_of(counts.outcomes), *times)


_ALL = Series("", "")


def _summed(cells: Iterable[Counts]) -> Counts:
    found = Counts()
    for each in cells:
        found.add(each)
    return found


def _columns(series: Series, cells: Sequence[Counts]) -> Columns:
    def quantiles(latencies: Sequence[Latency], share: float) -> list[float | None]:
        return [each.quantile_ms(share) for each in latencies]

    queue, prefill = [each.queue for each in cells], [each.prefill for each in cells]
    ttft, tpot = [each.ttft for each in cells], [each.tpot for each in cells]
    seen = set[str]().union(*(each.outcomes for each in cells))
    return Columns(
        model=series.model,
        band=series.band,
        requests=[each.requests for each in cells],
        outcomes={
            outcome.value: [each.outcomes.get(outcome.value, 0) for each in cells]
            for outcome in OutcomeLabel
            if outcome.value in seen
        },
        prompt_tokens=[each.prompt_tokens for each in cells],
        cached_tokens=[each.cached_tokens for each in cells],
        generated_tokens=[each.generated_tokens for each in cells],
        queue_mean_ms=[each.mean_ms() for each in queue],
        prefill_mean_ms=[each.mean_ms() for each in prefill],
        queue_p95_ms=quantiles(queue, 0.95),
        prefill_p95_ms=quantiles(prefill, 0.95),
        ttft_p50_ms=quantiles(ttft, 0.5),
        ttft_p95_ms=quantiles(ttft, 0.95),
        ttft_p99_ms=quantiles(ttft, 0.99),
        tpot_p50_ms=quantiles(tpot, 0.5),
        tpot_p95_ms=quantiles(tpot, 0.95),
        ttft_due=[each.ttft_due for each in cells],
        ttft_late=[each.ttft_late for each in cells],
        tpot_due=[each.tpot_due for each in cells],
        tpot_late=[each.tpot_late for each in cells],
    )
