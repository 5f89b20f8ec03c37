"""However an answer is cut into deltas its calls are the same, and reading it takes time in proportion."""

import itertools
import sys
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock.text
from penstock.text.argument_readers import ArgumentReader, LiteralArguments
from penstock.text.tool_blocks import XmlArguments
from penstock.text.tool_formats import TOOL_FORMAT_NAMES, ForcedCalls, tool_format
from penstock.text.tools import SLICE_CHARS_MAX, ToolParser, joined

KINDS: dict[str, Any] = {
    "city": "string",
    "days": "integer",
    "units": "array",
    "mix": ["string", "integer", "array"],
}
WEATHER = {"properties": {name: {"type": kind} for name, kind in KINDS.items()}}
SCHEMAS = {"weather": WEATHER, "f": {}, "print": {}}
FORCED = ("forced", "forced array")


def parser_of(name: str) -> ToolParser:
    if name in FORCED:
        return ForcedCalls("f" if name == "forced" else "")
    return tool_format([], name).parser(SCHEMAS)


COMMON = st.sampled_from([
    *" \nafgx1{}[](),:=;'\"\\#<é", "2.5", "True", "null", "'''", '"""', "\\n", "\\u12", "\\ud83d", "\\x4",
    "\\'", "# c, )\n", "r'", 'R"', "b'", "rb'", 'Rb"""', "</", "<|", "print(", "'a'", '"b"', "a=1", "a='x'",
    *(" " * n for n in (255, 256, 257)), "\n" * 300, *("n" * n for n in (60, 250, 257, 600)), "```", "``",
    '"a": 1', '"name": "weather"', '"arguments": {', '"parameters": {', '"type": "function", ', "<escape>",
    '{"name": "weather", "arguments": {', '{"arguments": {"a": 1}, "name": "f"}',
    '{"name": "f", "arguments": {}}',
])  # fmt: skip
OWN = {
    "hermes": ["<tool_call>", "</tool_call>", "}}\n</tool_call>", '<tool_call>{"name": "f", "arguments": {'],
    "phi": ["<|tool_call|>", "<|/tool_call|>", "}}, ", '<|tool_call|>[{"name": "f", "arguments": {"a": '],
    "qwen3_coder": [
        "<tool_call>", "</tool_call>", "<function=", "<function=weather>", "</function>", "<parameter=",
        "</paramete",
        *(f"<parameter={name}>" for name in KINDS), "</parameter>", "</function>\n</tool_call>",
        f"</function>{' ' * 256}</tool_call>", f"</function>{' ' * 257}</tool_call>",
        "<tool_call>\n<function=weather>\n<parameter=city>\n",
    ],
    "gemma": [
        "<start_function_call>", "<end_function_call>", "call:f{", "call:", "<escape>x<escape>",
        "}<end_function_call>",
        "<start_function_call>call:weather{a:",
    ],
    "tool_code": [
        "```tool_code", "\n```", "weather(city=", "f(a=1)\n", "print(f(a=1))\n", "```tool_code\nf(a=",
    ],
    "pythonic": [
        "<|python_start|>", "<|python_end|>", "[weather(city='x', days=", ")]", "[f()", "f(", "[f(a=",
    ],
    "mistral": [
        "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "weather[ARGS]{", '[TOOL_CALLS] [{"name": "f", "arguments": {',
    ],
    "functools": ["functools[", 'functools[{"name": "f", "arguments": {'],
    "llama3_json": ["<|python_tag|>", "<|python_start|>", "<|python_end|>", '{"name": "f", "parameters": {'],
    "forced": ['{"a": '],
    "forced array": ['[{"name": "f", "arguments": {'],
}  # fmt: skip


def test_there_are_pieces_of_each() -> None:
    assert set(OWN) == {*TOOL_FORMAT_NAMES, *FORCED}


def check_cuts(name: str, text: str, cuts: list[int]) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    whole, cut, chars = (
        joined([*(event for piece in pieces for event in parser.push(piece)), *parser.finish()])
        for parser, pieces in (
            (parser_of(name), [text]),
            (parser_of(name), [text[a:b] for a, b in itertools.pairwise(edges)]),
            (parser_of(name), list(text)),
        )
    )
    assert cut == whole
    assert chars == whole


@pytest.mark.parametrize("name", OWN)
@settings(max_examples=40)
@given(data=st.data())
def test_any_cut_gives_the_same_events(name: str, data: st.DataObject) -> None:
    own = st.sampled_from(OWN[name])
    begin = st.sampled_from(["", OWN[name][-1], OWN[name][0]])
    text = data.draw(begin) + "".join(data.draw(st.lists(own | COMMON, max_size=16)))
    check_cuts(name, text, data.draw(st.lists(st.integers(0, len(text)), max_size=6)))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen3_coder", "<tool_call><function=weather><parameter=<>"),
        ("qwen3_coder", f"<tool_call><function=f><parameter={'n' * 300}>1</parameter></tool_call>"),
        ("qwen3_coder", f"<tool_call><function=f><parameter=a>x</function>{' ' * 257}</tool_call> Yes"),
        ("qwen3_coder", f"<tool_call><function=f><parameter=a>x</function>{' ' * 600}"),
        ("gemma", "<start_function_call>call:a<end_function_call>{"),
        ("hermes", '<tool_call>{"name": "a</tool_call>b", "arguments": {}}</tool_call>'),
        ("tool_code", "```tool_code\nf(a=```"),
        ("mistral", f"[TOOL_CALLS]weather[ARGS]{' ' * 160}{{}}"),
        ("llama3_json", f'{{"parameters": {{"a": "{"x" * 65_536}"}}, "name": "f"}}'),
        ("pythonic", f"[{'n' * 300}(a=1)]"),
        ("pythonic", f"[f({' ' * 300}a=1)]"),
        ("pythonic", f"{' ' * 600}[f(a=1)]"),
        ("pythonic", f"[f(a=1),{' ' * 300}g()]"),
        ("forced", f"{' ' * 300}{{}}"),
    ],
)  # fmt: skip
def test_cuts_that_made_a_difference(name: str, text: str) -> None:
    check_cuts(name, text, [7, len(text) - 3])


class Literal(LiteralArguments):
    """Of Python, from behind a call's bracket."""

    def __init__(self) -> None:
        super().__init__(is_python=True)


class Xml(XmlArguments):
    """Of the weather."""

    def __init__(self) -> None:
        super().__init__(WEATHER)


def work(reader: ArgumentReader | ToolParser, deltas: list[str]) -> int:
    """What all functions of the readers had in hand when they were called, in characters."""
    counted, ours = 0, penstock.text.__path__[0]

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal counted
        if event != "call" or not frame.f_code.co_filename.startswith(ours):
            return
        found = frame.f_locals
        for values in (found, getattr(found.get("self"), "__dict__", {})):
            counted += 1 + sum(len(value) for value in values.values() if isinstance(value, str))

    sys.setprofile(count)
    try:
        for delta in deltas:
            reader.push(delta)
    finally:
        sys.setprofile(None)
    return counted


HOSTILE = [
    (Xml, "</parameter><parameter="),
    (Xml, "<parameter=city>"),
    (Xml, "<parameter="),
    (Xml, "</function>  "),
    (Xml, "<parameter=units>" + " " * 40_000),
    (Xml, "<parameter=days>" + "1" * 40_000),
    (Xml, "<parameter=mix>" + "[" * 40_000),
    (Literal, "a='b',"),
    (Literal, "[1,"),
    (Literal, "\\'\\n'"),
    (Literal, "a=(("),
    (Literal, "#'\n"),
    (Literal, "a=" + "#" * 40_000),
    (lambda: parser_of("qwen3_coder"), "<tool_call><function=f></tool_call>"),
    (lambda: parser_of("gemma"), "<start_function_call>call:f{a:(<end_function_call>"),
    (lambda: parser_of("mistral"), '[TOOL_CALLS]weather[ARGS]{"a": 1}'),
    (lambda: parser_of("hermes"), '<tool_call>{"name": "f", "arguments": {}}</tool_call>'),
    (lambda: parser_of("tool_code"), "```tool_code\nf(a=1)\n```"),
]


@pytest.mark.parametrize(("make", "pattern"), HOSTILE, ids=[repr(pattern[:32]) for _, pattern in HOSTILE])
def test_hostile_text_costs_work_in_proportion(make: Any, pattern: str) -> None:
    size = 2 * SLICE_CHARS_MAX
    text = (pattern * (4 * size // len(pattern) + 1))[: 4 * size]
    for width in (4 * size, 5):
        few, many = (
            work(make(), [part[i : i + width] for i in range(0, len(part), width)])
            for part in (text[:size], text)
        )
        assert many < 5 * few, "four times the text, at most four times the work and what begins it"
