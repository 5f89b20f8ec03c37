"""Damage of any kind to a dead process's journal: what is whole is recovered once, nothing is made up, the
rest is kept.

flip    one byte is another one             zero    a run of bytes is zeros, as after a lost page
cut     a run of bytes is missing           double  a run of bytes is there twice
"""

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import pytest
from usage_records import MemorySink, closed, opened, progress

from penstock import rng
from penstock.clock import ManualClock
from penstock.config.ledger import LedgerConfig
from penstock.config.tree import LogConfig
from penstock.policy.flow import UsageRecord
from penstock.telemetry import ledger_segment
from penstock.telemetry.ledger_journal import Journal
from penstock.telemetry.ledger_recovery import recover_abandoned, recovered
from penstock.telemetry.ledger_segment import (
    Kind,
    LedgerLimits,
    decode_progress,
    decode_record,
    encode,
    read_frames,
    read_head,
    to_frame,
)
from penstock.telemetry.log import Log

NUM_REQUESTS = 30
ROUNDS = 15
WAYS = ("flip", "cut", "zero", "double")


@dataclass(frozen=True)
class Written:
    """One frame as it was written: where, and what it says."""

    start: int
    end: int
    kind: int
    body: bytes


@dataclass
class Bytes:
    """A file's bytes, each with its place in the undamaged file (None: it was changed or added)."""

    data: bytearray
    origin: list[int | None]

    @property
    def text(self) -> bytes:
        return bytes(self.data)

    def damage(self, way: str, start: int, length: int, bit: int) -> None:
        end = start + length
        if way == "flip":
            self.data[start] ^= 1 << bit
            self.origin[start] = None
        elif way == "zero":
            for place in range(start, end):
                self.origin[place] = self.origin[place] if self.data[place] == 0 else None
                self.data[place] = 0
        elif way == "cut":
            del self.data[start:end], self.origin[start:end]
        else:
            self.data[end:end] = self.data[start:end]
            self.origin[end:end] = self.origin[start:end]

    def holds(self, frame: Written) -> bool:
        """Whether the frame stands somewhere with all of its bytes."""
        wanted = list(range(frame.start, frame.end))
        return any(
            self.origin[place : place + len(wanted)] == wanted
            for place, origin in enumerate(self.origin)
            if origin == frame.start
        )


def write_journal(directory: Path, seed: int) -> tuple[Path, list[Written]]:
    """The journal of a process that died in the middle of its work; its segment, and the frames in it."""
    random, clock = rng.stream(seed, "journal"), ManualClock()
    limits = LedgerLimits(segment_bytes=256 * 1024, journal_bytes_max=1024 * 1024)
    claim = ledger_segment.claim_new(directory, clock)
    journal = Journal(
        claim, LedgerConfig(), clock, lambda what, error: pytest.fail(f"{what}: {error}"), limits
    )
    running: dict[str, int] = {}
    for number in range(NUM_REQUESTS):
        running[f"r{number}"] = 0
        journal.open(opened(f"r{number}"))
        for name in random.sample(sorted(running), min(2, len(running))):
            running[name] += random.randint(1, 50)
            if random.random() < 0.5:
                journal.slice(name, partial(progress, name, running[name]))
            else:
                journal.close(closed(name, completion_tokens=running.pop(name)))
        journal.flush()
    path = ledger_segment.segment_path(claim.directory, 1)
    data = path.read_bytes()
    head = read_head(data, "")
    assert head is not None
    frames, start = [], head[1]
    for frame in read_frames(data, start):
        frames.append(Written(start, frame.end, frame.kind, frame.body))
        start = frame.end
    journal.stop()
    os.close(claim.lock)
    return path, frames


def expected(frames: list[Written]) -> dict[str, UsageRecord]:
    """The records that these frames make, if their process is dead."""
    ends, begun, known = {}, {}, {}
    for frame in frames:
        if frame.kind == Kind.SLICE:
            reported = decode_progress(frame.body)
            if reported.completion_tokens >= getattr(known.get(reported.request_id), "completion_tokens", 0):
                known[reported.request_id] = reported
        else:
            record = decode_record(frame.body)
            (ends if frame.kind == Kind.CLOSE else begun)[record.request_id] = record
    cut = {name: recovered(record, known.get(name)) for name, record in begun.items() if name not in ends}
    return ends | cut


def recover(directory: Path) -> dict[str, UsageRecord]:
    sink = MemorySink()
    recover_abandoned(directory, sink, Log(LogConfig(level="error"), ManualClock()))
    return sink.records


def kept(directory: Path) -> list[bytes]:
    return [path.read_bytes() for path in directory.glob("damaged/*")]


@pytest.mark.parametrize("way", [*WAYS, "all"])
def test_every_whole_record_is_recovered_once_and_nothing_is_made_up(
    tmp_path: Path, way: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in range(ROUNDS):
        directory, random = tmp_path / str(seed), rng.stream(seed, f"damage-{way}")
        path, frames = write_journal(directory, seed)
        data = path.read_bytes()
        file = Bytes(bytearray(data), list(range(len(data))))
        for _ in range(random.choice((1, 1, 2, 6))):
            chosen = random.choice(WAYS) if way == "all" else way
            length = random.choice((1, 3, 40, 700))
            file.damage(chosen, random.randrange(frames[-1].end - 1000), length, random.randrange(8))
        path.write_bytes(file.text)
        whole = [frame for frame in frames if file.holds(frame)]
        assert recover(directory) == expected(whole), f"seed {seed}"
        said = capsys.readouterr().err
        lost = [frame for frame in frames if frame not in whole]
        if lost and lost[0].start < whole[-1].start:
            assert kept(directory) == [file.text], f"seed {seed}"
            assert "part of the ledger's journal is unreadable" in said
            assert str(directory / "damaged") in said


def test_a_record_torn_by_the_death_of_its_process_is_no_damage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in range(20):
        directory, random = tmp_path / str(seed), rng.stream(seed, "torn")
        path, frames = write_journal(directory, seed)
        cut = random.randrange(frames[0].start, frames[-1].end)
        path.write_bytes(path.read_bytes()[:cut] + bytes(random.choice((0, 5000))))
        torn = next(frame for frame in frames if frame.end > cut)
        found = recover(directory)
        # The zeros behind a cut may stand for a record's own last bytes, if those are zeros.
        assert found in (
            expected([frame for frame in frames if frame.end <= cut]),
            expected([frame for frame in frames if frame.end <= torn.end]),
        )
        assert kept(directory) == []
        assert "unreadable" not in capsys.readouterr().err


def test_a_segment_whose_head_is_damaged_gives_its_records(tmp_path: Path) -> None:
    for place in (0, 5, 9, 14, 30):
        directory = tmp_path / str(place)
        path, frames = write_journal(directory, place)
        data = bytearray(path.read_bytes())
        data[place] ^= 0x10
        path.write_bytes(data)
        assert recover(directory) == expected(frames)
        assert kept(directory) == [bytes(data)]


def test_a_clients_text_cannot_pass_for_a_record(tmp_path: Path) -> None:
    """A record of its making, in the `user` field of one whose head is damaged, is text and stays so."""
    forged = opened("forged", tenant="someone-else")
    directory = tmp_path / "ledger"
    path, _ = write_journal(directory, 1)
    frame = to_frame(Kind.CLOSE, encode(forged))
    # JSON holds text: bytes that are no UTF-8 do not come through, so this is the nearest that a client gets.
    text = frame.decode("utf-8", "surrogateescape").encode("utf-8", "replace").decode()
    outer = to_frame(Kind.CLOSE, encode(msgspec.structs.replace(closed("outer"), user=text)))
    data = path.read_bytes().rstrip(b"\0")
    path.write_bytes(data + bytes([outer[0] ^ 1]) + outer[1:] + to_frame(Kind.CLOSE, encode(closed("last"))))
    found = recover(directory)
    assert "last" in found
    assert not {"forged", "outer"} & found.keys()
