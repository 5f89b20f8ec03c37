"""Every syntax of calls, after the examples that its makers published; the templates are our own."""

import itertools
import json
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.text.tool_formats import TOOL_FORMAT_NAMES, tool_format
from penstock.text.tool_tails import ForcedCalls
from penstock.text.tools import CallPiece, FirstCallOnly, ParsedToolCall, Text, ToolParser, WholeEvent, joined

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
            "Sure.\n<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n"
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


def test_names_come_before_arguments_and_arguments_in_pieces() -> None:
    for name in ("hermes", "llama3_json", "mistral", "functools"):
        parser = parser_of(name)
        events = [event for char in ANSWERS[name][0] for event in parser.push(char)]
        first = [event for event in events if isinstance(event, CallPiece) and event.index == 0]
        assert first[0] == CallPiece(0, "weather")
        assert len(first) > 10, name
        assert all(not event.name for event in first[1:])


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
    "[" * 3000,
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


@settings(max_examples=25)
@given(
    spaces=st.lists(st.sampled_from([0, 1, 255, 256, 257, 600]), min_size=3, max_size=3),
    name=st.sampled_from(TOOL_FORMAT_NAMES),
)
def test_any_split_of_long_white_space_gives_the_same_events(spaces: list[int], name: str) -> None:
    call = ANSWERS[name][0]
    text = " " * spaces[0] + ("a" if spaces[1] else "") + " " * spaces[1] + call + "\n" * spaces[2]
    assert read(parser_of(name), list(text)) == read(parser_of(name), [text])
