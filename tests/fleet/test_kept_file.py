"""The record of decisions: its lines come back in order, and a full file makes room for the next."""

import io
from collections import deque
from pathlib import Path

import pytest

from penstock.clock import ManualClock
from penstock.config.tree import LogConfig
from penstock.fleet import kept_file
from penstock.fleet.kept_file import RecordFile, lines_of
from penstock.telemetry.log import Log


def record_in(tmp_path: Path) -> RecordFile:
    return RecordFile(
        tmp_path / "record.jsonl", "tests", Log(LogConfig(), ManualClock(), stream=io.StringIO())
    )


def test_lines_come_back_with_their_numbers(tmp_path: Path) -> None:
    record = record_in(tmp_path)
    for part in ((b"1", b"2"), (b"3",)):
        for line in part:
            record.add(line)
        assert record.has_changes
        assert record.write() is False
        assert not record.has_changes
    assert list(lines_of(tmp_path / "record.jsonl")) == [(1, b"1\n"), (2, b"2\n"), (3, b"3\n")]


class Contended(deque[bytes]):
    """Behind each line that is taken another thread takes one, too."""

    def popleft(self) -> bytes:
        line = super().popleft()
        if self:
            super().popleft()
        return line


def test_two_threads_may_write_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_file, "deque", Contended)
    record = record_in(tmp_path)
    for line in (b"1", b"2", b"3"):
        record.add(line)
    record.write()
    assert [line for _, line in lines_of(tmp_path / "record.jsonl")] == [b"1\n", b"3\n"]


def test_the_next_line_begins_a_new_file_only_if_the_full_one_has_made_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = record_in(tmp_path)
    monkeypatch.setattr(kept_file, "RECORD_BYTES_MAX", 10)
    older = tmp_path / "record.1.jsonl"
    older.mkdir()  # Which no file can take the place of.
    record.add(b"a line of more bytes")
    assert record.write() is False, "it is still in its place"
    older.rmdir()
    record.add(b"another one")
    assert record.write() is True
    assert [line for _, line in lines_of(older)] == [b"a line of more bytes\n", b"another one\n"]
    assert not (tmp_path / "record.jsonl").exists()
