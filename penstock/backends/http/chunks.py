r"""Reads of a socket that are one HTTP chunk of one event each, as they come from a worker that gives a token
at a time: taken whole, by what stands around the text or the ids.

    5e\r\ndata: {"id":"c1","choices":[{"delta":{"content":" water"},"finish_reason":null}]}\n\n\r\n
    └───────────────────── opening ────────────────────┘└ hole ┘└─────────── closing ──────────┘

For each length of a read the opening is the same bytes, and so is the closing. A read that has both is a
chunk of the length that it says, and an event that says what is in its hole: neither the HTTP parser nor the
reader of events would find anything else in it, and both stand behind it where they stood before it. Any
other read is theirs. The content of a hole is remembered, for workers send the same few thousand again and
again.
"""

import re

import msgspec

from penstock.backends.base import Delta
from penstock.backends.http.envelope import ids_in, text_in
from penstock.text.detokenizer import PieceTokens

_SIZE = re.compile(rb"([0-9a-fA-F]{1,8})\r\n")
_OPENINGS_MAX = 128
"""Lengths of reads that are remembered; longer texts are few."""
HOLES_MAX, HOLE_BYTES_MAX = 16_384, 128
_encode = msgspec.json.Encoder().encode


def is_one_chunk(read: bytes, body: bytes) -> bool:
    """Whether a read, of which the HTTP parser made this much of the body, was one chunk from its length to
    its end, so that the parser is between two chunks now.

    The parser cannot have begun in the middle of a chunk: an event's first bytes stand at one place of such a
    read only, so the body is what the read says that it is, and only the end of a chunk follows it.
    """
    size = _SIZE.match(read)
    return (
        size is not None
        and int(size[1], 16) == len(body) == len(read) - size.end() - 2
        and body.startswith(b"data:")
        and body.endswith(b"\n\n")
        and read.endswith(b"\r\n")
    )


class ChunkReader:
    """Of one answer, whose events are alike but for a hole."""

    __slots__ = ("_before", "_closing", "_end", "_openings")

    def __init__(self, before: bytes, behind: bytes) -> None:
        """The bytes around an event's hole, with the ends of its lines."""
        self._before, self._closing = before, behind + b"\r\n"
        self._end = -len(self._closing)
        self._openings: dict[int, bytes] = {}
        """By length of the read."""

    def hole(self, read: bytes) -> bytes | None:
        """The content of an event's hole; None: the read is anything else."""
        opening = self._openings.get(len(read))
        if opening is None and (opening := self._opening(read)) is None:
            return None
        if read.startswith(opening) and read.endswith(self._closing):
            return read[len(opening) : self._end]
        return None

    def _opening(self, read: bytes) -> bytes | None:
        """Of reads of this length, if this one is a chunk with room for an event."""
        size = _SIZE.match(read)
        if size is None or int(size[1], 16) != len(read) - size.end() - 2:
            return None
        opening = size[0] + self._before
        if len(read) < len(opening) + len(self._closing):
            return None
        if len(self._openings) < _OPENINGS_MAX:
            self._openings[len(read)] = opening
        return opening


class TextHoles(dict[bytes, Delta | None]):
    """The content of holes of text, all of one worker's; None: nothing, or it is no text."""

    def __init__(self, pieces: PieceTokens) -> None:
        super().__init__()
        self._pieces = pieces

    def __missing__(self, hole: bytes) -> Delta | None:
        text = text_in(hole)
        found = Delta(text, self._pieces.of(text), encoded=_encode(text)) if text else None
        if len(hole) <= HOLE_BYTES_MAX:
            if len(self) >= HOLES_MAX:
                self.clear()
            self[hole] = found
        return found


class IdHoles(dict[bytes, tuple[int, ...] | None]):
    """The same of holes of a text and ids; `middle` stands between the two."""

    def __init__(self, middle: bytes) -> None:
        super().__init__()
        self.middle = middle

    def __missing__(self, hole: bytes) -> tuple[int, ...] | None:
        piece = ids_in(hole, self.middle)
        found = piece.token_ids if piece is not None else None
        if len(hole) <= HOLE_BYTES_MAX + len(self.middle):
            if len(self) >= HOLES_MAX:
                self.clear()
            self[hole] = found
        return found


class Holes:
    """The remembered contents of one worker's holes."""

    def __init__(self, pieces: PieceTokens) -> None:
        self.texts = TextHoles(pieces)
        self._ids = IdHoles(b"")

    def ids(self, middle: bytes) -> IdHoles:
        """Of events with this between text and ids: a worker has one of them, but for when it changes."""
        if self._ids.middle != middle:
            self._ids = IdHoles(middle)
        return self._ids
