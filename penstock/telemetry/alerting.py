"""The alerts: evaluated in process, from the history for what objectives count, which survives a restart, and
from the metrics page of all gateway processes for everything else; written as a file of rules for Prometheus
(`rules_file`); or sent to one address (`slo.webhook`), for those who run no Alertmanager.

The body that is sent is Alertmanager's own (its webhook_config, version "4"), so what takes its pages takes
these. A message that cannot be delivered waits, is tried again after longer and longer pauses, and is dropped
when it is old or too much: each loss is a line in the log, and `penstock alerts` still has the alert. The
address may hold a secret, so nothing here writes it down.
"""

import asyncio
import hashlib
import json
import re
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from operator import itemgetter

import msgspec

from penstock.clock import NS_PER_S, Clock, sleep
from penstock.config.tree import SloConfig
from penstock.telemetry.alerts import (
    BURNS,
    DUE,
    MISSED,
    Ratio,
    Rule,
    SeriesSum,
    Severity,
    duration,
    rules,
    targets,
)
from penstock.telemetry.history import SLO_S, History, Objective
from penstock.telemetry.http_post import TRY_AGAIN, Poster
from penstock.telemetry.log import Log
from penstock.telemetry.pages import SHARED

EVALUATE_S = 15.0
SHORT_S = 15 * 60
"""The window of most rules."""
ENDED_MAX = 100
"""Alerts that are over and are still shown."""
RUNBOOK = "docs/runbook.md"
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_Samples = Mapping[str, Mapping[tuple[tuple[str, str], ...], float]]


class Alert(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One alert as people and pages see it."""

    name: str
    severity: Severity
    labels: dict[str, str]
    """Model and band, where it is about one; of a burn rate its factor and long window."""
    since: int
    """When it began, in seconds since the Unix epoch; burn rates start again with the server."""
    ended: int = 0
    """When it ended; 0: it fires."""
    why: str
    summary: str
    runbook: str


class SloWindow(msgspec.Struct, frozen=True, kw_only=True):
    """One objective in one window."""

    window: str
    """Of Prometheus' form: "5m", "1h", "3d"."""
    total: int
    bad: int
    burn: float | None
    """How many times too fast the error budget burns; null: nothing counted."""


class SloRow(msgspec.Struct, frozen=True, kw_only=True):
    """One objective of one model and band."""

    model: str
    band: str
    objective: Objective
    target: float
    windows: list[SloWindow]
    budget_left: float | None
    """Share of the error budget of three days that is left; below 0: more was missed than may be. Null:
    nothing counted."""


class AlertsReport(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /admin/alerts`."""

    now: int
    """Seconds since the Unix epoch."""
    firing: list[Alert]
    """Pages first."""
    ended: list[Alert]
    """The last ones, latest first."""
    slo: list[SloRow]


class _Active(msgspec.Struct):
    """A rule holds for some labels."""

    began_ns: int
    why: str
    alert: Alert | None = None
    """Since it has held for long enough."""


class Alerts:
    """`evaluate` it every `EVALUATE_S`."""

    def __init__(self, slo: SloConfig, history: History, clock: Clock) -> None:
        self.rules = rules(slo)
        self._targets = targets(slo)
        self._history, self._clock = history, clock
        self._samples: deque[tuple[int, _Samples]] = deque()
        sums = [each for rule in self.rules for each in _sums(rule) if each.name not in (DUE, MISSED)]
        self._names = frozenset(each.name for each in sums)
        self._kept_ns = max(each.window_s for each in sums) * NS_PER_S
        self._long = frozenset(each.name for each in sums if each.window_s > SHORT_S)
        self._active: dict[tuple[int, tuple[str, ...]], _Active] = {}
        self._ended: deque[Alert] = deque(maxlen=ENDED_MAX)

    def evaluate(self, metrics: bytes) -> list[Alert]:
        """Look at everything; returns the alerts that have just begun or ended. `metrics` is the page."""
        now_ns = self._clock.now_ns()
        self._samples.append((now_ns, _parsed(metrics, self._names)))
        while len(self._samples) > 1 and self._samples[1][0] <= now_ns - self._kept_ns:
            self._samples.popleft()
        self._thin(now_ns)
        known = dict[SeriesSum, Mapping[tuple[str, ...], float]]()

        def read(wanted: SeriesSum) -> Mapping[tuple[str, ...], float]:
            if wanted not in known:
                known[wanted] = self._read(wanted, now_ns)
            return known[wanted]

        found = {(i, key): why for i, rule in enumerate(self.rules) for key, why in rule.holds(read).items()}
        return [*self._over(found), *self._begun(found, now_ns)]

    def _thin(self, now_ns: int) -> None:
        """Of what is older than `SHORT_S` only what has a longer window is kept."""
        old = bisect_left(self._samples, now_ns - SHORT_S * NS_PER_S, key=itemgetter(0)) - 2
        if old >= 0:
            at_ns, samples = self._samples[old]
            self._samples[old] = (at_ns, {name: samples[name] for name in self._long if name in samples})

    def report(self) -> AlertsReport:
        """The alerts, as of the last evaluation."""
        firing = [each.alert for each in self._active.values() if each.alert is not None]
        return AlertsReport(
            now=self._wall_s(),
            firing=sorted(
                firing, key=lambda alert: (alert.severity, alert.name, sorted(alert.labels.items()))
            ),
            ended=list(reversed(self._ended)),
            slo=self._slo_rows(),
        )

    def _over(self, found: Mapping[tuple[int, tuple[str, ...]], str]) -> list[Alert]:
        over = list[Alert]()
        for at in [at for at in self._active if at not in found]:
            alert = self._active.pop(at).alert
            if alert is not None:
                over.append(msgspec.structs.replace(alert, ended=self._wall_s()))
        self._ended.extend(over)
        return over

    def _begun(self, found: Mapping[tuple[int, tuple[str, ...]], str], now_ns: int) -> list[Alert]:
        begun = list[Alert]()
        for (i, key), why in found.items():
            rule = self.rules[i]
            active = self._active.setdefault((i, key), _Active(now_ns, why))
            active.why = why
            if active.alert is not None:
                active.alert = msgspec.structs.replace(active.alert, why=why)
            elif now_ns - active.began_ns >= rule.for_s * NS_PER_S:
                active.alert = self._alert(rule, key, why)
                begun.append(active.alert)
        return begun

    def _alert(self, rule: Rule, key: Sequence[str], why: str) -> Alert:
        return Alert(
            name=rule.name,
            severity=rule.severity,
            labels=dict(zip(rule.by, key, strict=True)) | dict(rule.labels),
            since=self._wall_s(),
            why=why,
            summary=rule.summary,
            runbook=runbook(rule.name),
        )

    def _read(self, wanted: SeriesSum, now_ns: int) -> Mapping[tuple[str, ...], float]:
        if wanted.name in (DUE, MISSED):
            return self._counted(wanted)
        latest = self._samples[-1][1].get(wanted.name, {})
        found = dict[tuple[str, ...], float]()
        for labels, value in latest.items():
            facts = dict(labels)
            if all(facts.get(label) == each for label, each in wanted.match):
                key = tuple(facts.get(label, "") for label in wanted.by)
                grown = self._grown(wanted, labels, now_ns) if wanted.window_s else value
                found[key] = found.get(key, 0.0) + grown
        return found

    def _grown(self, wanted: SeriesSum, labels: tuple[tuple[str, str], ...], now_ns: int) -> float:
        """The growth of a counter in the window. A lower value means that it began again at 0; of one that
        all gateway processes share, that the process which counted most is gone.
        """
        is_shared = wanted.name.encode() in SHARED
        since_ns, grown, before = now_ns - wanted.window_s * NS_PER_S, 0.0, None
        for at_ns, samples in self._samples:
            value = samples.get(wanted.name, {}).get(labels)
            if value is None:
                continue
            if before is not None and at_ns > since_ns:
                grown += value - before if value >= before else 0.0 if is_shared else value
            before = value
        return grown

    def _counted(self, wanted: SeriesSum) -> Mapping[tuple[str, ...], float]:
        objective: Objective = dict(wanted.match)["objective"]  # pyright: ignore[reportAssignmentType]
        found = dict[tuple[str, ...], float]()
        for series in self._history.series:
            count = self._history.slo(series, objective, wanted.window_s)
            found[series.model, series.band] = float(count.total if wanted.name == DUE else count.bad)
        return found

    def _slo_rows(self) -> list[SloRow]:
        spans = sorted({span for burn in BURNS for span in (burn.long_s, burn.short_s)})
        assert spans[-1] <= SLO_S, "the history is shorter than a window"
        found = list[SloRow]()
        for series in self._history.series:
            for objective, target in self._targets.items():
                counts = [self._history.slo(series, objective, span) for span in spans]
                burns = [
                    round(count.bad / count.total / (1 - target), 3) if count.total else None
                    for count in counts
                ]
                windows = [
                    SloWindow(window=duration(span), total=count.total, bad=count.bad, burn=burn)
                    for span, count, burn in zip(spans, counts, burns, strict=True)
                ]
                found.append(
                    SloRow(
                        model=series.model,
                        band=series.band,
                        objective=objective,
                        target=target,
                        windows=windows,
                        budget_left=None if burns[-1] is None else round(1 - burns[-1], 3),
                    )
                )
        return found

    def _wall_s(self) -> int:
        return self._clock.wall_ns() // NS_PER_S


def runbook(name: str) -> str:
    """Where it says what to do."""
    return f"{RUNBOOK}#{name.lower()}"


def _sums(rule: Rule) -> list[SeriesSum]:
    found = list[SeriesSum]()
    for test in rule.tests:
        for each in (test.left, test.right):
            found += [each.over, each.under] if isinstance(each, Ratio) else []
            found += [each] if isinstance(each, SeriesSum) else []
    return found


def _parsed(page: bytes, names: frozenset[str]) -> _Samples:
    """The samples of these names in Prometheus' text format."""
    found = dict[str, dict[tuple[tuple[str, str], ...], float]]()
    for line in page.decode().splitlines():
        series, _, value = line.rpartition(" ")
        name, _, labels = series.partition("{")
        if name in names:
            found.setdefault(name, {})[tuple(_LABEL.findall(labels))] = float(value)
    return found


HEAD = """\
# Written by `penstock alerts --rules` from the table in penstock/telemetry/alerts.py, with the objectives of
# the configuration: the same alerts as the server evaluates itself.
groups:
  - name: penstock
    rules:
"""


def rules_file(rows: Sequence[Rule]) -> str:
    """YAML; strings as in JSON, which is YAML too."""
    return HEAD + "".join(_rule(rule) for rule in rows)


def _rule(rule: Rule) -> str:
    lines = [f"- alert: {rule.name}", "  expr: |"]
    lines += [f"    {line}" for line in rule.promql().splitlines()]
    if rule.for_s:
        lines.append(f"  for: {duration(rule.for_s)}")
    lines.append("  labels:")
    for label, value in (("severity", rule.severity), *rule.labels):
        lines.append(f"    {label}: {json.dumps(value)}")
    lines.append("  annotations:")
    lines.append(f"    summary: {json.dumps(rule.summary)}")
    lines.append(f"    runbook: {json.dumps(runbook(rule.name))}")
    return "".join(f"      {line}\n" for line in lines)


WAITING_MAX = 256
"""Changes of alerts that wait for the receiver; the oldest go first."""
OLD_S = 3600
"""A message that could not be delivered for so long is dropped."""
PAUSE_S, PAUSE_S_MAX = 1.0, 60.0
"""Between two tries: the first, and the longest."""
NEVER = "0001-01-01T00:00:00Z"
"""Of an alert that fires."""


class Webhook:
    """`tell` it; between `start` and `stop` it delivers."""

    def __init__(self, url: str, clock: Clock, log: Log) -> None:
        self._poster = Poster(url, {"Content-Type": "application/json", "User-Agent": "penstock"})
        self._clock, self._log = clock, log
        self._waiting: deque[tuple[int, Alert]] = deque()
        """With the time at which each was told."""
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._delivery: asyncio.Task[bool] | None = None

    def start(self) -> None:
        """From now on deliver."""
        self._task = asyncio.create_task(self._run(), name="alerts webhook")

    async def stop(self) -> None:
        """Try once more what still waits, and no longer."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None
            if self._delivery is not None:  # Which may be under way.
                await self._delivery
            await self._deliver()

    def tell(self, alerts: Sequence[Alert]) -> None:
        """These have begun or ended."""
        now_ns = self._clock.now_ns()
        self._waiting.extend((now_ns, alert) for alert in alerts)
        self._drop(len(self._waiting) - WAITING_MAX, "too many wait")
        if self._waiting:
            self._wake.set()

    async def _run(self) -> None:
        pause_s = PAUSE_S
        while True:
            await self._wake.wait()
            self._delivery = asyncio.create_task(self._deliver())
            if await asyncio.shield(self._delivery):
                self._wake.clear()
                pause_s = PAUSE_S
            else:
                await sleep(pause_s)
                pause_s = min(PAUSE_S_MAX, 2 * pause_s)

    async def _deliver(self) -> bool:
        """Whether nothing waits any more."""
        oldest_ns = self._clock.now_ns() - OLD_S * NS_PER_S
        self._drop(sum(queued_ns < oldest_ns for queued_ns, _ in self._waiting), "it was away for an hour")
        alerts = [alert for _, alert in self._waiting]
        if not alerts:
            return True
        posted = await asyncio.to_thread(self._poster.post, webhook_body(alerts))
        is_refused = 300 <= posted.status < 500 and posted.status not in TRY_AGAIN
        if posted.why and not is_refused:
            self._log.warning("alerts could not be delivered yet", why=posted.why, alerts=len(alerts))
            return False
        for _ in range(len(alerts)):  # More may have come meanwhile, behind these.
            self._waiting.popleft()
        if is_refused:
            self._log.error("slo.webhook refuses alerts", why=posted.why, alerts=len(alerts))
        return not self._waiting

    def _drop(self, num: int, why: str) -> None:
        for _ in range(max(0, num)):
            self._waiting.popleft()
        if num > 0:
            self._log.error("alerts were not delivered to slo.webhook", why=why, alerts=num)


def webhook_body(alerts: Sequence[Alert]) -> bytes:
    """These as one message of Alertmanager's."""
    fires = any(not alert.ended for alert in alerts)
    return msgspec.json.encode(
        {
            "version": "4",
            "receiver": "penstock",
            "status": "firing" if fires else "resolved",
            "groupKey": "penstock",
            "groupLabels": {},
            "commonLabels": {},
            "commonAnnotations": {},
            "externalURL": "",
            "truncatedAlerts": 0,
            "alerts": [_entry(alert) for alert in alerts],
        }
    )


def _entry(alert: Alert) -> dict[str, object]:
    labels = {"alertname": alert.name, "severity": alert.severity, **alert.labels}
    named = "\0".join(f"{name}\0{value}" for name, value in sorted(labels.items()))
    return {
        "status": "resolved" if alert.ended else "firing",
        "labels": labels,
        "annotations": {"summary": alert.summary, "description": alert.why, "runbook": alert.runbook},
        "startsAt": _time(alert.since),
        "endsAt": _time(alert.ended) if alert.ended else NEVER,
        "generatorURL": "",
        "fingerprint": hashlib.sha256(named.encode()).hexdigest()[:16],
    }


def _time(wall_s: int) -> str:
    return datetime.fromtimestamp(wall_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
