import contextlib
import errno
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from usage_records import MemorySink, closed, opened, progress

from penstock.clock import NS_PER_S, ManualClock
from penstock.config.ledger import LedgerConfig
from penstock.config.tree import LogConfig
from penstock.errors import Overloaded
from penstock.policy.flow import Outcome
from penstock.telemetry import ledger_journal, ledger_segment
from penstock.telemetry.ledger_journal import Journal
from penstock.telemetry.ledger_recovery import CRASHED, read_journal, recover_abandoned
from penstock.telemetry.ledger_segment import Kind, LedgerLimits, Progress
from penstock.telemetry.ledger_sink import Follower, SinkError
from penstock.telemetry.log import Log

SMALL = LedgerLimits(segment_bytes=256 * 1024, journal_bytes_max=2 * 1024 * 1024, buffer_bytes_max=256 * 1024)


class Rig:
    """A journal in a directory, its follower and a sink; `crash` is the death of its process."""

    def __init__(
        self,
        directory: Path,
        limits: LedgerLimits = SMALL,
        *,
        when_full: Literal["refuse", "go_on"] = "refuse",
    ) -> None:
        self.directory, self.clock = directory, ManualClock()
        config = LedgerConfig(when_full=when_full)
        self.errors: list[str] = []
        self.sink = MemorySink()
        self.claim = ledger_segment.claim_new(directory, self.clock)
        self.journal = Journal(
            self.claim, config, self.clock, lambda what, _: self.errors.append(what), limits
        )
        self.damage: list[tuple[str, int, int]] = []
        self.follower = Follower(
            self.claim,
            self.journal,
            self.sink,
            limits.deliver_records_max,
            lambda path, offset, length: self.damage.append((path.name, offset, length)),
        )
        self.log = Log(LogConfig(level="error"), self.clock)

    def crash(self) -> None:
        self.follower.stop()
        os.close(self.claim.lock)

    def recover(self, sink: MemorySink | None = None) -> int:
        return recover_abandoned(self.directory, sink or self.sink, self.log)

    def deliver_all(self) -> None:
        while self.follower.deliver():
            pass

    def open_until_refused(self) -> int:
        """Open `r0`, `r1`, ...; how many were accepted."""
        for i in range(100_000):
            try:
                self.journal.open(opened(f"r{i}"))
            except Overloaded:
                return i
            self.journal.flush()
        raise AssertionError("the journal has no bound")

    def segments(self) -> list[int]:
        return [sequence for sequence, _ in ledger_segment.segments(self.claim.directory)]


def test_what_was_closed_is_delivered_and_the_journal_removed_at_a_clean_end(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.journal.open(opened("a"))
    rig.journal.slice("a", lambda: progress("a", 3))
    rig.journal.close(closed("a"))
    rig.journal.flush()
    rig.deliver_all()
    assert rig.sink.records == {"a": closed("a")}
    assert (rig.journal.closed, rig.follower.delivered, rig.journal.live) == (1, 1, 0)
    assert rig.journal.stop()
    rig.claim.release(remove=True)
    assert ledger_segment.instance_directories(tmp_path) == []


def test_nothing_is_on_disk_before_the_flush_and_all_of_it_after(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.journal.open(opened("a"))
    assert [frame.kind for frame in read_journal(rig.claim.directory)] == []
    rig.journal.flush()
    assert [frame.kind for frame in read_journal(rig.claim.directory)] == [Kind.OPEN]


def test_the_slice_of_an_answer_that_ends_before_it_is_written_is_never_made(tmp_path: Path) -> None:
    rig, made = Rig(tmp_path), list[str]()

    def make(name: str) -> Progress:
        made.append(name)
        return progress(name, 3)

    for name in "ab":
        rig.journal.open(opened(name))
        rig.journal.slice(name, partial(make, name))
    rig.journal.close(closed("a"))
    rig.journal.flush()
    rig.journal.flush()
    assert made == ["b"]
    kinds = [frame.kind for frame in read_journal(rig.claim.directory)]
    assert kinds == [Kind.OPEN, Kind.OPEN, Kind.CLOSE, Kind.SLICE]


def test_a_request_that_was_cut_off_gets_the_record_of_its_last_slice(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    for name in "abc":
        rig.journal.open(opened(name))
    rig.journal.slice("b", lambda: progress("b", 3))
    rig.journal.slice("b", lambda: progress("b", 9))
    rig.journal.close(closed("c"))
    rig.journal.flush()
    rig.crash()
    assert rig.recover() == 2
    assert rig.sink.records["c"] == closed("c")
    never_ran, cut = rig.sink.records["a"], rig.sink.records["b"]
    assert (never_ran.outcome, never_ran.error, never_ran.recovered) == (Outcome.FAILED, CRASHED, True)
    assert (never_ran.prompt_tokens, never_ran.completion_tokens, never_ran.cost_micros) == (0, 0, 0)
    assert (cut.prompt_tokens, cut.completion_tokens, cut.cost_micros, cut.worker) == (20, 9, 90, "w0")
    assert (cut.ended_ns, cut.total_us) == (progress("b", 9).at_ns, 1000)
    assert ledger_segment.instance_directories(tmp_path) == []
    assert rig.recover() == 0


def test_a_slice_whose_end_follows_before_the_flush_is_not_written(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    for name in "ab":
        rig.journal.open(opened(name))
        rig.journal.slice(name, partial(progress, name, 3))
    rig.journal.slice("b", lambda: progress("b", 4))
    rig.journal.close(closed("a"))
    rig.journal.flush()
    kinds = [frame.kind for frame in read_journal(rig.claim.directory)]
    assert kinds == [Kind.OPEN, Kind.OPEN, Kind.CLOSE, Kind.SLICE], "the last slice of what runs, alone"
    rig.crash()
    assert rig.recover() == 1
    assert rig.sink.records["b"].completion_tokens == 4


def test_a_living_journal_is_left_alone(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.journal.open(opened("a"))
    rig.journal.flush()
    other = Rig(tmp_path)
    assert other.claim.directory != rig.claim.directory
    assert other.recover() == 0
    assert ledger_segment.is_alive(rig.claim.directory)
    rig.crash()
    assert not ledger_segment.is_alive(rig.claim.directory)
    assert other.recover() == 1
    assert list(other.sink.records) == ["a"]


def test_a_recovery_that_fails_half_way_is_done_again_to_the_same_end(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    for i in range(10):
        rig.journal.open(opened(f"r{i}"))
    for i in range(5):
        rig.journal.close(closed(f"r{i}"))
    rig.journal.flush()
    rig.crash()
    rig.sink.failures = 2
    for _ in range(2):
        with pytest.raises(Exception, match="told to fail"):
            rig.recover()
    assert rig.recover() == 5
    expected = MemorySink()
    rig.sink.write([])
    for i in range(5):
        expected.write([closed(f"r{i}")])
    assert {k: r for k, r in rig.sink.records.items() if not r.recovered} == expected.records
    assert len(rig.sink.records) == 10


def test_a_directory_whose_maker_died_at_once_is_swept(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    stale = ledger_segment.journal_root(tmp_path) / ".new-0001"
    stale.mkdir()
    rig.recover()
    assert not stale.exists()


def test_segments_rotate_by_size_and_are_removed_once_delivered(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    for i in range(2_000):
        rig.journal.open(opened(f"r{i}"))
        rig.journal.close(closed(f"r{i}"))
        rig.journal.flush()
        if i % 500 == 499:
            rig.deliver_all()
    assert len(rig.sink.records) == 2_000
    assert rig.journal.oldest > 2
    assert rig.segments()[0] == rig.journal.oldest
    assert rig.journal.disk_bytes <= 2 * SMALL.segment_bytes
    rig.journal.sync()
    assert rig.errors == []


def test_segments_rotate_by_age(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.journal.open(opened("a"))
    rig.journal.flush()
    rig.clock.advance(3601 * NS_PER_S)
    rig.journal.close(closed("a"))
    rig.journal.flush()
    rig.deliver_all()
    assert rig.segments() == [2]
    assert list(rig.sink.records) == ["a"]


def test_a_running_request_keeps_its_segments_until_it_is_written_down_again(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.journal.open(opened("long"))
    rig.journal.slice("long", lambda: progress("long", 4))
    for i in range(400):
        rig.journal.open(opened(f"r{i}"))
        rig.journal.close(closed(f"r{i}"))
    rig.journal.flush()
    rig.deliver_all()
    assert rig.segments()[0] == 1, "delivered, but `long` began in it"
    for i in range(400, 3_000):
        rig.journal.open(opened(f"r{i}"))
        rig.journal.close(closed(f"r{i}"))
        rig.journal.flush()
        rig.deliver_all()
    assert rig.journal.oldest > 1
    rig.crash()
    assert rig.recover() == 1
    assert rig.sink.records["long"].completion_tokens == 4
    assert len(rig.sink.records) == 3_001


def test_a_journal_that_is_not_delivered_is_bounded_and_new_requests_are_refused(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    accepted = rig.open_until_refused()
    assert rig.journal.disk_bytes <= SMALL.journal_bytes_max
    for i in range(100):  # There is room for ends.
        rig.journal.close(closed(f"r{i}"))
    rig.journal.flush()
    assert rig.journal.lost == 0
    with pytest.raises(Overloaded, match="ledger has no room"):
        rig.journal.open(opened("one more"))
    rig.crash()
    assert rig.recover() == accepted - 100
    assert len(rig.sink.records) == accepted


def test_delivery_makes_room_again(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    for i in range(rig.open_until_refused()):
        rig.journal.close(closed(f"r{i}"))
        rig.deliver_all()
        rig.journal.flush()
    rig.deliver_all()
    rig.journal.open(opened("again"))
    rig.journal.flush()


def test_go_on_answers_without_a_record_and_counts(tmp_path: Path) -> None:
    rig = Rig(tmp_path, replace(SMALL, journal_bytes_max=1024 * 1024), when_full="go_on")
    for i in range(10_000):
        rig.journal.open(opened(f"r{i}"))
        rig.journal.close(closed(f"r{i}"))
        rig.journal.flush()
    assert rig.journal.lost > 0
    assert rig.journal.closed + rig.journal.lost == 10_000
    rig.deliver_all()
    rig.journal.flush()
    rig.deliver_all()
    assert rig.follower.delivered == rig.journal.closed


def test_a_full_disk_refuses_while_there_is_room_for_all_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(tmp_path)

    def full(_fd: int, _offset: int, _size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ledger_journal.os, "posix_fallocate", full)
    assert rig.open_until_refused() > 100
    assert rig.errors == ["no room for the next part of the journal"]
    for i in range(100):
        rig.journal.close(closed(f"r{i}"))
    rig.journal.flush()
    rig.deliver_all()
    assert len(rig.sink.records) == 100
    monkeypatch.undo()
    with pytest.raises(Overloaded):  # It is not tried for every request.
        rig.journal.open(opened("too soon"))
    rig.clock.advance(2 * NS_PER_S)
    rig.journal.open(opened("later"))


def test_a_write_that_fails_is_kept_and_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(tmp_path)
    real = os.pwrite
    budget = [10]

    def short_then_broken(fd: int, data: bytes, offset: int) -> int:
        if not budget[0]:
            raise OSError(errno.EIO, "Input/output error")
        num = min(len(data), budget[0])
        budget[0] -= num
        return real(fd, data[:num], offset)

    rig.journal.open(opened("a"))
    monkeypatch.setattr(ledger_journal.os, "pwrite", short_then_broken)
    rig.journal.flush()
    rig.journal.flush()
    assert rig.errors == ["the journal cannot be written"]
    with pytest.raises(Overloaded):
        rig.journal.open(opened("b"))
    monkeypatch.undo()
    with pytest.raises(Overloaded):  # It is not tried for every request.
        rig.journal.open(opened("b"))
    rig.clock.advance(2 * NS_PER_S)
    rig.journal.open(opened("b"))
    rig.journal.close(closed("a"))
    rig.journal.flush()
    rig.deliver_all()
    assert rig.sink.records == {"a": closed("a")}


def test_ending_twice_or_without_a_beginning_is_a_bug(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.journal.open(opened("a"))
    rig.journal.close(closed("a"))
    with pytest.raises(AssertionError):
        rig.journal.close(closed("a"))
    rig.journal.open(opened("b"))
    with pytest.raises(AssertionError):
        rig.journal.open(opened("b"))


def test_cut_at_every_byte_each_request_has_exactly_the_record_it_should(tmp_path: Path) -> None:
    """The power fails, or the process dies in the middle of a write: what is whole counts, and nothing
    else.
    """
    rig = Rig(tmp_path)
    journal, ends, path = rig.journal, [], ledger_segment.segment_path(rig.claim.directory, 1)
    steps = [lambda: journal.open(opened("a")), lambda: journal.slice("a", lambda: progress("a", 2)),
        lambda: journal.open(opened("b")),
             lambda: journal.slice("a", lambda: progress("a", 5)), lambda: journal.close(closed("a")),
             lambda: journal.slice("b", lambda: progress("b", 1))]  # fmt: skip
    for step in steps:
        step()
        journal.flush()
        ends.append(journal.length(1)[0])
    rig.crash()
    data = path.read_bytes()
    for cut in range(ends[-1] + 1):
        num_done = sum(end <= cut for end in ends)
        place = tmp_path / f"at{cut}"
        directory = ledger_segment.journal_root(place) / "1-1-1"
        directory.mkdir(parents=True)
        (directory / path.name).write_bytes(data[:cut] + bytes(64))
        sink = MemorySink()
        assert rig_recover(place, rig.log, sink) == len(sink.records) - (num_done >= 5)
        tokens = {name: record.completion_tokens for name, record in sink.records.items()}
        expected = [
            {},
            {"a": 0},
            {"a": 2},
            {"a": 2, "b": 0},
            {"a": 5, "b": 0},
            {"a": 7, "b": 0},
            {"a": 7, "b": 1},
        ]
        assert tokens == expected[num_done], cut


@pytest.mark.parametrize("places", [(20,), (1000,), (1000, 1500, 60_000), (140_000,)])
def test_damage_to_a_living_journal_holds_back_no_record_but_its_own(
    tmp_path: Path, places: tuple[int, ...]
) -> None:
    rig = Rig(tmp_path)
    for i in range(500):
        rig.journal.open(opened(f"r{i}"))
        rig.journal.close(closed(f"r{i}"))
    rig.journal.flush()
    path = ledger_segment.segment_path(rig.claim.directory, 1)
    with path.open("r+b") as file:
        for place in places:
            file.seek(place)
            (byte,) = file.read(1)
            file.seek(place)
            file.write(bytes([byte ^ 1]))
    rig.journal.open(opened("later"))
    rig.journal.close(closed("later"))
    rig.journal.flush()
    rig.deliver_all()
    assert 501 - len(places) <= len(rig.sink.records) <= 501
    assert "later" in rig.sink.records
    assert len(rig.damage) == len(places)
    assert all(at <= place < at + size for place, (_, at, size) in zip(places, rig.damage, strict=True))


def rig_recover(directory: Path, log: Log, sink: MemorySink) -> int:
    return recover_abandoned(directory, sink, log)


def test_damage_in_the_middle_is_kept_for_a_person(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rig = Rig(tmp_path)
    for i in range(2_000):
        rig.journal.open(opened(f"r{i}"))
        rig.journal.flush()
    rig.crash()
    path = ledger_segment.segment_path(rig.claim.directory, 1)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
    rig.log = Log(LogConfig(level="error"), rig.clock)
    rig.recover()
    assert len(rig.sink.records) == 1_999
    assert [entry.read_bytes() for entry in (tmp_path / "damaged").iterdir()] == [bytes(data)]
    assert "unreadable" in capsys.readouterr().err


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_course_of_events_and_any_moment_of_death(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Model: what was flushed is never lost, what was closed keeps its record, and no id has two."""
    rig = Rig(tmp_path_factory.mktemp("ledger"), replace(SMALL, deliver_records_max=3))
    running: dict[str, int] = {}
    flushed: dict[str, int | None] = {}
    pending: dict[str, int | None] = {}
    for number in range(data.draw(st.integers(0, 40))):
        kind = data.draw(
            st.sampled_from(["open", "slice", "close", "flush", "deliver", "fail", "age", "sync"])
        )
        if kind == "open":
            running[f"r{number}"] = 0
            pending[f"r{number}"] = 0
            rig.journal.open(opened(f"r{number}"))
        elif kind == "slice" and running:
            name = data.draw(st.sampled_from(sorted(running)))
            running[name] += data.draw(st.integers(1, 300))
            pending[name] = running[name]
            rig.journal.slice(name, partial(progress, name, running[name]))
        elif kind == "close" and running:
            name = data.draw(st.sampled_from(sorted(running)))
            total = running.pop(name)
            pending[name] = -total - 1  # Below 0: it has ended.
            rig.journal.close(closed(name, completion_tokens=total))
        elif kind == "age":
            rig.clock.advance(4000 * NS_PER_S)
        elif kind == "sync":
            rig.journal.sync()
        elif kind == "fail":
            rig.sink.failures = 1
        elif kind == "deliver":
            with contextlib.suppress(SinkError):
                rig.deliver_all()
        if kind in ("flush", "age"):
            rig.journal.flush()
            flushed |= pending
    rig.crash()
    rig.sink.failures = 0
    rig.recover()
    tokens = {
        name: -record.completion_tokens - 1 if not record.recovered else record.completion_tokens
        for name, record in rig.sink.records.items()
    }
    assert tokens == flushed
