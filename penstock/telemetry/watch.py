"""The server's memory and report of itself: its history (kept on disk, too), the alerts that follow from it,
and what happened to it.

One `Watch` is in a gateway that is alone, or in the parent of several gateway processes, which hand it what
they counted (`Recorder.take`). Views of it are JSON, for the endpoints under /admin.

    DIRECTORY/MINUTE-INSTANCE.hist     one server appends to one file at a time; a start reads all of them

The files have a record for each minute, appended when the minute is over: length, CRC, minute, and the counts
(`counts.Book.encode`, compressed). A server that is killed loses the minute that was not over. Parts of one
minute in several files add up: servers that share a ledger's directory, one after the other or side by side,
have one history when they start. An event that cannot be read is left out, with one warning, and everything
behind it in that file.
"""

import asyncio
import os
import struct
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from penstock import __version__
from penstock.clock import NS_PER_S, Clock, sleep
from penstock.config.tree import Config
from penstock.protocol.peers import LookAt
from penstock.telemetry.alerting import EVALUATE_S, Alerts, Webhook
from penstock.telemetry.audit import Audit, AuditEvent, Notes
from penstock.telemetry.costs import COSTS_DIRECTORY, CostDays
from penstock.telemetry.counts import Counts, Series, decode_rows
from penstock.telemetry.history import DAY_S, MINUTE_S, RECENT_STEP_S, SLO_S, History
from penstock.telemetry.ledger_segment import ledger_directory
from penstock.telemetry.log import Log

BYTES_MAX = 64 * 1024 * 1024
"""Of all files together: what is over it goes, oldest first."""
FILE_MINUTES = 360
"""A file takes records for so long."""
RECORD_BYTES_MAX = 4 * 1024 * 1024

_HEAD = struct.Struct("<IIQ")


class HistoryFiles:
    """The files of one directory. Blocks on the disk: call it from a thread."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._one_at_a_time = threading.Lock()
        self._file: int | None = None
        self._since = 0

    def append(self, minute: int, body: bytes) -> None:
        """Write one minute.

        Raises:
            OSError: it cannot be written.
        """
        packed = zlib.compress(body, 1)
        record = _HEAD.pack(len(packed), zlib.crc32(packed), minute) + packed
        with self._one_at_a_time:
            if os.write(self._current(minute), record) < len(record):
                self.close()
                raise OSError("a minute of the history was not written whole")

    def read(self, damaged: Callable[[Path], None]) -> Iterator[tuple[int, list[tuple[Series, Counts]]]]:
        """Every minute there is; `damaged` is called for each file that cannot be read to its end."""
        for path in sorted(self._directory.glob("*.hist")):
            try:
                yield from _records(path.read_bytes())
            except (OSError, ValueError):
                damaged(path)

    def close(self) -> None:
        """Write no more."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _current(self, minute: int) -> int:
        if self._file is None or minute - self._since >= FILE_MINUTES:
            self.close()
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._remove_old(minute)
            name = f"{minute:012}-{os.getpid()}-{id(self):x}.hist"
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
            self._file = os.open(self._directory / name, flags, 0o600)
            self._since = minute
        return self._file

    def _remove_old(self, minute: int) -> None:
        left = BYTES_MAX
        for path in sorted(self._directory.glob("*.hist"), reverse=True):
            try:
                stat = path.stat()
                left -= stat.st_size
                if left < 0 or stat.st_mtime < minute * MINUTE_S - SLO_S:
                    path.unlink()
            except OSError:
                continue  # Another server has removed it meanwhile.


class HistoryKeeper:
    """Brings a history over restarts."""

    def __init__(self, history: History, files: HistoryFiles | None, log: Log) -> None:
        """Without `files` it is in memory only."""
        self.history = history
        self._files, self._log = files, log
        self._is_failing = False

    async def load(self) -> None:
        """Take over what earlier servers wrote."""
        if self._files is None:
            return
        damaged = list[Path]()
        for minute, rows in await asyncio.to_thread(list, self._files.read(damaged.append)):
            self.history.restore(minute, rows)
        if damaged:
            self._log.warning(
                "files of the history are damaged: what cannot be read is left out",
                files=len(damaged),
                first=str(damaged[0]),
            )

    async def write_closed(self) -> None:
        """Write down each minute that is over."""
        if closed := self.history.take_closed():
            await asyncio.to_thread(self.write, closed)

    async def stop(self) -> None:
        """Write down the minute that is not over."""
        await asyncio.to_thread(self.write, self.history.take_closed(all_of_it=True))
        if self._files is not None:
            self._files.close()

    def write(self, minutes: Sequence[tuple[int, bytes]]) -> None:
        """Write down these minutes; trouble is said once."""
        if self._files is None:
            return
        try:
            for minute, body in minutes:
                self._files.append(minute, body)
        except OSError as error:
            if not self._is_failing:
                self._log.warning(
                    "the history cannot be written down, so a restart would forget it", error=error
                )
            self._is_failing = True
        else:
            self._is_failing = False


def _records(data: bytes) -> Iterator[tuple[int, list[tuple[Series, Counts]]]]:
    """
    Raises:
        ValueError: the rest is damaged.
    """
    place = 0
    while place < len(data):
        if len(data) - place < _HEAD.size:
            raise ValueError("half a record")
        size, crc, minute = _HEAD.unpack_from(data, place)
        place += _HEAD.size
        packed = data[place : place + size]
        if size > RECORD_BYTES_MAX or len(packed) < size or zlib.crc32(packed) != crc:
            raise ValueError("a damaged record")
        place += size
        try:
            yield minute, decode_rows(zlib.decompress(packed))
        except (zlib.error, msgspec.MsgspecError) as error:
            raise ValueError("a record of another version") from error


TICK_S = 1.0
_LAST_NS = round(1.5 * TICK_S * NS_PER_S)
"""The last tick within a column of the history is at most so long before its end."""
LOOK_S = 5.0
"""Alerts on a screen are not older."""
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
        self._webhook = Webhook(config.slo.webhook, clock, log) if config.slo.webhook else None
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
        """Take over what was before; then what `take` gives: once for each column of the history, before each
        look, and every second while somebody follows it.
        """
        self._take = take
        await self._keeper.load()
        await asyncio.to_thread(self._audit.load)
        self._notes.note("server", "started", __version__)
        if self._webhook is not None:
            self._webhook.start()
        self._task = asyncio.create_task(self._run(), name="telemetry-watch")

    async def stop(self) -> None:
        """Write down what is not on disk yet. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None
            if self._webhook is not None:
                await self._webhook.stop()
            self.history.add(self._take())
            self._notes.note("server", "stopped", __version__)
            await self._keeper.stop()
            self.count_costs()
            if self._costs is not None and self._costs.has_changes:
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
            return self._audit.report(kind=at.about, before=at.before, limit=at.limit)
        self.history.add(self._take())
        if at.view == "alerts":
            if self._clock.now_ns() >= self._due_ns - round((EVALUATE_S - LOOK_S) * NS_PER_S):
                self._evaluate()
            return self.alerts.report()
        return self.history.window(min(at.seconds, DAY_S))

    async def _run(self) -> None:
        """Every second, until cancelled."""
        while True:
            is_due = self._clock.now_ns() >= self._due_ns
            if is_due or self._ends_column() or self.history.on_rows is not None:
                self.history.add(self._take())
            if is_due:
                self._evaluate()
            await self._keeper.write_closed()
            if self._audit.has_changes:
                await asyncio.to_thread(self._audit.write)
            if self._costs is not None and self._costs.has_changes:
                await asyncio.to_thread(self._write_costs, self._costs)
            await sleep(TICK_S)

    def _ends_column(self) -> bool:
        """Whether what has ended is of a column that will be over at the next tick."""
        wall_ns, step_ns = self._clock.wall_ns(), RECENT_STEP_S * NS_PER_S
        return (wall_ns + _LAST_NS) // step_ns > wall_ns // step_ns

    def _evaluate(self) -> None:
        self._due_ns = self._clock.now_ns() + round(EVALUATE_S * NS_PER_S)
        page = self._metrics()
        if self._costs is not None:
            self._costs.take(page)
        changed = self.alerts.evaluate(page)
        if self._webhook is not None:
            self._webhook.tell(changed)
        for alert in changed:
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
