import asyncio
import contextlib
import os
import sqlite3
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import cast

import pytest
from usage_records import MemorySink, closed, opened, progress

from penstock.clock import SystemClock, sleep
from penstock.config.ledger import BudgetsConfig, LedgerConfig
from penstock.config.tree import LogConfig
from penstock.errors import LedgerError
from penstock.policy.flow import UsageRecord
from penstock.policy.limits.budget import DAY_NS, BudgetRefusal, Spent, TenantBudgets
from penstock.policy.tenant import Tenant
from penstock.telemetry import ledger_segment
from penstock.telemetry.ledger import USER_CHARS_MAX, Ledger, LedgerTerms
from penstock.telemetry.ledger_journal import Journal
from penstock.telemetry.ledger_recovery import read_journal
from penstock.telemetry.ledger_segment import Kind, LedgerLimits, Progress
from penstock.telemetry.log import Log
from penstock.telemetry.metrics import Metrics
from penstock.types import TenantId

CLOCK = SystemClock()
SMALL = LedgerLimits(segment_bytes=256 * 1024, deliver_ms=5)
LOG = Log(LogConfig(level="error"), CLOCK)


def config(directory: Path, **changes: object) -> LedgerConfig:
    return LedgerTerms(directory=str(directory), fsync_ms=5, **changes)


async def eventually(condition) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await sleep(0.005)


def test_a_request_reaches_the_database(tmp_path: Path) -> None:
    async def run() -> None:
        sink = MemorySink()
        ledger = Ledger(config(tmp_path), CLOCK, LOG, sink=sink, limits=SMALL)
        await ledger.start()
        ledger.open(partial(opened, "a"))
        ledger.slice("a", lambda: progress("a", 4))
        assert ledger.statistics().open == 1
        ledger.close(partial(closed, "a"))
        ledger.open(partial(opened, "b"))
        await eventually(lambda: sink.records == {"a": closed("a")})
        ledger.close(partial(closed, "b"))
        await ledger.stop()
        assert set(sink.records) == {"a", "b"}
        assert sink.is_closed
        assert ledger_segment.instance_directories(tmp_path) == []

    asyncio.run(run())


async def with_open(names: str, place: Path, sink: MemorySink) -> Ledger:
    """A ledger that runs and has these requests open."""
    ledger = Ledger(config(place), CLOCK, LOG, sink=sink, limits=SMALL)
    await ledger.start()
    for name in names:
        ledger.open(partial(opened, name))
    return ledger


def test_ends_are_written_together_by_the_flush_that_their_clients_wait_for_and_by_a_stop(
    tmp_path: Path,
) -> None:
    async def run() -> None:
        sink = MemorySink()
        ledger = await with_open("abcd", tmp_path, sink)
        ledger.close_soon(lambda: closed("a"))
        ledger.slice("b", lambda: pytest.fail("its end follows in the same turn"))
        ledger.close_soon(lambda: closed("b"))
        assert ledger.statistics().open == 4
        ledger.flush()
        assert (ledger.statistics().open, ledger.statistics().closed) == (2, 2)
        ledger.close_soon(lambda: closed("c"))
        ledger.close_soon(lambda: closed("d"))
        await ledger.stop()
        assert sink.records == {name: closed(name) for name in "abcd"}

    asyncio.run(run())


def test_an_end_that_waits_for_a_flush_is_written_in_the_next_turn_by_itself(tmp_path: Path) -> None:
    async def run() -> None:
        ledger = Ledger(config(tmp_path), CLOCK, LOG, sink=MemorySink(), limits=SMALL)
        await ledger.start()
        ledger.open(partial(opened, "a"))
        await asyncio.sleep(0)
        ledger.close_soon(lambda: closed("a"))
        assert ledger.statistics().closed == 0
        await asyncio.sleep(0)
        assert ledger.statistics().closed == 1
        await ledger.stop()

    asyncio.run(run())


def test_one_record_or_slice_that_cannot_be_made_loses_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def run() -> None:
        sink = MemorySink()
        ledger = await with_open("abcd", tmp_path, sink)
        ledger.close_soon(lambda: closed("a"))
        ledger.close_soon(lambda: cast("UsageRecord", {}["b"]))
        ledger.close_soon(lambda: closed("a"))  # A second end.
        ledger.close_soon(lambda: closed("c"))
        ledger.slice("d", lambda: cast("Progress", {}["d"]))
        ledger.slice("b", lambda: progress("b", 4))
        ledger.flush()
        assert (ledger.statistics().open, ledger.statistics().closed) == (2, 2)
        (journal,) = ledger_segment.instance_directories(tmp_path)
        frames = [(frame.kind, frame.body) for frame in read_journal(journal)]
        ends = [ledger_segment.decode_record(body) for kind, body in frames if kind == Kind.CLOSE]
        assert [end.request_id for end in ends] == ["a", "c"]
        assert [kind for kind, _ in frames].count(Kind.SLICE) == 1, "that of b"
        ledger.close(partial(closed, "d"))
        await ledger.stop()
        assert set(sink.records) == set("acd")

    asyncio.run(run())
    said = capsys.readouterr().err
    assert said.count("the end of a request could not be recorded") == 2
    assert said.count("the usage of a running request could not be recorded") == 1


def test_a_sink_that_fails_makes_nobody_wait_and_gets_everything_later(tmp_path: Path) -> None:
    async def run() -> None:
        sink = MemorySink()
        sink.failures = 1
        ledger = Ledger(config(tmp_path), CLOCK, LOG, sink=sink, limits=SMALL)
        await ledger.start()
        for i in range(100):
            ledger.open(partial(opened, f"r{i}"))
            ledger.close(partial(closed, f"r{i}"))
        await eventually(lambda: ledger.statistics().sink_errors == 1)
        assert ledger.statistics().pending == 100
        metrics = Metrics([], version="0")
        metrics.ledger_stats(ledger.statistics())
        text = metrics.render().decode()
        assert "penstock_ledger_pending_records 100.0" in text
        assert "penstock_ledger_sink_errors_total 1.0" in text
        await ledger.stop()
        assert len(sink.records) == 100

    asyncio.run(run())


def test_a_bug_in_a_sink_does_not_end_the_delivery(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Buggy(MemorySink):
        def write(self, records: Sequence[UsageRecord]) -> None:
            self.writes += 1
            if self.writes == 1:
                raise ZeroDivisionError
            super().write(records)

    async def run() -> None:
        sink = Buggy()
        ledger = Ledger(
            config(tmp_path), CLOCK, Log(LogConfig(level="error"), CLOCK), sink=sink, limits=SMALL
        )
        await ledger.start()
        ledger.open(partial(opened, "a"))
        ledger.close(partial(closed, "a"))
        await eventually(lambda: sink.writes)
        await ledger.stop()
        assert list(sink.records) == ["a"]

    asyncio.run(run())
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_what_the_sink_never_took_is_there_at_the_next_start(tmp_path: Path) -> None:
    async def run() -> None:
        broken, sink = MemorySink(), MemorySink()
        broken.failures = 10**6
        first = Ledger(config(tmp_path), CLOCK, LOG, sink=broken, limits=SMALL)
        await first.start()
        first.open(partial(opened, "a"))
        first.close(partial(closed, "a"))
        first.open(partial(opened, "cut"))
        await first.stop()
        second = Ledger(config(tmp_path), CLOCK, LOG, sink=sink, limits=SMALL)
        await second.start()
        assert sink.records["a"] == closed("a")
        assert sink.records["cut"].recovered
        await second.stop()

    asyncio.run(run())


def test_without_a_ledger_nothing_is_written(tmp_path: Path) -> None:
    async def run() -> None:
        ledger = Ledger(config(tmp_path / "none", enabled=False), CLOCK, LOG, limits=SMALL)
        await ledger.start()
        ledger.open(partial(opened, "a"))
        ledger.slice("a", lambda: progress("a", 1))
        ledger.close(partial(closed, "a"))
        ledger.flush()
        await ledger.stop()
        assert ledger.statistics().closed == 0

    asyncio.run(run())
    assert not (tmp_path / "none").exists()


def test_a_user_field_of_any_length_is_bounded(tmp_path: Path) -> None:
    async def run() -> UsageRecord:
        sink = MemorySink()
        ledger = Ledger(config(tmp_path), CLOCK, LOG, sink=sink, limits=SMALL)
        await ledger.start()
        record = closed("a")
        long = UsageRecord(
            **{**{f: getattr(record, f) for f in record.__struct_fields__}, "user": "u" * 10**6}
        )
        ledger.open(lambda: long)
        ledger.close(lambda: long)
        await ledger.stop()
        return sink.records["a"]

    assert asyncio.run(run()).user == "u" * USER_CHARS_MAX


def test_a_directory_that_cannot_be_written_is_said_by_its_key(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    async def run() -> None:
        await Ledger(config(tmp_path / "file" / "x"), CLOCK, LOG, limits=SMALL).start()

    with pytest.raises(LedgerError, match=r"ledger\.directory: .* set ledger\.enabled: false"):
        asyncio.run(run())


def test_the_directory_follows_the_xdg_rules() -> None:
    named = LedgerConfig(directory="/somewhere")
    assert ledger_segment.ledger_directory(named, {}) == Path("/somewhere")
    chosen = {"PENSTOCK_STATE_DIR": "/p", "XDG_STATE_HOME": "/s"}
    assert ledger_segment.ledger_directory(LedgerConfig(), chosen) == Path("/p/ledger")
    assert ledger_segment.ledger_directory(LedgerConfig(), {"XDG_STATE_HOME": "/s"}) == Path(
        "/s/penstock/ledger"
    )
    assert ledger_segment.ledger_directory(LedgerConfig(), {}) == Path.home() / ".local/state/penstock/ledger"


def test_records_leave_the_database_after_the_days_of_the_configuration(tmp_path: Path) -> None:
    now_ns = CLOCK.wall_ns()

    async def run() -> None:
        ledger = Ledger(config(tmp_path, keep_days=30), CLOCK, LOG, limits=SMALL)
        await ledger.start()
        for name, days in (("old", 31), ("young", 29)):
            ledger.open(partial(opened, name, ended_ns=now_ns - days * DAY_NS))
            ledger.close(partial(closed, name, ended_ns=now_ns - days * DAY_NS))
        await ledger.stop()

    asyncio.run(run())
    with contextlib.closing(sqlite3.connect(ledger_segment.database_path(tmp_path))) as database:
        assert database.execute("SELECT request_id FROM usage").fetchall() == [("young",)]


def test_what_was_spent_is_known_after_a_crash(tmp_path: Path) -> None:
    """Delivered, waiting in the journal of a dead process, and cut off: all of it counts, once."""
    now_ns = CLOCK.wall_ns()
    long_ago = now_ns - 63 * DAY_NS

    async def run() -> tuple[list[Spent], list[Spent]]:
        first = Ledger(config(tmp_path), CLOCK, LOG, limits=SMALL)
        await first.start()
        for name, at_ns in (("a", now_ns), ("b", long_ago)):
            first.open(partial(opened, name, ended_ns=at_ns))
            first.close(partial(closed, name, ended_ns=at_ns, cost_micros=70))
        await first.stop()
        dead = Journal(
            claim := ledger_segment.claim_new(tmp_path, CLOCK),
            config(tmp_path),
            CLOCK,
            lambda what, _: pytest.fail(what),
        )
        for name in "cde":
            dead.open(opened(name, ended_ns=now_ns))
        dead.close(closed("c", ended_ns=now_ns, cost_micros=500))
        dead.slice("d", lambda: progress("d", 4, at_ns=now_ns))
        dead.flush()
        os.close(claim.lock)
        second = Ledger(config(tmp_path), CLOCK, LOG, limits=SMALL)
        before = await second.spent()
        await second.start()
        after = await second.spent()
        await second.stop()
        return before, after

    before, after = asyncio.run(run())
    assert before == after
    assert sum(each.day_micros for each in before) == sum(each.month_micros for each in before) == 610
    assert {each.tenant for each in before} == {"acme"}
    money = TenantBudgets(BudgetsConfig(), wall_offset_ns=now_ns)
    money.restore(0, after)
    refusal = money.reserve(0, Tenant(id=TenantId("acme"), budget_month_micros=1000), 391)
    assert isinstance(refusal, BudgetRefusal)


def test_what_was_spent_is_told_by_process(tmp_path: Path) -> None:
    now_ns = CLOCK.wall_ns()
    one, two = "0123456789abcdef", "fedcba9876543210"

    async def run() -> list[Spent]:
        ledger = Ledger(config(tmp_path), CLOCK, LOG, limits=SMALL)
        await ledger.start()
        names = (f"cmpl-{one}00000001-0", f"resp_{one}00000002-0", f"chatcmpl-{two}00000001-0")
        for micros, name in enumerate(names, 1):
            ledger.open(partial(opened, name, ended_ns=now_ns))
            ledger.close(partial(closed, name, ended_ns=now_ns, cost_micros=micros))
        await ledger.stop()
        return await ledger.spent()

    found = asyncio.run(run())
    assert [(each.process, each.day_micros, each.month_micros) for each in found] == [
        (one, 3, 3),
        (two, 3, 3),
    ]
