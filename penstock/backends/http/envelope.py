"""The events of one answer that are alike but for their text, or their token ids: read without reading all of
each again.

    data: {"id":"c1","model":"m","choices":[{"index":0,"delta":{"content":" water"},"finish_reason":null}]}
    └────────────────────────────── before ────────────────────────────┘└ hole ┘└──────── behind ──────┘

An event that says nothing but text (or ids) is taken apart once. The next one that has the same bytes around
the hole, and one JSON string (one list of numbers) in it, can say nothing else but what is in the hole, for
what stands around it was read. That the hole is what the reader takes for the text is tried with another
text before it is believed. Events of any other form are the reader's.

A run of such events is one thing repeated: what stands around the holes is the same bytes each time. So it is
cut behind each hole (no hole has the end of a line, which those bytes do), what stands before the holes is
compared, and they are decoded together, a line for each: a few calls into C, however many events there are.
(To cut at all the bytes between two holes takes three times as long, since Python prepares the search for so
long a separator again for each piece. A native scanner would have to make the same list of strings, which is
most of the work.)
"""

import re
from collections.abc import Iterator
from itertools import chain

import msgspec

from penstock.backends.http.dialects.base import NOTHING, AnswerReader, Piece, joined
from penstock.protocol.openai import TokenId
from penstock.protocol.stream import data_of

_TRIALS_MAX = 4
"""Events that are taken apart, of answers whose events are never alike."""
_PLACES_MAX = 4
"""Places in an event that may be the hole."""
_STRING = re.compile(rb'"(?:content|text)": ?("(?:[^"\\]|\\.)*+")')
_NUMBERS = re.compile(rb'"token_ids": ?\[([0-9, ]*+)\]')
_TRIAL_TEXT, _TRIAL_IDS = "\u2192 a trial", (7, 11)
_IN_EVENT = msgspec.json.encode(_TRIAL_TEXT), b"7,11"
_DATA = b"data: "
"""The beginning of an event's line, as a rule: the space may be missing."""
_DONE = Piece(done=True)

_decode_text = msgspec.json.Decoder(str).decode
_decode_texts = msgspec.json.Decoder(str).decode_lines
_decode_one = msgspec.json.Decoder(tuple[str, tuple[TokenId, ...]]).decode
_decode_ids = msgspec.json.Decoder(tuple[str, tuple[TokenId, ...]]).decode_lines


class BadEvent(ValueError):
    """An event cannot be read."""


class Envelopes:
    """The text around the deltas, or the ids, of one answer's events."""

    __slots__ = ("_before", "_behind", "_middle", "_model", "_num_trials", "_prefix", "_reader")

    def __init__(self, reader: AnswerReader, model: str = "") -> None:
        """`reader` must read an event without text before and behind in the same way at any time; see
        `AnswerReader.is_steady`. `model` is the name that the answer must bear; empty: any.
        """
        self._reader, self._model = reader, model
        self._before = self._behind = b""
        """With the prefix of the event's line, and with its end; empty: not known."""
        self._middle = b""
        """Between text and ids; empty: events have no ids."""
        self._prefix = _DATA
        self._num_trials = 0 if reader.is_steady else _TRIALS_MAX

    def read(self, block: bytes, *, joins: bool) -> Iterator[Piece]:
        """Whole events (`EventReader.whole`) in their order, what they say as one thing as far as it can be
        if it `joins`.

        Raises:
            BadEvent: one cannot be read; those before it were given.
        """
        held = NOTHING
        for found in self.sort(block, joins=joins):
            if isinstance(found, Piece):
                piece = found
            elif found == b"[DONE]":
                piece = _DONE
            else:
                try:
                    piece = self._reader.read(found)
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    if held is not NOTHING:
                        yield held
                    raise BadEvent(str(error)) from None
                self.learn(found, piece)
            if held is NOTHING:
                held = piece
            elif self._is_ours(piece.model) and (both := joined(held, piece)) is not None:
                held = both
            else:
                yield held
                held = piece
            if not joins:
                yield held
                held = NOTHING
        if held is not NOTHING:
            yield held

    def _is_ours(self, model: str) -> bool:
        """Whether an answer may say that it is this model's."""
        return not model or self._model in ("", model)

    def sort(self, block: bytes, *, joins: bool) -> Iterator[bytes | Piece]:
        """Whole events (`EventReader.whole`) in their order: similar ones decoded, the first run of them as
        one if it `joins`; others as their data. A pattern that one event teaches serves those behind it.
        """
        if not self._before and self._num_trials >= _TRIALS_MAX:  # None are alike.
            for each in block[:-2].split(b"\n\n"):
                if (event := data_of(each)) is not None:
                    yield event
            return
        at, runs, size = 0, joins, len(block)
        while at < size:
            if (end := self._end_of_alike(block, at)) > at:
                found = None
                if runs:
                    # Once in a block: events of two kinds in turn would be split again for each of them.
                    found, runs = self._run(block[at:] if at else block), False
                if found is None:
                    found = self._run(block[at:end])
                if found is not None:
                    num_bytes, piece = found
                    at += num_bytes
                    yield piece
                    continue
            if (end := block.find(b"\n", at)) < 0:
                return
            if block.startswith(_DATA, at) and block.startswith(b"\n", end + 1):
                self._prefix = _DATA  # One line, as nearly all are.
                event: bytes | None = block[at + len(_DATA) : end]
            else:
                if (end := block.find(b"\n\n", at)) < 0:
                    return  # One blank line more than an event needs.
                event = data_of(block[at:end])
                self._prefix = _DATA if block.startswith(_DATA, at) else _DATA[:-1]
            at = end + 2
            if event is not None:
                yield event

    def _end_of_alike(self, block: bytes, at: int) -> int:
        """The end of the event here, if it seems to be of the form that is known; else 0 or less."""
        if not self._before or not block.startswith(self._before, at):
            return 0
        end = block.find(b"\n\n", at) + 2
        is_alike = block.endswith(self._behind, at, end) and block.find(self._middle, at, end) >= 0
        return end if is_alike else 0

    def texts(self, block: bytes) -> list[str] | None:
        """The texts of a block that is one run of similar events, as nearly all are; None: it is another, or
        they have ids.
        """
        if self._middle or not self._before or not block.startswith(self._before):
            return None
        holes, num_bytes = self._holes(block)
        try:
            return _texts_in(holes) if num_bytes == len(block) else None
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None

    def ids(self, block: bytes) -> Piece | None:
        """The same of events with ids."""
        if not self._middle or not block.startswith(self._before):
            return None
        holes, num_bytes = self._holes(block)
        try:
            return _ids_in(holes, self._middle) if num_bytes == len(block) else None
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None

    @property
    def around(self) -> tuple[bytes, bytes, bytes]:
        """The bytes before the hole, between its text and its ids, and behind it, with the ends of lines; the
        first are empty if nothing is known, the second if there are no ids.
        """
        return self._before, self._middle, self._behind

    def _holes(self, block: bytes) -> tuple[list[bytes], int]:
        """The holes of a run of similar events at its beginning, and where that ends."""
        before, behind = self._before, self._behind
        size, events = len(before), block.split(behind)
        rest = events.pop()
        alike = [event.startswith(before) for event in events]
        if False in alike:  # Others stand in between, and end as these do.
            num = alike.index(False)
            rest = behind.join([*events[num:], rest])
            del events[num:]
        return [event[size:] for event in events], len(block) - len(rest)

    def _run(self, block: bytes) -> tuple[int, Piece] | None:
        """The content of similar events at its beginning, and where they end; None: not all of them are
        what they seem.
        """
        holes, num_bytes = self._holes(block)
        if len(holes) > 1 and self._middle not in holes[-1]:
            # An answer's last event: as the others at both ends, and why it ended in between.
            num_bytes -= len(self._before) + len(holes.pop()) + len(self._behind)
        piece = self._piece(holes)
        return None if piece is None else (num_bytes, piece)

    def _piece(self, holes: list[bytes]) -> Piece | None:
        """The content of holes; None: not all of them are what they seem."""
        if not holes:
            return None
        try:
            return _ids_in(holes, self._middle) if self._middle else _piece_of(_texts_in(holes))
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None

    def learn(self, event: bytes, piece: Piece) -> None:
        """Take apart an event that the reader read so."""
        if piece.finish is not None or self._num_trials >= _TRIALS_MAX:
            return
        ids, text, model = piece.token_ids, piece.text, piece.model
        if not (ids or text) or piece != Piece(token_ids=ids, text=text, model=model):
            return
        if not self._is_ours(model):
            return  # Such an answer is refused.
        self._num_trials += 1
        if ids:
            self._learn_ids(event, model)
        else:
            self._learn_text(event, model)

    def _learn_text(self, event: bytes, model: str) -> None:
        trial = Piece(text=_TRIAL_TEXT, model=model)
        for _, found in zip(range(_PLACES_MAX), _STRING.finditer(event), strict=False):
            before, behind = event[: found.start(1)], event[found.end(1) :]
            if self._says(before + _IN_EVENT[0] + behind, trial):
                self._keep(before, b"", behind)
                return

    def _learn_ids(self, event: bytes, model: str) -> None:
        text, ids = _STRING.search(event), _NUMBERS.search(event)
        if text is None or ids is None or text.end(1) > ids.start(1):
            return
        before, middle, behind = (
            event[: text.start(1)],
            event[text.end(1) : ids.start(1)],
            event[ids.end(1) :],
        )
        trial = Piece(token_ids=_TRIAL_IDS, model=model)
        if self._says(before + _IN_EVENT[0] + middle + _IN_EVENT[1] + behind, trial):
            self._keep(before, middle, behind)

    def _says(self, event: bytes, piece: Piece) -> bool:
        try:
            return self._reader.read(event) == piece
        except (msgspec.DecodeError, UnicodeDecodeError):
            return False

    def _keep(self, before: bytes, middle: bytes, behind: bytes) -> None:
        if b"\n" in before or b"\n" in middle or b"\n" in behind:
            return  # Its data is several lines, which do not stand so in a block.
        self._before, self._middle, self._behind = self._prefix + before, middle, behind + b"\n\n"


def _piece_of(texts: list[str] | None) -> Piece | None:
    if texts is None:
        return None
    return Piece(text="".join(texts), parts=tuple(texts) if len(texts) > 1 else ())


def _texts_in(holes: list[bytes]) -> list[str] | None:
    """None: one is not just a string."""
    if len(holes) == 1:
        return [_decode_text(holes[0])]
    lines = b"\n".join(holes)
    texts = _decode_texts(lines)
    num = len(texts)
    if not texts or num != len(holes) or lines.count(b"\n") != num - 1:
        return None
    return texts


def _ids_in(holes: list[bytes], middle: bytes) -> Piece | None:
    """None: one is not just a string and ids."""
    if len(holes) == 1:
        if holes[0].count(middle) != 1:
            return None
        _, ids = _decode_one(b"[%b]]" % holes[0].replace(middle, b",["))
        return Piece(token_ids=ids) if ids else None
    lines = b"[%b]]" % b"]]\n[".join(holes)
    if lines.count(middle) != len(holes) or lines.count(b"\n") != len(holes) - 1:
        return None
    # In a text there is no `middle`: it has a quotation mark that would end it.
    found = _decode_ids(lines.replace(middle, b",["))
    ids = [each for _, each in found]
    if len(ids) != len(holes) or () in ids:
        return None
    return Piece(token_ids=tuple(chain.from_iterable(ids)))


def text_in(hole: bytes) -> str | None:
    """The text of one event's hole; None: it is not just a string."""
    try:
        return _decode_text(hole)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def ids_in(hole: bytes, middle: bytes) -> Piece | None:
    """The ids of one event's hole; None: it is not just a string and ids."""
    try:
        return _ids_in([hole], middle)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
