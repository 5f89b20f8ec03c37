"""Questions to the ledger: the database, and what journals hold that it does not have yet.

Reads only, beside gateways that write. Journals are read first: what is delivered meanwhile is then found in
both places and counted once by its id. Of a living gateway only requests that are over count; of a dead one
those that it was in the middle of count as they will be recovered.
"""

import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

import msgspec

from penstock.clock import NS_PER_S
from penstock.errors import LedgerError
from penstock.policy.limits.budget import Spent
from penstock.policy.limits.calendar import DAY_NS, day_of, first_day, month_of
from penstock.policy.record import SCHEMA_VERSION, UsageRecord
from penstock.telemetry import ledger_files
from penstock.telemetry.ledger_recovery import Begun, read_journal
from penstock.telemetry.ledger_sqlite import FIELDS, TABLE, columns
from penstock.types import TenantId

GROUPS: Mapping[str, str] = {
    "tenant": "tenant",
    "model": "served_model",
    "day": f"strftime('%Y-%m-%d', ended_ns / {NS_PER_S}, 'unixepoch')",
    "month": f"strftime('%Y-%m', ended_ns / {NS_PER_S}, 'unixepoch')",
    "key": "key_prefix",
    "user": "user",
    "adapter": "adapter",
    "requested_model": "requested_model",
    "worker": "worker",
    "endpoint": "endpoint",
    "outcome": "outcome",
    "price_version": "price_version",
}
"""What usage can be summed up by, and how the database says it."""
BUSY_S = 10.0


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over records."""

    requests: int = 0
    failed: int = 0
    """Of these, not finished: failed, evicted or cancelled."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    cost_micros: int = 0
    accelerator_cost_micros: int = 0


@dataclass(slots=True, frozen=True)
class LedgerRow:
    """Totals of one group."""

    group: tuple[str, ...]
    totals: Totals


@dataclass(slots=True, frozen=True, kw_only=True)
class Query:
    """What is asked. Times are nanoseconds since the epoch: `since_ns` included, `until_ns` not."""

    by: tuple[str, ...] = ("tenant", "model", "day")
    since_ns: int | None = None
    until_ns: int | None = None
    where: Mapping[str, str] = field(default_factory=dict[str, str])
    """Group and the value that it must have."""


class LedgerReader:
    """One look at the ledger: what it says does not change while it is open."""

    def __init__(self, directory: Path) -> None:
        """Raises LedgerError: there is none, or it cannot be read."""
        database = ledger_files.database_path(directory)
        if not database.exists():
            raise LedgerError(f"{directory}: there is no ledger here")
        self.running = 0
        """Requests that living gateways are in the middle of; they are in no total."""
        pending = self._read_journals(directory)
        try:
            self._connection = sqlite3.connect("file::memory:", uri=True, timeout=BUSY_S)
            self._attach(database, pending)
        except sqlite3.Error as error:
            raise LedgerError(f"{database}: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def totals(self, query: Query) -> list[LedgerRow]:
        """Totals by group, sorted by group.

        Raises:
            LedgerError: the database cannot be read.
        """
        groups = [GROUPS[name] for name in query.by]
        conditions, values = _conditions(query)
        sums = (
            "count(*), sum(outcome != 'finished'), sum(prompt_tokens), sum(cached_tokens), "
            "sum(completion_tokens), sum(cost_micros), sum(accelerator_cost_micros)"
        )
        places = ", ".join(str(place + 1) for place in range(len(groups)))
        text = f"SELECT {', '.join([*groups, sums])} FROM records {conditions}"
        if groups:
            text += f" GROUP BY {places} ORDER BY {places}"
        rows: list[LedgerRow] = []
        for row in self._run(text, values):
            counts = [int(value or 0) for value in row[len(groups) :]]
            if counts[0]:
                totals = Totals(**dict(zip(Totals.__struct_fields__, counts, strict=True)))
                rows.append(LedgerRow(tuple(map(str, row[: len(groups)])), totals))
        return rows

    def spent(self, wall_ns: int) -> list[Spent]:
        """What every tenant has spent in the day and month of `wall_ns`.

        Raises:
            LedgerError: the database cannot be read.
        """
        day = day_of(wall_ns)
        month_ns = first_day(month_of(day)) * DAY_NS
        text = (
            "SELECT tenant, sum(CASE WHEN ended_ns >= ? THEN cost_micros ELSE 0 END), sum(cost_micros) "
            "FROM records WHERE ended_ns >= ? GROUP BY tenant ORDER BY tenant"
        )
        return [
            Spent(tenant=TenantId(tenant), day=day, day_micros=of_day, month_micros=of_month)
            for tenant, of_day, of_month in self._run(text, (day * DAY_NS, month_ns))
        ]

    # --- inside ----------------------------------------------------------------------------------

    def _read_journals(self, directory: Path) -> list[UsageRecord]:
        records: list[UsageRecord] = []
        for path in ledger_files.instance_directories(directory):
            # Asked first: a process that ends meanwhile has written the ends of its requests before it did.
            alive = ledger_files.is_alive(path)
            begun = Begun()
            records.extend(
                record for frame in read_journal(path) if (record := begun.take(frame)) is not None
            )
            if alive:
                self.running += len(begun.opened)
            else:
                records.extend(begun.ended())
        return records

    def _attach(self, database: Path, pending: Sequence[UsageRecord]) -> None:
        run = self._connection.execute
        run(f"ATTACH 'file:{quote(str(database))}?mode=ro' AS ledger")
        (version,) = run("PRAGMA ledger.user_version").fetchone()
        if version > SCHEMA_VERSION:
            raise LedgerError(f"{database} was written by a newer version (schema {version})")
        names = ", ".join(FIELDS)
        run(f"CREATE TABLE pending ({', '.join(f'{name} {kind}' for name, kind in columns().items())})")
        self._connection.executemany(
            f"INSERT OR IGNORE INTO pending ({names}) VALUES ({', '.join('?' * len(FIELDS))})",
            [msgspec.structs.astuple(record) for record in pending],
        )
        self._connection.commit()
        run(
            f"CREATE TEMP VIEW records AS SELECT {names} FROM ledger.{TABLE} UNION ALL SELECT {names} FROM "
            f"pending WHERE NOT EXISTS (SELECT 1 FROM ledger.{TABLE} there WHERE there.request_id = "
            f"pending.request_id)"
        )
        run("BEGIN")

    def _run(self, text: str, values: Sequence[object]) -> list[tuple[Any, ...]]:
        try:
            return self._connection.execute(text, values).fetchall()
        except sqlite3.Error as error:
            raise LedgerError(f"the ledger's database cannot be read: {error}") from error


def _conditions(query: Query) -> tuple[str, list[object]]:
    parts: list[str] = []
    values: list[object] = []
    for sign, limit_ns in ((">=", query.since_ns), ("<", query.until_ns)):
        if limit_ns is not None:
            parts.append(f"ended_ns {sign} ?")
            values.append(limit_ns)
    for name, value in query.where.items():
        parts.append(f"{GROUPS[name]} = ?")
        values.append(value)
    return (f"WHERE {' AND '.join(parts)}" if parts else ""), values
