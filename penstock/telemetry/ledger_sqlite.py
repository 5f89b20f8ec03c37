"""The ledger in SQLite: one table, one row for each request, its id the key.

Every batch is one transaction in a write-ahead log that is synced before `write` returns, since the journal
forgets what was delivered. A row that is there already stays as it is. Columns that a newer version knows and
an older file lacks are added when it is opened; a file that a newer version wrote is refused.
"""

import enum
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import get_type_hints

import msgspec

from penstock.clock import NS_PER_S, Clock
from penstock.errors import LedgerError
from penstock.policy.record import SCHEMA_VERSION, UsageRecord
from penstock.telemetry.ledger_sink import SinkError

TABLE = "usage"
BUSY_S = 10.0
"""Other gateways write to the same file; this long one waits for its turn."""
DAY_NS = 86_400 * NS_PER_S
PRUNE_NS = 3600 * NS_PER_S
PRUNE_ROWS = 10_000

FIELDS = tuple(field.name for field in msgspec.structs.fields(UsageRecord))
_INSERT = f"INSERT OR IGNORE INTO {TABLE} ({', '.join(FIELDS)}) VALUES ({', '.join('?' * len(FIELDS))})"


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
            path.chmod(0o600)
            self._prepare()
        except (sqlite3.Error, OSError) as error:
            raise LedgerError(f"{path}: {error}") from error

    def write(self, records: Sequence[UsageRecord]) -> None:
        """See `LedgerSink.write`."""
        try:
            with self._connection:
                self._connection.execute("BEGIN IMMEDIATE")
                self._connection.executemany(_INSERT, [msgspec.structs.astuple(record) for record in records])
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
