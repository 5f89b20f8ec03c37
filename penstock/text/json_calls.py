"""Calls that are written as JSON objects with a name and arguments, read while they come."""

import json
import re
from typing import NoReturn, cast

import msgspec

HEAD_CHARS_MAX = 256
"""A call whose name comes first and whose arguments begin within this is sent while it is written; another
one when it is whole."""
_HEAD = re.compile(
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*("(?:[^"\\]|\\.)+")'
    r'\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_MARKS = re.compile(r'["\\{}\[\]]')


class JsonScan:
    """Finds the end of a JSON object or array, from its opening bracket on."""

    __slots__ = ("_depth", "_escaped", "_quoted", "is_over")

    def __init__(self, depth: int = 0) -> None:
        """`depth`: brackets that are open already."""
        self._depth = depth
        self._quoted = self._escaped = False
        self.is_over = False

    def end_in(self, text: str) -> int:
        """Take more text; how much of it belongs to the value if it ends there, else -1."""
        if self._escaped and text:
            start, self._escaped = 1, False
        else:
            start = 0
        while (match := _MARKS.search(text, start)) is not None:
            start, mark = match.end(), match[0]
            if self._quoted:
                if mark == '"':
                    self._quoted = False
                elif mark == "\\":
                    self._escaped = start == len(text)
                    start += 1
            elif mark == '"':
                self._quoted = True
            elif mark in "{[":
                self._depth += 1
            elif mark in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    self.is_over = True
                    return start
        return -1


def head_of(text: str) -> tuple[str, int] | None:
    """The name of the call that `text` begins with and where its arguments start; None: not to be seen."""
    match = _HEAD.match(text[: HEAD_CHARS_MAX + 1])
    if match is None:
        return None
    try:
        return msgspec.json.decode(match[1], type=str), match.end()
    except msgspec.DecodeError:
        return None


def json_of(value: object) -> str:
    """A value that was read from generated text as JSON that any client reads: it has no NaN, and a lone half
    of a character becomes U+FFFD.

    Raises:
        ValueError: it cannot be JSON.
    """
    try:
        written = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, RecursionError) as error:
        raise ValueError(str(error)) from None
    return written.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def value_of(text: str) -> object:
    """The value that generated JSON stands for.

    Raises:
        ValueError: it is none, is nested too deeply, or has a number that JSON has no word for.
    """
    try:
        return json.loads(text, parse_constant=_no_constant, parse_float=_finite)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _no_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")


def _finite(digits: str) -> float:
    found = float(digits)
    if found - found != 0:
        raise ValueError(f"{digits[:16]} is too large")
    return found


class _Call(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw()
    parameters: msgspec.Raw = msgspec.Raw()


def parse_call(body: str) -> tuple[str, str] | None:
    """Name and arguments of the call that this text is, or None if it is no call."""
    try:
        call = msgspec.json.decode(body.strip(), type=_Call)
        raw = bytes(call.arguments) or bytes(call.parameters) or b"{}"
        if raw.startswith(b'"'):  # Some models write the object into a string, as OpenAI's API does.
            raw = msgspec.json.decode(raw, type=str).encode()
        msgspec.json.decode(raw, type=dict[str, msgspec.Raw])  # Numbers may be out of range.
    except (msgspec.DecodeError, RecursionError):
        return None
    return (call.name, raw.decode()) if call.name else None


def parse_calls(body: str) -> list[tuple[str, str]] | None:
    """The calls of a JSON array of them, or of one alone; None if it is neither."""
    if body.lstrip().startswith("{"):
        one = parse_call(body)
        return None if one is None else [one]
    try:
        each = msgspec.json.decode(body.strip(), type=list[msgspec.Raw])
    except (msgspec.DecodeError, RecursionError):
        return None
    found = [parse_call(bytes(one).decode()) for one in each]
    return cast(list[tuple[str, str]], found) if found and all(found) else None
