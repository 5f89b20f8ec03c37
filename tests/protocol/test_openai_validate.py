import contextlib
import json
from functools import partial

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config.flow import LimitsConfig
from penstock.errors import InvalidRequest
from penstock.protocol import openai_validate
from penstock.protocol.needs import common_needs, constraint_of, rare_needs
from penstock.protocol.openai import DetokenizeRequest, GenerationRequest
from penstock.protocol.openai_validate import (
    decoded,
    parse_chat,
    parse_completion,
    parse_tokenize,
    prompts_of,
)

LIMITS = LimitsConfig()
_detokenize = partial(decoded, msgspec.json.Decoder(DetokenizeRequest))
USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def chat(**fields):
    return {"model": "m", "messages": [USER], **fields}


def completion(**fields):
    return {"model": "m", "prompt": "p", **fields}


def deep(levels):
    value = 1
    for _ in range(levels):
        value = {"a": value}
    return value


def message(**fields):
    return chat(messages=[fields])


ACCEPTED = [
    chat(),
    chat(temperature=0, top_p=1, n=2, seed=-5, stop="x", max_tokens=1),
    chat(stop=["a", "b", "c", "d"], max_completion_tokens=5),
    chat(stream=True, stream_options={"include_usage": True}),
    chat(logprobs=True, top_logprobs=5),
    chat(tools=[TOOL], tool_choice="auto", parallel_tool_calls=False),
    chat(tools=[TOOL], tool_choice="none"),
    chat(user="u", metadata={"a": "b"}, store=True, service_tier="auto", reasoning_effort="low"),
    chat(response_format={"type": "text"}, modalities=["text"], logit_bias={}, frequency_penalty=0),
    chat(top_k=-1, min_p=0.1, ignore_eos=True, stop_token_ids=[1, 2], repetition_penalty=1.0),
    chat(frequency_penalty=2, presence_penalty=-2, repetition_penalty=2, min_tokens=0),
    chat(logit_bias={str(i): 100 - i % 201 for i in range(1024)}),
    chat(temperature=None, n=None, stop=None, tools=None, response_format=None, stream_options=None),
    message(role="user", content=[{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]),
    message(role="developer", content="x", name="n"),
    chat(
        messages=[
            USER,
            {
                "role": "assistant", "content": None, "refusal": None, "annotations": [], "audio": None,
                "function_call": None,
                "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
            },
            {"role": "tool", "content": "42", "tool_call_id": "1"},
        ]
    ),
]  # fmt: skip


@pytest.mark.parametrize("body", ACCEPTED)
def test_chat_is_accepted(body):
    assert parse_chat(json.dumps(body).encode(), LIMITS).model == "m"


REFUSED = [
    ({"messages": [USER]}, "model", "Missing required parameter: 'model'."),
    ({"model": "m"}, "messages", "Missing required parameter: 'messages'."),
    (chat(messages=[]), "messages", "at least one message"),
    (chat(messages=[USER] * 2049), "messages", "at most 2048"),
    (chat(messages={}), "messages", "expected an array, but got an object"),
    (chat(model=7), "model", "expected a string, but got an integer"),
    (chat(model=None), "model", "expected a string, but got null"),
    (chat(temprature=1), "temprature", "supplied: temprature. Did you mean temperature?"),
    (chat(qqq=1), "qqq", "Unrecognized request argument supplied: qqq."),
    (message(role="user", contnt="x"), "messages[0].content", "Missing required parameter"),
    (
        chat(stream=True, stream_options={"include_usag": True}),
        "stream_options.include_usag",
        "include_usage",
    ),
    (message(role="robot", content="x"), "messages[0].role", "invalid enum value 'robot'"),
    (message(role="user"), "messages[0].content", "Missing required parameter: 'messages[0].content'"),
    (message(content="x"), "messages[0].role", "Missing required parameter: 'messages[0].role'"),
    (
        message(role="user", content=5),
        "messages[0].content",
        "a string or an array or null, but got an integer",
    ),
    (message(role="tool", content="x"), "messages[0].tool_call_id", "answer a tool call"),
    (
        message(
            role="user", content="x", tool_calls=[{"id": "1", "function": {"name": "f", "arguments": ""}}]
        ),
        "messages[0].tool_calls",
        "role 'assistant'",
    ),
    (
        message(role="user", content=[{"type": "smell"}]),
        "messages[0].content[0].type",
        "'smell'. Supported values are 'text', 'image_url'",
    ),
    (
        message(role="user", content=[{"type": "input_audio"}]),
        "messages[0].content[0].input_audio",
        "Missing",
    ),
    (message(role="user", content=[{"type": "text"}]), "messages[0].content[0].text", "Missing"),
    (chat(temperature=3), "temperature", "expected a number of at most 2"),
    (chat(temperature=-0.1), "temperature", "expected a number of at least 0"),
    (chat(temperature="hot"), "temperature", "expected a number or null, but got a string"),
    (chat(top_p=1.1), "top_p", "at most 1"),
    (chat(top_p=-1), "top_p", "at least 0"),
    (chat(min_p=2), "min_p", "at most 1"),
    (chat(top_k=-2), "top_k", "at least -1"),
    (chat(n=0), "n", "at least 1"),
    (chat(n=9), "n", "at most 8, but got 9"),
    (chat(n=10**30), "n", "at most 8, but got a larger number"),
    (chat(n=1.5), "n", "expected an integer or null, but got a number"),
    (chat(n=True), "n", "but got a boolean"),
    (chat(max_tokens=0), "max_tokens", "at least 1"),
    (chat(max_tokens=-1), "max_tokens", "at least 1"),
    (chat(max_completion_tokens=0), "max_completion_tokens", "at least 1"),
    (chat(seed=2**63), "seed", "at most"),
    (chat(stop=["a"] * 5), "stop", "at most 4"),
    (chat(stop=[""]), "stop", "empty string"),
    (chat(stop="x" * 257), "stop", "at most 256 characters"),
    (chat(stop=[1]), "stop[0]", "expected a string"),
    (chat(stream_options={}), "stream_options", "only allowed when 'stream' is true"),
    (chat(top_logprobs=2), "top_logprobs", "'logprobs' must be true"),
    (chat(logprobs=True, top_logprobs=21), "top_logprobs", "at most 20"),
    (chat(logprobs=2), "logprobs", "expected a boolean"),
    (chat(frequency_penalty=2.1), "frequency_penalty", "at most 2"),
    (chat(presence_penalty=-3), "presence_penalty", "at least -2"),
    (chat(repetition_penalty=0), "repetition_penalty", "more than 0"),
    (chat(repetition_penalty=2.5), "repetition_penalty", "at most 2"),
    (chat(min_tokens=-1), "min_tokens", "at least 0"),
    (chat(min_tokens=1.5), "min_tokens", "expected an integer"),
    (chat(logit_bias={"5": 101}), "logit_bias[...]", "at most 100"),
    (chat(logit_bias={"5": "x"}), "logit_bias[...]", "expected a number"),
    (chat(logit_bias=[5]), "logit_bias", "expected an object"),
    (chat(logit_bias={"hello": 1}), "logit_bias", "but one is 'hello'"),
    (chat(logit_bias={"-1": 1}), "logit_bias", "but one is '-1'"),
    (chat(logit_bias={"01": 1}), "logit_bias", "but one is '01'"),
    (chat(logit_bias={"\u0661": 1}), "logit_bias", "token ids in decimal digits"),
    (chat(logit_bias={"9" * 5000: 1}), "logit_bias", "token ids in decimal digits"),
    (chat(logit_bias={str(i): 1 for i in range(1025)}), "logit_bias", "1025 entries; at most 1024"),
    (chat(stop_token_ids=list(range(65))), "stop_token_ids", "65 entries; at most 64"),
    (chat(tools=[TOOL], tool_choice={"type": "function"}), "tool_choice.function.name", "Missing"),
    (chat(tool_choice="maybe"), "tool_choice", "Supported values are 'none', 'auto' and 'required'"),
    (chat(tool_choice="required"), "tool_choice", "'tools' must be given"),
    (chat(tools=[{"type": "function"}]), "tools[0].function", "Missing"),
    (chat(tools=[TOOL] * 129), "tools", "at most 128"),
    (
        chat(tools=[{"type": "function", "function": {"name": "f", "parameters": deep(70)}}]),
        "tools[0].function.parameters",
        "more than 64 levels",
    ),
    (chat(response_format={"type": "json_schema"}), "response_format.json_schema", "Missing"),
    (chat(response_format={}), "response_format.type", "Missing"),
    (chat(response_format={"type": "x"} | deep(70)), "response_format", "more than 64 levels"),
    (chat(guided_json=deep(70)), "guided_json", "more than 64 levels"),
    (chat(guided_choice="x"), "guided_choice", "expected an array or null, but got a string"),
    (chat(modalities=["text", "audio"]), "modalities", "text only"),
    (chat(audio={"voice": "x"}), "audio", "not supported"),
    (chat(functions=[]), "functions", "use 'tools'"),
    (chat(web_search_options={}), "web_search_options", "not supported"),
    (
        chat(stream=True, stream_options={"include_obfuscation": True}),
        "stream_options.include_obfuscation",
        "not supported",
    ),
]


@pytest.mark.parametrize(("body", "param", "words"), REFUSED)
def test_chat_is_refused_by_name(body, param, words):
    with pytest.raises(InvalidRequest) as caught:
        rare_needs(parse_chat(json.dumps(body).encode(), LIMITS))
    assert caught.value.param == param
    assert words in str(caught.value)


BROKEN = [
    (b"", "ends too early (byte 0)"),
    (b'{"model":', "ends too early (byte 9)"),
    (b'{"model":"m",}', "(byte 13)"),
    (b"{'model'}", "(byte 1)"),
    (b'{"model":"m","temperature":NaN}', "(byte 27)"),
    (b'{"model":"m","temperature":Infinity}', "(byte 27)"),
    (b'{"model":"m","temperature":-Infinity}', "(byte 28)"),
    (b'{"model":"\xff"}', "not valid UTF-8 (byte 10)"),
    (b'{"model":"\\ud800 and more"}', "surrogate"),
    (b"[]", "must be a JSON object"),
    (b'"text"', "must be a JSON object"),
    (b'{"model":"m","metadata":' + b"[" * 100_000, "nested too deeply"),
    (b"\x00\x01\x02", "(byte 0)"),
]


@pytest.mark.parametrize("parse", [parse_chat, parse_completion])
@pytest.mark.parametrize(("body", "words"), BROKEN)
def test_broken_json_says_where(parse, body, words):
    with pytest.raises(InvalidRequest) as caught:
        parse(body, LIMITS)
    assert words in str(caught.value)
    assert caught.value.code == "invalid_json"


def test_numbers_over_what_a_float_holds():
    with pytest.raises(InvalidRequest) as caught:
        parse_chat(b'{"model":"m","messages":[],"temperature":1e999}', LIMITS)
    assert str(caught.value) == "Invalid 'temperature': the number is out of range."


@pytest.mark.parametrize("number", ["1e999", "1" * 5000])
def test_numbers_in_fields_that_are_passed_over_may_be_of_any_size(number):
    body = f'{{"model":"m","messages":[{{"role":"user","content":"hi","extra":{number}}}]}}'
    assert parse_chat(body.encode(), LIMITS).messages[0].content == "hi"
    twice = body.replace('"extra"', '"role":"user","extra"').encode()
    with pytest.raises(InvalidRequest, match="the key 'role' twice"):
        parse_chat(twice, LIMITS)


def test_a_body_at_the_edge_of_the_decoders_depth_is_refused():
    """Some are read by the decoder of requests and not by that of keys."""
    for levels in range(700, 1000):
        tool = {"type": "function", "function": {"name": "f", "parameters": "DEEP"}}
        text = json.dumps(chat(tools=[tool])).replace('"DEEP"', '{"a":' * levels + "1" + "}" * levels)
        with pytest.raises(InvalidRequest, match="nested"):
            parse_chat(text.encode(), LIMITS)


PROMPTS = [
    ("text", ["text"]),
    (["a", "b"], ["a", "b"]),
    ([1, 2, 3], [[1, 2, 3]]),
    ([[1], [2, 3]], [[1], [2, 3]]),
    ("", [""]),
]


@pytest.mark.parametrize(("prompt", "prompts"), PROMPTS)
def test_prompts_have_four_forms(prompt, prompts):
    request = parse_completion(json.dumps(completion(prompt=prompt)).encode(), LIMITS)
    assert prompts_of(request) == prompts


COMPLETION_REFUSED = [
    ({"model": "m"}, "prompt", "Missing"),
    (completion(prompt=None), "prompt", "but got null"),
    (completion(prompt=[]), "prompt", "must not be empty"),
    (completion(prompt=[[]]), "prompt[0]", "must not be empty"),
    (completion(prompt=["a", [1]]), "prompt", "not a mixture"),
    (completion(prompt=["a", 1]), "prompt", "not a mixture"),
    (completion(prompt=[-1]), "prompt[0]", "at least 0"),
    (completion(prompt=[2**40]), "prompt[0]", "at most"),
    (completion(prompt=["a"] * 65), "prompt", "at most 64"),
    (completion(suffix="x"), "suffix", "not supported"),
    (completion(best_of=2), "best_of", "not supported"),
    (completion(logprobs=21), "logprobs", "at most 20"),
    (completion(logprobs=True), "logprobs", "expected an integer"),
    (completion(mesages=[]), "mesages", "Unrecognized request argument supplied: mesages."),
]


@pytest.mark.parametrize(("body", "param", "words"), COMPLETION_REFUSED)
def test_completion_is_refused_by_name(body, param, words):
    with pytest.raises(InvalidRequest) as caught:
        rare_needs(parse_completion(json.dumps(body).encode(), LIMITS))
    assert caught.value.param == param
    assert words in str(caught.value)


def test_tokenize_takes_one_source():
    assert parse_tokenize(b'{"prompt":"x"}').prompt == "x"
    assert parse_tokenize(json.dumps({"messages": [USER]}).encode()).messages
    for body in (b"{}", json.dumps({"prompt": "x", "messages": [USER]}).encode()):
        with pytest.raises(InvalidRequest, match="exactly one"):
            parse_tokenize(body)


def test_detokenize():
    assert _detokenize(b'{"tokens":[1,2]}').tokens == [1, 2]
    with pytest.raises(InvalidRequest, match=r"tokens\[1\]"):
        _detokenize(b'{"tokens":[1,"2"]}')


def test_tools_are_written_out_as_they_came():
    tool = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"b": 1, "a": 2}}}
    request = parse_chat(json.dumps(chat(tools=[tool])).encode(), LIMITS)
    assert request.tools is not None
    assert json.dumps(msgspec.to_builtins(request.tools[0])) == json.dumps(tool)


# Whatever arrives, the outcome is a request or an InvalidRequest, never another exception.

FIELDS = [
    "model", "messages", "prompt", "n", "stop", "seed", "temperature", "top_p", "tools", "tool_choice",
    "logprobs", "top_logprobs", "stream", "stream_options", "max_tokens", "response_format", "role",
    "content", "type", "function", "tokens", "modalities", "logit_bias", "strict", "name", "parameters",
    "$defs", "json_schema", "schema", "guided_json", "store", "parallel_tool_calls", "structured_outputs",
    "image_url", "allowed_token_ids", "tool_calls", "echo", "best_of", "suffix", "chat_template_kwargs",
]  # fmt: skip
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=True, allow_infinity=True)
    | st.text(max_size=8)
    | st.sampled_from(
        ["user", "tool", "text", "function", "auto", "required", "json_object", "json_schema", "image_url"]
    )
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=4), inner, max_size=5)
    ),
    max_leaves=6,
)
BODIES = st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=8)


def _chat(body):
    return parse_chat(body, LIMITS)


def _completion(body):
    return parse_completion(body, LIMITS)


def parse_all(body):
    for parse in (_chat, _completion, parse_tokenize, _detokenize):
        with contextlib.suppress(InvalidRequest):
            request = parse(body)
            if isinstance(request, GenerationRequest):
                rare_needs(request)
                common_needs(request)
                constraint_of(request)


@given(BODIES)
@settings(max_examples=100, deadline=None)
def test_any_json_is_read_or_refused(body):
    parse_all(json.dumps(body).encode("utf-8", "surrogatepass"))


@given(BODIES.map(lambda body: {"model": "m", "messages": [USER], **body}))
@settings(max_examples=100, deadline=None)
def test_nearly_right_chats_are_read_or_refused(body):
    parse_all(json.dumps(body).encode("utf-8", "surrogatepass"))


@given(st.binary(max_size=64))
@settings(max_examples=100, deadline=None)
def test_any_bytes_are_read_or_refused(body):
    parse_all(body)


def test_the_number_of_choices_is_bounded_by_the_configuration():
    body = json.dumps(chat(n=9)).encode()
    assert parse_chat(body, LimitsConfig(n_max=9)).n == 9
    with pytest.raises(InvalidRequest, match="8"):
        parse_chat(body, LIMITS)


def test_bounds_are_those_of_the_module(monkeypatch):
    ids, nested = {"stop_token_ids": [1, 2, 3]}, {"chat_template_kwargs": deep(4)}
    bodies = [json.dumps(chat(**fields)).encode() for fields in (ids, nested)]
    assert all(parse_chat(body, LIMITS).model == "m" for body in bodies)
    monkeypatch.setattr(openai_validate, "STOP_TOKEN_IDS_MAX", 2)
    monkeypatch.setattr(openai_validate, "JSON_DEPTH_MAX", 3)
    for body, words in zip(bodies, ("3 entries; at most 2", "nested more than 3 levels"), strict=True):
        with pytest.raises(InvalidRequest, match=words):
            parse_chat(body, LIMITS)
