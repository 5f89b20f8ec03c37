"""The syntaxes in which models call tools, and which of them a chat template teaches. Those whose calls stand
between an opening and a closing mark are read by `tool_blocks.py`; here are those that go from a mark, or
from the answer's beginning, to its end: Llama 3, pythonic, Mistral, functools.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from re import Pattern
from typing import Any

from penstock.text.argument_readers import ArgumentReader, JsonArguments, LiteralArguments
from penstock.text.json_calls import HEAD_CHARS_MAX, JsonScan, head_of, parse_call
from penstock.text.tool_blocks import (
    BLANKS,
    CALL_CHARS_MAX,
    PYTHON_CALL,
    GemmaToolParser,
    HermesToolParser,
    PhiToolParser,
    Qwen3CoderToolParser,
    ToolCodeParser,
)
from penstock.text.tools import (
    SPACE_CHARS_MAX,
    CallPiece,
    Text,
    ToolEvent,
    ToolParser,
    held,
    slices,
    split_space,
)

_BETWEEN = " \t\r\n,;"
_MISTRAL_NAME = re.compile(r"([\w.-]{1,64})(?:\[CALL_ID\][\w-]{1,64})?\[ARGS\]\s*(?=\{)")
_MISTRAL_NAME_CHARS_MAX = 160
_PYTHON_START, _PYTHON_END = "<|python_start|>", "<|python_end|>"
_NEAR = rf"\s{{0,{SPACE_CHARS_MAX}}}"
_LIST = re.compile(rf"{_NEAR}(?:{re.escape(_PYTHON_START)}{_NEAR})?\[")
_BLANKS = re.compile(BLANKS)
_HALF_BLANKS = re.compile(rf"{BLANKS}(?:#[^\r\n]*)?")
_HALF_HEAD = re.compile(
    rf"(?:{_HALF_BLANKS.pattern}|{BLANKS}[A-Za-z_][\w.]*"
    rf"(?:\((?:{_HALF_BLANKS.pattern}|{BLANKS}[A-Za-z_]\w*\s*=?))?)\Z",
    re.ASCII,
)


class JsonTailParser:
    """JSON calls, alone or in an array, behind one of `opens`, or from the answer's beginning on.

    Text that is no call is given back as text, and so is all that follows it.
    """

    STOP = ""

    def __init__(
        self,
        opens: Sequence[str],
        *,
        at_start: bool = False,
        names: AbstractSet[str] | None = None,
        held: re.Pattern[str] | None = None,
        call_chars_max: int = CALL_CHARS_MAX,
    ) -> None:
        """`at_start`: an answer that begins with an object needs no mark. `names`: those of the tools; a call
        of another name is text. None: any name. `held`: what the first call begins with, else it is text.
        """
        self._opens, self._names, self._max = opens, names, call_chars_max
        self._held = held
        self._at_start = at_start
        self._buffer: str = ""
        self._state: Callable[[list[ToolEvent]], bool] = self._read_prose
        self._began = False  # Some text was shown.
        self._shown_if_none: str = ""  # The mark, which is text if no call follows it.
        self._arguments: ArgumentReader | None = None
        self._rest_of_call: JsonScan | None = None
        self._scan = JsonScan()
        self._scanned = 0
        self._num_calls: int = 0

    def push(self, text: str) -> list[ToolEvent]:
        """Take more text; return what is certain now."""
        events: list[ToolEvent] = []
        for part in slices(text):
            self._buffer += part
            while self._state(events):
                pass  # Each turn that continues has changed the state or shortened the buffer.
        return events

    def finish(self) -> list[ToolEvent]:
        """The stream is over: return what was held back."""
        rest, self._buffer = self._shown_if_none + self._buffer, ""
        self._shown_if_none = ""
        is_reported = self._arguments is not None or self._rest_of_call is not None
        return (
            []
            if is_reported or not rest or (self._num_calls and not rest.strip(_BETWEEN + "[]"))
            else [Text(rest)]
        )

    def _read_prose(self, events: list[ToolEvent]) -> bool:
        buffer = self._buffer
        if self._at_start and not self._began:
            stripped = buffer.lstrip()
            is_near = len(buffer) - len(stripped) <= SPACE_CHARS_MAX
            if is_near and not stripped:
                return False
            if is_near and stripped[0] in "{[":
                self._shown_if_none, self._buffer = buffer[: len(buffer) - len(stripped)], stripped
                self._state = self._read_between
                return True
        found = [(at, mark) for mark in self._opens if (at := buffer.find(mark)) >= 0]
        if found:
            at, mark = min(found)
            before, space = split_space(buffer[:at])  # White space before a call belongs to the syntax.
            self._show(before, events)
            self._shown_if_none, self._buffer = space + mark, buffer[at + len(mark) :]
            self._state = self._read_between
            return True
        cut = len(buffer) - max((held(buffer, mark) for mark in self._opens), default=0)
        shown, space = split_space(buffer[:cut])
        self._show(shown, events)
        self._buffer = space + buffer[cut:]
        return False

    def _show(self, text: str, events: list[ToolEvent]) -> None:
        if text:
            self._began = True
            events.append(Text(text))

    def _read_between(self, events: list[ToolEvent]) -> bool:
        """Look for the next call, or for what shows that none follows."""
        stripped = self._buffer.lstrip(_BETWEEN + ("]" if self._num_calls else ""))
        self._drop(len(self._buffer) - len(stripped))
        if len(self._shown_if_none) > 2 * SPACE_CHARS_MAX:
            return self._give_up()
        if not stripped:
            return False
        if mark := next((mark for mark in self._opens if stripped.startswith(mark)), ""):
            self._drop(len(mark))
            return True
        if any(mark.startswith(stripped) for mark in self._opens):
            return False
        if stripped[0] == "[":
            self._drop(1)
            return True
        if stripped[0] == "{":
            self._scan, self._scanned = JsonScan(), 0
            self._state = self._read_call
            return True
        return self._read_named(events)

    def _drop(self, num_chars: int) -> None:
        """Take off what is no part of a call; if none comes, it was text."""
        if not self._num_calls:
            self._shown_if_none += self._buffer[:num_chars]
        self._buffer = self._buffer[num_chars:]

    def _read_named(self, events: list[ToolEvent]) -> bool:
        """Mistral's newer way: the name, a mark, and the arguments."""
        match = _MISTRAL_NAME.match(self._buffer[:_MISTRAL_NAME_CHARS_MAX])
        if match is not None and self._is_tool(match[1]):
            self._begin(match[1], match.end(), events)
            self._rest_of_call = None
            return True
        if match is None and "{" not in self._buffer and len(self._buffer) < _MISTRAL_NAME_CHARS_MAX:
            return False
        return self._give_up()

    def _read_call(self, events: list[ToolEvent]) -> bool:
        head = head_of(self._buffer)
        if head is not None and self._is_tool(head[0]):
            self._begin(*head, events)
            self._rest_of_call = JsonScan(depth=1)
            return True
        end = self._scan.end_in(self._buffer[self._scanned : self._max])
        if end < 0:
            self._scanned = min(len(self._buffer), self._max)
            return self._give_up() if len(self._buffer) > self._max else False
        call = parse_call(self._buffer[: self._scanned + end])
        if call is None or not self._is_tool(call[0]):
            return self._give_up()
        self._begin(call[0], self._scanned + end, events)
        events.append(CallPiece(self._num_calls - 1, arguments=call[1]))
        self._arguments, self._state = None, self._read_between
        return True

    def _begin(self, name: str, start: int, events: list[ToolEvent]) -> None:
        """A call is certain; its arguments start there."""
        events.append(CallPiece(self._num_calls, name))
        self._arguments = JsonArguments()
        self._num_calls += 1
        self._buffer, self._shown_if_none = self._buffer[start:], ""
        self._state = self._read_arguments

    def _read_arguments(self, events: list[ToolEvent]) -> bool:
        if self._arguments is not None:
            written, rest = self._arguments.push(self._buffer)
            if written:
                events.append(CallPiece(self._num_calls - 1, arguments=written))
            self._buffer = rest or ""
            if rest is None:
                return False
            self._arguments = None
        if self._rest_of_call is not None:
            end = self._rest_of_call.end_in(self._buffer)
            self._buffer = self._buffer[end:] if end >= 0 else ""
            if end < 0:
                return False
            self._rest_of_call = None
        self._state = self._read_between
        return True

    def _is_tool(self, name: str) -> bool:
        if self._names is not None and name not in self._names:
            return False
        if self._held is None or self._num_calls:
            return True
        return self._held.match(self._shown_if_none + self._buffer) is not None

    def _give_up(self) -> bool:
        """The rest is text."""
        self._buffer, self._shown_if_none = self._shown_if_none + self._buffer, ""
        self._opens, self._at_start = (), False
        self._state = self._read_prose
        return True


class PythonicToolParser:
    """An answer that is a Python list of calls: `[f(a=1), g()]` (Llama 3.2 and 4)."""

    STOP = ""

    def __init__(self, *, held: re.Pattern[str] | None = None) -> None:
        """`held`: what the calls begin with, else they are text."""
        self._held = held
        self._buffer = ""
        self._state: Callable[[list[ToolEvent]], bool] = self._read_start
        self._shown_if_none = ""
        """The text before the first call; text if there is none."""
        self._reader: ArgumentReader | None = None
        self._num_calls = 0

    def push(self, text: str) -> list[ToolEvent]:
        """Take more text; return what is certain now."""
        events: list[ToolEvent] = []
        for part in slices(text):
            self._buffer += part
            while self._state(events):
                pass  # Each turn that continues has changed the state.
        return events

    def finish(self) -> list[ToolEvent]:
        """The stream is over: return what was held back."""
        rest, self._buffer = self._shown_if_none + self._buffer, ""
        is_over = not rest.strip(_BETWEEN + "]") or self._is_comment(rest)
        is_reported = self._reader is not None or (self._num_calls and is_over)
        self._reader, self._shown_if_none = None, ""
        return [] if is_reported or not rest else [Text(rest)]

    def _is_comment(self, rest: str) -> bool:
        """Whether there is nothing else behind a call, within the list."""
        in_list = self._state in (self._read_between, self._read_head)
        return in_list and _HALF_BLANKS.fullmatch(rest) is not None

    def _read_start(self, events: list[ToolEvent]) -> bool:
        del events
        match = _LIST.match(self._buffer)
        if match is not None:
            self._shown_if_none, self._buffer = match[0], self._buffer[match.end() :]
            self._state = self._read_head
            return True
        begun = self._buffer.lstrip()
        if len(self._buffer) - len(begun) > SPACE_CHARS_MAX:
            return self._give_up()
        behind = begun.removeprefix(_PYTHON_START)
        is_half = _PYTHON_START.startswith(begun) or (
            len(behind) < len(begun) and not behind.strip() and len(behind) <= SPACE_CHARS_MAX
        )
        return False if is_half else self._give_up()

    def _read_head(self, events: list[ToolEvent]) -> bool:
        match = PYTHON_CALL.match(self._buffer[: HEAD_CHARS_MAX + 1])
        if match is None:
            is_half = len(self._buffer) <= HEAD_CHARS_MAX and _HALF_HEAD.match(self._buffer)
            return False if is_half else self._give_up()
        begins = None if self._num_calls else self._held
        if begins is not None and not begins.match(self._shown_if_none + self._buffer):
            return self._give_up()
        events.append(CallPiece(self._num_calls, match[1]))
        self._num_calls += 1
        self._reader, self._buffer = LiteralArguments(is_python=True), self._buffer[match.end() :]
        self._shown_if_none, self._state = "", self._read_arguments
        return True

    def _read_arguments(self, events: list[ToolEvent]) -> bool:
        assert self._reader is not None
        written, rest = self._reader.push(self._buffer)
        if written:
            events.append(CallPiece(self._num_calls - 1, arguments=written))
        self._buffer = rest or ""
        if rest is None:
            return False
        self._reader, self._state = None, self._read_between
        return True

    def _read_between(self, events: list[ToolEvent]) -> bool:
        """Look for the next call, or the end of the list."""
        del events
        blanks = _BLANKS.match(self._buffer)
        assert blanks is not None, "it matches nothing too"
        self._buffer = self._buffer[blanks.end() :]
        if self._buffer.startswith("#"):
            self._buffer = "#"  # The rest of a comment is still to come.
        if not self._buffer or self._buffer == "#":
            return False
        if self._buffer[0] not in ",]":
            return self._give_up()
        self._state = self._read_head if self._buffer[0] == "," else self._read_end
        self._buffer = self._buffer[1:]
        return True

    def _read_end(self, events: list[ToolEvent]) -> bool:
        """Drop the mark behind the list."""
        del events
        self._buffer = self._buffer.lstrip()
        if not self._buffer.startswith(_PYTHON_END) and _PYTHON_END.startswith(self._buffer):
            return False
        self._buffer = self._buffer.removeprefix(_PYTHON_END)
        return self._give_up()

    def _give_up(self) -> bool:
        """The rest is text."""
        self._buffer, self._shown_if_none = self._shown_if_none + self._buffer, ""
        self._state = self._read_prose
        return True

    def _read_prose(self, events: list[ToolEvent]) -> bool:
        if self._buffer:
            events.append(Text(self._buffer))
        self._buffer = ""
        return False


class ForcedCalls(JsonTailParser):
    """Text that was made to be a call: a function's arguments, or an array of calls with `name` and
    `arguments`.

    A JSON object that was cut off is still the arguments, as in OpenAI's API.
    """

    def __init__(self, name: str) -> None:
        """`name`: the function whose arguments the text is; empty: the text is an array of calls."""
        super().__init__((), at_start=True)
        self._name = name

    def _read_prose(self, events: list[ToolEvent]) -> bool:
        stripped = self._buffer.lstrip()
        is_near = len(self._buffer) - len(stripped) <= SPACE_CHARS_MAX
        if self._name and is_near and stripped.startswith("{") and not self._began:
            self._buffer = stripped
            self._begin(self._name, 0, events)
            self._name = ""
            return True
        return super()._read_prose(events)


Schemas = Mapping[str, Mapping[str, Any]]
"""Of each offered function's parameters, by its name."""


@dataclass(slots=True, frozen=True)
class ToolFormat:
    """One syntax."""

    name: str
    make_parser: Callable[[Schemas, Pattern[str] | None], ToolParser]
    taught_by: tuple[str, ...]
    """The phrases of which a template of this syntax has one in its source."""
    mark: str
    """The beginning of a call, or several, as a regular expression: a mark in front of it, or in the group
    "call" its own beginning. NAMES stands for those of the tools."""
    ends_answer: bool = False
    """No text follows the calls."""
    family: tuple[str, ...] = ()
    """The phrases in the source of templates of models that know this syntax, where none teaches one."""

    def parser(self, schemas: Schemas, held: Pattern[str] | None = None) -> ToolParser:
        """Of one answer; with a pattern, that of `call_mark`, calls that do not begin so are text."""
        return self.make_parser(schemas, held)

    def call_mark(self, names: Iterable[str]) -> str:
        """The mark of calls of these tools."""
        return self.mark.replace("NAMES", "|".join(re.escape(name) for name in sorted(set(names))))


_PYTHON_MARKS = ("<|python_tag|>", "<|python_start|>", "<|python_end|>")
"""Llama 3's mark, and Llama 4's, which writes the same JSON."""
_SPACE = r"[ \t\r\n]{0,8}"
_LLAMA_CALL = _SPACE.join([r"\{(?:", '"type"', ":", '"function"', ",)?", '"name"', ":", '"(?:NAMES)"'])
TOOL_FORMATS = (
    ToolFormat(
        "qwen3_coder", lambda schemas, _: Qwen3CoderToolParser(schemas), ("<function=",), "<tool_call>"
    ),
    ToolFormat(
        "mistral",
        lambda schemas, _: JsonTailParser(["[TOOL_CALLS]"], names=schemas.keys()),
        ("[TOOL_CALLS]",),
        r"\[TOOL_CALLS\]",
        ends_answer=True,
    ),
    ToolFormat(
        "gemma", lambda _schemas, _: GemmaToolParser(), ("<start_function_call>",), "<start_function_call>"
    ),
    ToolFormat("phi", lambda _schemas, _: PhiToolParser(), ("<|tool_call|>", "<|tool|>"), r"<\|tool_call\|>"),
    ToolFormat(
        "functools",
        lambda schemas, _: JsonTailParser(["functools["], names=schemas.keys()),
        ("functools[",),
        r"functools\[",
        ends_answer=True,
    ),
    ToolFormat(
        "pythonic",
        lambda _schemas, held: PythonicToolParser(held=held),
        ("[func_name1(",),
        rf"\A{_SPACE}(?:<\|python_start\|>{_SPACE})?(?P<call>\[{_SPACE}(?:NAMES)\()",
        ends_answer=True,
    ),
    ToolFormat(
        "llama3_json",
        lambda schemas, held: JsonTailParser(_PYTHON_MARKS, at_start=True, names=schemas.keys(), held=held),
        ("<|python_tag|>", '"parameters": dictionary', "Environment: ipython"),
        rf"(?:\A|<\|python_(?:tag|start)\|>){_SPACE}(?P<call>{_LLAMA_CALL})",
        ends_answer=True,
    ),
    ToolFormat(
        "tool_code",
        lambda _schemas, _: ToolCodeParser(),
        ("```tool_code",),
        "```tool_code",
        family=("<start_of_turn>",),
    ),
    ToolFormat("hermes", lambda _schemas, _: HermesToolParser(), ("<tool_call>",), "<tool_call>"),
)
"""The more telling ones first: a template of Qwen3-Coder has the marks of Hermes too."""
HERMES = TOOL_FORMATS[-1]
TOOL_FORMAT_NAMES = tuple(each.name for each in TOOL_FORMATS)


def tool_format(templates: Iterable[str], name: str = "auto") -> ToolFormat:
    """The syntax of this name; "auto": the one that a checkpoint's templates teach, else that of their
    family, else that of Hermes.
    """
    if name != "auto":
        return next(each for each in TOOL_FORMATS if each.name == name)
    source = "\n".join(templates)
    taught = (each for each in TOOL_FORMATS if any(mark in source for mark in each.taught_by))
    known = (each for each in TOOL_FORMATS if any(mark in source for mark in each.family))
    return next(taught, next(known, HERMES))
