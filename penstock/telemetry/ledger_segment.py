"""The ledger's segments: files of records that were only ever appended, each under a checksum of its own.

    magic | frame(HEADER) | frame(OPEN) | frame(SLICE) | frame(CLOSE) | ... | zeros

A frame is length, CRC-32 and kind, then the body in msgpack. A file is set aside in full when it is made, so
what was not written yet reads as zeros: a length of 0 ends the data. A frame that is not whole ends it too,
if no whole one follows: a process or a machine that died while it wrote leaves that behind. If one follows,
the bytes between are damage, and reading continues behind them. Bytes in, frames out: files are the journal's
business.

Where the ledger's files are, and whose: directories, locks, and segments by their names.

    DIRECTORY/id                              the ledger's name among those of all machines
    DIRECTORY/usage.sqlite                    the records
    DIRECTORY/journal/INSTANCE/lock           held while that gateway process lives
    DIRECTORY/journal/INSTANCE/00000001.seg   what it wrote and the database may not have yet
    DIRECTORY/damaged/                        segments with something unreadable in the middle, kept for a
                                              person

Every gateway process has a directory of its own. A process that gets the lock of another's knows that it is
dead and recovers it.

Sizes and intervals of the usage ledger: constants, which only tests change.
"""

import contextlib
import enum
import fcntl
import os
import re
import shutil
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import msgspec

from penstock.clock import Clock
from penstock.config.ledger import LedgerConfig
from penstock.config.machine import state_directory
from penstock.errors import LedgerError
from penstock.policy.flow import SCHEMA_VERSION, UsageRecord

MAGIC = b"PSTKLDG1"
FRAME_BYTES_MAX = 64 * 1024
"""A record is some hundred bytes; a length above this can only be damage."""
_HEAD = struct.Struct("<IIB")
HEAD_BYTES = _HEAD.size
_pack = _HEAD.pack
_MAY_BEGIN = re.compile(
    rb"(?=[\x00-\xff]{2}[\x00\x01]\x00[\x00-\xff]{4}(?:[\x02\x04][\x80-\x8f\xde\xdf]|"
    rb"\x03[\x90-\x9f\xdc\xdd]))"
)
"""A head with a length within the bound, and a body that begins as its kind does in msgpack: a map, of a
slice an array.

None of these first bytes begins a character in UTF-8, so no text of a client (its `user` or its model's name,
which are inside of records) can pass for a frame.
"""


class Kind(enum.IntEnum):
    """The content of a frame. 0 is none, so that zeros are no frame."""

    HEADER = 1
    OPEN = 2
    SLICE = 3
    CLOSE = 4


class SegmentHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The first frame of every segment."""

    version: int = SCHEMA_VERSION
    instance: str
    """The gateway process that wrote it."""
    sequence: int
    created_ns: int
    """Wall clock."""


class Progress(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The usage of a running request until now: totals, so that the newest one says all and none needs an
    earlier one.
    """

    request_id: str
    at_ns: int
    """Wall clock."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    cost_micros: int = 0
    worker: str = ""


class Frame(NamedTuple):
    """One checked frame; `end` is the offset behind it."""

    kind: int
    body: bytes
    end: int


class Gap(NamedTuple):
    """Bytes that no frame can be read from, with a whole frame behind them."""

    start: int
    end: int


encode = msgspec.msgpack.Encoder().encode
_decode_record = msgspec.msgpack.Decoder(UsageRecord).decode
_decode_progress = msgspec.msgpack.Decoder(Progress).decode
_decode_header = msgspec.msgpack.Decoder(SegmentHeader).decode


def decode_record(body: bytes) -> UsageRecord:
    """A record from the body of a frame.

    Raises:
        LedgerError: it is whole but not a record that this version knows.
    """
    try:
        return _decode_record(body)
    except msgspec.DecodeError as error:
        raise LedgerError(f"a record in the journal cannot be read: {error}") from error


def decode_progress(body: bytes) -> Progress:
    """A slice from the body of a frame; raises as `decode_record` does."""
    try:
        return _decode_progress(body)
    except msgspec.DecodeError as error:
        raise LedgerError(f"a slice in the journal cannot be read: {error}") from error


def to_frame(kind: int, body: bytes) -> bytes:
    """The bytes of one frame; `kind` is the number of a `Kind`."""
    size = len(body)
    assert size <= FRAME_BYTES_MAX, size
    # The kind is checked with the body: it is where the sum begins.
    return _pack(size, crc32(body, kind), kind) + body


def frame_at(data: bytes, offset: int) -> Frame | None:
    """The frame that begins at `offset`; None if none does, or it is not whole."""
    start = offset + HEAD_BYTES
    if start > len(data):
        return None
    length, checksum, kind = _HEAD.unpack_from(data, offset)
    end = start + length
    if not 0 < length <= FRAME_BYTES_MAX or end > len(data):
        return None
    body = data[start:end]
    return Frame(kind, body, end) if crc32(body, kind) == checksum else None


def read_frames(data: bytes, offset: int = 0) -> Iterator[Frame]:
    """Every frame from `offset` on, up to the first that is not whole."""
    while (frame := frame_at(data, offset)) is not None:
        yield frame
        offset = frame.end


def next_frame(data: bytes, offset: int) -> int | None:
    """Where the first whole record or slice behind `offset` begins; None if there is none."""
    # A head is not all zeros: the empty rest of a file is not searched, which would take 0.1 s per MB.
    end = min(len(data), len(data.rstrip(b"\0")) + HEAD_BYTES)
    for found in _MAY_BEGIN.finditer(data, offset + 1, end):
        if frame_at(data, found.start()) is not None:
            return found.start()
    return None


def read_past_damage(data: bytes, offset: int = 0) -> Iterator[Frame | Gap]:
    """Every frame from `offset` on, and what is unreadable between them.

    Nothing is said of what follows the last one.
    """
    while True:
        for frame in read_frames(data, offset):
            yield frame
            offset = frame.end
        following = next_frame(data, offset)
        if following is None:
            return
        yield Gap(offset, following)
        offset = following


def to_head(header: SegmentHeader) -> bytes:
    """How a segment begins."""
    return MAGIC + to_frame(Kind.HEADER, encode(header))


def read_head(data: bytes, name: str) -> tuple[SegmentHeader, int] | None:
    """The header and the offset behind it; None if the file was never begun properly, so that nothing can be
    in it.

    Raises:
        LedgerError: a newer version wrote the file `name`.
    """
    if not data.startswith(MAGIC):
        return None
    frame = next(read_frames(data, len(MAGIC)), None)
    if frame is None or frame.kind != Kind.HEADER:
        return None
    header = _decode_header(frame.body)
    if header.version > SCHEMA_VERSION:
        raise LedgerError(
            f"{name} was written by a newer version (schema {header.version}, this one knows "
            f"{SCHEMA_VERSION})"
        )
    return header, frame.end


TRIES_MAX = 100
_SUFFIX = ".seg"
_NEW = ".new-"


def ledger_directory(config: LedgerConfig, environ: Mapping[str, str] = os.environ) -> Path:
    """Where the ledger is: as configured, or in the user's state directory."""
    return Path(config.directory).expanduser() if config.directory else state_directory(environ) / "ledger"


def database_path(directory: Path) -> Path:
    """The SQLite file."""
    return directory / "usage.sqlite"


def journal_root(directory: Path) -> Path:
    """The directory of all processes' journals."""
    return directory / "journal"


@dataclass(slots=True, frozen=True)
class Claim:
    """A journal directory that is ours until `release`, or until this process dies."""

    directory: Path
    lock: int
    """File descriptor."""

    @property
    def instance(self) -> str:
        """The directory's name: unique on this machine."""
        return self.directory.name

    def release(self, *, remove: bool) -> None:
        """Give it up; with `remove` nothing of it stays."""
        if remove:
            shutil.rmtree(self.directory, ignore_errors=True)
        os.close(self.lock)


def claim_new(directory: Path, clock: Clock) -> Claim:
    """A new directory for this process.

    Raises:
        LedgerError: it cannot be made.
    """
    root = journal_root(directory)
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        stamp = clock.wall_ns() // 1_000_000
        for attempt in range(TRIES_MAX):
            name = f"{stamp:013d}-{os.getpid()}-{attempt}"
            if (root / name).exists():
                continue
            # Under a hidden name until it is locked: no other process may take it for one that was left
            # behind.
            hidden = root / (_NEW + name)
            with contextlib.suppress(FileExistsError, FileNotFoundError):
                hidden.mkdir(mode=0o700)
                if (lock := _try_lock(hidden)) is not None:
                    hidden.rename(root / name)
                    return Claim(root / name, lock)
    except OSError as error:
        raise LedgerError(
            f"ledger.directory: {directory} cannot be written ({error.strerror}); "
            "name another one, or set ledger.enabled: false"
        ) from error
    raise LedgerError(f"ledger.directory: no free name under {root}")


def claim_abandoned(directory: Path) -> list[Claim]:
    """Every directory whose process is dead, oldest first; now ours to recover."""
    claims: list[Claim] = []
    for path in instance_directories(directory, hidden=True):
        with contextlib.suppress(OSError):
            if (lock := _try_lock(path)) is not None:
                claim = Claim(path, lock)
                if path.name.startswith(_NEW):
                    claim.release(remove=True)  # Its maker died before it wrote anything.
                elif not path.exists():
                    claim.release(remove=False)  # Another process has recovered it meanwhile.
                else:
                    claims.append(claim)
    return claims


def instance_directories(directory: Path, *, hidden: bool = False) -> list[Path]:
    """The journals of all processes, living and dead, oldest first."""
    try:
        entries = sorted(journal_root(directory).iterdir())
    except FileNotFoundError:
        return []
    return [path for path in entries if path.is_dir() and (hidden or not path.name.startswith("."))]


def is_alive(path: Path) -> bool:
    """Whether the process that this journal belongs to still runs."""
    try:
        lock = os.open(path / "lock", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def segment_path(directory: Path, sequence: int) -> Path:
    """The file of one segment."""
    return directory / f"{sequence:08d}{_SUFFIX}"


def segments(directory: Path) -> list[tuple[int, Path]]:
    """The segments of one journal in the order in which they were written."""
    found: list[tuple[int, Path]] = []
    with contextlib.suppress(FileNotFoundError):
        paths = [path for path in directory.iterdir() if path.suffix == _SUFFIX and path.stem.isdigit()]
        found.extend((int(path.stem), path) for path in paths)
    return sorted(found)


def keep_damaged(directory: Path, instance: str, path: Path) -> Path:
    """Put a copy of a damaged segment aside; returns where."""
    aside = directory / "damaged" / f"{instance}-{path.name}"
    aside.parent.mkdir(mode=0o700, exist_ok=True)
    shutil.copyfile(path, aside)
    return aside


def _try_lock(directory: Path) -> int | None:
    """Lock a directory; None if its process lives."""
    lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


SEGMENTS_MIN = 4
"""Journal files that there must be room for: one written, one ready, and some that are being delivered."""


@dataclass(slots=True, frozen=True, kw_only=True)
class LedgerLimits:
    """The same for every gateway process."""

    deliver_ms: int = 250
    """How often the journal is brought to the database."""
    deliver_records_max: int = 2_000
    """Records in one transaction."""
    segment_bytes: int = 4 * 1024 * 1024
    """Size of one journal file, which is set aside when it is made."""
    segment_age_s: float = 3600.0
    """A journal file is not written to for longer than this; 0 for as long as it has room."""
    journal_bytes_max: int = 256 * 1024 * 1024
    """Journal files of one gateway process together: by how much the database may lag behind."""
    buffer_bytes_max: int = 8 * 1024 * 1024
    """Held in memory while the disk takes nothing; records beyond it are lost, and counted."""

    def __post_init__(self) -> None:
        assert self.journal_bytes_max >= SEGMENTS_MIN * self.segment_bytes


LEDGER_LIMITS = LedgerLimits()
