"""Reasoning: the part of an answer, at its beginning and between two marks, that clients show apart.

answer:  <think> ... </think> text        the model writes both marks
         ... </think> text                the template has written the first one
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from penstock.text.tools import SPACE_CHARS_MAX, Text, Thought, ToolEvent, ToolParser, held, split_space


class ReasoningMarks(NamedTuple):
    """The marks around a model's reasoning."""

    open: str
    close: str


KNOWN_MARKS = (
    ReasoningMarks("<think>", "</think>"),
    ReasoningMarks("[THINK]", "[/THINK]"),
    ReasoningMarks("<|START_THINKING|>", "<|END_THINKING|>"),
    ReasoningMarks("<seed:think>", "</seed:think>"),
    ReasoningMarks("<reasoning>", "</reasoning>"),
)


def reasoning_marks(templates: Iterable[str], said: str = "auto") -> ReasoningMarks | None:
    """The marks of a model: those that are `said`, with a space between; "auto": those in its templates, if
    there are any; "none".
    """
    if said == "none":
        return None
    if said != "auto":
        first, _, second = said.partition(" ")
        return ReasoningMarks(first, second)
    source = "\n".join(templates)
    return next((marks for marks in KNOWN_MARKS if marks.close in source), None)


def has_begun(marks: ReasoningMarks, prompt_end: str) -> bool:
    """Whether the prompt, whose end this is, has opened the section already."""
    return prompt_end.rstrip().endswith(marks.open)


class AnswerParser:
    """Cuts an answer into reasoning, prose and calls.

    White space at the edges of the reasoning is dropped.
    """

    def __init__(
        self,
        tools: ToolParser | None = None,
        marks: ReasoningMarks | None = None,
        *,
        has_begun: bool = False,
        shows: bool = True,
        counts: "ThoughtCount | None" = None,
    ) -> None:
        """`has_begun`: the answer begins within the section. `shows`: the reasoning is sent, not dropped."""
        self._tools, self.marks, self._shows = tools, marks, shows
        self.is_thinking = has_begun
        """Within the section, as far as it is known."""
        self._is_open = marks is not None and not has_begun
        """The section may still begin."""
        self._buffer = ""
        self._trims = has_begun
        """White space that comes next is dropped."""
        self._counts = counts

    @property
    def passes_on(self) -> bool:
        """Whether all text is prose, which goes on as it comes: there are neither marks nor calls."""
        return self.marks is None and self._tools is None and self._counts is None and self._shows

    def num_thoughts(self, token_ids: Sequence[int], thought: str = "") -> int:
        """How many of the tokens up to these are now found to be reasoning, and were not before; `thought`:
        what the worker told apart of them.
        """
        if thought:
            return len(token_ids)
        return 0 if self._counts is None else self._counts.take(token_ids)

    def push(self, text: str, thought: str = "") -> list[ToolEvent]:
        """Take more text, and the reasoning that the worker told apart before it; return what is certain
        now.
        """
        events = self._push(text)
        if thought:
            events = [Thought(thought), *events]
        return events if self._shows else [each for each in events if not isinstance(each, Thought)]

    def _push(self, text: str) -> list[ToolEvent]:
        if not self.is_thinking and not self._is_open:
            return self._prose(text)
        assert self.marks is not None
        self._buffer += text
        if self._is_open:
            begun = self._buffer.lstrip()
            is_near = len(self._buffer) - len(begun) <= SPACE_CHARS_MAX
            if is_near and begun.startswith(self.marks.open):
                self._buffer = begun[len(self.marks.open) :]
                self.is_thinking = self._trims = True
            elif is_near and self.marks.open.startswith(begun):
                return []
            self._is_open = False
        return self._think(self.marks.close) if self.is_thinking else self._prose(self._taken())

    def finish(self) -> list[ToolEvent]:
        """The stream is over: return what was held back."""
        rest = self._taken()
        events: list[ToolEvent] = []
        if rest:
            if not self.is_thinking:
                events = self._prose(rest)
            elif rest.strip() and self._shows:
                events = [Thought(rest)]
        return events + (self._tools.finish() if self._tools is not None else [])

    def _think(self, close: str) -> list[ToolEvent]:
        if self._trims:
            self._buffer = self._buffer.lstrip()
            self._trims = not self._buffer
        end = self._buffer.find(close)
        if end >= 0:
            thought, self._buffer = split_space(self._buffer[:end])[0], self._buffer[end + len(close) :]
            self.is_thinking, self._trims = False, True
            events: list[ToolEvent] = [Thought(thought)] if thought else []
            return events + self._prose(self._taken())
        cut = len(self._buffer) - held(self._buffer, close)
        shown, space = split_space(self._buffer[:cut])
        self._buffer = space + self._buffer[cut:]
        return [Thought(shown)] if shown else []

    def _prose(self, text: str) -> list[ToolEvent]:
        if self._trims:
            text = text.lstrip()
            self._trims = not text
        if self._tools is not None:
            return self._tools.push(text)
        return [Text(text)] if text else []

    def _taken(self) -> str:
        buffer, self._buffer = self._buffer, ""
        return buffer


PROSE = AnswerParser()
"""Of answers in which there is nothing to look for. It keeps nothing, so all of them have this one."""


class ThoughtCount:
    """Counts the tokens of an answer's reasoning, both marks with it.

    The count depends on the tokens alone: they come in steps, and a busy gateway joins those of several
    steps, so one piece may hold the end of the reasoning and much of what follows it.
    """

    __slots__ = ("_bytes_of", "_close", "_is_inside", "_is_over", "_open", "_tail", "_unsure")

    def __init__(self, marks: ReasoningMarks, bytes_of: Callable[[int], bytes], *, has_begun: bool) -> None:
        """`bytes_of`: what a token stands for. `has_begun`: the answer begins within the section."""
        self._open, self._close = (mark.encode() for mark in marks)
        self._bytes_of = bytes_of
        self._is_inside, self._is_over = has_begun, False
        self._tail = b""
        self._unsure = 0
        """Tokens at the beginning, which are reasoning if the opening mark follows."""

    def take(self, token_ids: Sequence[int]) -> int:
        """The next tokens of the answer; how many of the tokens so far are found to be reasoning now."""
        found = 0
        for token_id in token_ids:
            if self._is_over:
                break
            found += self._take_one(self._bytes_of(token_id))
        return found

    def _take_one(self, data: bytes) -> int:
        self._tail += data
        found = 1
        if not self._is_inside:
            self._unsure += 1
            begun = self._tail.lstrip()
            if not begun.startswith(self._open):
                self._is_over = not self._open.startswith(begun)
                return 0
            self._is_inside, self._tail = True, begun[len(self._open) :]
            found = self._unsure
        self._is_over = self._close in self._tail
        self._tail = self._tail[1 - len(self._close) :]
        return found
