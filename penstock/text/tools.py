"""What parsers of generated text give back: prose, reasoning, and calls of tools, piece by piece.

A model that was shown tools writes its calls in a syntax of its own (`tool_formats`); a parser for that
syntax reads the stream and gives back events. How a call is told to the client is the gateway's business.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(slots=True, frozen=True)
class Text:
    """Prose, to be shown as it is."""

    text: str


@dataclass(slots=True, frozen=True)
class Thought:
    """Reasoning, which clients show apart."""

    text: str


@dataclass(slots=True, frozen=True)
class CallPiece:
    """The start of a call, which has its name, or more of its arguments."""

    index: int
    name: str = ""
    """Empty: more of the call that began last."""
    arguments: str = ""


@dataclass(slots=True, frozen=True)
class ParsedToolCall:
    """One call, whole. `arguments_json` is a JSON object, spelled as the model spelled it.

    Cut off where the answer was.
    """

    index: int
    name: str
    arguments_json: str


ToolEvent = Text | Thought | CallPiece
WholeEvent = Text | Thought | ParsedToolCall


class ToolParser(Protocol):
    """One stream's state. However the text is cut, the events (neighbouring ones joined) are the same."""

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


class FirstCallOnly:
    """Drops the calls behind the first: `parallel_tool_calls: false`."""

    CLOSE = ""

    def __init__(self, parser: ToolParser) -> None:
        self._parser = parser

    def push(self, text: str) -> list[ToolEvent]:
        """Take more text; return what is certain now."""
        return [each for each in self._parser.push(text) if not _is_later_call(each)]

    def finish(self) -> list[ToolEvent]:
        """The stream is over: return what was held back."""
        return [each for each in self._parser.finish() if not _is_later_call(each)]


def joined(events: Iterable[ToolEvent]) -> list[WholeEvent]:
    """The events of a whole stream, with neighbouring texts and the pieces of each call joined."""
    found: list[WholeEvent] = []
    for event in events:
        last = found[-1] if found else None
        if isinstance(event, CallPiece):
            if event.name:
                found.append(ParsedToolCall(event.index, event.name, event.arguments))
            else:
                assert isinstance(last, ParsedToolCall), "arguments belong to a call"
                arguments = last.arguments_json + event.arguments
                found[-1] = ParsedToolCall(last.index, last.name, arguments)
        elif isinstance(event, Text) and isinstance(last, Text):
            found[-1] = Text(last.text + event.text)
        elif isinstance(event, Thought) and isinstance(last, Thought):
            found[-1] = Thought(last.text + event.text)
        else:
            found.append(event)
    return found


def held(text: str, tag: str) -> int:
    """How many characters at the end of `text` may be the beginning of `tag`."""
    for size in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:size]):
            return size
    return 0


def _is_later_call(event: ToolEvent) -> bool:
    return isinstance(event, CallPiece) and event.index > 0
