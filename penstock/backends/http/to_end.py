r"""The rest of an answer that came in one read, its end included, as a short answer nearly always does: its
events stand on lines of their own and are decoded in one call, whatever each of them says.

    data: {..}\n\ndata: {..}\n\ndata: [DONE]\n\n    ─>    {..}\n{..}

An event's data is one JSON object, on one line. Between two objects of a valid text no line can end where one
object ends and the next begins but on the outermost level, so as many objects as lines are one on each.
"""

import msgspec

from penstock.backends.http.dialects.base import AnswerReader, Piece

_BEGINS, _ENDS = b"data: {", b"}\n\ndata: [DONE]\n\n"
_BETWEEN = b"}\n\ndata: {"
_NUM_BEFORE, _NUM_BEHIND = len(_BEGINS) - 1, 1 - len(_ENDS)


def read_to_end(block: bytes, reader: AnswerReader, num_events: int) -> Piece | None:
    """Read so many whole events (`EventReader.whole`) as one, if they end an answer and say no more than the
    reader can tell at once; None: they are to be read one by one, and nothing was read.
    """
    if (at_once := reader.at_once) is None or num_events > at_once.events_max:
        return None
    if not block.endswith(_ENDS) or not block.startswith(_BEGINS):
        return None
    parts = block[_NUM_BEFORE:_NUM_BEHIND].split(_BETWEEN)
    if b"\n" in b"".join(parts):  # (To count the ends of lines takes far longer.)
        return None  # Some event has more lines than one, or something else stands between two.
    try:
        return at_once.read(b"}\n{".join(parts), len(parts))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
