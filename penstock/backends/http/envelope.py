"""The events of one answer that are alike but for their text, or their token ids: read without reading all of
each again.

    data: {"id":"c1","model":"m","choices":[{"index":0,"delta":{"content":" water"},"finish_reason":null}]}
          └───────────────────────── before ─────────────────────────────┘└ hole ┘└──────── behind ──────┘

An event that says nothing but text (or ids) is taken apart once. The next one that has the same bytes around
the hole, and one JSON string (one list of numbers) in it, can say nothing else but what is in the hole, for
what stands around it was read. That the hole is what the reader takes for the text is tried with another
text before it is believed. Events of any other form are the reader's.
"""

import re
from collections.abc import Iterator, Sequence

import msgspec

from penstock.backends.http.dialects.base import AnswerReader, Piece

_TRIALS_MAX = 4
"""Events that are taken apart, of answers whose events are never alike."""
_PLACES_MAX = 4
"""Places in an event that may be the hole."""
_STRING = re.compile(rb'"(?:content|text)": ?("(?:[^"\\]|\\.)*+")')
_NUMBERS = re.compile(rb'"token_ids": ?\[([0-9, ]*+)\]')
_TRIAL_TEXT, _TRIAL_IDS = "\u2192 a trial", (7, 11)
_IN_EVENT = msgspec.json.encode(_TRIAL_TEXT), b"7,11"

_decode_text = msgspec.json.Decoder(str).decode
_decode_ids = msgspec.json.Decoder(tuple[int, ...]).decode


class Envelopes:
    """The text around the deltas, or the ids, of one answer's events."""

    __slots__ = ("_before", "_behind", "_has_ids", "_middle", "_num_trials", "_reader", "_size")

    def __init__(self, reader: AnswerReader) -> None:
        """`reader` must read an event without text before and behind in the same way at any time; see
        `AnswerReader.is_steady`.
        """
        self._reader = reader
        self._before = self._behind = self._middle = b""
        self._size = 0
        """Of what stands around the hole; 0: not known."""
        self._has_ids = False
        self._num_trials = 0 if reader.is_steady else _TRIALS_MAX

    def sort(self, events: Sequence[bytes], *, joins: bool) -> Iterator[bytes | Piece]:
        """Events in their order: similar ones of that kind as one if it `joins`; others as they came. A
        pattern that one event teaches serves those behind it.
        """
        texts: list[str] = []
        ids: list[int] = []
        for event in events:
            found = self._open(event)
            if (texts or ids) and (found is None or not joins):
                yield _joined(texts, ids)
                texts.clear()
                ids.clear()
            if found is None:
                yield event
            elif isinstance(found, str):
                texts.append(found)
            else:
                ids.extend(found)
        if texts or ids:
            yield _joined(texts, ids)

    def _open(self, event: bytes) -> str | tuple[int, ...] | None:
        """The text or the ids that are all that an event says; None: read it."""
        if not self._size or not event.startswith(self._before) or not event.endswith(self._behind):
            return None
        if len(event) < self._size:
            return None
        hole = event[len(self._before) : len(event) - len(self._behind)]
        try:
            if not self._has_ids:
                return _decode_text(hole)
            # The text beside the ids must be text, and is no more than that.
            text, middle, ids = hole.rpartition(self._middle)
            _decode_text(text)
            return (_decode_ids(b"[%b]" % ids) or None) if middle else None
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None

    def learn(self, event: bytes, piece: Piece) -> None:
        """Take apart an event that the reader read so."""
        if self._num_trials >= _TRIALS_MAX:
            return
        if piece.token_ids:
            if piece == Piece(token_ids=piece.token_ids, model=piece.model):
                self._num_trials += 1
                self._learn_ids(event, piece)
        elif piece.text and piece == Piece(text=piece.text, model=piece.model):
            self._num_trials += 1
            self._learn_text(event, piece)

    def _learn_text(self, event: bytes, piece: Piece) -> None:
        for _, found in zip(range(_PLACES_MAX), _STRING.finditer(event), strict=False):
            start, end = found.span(1)
            before, behind = event[:start], event[end:]
            if self._says(before + _IN_EVENT[0] + behind, Piece(text=_TRIAL_TEXT, model=piece.model)):
                self._keep(before, b"", behind, has_ids=False)
                return

    def _learn_ids(self, event: bytes, piece: Piece) -> None:
        text, ids = _STRING.search(event), _NUMBERS.search(event)
        if text is None or ids is None or text.end(1) > ids.start(1):
            return
        before, middle, behind = (
            event[: text.start(1)],
            event[text.end(1) : ids.start(1)],
            event[ids.end(1) :],
        )
        trial = before + _IN_EVENT[0] + middle + _IN_EVENT[1] + behind
        if self._says(trial, Piece(token_ids=_TRIAL_IDS, model=piece.model)):
            self._keep(before, middle, behind, has_ids=True)

    def _says(self, event: bytes, piece: Piece) -> bool:
        try:
            return self._reader.read(event) == piece
        except (msgspec.DecodeError, UnicodeDecodeError):
            return False

    def _keep(self, before: bytes, middle: bytes, behind: bytes, *, has_ids: bool) -> None:
        self._before, self._middle, self._behind, self._has_ids = before, middle, behind, has_ids
        self._size = len(before) + len(middle) + len(behind)


def _joined(texts: Sequence[str], ids: Sequence[int]) -> Piece:
    if ids:
        return Piece(token_ids=tuple(ids))
    return Piece(text="".join(texts), parts=tuple(texts) if len(texts) > 1 else ())
