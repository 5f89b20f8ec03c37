"""Calls of tools under a grammar: whatever is drawn, the parser of the syntax reads calls that obey."""

import json
import random
import re
from functools import cache
from typing import Any

import jsonschema
import msgspec
import numpy as np
import pytest

pytest.importorskip("llguidance")

from demo_grammars import tokens

from penstock.engine.grammar.answer import GrammarAnswer
from penstock.engine.grammar.compiler import CompiledGrammar, compile_grammar
from penstock.errors import InvalidRequest
from penstock.protocol.worker_parts import Grammar
from penstock.text.tool_formats import TOOL_FORMAT_NAMES, tool_format
from penstock.text.tools import ParsedToolCall, Text, WholeEvent, joined, kind_of

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 2, "maxLength": 8},
        "unit": {"enum": ["C", "F\u00b0 'or' \"so\""]},
        "days": {"type": "integer", "minimum": 1, "maximum": 16},
        "exact": {"type": ["boolean", "null"]},
        "near": {"$ref": "#/$defs/Place"},
        "limits": {"type": "array", "items": {"type": "number"}, "minItems": 1, "maxItems": 2},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "fixed": {"const": 7},
    },
    "required": ["city", "unit", "near"],
    "additionalProperties": False,
    "$defs": {
        "Place": {
            "type": "object",
            "properties": {
                "at": {"type": "number"},
                "tags": {"type": "array", "items": {"type": "null"}, "maxItems": 1},
            },
            "required": ["at"],
            "additionalProperties": False,
        }
    },
}  # fmt: skip
TOOLS = {"weather": WEATHER, "clock.now": {"type": "object", "properties": {}}}
BEGINS = {  # What a model writes, as the format's marks are, before the grammar holds.
    "hermes": "Sure. <tool_call>",
    "qwen3_coder": "Sure. <tool_call>",
    "phi": "Sure. <|tool_call|>",
    "functools": "functools[",
    "mistral": "[TOOL_CALLS]",
    "llama3_json": '{"name" : "weather"',
    "pythonic": "[weather(",
    "gemma": "Sure. <start_function_call>",
    "tool_code": "Sure. ```tool_code",
}


@cache
def compiled(name: str, *, several: bool = True, tools: str = json.dumps(TOOLS)) -> CompiledGrammar:
    return compile_tools(name, json.loads(tools), several=several)


def compile_tools(name: str, tools: dict[str, Any], *, several: bool = True) -> CompiledGrammar:
    syntax = tool_format([], name)
    offered = [{"name": each, "parameters": schema} for each, schema in tools.items()]
    form = {"calls": {"format": name, "tools": offered, "several": several}}
    return compile_grammar(
        Grammar(
            form=msgspec.json.encode(form),
            call_mark=syntax.call_mark(tools),
            ends_with_calls=syntax.ends_answer,
        ),
        tokens(),
    )


def written(grammar: CompiledGrammar, begins: str, seed: int, *, limit: int = 1500) -> tuple[str, bool]:
    """What random draws make of an answer that begins so, and whether its calls are whole."""
    rng, answer = random.Random(seed), GrammarAnswer(grammar, ())
    tokenizer, ids = tokens().tokenizer, list[int]()

    def take(token_id: int) -> None:
        ids.append(token_id)
        answer.take(token_id)
        ids.extend(answer.take_forced())

    for token_id in tokenizer.encode(begins):
        take(token_id)
    assert answer.error is None
    assert answer.wants_mask or answer.is_complete, "the mark of a call was seen"
    while answer.wants_mask and len(ids) < limit:
        mask = np.frombuffer(answer.matcher.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
        assert len(allowed)
        closing = np.intersect1d(allowed, closers())
        token_id = int(rng.choice(closing if len(closing) and rng.random() < 0.5 else allowed))
        if token_id in tokens().eos_ids:
            return tokenizer.decode(ids, skip_special_tokens=False), True
        take(token_id)
    return tokenizer.decode(ids, skip_special_tokens=False), not answer.wants_mask


@cache
def closers() -> list[int]:
    """Tokens that end something, so that answers are short."""
    known = tokens().tokenizer.token_bytes
    return [i for i in range(4096) if i in tokens().eos_ids or (known(i) and known(i)[-1:] in b"\"'}])>\n")]


def read(name: str, text: str, *, cut: int = 7, tools: dict[str, Any] = TOOLS) -> list[WholeEvent]:
    syntax = tool_format([], name)
    parser = syntax.parser(tools, re.compile(syntax.call_mark(tools)))
    events = [event for i in range(0, len(text), cut) for event in parser.push(text[i : i + cut])]
    return joined([*events, *parser.finish()])


@pytest.mark.parametrize("name", TOOL_FORMAT_NAMES)
def test_whatever_is_drawn_behind_the_mark_are_calls_that_obey(name: str) -> None:
    whole = 0
    for seed in range(6):
        text, is_whole = written(compiled(name), BEGINS[name], seed)
        whole += is_whole
        events = read(name, text, cut=2 * seed + 1)
        calls = [event for event in events if isinstance(event, ParsedToolCall)]
        if not is_whole:
            continue
        assert calls, text
        for call in calls:
            jsonschema.validate(json.loads(call.arguments_json), TOOLS[call.name])
        assert [each.text for each in events if isinstance(each, Text)] in ([], ["Sure."]), text
    assert whole >= 3


@pytest.mark.parametrize("name", ["phi", "functools", "mistral", "llama3_json", "pythonic", "tool_code"])
def test_without_parallel_calls_there_is_one(name: str) -> None:
    one = compiled(name, several=False)
    for seed in range(2):
        text, is_whole = written(one, BEGINS[name], seed)
        assert not is_whole or sum(isinstance(event, ParsedToolCall) for event in read(name, text)) == 1


FREE = ["Sure.", "I looked at [1], {2} and <tool> and ```python\nx = 1\n```.", '{"name": "Ann", "age": 3}',
        "[1] says so", "weather(", '[{"name": "weather"']  # fmt: skip


@pytest.mark.parametrize("name", TOOL_FORMAT_NAMES)
def test_text_is_free(name: str) -> None:
    for text in FREE:
        answer = GrammarAnswer(compiled(name), tokens().tokenizer.encode(text))
        assert not answer.wants_mask
        assert not answer.is_complete


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama3_json", '{"parameters": {"city": 1}, "name": "weather"}'),
        ("llama3_json", '[{"name": "weather", "parameters": {"city": 1}}]'),
        ("pythonic", "[other(), weather(city=1)]"),
        ("pythonic", "[ \n \n \n \n \n weather(city=1)]"),
    ],
)
def test_what_no_grammar_held_is_no_call_of_a_strict_tool(name: str, text: str) -> None:
    assert read(name, text) == [Text(text)]
    free = tool_format([], name).parser(TOOLS, None)
    assert any(isinstance(event, ParsedToolCall) for event in joined([*free.push(text), *free.finish()]))


def test_an_answer_that_ends_with_its_calls_is_over() -> None:
    text = 'functools[{"name": "clock.now", "arguments": {}}]'
    for several, is_complete in ((False, True), (True, True)):
        answer = GrammarAnswer(compiled("functools", several=several), tokens().tokenizer.encode(text))
        assert answer.is_complete is is_complete
    again = GrammarAnswer(
        compiled("hermes"), tokens().tokenizer.encode('<tool_call>{"name": "clock.now", "arguments": {}}')
    )
    assert not again.is_complete, "text may follow, and other calls"
    assert not again.wants_mask


@pytest.mark.parametrize("name", ["pythonic", "tool_code", "gemma", "qwen3_coder"])
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "format": "date"},
        {"type": "string", "pattern": "a"},
        {"anyOf": [{"type": "integer", "minimum": 3}, {"type": "string"}], "not": {}},
        {"type": "array", "items": {"type": "string"}, "not": {}},
        {"$ref": "#/$defs/none", "not": {}},
    ],
)
def test_what_cannot_be_enforced_is_refused_by_keyword(name: str, schema: dict[str, Any]) -> None:
    tools = {"f": {"type": "object", "properties": {"a": schema}}}
    with pytest.raises(InvalidRequest, match=r"at /tools/0/function/parameters/.*: "):
        compile_tools(name, tools)


def test_a_refusal_says_where_and_nothing_of_the_grammar_around_the_schema() -> None:
    tools = {"f": {"type": "object", "properties": {"a": {"type": "string", "not": {}}}}}
    with pytest.raises(InvalidRequest) as refused:
        compile_tools("hermes", tools)
    where = "/tools/0/function/parameters/properties/a/not"
    assert str(refused.value) == f'the schema cannot be enforced at {where}: Unimplemented keys: ["not"]'


@pytest.mark.parametrize("name", ["pythonic", "tool_code", "gemma", "qwen3_coder"])
def test_a_schema_may_refer_to_itself(name: str) -> None:
    node = {
        "type": "object",
        "properties": {"value": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}},
        "required": ["value"],
        "additionalProperties": False,
    }
    tools = {
        "weather": {
            "type": "object",
            "properties": {"list": {"$ref": "#/$defs/node"}},
            "required": ["list"],
            "$defs": {"node": node},
        }
    }
    grammar = compiled(name, tools=json.dumps(tools))
    for seed in range(6):
        text, is_whole = written(grammar, BEGINS[name], seed, limit=400)
        calls = [each for each in read(name, text, tools=tools) if isinstance(each, ParsedToolCall)]
        for call in calls if is_whole else ():
            jsonschema.validate(json.loads(call.arguments_json), tools["weather"])


ANY_PLACES = {
    "any": {"description": "of any type"},
    "text": {"title": "Text, if it is one", "minLength": 3, "default": None},
    "list": {"type": "array", "items": {"title": "of any type"}},
    "open": {"type": "object"},
}


@pytest.mark.parametrize("name", ["pythonic", "tool_code", "gemma", "hermes"])
def test_a_value_without_a_type_is_any_value_of_json(name: str) -> None:
    schema = {"type": "object", "properties": ANY_PLACES, "required": list(ANY_PLACES)}
    tools = {"weather": schema | {"additionalProperties": False}}
    grammar, kinds = compiled(name, several=False, tools=json.dumps(tools)), set[str]()
    for seed in range(10):
        text, is_whole = written(grammar, BEGINS[name], seed, limit=400)
        for call in read(name, text, tools=tools) if is_whole else ():
            if isinstance(call, ParsedToolCall):
                reported = json.loads(call.arguments_json)
                jsonschema.validate(reported, tools["weather"])
                kinds |= {
                    kind_of(each) for each in (reported["any"], *reported["list"], *reported["open"].values())
                }
    assert kinds & {"array", "object"}, "not the plain ones alone"
    assert len(kinds) > 2


def test_names_that_a_syntax_has_no_word_for_are_refused() -> None:
    nothing = {"type": "object", "properties": {}}
    for name, tools in (
        ("pythonic", {"get-weather": nothing}),
        ("pythonic", {"class": nothing}),
        ("tool_code", {"f": {"type": "object", "properties": {"from": {"type": "integer"}}}}),
        ("gemma", {"f": {"type": "object", "properties": {"a b": {"type": "integer"}}}}),
        ("qwen3_coder", {"f": {"type": "object", "properties": {"a>b": {"type": "integer"}}}}),
    ):
        with pytest.raises(InvalidRequest, match="cannot be"):
            compile_tools(name, tools)
