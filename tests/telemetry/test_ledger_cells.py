"""Ledgers of cells: whoever adds them up counts every request once."""

from pathlib import Path

import pytest

from penstock.clock import NS_PER_S, SystemClock
from penstock.errors import LedgerError
from penstock.policy.flow import Outcome, UsageRecord
from penstock.telemetry.ledger_recovery import LedgerReader, Query, total_of
from penstock.telemetry.ledger_segment import database_path
from penstock.telemetry.ledger_sink import SqliteSink

BY_TENANT = Query(by=("tenant",))


def a_record(request_id: str, *, tenant: str = "acme", origin: str = "", origin_id: str = "") -> UsageRecord:
    return UsageRecord(
        request_id=request_id,
        ended_ns=1_700_000_000 * NS_PER_S,
        tenant=tenant,
        requested_model="m",
        served_model="m",
        outcome=Outcome.FINISHED,
        prompt_tokens=10,
        completion_tokens=5,
        cost_micros=7,
        origin=origin,
        origin_id=origin_id,
    )


def a_ledger(directory: Path, *records: UsageRecord) -> Path:
    directory.mkdir()
    sink = SqliteSink(database_path(directory), SystemClock())
    sink.write(records)
    sink.close()
    return directory


@pytest.fixture
def cells(tmp_path: Path) -> tuple[Path, Path]:
    """One request stayed in the east; one went from there to the west, in two choices; the west has one of
    its own, and one that came from a cell that is not here.
    """
    east = a_ledger(tmp_path / "east", a_record("chat-1"), a_record("chat-2"))
    west = a_ledger(
        tmp_path / "west",
        a_record("chat-2-0", origin="east", origin_id="chat-2"),
        a_record("chat-2-1", origin="east", origin_id="chat-2"),
        a_record("chat-3"),
        a_record("chat-9-0", tenant="lost", origin="north", origin_id="chat-9"),
    )
    return east, west


def test_a_cells_own_ledger_bills_its_own_requests_only(cells: tuple[Path, Path]) -> None:
    east, west = cells
    for directory, expected in ((east, 2), (west, 1)):
        with LedgerReader(directory) as reader:
            assert total_of(reader.totals(BY_TENANT)).requests == expected


def test_together_every_request_counts_once_and_what_nobody_else_knows_too(cells: tuple[Path, Path]) -> None:
    for order in (cells, cells[::-1], (*cells, cells[0])):
        with LedgerReader(*order) as reader:
            found = {row.group[0]: row.totals.requests for row in reader.totals(BY_TENANT)}
        assert found == {"acme": 3, "lost": 1}


def test_what_was_computed_for_others_can_be_seen(cells: tuple[Path, Path]) -> None:
    with LedgerReader(cells[1]) as reader:
        found = {row.group[0]: row.totals.requests for row in reader.totals(Query(by=("origin",)))}
    assert found == {"": 1, "east": 2, "north": 1}


def test_a_budget_holds_nothing_of_other_cells_guests(cells: tuple[Path, Path]) -> None:
    with LedgerReader(cells[1]) as reader:
        (spent,) = reader.spent(1_700_000_000 * NS_PER_S)
    assert (spent.tenant, spent.day_micros) == ("acme", 7)


def test_a_ledger_of_an_earlier_version_is_read_too(tmp_path: Path) -> None:
    directory = a_ledger(tmp_path / "old", a_record("chat-1"))
    sink = SqliteSink(database_path(directory), SystemClock())
    for column in ("origin", "origin_id"):
        sink._connection.execute(f"ALTER TABLE usage DROP COLUMN {column}")
    sink.close()
    with LedgerReader(directory) as reader:
        assert total_of(reader.totals(BY_TENANT)).requests == 1


def test_one_that_is_not_there_is_named(tmp_path: Path, cells: tuple[Path, Path]) -> None:
    with pytest.raises(LedgerError, match="nowhere: there is no ledger here"):
        LedgerReader(cells[0], tmp_path / "nowhere")
