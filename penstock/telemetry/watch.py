"""What a server remembers of itself and says of it: its history.

One of these is in a gateway that is alone, or in the parent of several gateway processes, which hand it what
they counted (`Recorder.take`). Views of it are JSON, for the endpoints under /admin.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterable

import msgspec

from penstock.clock import Clock
from penstock.config.tree import Config
from penstock.protocol.peers import LookAt
from penstock.telemetry.counts import Counts, Series
from penstock.telemetry.history import DAY_S, History
from penstock.telemetry.history_files import HistoryFiles, HistoryKeeper
from penstock.telemetry.ledger_segment import ledger_directory
from penstock.telemetry.log import Log

Rows = Iterable[tuple[Series, Counts]]


class Watch:
    """`start` it once, `add` what has ended, `look` at it."""

    def __init__(self, config: Config, clock: Clock, log: Log) -> None:
        self.history = History(clock)
        files = None
        if config.ledger.enabled:  # Who keeps no records keeps no counts either.
            files = HistoryFiles(ledger_directory(config.ledger) / "history")
        self._keeper = HistoryKeeper(self.history, files, log)
        self._take: Callable[[], Rows] = tuple
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
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None
            self._tick()
            await self._keeper.stop()

    def look(self, at: LookAt) -> bytes:
        """A view as JSON, as of now."""
        self._tick()
        return msgspec.json.encode(self.history.window(min(at.seconds, DAY_S)))

    def _tick(self) -> None:
        self.history.add(self._take())
