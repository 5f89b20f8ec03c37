"""Reasoning is cut out of an answer, however its text comes in pieces."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.text.reasoning import AnswerParser, ReasoningMarks, ThoughtCount, has_begun, reasoning_marks
from penstock.text.tool_blocks import HermesToolParser
from penstock.text.tools import ParsedToolCall, Text, Thought, WholeEvent, joined

THINK = ReasoningMarks("<think>", "</think>")


def read(pieces: list[str], *, begun: bool = False) -> list[WholeEvent]:
    parser = AnswerParser(HermesToolParser(), THINK, has_begun=begun)
    return joined([*(event for piece in pieces for event in parser.push(piece)), *parser.finish()])


EXAMPLES = [
    ("<think>\nHm. </think>\n\nYes.", False, [Thought("Hm."), Text("Yes.")]),
    ("Hm.\n</think>Yes.", True, [Thought("Hm."), Text("Yes.")]),
    ("<think>\n\n</think>\n\nYes.", False, [Text("Yes.")]),
    ("Yes. <think>", False, [Text("Yes. <think>")]),
    ("<thin", False, [Text("<thin")]),
    ("<think>cut </thi", False, [Thought("cut </thi")]),
    ("cut", True, [Thought("cut")]),
    ("", True, []),
    (
        '<think>a <tool_call> b</think>\n<tool_call>{"name": "f", "arguments": {}}</tool_call>',
        False,
        [Thought("a <tool_call> b"), ParsedToolCall(0, "f", "{}")],
    ),
]


@pytest.mark.parametrize(("text", "begun", "events"), EXAMPLES)
def test_examples(text: str, begun: bool, events: list[WholeEvent]) -> None:
    assert read([text], begun=begun) == events
    assert read(list(text), begun=begun) == events


@given(
    pieces=st.lists(
        st.sampled_from(["<think>", "</think>", "<", "think>", " ", "\n", "a", "</"]), max_size=9
    ),
    cuts=st.lists(st.integers(0, 60), max_size=9),
    begun=st.booleans(),
)
def test_any_split_gives_the_same_events(pieces: list[str], cuts: list[int], begun: bool) -> None:
    text = "".join(pieces)
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    whole = read([text], begun=begun)
    assert read([text[a:b] for a, b in itertools.pairwise(edges)], begun=begun) == whole
    assert read(list(text), begun=begun) == whole


def test_the_marks_of_a_template() -> None:
    assert reasoning_marks(["{{ content.split('</think>') }}"]) == THINK
    assert reasoning_marks(["[THINK]x[/THINK]"]) == ReasoningMarks("[THINK]", "[/THINK]")
    assert reasoning_marks(["nothing"]) is None
    assert reasoning_marks(["</think>"], "none") is None
    assert reasoning_marks([], "<a> </a>") == ReasoningMarks("<a>", "</a>")


def test_a_prompt_may_have_opened_the_section() -> None:
    assert has_begun(THINK, "<|im_start|>assistant\n<think>\n")
    assert not has_begun(THINK, "<|im_start|>assistant\n<think>\n\n</think>\n\n")


@given(
    words=st.lists(
        st.sampled_from(["<think>", "</think>", "<", "think>", " ", "\n", "a", "</", "\u00e9"]), max_size=12
    ),
    cuts=st.lists(st.integers(0, 12), max_size=5),
    begun=st.booleans(),
)
def test_reasoning_tokens_are_the_same_however_steps_are_joined(
    words: list[str], cuts: list[int], begun: bool
) -> None:
    def counted(edges: list[int]) -> int:
        count = ThoughtCount(THINK, lambda i: words[i].encode(), has_begun=begun)
        return sum(count.take(range(a, b)) for a, b in itertools.pairwise(edges))

    one_by_one = counted([*range(len(words) + 1)])
    assert counted([0, *sorted(min(cut, len(words)) for cut in cuts), len(words)]) == one_by_one
    text = "".join(words)
    is_thought = begun or text.lstrip().startswith("<think>")
    end = text.find("</think>", 0 if begun else text.find("<think>") + len("<think>")) if is_thought else 0
    starts = [len("".join(words[:i])) for i in range(len(words))]
    assert one_by_one == sum(is_thought and (end < 0 or start < end + len("</think>")) for start in starts)
