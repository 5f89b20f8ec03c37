"""From segments back to records: of living journals, of dead ones, and of those that were cut in the middle
of a write.

A request with an end has that record. A request without one, in the journal of a dead process, gets the
record that was written when it was accepted, with what its newest slice says: failed, and `recovered`.
Nothing here depends on when or how often it is done, so a recovery that is itself interrupted is simply done
again.

Questions to the ledger: the database, and what journals hold that it does not have yet.

Reads only, beside gateways that write. Journals are read first: what is delivered meanwhile is then found in
both places and counted once by its id. Of a living gateway only requests that are over count; of a dead one
those that it was in the middle of count as they will be recovered.
"""

import contextlib
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

import msgspec

from penstock.clock import NS_PER_S
from penstock.errors import LedgerError
from penstock.policy.flow import SCHEMA_VERSION, Outcome, UsageRecord
from penstock.policy.limits.budget import DAY_NS, Spent, day_of, first_day, month_of
from penstock.telemetry import ledger_segment
from penstock.telemetry.ledger_segment import (
    Frame,
    Gap,
    Kind,
    Progress,
    decode_progress,
    decode_record,
    read_head,
    read_past_damage,
)
from penstock.telemetry.ledger_sink import FIELDS, TABLE, LedgerSink, SinkError, columns
from penstock.telemetry.log import Log
from penstock.types import TenantId

CRASHED = "GatewayCrashed"
"""`UsageRecord.error` of a recovered record."""
BATCH = 2_000


@dataclass(slots=True)
class OpenRequests:
    """The requests of one journal that have no end yet."""

    opened: dict[str, UsageRecord] = field(default_factory=dict[str, UsageRecord])
    progress: dict[str, Progress] = field(default_factory=dict[str, Progress])

    def take(self, frame: Frame) -> UsageRecord | None:
        """Follow one frame; the record if it is one that was closed."""
        if frame.kind == Kind.CLOSE:
            record = decode_record(frame.body)
            self.opened.pop(record.request_id, None)
            self.progress.pop(record.request_id, None)
            return record
        if frame.kind == Kind.OPEN:
            record = decode_record(frame.body)
            self.opened.setdefault(record.request_id, record)
        elif frame.kind == Kind.SLICE:
            progress = decode_progress(frame.body)
            known = self.progress.get(progress.request_id)
            if known is None or _amount(progress) >= _amount(known):
                self.progress[progress.request_id] = progress
        return None

    def ended(self) -> list[UsageRecord]:
        """Their records, as they stand if their process is dead."""
        return [
            recovered(record, self.progress.get(request_id)) for request_id, record in self.opened.items()
        ]


def _amount(progress: Progress) -> tuple[int, int, int]:
    return progress.completion_tokens, progress.prompt_tokens, progress.at_ns


def recovered(opened: UsageRecord, progress: Progress | None) -> UsageRecord:
    """The record of a request whose process died."""
    record = msgspec.structs.replace(opened, outcome=Outcome.FAILED, error=CRASHED, recovered=True)
    if progress is None:
        return record
    return msgspec.structs.replace(
        record,
        ended_ns=progress.at_ns,
        total_us=max(0, progress.at_ns - opened.ended_ns) // 1000,
        prompt_tokens=progress.prompt_tokens,
        cached_tokens=progress.cached_tokens,
        completion_tokens=progress.completion_tokens,
        cost_micros=progress.cost_micros,
        worker=progress.worker or opened.worker,
        attempts=max(opened.attempts, 1),
    )


@dataclass(slots=True, frozen=True)
class Damage:
    """Something unreadable that no crash explains."""

    path: Path
    offset: int
    length: int
    """Bytes."""


def read_journal(directory: Path, damage: list[Damage] | None = None) -> Iterator[Frame]:
    """Every whole frame of one journal in the order of writing.

    Files that vanish meanwhile were delivered. A cut at the end of what was written last is what a crash
    leaves; something unreadable with a whole frame behind it is damage, which goes to the list.

    Raises:
        LedgerError: a newer version wrote it, or a file cannot be read.
    """
    suspect: Damage | None = None
    for _, path in ledger_segment.segments(directory):
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise LedgerError(f"{path}: cannot be read: {error.strerror}") from error
        head = read_head(data, str(path))
        end = 0 if head is None else head[1]
        for found in read_past_damage(data, end):
            if damage is not None:
                if suspect is not None:
                    damage.append(suspect)  # Something was written after it, so it was whole once.
                if isinstance(found, Gap):
                    damage.append(Damage(path, found.start, found.end - found.start))
            suspect = None
            end = found.end
            if isinstance(found, Frame):
                yield found
        written = len(data.rstrip(b"\0"))
        if written > end:
            suspect = Damage(path, end, written - end)


def recover_abandoned(directory: Path, sink: LedgerSink, log: Log) -> int:
    """Bring the journals of dead processes to the sink and remove them; how many requests were cut off.

    Raises:
        SinkError: the sink takes nothing; all that was not removed will be recovered again.
    """
    num_cut = 0
    claims = ledger_segment.claim_abandoned(directory)
    try:
        while claims:
            try:
                num_cut += _recover(directory, claims[0], sink, log)
            except SinkError:
                raise
            except LedgerError as error:
                # A newer version's, after a rollback: that one will read it. Serving continues.
                log.error("a dead gateway's journal stays: this version cannot read it", error=error)
                claims.pop(0).release(remove=False)
            else:
                claims.pop(0).release(remove=True)
    finally:
        for claim in claims:
            claim.release(remove=False)
    return num_cut


def report_damage(directory: Path, instance: str, place: Damage, log: Log) -> None:
    """Keep a copy of the segment for a person, and say where it is."""
    aside = ledger_segment.keep_damaged(directory, instance, place.path)
    log.error(
        "part of the ledger's journal is unreadable",
        kept=str(aside),
        offset=place.offset,
        bytes=place.length,
    )


def _recover(directory: Path, claim: ledger_segment.Claim, sink: LedgerSink, log: Log) -> int:
    requests, batch, damage = OpenRequests(), list[UsageRecord](), list[Damage]()
    for frame in read_journal(claim.directory, damage):
        if (record := requests.take(frame)) is not None:
            batch.append(record)
            if len(batch) >= BATCH:
                sink.write(batch)
                batch.clear()
    # Last, so that an end that was found twice is the one that counts: the sink takes the first of an id.
    cut = requests.ended()
    sink.write([*batch, *cut])
    for place in damage:
        report_damage(directory, claim.instance, place, log)
    if cut:
        log.warning("requests were cut off by a crash; their records end with their last slice", num=len(cut))
    return len(cut)


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
    "origin": "origin",
}
"""The keys by which usage can be summed up, and their columns."""
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


def total_of(rows: Sequence[LedgerRow]) -> Totals:
    """The sum of all rows."""
    names = Totals.__struct_fields__
    return Totals(**{name: sum(getattr(row.totals, name) for row in rows) for name in names})


@dataclass(slots=True, frozen=True, kw_only=True)
class Query:
    """The question. Times are nanoseconds since the epoch: `since_ns` included, `until_ns` not."""

    by: tuple[str, ...] = ("tenant", "model", "day")
    since_ns: int | None = None
    until_ns: int | None = None
    where: Mapping[str, str] = field(default_factory=dict[str, str])
    """Group and the value that it must have."""

    @property
    def sees_guests(self) -> bool:
        """Whether requests of peer cells count, which their own cells bill."""
        return "origin" in self.by or "origin" in self.where


_PROCESS = "substr(request_id, instr(replace(request_id, '_', '-'), '-') + 1, 16)"
"""The process part of an id (`rng.IdSource`)."""


class LedgerReader:
    """One look at the ledger, or at those of several cells together: what it says does not change while it is
    open.

    Every request counts once, by the record of the cell that it came to. The record of a cell that computed
    it for that one (`UsageRecord.origin`) counts only where several ledgers are looked at and none has the
    request itself.
    """

    def __init__(self, directory: Path, *others: Path) -> None:
        """Raises LedgerError: there is none, or it cannot be read."""
        self.running = 0
        """Requests that living gateways are in the middle of; they are in no total."""
        self._orphans_count = bool(others)
        self._opened: list[str] = []
        try:
            self._connection = sqlite3.connect("file::memory:", uri=True, timeout=BUSY_S)
        except sqlite3.Error as error:
            raise LedgerError(f"no ledger can be read: {error}") from error
        with contextlib.ExitStack() as failed:
            failed.callback(self._connection.close)
            self._read((directory, *others))
            failed.pop_all()

    def _read(self, directories: Sequence[Path]) -> None:
        databases = [ledger_segment.database_path(each) for each in directories]
        for each, database in zip(directories, databases, strict=True):
            if not database.exists():
                raise LedgerError(f"{each}: there is no ledger here")
        try:
            self._make_pending([record for each in directories for record in self._read_journals(each)])
            self._take(databases)
            self._make_views()
        except sqlite3.Error as error:
            raise LedgerError(f"{', '.join(map(str, databases))}: {error}") from error

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
        view = "records" if query.sees_guests else "billed"
        sums = (
            "count(*), sum(outcome != 'finished'), sum(prompt_tokens), sum(cached_tokens), "
            "sum(completion_tokens), sum(cost_micros), sum(accelerator_cost_micros)"
        )
        places = ", ".join(str(place + 1) for place in range(len(groups)))
        text = f"SELECT {', '.join([*groups, sums])} FROM {view} {conditions}"
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
        """The spending of every tenant in the day and month of `wall_ns`, by gateway process.

        Raises:
            LedgerError: the database cannot be read.
        """
        day = day_of(wall_ns)
        month_ns = first_day(month_of(day)) * DAY_NS
        text = (
            f"SELECT tenant, {_PROCESS} AS process, "
            "sum(CASE WHEN ended_ns >= ? THEN cost_micros ELSE 0 END), sum(cost_micros) "
            "FROM records WHERE ended_ns >= ? AND origin = '' "
            "GROUP BY tenant, process ORDER BY tenant, process"
        )
        return [
            Spent(tenant=TenantId(tenant), process=process, day=day, day_micros=of_day, month_micros=of_month)
            for tenant, process, of_day, of_month in self._run(text, (day * DAY_NS, month_ns))
        ]

    # --- inside ----------------------------------------------------------------------------------

    def _read_journals(self, directory: Path) -> list[UsageRecord]:
        records: list[UsageRecord] = []
        for path in ledger_segment.instance_directories(directory):
            # Asked first: a process that ends meanwhile has written the ends of its requests before it did.
            alive = ledger_segment.is_alive(path)
            requests = OpenRequests()
            records.extend(
                record for frame in read_journal(path) if (record := requests.take(frame)) is not None
            )
            if alive:
                self.running += len(requests.opened)
                self._opened += requests.opened
            else:
                records.extend(requests.ended())
        return records

    def _make_pending(self, pending: Sequence[UsageRecord]) -> None:
        run, names = self._connection.execute, ", ".join(FIELDS)
        run(f"CREATE TABLE pending ({', '.join(f'{name} {kind}' for name, kind in columns().items())})")
        self._connection.executemany(
            f"INSERT OR IGNORE INTO pending ({names}) VALUES ({', '.join('?' * len(FIELDS))})",
            [msgspec.structs.astuple(record) for record in pending],
        )
        run("CREATE TABLE opened (request_id TEXT PRIMARY KEY NOT NULL)")
        self._connection.executemany(
            "INSERT OR IGNORE INTO opened VALUES (?)", [(each,) for each in self._opened]
        )
        self._connection.commit()

    def _attach(self, database: Path) -> str:
        """The database's records as a query; columns that it has not yet are empty."""
        run = self._connection.execute
        run(f"ATTACH 'file:{quote(str(database))}?mode=ro' AS ledger")
        (version,) = run("PRAGMA ledger.user_version").fetchone()
        if version > SCHEMA_VERSION:
            raise LedgerError(f"{database} was written by a newer version (schema {version})")
        there = {row[1] for row in run(f"PRAGMA ledger.table_info({TABLE})")}
        empty = {each: "''" if kind.startswith("TEXT") else "0" for each, kind in columns().items()}
        names = ", ".join(each if each in there else f"{empty[each]} AS {each}" for each in FIELDS)
        return f"SELECT {names} FROM ledger.{TABLE}"

    def _take(self, databases: Sequence[Path]) -> None:
        """The databases' records, as `stored`: of several a copy, where a record that two have is one."""
        run, names = self._connection.execute, ", ".join(FIELDS)
        if len(databases) == 1:
            run(f"CREATE TEMP VIEW stored AS {self._attach(databases[0])}")
            return
        run(f"CREATE TABLE stored ({', '.join(f'{name} {kind}' for name, kind in columns().items())})")
        for database in databases:
            run(f"INSERT OR IGNORE INTO stored ({names}) {self._attach(database)}")
            self._connection.commit()
            run("DETACH ledger")

    def _make_views(self) -> None:
        """`records`: each once. `billed`: each request once."""
        run, names = self._connection.execute, ", ".join(FIELDS)
        run(
            f"CREATE TEMP VIEW records AS SELECT {names} FROM stored UNION ALL SELECT {names} FROM pending "
            "WHERE NOT EXISTS (SELECT 1 FROM stored there WHERE there.request_id = pending.request_id)"
        )
        orphans = (
            " OR NOT EXISTS (SELECT 1 FROM records own WHERE own.request_id = guest.origin_id UNION ALL "
            "SELECT 1 FROM opened WHERE opened.request_id = guest.origin_id)"
        )
        run(
            f"CREATE TEMP VIEW billed AS SELECT * FROM records guest WHERE guest.origin = ''"
            f"{orphans if self._orphans_count else ''}"
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
