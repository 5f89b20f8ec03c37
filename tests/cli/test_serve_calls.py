"""Forced tools and bounded reasoning of a real engine, as the official client sees them."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from served import Server

from penstock.config.checkpoints import resolve

pytest.importorskip("llguidance")
pytestmark = pytest.mark.timeout(300)

DEMO = resolve("penstock-demo-mini")
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
CLOCK = {
    "type": "function",
    "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}},
}
ASKED = {"messages": [{"role": "user", "content": "How is Oslo?"}], "max_tokens": 120, "seed": 3}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """A server with the demo model, and with one of its weights whose template opens a reasoning."""
    place = tmp_path_factory.mktemp("calls")
    shutil.copytree(DEMO, place / "thinker")
    path = place / "thinker" / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["chat_template"] += "{{- '<think>\\n' if add_generation_prompt -}}{# </think> #}"
    path.write_text(json.dumps(config))
    engine = "dtype: float32, threads: 1, kv_memory_bytes: 16777216, max_running: 8"
    (place / "config.yaml").write_text(
        f"models: [{{path: {DEMO}, name: plain, engine: {{{engine}}}}}, "
        f"{{path: {place / 'thinker'}, name: thinker, tool_format: hermes,"
        f" reasoning_marks: '<think> </think>', engine: {{{engine}}}}}]\nserver: {{port: 0}}\n"
    )
    server = Server(Path(place), "-c", str(place / "config.yaml"))
    try:
        server.wait_ready()
        with openai.OpenAI(base_url=f"{server.url}", api_key=server.key or "none", max_retries=0) as made:
            yield made
    finally:
        server.close()


def check(text: str) -> None:
    """Whether it is what `SCHEMA` says."""
    found = json.loads(text)
    assert found.keys() == {"city", "days"}
    assert isinstance(found["city"], str)
    assert len(found["city"]) <= 12
    assert isinstance(found["days"], int)
    assert found["days"] <= 9


@pytest.mark.parametrize("model", ["plain", "thinker"])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_forced_call_obeys_its_schema(client: openai.OpenAI, model: str, choice: object) -> None:
    extra = {"thinking_token_budget": 8} if model == "thinker" else {}
    asked = {"model": model, "tools": [WEATHER, CLOCK], "tool_choice": choice, "extra_body": extra, **ASKED}
    asked["parallel_tool_calls"] = False
    (whole,) = client.chat.completions.create(**asked).choices
    (call,) = whole.message.tool_calls
    assert whole.finish_reason == "tool_calls"
    if choice != "required":
        assert call.function.name == "weather"
    if call.function.name == "weather":
        check(call.function.arguments)
    pieces = [
        piece
        for chunk in client.chat.completions.create(**asked, stream=True)
        for piece in chunk.choices[0].delta.tool_calls or ()
    ]
    assert pieces[0].function.name == call.function.name
    assert "".join(piece.function.arguments or "" for piece in pieces) == call.function.arguments


def test_a_call_that_the_model_begins_obeys_its_schema(client: openai.OpenAI) -> None:
    """A bias makes the model write the mark of a call, its token 3, wherever it may."""
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    for tool in (strict, WEATHER):
        asked = {"model": "plain", "tools": [tool], "logit_bias": {"3": 100}, **ASKED, "max_tokens": 200}
        message = client.chat.completions.create(**asked).choices[0].message
        assert len(message.tool_calls) > 2
        for call in message.tool_calls[:-1]:  # The last one may be cut.
            assert call.function.name == "weather"
            check(call.function.arguments)
    wrong = {"type": "function", "function": {"name": "f", "parameters": {"not": {}}, "strict": True}}
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**asked | {"tools": [wrong]})
    assert refused.value.param == "tools"
    wrong["function"]["strict"] = False
    assert client.chat.completions.create(**asked | {"tools": [wrong]}).choices[0].message


def test_a_schema_begins_behind_the_reasoning(client: openai.OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    answer = client.chat.completions.create(
        model="thinker", response_format=form, extra_body={"thinking_token_budget": 10}, **ASKED
    )
    message = answer.choices[0].message
    check(message.content)
    assert message.reasoning
    assert 10 <= answer.usage.completion_tokens_details.reasoning_tokens <= 20


@pytest.mark.parametrize("stream", [False, True])
def test_a_bounded_reasoning_is_closed(client: openai.OpenAI, stream: bool) -> None:
    for extra in ({"thinking_token_budget": 6}, {"reasoning_effort": "minimal"}):
        answer = client.chat.completions.create(
            model="thinker", stream=stream, extra_body={**extra, "min_tokens": 30},
            **ASKED | {"max_tokens": 60}, **({"stream_options": {"include_usage": True}} if stream else {}),
        )  # fmt: skip
        chunks = list(answer) if stream else [answer]
        reported = [
            choice.delta if stream else choice.message for chunk in chunks for choice in chunk.choices
        ]
        assert "".join(each.model_extra.get("reasoning", None) or "" for each in reported)
        assert "".join(each.content or "" for each in reported)
        assert 6 <= chunks[-1].usage.completion_tokens_details.reasoning_tokens <= 16


def test_a_model_that_does_not_reason_refuses_the_bound(client: openai.OpenAI) -> None:
    for extra in ({"thinking_token_budget": 6}, {"reasoning_effort": "low"}):
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model="plain", extra_body=extra, **ASKED)
        assert (refused.value.code, refused.value.param) == ("unsupported_by_model", next(iter(extra)))
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="thinker", extra_body={"reasoning_effort": "some"}, **ASKED)
    assert (refused.value.code, refused.value.param) == ("invalid_value", "reasoning_effort")
