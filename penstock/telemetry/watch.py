"""What a server remembers of itself and says of it: its history, and the alerts that follow from it.

One of these is in a gateway that is alone, or in the parent of several gateway processes, which hand it what
they counted (`Recorder.take`). Views of it are JSON, for the endpoints under /admin.
"""

import asyncio
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from penstock.clock import NS_PER_S, Clock
from penstock.config.tree import Config
from penstock.protocol.peers import LookAt
from penstock.telemetry.alerting import EVALUATE_S, Alerts
from penstock.telemetry.costs import COSTS_DIRECTORY, CostDays
from penstock.telemetry.counts import Counts, Series
from penstock.telemetry.history import DAY_S, History
from penstock.telemetry.history_files import HistoryFiles, HistoryKeeper
from penstock.telemetry.ledger_segment import ledger_directory
from penstock.telemetry.log import Log

LOOK_S = 5.0
"""Alerts that somebody looks at are not older."""
Rows = Iterable[tuple[Series, Counts]]


class Watch:
    """`start` it once, `look` at it."""

    def __init__(self, config: Config, clock: Clock, log: Log, metrics: Callable[[], bytes]) -> None:
        """`metrics` is the page of all gateway processes."""
        self.history = History(clock)
        self.alerts = Alerts(config.slo, self.history, clock)
        files = None
        if config.ledger.enabled:  # An operator who keeps no records keeps no counts either.
            files = HistoryFiles(ledger_directory(config.ledger) / "history")
        self._keeper = HistoryKeeper(self.history, files, log)
        self._costs: CostDays | None = None
        if config.ledger.enabled:
            directory = ledger_directory(config.ledger) / COSTS_DIRECTORY
            self._costs = CostDays(directory, clock, keep_days=config.ledger.keep_days)
        self._writing: asyncio.Future[None] | None = None
        self._clock, self._log, self._metrics = clock, log, metrics
        self._take: Callable[[], Rows] = tuple
        self._due_ns = 0
        self._task: asyncio.Task[None] | None = None

    async def start(self, take: Callable[[], Rows] = tuple) -> None:
        """Take over what was before; then every second what `take` gives."""
        self._take = take
        await self._keeper.load()
        self._task = asyncio.create_task(self._keeper.run(self._tick), name="telemetry-watch")

    async def stop(self) -> None:
        """Write down what is not on disk yet. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None
            self.history.add(self._take())
            await self._keeper.stop()
            if self._writing is not None:
                await asyncio.wait([self._writing])
            self._take_costs(self._metrics())
            if self._writing is not None:
                await asyncio.wait([self._writing])

    def look(self, at: LookAt) -> bytes:
        """A view as JSON, as of now."""
        self.history.add(self._take())
        if at.view == "alerts":
            if self._clock.now_ns() >= self._due_ns - round((EVALUATE_S - LOOK_S) * NS_PER_S):
                self._evaluate()
            return msgspec.json.encode(self.alerts.report())
        return msgspec.json.encode(self.history.window(min(at.seconds, DAY_S)))

    def _tick(self) -> None:
        self.history.add(self._take())
        if self._clock.now_ns() >= self._due_ns:
            self._evaluate()

    def _evaluate(self) -> None:
        self._due_ns = self._clock.now_ns() + round(EVALUATE_S * NS_PER_S)
        page = self._metrics()
        self._take_costs(page)
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

    def _take_costs(self, page: bytes) -> None:
        """Count what the machines cost since the last time, and write it down beside the event loop."""
        costs = self._costs
        if costs is not None and costs.take(page) and (self._writing is None or self._writing.done()):
            self._writing = asyncio.ensure_future(asyncio.to_thread(self._write_costs, costs))

    def _write_costs(self, costs: CostDays) -> None:
        try:
            costs.write()
        except OSError as error:
            self._log.warning("what the machines cost cannot be written down", error=error)


def free_share(directory: Path) -> float:
    """How much is free of the disk that has this directory, or will have it; 1 where that is not known."""
    while not directory.exists() and directory != directory.parent:
        directory = directory.parent
    try:
        found = os.statvfs(directory)
    except OSError:
        return 1.0
    return found.f_bavail / found.f_blocks if found.f_blocks else 1.0
