"""A call's arguments as JSON, while they are written: from JSON, and from literals of Python and Gemma.
`tool_blocks` has those of XML.

A reader is a machine over characters. The text that it has written follows from the input up to there and
holds for every continuation: nothing is taken back, and the pieces joined are the whole. Those of literals
and of XML are total: what is no literal of the syntax becomes a string, so arguments that end are JSON,
whatever the model wrote. JSON is passed on as it is spelled: a model that no grammar holds can write some
that is none.
"""

import ast
import enum
import re
import sys
import unicodedata
from typing import Protocol

from penstock.text.json_calls import JsonScan, json_of, value_of
from penstock.text.tools import SLICE_CHARS_MAX, held

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
    """The parts that may come next between brackets, besides the closing one."""

    ITEM = "item"  # A key of an object, an element of an array.
    COLON = "colon"  # The mark between a key and its value.
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
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t", "a": "\a", "b": "\b", "f": "\f", "v": "\v",
            "\\": "\\", "'": "'", '"': '"', "\n": ""}  # fmt: skip
_PREFIXES = "(?i:br|rb|fr|rf|[rbuf])"
"""Of a Python string (the language reference, 2.4.1)."""
_PREFIX = re.compile(rf"{_PREFIXES}(?=['\"])")
_HALF_PREFIX = re.compile(rf"{_PREFIXES}\Z")
_PREFIX_BEHIND = re.compile(rf"(?<!\w){_PREFIXES}\Z")
_LINE_END = re.compile(r"[\r\n]")
_NUMBER = re.compile(r"[+-]?[0-9.][0-9a-zA-Z_.+-]{0,63}")
_BARE_MARK = re.compile(r"[()\[\]{},:='\"]")
_BARE_MARK_OR_COMMENT = re.compile(r"[()\[\]{},:='\"#]")
_LITERAL_CHARS_MAX = 64


class LiteralArguments:
    """The text between a call's brackets in Python, `a=1, b='x')`, in Gemma's syntax,
    `a:1,b:<escape>x<escape>}`, or, from a bracket on, a value in JSON: from behind the opening bracket.

    Python's strings may have prefixes. Bytes and f-strings are no values of JSON: they are given as the text
    between their quotation marks, with its escapes read and an f-string's braces as they stand.
    """

    def __init__(self, opened: str = "{", *, is_python: bool = False) -> None:
        """`opened`: the bracket; a call's arguments are an object. `is_python`: strings may have prefixes,
        and a `#` begins a comment.
        """
        self._is_python = is_python
        self._buffer: str = ""
        self._frames = [_Frame(opened)]
        self._at = _At.ITEM
        self._written = [opened]
        self._string_end = ""
        """The mark that ends the string that is being read; empty: none is."""
        self._prefix = ""
        """Of that string, in small letters."""
        self._is_string_open = False
        """A string was written whose closing quotation mark was not: another may join it."""
        self._high = ""
        """The first half of a character that is written as two."""
        self._in_comment = False
        self._is_tight = False
        """Nothing stands behind the sign in front of a value, not even a blank."""
        self._is_final = False
        """There is no more text."""
        self._bare: list[str] = []
        """A value that is no string; a number, say."""
        self._bare_closers = self._num_bare = 0
        self._bare_quote = self._bare_last = ""
        self._is_behind_apostrophe = False

    def push(self, text: str) -> tuple[str, str | None]:
        """See `ArgumentReader`."""
        taken = 0
        while self._frames:
            self._buffer += text[taken : taken + SLICE_CHARS_MAX]
            taken += SLICE_CHARS_MAX
            while self._frames and self._step():
                pass  # Each turn that continues has shortened the buffer or changed the state.
            if taken >= len(text):
                break
        written, self._written = "".join(self._written), []
        return written, None if self._frames else self._buffer + text[taken:]

    def close(self) -> str:
        """Nothing: what was cut off stays so."""
        return ""

    def complete(self) -> str:
        """The text that makes JSON of a value that was cut off."""
        self._is_final = True
        while self._frames and self._step():
            pass  # Text that waited for more is decided now.
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
        if self._in_comment:
            return self._skip_comment()
        if self._bare:
            return self._read_bare()
        stripped = self._buffer.lstrip()
        if len(stripped) < len(self._buffer):
            self._buffer, self._is_tight = stripped, False
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
            self._at, self._is_tight = _At.VALUE, True
        elif char == "#" and self._is_python and not (self._is_tight and self._at is _At.VALUE):
            self._in_comment = True
        else:
            return self._begin(char)
        return True

    def _skip_comment(self) -> bool:
        """A comment of Python, up to the end of its line."""
        end = _LINE_END.search(self._buffer)
        self._in_comment = end is None
        self._buffer = "" if end is None else self._buffer[end.start() :]
        return end is not None

    # --- items ------------------------------------------------------------------------------------

    def _begin(self, char: str) -> bool:
        """A key or a value begins."""
        opening = self._opening_of_string()
        if opening is None:
            return False
        if opening:
            self._begin_string(opening)
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

    def _opening_of_string(self) -> str | None:
        """Prefix and quotation mark of a string that begins here; empty: none does; None: not certain yet."""
        text = self._buffer
        if _ESCAPE_MARK.startswith(text[: len(_ESCAPE_MARK)]):
            is_half = len(text) < len(_ESCAPE_MARK)
            return _ESCAPE_MARK if not is_half else "" if self._is_final else None
        prefix = ""
        if self._is_python and (match := _PREFIX.match(text)) is not None:
            prefix = match[0]
        elif self._is_python and not self._is_final and _HALF_PREFIX.match(text):
            return None
        if text[len(prefix)] not in "'\"":
            return ""
        quotes = self._quotes_at(len(prefix))
        return quotes and prefix + quotes

    def _quotes_at(self, at: int) -> str | None:
        """One quotation mark or three; None: more must come."""
        quotes = self._buffer[at : at + 3]
        one = quotes[0]
        if not self._is_final and len(quotes) < 3 and quotes in (one, one * 2):
            return None
        return quotes if quotes == one * 3 else one

    def _begin_string(self, opening: str) -> None:
        if self._at is _At.BEHIND and not self._is_string_open:
            self._at = _At.ITEM  # A comma is missing.
        if not self._is_string_open:
            self._begin_item()
            self._written.append('"')
            self._is_string_open = True
        self._buffer = self._buffer[len(opening) :]
        self._prefix = "" if opening == _ESCAPE_MARK else opening.rstrip("'\"").lower()
        self._string_end = opening[len(self._prefix) :]

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
        if "r" in self._prefix:  # A backslash is text there, and so is a quotation mark behind it.
            if len(self._buffer) < 2:
                return False
            self._write_text(self._buffer[:2])
            self._buffer = self._buffer[2:]
            return True
        if _HALF_ESCAPE.match(self._buffer):
            return False
        match = _ESCAPE.match(self._buffer)
        written = match[0] if match is not None else "\\"  # The rest of it is text.
        self._buffer = self._buffer[len(written) :]
        is_text = (written == "\\/" and self._is_python) or ("b" in self._prefix and written[1:2] in "uUN")
        self._write_text(written if is_text else _unescaped(written))
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
        marks = _BARE_MARK_OR_COMMENT if self._is_python else _BARE_MARK
        at = 0
        while (at := self._behind_quoted(at)) >= 0 and (match := marks.search(self._buffer, at)) is not None:
            i, char, at = match.start(), match[0], match.end()
            if self._bare_closers == 0 and (char in ",)]}" or (is_key and char in ":=")):
                self._take_bare(i)
                self._end_bare()
                return True
            if char in "([{":
                self._bare_closers += 1
            elif char in ")]}":
                self._bare_closers -= 1
            elif char == "#" and self._is_comment(i):
                self._take_bare(i)
                self._in_comment = True
                return True
            elif char in "'\"" and not self._is_apostrophe(i):
                if (quotes := self._quotes_at(i)) is None:
                    self._take_bare(i)
                    return False
                self._bare_quote, at = quotes, i + len(quotes)
                self._is_behind_apostrophe = False
            elif char in "'\"":
                self._is_behind_apostrophe = True
        if at < 0:
            return False
        self._take_bare(len(self._buffer))
        return False

    def _behind_quoted(self, at: int) -> int:
        """Where the string that is open within a bare value ends; negative: all that is here is in it."""
        while self._bare_quote:
            end = self._buffer.find(self._bare_quote, at)
            escape = self._buffer.find("\\", at, None if end < 0 else end)
            if escape >= 0 and (escape + 1 < len(self._buffer) or self._is_final):
                at = escape + 2
            elif escape >= 0 or end < 0:
                cut = escape if escape >= 0 else len(self._buffer) - held(self._buffer[at:], self._bare_quote)
                self._take_bare(len(self._buffer) if self._is_final else cut)
                return -1
            else:
                at, self._bare_quote = end + len(self._bare_quote), ""
        return at

    def _take_bare(self, num_chars: int) -> None:
        taken, self._buffer = self._buffer[:num_chars], self._buffer[num_chars:]
        self._bare.append(taken)
        self._num_bare += num_chars
        self._bare_last = (self._bare_last + taken[-3:])[-3:]

    def _is_apostrophe(self, at: int) -> bool:
        """Whether a quotation mark stands behind a word that is no prefix, or behind another apostrophe."""
        behind = (self._bare_last + self._buffer[max(0, at - 3) : at])[-3:]
        if behind[-1:] in ("'", '"'):
            return self._is_behind_apostrophe
        return behind[-1:].isalnum() and not (self._is_python and _PREFIX_BEHIND.search(behind))

    def _is_comment(self, at: int) -> bool:
        """Whether a `#` begins a comment: behind a blank, a bracket, a literal. In a word it is text."""
        behind = (self._bare_last + self._buffer[max(0, at - 1) : at])[-1:]
        if behind and (behind.isspace() or behind in "()[]{},"):
            return True
        if self._num_bare + at > _LITERAL_CHARS_MAX:
            return False
        return not _bare_json("".join([*self._bare, self._buffer[:at]]).strip()).startswith('"')

    def _end_bare(self) -> None:
        token, self._bare = "".join(self._bare), []
        self._bare_closers, self._num_bare, self._bare_quote, self._bare_last = 0, 0, "", ""
        if self._is_string_open:  # Something else stands behind a string, as in 'a' + b.
            self._write_text(token)
            return
        if self._at is _At.BEHIND:
            self._at = _At.ITEM
        self._begin_item()
        is_key = self._at is _At.ITEM and self._frames[-1].is_object
        self._written.append(_key_json(token.strip()) if is_key else _bare_json(token.strip()))
        self._value_is_over()


class EndedBy:
    """Arguments in Gemma's syntax, which end with their call's closing mark at the latest.

    It ends them wherever it stands: a bracket or a string that is never closed costs what is left of one
    call, and not the calls behind it.
    """

    def __init__(self, mark: str) -> None:
        self._mark, self._held = mark, ""
        self._reader = LiteralArguments()

    def push(self, text: str) -> tuple[str, str | None]:
        """See `ArgumentReader`."""
        text = self._held + text
        end = text.find(self._mark)
        cut = end if end >= 0 else len(text) - held(text, self._mark)
        written, rest = self._reader.push(text[:cut])
        if rest is not None:
            return written, rest + text[cut:]
        self._held = "" if end >= 0 else text[cut:]
        return (written + self._reader.complete(), text[end:]) if end >= 0 else (written, None)

    def close(self) -> str:
        """The possible beginning of the mark was none."""
        return self._reader.push(self._held)[0] + self._reader.close()


def _unescaped(written: str) -> str:
    """The character that an escape stands for; itself if it is none."""
    kind = written[1:2]
    if (found := _ESCAPED.get(kind)) is not None:
        return found
    if kind and kind in "01234567":
        return chr(int(written[1:], 8))
    if kind and kind in "xuU":
        code = int(f"0x{written[2:]}", 0)
        return chr(code) if code <= sys.maxunicode else written
    if kind == "N":
        try:
            return unicodedata.lookup(written[3:-1])
        except KeyError:
            return written
    return "/" if kind == "/" else written


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
    if not _NUMBER.fullmatch(token):
        return json_of(token)
    try:  # Python's ways to write one: 1_000, 0x1f, .5
        return json_of(ast.literal_eval(token))
    except (SyntaxError, ValueError):
        return json_of(token)
