"""Tool calls in generated text: which part of an answer is prose and which is a call.

A model that was shown tools writes its calls in a syntax of its own; a parser for that syntax reads
the stream and gives back events. It looks at the text alone: whether a tool of that name was offered,
and how a call is told to the client, is the gateway's business.
"""

from dataclasses import dataclass
from typing import Protocol

import msgspec


@dataclass(slots=True, frozen=True)
class Text:
    """Prose, to be shown as it is."""

    text: str


@dataclass(slots=True, frozen=True)
class ParsedToolCall:
    """One call, whole. `arguments_json` is a JSON object, spelled as the model spelled it."""

    index: int
    name: str
    arguments_json: str


ToolEvent = Text | ParsedToolCall


class ToolParser(Protocol):
    """One stream's state. However the text is cut, the events (neighbouring Texts joined) are the same."""

    @property
    def CLOSE(self) -> str:
        """What ends every call; empty: nothing that could be looked for."""
        ...

    def push(self, text: str) -> list[ToolEvent]:
        """Take more text; return what is certain now."""
        ...

    def finish(self) -> list[ToolEvent]:
        """The stream is over: return what was held back."""
        ...


class HermesToolParser:
    """The syntax of Hermes, Qwen and the demo models:
    `<tool_call>{"name": .., "arguments": {..}}</tool_call>`.

    White space around a call belongs to the syntax and is dropped. A block that is no valid call, or is over
    `call_chars_max`, is given back as text, to the character. A last block may lack its closing tag
    (models like to stop there).
    """

    OPEN = "<tool_call>"
    CLOSE = "</tool_call>"

    def __init__(self, *, call_chars_max: int = 65_536) -> None:
        self._max = call_chars_max
        self._buffer = ""
        self._inside = False
        self._searched = 0  # Characters of a block that hold no closing tag.
        self._space = ""  # White space that is dropped if a call follows it, and shown if text does.
        self._after_call = False
        self._num_calls = 0

    def push(self, text: str) -> list[ToolEvent]:
        """Take more text; return what is certain now."""
        self._buffer += text
        events: list[ToolEvent] = []
        while self._read_block(events) if self._inside else self._read_prose(events):
            pass  # Each turn that goes on has taken a tag off the buffer.
        return events

    def finish(self) -> list[ToolEvent]:
        """The stream is over: return what was held back."""
        events: list[ToolEvent] = []
        rest, self._buffer = self._buffer, ""
        if self._inside:
            self._block(rest, "", events)
            self._inside = False
        else:
            self._prose(rest, events)
        if self._space and not self._after_call:
            events.append(Text(self._space))
        self._space = ""
        return events

    def _read_prose(self, events: list[ToolEvent]) -> bool:
        """Take text up to an opening tag, or to what may become one. True: a block begins."""
        buffer = self._buffer
        start = buffer.find(self.OPEN)
        self._inside = start >= 0
        cut = start if self._inside else len(buffer) - _held(buffer, self.OPEN)
        self._prose(buffer[:cut], events)
        self._buffer = buffer[cut + len(self.OPEN) :] if self._inside else buffer[cut:]
        self._searched = 0
        return self._inside

    def _read_block(self, events: list[ToolEvent]) -> bool:
        """Take a block once its closing tag is here, or once it is too long. True: prose goes on."""
        buffer = self._buffer
        end = buffer.find(self.CLOSE, self._searched, self._max + len(self.CLOSE))
        if end >= 0:
            self._block(buffer[:end], self.CLOSE, events)
            self._buffer = buffer[end + len(self.CLOSE) :]
        elif len(buffer) >= self._max + len(self.CLOSE):
            self._prose(self.OPEN + buffer[: self._max], events)
            self._buffer = buffer[self._max :]
        else:
            self._searched = max(0, len(buffer) - len(self.CLOSE))
            return False
        self._inside = False
        return True

    def _block(self, body: str, close: str, events: list[ToolEvent]) -> None:
        call = _parse(body)
        if call is None:
            self._prose(self.OPEN + body + close, events)
            return
        name, arguments = call
        events.append(ParsedToolCall(self._num_calls, name, arguments))
        self._num_calls += 1
        self._space, self._after_call = "", True

    def _prose(self, text: str, events: list[ToolEvent]) -> None:
        """Show text, but keep the white space at its end until it is clear what follows."""
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if shown:
            events.append(Text(shown.lstrip() if self._after_call else shown))
            self._after_call = False


class ForcedCalls:
    """Text that was made to be a call: a function's arguments, or an array of calls with `name` and
    `arguments`.

    A call is told once the text is whole. What is neither is given back as text; a JSON object that was cut
    off is still the arguments, as in OpenAI's API.
    """

    CLOSE = ""

    def __init__(self, name: str) -> None:
        """`name`: the function whose arguments the text is; empty: the text is an array of calls."""
        self._name = name
        self._pieces: list[str] = []

    def push(self, text: str) -> list[ToolEvent]:
        """Take more text. Nothing is certain before its end."""
        self._pieces.append(text)
        return []

    def finish(self) -> list[ToolEvent]:
        """The stream is over: its calls."""
        text = "".join(self._pieces)
        self._pieces.clear()
        if self._name and text.lstrip().startswith("{"):
            return [ParsedToolCall(0, self._name, text.strip())]
        try:
            calls = msgspec.json.decode(text, type=list[_Call]) if not self._name else []
        except (msgspec.DecodeError, RecursionError):
            calls = []
        if calls:
            return [
                ParsedToolCall(i, call.name, bytes(call.arguments).decode()) for i, call in enumerate(calls)
            ]
        return [Text(text)] if text else []


def _held(text: str, tag: str) -> int:
    """How many characters at the end of `text` may be the beginning of `tag`."""
    for size in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:size]):
            return size
    return 0


class _Call(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"{}")


def _parse(body: str) -> tuple[str, str] | None:
    """Name and arguments of the call in this block, or None if it is no call."""
    try:
        call = msgspec.json.decode(body.strip(), type=_Call)
        raw = bytes(call.arguments)
        if raw.startswith(b'"'):  # Some models write the object into a string, as OpenAI's API does.
            raw = msgspec.json.decode(raw, type=str).encode()
        msgspec.json.decode(raw, type=dict[str, object])
    except (msgspec.DecodeError, RecursionError):
        return None
    return (call.name, raw.decode()) if call.name else None
