"""Where records end up: the contract of every sink, and the thread that brings them there.

Delivery is at least once: a batch counts as delivered only when `write` has returned, and is written again
after any trouble. A sink keeps one record for an id, so every record is in it exactly once.

The ledger in SQLite: one table, one row for each request, its id the key.

Every batch is one transaction in a write-ahead log that is synced before `write` returns, since the journal
forgets what was delivered. A row that is there already stays as it is. Columns that a newer version knows and
an older file lacks are added when it is opened; a file that a newer version wrote is refused.
"""

import contextlib
import enum
import os
import sqlite3
import threading
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Protocol, get_type_hints

import msgspec

from penstock.clock import NS_PER_S, Clock
from penstock.errors import LedgerError
from penstock.policy.flow import SCHEMA_VERSION, UsageRecord
from penstock.telemetry.ledger_journal import Journal
from penstock.telemetry.ledger_segment import (
    FRAME_BYTES_MAX,
    MAGIC,
    Claim,
    Kind,
    LedgerLimits,
    decode_record,
    next_frame,
    read_frames,
    segment_path,
)
from penstock.telemetry.log import Log

READ_BYTES = 1024 * 1024
BACK_OFF_MAX_S = 30.0


class SinkError(LedgerError):
    """The sink takes nothing for now; what was to be written must be written again."""


class LedgerSink(Protocol):
    """A place for records. Used by one thread at a time."""

    def write(self, records: Sequence[UsageRecord]) -> None:
        """Keep them for good before returning; an id that is known already keeps its first record.

        Raises:
            SinkError: none or only some of them are kept; writing all of them again is right.
        """
        ...

    def close(self) -> None:
        """Nothing more will be written."""
        ...


OnDamage = Callable[[Path, int, int], None]
"""A segment, and where in it how many bytes cannot be read."""


class Follower:
    """Reads a journal behind its writer and brings every closed record to a sink."""

    def __init__(
        self, claim: Claim, journal: Journal, sink: LedgerSink, records_max: int, on_damage: OnDamage
    ) -> None:
        self._claim, self._journal, self._sink, self._records_max = claim, journal, sink, records_max
        self._on_damage = on_damage
        self._sequence, self._offset = 1, 0
        self._fd: int | None = None
        self.delivered = 0
        """Records that the sink has."""

    def deliver(self) -> bool:
        """Deliver one batch; False if there was nothing.

        Raises:
            SinkError: the sink failed; the same batch comes again.
            LedgerError, OSError: the journal cannot be read.
        """
        self._journal.remove(self._sequence - 1)
        records: list[UsageRecord] = []
        offset = self._offset
        length, is_final = self._journal.length(self._sequence)
        if offset < length:
            data = self._read(offset, min(length - offset, READ_BYTES))
            begin = len(MAGIC) if offset == 0 else 0
            end = begin
            for frame in read_frames(data, begin):
                end = frame.end
                if frame.kind == Kind.CLOSE:
                    records.append(decode_record(frame.body))
                    if len(records) >= self._records_max:
                        break
            if end == begin:
                end = self._pass_damage(data, offset, begin, num_left=length - offset)
            offset += end
        if records:
            self._sink.write(records)
            self.delivered += len(records)
        moved = offset > self._offset
        self._offset = offset
        if is_final and offset >= length:
            self._next_segment()
            moved = True
        return moved

    def stop(self) -> None:
        """Close what is open."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _pass_damage(self, data: bytes, offset: int, begin: int, *, num_left: int) -> int:
        """Nothing begins at `begin` of `data`, though all of it was written: where to continue."""
        end = next_frame(data, begin)
        if end is None and len(data) == num_left:
            end = len(data)
        if end is None:
            # The frame that begins behind the damage may be cut off by the end of what was read.
            end = len(data) - FRAME_BYTES_MAX
        path = segment_path(self._claim.directory, self._sequence)
        self._on_damage(path, offset + begin, end - begin)
        return end

    def _read(self, offset: int, num_bytes: int) -> bytes:
        if self._fd is None:
            path = segment_path(self._claim.directory, self._sequence)
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return os.pread(self._fd, num_bytes, offset)

    def _next_segment(self) -> None:
        self.stop()
        self._sequence, self._offset = self._sequence + 1, 0


class Delivery:
    """The thread around a `Follower`: no request waits for a sink that lags or fails."""

    def __init__(self, follower: Follower, limits: LedgerLimits, clock: Clock, log: Log) -> None:
        self._follower, self._limits, self._clock, self._log = follower, limits, clock, log
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ledger-delivery", daemon=True)
        self.errors = 0
        """Times that the sink failed."""

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Deliver what is left and end; blocks. False if that did not work in time or the sink fails."""
        self._stop.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        deadline_ns = self._clock.now_ns() + int(timeout_s * NS_PER_S)
        while self._clock.now_ns() < deadline_ns:
            if not self._try():
                return False
            if not self._moved:
                return True
        return False

    def _run(self) -> None:
        pause_s = self._limits.deliver_ms / 1000
        back_off_s = pause_s
        while not self._stop.wait(back_off_s):
            self._moved = True
            healthy = True
            while healthy and self._moved and not self._stop.is_set():
                healthy = self._try()
            back_off_s = pause_s if healthy else min(BACK_OFF_MAX_S, max(1.0, back_off_s * 2))

    _moved = True

    def _try(self) -> bool:
        try:
            self._moved = self._follower.deliver()
        except (LedgerError, OSError) as error:
            self.errors += 1
            self._log.warning("the ledger's records wait in the journal", error=error)
            return False
        except Exception as error:  # noqa: BLE001 - a bug here must not end the delivery unseen.
            self.errors += 1
            self._log.bug("the ledger's delivery failed", error)
            return False
        return True


TABLE = "usage"
BUSY_S = 10.0
"""Other gateways write to the same file; this long one waits for its turn."""
DAY_NS = 86_400 * NS_PER_S
PRUNE_NS = 3600 * NS_PER_S
PRUNE_ROWS = 10_000

FIELDS = tuple(field.name for field in msgspec.structs.fields(UsageRecord))
_INSERT = f"INSERT OR IGNORE INTO {TABLE} ({', '.join(FIELDS)}) VALUES "
_ROW = f"({', '.join('?' * len(FIELDS))})"
VARIABLES_MAX = 999
"""Of one statement in SQLite before 3.32."""
ROWS = min(32, VARIABLES_MAX // len(FIELDS))
"""Of one statement. SQLite lets go of the GIL for each, and to take it again from a busy event loop costs
both threads more than the rows do."""


def columns() -> dict[str, str]:
    """Column and declaration of every field."""
    declared: dict[str, str] = {}
    types = get_type_hints(UsageRecord)
    for field in msgspec.structs.fields(UsageRecord):
        is_text = types[field.name] is str or issubclass(types[field.name], enum.StrEnum)
        kind = "TEXT NOT NULL DEFAULT ''" if is_text else "INTEGER NOT NULL DEFAULT 0"
        declared[field.name] = "TEXT PRIMARY KEY NOT NULL" if field.name == "request_id" else kind
    return declared


class SqliteSink:
    """The default sink. May be made in one thread and used in another, never in two at once."""

    def __init__(self, path: Path, clock: Clock, *, keep_days: int = 0) -> None:
        """Open or make the file.

        Raises:
            LedgerError: it is no ledger, cannot be written, or a newer version wrote it.
        """
        self._path, self._clock, self._keep_days = path, clock, keep_days
        self._pruned_ns: int | None = None
        try:
            self._connection = sqlite3.connect(
                path, timeout=BUSY_S, isolation_level=None, check_same_thread=False, cached_statements=8
            )
        except sqlite3.Error as error:
            raise LedgerError(f"{path}: {error}") from error
        with contextlib.ExitStack() as failed:
            failed.callback(self.close)
            try:
                path.chmod(0o600)
                self._prepare()
            except (sqlite3.Error, OSError) as error:
                raise LedgerError(f"{path}: {error}") from error
            failed.pop_all()

    def write(self, records: Sequence[UsageRecord]) -> None:
        """See `LedgerSink.write`."""
        try:
            with self._connection:
                self._connection.execute("BEGIN IMMEDIATE")
                for begin in range(0, len(records), ROWS):
                    some = records[begin : begin + ROWS]
                    values = list(chain.from_iterable(map(msgspec.structs.astuple, some)))
                    self._connection.execute(_INSERT + ", ".join([_ROW] * len(some)), values)
            self._prune()
        except sqlite3.Error as error:
            raise SinkError(f"{self._path}: {error}") from error

    def close(self) -> None:
        """See `LedgerSink.close`."""
        self._connection.close()

    def _prepare(self) -> None:
        run = self._connection.execute
        (version,) = run("PRAGMA user_version").fetchone()
        if version > SCHEMA_VERSION:
            raise LedgerError(
                f"{self._path} was written by a newer version (schema {version}, this one knows "
                f"{SCHEMA_VERSION})"
            )
        run("PRAGMA journal_mode = WAL").fetchone()
        run("PRAGMA synchronous = FULL")
        declared = columns()
        with self._connection:
            run("BEGIN IMMEDIATE")
            body = ", ".join(f"{name} {kind}" for name, kind in declared.items())
            run(f"CREATE TABLE IF NOT EXISTS {TABLE} ({body})")
            there = {row[1] for row in run(f"PRAGMA table_info({TABLE})")}
            for name in declared.keys() - there:
                run(f"ALTER TABLE {TABLE} ADD COLUMN {name} {declared[name]}")
            run(f"CREATE INDEX IF NOT EXISTS usage_spent ON {TABLE} (ended_ns, tenant, cost_micros)")
            run(f"PRAGMA user_version = {SCHEMA_VERSION}")

    def _prune(self) -> None:
        """Now and then, take out what is older than it has to be kept."""
        if not self._keep_days:
            return
        now_ns = self._clock.now_ns()
        if self._pruned_ns is not None and now_ns - self._pruned_ns < PRUNE_NS:
            return
        oldest_ns = self._clock.wall_ns() - self._keep_days * DAY_NS
        done = self._connection.execute(
            f"DELETE FROM {TABLE} WHERE rowid IN (SELECT rowid FROM {TABLE} WHERE ended_ns < ? LIMIT "
            f"{PRUNE_ROWS})",
            (oldest_ns,),
        )
        if done.rowcount < PRUNE_ROWS:
            self._pruned_ns = now_ns
