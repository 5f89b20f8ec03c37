"""The events that parsers of generated text give back: prose, reasoning, and calls of tools, piece by piece;
and which types of JSON a parameter of a tool may have, which its bare text is read as, and held to.

A model that was shown tools writes its calls in a syntax of its own (`tool_formats`); a parser for that
syntax reads the stream and gives back events. The gateway chooses how a call is sent to the client.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast
from urllib.parse import unquote


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
    def STOP(self) -> str:
        """The mark that ends every call, and stands nowhere else; empty: there is no such mark."""
        ...

    def push(self, text: str) -> list[ToolEvent]:
        """Take more text; return what is certain now."""
        ...

    def finish(self) -> list[ToolEvent]:
        """The stream is over: return what was held back."""
        ...


class FirstCallOnly:
    """Drops the calls behind the first: `parallel_tool_calls: false`."""

    STOP = ""

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
    found: list[tuple[ToolEvent, list[str]]] = []
    for event in events:
        piece = event.arguments if isinstance(event, CallPiece) else event.text
        continues = found and type(found[-1][0]) is type(event)
        if isinstance(event, CallPiece):
            assert event.name or continues, "arguments belong to a call"
            continues = not event.name
        if continues:
            found[-1][1].append(piece)
        else:
            found.append((event, [piece]))
    return [_whole(first, "".join(pieces)) for first, pieces in found]


def _whole(first: ToolEvent, joined_pieces: str) -> WholeEvent:
    if isinstance(first, CallPiece):
        return ParsedToolCall(first.index, first.name, joined_pieces)
    return type(first)(joined_pieces)


SLICE_CHARS_MAX = 1_024
"""Parsers take a longer text in parts of this size: what one keeps is copied for each mark in it, so a text
that came at once would cost the square of its length."""
SPACE_CHARS_MAX = 256
"""White space that is held back until it is clear what follows it; of a longer run, the last of it."""


def slices(text: str) -> Iterator[str]:
    """A text in parts that are short enough."""
    for start in range(0, len(text), SLICE_CHARS_MAX):
        yield text[start : start + SLICE_CHARS_MAX]


def split_space(text: str) -> tuple[str, str]:
    """The part of a text that can be shown, and the white space at its end, which waits for what follows."""
    shown = max(len(text.rstrip()), len(text) - SPACE_CHARS_MAX)
    return text[:shown], text[shown:]


def held(text: str, tag: str) -> int:
    """How many characters at the end of `text` may be the beginning of `tag`."""
    for size in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:size]):
            return size
    return 0


def _is_later_call(event: ToolEvent) -> bool:
    return isinstance(event, CallPiece) and event.index > 0


STRING = frozenset({"string"})
OBJECT = frozenset({"object"})
_DEPTH_MAX = 16


def resolved(schema: object, root: Mapping[str, Any]) -> dict[str, Any]:
    """The schema itself, where it is a reference within `root` or an `allOf` of one, however often."""
    node = cast(dict[str, Any], schema) if isinstance(schema, dict) else {}
    for _ in range(_DEPTH_MAX):
        together = node.get("allOf")
        if isinstance(pointer := node.get("$ref"), str):
            found = _at(root, pointer)
        elif isinstance(together, list) and len(cast(list[object], together)) == 1:
            found = cast(list[object], together)[0]
        else:
            break
        node = {name: value for name, value in node.items() if name not in ("$ref", "allOf")}
        node |= cast(dict[str, Any], found) if isinstance(found, dict) else {}
    return node


def kinds_of(schema: object, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """The types that a value may have; a string where nothing is said."""
    node = resolved(schema, root)
    said = node.get("type")
    kinds = frozenset(map(str, cast(list[object], said))) if isinstance(said, list) else frozenset[str]()
    kinds |= {said} if isinstance(said, str) else frozenset()
    if isinstance(literals := node.get("enum", [node["const"]] if "const" in node else None), list):
        found = frozenset(map(kind_of, cast(list[object], literals)))
        return (found & _with_integers(kinds) if kinds else found) or STRING
    if kinds:
        return kinds
    branches = node.get("anyOf", node.get("oneOf"))
    if isinstance(branches, list) and depth < _DEPTH_MAX:
        return frozenset[str]().union(
            *(kinds_of(each, root, depth + 1) for each in cast(list[object], branches))
        )
    if "properties" in node:
        return OBJECT
    return frozenset({"array"}) if "items" in node else STRING


def kind_of(value: object) -> str:
    """The type of a value that was read from JSON."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, int | float):
        return "integer" if isinstance(value, int) or value.is_integer() else "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def fits(value: object, kinds: frozenset[str]) -> bool:
    """Whether a value is of one of these types."""
    return kind_of(value) in _with_integers(kinds)


def _with_integers(kinds: frozenset[str]) -> frozenset[str]:
    return kinds | {"integer"} if "number" in kinds else kinds


def _at(root: Mapping[str, Any], pointer: str) -> object:
    """The target of a reference; None if nothing is there."""
    found: object = root
    for part in unquote(pointer).removeprefix("#").split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        found = cast(dict[str, object], found).get(name) if isinstance(found, dict) else None
    return found
