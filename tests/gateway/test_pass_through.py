"""Chats that a provider answers, through the whole gateway: text, tool calls, usage, errors."""

import types
from collections.abc import Iterator

import openai
import pytest
from engine_stand_ins import text_of

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CALLS = [{"name": "look", "arguments": '{"at": "the sky"}'}, {"name": "look", "arguments": "{}"}]
ASK = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def provided(kit: types.SimpleNamespace) -> Iterator[types.SimpleNamespace]:
    """A gateway whose only worker is a provider, the provider, and a client."""

    running = kit.BeforeProvider(kit.make_config())
    with kit.openai_client(running) as client:
        yield types.SimpleNamespace(running=running, provider=running.provider, client=client)
    running.stop()


@pytest.fixture(autouse=True)
def well_behaved(provided: types.SimpleNamespace) -> None:
    provided.provider.faults.__init__()
    provided.provider.calls = None
    provided.provider.ends_with = "length"
    provided.provider.requests.clear()


def test_text_comes_through_and_the_providers_usage_is_told(provided: types.SimpleNamespace) -> None:
    whole = provided.client.chat.completions.create(**ASK, max_tokens=6)
    assert whole.choices[0].message.content == text_of(0, 6)
    assert (whole.choices[0].finish_reason, whole.model) == ("length", "tiny")
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (77, 6)
    chunks = list(
        provided.client.chat.completions.create(
            **ASK,
            max_tokens=6,
            stream=True,
            stream_options={"include_usage": True},
            logprobs=True,
            top_logprobs=1,
        )
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text_of(0, 6)
    assert chunks[-1].usage.prompt_tokens == 77
    logprobs = [
        each
        for chunk in chunks
        if chunk.choices and chunk.choices[0].logprobs
        for each in chunk.choices[0].logprobs.content
    ]
    assert len(logprobs) == 6
    assert provided.provider.requests[-1].json["messages"] == ASK["messages"]


def test_an_answer_that_a_provider_withholds_says_so(provided: types.SimpleNamespace) -> None:
    provided.provider.ends_with = "content_filter"
    client, ask = provided.client, {"model": ASK["model"], "input": "hi", "max_output_tokens": 6}
    assert client.chat.completions.create(**ASK).choices[0].finish_reason == "content_filter"
    reasons = [chunk.choices[0].finish_reason for chunk in client.chat.completions.create(**ASK, stream=True)]
    assert reasons[-1] == "content_filter"
    last = list(client.responses.create(**ask, stream=True))[-1]
    assert last.type == "response.incomplete"
    for response in (last.response, client.responses.create(**ask)):
        assert (response.status, response.incomplete_details.reason) == ("incomplete", "content_filter")
        assert [item.status for item in response.output] == ["incomplete"]


def test_tool_calls_come_back_with_the_providers_own_ids(provided: types.SimpleNamespace) -> None:
    provided.provider.calls = CALLS
    whole = provided.client.chat.completions.create(**ASK, tools=[TOOL])
    message = whole.choices[0].message
    assert whole.choices[0].finish_reason == "tool_calls"
    assert message.content is None
    assert [(call.id, call.function.name, call.function.arguments) for call in message.tool_calls] == [
        ("call_0", "look", '{"at": "the sky"}'),
        ("call_1", "look", "{}"),
    ]
    calls: dict[int, list[str]] = {}
    reasons = []
    for chunk in provided.client.chat.completions.create(**ASK, tools=[TOOL], stream=True):
        reasons.append(chunk.choices[0].finish_reason)
        for call in chunk.choices[0].delta.tool_calls or ():
            found = calls.setdefault(call.index, ["", "", ""])
            found[0] += call.id or ""
            found[1] += call.function.name or ""
            found[2] += call.function.arguments or ""
    assert calls == {0: ["call_0", "look", '{"at": "the sky"}'], 1: ["call_1", "look", "{}"]}
    assert reasons[-1] == "tool_calls"
    assert provided.provider.requests[-1].json["tools"] == [TOOL]


def test_the_answer_to_a_call_goes_back_to_the_provider(provided: types.SimpleNamespace) -> None:
    call = {"id": "call_0", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = [
        *ASK["messages"],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_0", "content": "blue"},
    ]
    provided.client.chat.completions.create(model="tiny", messages=messages, tools=[TOOL], max_tokens=2)
    sent = provided.provider.requests[-1].json["messages"]
    assert sent[1]["tool_calls"] == [call]
    assert sent[2] == messages[2]


def test_what_the_provider_refuses_is_the_clients_to_change(provided: types.SimpleNamespace) -> None:
    body = (
        b'{"error": {"message": "temperature: not with this model", "type": "invalid_request_error", '
        b'"param": "temperature"}}'
    )
    provided.provider.faults.status = (400, {"content-type": "application/json"}, body)
    with pytest.raises(openai.BadRequestError, match="not with this model") as caught:
        provided.client.chat.completions.create(**ASK)
    assert caught.value.param == "temperature"
    provided.provider.faults.status = (429, {"retry-after": "3"}, b"")
    with pytest.raises(openai.RateLimitError):
        provided.client.with_options(max_retries=0).chat.completions.create(**ASK)
