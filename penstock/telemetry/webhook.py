"""Alerts that begin and end, to one address (`slo.webhook`), for those who run no Alertmanager.

The body is Alertmanager's own (its webhook_config, version "4"), so what takes its pages takes these. A
message that cannot be delivered waits, is tried again after longer and longer pauses, and is dropped when it
is old or too much: each loss is a line in the log, and `penstock alerts` still has the alert. The address may
hold a secret, so nothing here writes it down.
"""

import asyncio
import hashlib
from collections import deque
from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec

from penstock.clock import NS_PER_S, Clock, sleep
from penstock.telemetry.alerting import Alert
from penstock.telemetry.http_post import TRY_AGAIN, Poster
from penstock.telemetry.log import Log

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
