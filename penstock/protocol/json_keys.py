"""Finds a key that is given twice in one JSON object, which decoders pass over in silence.

RFC 8259, section 4: what a receiver does with such an object cannot be predicted. A proxy that reads the
first `model` and a server that reads the last do not speak of the same request, so it is refused.
"""

import json
import re
from collections.abc import Sequence

_TOKEN = re.compile(rb'"([^"\\]*+(?:\\.[^"\\]*+)*+)"(\s*:)?|[{}\[\]]', re.DOTALL)
"""A string (with the colon after it, if it is a key) or a bracket; numbers and words between them are passed
over."""
_FEW = 1000


class TooManyValues(Exception):
    """The body holds more strings, objects and arrays than allowed."""


class _Repeated(Exception):
    def __init__(self, key: str) -> None:
        self.key = key


def repeated_key(body: bytes, values_max: int) -> str | None:
    """The first key that one object of `body`, which is valid JSON, has twice; None if there is none.

    Raises:
        TooManyValues: there are more than `values_max` strings and brackets; the rest was not looked at.
    """
    num_objects = body.count(b"{")
    num_at_most = body.count(b'"') // 2 + 2 * (num_objects + body.count(b"["))
    if num_at_most > values_max:
        for count, _ in enumerate(_TOKEN.finditer(body)):
            if count >= values_max:
                raise TooManyValues
    if num_objects <= 2 and num_at_most < _FEW:
        # A single message, or a plain prompt: if no key occurs twice anywhere, none does in one object.
        keys = [text for text, colon in _TOKEN.findall(body) if colon]
        if len(set(keys)) == len(keys) and not any(b"\\" in key for key in keys):
            return None
    try:
        _DECODER.decode(body.decode())
    except _Repeated as found:
        return found.key
    return None


def _check(pairs: Sequence[tuple[str, object]]) -> None:
    """Called for each object when its end is reached; what it held is not needed any more."""
    if len(dict(pairs)) == len(pairs):
        return
    seen = set[str]()
    for key, _ in pairs:
        if key in seen:
            raise _Repeated(key)
        seen.add(key)


# Numbers are not made: their lengths are as good, and take no time that grows with the square of the digits.
_DECODER = json.JSONDecoder(object_pairs_hook=_check, parse_int=len, parse_float=len, strict=False)
