"""Tool calls between an opening and a closing mark: Hermes and Qwen, Qwen3-Coder, Phi, Gemma."""

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

from penstock.text.json_calls import (
    HEAD_CHARS_MAX,
    Arguments,
    JsonScan,
    head_of,
    is_json,
    json_of,
    parse_call,
    parse_calls,
    value_of,
)
from penstock.text.tool_types import STRING, fits, kinds_of, resolved
from penstock.text.tools import CallPiece, Text, ToolEvent, held, split_space

Calls = list[tuple[str, str]]
"""Names and arguments, the latter as JSON."""
CALL_CHARS_MAX = 65_536
_NESTED = frozenset({"object", "array"})
_BEHIND_A_CALL = " \t\r\n}"
"""Dropped in front of a closing mark: models like to write a bracket too many."""


class BlockParser:
    """Calls between `OPEN` and `CLOSE`, told when a block is whole.

    White space around a call belongs to the syntax and is dropped. A block that is no valid call, or is over
    `call_chars_max`, is given back as text, to the character. A last block may lack its closing mark
    (models like to stop there).
    """

    OPEN = ""
    CLOSE = ""

    @property
    def STOP(self) -> str:
        """See `ToolParser`."""
        return self.CLOSE

    def __init__(self, *, call_chars_max: int = CALL_CHARS_MAX) -> None:
        self._max = call_chars_max
        self._buffer: str = ""
        self._inside = False
        self._searched = 0  # Characters of a block that hold no closing mark.
        self._arguments: Arguments | None = None  # Of a call that is told while it is written.
        self._told = False
        self._rest = JsonScan()  # Of the call's own object, behind its arguments.
        self._space = ""  # White space that is dropped if a call follows it, and shown if text does.
        self._after_call = False
        self._num_calls: int = 0

    def calls_of(self, body: str) -> Calls | None:
        """The calls of a block; None: it is none."""
        raise NotImplementedError

    def head_of(self, body: str) -> tuple[str, int] | None:
        """The call that a block begins with, if it can be told already: its name, and where its arguments
        start.
        """
        del body
        return None

    def push(self, text: str) -> list[ToolEvent]:
        """Take more text; return what is certain now."""
        self._buffer += text
        events: list[ToolEvent] = []
        while self._read_block(events) if self._inside else self._read_prose(events):
            pass  # Each turn that goes on has taken a mark off the buffer.
        return events

    def finish(self) -> list[ToolEvent]:
        """The stream is over: return what was held back."""
        events: list[ToolEvent] = []
        rest, self._buffer = self._buffer, ""
        if self._told:
            self._arguments, self._told = None, False
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
        self._searched = 0
        return self._inside

    def _read_block(self, events: list[ToolEvent]) -> bool:
        """Take a block once its closing mark is here, or once it is too long. True: prose goes on."""
        buffer = self._buffer
        if (
            not self._told
            and self._searched <= HEAD_CHARS_MAX
            and (head := self.head_of(buffer[: min(self._max, HEAD_CHARS_MAX + 1)])) is not None
        ):
            name, start = head
            self._call(events, CallPiece(self._num_calls, name))
            self._arguments, self._told = Arguments(self._num_calls - 1), True
            self._rest = JsonScan(depth=1)
            self._buffer = buffer = buffer[start:]
        if self._told:
            return self._read_told(events)
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

    def _read_told(self, events: list[ToolEvent]) -> bool:
        """Pass the arguments on, and drop what is left of the call: the end of its object and its closing
        mark, where it has one.
        """
        if self._arguments is not None:
            found, rest = self._arguments.push(self._buffer)
            events += found
            self._buffer = rest or ""
            if rest is None:
                return False
            self._arguments = None
        if not self._rest.is_over and not self._read_rest():
            return False
        self._buffer = self._buffer.lstrip(_BEHIND_A_CALL)
        if self._buffer.startswith(self.CLOSE):
            self._buffer = self._buffer[len(self.CLOSE) :]
        elif self.CLOSE.startswith(self._buffer):
            return False
        self._inside = self._told = False
        return True

    def _read_rest(self) -> bool:
        """Drop what stands between the arguments and the end of their call's object, or its closing mark."""
        buffer = self._buffer
        close = buffer.find(self.CLOSE)
        cut = close if close >= 0 else len(buffer) - held(buffer, self.CLOSE)
        end = self._rest.end_in(buffer[:cut])
        self._buffer = buffer[end if end >= 0 else cut :]
        return end >= 0 or close >= 0

    def _block(self, body: str, close: str, events: list[ToolEvent]) -> None:
        calls = self.calls_of(body)
        if not calls:
            self._prose(self.OPEN + body + close, events)
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

    def head_of(self, body: str) -> tuple[str, int] | None:
        """Its name comes first, nearly always."""
        return head_of(body)


class Qwen3CoderToolParser(BlockParser):
    """Qwen3-Coder's XML, in which values are bare: their types are those of the tools' schemas.

    <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>
    """

    OPEN = "<tool_call>"
    CLOSE = "</tool_call>"
    _FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)(?:</function>\s*)?\Z", re.DOTALL)
    _PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL)

    def __init__(
        self, schemas: Mapping[str, Mapping[str, Any]], *, call_chars_max: int = CALL_CHARS_MAX
    ) -> None:
        """`schemas`: of each tool's parameters, by its name."""
        super().__init__(call_chars_max=call_chars_max)
        self._schemas = schemas

    def calls_of(self, body: str) -> Calls | None:
        """One call."""
        match = self._FUNCTION.match(body)
        if match is None:
            return None
        name = match[1].strip()
        root = self._schemas.get(name, {})
        properties: Mapping[str, Any] = resolved(root, root).get("properties") or {}
        arguments = {
            found[1].strip(): _json_text(found[2], kinds_of(properties.get(found[1].strip()), root))
            for found in self._PARAMETER.finditer(match[2])
        }
        members = ", ".join(f"{json_of(key)}: {text}" for key, text in arguments.items())
        return [(name, f"{{{members}}}")]


class PhiToolParser(BlockParser):
    """Phi-4-mini: `<|tool_call|>[{"name": .., "arguments": {..}}]<|/tool_call|>`."""

    OPEN = "<|tool_call|>"
    CLOSE = "<|/tool_call|>"

    def calls_of(self, body: str) -> Calls | None:
        """An array of calls."""
        return parse_calls(body)


class GemmaToolParser(BlockParser):
    """Gemma's function calls:
    `<start_function_call>call:NAME{KEY:<escape>TEXT<escape>,..}<end_function_call>`.
    """

    OPEN = "<start_function_call>"
    CLOSE = "<end_function_call>"
    _CALL = re.compile(r"\s*call:([^{\s]+)\s*(\{.*\})\s*\Z", re.DOTALL)
    _KEY = re.compile(r"([{,]\s*)([A-Za-z_][\w.-]*)(\s*:)")

    def calls_of(self, body: str) -> Calls | None:
        """One call: keys are bare and strings stand between `<escape>`."""
        match = self._CALL.match(body)
        if match is None:
            return None
        parts = match[2].split("<escape>")
        written = "".join(
            json.dumps(part) if i % 2 else self._KEY.sub(r'\1"\2"\3', part) for i, part in enumerate(parts)
        )
        try:
            return [(match[1], json_of(value_of(written)))]
        except ValueError:
            return None


class ToolCodeParser(BlockParser):
    """Gemma 3, as Google describes it: a block of Python, "tool_code", with calls in it."""

    OPEN = "```tool_code"
    CLOSE = "```"

    @property
    def STOP(self) -> str:
        """None: other code ends so too, and the opening mark begins so."""
        return ""

    def calls_of(self, body: str) -> Calls | None:
        """Each line that is a call."""
        try:
            lines = [ast.parse(line.strip(), mode="eval").body for line in body.strip().splitlines()]
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None
        return python_calls(lines)


def python_calls(nodes: list[ast.expr]) -> Calls | None:
    """What these expressions call; None if one is no call with plain values by their names."""
    found: Calls = []
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            node = node.args[0] if len(node.args) == 1 else node
        if not isinstance(node, ast.Call) or node.args or any(each.arg is None for each in node.keywords):
            return None
        try:
            arguments = {str(each.arg): ast.literal_eval(each.value) for each in node.keywords}
            found.append((ast.unparse(node.func), json_of(arguments)))
        except (ValueError, TypeError, RecursionError):
            return None
    return found or None


def _json_text(value: str, kinds: frozenset[str]) -> str:
    """A bare value as one of these types, in JSON; what does not fit is a string."""
    found: object = value
    if kinds != STRING:
        try:
            found = value_of(value.strip())
        except ValueError:
            if kinds <= _NESTED and is_json(value.strip()):
                return value.strip()  # A number within is out of range.
            found = {"true": True, "false": False, "none": None, "null": None}.get(
                value.strip().lower(), value
            )
    return json_of(value if "string" in kinds and not fits(found, kinds - STRING) else found)
