"""Every syntax of calls, after the examples that its makers published; the templates are our own."""

import itertools
import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.text.argument_readers import LiteralArguments
from penstock.text.tool_formats import TOOL_FORMAT_NAMES, ForcedCalls, tool_format
from penstock.text.tools import (
    CallPiece,
    FirstCallOnly,
    ParsedToolCall,
    Text,
    ToolEvent,
    ToolParser,
    WholeEvent,
    joined,
    kind_of,
)

TEMPLATES = {
    "hermes": "{% for t in tools %}{{ t }}{% endfor %} within <tool_call></tool_call> tags",
    "qwen3_coder": "<tool_call>\\n<function=example>\\n<parameter=key>\\nvalue\\n</parameter>",
    "llama3_json": '{"name": function name, "parameters": dictionary of argument name and its value}',
    "pythonic": "use the format of [func_name1(params_name1=params_value1, ...), func_name2(params)]",
    "mistral": "{{ '[TOOL_CALLS]' + message.tool_calls | tojson }}",
    "phi": "{{ '<|tool_call|>' + calls + '<|/tool_call|>' }}",
    "functools": 'answer with functools[{"name": ...}]',
    "gemma": "<start_function_call>call:{{ name }}",
    "tool_code": "wrap calls in ```tool_code```",
}
SCHEMAS = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"}, "days": {"type": "integer"}, "exact": {"type": "boolean"},
            "units": {"type": "array"},
        },
    },
    "clock": {"type": "object", "properties": {}},
}  # fmt: skip
PARIS = {"city": "Paris", "days": 3}
ROME = {"city": 'Rome "x" {', "exact": True}

# Format -> (text, what comes before the calls, calls).
ANSWERS = {
    "hermes": (
        (
            'Sure.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "days": 3}}'
            "\n</tool_call>\n"
            '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome \\"x\\" {", "exact": true}}'
            "\n</tool_call>"
        ),
        "Sure.",
        [PARIS, ROME],
    ),
    "qwen3_coder": (
        (
            "Sure.\n<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n"
            "<parameter=days>\n3\n"
            "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=weather>\n<parameter=city>\n"
            'Rome "x" {\n'
            "</parameter>\n<parameter=exact>\nTrue\n</parameter>\n</function>\n</tool_call>"
        ),
        "Sure.",
        [PARIS, ROME],
    ),
    "llama3_json": (
        (
            '<|python_tag|>{"name": "weather", "parameters": {"city": "Paris", "days": 3}}; '
            '{"name": "weather", "parameters": {"city": "Rome \\"x\\" {", "exact": true}}'
        ),
        "",
        [PARIS, ROME],
    ),
    "pythonic": (
        "[weather(city='Paris', days=3), weather(city='Rome \"x\" {', exact=True)]",
        "",
        [PARIS, ROME],
    ),
    "mistral": (
        (
            '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Paris", "days": 3}}, '
            '{"arguments": {"city": "Rome \\"x\\" {", "exact": true}, "name": "weather", "id": "a12345678"}]'
        ),
        "",
        [PARIS, ROME],
    ),
    "phi": (
        (
            '<|tool_call|>[{"name": "weather", "arguments": {"city": "Paris", "days": 3}}, '
            '{"name": "weather", "arguments": {"city": "Rome \\"x\\" {", "exact": true}}]<|/tool_call|>'
        ),
        "",
        [PARIS, ROME],
    ),
    "functools": (
        (
            'functools[{"name": "weather", "arguments": {"city": "Paris", "days": 3}}, '
            '{"name": "weather", "arguments": {"city": "Rome \\"x\\" {", "exact": true}}]'
        ),
        "",
        [PARIS, ROME],
    ),
    "gemma": (
        (
            "<start_function_call>call:weather{city:<escape>Paris<escape>,days:3}<end_function_call>"
            '<start_function_call>call:weather{city:<escape>Rome "x" {<escape>,exact:true}<end_function_call>'
        ),
        "",
        [PARIS, ROME],
    ),
    "tool_code": (
        (
            "Sure.\n```tool_code\nweather(city='Paris', days=3)\n"
            "print(weather(city='Rome \"x\" {', exact=True))\n```"
        ),
        "Sure.",
        [PARIS, ROME],
    ),
}
MORE_MISTRAL = '[TOOL_CALLS]weather[ARGS]{"city": "Paris", "days": 3}[TOOL_CALLS]clock[CALL_ID]abc[ARGS]{}'


def read(parser: ToolParser, pieces: Sequence[str]) -> list[WholeEvent]:
    events = [event for piece in pieces for event in parser.push(piece)]
    return joined([*events, *parser.finish()])


def parser_of(name: str) -> ToolParser:
    return tool_format([], name).parser(SCHEMAS)


def test_there_is_an_example_of_each() -> None:
    assert set(ANSWERS) == set(TEMPLATES) == set(TOOL_FORMAT_NAMES)


@pytest.mark.parametrize("name", TOOL_FORMAT_NAMES)
def test_the_template_says_which_it_is(name: str) -> None:
    assert tool_format([TEMPLATES[name]]).name == name
    assert tool_format(["nothing said of tools"]).name == "hermes"
    assert tool_format([TEMPLATES["hermes"]], name).name == name, "the configuration goes before"


FAMILIES = [  # As their makers publish them, in short.
    (
        "llama3_json",  # Llama 4.
        """Respond in the format {"name": function name, "parameters": dictionary of argument name and ..}.
        {{- '<|header_start|>assistant<|header_end|>' }}{{- '<|python_start|>' }}{{- message.content }}""",
    ),
    ("pythonic", "{{- '<|header_start|>' }} Use exact format: [func_name1(param1=value1), func_name2(...)]"),
    (
        "phi",
        "{{ '<|system|>' + message['content'] + '<|tool|>' + message['tools'] + '<|/tool|>' + '<|end|>' }}",
    ),
    (
        "functools",
        "{{ '<|system|>' }} formatted as functools[{\"name\": [function name]}, ...] {{ '<|end|>' }}",
    ),
    ("tool_code", "{{ '<start_of_turn>' + role }}{{ message['content'] | trim }}<end_of_turn>"),  # Gemma 3.
    ("pythonic", "{{ '<start_of_turn>' }} Example Format: [func_name1(params_name1=params_value1)]"),
    ("gemma", "{{ '<start_of_turn>' }}<start_function_call>call:{{ name }}"),
    ("hermes", "{{ '<start_of_turn>' }}<tool_call>{{ call | tojson }}</tool_call>"),
]


@pytest.mark.parametrize(("name", "template"), FAMILIES)
def test_families_are_known_by_their_templates(name: str, template: str) -> None:
    assert tool_format([template]).name == name


def test_llama_4_may_mark_its_call() -> None:
    text = '<|python_start|>{"name": "clock", "parameters": {}}<|python_end|>'
    assert read(parser_of("llama3_json"), list(text)) == [ParsedToolCall(0, "clock", "{}")]


@pytest.mark.parametrize("name", TOOL_FORMAT_NAMES)
def test_published_examples(name: str) -> None:
    text, before, calls = ANSWERS[name]
    for pieces in ([text], list(text)):
        events = read(parser_of(name), pieces)
        assert [event.text for event in events if isinstance(event, Text)] == ([before] if before else [])
        found = [event for event in events if not isinstance(event, Text)]
        assert [(event.index, event.name) for event in found] == [(0, "weather"), (1, "weather")]
        assert [json.loads(event.arguments_json) for event in found] == calls


@pytest.mark.parametrize("name", TOOL_FORMAT_NAMES)
@settings(max_examples=25)
@given(data=st.data())
def test_any_split_gives_the_same_events(name: str, data: st.DataObject) -> None:
    text = data.draw(
        st.sampled_from([ANSWERS[name][0], ANSWERS[name][0][:-9], MORE_MISTRAL, "plain [x] {y}: "])
    )
    text = (
        data.draw(st.sampled_from(["", " ", "Well, "]))
        + text
        + data.draw(st.sampled_from(["", "\n", " End."]))
    )
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=12))
    edges = [0, *sorted(cuts), len(text)]
    whole = read(parser_of(name), [text])
    assert read(parser_of(name), [text[a:b] for a, b in itertools.pairwise(edges)]) == whole
    assert read(parser_of(name), list(text)) == whole


@pytest.mark.parametrize("name", TOOL_FORMAT_NAMES)
@pytest.mark.parametrize(
    "text", ["Plain prose, with {braces} and [lists].", '{"name": "x", "age": 3}', "[1, 2]"]
)
def test_what_is_no_call_stays_text(name: str, text: str) -> None:
    assert read(parser_of(name), list(text)) == [Text(text)]


def test_mistrals_newer_way() -> None:
    events = read(parser_of("mistral"), list(MORE_MISTRAL))
    assert [(event.name, json.loads(event.arguments_json)) for event in events] == [
        ("weather", PARIS),
        ("clock", {}),
    ]


VALUES_OF_ALL = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**6), 10**6) | st.sampled_from([0.5, -12.25])
    | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r`<"), max_size=12),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.from_regex(r"[A-Za-z_]\w{0,5}", fullmatch=True), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
ARGUMENTS = st.dictionaries(st.from_regex(r"[a-z]{1,6}_", fullmatch=True), VALUES_OF_ALL, max_size=4)


def gemma(value: Any) -> str:
    if isinstance(value, str):
        return f"<escape>{value}<escape>"
    if isinstance(value, list):
        return f"[{','.join(map(gemma, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{gemma(each)}' for key, each in value.items())}}}"
    return json.dumps(value)


def spelled(name: str, calls: dict[str, dict[str, Any]]) -> str:
    """Calls as a model writes them in this syntax."""
    each_json = [json.dumps({"name": tool, "arguments": each}) for tool, each in calls.items()]
    python = [f"{tool}({', '.join(f'{k}={v!r}' for k, v in each.items())})" for tool, each in calls.items()]
    in_a_row, lines, xml = ", ".join(each_json), "\n".join(python), ""
    for tool, each in calls.items():
        said = (v if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for v in each.values())
        parts = (f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in zip(each, said, strict=True))
        xml += f"<tool_call>\n<function={tool}>\n{''.join(parts)}</function>\n</tool_call>\n"
    gemmas = (f"call:{tool}{gemma(each)}" for tool, each in calls.items())
    return {
        "hermes": "".join(f"<tool_call>\n{each}\n</tool_call>\n" for each in each_json),
        "phi": f"<|tool_call|>[{in_a_row}]<|/tool_call|>",
        "functools": f"functools[{in_a_row}]",
        "mistral": f"[TOOL_CALLS] [{in_a_row}]",
        "llama3_json": "; ".join(each_json),
        "pythonic": f"[{', '.join(python)}]",
        "tool_code": f"```tool_code\n{lines}\n```",
        "gemma": "".join(f"<start_function_call>{each}<end_function_call>" for each in gemmas),
        "qwen3_coder": xml,
    }[name]


def schemas_of(calls: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {
        tool: {"properties": {key: {"type": kind_of(value)} for key, value in each.items()}}
        for tool, each in calls.items()
    }


@pytest.mark.parametrize("name", TOOL_FORMAT_NAMES)
@settings(max_examples=15)
@given(calls=st.dictionaries(st.sampled_from(["weather", "clock"]), ARGUMENTS, min_size=1), data=st.data())
def test_streamed_deltas_are_the_whole_and_are_never_taken_back(
    name: str, calls: dict[str, dict[str, Any]], data: st.DataObject
) -> None:
    text = spelled(name, calls)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=12))
    parser, reported = tool_format([], name).parser(schemas_of(calls)), list[ToolEvent]()
    for a, b in itertools.pairwise([0, *sorted(cuts), len(text)]):
        reported += parser.push(text[a:b])
    reported += parser.finish()
    pieces = [each for each in reported if isinstance(each, CallPiece)]
    assert pieces == reported, "the calls are all that there is"
    for i, (tool, arguments) in enumerate(calls.items()):
        first, *others = (each for each in pieces if each.index == i)
        assert first == CallPiece(i, tool), "the name comes first, alone"
        assert json.loads("".join(each.arguments for each in others)) == arguments
        assert all(each.arguments and not each.name for each in others)
    assert joined(reported) == read(tool_format([], name).parser(schemas_of(calls)), [text])


@pytest.mark.parametrize("name", TOOL_FORMAT_NAMES)
def test_arguments_are_told_while_they_are_written(name: str) -> None:
    line = "A line that is part of a long text, and of a list. "
    calls = {"clock": {"text_": line * 40, "list_": [line] * 40}}
    text, reported_at = spelled(name, calls), 0
    parser = tool_format([], name).parser(schemas_of(calls))
    for i in range(0, len(text), 7):
        if parser.push(text[i : i + 7]):
            reported_at = i
        assert i - reported_at < 70, "no more than the head of the call, or a mark, was held back"


JUNK = st.sampled_from([*"[]{}()'\",:= \\\n1aé", "\\u12", "\\ud83d", "'''", "<escape>", "None"])


@settings(max_examples=30)
@given(text=st.lists(JUNK, max_size=24).map("".join), opened=st.sampled_from("{["))
def test_arguments_that_end_are_json_whatever_is_written(text: str, opened: str) -> None:
    one, each, text = LiteralArguments(opened), LiteralArguments(opened), f"{text} "
    written, rest = one.push(text)
    pieces, behind = list[str](), ""
    for i, char in enumerate(text):
        piece, after = each.push(char)
        pieces.append(piece)
        if after is not None:
            behind = after + text[i + 1 :]
            break
    assert "".join(pieces) == written
    assert rest in (None, behind)
    json.loads(written if rest is not None else written + one.complete())


def test_calls_behind_the_first_are_dropped() -> None:
    events = read(FirstCallOnly(parser_of("llama3_json")), [ANSWERS["llama3_json"][0]])
    assert [json.loads(event.arguments_json) for event in events] == [PARIS]


FORCED = [
    ("f", '{"a": 1}', [("f", '{"a": 1}')]),
    ("f", '{"a": ', [("f", '{"a": ')]),
    (
        "",
        '[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    ("", '[{"name": "f", "arguments": {"a": ', [("f", '{"a": ')]),
]


@pytest.mark.parametrize(("name", "text", "calls"), FORCED)
def test_forced_calls(name: str, text: str, calls: list[tuple[str, str]]) -> None:
    for pieces in ([text], list(text)):
        events = read(ForcedCalls(name), pieces)
        assert [(event.name, event.arguments_json) for event in events] == calls


@pytest.mark.parametrize("name", ["f", ""])
def test_what_was_forced_and_is_no_call_is_text(name: str) -> None:
    assert read(ForcedCalls(name), list("sorry")) == [Text("sorry")]


HOSTILE = {
    "qwen3_coder": [
        "<tool_call><function=weather><parameter=days>{}</parameter></function></tool_call>",
        '<tool_call><function=weather><parameter=units>["{}"]</parameter></function></tool_call>',
    ],
    "gemma": [
        "<start_function_call>call:weather{{days:{}}}<end_function_call>",
        '<start_function_call>call:weather{{days:["{}"]}}<end_function_call>',
    ],
    "pythonic": ["[weather(days={})]", "[weather(days='{}')]"],
    "tool_code": ["```tool_code\nweather(days={})\n```", "```tool_code\nweather(days='{}')\n```"],
    "llama3_json": [
        '{{"name": "weather", "parameters": {{"days": {}}}}}',
        '{{"name": "{}", "parameters": {{}}}}',
    ],
}
VALUES = [
    "NaN",
    "-Infinity",
    "1e999",
    "1e999j",
    "\\ud83d",
    "\\ud83d\\ude00",
    "{1}",
    "b'x'",
    "9" * 5000,
    "[" * 3000 + "]" * 3000,
]


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("value", VALUES)
def test_arguments_are_json_that_any_client_reads(name: str, value: str) -> None:
    for form in HOSTILE[name]:
        for event in read(parser_of(name), list(form.format(value))):
            msgspec.json.encode(event)
            if (
                not isinstance(event, Text) and name != "llama3_json"
            ):  # Those arguments go on as they were written.
                found = msgspec.json.decode(event.arguments_json)
                assert "\ud83d" not in str(found)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("functools", "Use functools.reduce, or functools [x]."),
        ("mistral", "Look: \n [TOOL_CALLS] is a mark"),
        ("llama3_json", "Look: \n\n<|python_tag|>print(1)"),
        ("functools", "See \n functools[0]"),
    ],
)
def test_a_mark_without_a_call_is_text_to_the_character(name: str, text: str) -> None:
    for pieces in ([text], list(text)):
        assert read(parser_of(name), pieces) == [Text(text)]


def test_prose_about_a_mark_does_not_hide_a_call() -> None:
    text = "I use functools for that. " + ANSWERS["functools"][0]
    events = read(parser_of("functools"), list(text))
    assert events[0] == Text("I use functools for that.")
    assert len(events) == 3
