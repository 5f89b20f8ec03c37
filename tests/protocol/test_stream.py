from pathlib import Path

import msgspec
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletionChunk

from penstock.protocol.openai import (
    AnswerToolCall,
    CachedTokens,
    CalledFunction,
    ChatLogprobs,
    CompletionLogprobs,
    ContentLogprob,
    TopLogprob,
    UsageBody,
)
from penstock.protocol.stream import DONE, ChatChunks, CompletionChunks, StreamHead, event

GOLDEN = Path(__file__).parent / "golden"
NASTY = 'quote " back \\ line\nfeed \u2028 tab\t é 水 🌊 </script> \x00'
USAGE = UsageBody(
    prompt_tokens=3, completion_tokens=2, total_tokens=5, prompt_tokens_details=CachedTokens(cached_tokens=1)
)


def head(*, usage):
    return StreamHead(
        id="chatcmpl-1", created=1_700_000_000, model='m"x', fingerprint="fp_1", include_usage=usage
    )


def chat_events(*, usage):
    chunks = ChatChunks(head(usage=usage), 1)
    logprobs = ChatLogprobs([ContentLogprob("é", -0.5, [195, 169], [TopLogprob("e", -1.0, [101])])])
    call = AnswerToolCall(
        index=0, id="call-1", type="function", function=CalledFunction(name="f", arguments='{"a":1}')
    )
    yield chunks.role()
    yield chunks.text(NASTY)
    yield chunks.text_with_logprobs("é", logprobs)
    yield chunks.tool_call(call)
    yield b'%b"stop"%b' % chunks.finish()
    if usage:
        yield head(usage=True).usage_event(chunks.KIND, USAGE)
    yield DONE


def completion_events(*, usage):
    chunks = CompletionChunks(head(usage=usage), 0)
    logprobs = CompletionLogprobs(
        text_offset=[0], token_logprobs=[-0.5], tokens=["a"], top_logprobs=[{"a": -0.5, "b": -1.5}]
    )
    yield chunks.text(NASTY)
    yield chunks.text_with_logprobs("a", logprobs)
    yield b'%b"length"%b' % chunks.finish()
    if usage:
        yield head(usage=True).usage_event(chunks.KIND, USAGE)
    yield DONE


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize(("name", "events"), [("chat", chat_events), ("completion", completion_events)])
def test_streams_are_byte_for_byte_stable(name, events, usage):
    path = GOLDEN / f"{name}{'_usage' if usage else ''}.sse"
    assert b"".join(events(usage=usage)) == path.read_bytes()


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize(
    ("shape", "events"), [(ChatCompletionChunk, chat_events), (Completion, completion_events)]
)
def test_openai_reads_every_chunk(shape, events, usage):
    for data in events(usage=usage):
        assert data.startswith(b"data: ")
        assert data.endswith(b"\n\n")
        assert data.count(b"\n") == 2
        if data != DONE:
            value = msgspec.json.decode(data[6:])
            if shape is Completion and value["choices"]:
                # The type says otherwise, but OpenAI streams null here until the last chunk.
                value["choices"][0]["finish_reason"] = value["choices"][0]["finish_reason"] or "stop"
            chunk = shape.model_validate(value, strict=True)
            assert chunk.created == 1_700_000_000
            assert chunk.model == 'm"x'
            assert not chunk.model_extra


def test_prefix_and_suffix_make_the_very_same_chunk():
    for chunks in (ChatChunks(head(usage=True), 0), CompletionChunks(head(usage=True), 0)):
        assert chunks.prefix + msgspec.json.encode(NASTY) + chunks.suffix == chunks.text(NASTY)


def test_events():
    assert event(b"x") == b"data: x\n\n"
    assert event(msgspec.json.encode({"a": "\n"})) == b'data: {"a":"\\n"}\n\n'
