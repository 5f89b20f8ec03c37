"""What every sink must do, and the rest of the SQLite one."""

import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from usage_records import T0_NS, MemorySink, closed

from penstock.clock import ManualClock
from penstock.errors import LedgerError
from penstock.policy.flow import SCHEMA_VERSION, Outcome, UsageRecord
from penstock.telemetry.ledger_sink import DAY_NS, FIELDS, PRUNE_NS, LedgerSink, SinkError, SqliteSink

Read = Callable[[], list[UsageRecord]]


def read_sqlite(path: Path) -> list[UsageRecord]:
    connection = sqlite3.connect(path)
    rows = connection.execute(f"SELECT {', '.join(FIELDS)} FROM usage ORDER BY request_id").fetchall()
    connection.close()
    return [msgspec.convert(dict(zip(FIELDS, row, strict=True)), UsageRecord, strict=False) for row in rows]


@pytest.fixture(params=["memory", "sqlite"])
def sink(request: pytest.FixtureRequest, tmp_path: Path):
    """(sink, how to read all of its records)."""
    if request.param == "memory":
        memory = MemorySink()
        yield memory, lambda: sorted(memory.records.values(), key=lambda record: record.request_id)
        return
    path = tmp_path / "usage.sqlite"
    sqlite = SqliteSink(path, ManualClock())
    yield sqlite, lambda: read_sqlite(path)
    sqlite.close()


def test_records_come_back_as_they_were(sink: tuple[LedgerSink, Read]) -> None:
    write, read = sink
    records = [closed("a"), closed("b", tenant="ünï'; DROP TABLE usage", completion_tokens=2**40)]
    write.write(records)
    assert read() == records


def test_an_id_keeps_its_first_record_within_a_batch_and_between_batches(
    sink: tuple[LedgerSink, Read],
) -> None:
    write, read = sink
    write.write([closed("a", completion_tokens=1), closed("a", completion_tokens=2)])
    write.write([closed("a", completion_tokens=3), closed("b")])
    assert [(record.request_id, record.completion_tokens) for record in read()] == [("a", 1), ("b", 7)]


def test_an_older_sqlite_takes_a_large_batch(tmp_path: Path) -> None:
    path = tmp_path / "usage.sqlite"
    sink = SqliteSink(path, ManualClock())
    sink._connection.setlimit(sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER, 999)  # The default before 3.32.
    records = [closed(f"{i:03}") for i in range(100)]
    sink.write(records)
    sink.close()
    assert read_sqlite(path) == records


def test_an_empty_batch_is_fine(sink: tuple[LedgerSink, Read]) -> None:
    write, read = sink
    write.write([])
    assert read() == []


def test_order_does_not_matter(sink: tuple[LedgerSink, Read]) -> None:
    write, read = sink
    names = [f"r{i:02}" for i in range(20)]
    for name in [*reversed(names), *names[::3]]:
        write.write([closed(name)])
    assert read() == [closed(name) for name in names]


def test_another_thread_may_take_over(sink: tuple[LedgerSink, Read]) -> None:
    write, read = sink
    thread = threading.Thread(target=write.write, args=([closed("a")],))
    thread.start()
    thread.join()
    assert read() == [closed("a")]


# --- SQLite ------------------------------------------------------------------------------------------------


def test_every_field_has_a_column(tmp_path: Path) -> None:
    fields = msgspec.structs.fields(UsageRecord)
    values = {
        field.name: i + 1 if field.type is int else True if field.type is bool else f"t{i}"
        for i, field in enumerate(fields)
    }
    record = msgspec.convert(values | {"outcome": Outcome.EVICTED}, UsageRecord)
    sqlite = SqliteSink(tmp_path / "u", ManualClock())
    sqlite.write([record])
    sqlite.close()
    assert read_sqlite(tmp_path / "u") == [record]


def test_a_column_that_an_older_file_lacks_is_added(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "u")
    connection.execute(
        "CREATE TABLE usage (request_id TEXT PRIMARY KEY NOT NULL, tenant TEXT NOT NULL DEFAULT '')"
    )
    connection.execute("INSERT INTO usage VALUES ('old', 'acme')")
    connection.commit()
    connection.close()
    sqlite = SqliteSink(tmp_path / "u", ManualClock())
    sqlite.write([closed("new")])
    sqlite.close()
    connection = sqlite3.connect(tmp_path / "u")
    rows = connection.execute("SELECT request_id, tenant, cost_micros FROM usage ORDER BY 1").fetchall()
    connection.close()
    assert rows == [("new", "acme", 70), ("old", "acme", 0)]


def test_a_newer_file_is_refused(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "u")
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    connection.close()
    with pytest.raises(LedgerError, match="newer version") as refused:
        SqliteSink(tmp_path / "u", ManualClock())
    # The error still holds whatever was opened.
    assert refused.value
    assert not [each for each in Path("/proc/self/fd").iterdir() if each.resolve() == tmp_path / "u"]


def test_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "u").write_text("no database at all, but long enough to look at" * 50)
    with pytest.raises(LedgerError, match="not a database"):
        SqliteSink(tmp_path / "u", ManualClock())
    with pytest.raises(LedgerError, match="unable to open"):
        SqliteSink(tmp_path / "nowhere" / "u", ManualClock())


def test_a_locked_file_is_a_sink_error_and_nothing_of_the_batch_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.telemetry.ledger_sink.BUSY_S", 0.01)
    sqlite = SqliteSink(tmp_path / "u", ManualClock())
    other = sqlite3.connect(tmp_path / "u", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(SinkError, match="locked"):
        sqlite.write([closed("a")])
    other.execute("ROLLBACK")
    other.close()
    assert read_sqlite(tmp_path / "u") == []
    sqlite.write([closed("a")])
    assert read_sqlite(tmp_path / "u") == [closed("a")]
    sqlite.close()


def test_two_gateways_share_a_file(tmp_path: Path) -> None:
    first, second = SqliteSink(tmp_path / "u", ManualClock()), SqliteSink(tmp_path / "u", ManualClock())
    first.write([closed("a")])
    second.write([closed("a", completion_tokens=99), closed("b")])
    assert read_sqlite(tmp_path / "u") == [closed("a"), closed("b")]
    first.close()
    second.close()


def test_old_records_leave(tmp_path: Path) -> None:
    clock = ManualClock(wall_ns=T0_NS)
    sqlite = SqliteSink(tmp_path / "u", clock, keep_days=30)
    sqlite.write([closed("old", ended_ns=T0_NS - 31 * DAY_NS), closed("young", ended_ns=T0_NS - 29 * DAY_NS)])
    assert [record.request_id for record in read_sqlite(tmp_path / "u")] == ["young"]
    clock.advance(2 * DAY_NS + PRUNE_NS)
    sqlite.write([closed("new", ended_ns=T0_NS + 2 * DAY_NS)])
    assert [record.request_id for record in read_sqlite(tmp_path / "u")] == ["new"]
    sqlite.close()


def test_only_its_owner_can_read_it(tmp_path: Path) -> None:
    SqliteSink(tmp_path / "u", ManualClock()).close()
    assert (tmp_path / "u").stat().st_mode & 0o077 == 0
