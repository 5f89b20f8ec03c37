r"""Reads of a socket that are one HTTP chunk of one event each, as they come from a worker that gives a token
at a time: taken whole, by what stands around the text or the ids.

    5e\r\ndata: {"id":"c1","choices":[{"delta":{"content":" water"},"finish_reason":null}]}\n\n\r\n
    └───────────────────── opening ────────────────────┘└ hole ┘└─────────── closing ──────────┘

For each length of a read the opening is the same bytes, and so is the closing. A read that has both is a
chunk of the length that it says, and an event that says what is in its hole: neither the HTTP parser nor the
reader of events would find anything else in it, and both stand behind it where they stood before it. Any
other read is theirs. The content of a short hole is remembered for all streams of a worker, whose tenants'
text it is: few, so that none stays long where many come.
"""

import re

import msgspec

from penstock.backends.base import Delta
from penstock.backends.http.envelope import ids_in, text_in
from penstock.text.detokenizer import PieceTokens

_SIZE = re.compile(rb"([0-9a-fA-F]{1,8})\r\n")
_SIZES_MAX = 1024
"""Lengths of reads whose size lines are remembered; longer texts are few."""
AROUND_BYTES_MAX = 4096
"""Bytes around a hole in all; an answer with more of them is parsed."""
HOLES_MAX, HOLE_BYTES_MAX = 4096, 40
"""A token or two each, as JSON: longer ones hardly ever come again."""
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

    __slots__ = ("_before", "_closing", "_end", "_num_before", "_sizes")

    def __init__(self, before: bytes, behind: bytes, sizes: dict[int, bytes]) -> None:
        """The bytes around an event's hole, with the ends of its lines. `sizes` is `Holes.sizes`."""
        self._before, self._closing, self._sizes = before, behind + b"\r\n", sizes
        self._num_before, self._end = len(before), -len(self._closing)

    def hole(self, read: bytes) -> bytes | None:
        """The content of an event's hole; empty or None: the read is anything else."""
        size = self._sizes.get(len(read))
        if size is None and (size := self._size_of(read)) is None:
            return None
        num_size = len(size)
        if read.startswith(size) and read.startswith(self._before, num_size) and read.endswith(self._closing):
            # Where the two overlap it is as if the hole were empty.
            return read[num_size + self._num_before : self._end]
        return None

    def _size_of(self, read: bytes) -> bytes | None:
        """The size line of reads of this length, if this one is a chunk."""
        size = _SIZE.match(read)
        if size is None or int(size[1], 16) != len(read) - size.end() - 2:
            return None
        if len(self._sizes) < _SIZES_MAX:
            self._sizes[len(read)] = size[0]
        return size[0]


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
        self.sizes: dict[int, bytes] = {}
        """The size lines of its chunks, by length of the read: a worker writes them in one form."""
        self._ids = IdHoles(b"")

    def reader(
        self, before: bytes, middle: bytes, behind: bytes
    ) -> tuple[ChunkReader, IdHoles | None] | None:
        """Of an answer whose events have this around their holes (`Envelopes.around`), and of its ids; None:
        nothing stands around them, or too much.
        """
        if not before or len(before) + len(middle) + len(behind) > AROUND_BYTES_MAX:
            return None
        return ChunkReader(before, behind, self.sizes), self.ids(middle) if middle else None

    def ids(self, middle: bytes) -> IdHoles:
        """Of events with this between text and ids: a worker has one of them, but for when it changes."""
        if self._ids.middle != middle:
            self._ids = IdHoles(middle)
        return self._ids
