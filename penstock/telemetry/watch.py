"""What a server remembers of itself and says of it: its history, the alerts that follow from it, and what
happened to it.

One of these is in a gateway that is alone, or in the parent of several gateway processes, which hand it what
they counted (`Recorder.take`). Views of it are JSON, for the endpoints under /admin.
"""

import asyncio
import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

from penstock import __version__
from penstock.clock import NS_PER_S, Clock, sleep
from penstock.config.tree import Config
from penstock.protocol.peers import LookAt
from penstock.telemetry.alerting import EVALUATE_S, Alerts
from penstock.telemetry.audit import Audit, AuditEvent, Notes
from penstock.telemetry.costs import COSTS_DIRECTORY, CostDays
from penstock.telemetry.counts import Counts, Series
from penstock.telemetry.history import DAY_S, History
from penstock.telemetry.history_files import HistoryFiles, HistoryKeeper
from penstock.telemetry.ledger_segment import ledger_directory
from penstock.telemetry.log import Log

TICK_S = 1.0
LOOK_S = 5.0
"""Alerts that somebody looks at are not older."""
Rows = Iterable[tuple[Series, Counts]]
Tail = Callable[[str], Any]
"""A worker's last lines, by its id; None if another machine, or nothing, has them."""


def no_tail(_: str) -> None:
    """Where no workers are launched."""


class Watch:
    """`start` it once, `look` at it."""

    def __init__(
        self, config: Config, clock: Clock, log: Log, metrics: Callable[[], bytes], tail: Tail = no_tail
    ) -> None:
        """`metrics` is the page of all gateway processes; `tail` gives the last lines of a worker's log."""
        self.history = History(clock)
        self.alerts = Alerts(config.slo, self.history, clock)
        place, self._costs = None, None
        if config.ledger.enabled:  # An operator who keeps no records keeps no counts either.
            place = ledger_directory(config.ledger) / "history"
            costs = ledger_directory(config.ledger) / COSTS_DIRECTORY
            self._costs = CostDays(costs, clock, keep_days=config.ledger.keep_days)
        self._audit = Audit(place and place / "audit.jsonl", log)
        self._notes = Notes(clock, self._audit.keep)
        self._keeper = HistoryKeeper(self.history, place and HistoryFiles(place), log)
        self._clock, self._log, self._metrics, self._tail = clock, log, metrics, tail
        self._one_writer, self._is_failing = threading.Lock(), False
        """Of costs."""
        self._take: Callable[[], Rows] = tuple
        self._due_ns = 0
        self._task: asyncio.Task[None] | None = None

    async def start(self, take: Callable[[], Rows] = tuple) -> None:
        """Take over what was before; then every second what `take` gives."""
        self._take = take
        await self._keeper.load()
        await asyncio.to_thread(self._audit.load)
        self._notes.note("server", "started", __version__)
        self._task = asyncio.create_task(self._run(), name="telemetry-watch")

    async def stop(self) -> None:
        """Write down what is not on disk yet. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None
            self.history.add(self._take())
            self._notes.note("server", "stopped", __version__)
            await self._keeper.stop()
            self.count_costs()
            if self._costs is not None and self._costs.has_news:
                await asyncio.to_thread(self._write_costs, self._costs)
            await asyncio.to_thread(self._audit.write)

    def count_costs(self) -> None:
        """Take what the machines cost until now, before processes end and take it with them."""
        if self._costs is not None:
            self._costs.take(self._metrics())

    def keep(self, event: AuditEvent) -> None:
        """Something happened, in whichever process."""
        self._audit.keep(event)

    def look(self, at: LookAt) -> bytes:
        """A view as JSON, as of now."""
        return msgspec.json.encode(self._view(at))

    def _view(self, at: LookAt) -> Any:  # noqa: ANN401
        if at.view == "log":
            return {"worker": at.about, "lines": self._tail(at.about)}
        if at.view == "audit":
            return self._audit.report(kind=at.about, before=at.before, most=at.most)
        self.history.add(self._take())
        if at.view == "alerts":
            if self._clock.now_ns() >= self._due_ns - round((EVALUATE_S - LOOK_S) * NS_PER_S):
                self._evaluate()
            return self.alerts.report()
        return self.history.window(min(at.seconds, DAY_S))

    async def _run(self) -> None:
        """Every second, until cancelled."""
        while True:
            self.history.add(self._take())
            if self._clock.now_ns() >= self._due_ns:
                self._evaluate()
            await self._keeper.write_closed()
            if self._audit.has_news:
                await asyncio.to_thread(self._audit.write)
            if self._costs is not None and self._costs.has_news:
                await asyncio.to_thread(self._write_costs, self._costs)
            await sleep(TICK_S)

    def _evaluate(self) -> None:
        self._due_ns = self._clock.now_ns() + round(EVALUATE_S * NS_PER_S)
        page = self._metrics()
        if self._costs is not None:
            self._costs.take(page)
        for alert in self.alerts.evaluate(page):
            write = self._log.info if alert.ended else self._log.warning
            write(
                "an alert is over" if alert.ended else "an alert fires",
                alert=alert.name,
                severity=alert.severity,
                why=alert.why,
                runbook=alert.runbook,
                **alert.labels,
            )
            what = "is over" if alert.ended else f"fires ({alert.severity})"
            about = ", ".join((alert.name, *(f"{name} {value}" for name, value in alert.labels.items())))
            self._notes.note("alert", what, about, why=alert.why)

    def _write_costs(self, costs: CostDays) -> None:
        """Trouble is said once. At the end a write that was cut off may still be under way."""
        with self._one_writer:
            try:
                costs.write()
            except OSError as error:
                if not self._is_failing:
                    self._log.warning("what the machines cost cannot be written down", error=error)
                self._is_failing = True
            else:
                self._is_failing = False


def free_share(directory: Path) -> float:
    """How much is free of the disk that has this directory, or will have it; 1 where that is not known."""
    while not directory.exists() and directory != directory.parent:
        directory = directory.parent
    try:
        found = os.statvfs(directory)
    except OSError:
        return 1.0
    return found.f_bavail / found.f_blocks if found.f_blocks else 1.0
