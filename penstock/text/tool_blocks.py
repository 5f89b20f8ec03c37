"""Tool calls between an opening and a closing mark: Hermes and Qwen, Qwen3-Coder (with arguments in XML, told
as JSON while they are written), Phi, Gemma.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from penstock.text.argument_readers import (
    JSON_WORDS,
    ArgumentReader,
    EndedBy,
    JsonArguments,
    LiteralArguments,
)
from penstock.text.json_calls import (
    HEAD_CHARS_MAX,
    JsonScan,
    head_of,
    json_of,
    parse_call,
    parse_calls,
    value_of,
)
from penstock.text.tools import (
    SLICE_CHARS_MAX,
    STRING,
    CallPiece,
    Text,
    ToolEvent,
    fits,
    held,
    kinds_of,
    resolved,
    slices,
    split_space,
)

_NESTED = frozenset({"object", "array"})
_NUMERIC = frozenset({"integer", "number"})
_PARAMETER = re.compile(r"<parameter=([^<>\n]{1,256})>|</tool_call>")
_HALF_PARAMETER = re.compile(r"<parameter=[^<>\n]{0,256}")
_VALUE_END = re.compile(r"\n?(?:</parameter>|(?=<parameter=|(?:</function>\s{0,256})?</tool_call>))")
_HALF_VALUE_END = re.compile(
    r"\n?(?:<(?:/(?:function>\s{0,256}(?:<(?:/[a-z_]{0,9})?)?|[a-z_]{0,9})?|[a-z]{0,9})?)?\Z"
)
_LAST_VALUE_END = re.compile(r"\n?(?:</parameter>\s{0,256}|</function>\s{0,256})?\Z")
_HELD_CHARS_MAX = 600
"""At least the longest match of `_HALF_VALUE_END`; and of a value that may still be a word or a number."""
_DIGITS = re.compile(r"[0-9.e+-]*")


class XmlArguments:
    """`<parameter=KEY>VALUE</parameter>`, up to `</tool_call>`: values are bare, and have the types of the
    tool's schema. Texts, objects and arrays are sent while they are written, other values at their end.
    """

    def __init__(self, schema: Mapping[str, Any]) -> None:
        """`schema`: of the tool's parameters."""
        self._root = schema
        self._properties: Mapping[str, Any] = resolved(schema, schema).get("properties") or {}
        self._buffer = ""
        self._written = ["{"]
        self._num_parameters = 0
        self._value: _XmlValue | None = None
        self._is_over = False

    def push(self, text: str) -> tuple[str, str | None]:
        """See `ArgumentReader`."""
        taken = 0
        while not self._is_over and taken < len(text):
            self._buffer += text[taken : taken + SLICE_CHARS_MAX]
            taken += SLICE_CHARS_MAX
            while not self._is_over and (
                self._read_value(self._value) if self._value is not None else self._read_between()
            ):
                pass  # Each turn that continues has taken a tag off the buffer.
        written, self._written = "".join(self._written), []
        return written, self._buffer + text[taken:] if self._is_over else None

    def close(self) -> str:
        """A value that was cut off ends there: the value's text is what there is of it."""
        if self._is_over:
            return ""
        if self._value is not None:
            end = _LAST_VALUE_END.search(self._buffer)
            assert end is not None, "it matches nothing at the end"
            self._written += [self._value.push(self._buffer[: end.start()]), self._value.end()]
        self._written.append("}")
        return "".join(self._written)

    def _read_between(self) -> bool:
        match = _PARAMETER.search(self._buffer)
        if match is None:
            # Only the last `<` may begin a tag: none has another one within it.
            last = self._buffer[self._buffer.rfind("<") :]
            is_half = "</tool_call>".startswith(last) or _HALF_PARAMETER.fullmatch(last)
            self._buffer = last if is_half or "<parameter=".startswith(last) else ""
            return False
        if match[1] is None:
            self._written.append("}")
            self._buffer, self._is_over = self._buffer[match.start() :], True
            return True
        name = match[1].strip()
        self._written.append(f"{', ' if self._num_parameters else ''}{json_of(name)}: ")
        self._num_parameters += 1
        self._value = _XmlValue(kinds_of(self._properties.get(name), self._root))
        self._buffer = self._buffer[match.end() :]
        return True

    def _read_value(self, value: "_XmlValue") -> bool:
        match = _VALUE_END.search(self._buffer)
        if match is not None:
            self._written += [value.push(self._buffer[: match.start()]), value.end()]
            self._buffer, self._value = self._buffer[match.end() :], None
            return True
        # The end of what is here may be the beginning of a tag.
        begin = max(0, len(self._buffer) - _HELD_CHARS_MAX)
        half = _HALF_VALUE_END.search(self._buffer, begin)
        cut = len(self._buffer) if half is None else half.start()
        self._written.append(value.push(self._buffer[:cut]))
        self._buffer = self._buffer[cut:]
        return False


class _XmlValue:
    """One bare value."""

    def __init__(self, kinds: frozenset[str]) -> None:
        self._kinds = kinds
        self._begun = ""
        """Its beginning."""
        self._parts: list[str] = []
        """All of it, while it is not known what it is."""
        self._num_chars = 0
        self._is_first = True
        """The line break behind the tag is still to come, or not there."""
        self._is_string = False
        """It is certain to be a text."""
        self._may_be_nested = kinds <= _NESTED
        """It has nothing but blanks so far, and may be told as an object or an array."""
        self._nested: LiteralArguments | None = None

    def push(self, text: str) -> str:
        """More of it; more of the JSON."""
        if self._is_first and text:
            self._is_first = False
            text = text.removeprefix("\n")
        if not text:
            return ""
        if self._is_string:
            return json_of(text)[1:-1]
        if self._nested is not None:
            return self._nested.push(text)[0]
        self._parts.append(text)
        self._num_chars += len(text)
        self._begun += text[: _HELD_CHARS_MAX - len(self._begun)]
        if self._may_be_nested and (begun := text.lstrip()):
            self._may_be_nested = False
            if begun[0] in "[{":
                self._nested = LiteralArguments(begun[0])
                return self._nested.push(begun[1:])[0]
        if self._may_be_other():
            return ""
        self._is_string = True
        text, self._parts = "".join(self._parts), []
        return '"' + json_of(text)[1:-1]

    def end(self) -> str:
        """There is no more of it."""
        if self._nested is not None:
            return self._nested.complete()
        if self._is_string:
            return '"'
        return _value_json("".join(self._parts), self._kinds)

    def _may_be_other(self) -> bool:
        """Whether it may be anything but a string."""
        if "string" not in self._kinds:
            return True
        if self._kinds == STRING:
            return False
        begun = self._begun.strip().lower()
        if not begun or begun[0] in "[{":
            return not begun or bool(self._kinds & _NESTED)
        return self._num_chars < _HELD_CHARS_MAX and (
            any(word.startswith(begun) for word in JSON_WORDS)
            or (bool(self._kinds & _NUMERIC) and _DIGITS.fullmatch(begun) is not None)
        )


def _value_json(value: str, kinds: frozenset[str]) -> str:
    """A bare value as one of these types, in JSON; what does not fit is a string."""
    found: object = value
    if kinds != STRING:
        try:
            found = value_of(value.strip())
        except ValueError:
            found = {"true": True, "false": False, "none": None}.get(value.strip().lower(), value)
    return json_of(value if "string" in kinds and not fits(found, kinds - STRING) else found)


Calls = list[tuple[str, str]]
"""Names and arguments, the latter as JSON."""
CALL_CHARS_MAX = 65_536
_JSON_ARRAY = re.compile(r"\s*\[?")
BLANKS = r"(?:\s|#[^\r\n]*[\r\n])*"
"""White space and comments of Python."""
_CALL = rf"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)\({BLANKS}(?=\)|[A-Za-z_]\w*\s*=[^=])"
PYTHON_CALL = re.compile(BLANKS + _CALL, re.ASCII)
"""Up to the first argument. A call with an argument that has no name is none."""
_LINE = re.compile(rf"{BLANKS}(?:print\(\s*)?{_CALL}", re.ASCII)


class Head(NamedTuple):
    """The beginning of a call."""

    name: str
    start: int
    """Where its arguments begin."""
    reader: ArgumentReader
    rest: JsonScan | None = None
    """Of the object that the call is, behind its arguments."""


class BlockParser:
    """Calls between `OPEN` and `CLOSE`, told while they are written, or else when a block is whole.

    White space around a call belongs to the syntax and is dropped. A call whose name comes first is sent from
    there on: it stays a call whatever follows and however long it is, and the text between its arguments and
    the end of its object is dropped. Any other block waits for its closing mark; one that is no valid
    call, or is over `call_chars_max`, is given back as text, to the character. A last block may lack its
    closing mark (models like to stop there).
    """

    OPEN = ""
    CLOSE = ""
    BEHIND = " \t\r\n}"
    """Dropped behind a call's arguments: models like to write a bracket too many."""
    HAS_SEVERAL = False
    """A block may have several calls."""

    @property
    def STOP(self) -> str:
        """See `ToolParser`."""
        return self.CLOSE

    def __init__(self, *, call_chars_max: int = CALL_CHARS_MAX) -> None:
        self._max = call_chars_max
        self._buffer: str = ""
        self._inside = False
        self._searched = 0  # Characters of a block that hold no closing mark.
        self._reader: ArgumentReader | None = None  # Of a call that is sent while it is written.
        self._reported = False
        self._rest: JsonScan | None = None  # Of the call's own object, behind its arguments.
        self._open: str = self.OPEN  # The mark of the block, which is text if no call follows it.
        self._space = ""  # White space that is dropped if a call follows it, and shown if text does.
        self._after_call = False
        self._num_calls: int = 0

    def calls_of(self, body: str) -> Calls | None:
        """The calls of a block that does not begin as `head_of` has it; None: it is none."""
        del body
        return None

    def head_of(self, body: str) -> Head | None:
        """The call that a block begins with, if it can be told already."""
        del body
        return None

    def push(self, text: str) -> list[ToolEvent]:
        """Take more text; return what is certain now."""
        events: list[ToolEvent] = []
        for part in slices(text):
            self._buffer += part
            while self._read_block(events) if self._inside else self._read_prose(events):
                pass  # Each turn that continues has taken a mark off the buffer.
        return events

    def finish(self) -> list[ToolEvent]:
        """The stream is over: return what was held back."""
        events: list[ToolEvent] = []
        rest, self._buffer = self._buffer, ""
        if self._reported:
            if self._reader is not None and (written := self._reader.close()):
                events.append(CallPiece(self._num_calls - 1, arguments=written))
            self._reader, self._reported = None, False
        elif self._inside:
            self._block(rest, "", events)
        else:
            self._prose(rest, events)
        self._inside = False
        if self._space:
            events.append(Text(self._space))
        self._space = ""
        return events

    def _read_prose(self, events: list[ToolEvent]) -> bool:
        """Take text up to an opening mark, or to what may become one. True: a block begins."""
        buffer = self._buffer
        start = buffer.find(self.OPEN)
        self._inside = start >= 0
        cut = start if self._inside else len(buffer) - held(buffer, self.OPEN)
        self._prose(buffer[:cut], events)
        self._buffer = buffer[cut + len(self.OPEN) :] if self._inside else buffer[cut:]
        self._searched, self._open = 0, self.OPEN
        return self._inside

    def _read_block(self, events: list[ToolEvent]) -> bool:
        """Take a block once its closing mark is here, or once it is too long. True: prose continues."""
        if self._reported:
            return self._read_named(events)
        buffer = self._buffer
        end = buffer.find(self.CLOSE, self._searched, self._max + len(self.CLOSE))
        if self._searched <= HEAD_CHARS_MAX:
            within = end if end >= 0 else len(buffer) - held(buffer, self.CLOSE)
            head = self.head_of(buffer[: min(self._max, HEAD_CHARS_MAX + 1, within)])
            if head is not None:
                self._call(events, CallPiece(self._num_calls, head.name))
                self._reader, self._rest, self._reported = head.reader, head.rest, True
                self._buffer = buffer[head.start :]
                return self._read_named(events)
        if end >= 0:
            self._block(buffer[:end], self.CLOSE, events)
            self._buffer = buffer[end + len(self.CLOSE) :]
        elif len(buffer) >= self._max + len(self.CLOSE):
            self._prose(self._open + buffer[: self._max], events)
            self._buffer = buffer[self._max :]
        else:
            self._searched = max(0, len(buffer) - len(self.CLOSE))
            return False
        self._inside = False
        return True

    def _read_named(self, events: list[ToolEvent]) -> bool:
        """Pass the arguments on, and drop what is left of the call: the end of its object and its closing
        mark, where it has one.
        """
        if self._reader is not None:
            written, rest = self._reader.push(self._buffer)
            if written:
                events.append(CallPiece(self._num_calls - 1, arguments=written))
            self._buffer = rest or ""
            if rest is None:
                return False
            self._reader = None
        if self._rest is not None and not self._rest.is_over and not self._read_rest(self._rest):
            return False
        self._buffer = self._buffer.lstrip(self.BEHIND)
        if not self._buffer.startswith(self.CLOSE) and self.CLOSE.startswith(self._buffer):
            return False
        self._reported = False
        if self._buffer.startswith(self.CLOSE):
            self._buffer, self._inside = self._buffer[len(self.CLOSE) :], False
        else:
            self._inside, self._searched, self._open = self.HAS_SEVERAL, 0, ""
        return True

    def _read_rest(self, scan: JsonScan) -> bool:
        """Drop what stands between the arguments and the end of their call's object, or its closing mark."""
        buffer = self._buffer
        close = buffer.find(self.CLOSE)
        cut = close if close >= 0 else len(buffer) - held(buffer, self.CLOSE)
        end = scan.end_in(buffer[:cut])
        self._buffer = buffer[end if end >= 0 else cut :]
        return end >= 0 or close >= 0

    def _block(self, body: str, close: str, events: list[ToolEvent]) -> None:
        calls = self.calls_of(body)
        if not calls:
            self._prose(self._open + body + (close if self._open else ""), events)
            return
        for name, arguments in calls:
            self._call(events, CallPiece(self._num_calls, name))
            events.append(CallPiece(self._num_calls - 1, arguments=arguments))

    def _call(self, events: list[ToolEvent], start: CallPiece) -> None:
        events.append(start)
        self._num_calls += 1
        self._space, self._after_call = "", True

    def _prose(self, text: str, events: list[ToolEvent]) -> None:
        """Show text, but keep the white space at its end until it is clear what follows."""
        if self._after_call:
            text = text.lstrip()
            self._after_call = not text
        shown, self._space = split_space(self._space + text)
        if shown:
            events.append(Text(shown))


class HermesToolParser(BlockParser):
    """Hermes, Qwen and the demo models: `<tool_call>{"name": .., "arguments": {..}}</tool_call>`."""

    OPEN = "<tool_call>"
    CLOSE = "</tool_call>"

    def calls_of(self, body: str) -> Calls | None:
        """One call."""
        call = parse_call(body)
        return None if call is None else [call]

    def head_of(self, body: str) -> Head | None:
        """Its name comes first, nearly always."""
        return _json_head(body)


class PhiToolParser(BlockParser):
    """Phi-4-mini: `<|tool_call|>[{"name": .., "arguments": {..}}]<|/tool_call|>`."""

    OPEN = "<|tool_call|>"
    CLOSE = "<|/tool_call|>"
    BEHIND = " \t\r\n},]"
    HAS_SEVERAL = True

    def calls_of(self, body: str) -> Calls | None:
        """An array of calls, or the rest of one."""
        is_rest = not self._open and body.rstrip().endswith("]")
        return parse_calls("[" + body if is_rest else body)

    def head_of(self, body: str) -> Head | None:
        """Of the next call in the array."""
        begin = _JSON_ARRAY.match(body)
        assert begin is not None, "it matches nothing too"
        head = _json_head(body[begin.end() :])
        return head and head._replace(start=begin.end() + head.start)


class Qwen3CoderToolParser(BlockParser):
    """Qwen3-Coder's XML, in which values are bare: their types are those of the tools' schemas.

    <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>
    """

    OPEN = "<tool_call>"
    CLOSE = "</tool_call>"
    _FUNCTION = re.compile(r"\s*<function=([^<>\n]+)>")

    def __init__(
        self, schemas: Mapping[str, Mapping[str, Any]], *, call_chars_max: int = CALL_CHARS_MAX
    ) -> None:
        """`schemas`: of each tool's parameters, by its name."""
        super().__init__(call_chars_max=call_chars_max)
        self._schemas = schemas

    def head_of(self, body: str) -> Head | None:
        """The function's tag."""
        match = self._FUNCTION.match(body)
        if match is None:
            return None
        name = match[1].strip()
        return Head(name, match.end(), XmlArguments(self._schemas.get(name, {})))


class GemmaToolParser(BlockParser):
    """Gemma's function calls:
    `<start_function_call>call:NAME{KEY:<escape>TEXT<escape>,..}<end_function_call>`.

    The closing mark ends a call wherever it stands.
    """

    OPEN = "<start_function_call>"
    CLOSE = "<end_function_call>"
    _CALL = re.compile(r"\s*call:([^{\s]+)\s*\{")

    def head_of(self, body: str) -> Head | None:
        """Up to the bracket: keys are bare, and strings stand between `<escape>`."""
        match = self._CALL.match(body)
        return None if match is None else Head(match[1], match.end(), EndedBy(self.CLOSE))


class ToolCodeParser(BlockParser):
    """Gemma 3, as Google describes it: a block of Python, "tool_code", with calls in it, one in each line."""

    OPEN = "```tool_code"
    CLOSE = "```"
    BEHIND = " \t\r\n)"
    HAS_SEVERAL = True

    @property
    def STOP(self) -> str:
        """None: other code ends so too, and the opening mark begins so."""
        return ""

    def head_of(self, body: str) -> Head | None:
        """Of the next line."""
        match = _LINE.match(body)
        return None if match is None else Head(match[1], match.end(), LiteralArguments(is_python=True))


def _json_head(body: str) -> Head | None:
    found = head_of(body)
    return found and Head(*found, JsonArguments(), JsonScan(depth=1))
