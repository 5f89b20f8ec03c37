"""Which alerts there are, as one table: evaluated in process (`watch.py`), written as Prometheus' rules
(`alerting.py`), explained in docs/runbook.md.

A rule is a row of comparisons that must all hold, for the same labels, for some time. They compare sums over
labels of the metrics in catalog.py, as they are or by how much they grew in a window; so a rule is PromQL as
well as something that can be computed here.

Burn rates are the Site Reliability Workbook's (chapter 5): the share of requests that missed an objective,
over the share that may, in a long window and in one of its twelfths, so that an alert ends soon after its
cause.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from penstock.config.tree import SloConfig
from penstock.telemetry.history import DAY_S, Objective

Severity = Literal["page", "ticket"]
Vector = Mapping[tuple[str, ...], float]
"""Values by the values of the labels."""
HOUR_S, MINUTE_S = 3600, 60
MISSED, DUE = "penstock_slo_missed_total", "penstock_slo_requests_total"
EVENTS_MIN = 20
"""Of so few requests in its window a share says nothing."""


@dataclass(frozen=True, slots=True)
class SeriesSum:
    """A metric, summed by labels: now, or what it grew by in the last `window_s`."""

    name: str
    by: tuple[str, ...] = ("model",)
    match: tuple[tuple[str, str], ...] = ()
    window_s: int = 0

    def promql(self) -> str:
        """For Prometheus."""
        chosen = ",".join(f'{label}="{value}"' for label, value in self.match)
        inner = self.name + (f"{{{chosen}}}" if chosen else "")
        if self.window_s:
            inner = f"increase({inner}[{duration(self.window_s)}])"
        return f"sum by ({', '.join(self.by)}) ({inner})" if self.by else f"sum({inner})"

    def value(self, read: Callable[["SeriesSum"], Vector]) -> Vector:
        """Here; `read` finds the metric."""
        return read(self)


@dataclass(frozen=True, slots=True)
class Ratio:
    """One sum over another, times a number; nothing where the second is 0."""

    over: SeriesSum
    under: SeriesSum
    factor: float = 1.0

    def promql(self) -> str:
        """For Prometheus, where 0 / 0 is no number, which no comparison takes."""
        times = "" if self.factor == 1.0 else f"{self.factor:g} * "
        return f"{times}{self.over.promql()} / {self.under.promql()}"

    def value(self, read: Callable[[SeriesSum], Vector]) -> Vector:
        """Here."""
        over, under = read(self.over), read(self.under)
        return {key: self.factor * over.get(key, 0.0) / each for key, each in under.items() if each}


@dataclass(frozen=True, slots=True)
class Test:
    """A comparison."""

    left: SeriesSum | Ratio
    op: Literal[">", "<", ">=", "=="]
    right: float | SeriesSum | Ratio
    said: str = ""
    """In words, with `value` and `limit`; empty: not worth saying."""

    __test__ = False  # pytest takes classes of this name for its own.

    def promql(self) -> str:
        """For Prometheus."""
        right = f"{self.right:g}" if isinstance(self.right, float | int) else self.right.promql()
        return f"{self.left.promql()} {self.op} {right}"

    def holds(self, read: Callable[[SeriesSum], Vector]) -> dict[tuple[str, ...], str]:
        """For which labels it holds, and what there is to say of that."""
        limits = None if isinstance(self.right, float | int) else self.right.value(read)
        found = dict[tuple[str, ...], str]()
        for key, value in self.left.value(read).items():
            limit = self.right if isinstance(self.right, float | int) else (limits or {}).get(key)
            if limit is not None and _compare(value, self.op, limit):
                found[key] = self.said.format(value=value, limit=limit)
        return found


def _compare(value: float, op: str, limit: float) -> bool:
    match op:
        case ">":
            return value > limit
        case "<":
            return value < limit
        case ">=":
            return value >= limit
        case _:
            return value == limit


@dataclass(frozen=True, slots=True)
class Rule:
    """One alert. Several may have one name, with other labels."""

    name: str
    severity: Severity
    summary: str
    """Its meaning, for the operator who is paged."""
    tests: tuple[Test, ...]
    for_s: int = 0
    """How long the tests must hold."""
    labels: tuple[tuple[str, str], ...] = ()

    @property
    def by(self) -> tuple[str, ...]:
        """The labels that tell its alerts apart."""
        left = self.tests[0].left
        return (left.over if isinstance(left, Ratio) else left).by

    def promql(self) -> str:
        """For Prometheus."""
        return "\nand ".join(f"({test.promql()})" for test in self.tests)

    def holds(self, read: Callable[[SeriesSum], Vector]) -> dict[tuple[str, ...], str]:
        """For which labels all its tests hold, and why."""
        found = self.tests[0].holds(read)
        for test in self.tests[1:]:
            more = test.holds(read)
            found = {
                key: "; ".join(filter(None, (said, more[key]))) for key, said in found.items() if key in more
            }
        return found


@dataclass(frozen=True, slots=True)
class Burn:
    """One row of the workbook's table."""

    severity: Severity
    factor: float
    long_s: int
    short_s: int


KV_GROWTH, KV_HELD = 1.25, 1.25
"""Memory per token of context: so many times that of the last two hours is a trend, and below so much it does
no harm."""
BURNS = (
    Burn("page", 14.4, HOUR_S, 5 * MINUTE_S),
    Burn("page", 6.0, 6 * HOUR_S, 30 * MINUTE_S),
    Burn("ticket", 10.0, HOUR_S, 5 * MINUTE_S),
    Burn("ticket", 3.0, DAY_S, 2 * HOUR_S),
    Burn("ticket", 1.0, 3 * DAY_S, 6 * HOUR_S),
)
"""A budget is for 30 days: 2 %, 5 %, 1.4 %, 10 % and 10 % of it are gone when these fire."""


def duration(seconds: int) -> str:
    """As Prometheus writes it."""
    for unit, size in (("d", DAY_S), ("h", HOUR_S), ("m", MINUTE_S)):
        if seconds % size == 0:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


def rules(slo: SloConfig) -> tuple[Rule, ...]:
    """All of them, with these objectives."""
    return (*_burns(slo), *_SYMPTOMS)


def targets(slo: SloConfig) -> Mapping[Objective, float]:
    """The share that is to be met, by objective."""
    return {"availability": slo.availability, "ttft": slo.ttft, "tpot": slo.tpot}


_MEANING: Mapping[Objective, tuple[str, str, str]] = {
    "availability": ("AvailabilityBurn", "Requests fail too often", "failed"),
    "ttft": ("TtftBurn", "First tokens come later than promised too often", "had a late first token"),
    "tpot": ("TpotBurn", "Tokens come slower than promised too often", "were slower per token"),
}


def _pace(factor: float) -> str:
    return "will not last" if factor <= 1 else f"burns {factor:g} times too fast"


def _burns(slo: SloConfig) -> Iterator[Rule]:
    for objective, target in targets(slo).items():
        name, summary, what = _MEANING[objective]
        for burn in BURNS:
            limit = round(burn.factor * (1 - target), 6)
            if limit >= 1:  # With so low an objective even all of them are no such burn.
                continue
            yield Rule(
                name=name,
                severity=burn.severity,
                summary=f"{summary}: the error budget of 30 days {_pace(burn.factor)}.",
                tests=(
                    *(_share(objective, window_s, limit, what) for window_s in (burn.long_s, burn.short_s)),
                    Test(_slo(DUE, objective, burn.long_s), ">=", float(EVENTS_MIN)),
                ),
                labels=(("burn", f"{burn.factor:g}"), ("window", duration(burn.long_s))),
            )


def _share(objective: str, window_s: int, limit: float, what: str) -> Test:
    said = f"{{value:.1%}} of requests {what} in {duration(window_s)}, limit {{limit:.1%}}"
    return Test(Ratio(_slo(MISSED, objective, window_s), _slo(DUE, objective, window_s)), ">", limit, said)


def _slo(name: str, objective: str, window_s: int) -> SeriesSum:
    return SeriesSum(name, ("model", "band"), (("objective", objective),), window_s)


def _in_state(state: str) -> SeriesSum:
    return SeriesSum("penstock_workers", match=(("state", state),))


def _found(cause: str) -> SeriesSum:
    return SeriesSum("penstock_anomalous_workers", match=(("cause", cause),))


def _faults(kind: str) -> SeriesSum:
    return SeriesSum("penstock_worker_faults_total", match=(("kind", kind),), window_s=10 * MINUTE_S)


def _held_per_token(window_s: int, factor: float = 1.0) -> Ratio:
    held, read = (
        SeriesSum(f"penstock_engine_kv_{each}_tokens_total", window_s=window_s) for each in ("held", "read")
    )
    return Ratio(held, read, factor)


_READY = _in_state("ready")
_BUSY = Ratio(
    SeriesSum("penstock_engine_step_seconds_total", window_s=15 * MINUTE_S), _READY, 1 / (15 * MINUTE_S)
)
_COST = SeriesSum("penstock_accelerator_cost_total", window_s=15 * MINUTE_S)
_FLOOR = SeriesSum("penstock_accelerator_floor_total", window_s=15 * MINUTE_S)
_COMPUTES = Test(SeriesSum("penstock_engine_steps_total"), ">", 0.0)
"""Workers of other engines say nothing of their steps."""

_SYMPTOMS = (
    Rule(
        "TtftFarOver",
        "page",
        "More than 1 % of first tokens take over twice the promised time, so the p99 does.",
        (
            _share("ttft_double", 5 * MINUTE_S, 0.01, "took over twice the promised TTFT"),
            Test(_slo(DUE, "ttft_double", 5 * MINUTE_S), ">=", float(EVENTS_MIN)),
        ),
    ),
    Rule(
        "WorkerCrashed",
        "page",
        "A worker's process ended and was started again.",
        (Test(SeriesSum("penstock_engine_restarts_total", window_s=10 * MINUTE_S), ">", 0.0,
              "{value:.0f} restarts in 10m"),),
    ),
    Rule(
        "NoWorkerReady",
        "page",
        "A model has no worker that is ready, and none that loads or is asleep.",
        (
            Test(_READY, "==", 0.0, "no worker is ready"),
            Test(_in_state("loading"), "==", 0.0),
            Test(_in_state("warming"), "==", 0.0),
            Test(_in_state("asleep"), "==", 0.0),
            Test(_in_state("waking"), "==", 0.0),
        ),
        for_s=2 * MINUTE_S,
    ),
    Rule(
        "DeviceLost",
        "page",
        "A GPU reported a fatal Xid: its worker has ended, and is not used before the device is well.",
        (Test(_faults("xid"), ">", 0.0, "{value:.0f} in 10m"),),
    ),
    Rule(
        "OomKill",
        "page",
        "The kernel killed a process for lack of memory on a worker's machine.",
        (Test(_faults("oom_kill"), ">", 0.0, "{value:.0f} in 10m"),),
    ),
    Rule(
        "WeightsDamaged",
        "page",
        "Weights in a worker's memory have changed: it has loaded them again, and its memory is not sound.",
        (Test(_faults("weights"), ">", 0.0, "{value:.0f} in 10m"),),
    ),
    Rule(
        "WorkerWrong",
        "page",
        "A worker answers its probes wrongly again and again: its weights or its device are damaged.",
        (Test(_found("wrong"), ">", 0.0, "{value:.0f} workers answer wrongly"),),
    ),
    Rule(
        "WorkerSlow",
        "page",
        "A worker's steps take longer than its peers' at the same load, and stay so.",
        (Test(_found("slow"), ">", 0.0, "{value:.0f} workers are slow"),),
    ),
    Rule(
        "QueueSustained",
        "ticket",
        "For ten minutes more requests have waited for a worker than run.",
        (Test(SeriesSum("penstock_queue_waiting"), ">", SeriesSum("penstock_engine_running"),
              "{value:.0f} requests wait and {limit:.0f} run"),),
        for_s=10 * MINUTE_S,
    ),
    Rule(
        "UtilisationLow",
        "ticket",
        "Several workers of a model compute less than 30 % of the time: one less would do.",
        (
            Test(_BUSY, "<", 0.30, "busy {value:.0%} of the time, limit {limit:.0%}"),
            Test(_READY, ">", 1.0, "{value:.0f} workers are ready"),
            _COMPUTES,
        ),
        for_s=15 * MINUTE_S,
    ),
    Rule(
        "UtilisationHigh",
        "ticket",
        "The workers of a model compute more than 95 % of the time: nothing is left for a burst.",
        (Test(_BUSY, ">", 0.95, "busy {value:.0%} of the time, limit {limit:.0%}"),),
        for_s=15 * MINUTE_S,
    ),
    Rule(
        "KvFragmentation",
        "ticket",
        "KV memory holds fewer tokens of context than it did: blocks are emptier, less shared, or not freed.",
        (
            Test(_held_per_token(15 * MINUTE_S), ">", _held_per_token(2 * HOUR_S, KV_GROWTH),
                 "{value:.2f} tokens' memory for each token of context in 15m, limit {limit:.2f}"),
            Test(_held_per_token(15 * MINUTE_S), ">", KV_HELD),
        ),
        for_s=15 * MINUTE_S,
    ),
    Rule(
        "CostOverFloor",
        "ticket",
        "Workers cost more than twice what their work would cost in full batches.",
        (
            Test(Ratio(_COST, _FLOOR), ">", 2.0, "the bill is {value:.1f} times its floor, limit {limit:g}"),
        ),
        for_s=15 * MINUTE_S,
    ),
    Rule(
        "LedgerLag",
        "ticket",
        "Usage records stay in the journal and do not reach the database.",
        (Test(SeriesSum("penstock_ledger_pending_records", ()), ">", 1000.0, "{value:.0f} records wait"),),
        for_s=10 * MINUTE_S,
    ),
    Rule(
        "LedgerLoss",
        "page",
        "Usage records are lost: what they cost is charged to no tenant.",
        (Test(SeriesSum("penstock_ledger_lost_records_total", (), window_s=10 * MINUTE_S), ">", 0.0,
              "{value:.0f} records in 10m"),),
    ),
    Rule(
        "DiskFull",
        "ticket",
        "The disk of the usage ledger has less than 10 % left.",
        (
            Test(SeriesSum("penstock_disk_free_ratio", ()), "<", 0.10,
                 "{value:.1%} is free, limit {limit:.0%}"),
        ),
        for_s=5 * MINUTE_S,
    ),
)  # fmt: skip


def names(rows: Sequence[Rule]) -> list[str]:
    """Each name once, in order."""
    return list(dict.fromkeys(rule.name for rule in rows))
