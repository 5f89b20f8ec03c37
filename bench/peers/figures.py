"""Figures, their spread over rounds, their ratios to the best peer, and the goals. Pure: no server, no clock.

A ratio is taken round by round, between servers that were measured one after the other, and then summed up;
it is written so that more is better: ours / peer for rates, peer / ours for times.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median

import msgspec


class Level(msgspec.Struct, frozen=True, kw_only=True):
    """One closed-loop level of one server."""

    callers: int
    requests: int
    failed: int
    errors: dict[str, int]
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    output_tokens_per_s: float
    ttft_p50_ms: float
    ttft_p95_ms: float
    tpot_p50_ms: float
    tpot_p95_ms: float


class PrefixTimes(msgspec.Struct, frozen=True, kw_only=True):
    """TTFT of a 1,500-token prefix: unknown, and shared with an earlier prompt."""

    miss_ms: float
    hit_ms: float


class Arrival(msgspec.Struct, frozen=True, kw_only=True):
    """Gaps between the tokens of running streams, before and while a long prompt is computed; its own
    TTFT.
    """

    ttft_ms: float
    before_p50_ms: float
    before_p99_ms: float
    during_p50_ms: float
    during_p99_ms: float
    during_max_ms: float


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One server's life: started, measured, stopped."""

    model: str
    variant: str
    round: int
    ready_s: float
    resident_bytes: int
    weights_read_s: float | None = None
    """How long the model's files took to read, without anything else, right before the start."""
    levels: tuple[Level, ...]
    prefix: PrefixTimes | None = None
    arrival: Arrival | None = None
    seconds: float = 0.0
    """How long it took in all."""
    troubles: tuple[str, ...] = ()
    """Measurements that failed, and why."""


@dataclass(frozen=True)
class Column:
    """A figure that every run has: how to read it, and whether more is better."""

    title: str
    read: Callable[[Run], float | None]
    more_is_better: bool = False
    digits: int = 1


def columns(callers: Iterable[int]) -> list[Column]:
    """Throughput, TTFT and TPOT of each level, then start-up and memory."""
    found: list[Column] = []
    for level in callers:
        found += [
            Column(f"c={level} tok/s", _of_level(level, "output_tokens_per_s"), more_is_better=True),
            Column(f"c={level} TTFT p50", _of_level(level, "ttft_p50_ms")),
            Column(f"c={level} TTFT p95", _of_level(level, "ttft_p95_ms")),
            Column(f"c={level} TPOT p50", _of_level(level, "tpot_p50_ms"), digits=2),
            Column(f"c={level} TPOT p95", _of_level(level, "tpot_p95_ms"), digits=2),
        ]
    return [*found, READY, MEMORY]


def _of_level(callers: int, name: str) -> Callable[[Run], float | None]:
    def read(run: Run) -> float | None:
        for level in run.levels:
            if level.callers == callers and level.requests:
                return getattr(level, name)
        return None

    return read


def _prefix_ratio(run: Run) -> float | None:
    return run.prefix.miss_ms / run.prefix.hit_ms if run.prefix and run.prefix.hit_ms else None


def _worst_gap_ratio(run: Run) -> float | None:
    return run.arrival.during_p99_ms / run.arrival.before_p50_ms if run.arrival else None


def _start_less_reading(run: Run) -> float | None:
    return None if run.weights_read_s is None else run.ready_s - run.weights_read_s


READY = Column("start-up s", lambda run: run.ready_s)
LOADED = Column("start-up s but for reading", _start_less_reading)
MEMORY = Column("memory GB", lambda run: run.resident_bytes / 1e9, digits=2)
PREFIX = Column("prefix miss / hit", _prefix_ratio, more_is_better=True)
ARRIVAL = Column("gap p99 during / p50 before", _worst_gap_ratio, digits=2)


@dataclass(frozen=True)
class Spread:
    """A figure over the rounds."""

    middle: float
    least: float
    limit: float
    count: int


def spread(values: Iterable[float]) -> Spread | None:
    """The median with its range, or None if there are no values."""
    known = sorted(values)
    return Spread(median(known), known[0], known[-1], len(known)) if known else None


def values(runs: Iterable[Run], model: str, variant: str, column: Column) -> dict[int, float]:
    """One figure of one variant, by round."""
    found = {run.round: column.read(run) for run in runs if (run.model, run.variant) == (model, variant)}
    return {number: value for number, value in found.items() if value is not None}


def best_peer(runs: list[Run], model: str, peers: Iterable[str], column: Column) -> str | None:
    """The peer whose median is best in this column."""
    medians = {
        peer: found.middle for peer in peers if (found := spread(values(runs, model, peer, column).values()))
    }
    if not medians:
        return None
    return (max if column.more_is_better else min)(medians, key=medians.__getitem__)


def ratio(runs: list[Run], model: str, ours: str, peer: str, column: Column) -> Spread | None:
    """How many times better `ours` is than `peer`, over the rounds that measured both."""
    mine, other = values(runs, model, ours, column), values(runs, model, peer, column)
    pairs = [(mine[number], other[number]) for number in sorted(mine.keys() & other.keys())]
    known = [pair for pair in pairs if pair[0] > 0 and pair[1] > 0]
    return spread(a / b if column.more_is_better else b / a for a, b in known)


class Goal(msgspec.Struct, frozen=True, kw_only=True):
    """Ours against the best of some peers in one column, at least `at_least` times better; or, without peers,
    a bound on the figure itself.
    """

    model: str
    title: str
    ours: str
    peers: tuple[str, ...] = ()
    at_least: float = 1.0
    at_most: float | None = None


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """A goal with what was measured. `peer` is empty for a bound on the figure itself."""

    goal: Goal
    peer: str
    middle: float
    least: float
    limit: float
    met: bool


def judge(goal: Goal, runs: list[Run]) -> Verdict | None:
    """Hold the median against the goal; None if it was not measured."""
    known = {run_level.callers for run in runs for run_level in run.levels}
    by_title = {column.title: column for column in [*columns(sorted(known)), LOADED, PREFIX, ARRIVAL]}
    column = by_title.get(goal.title)
    if column is None:
        return None
    peer = best_peer(runs, goal.model, goal.peers, column) if goal.peers else ""
    if peer is None:
        return None
    if peer:
        found = ratio(runs, goal.model, goal.ours, peer, column)
    else:
        found = spread(values(runs, goal.model, goal.ours, column).values())
    if found is None:
        return None
    met = found.middle <= goal.at_most if goal.at_most is not None else found.middle >= goal.at_least
    return Verdict(goal=goal, peer=peer, middle=found.middle, least=found.least, limit=found.limit, met=met)
