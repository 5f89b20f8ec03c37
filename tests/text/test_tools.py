import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.text.tool_blocks import HermesToolParser
from penstock.text.tool_formats import tool_format
from penstock.text.tools import (
    SPACE_CHARS_MAX,
    CallPiece,
    ParsedToolCall,
    Text,
    ToolEvent,
    WholeEvent,
    joined,
)


def parsed(deltas: list[str], *, call_chars_max: int = 65_536) -> list[WholeEvent]:
    """The events, with neighbouring ones joined."""
    parser = HermesToolParser(call_chars_max=call_chars_max)
    events: list[ToolEvent] = [event for delta in deltas for event in parser.push(delta)]
    return joined([*events, *parser.finish()])


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


PIECES = [
    "<tool_call>", "</tool_call>", "<tool", "_call>", "<", "</", " ", "\n", "a", "{", "}",
    call("f", "{}"), call("g", '{"x": [1, "é"]}'), call("", "{}"), call("h", "[]"),
]  # fmt: skip


@given(
    pieces=st.lists(st.sampled_from(PIECES), max_size=12),
    cuts=st.lists(st.integers(0, 400), max_size=30),
    bound=st.sampled_from([5, 30, 65_536]),
)
def test_any_split_gives_the_same_events(pieces: list[str], cuts: list[int], bound: int) -> None:
    text = "".join(pieces)
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    deltas = [text[a:b] for a, b in itertools.pairwise(edges)]
    whole = parsed([text], call_chars_max=bound)
    assert parsed(deltas, call_chars_max=bound) == whole
    assert parsed(list(text), call_chars_max=bound) == whole


@given(st.lists(st.sampled_from([piece for piece in PIECES if '"' not in piece]), max_size=12))
def test_text_without_a_call_is_never_lost(pieces: list[str]) -> None:
    text = "".join(pieces)
    assert parsed([text]) == ([Text(text)] if text else [])


@pytest.mark.parametrize(
    ("text", "events"),
    [
        (call("f", '{"a": 1.0}'), [ParsedToolCall(0, "f", '{"a": 1.0}')]),
        ("\n" + call("f", "{}") + "\n", [ParsedToolCall(0, "f", "{}")]),
        (
            "Let me see.\n\n" + call("f", "{}") + "\n" + call("g", '{"q": "你好"}') + "\nDone.\n",
            [
                Text("Let me see."),
                ParsedToolCall(0, "f", "{}"),
                ParsedToolCall(1, "g", '{"q": "你好"}'),
                Text("Done.\n"),
            ],
        ),
        ('<tool_call>{"name": "f"}', [ParsedToolCall(0, "f", "{}")]),
        (
            '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
            [ParsedToolCall(0, "f", '{"a": 1}')],
        ),
        ('<tool_call>{"name": "f", "argum', [Text('<tool_call>{"name": "f", "argum')]),
        ("<tool_call>{'name': 'f'}</tool_call> x", [Text("<tool_call>{'name': 'f'}</tool_call> x")]),
        (
            "a <tool_call>no</tool_call>\n" + call("f", "{}"),
            [Text("a <tool_call>no</tool_call>"), ParsedToolCall(0, "f", "{}")],
        ),
        ("1 <tool_ca", [Text("1 <tool_ca")]),
        ("  \n ", [Text("  \n ")]),
        ("", []),
    ],
)
def test_examples(text: str, events: list[WholeEvent]) -> None:
    assert parsed([text]) == events


@pytest.mark.parametrize(
    "body", ["[" * 5000, '{"name": "f", "arguments": ' + "[" * 5000, "null", "{}", '"f"', "{" * 5000]
)
def test_hostile_blocks_are_text(body: str) -> None:
    text = f"<tool_call>{body}</tool_call>"
    assert parsed([text]) == [Text(text)]


def test_a_block_over_the_bound_is_text_and_the_stream_goes_on() -> None:
    long = "<tool_call>" + "x" * 100 + "</tool_call>"
    assert parsed([long + " and " + call("f", "{}")], call_chars_max=50) == [
        Text(long + " and"),
        ParsedToolCall(0, "f", "{}"),
    ]


def test_prose_is_shown_at_once() -> None:
    parser = HermesToolParser()
    assert parser.push("Hello there") == [Text("Hello there")]
    assert parser.push(" <") == []
    assert parser.push(" 3") == [Text(" < 3")]


def test_a_call_is_told_while_it_is_written() -> None:
    parser = HermesToolParser()
    assert parser.push('<tool_call>\n{"name": "f", "argu') == []
    assert parser.push('ments": {"a') == [CallPiece(0, "f"), CallPiece(0, arguments='{"a')]
    assert parser.push('": "</tool_call>"') == [CallPiece(0, arguments='": "</tool_call>"')]
    assert parser.push("}}\n</tool_call>") == [CallPiece(0, arguments="}")]
    assert parser.finish() == []


def test_a_call_that_is_cut_off_keeps_what_there_is() -> None:
    assert parsed(['<tool_call>{"name": "f", "arguments": {"a": [1, ']) == [
        ParsedToolCall(0, "f", '{"a": [1, ')
    ]


@pytest.mark.parametrize(
    ("text", "behind"),
    [
        ('{"name": "f", "arguments": {}}}\n</tool_call> Yes.', "Yes."),
        ('{"name": "f", "arguments": {}, "id": "}"}</tool_call>\n\nYes.', "Yes."),
        ('{"name": "f", "arguments": {}</tool_call> Yes.', "Yes."),
        ('{"name": "f", "arguments": {}}\n\nYes. <b>', "Yes. <b>"),
    ],
)
def test_what_follows_a_call_is_shown(text: str, behind: str) -> None:
    whole = [ParsedToolCall(0, "f", "{}"), Text(behind)]
    assert parsed([f"<tool_call>{text}"]) == whole
    assert parsed(list(f"<tool_call>{text}")) == whole


def test_long_white_space_is_shown_and_costs_no_more_than_other_text() -> None:
    for parser in (HermesToolParser(), tool_format([], "llama3_json").parser({})):
        shown = joined(event for _ in range(20_000) for event in parser.push(" \n"))
        assert shown == [Text(" \n" * (20_000 - SPACE_CHARS_MAX // 2))]


def test_joining_takes_time_in_proportion() -> None:
    pieces = [Text("ab")] * 200_000 + [CallPiece(0, "f"), *[CallPiece(0, arguments="1")] * 200_000]
    assert joined(pieces) == [Text("ab" * 200_000), ParsedToolCall(0, "f", "1" * 200_000)]
