"""Recovery from any file of whole frames: twice, in another order, or in part."""

import contextlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from usage_records import MemorySink, closed, opened, progress

from penstock.clock import ManualClock
from penstock.config.tree import LogConfig
from penstock.policy.flow import SCHEMA_VERSION
from penstock.telemetry import ledger_segment
from penstock.telemetry.ledger_recovery import recover_abandoned
from penstock.telemetry.ledger_segment import Kind, SegmentHeader, encode, to_frame, to_head
from penstock.telemetry.ledger_sink import SinkError
from penstock.telemetry.log import Log

LOG = Log(LogConfig(level="error"), ManualClock())
NAMES = st.sampled_from(["a", "b", "c"])
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("open"), NAMES, st.just(0)),
        st.tuples(st.just("slice"), NAMES, st.integers(1, 9)),
        st.tuples(st.just("close"), NAMES, st.just(10)),
    ),
    max_size=12,
)


def frame(kind: str, name: str, tokens: int) -> bytes:
    if kind == "open":
        return to_frame(Kind.OPEN, encode(opened(name)))
    if kind == "slice":
        return to_frame(Kind.SLICE, encode(progress(name, tokens)))
    return to_frame(Kind.CLOSE, encode(closed(name, completion_tokens=tokens)))


def write_abandoned(directory: Path, instance: str, segments: list[list[tuple[str, str, int]]]) -> None:
    place = ledger_segment.journal_root(directory) / instance
    place.mkdir(parents=True)
    for i, events in enumerate(segments, start=1):
        head = to_head(SegmentHeader(instance=instance, sequence=i, created_ns=0))
        data = head + b"".join(frame(*event) for event in events)
        ledger_segment.segment_path(place, i).write_bytes(data + bytes(50))


@settings(max_examples=60, deadline=None)
@given(events=EVENTS, order=st.randoms(use_true_random=False), failures=st.integers(0, 2))
def test_duplicates_and_order_change_nothing(
    events: list[tuple[str, str, int]], order: object, failures: int, tmp_path_factory
) -> None:
    """An end counts for its request, wherever it stands; else the newest slice; a slice alone is nobody's."""
    directory = tmp_path_factory.mktemp("ledger")
    shuffled = [*events, *events[::2]]
    order.shuffle(shuffled)
    write_abandoned(directory, "1-1-0", [shuffled[: len(shuffled) // 2], shuffled[len(shuffled) // 2 :]])
    sink = MemorySink()
    sink.failures = failures
    while ledger_segment.instance_directories(directory):
        with contextlib.suppress(SinkError):
            recover_abandoned(directory, sink, LOG)
    expected: dict[str, tuple[bool, int]] = {}
    for name in {name for kind, name, _ in events if kind in ("open", "close")}:
        tokens = [amount for kind, other, amount in events if other == name and kind == "slice"]
        ended = any(kind == "close" and other == name for kind, other, _ in events)
        expected[name] = (False, 10) if ended else (True, max(tokens, default=0))
    found = {name: (record.recovered, record.completion_tokens) for name, record in sink.records.items()}
    assert found == expected


def test_a_file_that_was_never_begun_holds_nothing(tmp_path: Path) -> None:
    write_abandoned(tmp_path, "1-1-0", [[("open", "a", 0)]])
    for i, data in enumerate((b"", b"PST", bytes(4096)), start=2):
        ledger_segment.segment_path(ledger_segment.journal_root(tmp_path) / "1-1-0", i).write_bytes(data)
    sink = MemorySink()
    assert recover_abandoned(tmp_path, sink, LOG) == 1


def test_journals_of_several_dead_processes(tmp_path: Path) -> None:
    for i in range(3):
        write_abandoned(tmp_path, f"1-{i}-0", [[("open", f"r{i}", 0), ("slice", f"r{i}", i + 1)]])
    sink = MemorySink()
    assert recover_abandoned(tmp_path, sink, LOG) == 3
    assert {name: record.completion_tokens for name, record in sink.records.items()} == {
        "r0": 1,
        "r1": 2,
        "r2": 3,
    }


def test_what_a_newer_version_left_stays_and_the_rest_is_recovered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_abandoned(tmp_path, "1-1-0", [[("open", "old", 0)]])
    newer = ledger_segment.journal_root(tmp_path) / "0-1-0"
    newer.mkdir()
    head = to_head(SegmentHeader(version=SCHEMA_VERSION + 1, instance="0-1-0", sequence=1, created_ns=0))
    ledger_segment.segment_path(newer, 1).write_bytes(head + frame("open", "new", 0))
    unknown = ledger_segment.journal_root(tmp_path) / "0-2-0"
    unknown.mkdir()
    head = to_head(SegmentHeader(instance="0-2-0", sequence=1, created_ns=0))
    ledger_segment.segment_path(unknown, 1).write_bytes(
        head + to_frame(Kind.CLOSE, encode({"request_id": 7}))
    )
    sink = MemorySink()
    assert recover_abandoned(tmp_path, sink, Log(LogConfig(level="error"), ManualClock())) == 1
    assert list(sink.records) == ["old"]
    assert [path.name for path in ledger_segment.instance_directories(tmp_path)] == ["0-1-0", "0-2-0"]
    said = capsys.readouterr().err
    assert "was written by a newer version" in said
    assert "a record in the journal cannot be read" in said
