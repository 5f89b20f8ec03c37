"""Finds a key that is given twice in one JSON object, which decoders pass over in silence.

RFC 8259, section 4: what a receiver does with such an object cannot be predicted. A proxy that reads the first
`model` and a server that reads the last do not speak of the same request, so it is refused.
"""

import re

import msgspec

_TOKEN = re.compile(rb'"([^"\\]*+(?:\\.[^"\\]*+)*+)"(\s*:)?|[{}\[\]]', re.DOTALL)
"""A string (with the colon after it, if it is a key) or a bracket; numbers and words between them are passed over."""


FEW = 1000


class TooManyValues(Exception):
    """The body holds more strings, objects and arrays than allowed."""


def repeated_key(body: bytes, values_max: int) -> str | None:
    """The first key that one object of `body`, which is valid JSON, has twice; None if there is none.

    Raises:
        TooManyValues: there are more than `values_max` strings and brackets; the rest was not looked at.
    """
    if body.count(b'"') + body.count(b"{") + body.count(b"[") < min(FEW, values_max):
        # Nearly every body: if no key occurs twice anywhere, none does in one object.
        keys = [text for text, colon in _TOKEN.findall(body) if colon]
        if len(set(keys)) == len(keys) and not any(b"\\" in key for key in keys):
            return None
    open_objects: list[set[bytes] | None] = []
    for count, token in enumerate(_TOKEN.finditer(body)):
        if count >= values_max:
            raise TooManyValues
        text, colon = token.groups()
        if colon is not None:
            keys = open_objects[-1]
            assert keys is not None, "a key stands in an object"
            key = msgspec.json.decode(b'"%b"' % text, type=str).encode() if b"\\" in text else text
            if key in keys:
                return key.decode()
            keys.add(key)
        elif text is None:
            bracket = token[0]
            if bracket == b"{":
                open_objects.append(set())
            elif bracket == b"[":
                open_objects.append(None)
            else:
                open_objects.pop()
    return None
