"""Times of the week, by UTC: how many workers there are to be, and whether anything may change."""

from collections.abc import Iterable

from penstock.clock import NS_PER_S
from penstock.config.scale import MINUTES, WeekSpan, parse_span

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
