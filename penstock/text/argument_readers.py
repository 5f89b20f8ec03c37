"""A call's arguments as JSON, while they are written: from JSON, and from literals of Python and Gemma.
`xml_arguments` has those of XML.

A reader is a machine over characters. What it has written follows from the text up to there and holds for
every continuation: nothing is taken back, and the pieces joined are the whole. It is total: what is no
literal of the syntax becomes a string, so arguments that end are JSON, whatever the model wrote.
"""

import ast
import enum
import re
from typing import Protocol

from penstock.text.json_calls import JsonScan, json_of, value_of
from penstock.text.tools import held

JSON_WORDS = {"true": "true", "false": "false", "none": "null", "null": "null"}
_NAME = re.compile(r"[A-Za-z_]")
_DEPTH_MAX = 64
"""Brackets within brackets; deeper ones are a string."""


class ArgumentReader(Protocol):
    """Reads one call's arguments from where they begin."""

    def push(self, text: str) -> tuple[str, str | None]:
        """Take more text; more of the JSON, and what comes behind the arguments if they have ended."""
        ...

    def close(self) -> str:
        """The answer is over: what there is to add to arguments that have not ended."""
        ...


class JsonArguments:
    """A JSON object, passed on as it is spelled."""

    __slots__ = ("_scan",)

    def __init__(self) -> None:
        self._scan = JsonScan()

    def push(self, text: str) -> tuple[str, str | None]:
        """See `ArgumentReader`."""
        end = self._scan.end_in(text)
        return (text, None) if end < 0 else (text[:end], text[end:])

    def close(self) -> str:
        """Nothing: what was cut off stays so."""
        return ""


class _At(enum.Enum):
    """What may come next between brackets, besides the closing one."""

    ITEM = "item"  # A key of an object, an element of an array.
    COLON = "colon"  # What stands between a key and its value.
    VALUE = "value"
    BEHIND = "behind"  # A comma.


class _Frame:
    """Brackets that are open."""

    __slots__ = ("close", "is_object", "num_items")

    def __init__(self, opened: str) -> None:
        self.is_object = opened == "{"
        self.close = "}" if self.is_object else "]"
        self.num_items = 0


_ESCAPE_MARK = "<escape>"
_HEX = "[0-9a-fA-F]"
_ESCAPE = re.compile(
    rf"\\(?:x{_HEX}{{2}}|u{_HEX}{{4}}|U{_HEX}{{8}}|N\{{[^{{}}]{{1,80}}\}}|[0-7]{{1,3}}|[^xuUN0-7])", re.DOTALL
)
_HALF_ESCAPE = re.compile(
    rf"\\(?:x{_HEX}?|u{_HEX}{{0,3}}|U{_HEX}{{0,7}}|N(?:\{{[^{{}}]{{0,80}})?|[0-7]{{1,2}})?\Z"
)
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", "'": "'", '"': '"', "/": "/", "\n": ""}


class LiteralArguments:
    """What stands between a call's brackets in Python, `a=1, b='x')`, in Gemma's syntax,
    `a:1,b:<escape>x<escape>}`, or, from a bracket on, a value in JSON: from behind the opening bracket.
    """

    def __init__(self, opened: str = "{") -> None:
        """`opened`: the bracket; a call's arguments are an object."""
        self._buffer: str = ""
        self._frames = [_Frame(opened)]
        self._at = _At.ITEM
        self._written = [opened]
        self._string_end = ""
        """What ends the string that is being read; empty: none is."""
        self._is_string_open = False
        """A string was written whose closing quotation mark was not: another may join it."""
        self._high = ""
        """The first half of a character that is written as two."""
        self._bare: list[str] = []
        """What is being read is no string; a number, say."""
        self._bare_closers = 0
        self._bare_quote = self._bare_last = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """See `ArgumentReader`."""
        self._buffer += text
        while self._frames and self._step():
            pass  # Each turn that goes on has shortened the buffer or changed the state.
        written, self._written = "".join(self._written), []
        return written, None if self._frames else self._buffer

    def close(self) -> str:
        """Nothing: what was cut off stays so."""
        return ""

    def complete(self) -> str:
        """What makes JSON of a value that was cut off."""
        if self._string_end:
            self._write_text(self._buffer)
            self._end_string()
        elif self._bare:
            self._end_bare()
        while self._frames:
            self._end_frame()
        return "".join(self._written)

    def _step(self) -> bool:
        if self._string_end:
            return self._read_string()
        if self._bare:
            return self._read_bare()
        self._buffer = self._buffer.lstrip()
        if not self._buffer:
            return False
        char = self._buffer[0]
        if char in ")]}":
            self._buffer = self._buffer[1:]
            self._end_frame()
        elif char == ",":
            self._buffer = self._buffer[1:]
            self._end_item()
        elif char in ":=" and self._at is _At.COLON:
            self._buffer = self._buffer[1:]
            self._settle()
            self._written.append(": ")
            self._at = _At.VALUE
        else:
            return self._begin(char)
        return True

    # --- items ------------------------------------------------------------------------------------

    def _begin(self, char: str) -> bool:
        """A key or a value begins."""
        is_mark = char == "<" and _ESCAPE_MARK.startswith(self._buffer[: len(_ESCAPE_MARK)])
        if is_mark and len(self._buffer) < len(_ESCAPE_MARK):
            return False
        if is_mark:
            self._begin_string(_ESCAPE_MARK)
        elif char in "'\"":
            # Three of them begin a string too.
            if self._buffer[:2] in (char, char * 2) and len(self._buffer) < 3:
                return False
            self._begin_string(char * 3 if self._buffer.startswith(char * 3) else char)
        elif char in "([{" and self._may_open():
            self._begin_item()
            self._buffer = self._buffer[1:]
            frame = _Frame(char)
            self._written.append("{" if frame.is_object else "[")
            self._frames.append(frame)
            self._at = _At.ITEM
        else:
            self._bare.append("")
        return True

    def _may_open(self) -> bool:
        is_item = self._at is _At.ITEM and not self._frames[-1].is_object
        return (is_item or self._at is _At.VALUE) and len(self._frames) < _DEPTH_MAX

    def _begin_item(self) -> None:
        if self._at is _At.ITEM:
            if self._frames[-1].num_items:
                self._written.append(", ")
            self._frames[-1].num_items += 1

    def _value_is_over(self) -> None:
        is_key = self._at is _At.ITEM and self._frames[-1].is_object
        self._at = _At.COLON if is_key else _At.BEHIND

    def _settle(self) -> None:
        """No other string joins the one before."""
        if self._is_string_open:
            self._write_high()
            self._written.append('"')
            self._is_string_open = False

    def _end_item(self) -> None:
        self._settle()
        if self._at in (_At.COLON, _At.VALUE):  # A key without a value.
            self._written.append(": null" if self._at is _At.COLON else "null")
        self._at = _At.ITEM

    def _end_frame(self) -> None:
        self._end_item()
        self._written.append(self._frames.pop().close)
        self._at = _At.BEHIND

    # --- strings ----------------------------------------------------------------------------------

    def _begin_string(self, end: str) -> None:
        if self._at is _At.BEHIND and not self._is_string_open:
            self._at = _At.ITEM  # A comma is missing.
        if not self._is_string_open:
            self._begin_item()
            self._written.append('"')
            self._is_string_open = True
        self._buffer = self._buffer[len(end) :]
        self._string_end = end

    def _read_string(self) -> bool:
        end, buffer = self._string_end, self._buffer
        stop = buffer.find(end)
        escape = -1 if end == _ESCAPE_MARK else buffer.find("\\", 0, None if stop < 0 else stop)
        if escape >= 0:
            self._write_text(buffer[:escape])
            self._buffer = buffer[escape:]
            return self._read_escape()
        if stop >= 0:
            self._write_text(buffer[:stop])
            self._buffer = buffer[stop + len(end) :]
            self._end_string()
            return True
        cut = len(buffer) - held(buffer, end)
        self._write_text(buffer[:cut])
        self._buffer = buffer[cut:]
        return False

    def _end_string(self) -> None:
        self._string_end = ""
        if self._at in (_At.ITEM, _At.VALUE):
            self._value_is_over()

    def _read_escape(self) -> bool:
        if _HALF_ESCAPE.match(self._buffer):
            return False
        match = _ESCAPE.match(self._buffer)
        written = match[0] if match is not None else "\\"  # The rest of it is text.
        self._buffer = self._buffer[len(written) :]
        found = _ESCAPED.get(written[1:])
        self._write_text(_unescaped(written) if found is None else found)
        return True

    def _write_text(self, text: str) -> None:
        if not text:
            return
        if self._high and "\udc00" <= text[0] <= "\udfff":
            text = (self._high + text).encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
            self._high = ""
        self._write_high()
        if "\ud800" <= text[-1] <= "\udbff":
            text, self._high = text[:-1], text[-1]
        self._written.append(json_of(text)[1:-1])

    def _write_high(self) -> None:
        if self._high:
            self._written.append("\ufffd")
            self._high = ""

    # --- everything else --------------------------------------------------------------------------

    def _read_bare(self) -> bool:
        """Numbers, names, and what is no literal: up to a comma or a bracket that it has not opened."""
        is_key = self._at is _At.ITEM and self._frames[-1].is_object
        for i, char in enumerate(self._buffer):
            if self._bare_quote:
                if char == self._bare_quote:
                    self._bare_quote = ""
            elif self._bare_closers == 0 and (char in ",)]}" or (is_key and char in ":=")):
                self._bare.append(self._buffer[:i])
                self._buffer = self._buffer[i:]
                self._end_bare()
                return True
            elif char in "([{":
                self._bare_closers += 1
            elif char in ")]}":
                self._bare_closers -= 1
            elif char in "'\"" and not (self._bare_last.isalnum() or self._bare_last in "'\""):
                self._bare_quote = char
            self._bare_last = char
        self._bare.append(self._buffer)
        self._buffer = ""
        return False

    def _end_bare(self) -> None:
        token, self._bare = "".join(self._bare), []
        self._bare_closers, self._bare_quote, self._bare_last = 0, "", ""
        if self._is_string_open:  # Something else stands behind a string, as in 'a' + b.
            self._write_text(token)
            return
        if self._at is _At.BEHIND:
            self._at = _At.ITEM
        self._begin_item()
        is_key = self._at is _At.ITEM and self._frames[-1].is_object
        self._written.append(_key_json(token.strip()) if is_key else _bare_json(token.strip()))
        self._value_is_over()


def _unescaped(written: str) -> str:
    try:
        return ast.literal_eval(f'"{written}"')
    except (SyntaxError, ValueError):
        return written


def _key_json(token: str) -> str:
    """A key that is no string, as JSON writes it."""
    if _NAME.match(token):
        return json_of(token)
    written = _bare_json(token)
    return written if written.startswith('"') else json_of(written)


def _bare_json(token: str) -> str:
    """A number, or a word such as True, as JSON; what is neither is a string."""
    if (word := JSON_WORDS.get(token.lower())) is not None:
        return word
    try:
        return json_of(value_of(token))
    except ValueError:
        pass
    try:
        return json_of(ast.literal_eval(token))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return json_of(token)
