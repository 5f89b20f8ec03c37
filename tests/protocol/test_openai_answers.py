"""What any server sends is read leniently; what this server writes is read back whole."""

import msgspec
import pytest

from penstock.protocol.openai import (
    AnswerMessage,
    AnswerToolCall,
    CachedTokens,
    CalledFunction,
    ChatAnswer,
    ChatChoice,
    ChatLogprobs,
    CompletionAnswer,
    CompletionChoice,
    CompletionLogprobs,
    ContentLogprob,
    ErrorAnswer,
    ErrorBody,
    ModelCard,
    ModelList,
    TopLogprob,
    UsageBody,
)
from penstock.protocol.server_answers import (
    decode_chat_event,
    decode_completion_event,
    decode_error,
    decode_models,
    error_text,
    refusal_text,
)

USAGE = UsageBody(
    prompt_tokens=3, completion_tokens=2, total_tokens=5, prompt_tokens_details=CachedTokens(cached_tokens=1)
)
HEAD = {"id": "a", "object": "o", "created": 1, "model": "m", "system_fingerprint": "f"}


def test_content_of_events_and_of_whole_answers() -> None:
    event, whole = (
        decode_chat_event(msgspec.json.encode({"choices": [choice]})).choices[0]
        for choice in ({"delta": {"content": "a"}}, {"message": {"content": "b"}})
    )
    assert (event.content, whole.content) == ("a", "b")
    role = decode_chat_event(b'{"choices": [{"delta": {"role": "assistant", "content": ""}}]}').choices[0]
    assert not role.is_output
    tool = decode_chat_event(b'{"choices": [{"delta": {"tool_calls": [{"index": 0}]}}]}').choices[0]
    assert tool.is_output
    assert not decode_chat_event(b'{"choices": [{"finish_reason": "stop"}]}').choices[0].is_output


def test_events_of_other_servers_may_lack_and_add_anything() -> None:
    event = decode_chat_event(
        b'{"id": null, "x_groq": {}, "choices": [{"index": null, "delta": {}}], "usage": {}}'
    )
    assert event.choices[0].content == ""
    assert event.usage is not None
    assert (event.usage.prompt_tokens, event.usage.cached_tokens) == (None, None)
    assert decode_completion_event(b'{"choices": [{}]}').choices[0].text is None
    listed = decode_models(b'{"data": [{"id": "m", "limits": {"rpm": 3}, "created": null}]}').data
    assert [(each.id, each.max_model_len) for each in listed] == [("m", None)]


def test_a_chat_answer_is_read_as_it_was_written() -> None:
    call = AnswerToolCall(id="c", type="function", function=CalledFunction(name="f", arguments="{}"))
    logprobs = ChatLogprobs([ContentLogprob("é", -0.5, [195, 169], [TopLogprob("e", -1.0, [101])])])
    message = AnswerMessage(content="é", refusal=None, tool_calls=[call])
    choice = ChatChoice(index=0, message=message, logprobs=logprobs, finish_reason="stop")
    read = decode_chat_event(msgspec.json.encode(ChatAnswer(**HEAD, choices=[choice], usage=USAGE)))
    assert (read.model, read.usage) == ("m", USAGE)
    found = read.choices[0]
    assert found.message is not None
    assert (found.content, found.message.tool_calls, found.logprobs) == ("é", [call], logprobs)


def test_a_completion_is_read_as_it_was_written() -> None:
    logprobs = CompletionLogprobs(
        text_offset=[0], token_logprobs=[None], tokens=["a"], top_logprobs=[{"a": -0.5}]
    )
    choice = CompletionChoice(index=0, text="a", logprobs=logprobs, finish_reason="length")
    read = decode_completion_event(
        msgspec.json.encode(CompletionAnswer(**HEAD, choices=[choice], usage=USAGE))
    )
    assert (read.choices[0].text, read.choices[0].logprobs, read.usage) == ("a", logprobs, USAGE)


def test_models_and_errors_are_read_as_they_were_written() -> None:
    card = ModelCard(id="m", created=1, max_model_len=64, parent="base")
    found = decode_models(msgspec.json.encode(ModelList(data=[card]))).data[0]
    assert (found.id, found.max_model_len, found.parent) == ("m", 64, "base")
    body = ErrorBody(message="no", type="invalid_request_error", param="model", code="model_not_found")
    assert decode_error(msgspec.json.encode(ErrorAnswer(body))).error == body
    assert error_text(body) == error_text("no") == "no"
    assert error_text(None) == error_text(ErrorBody()) == ""


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"error": {"message": "no such model"}}', "no such model"),
        (b'{"error": "plain"}', "plain"),
        (b'{"message": "flat"}', "flat"),
        (b"{}", "HTTP 500"),
        (b"<html>oops", "HTTP 500: <html>oops"),
        (b"\xff", "HTTP 500: \ufffd"),
        (b"", "HTTP 500"),
    ],
)
def test_refusal_text(body: bytes, text: str) -> None:
    assert refusal_text(500, body) == text
