"""The ledger's segments: files of records that were only ever appended, each under a checksum of its own.

    magic | frame(HEADER) | frame(OPEN) | frame(SLICE) | frame(CLOSE) | ... | zeros

A frame is length, CRC-32 and kind, then the body in msgpack. A file is set aside in full when it is made, so what was not
written yet reads as zeros: a length of 0 ends the data. So does the first frame whose checksum is wrong, which is what a
process or a machine that died while it wrote leaves behind. Bytes in, frames out: files are the journal's business.
"""

import enum
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
    """What a running request has used until now: totals, so that the newest one says all and none needs an earlier one."""

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


def read_frames(data: bytes, offset: int = 0) -> Iterator[Frame]:
    """Every frame from `offset` on, up to the first that is not whole."""
    while offset + HEAD_BYTES <= len(data):
        length, checksum, kind = _HEAD.unpack_from(data, offset)
        start = offset + HEAD_BYTES
        offset = start + length
        if not 0 < length <= FRAME_BYTES_MAX or offset > len(data):
            return
        body = data[start:offset]
        if crc32(body, kind) != checksum:
            return
        yield Frame(kind, body, offset)


def to_head(header: SegmentHeader) -> bytes:
    """How a segment begins."""
    return MAGIC + to_frame(Kind.HEADER, encode(header))


def read_head(data: bytes, name: str) -> tuple[SegmentHeader, int] | None:
    """The header and the offset behind it; None if the file was never begun properly, so that nothing can be in it.

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
            f"{name} was written by a newer version (schema {header.version}, this one knows {SCHEMA_VERSION})"
        )
    return header, frame.end
