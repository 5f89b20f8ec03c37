"""The ledger's segments: files of records that were only ever appended, each under a checksum of its own.

    magic | frame(HEADER) | frame(OPEN) | frame(SLICE) | frame(CLOSE) | ... | zeros

A frame is length, CRC-32 and kind, then the body in msgpack. A file is set aside in full when it is made, so
what was not written yet reads as zeros: a length of 0 ends the data. A frame that is not whole ends it too,
if no whole one follows: a process or a machine that died while it wrote leaves that behind. If one follows,
the bytes between are damage, and reading continues behind them. Bytes in, frames out: files are the journal's
business.
"""

import enum
import re
import struct
from collections.abc import Iterator
from typing import NamedTuple
from zlib import crc32

import msgspec

from penstock.errors import LedgerError
from penstock.policy.record import SCHEMA_VERSION, UsageRecord

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
    """What a frame holds. 0 is none, so that zeros are no frame."""

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
    """What a running request has used until now: totals, so that the newest one says all and none needs an
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
