"""The official client against every endpoint, streaming and not."""

import asyncio
import itertools
import json
import warnings

import openai
import pytest

from penstock.types import SamplingParams

HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = ["Let me see. ", "<tool_", 'call>{"name": "add", ', '"arguments": {"a": 1, "b": 2}}</tool_call>']


def words(*tokens):
    return lambda request: iter(tokens)


@pytest.fixture(scope="module")
def hello(start_module):
    return start_module(words("Hel", "lo ", "水", "!"))


@pytest.fixture(scope="module")
def start_module(kit):
    running = []

    def make(script):
        running.append(kit.RunningGateway(kit.make_config(), script))
        return running[-1]

    yield make
    for gateway in running:
        gateway.stop()


@pytest.fixture
def talk(hello, kit):
    with kit.openai_client(hello) as client:
        yield client


def test_chat(talk):
    answer = talk.chat.completions.create(model="tiny", messages=HI)
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    assert answer.model == "tiny"
    assert answer.system_fingerprint
    assert answer.system_fingerprint.startswith("fp_")
    (choice,) = answer.choices
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "stop", None)
    assert (choice.message.role, choice.message.content) == ("assistant", "Hello 水!")
    assert choice.message.tool_calls is None
    assert answer.usage.prompt_tokens == len("<|user|>hi<|assistant|>")
    assert answer.usage.completion_tokens == 4
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 4
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert answer._request_id.startswith("req-")


def test_chat_streamed(talk):
    with talk.chat.completions.create(
        model="tiny", messages=HI, stream=True, stream_options={"include_usage": True}
    ) as stream:
        chunks = list(stream)
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.object == "chat.completion.chunk" for chunk in chunks)
    first, *middle, last, usage = chunks
    assert first.choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content for chunk in middle) == "Hello 水!"
    assert last.choices[0].finish_reason == "stop"
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert usage.choices == []
    assert usage.usage.completion_tokens == 4


def test_the_stream_helper_builds_the_same_answer(talk):
    with talk.chat.completions.stream(model="tiny", messages=HI) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "Hello 水!"
    assert final.choices[0].finish_reason == "stop"


def test_several_choices(gateway, client):
    answer = client.chat.completions.create(model="tiny", messages=HI, n=3, max_tokens=2, seed=7)
    again = client.chat.completions.create(model="tiny", messages=HI, n=3, max_tokens=2, seed=7)
    texts = [choice.message.content for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert texts == [choice.message.content for choice in again.choices]
    assert len({request.sampling.seed for request in gateway.requests[-3:]}) == 3
    assert gateway.requests[-3].sampling.seed == 7
    assert answer.usage.completion_tokens == 6
    assert answer.usage.prompt_tokens == len("<|user|>hi<|assistant|>")


def test_several_choices_streamed(client):
    texts, reasons = {0: "", 1: ""}, {}
    for chunk in client.chat.completions.create(
        model="tiny", messages=HI, n=2, max_tokens=3, seed=1, stream=True
    ):
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        reasons[choice.index] = choice.finish_reason
    assert all(texts.values())
    assert reasons == {0: "length", 1: "length"}


def test_stop_strings_and_limits(client):
    answer = client.chat.completions.create(model="tiny", messages=HI, stop=["pipe"], seed=0, max_tokens=50)
    assert answer.choices[0].message.content == "water runs down the "
    assert answer.choices[0].finish_reason == "stop"
    answer = client.chat.completions.create(model="tiny", messages=HI, max_completion_tokens=2)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 2


def test_chat_logprobs(talk):
    answer = talk.chat.completions.create(model="tiny", messages=HI, logprobs=True, top_logprobs=2)
    content = answer.choices[0].logprobs.content
    assert [item.token for item in content] == ["Hel", "lo ", "水", "!"]
    assert content[2].bytes == list("水".encode())
    assert [len(item.top_logprobs) for item in content] == [2, 2, 2, 2]
    chunks = list(talk.chat.completions.create(model="tiny", messages=HI, logprobs=True, stream=True))
    found = [c.choices[0].logprobs.content[0].token for c in chunks if c.choices[0].logprobs]
    assert found == ["Hel", "lo ", "水", "!"]


def test_tool_calls(start_module, kit):
    running = start_module(words(*CALL))
    with kit.openai_client(running) as client:
        answer = client.chat.completions.create(model="tiny", messages=HI, tools=[TOOL])
        (choice,) = answer.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Let me see."
        (call,) = choice.message.tool_calls
        assert (call.type, call.function.name) == ("function", "add")
        assert json.loads(call.function.arguments) == {"a": 1, "b": 2}
        assert call.id.startswith("call-")
        with client.chat.completions.stream(model="tiny", messages=HI, tools=[TOOL]) as stream:
            final = stream.get_final_completion().choices[0]
        assert final.finish_reason == "tool_calls"
        assert final.message.content == "Let me see."
        assert json.loads(final.message.tool_calls[0].function.arguments) == {"a": 1, "b": 2}
        # The conversation goes on with the answer's own message.
        client.chat.completions.create(
            model="tiny",
            messages=[*HI, choice.message, {"role": "tool", "content": "3", "tool_call_id": call.id}],
            tools=[TOOL],
        )
        silent = client.chat.completions.create(model="tiny", messages=HI, tools=[TOOL], tool_choice="none")
        assert silent.choices[0].message.tool_calls is None
        assert "<tool_call>" in silent.choices[0].message.content


def test_logprobs_and_tools_together(start_module, kit):
    with kit.openai_client(start_module(words(*CALL))) as client:
        chunks = list(
            client.chat.completions.create(
                model="tiny", messages=HI, tools=[TOOL], logprobs=True, stream=True
            )
        )
    tokens = [item.token for c in chunks if c.choices[0].logprobs for item in c.choices[0].logprobs.content]
    assert tokens == CALL
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_completions(talk):
    answer = talk.completions.create(model="tiny", prompt="ab")
    assert answer.id.startswith("cmpl-")
    assert answer.object == "text_completion"
    assert answer.choices[0].text == "Hello 水!"
    assert answer.usage.prompt_tokens == 2
    chunks = list(talk.completions.create(model="tiny", prompt="ab", stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "Hello 水!"
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * 4 + ["stop"]


def test_completions_default_to_sixteen_tokens(client):
    answer = client.completions.create(model="tiny", prompt="ab")
    assert answer.usage.completion_tokens == 16
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize("prompt", [["ab", "cde"], [[1, 2], [3, 4, 5]]])
def test_several_prompts(gateway, client, prompt):
    answer = client.completions.create(model="tiny", prompt=prompt, n=2, max_tokens=1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage.prompt_tokens == 5
    assert answer.usage.completion_tokens == 4
    assert [len(r.prompt_token_ids) for r in gateway.requests[-4:]] == [2, 2, 3, 3]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["abc", "a"])
def test_echo_with_logprobs(talk, prompt, stream):
    answer = talk.completions.create(model="tiny", prompt=prompt, echo=True, logprobs=2, stream=stream)
    choices = [chunk.choices[0] for chunk in answer] if stream else [answer.choices[0]]
    assert "".join(choice.text for choice in choices) == prompt + "Hello 水!"
    shown = [choice.logprobs for choice in choices if choice.logprobs]
    assert [item for each in shown for item in each.tokens][-4:] == ["Hel", "lo ", "水", "!"]
    logprobs = [item for each in shown for item in each.token_logprobs]
    assert logprobs == [None] + [-0.5] * (len(prompt) - 1 + 4)
    tops = [item for each in shown for item in each.top_logprobs]
    assert tops[0] is None
    assert [len(top) for top in tops[1:]] == [2] * (len(logprobs) - 1)
    offsets = [item for each in shown for item in each.text_offset]
    assert offsets[0] == 0
    assert offsets == sorted(offsets)


def test_echo(talk):
    assert talk.completions.create(model="tiny", prompt="ab", echo=True).choices[0].text == "abHello 水!"
    ids = [65 - 33, 66 - 33]
    text = talk.completions.create(model="tiny", prompt=ids, echo=True).choices[0].text
    assert text == "ABHello 水!"
    chunks = talk.completions.create(model="tiny", prompt="ab", echo=True, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "abHello 水!"


def test_completion_logprobs(talk):
    logprobs = talk.completions.create(model="tiny", prompt="a", logprobs=2).choices[0].logprobs
    assert logprobs.tokens == ["Hel", "lo ", "水", "!"]
    assert logprobs.text_offset == [0, 3, 6, 7]
    assert logprobs.token_logprobs == [-0.5] * 4
    assert [len(top) for top in logprobs.top_logprobs] == [2] * 4
    chunks = list(talk.completions.create(model="tiny", prompt="a", logprobs=0, stream=True))
    offsets = [c.choices[0].logprobs.text_offset for c in chunks if c.choices[0].logprobs]
    assert list(itertools.chain(*offsets)) == [0, 3, 6, 7]


def test_models(client):
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == ("tiny", "model", "penstock")
    assert client.models.retrieve("tiny") == model
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other/model")
    assert caught.value.code == "model_not_found"


def test_what_the_request_leaves_open(gateway, client):
    client.chat.completions.create(model="tiny", messages=HI, max_tokens=1)
    left_open = gateway.requests[-1].sampling
    assert (left_open.temperature, left_open.top_k, left_open.top_p) == (0.7, 20, 1.0)
    assert left_open.stop_token_ids == (256,)
    client.chat.completions.create(
        model="tiny",
        messages=HI,
        max_tokens=1,
        temperature=0,
        top_p=0,
        extra_body={"top_k": -1, "min_p": 0.1, "ignore_eos": True, "stop_token_ids": [7]},
    )
    asked = gateway.requests[-1].sampling
    assert (asked.temperature, asked.top_k, asked.top_p, asked.min_p) == (0, 1, 1.0, 0.1)
    assert asked.stop_token_ids == (7,)
    neutral = SamplingParams(
        temperature=0.7, top_k=20, stop_token_ids=(256,), max_tokens=1, seed=left_open.seed
    )
    assert left_open == neutral


def test_penalties_bias_and_minimum_length_reach_the_engine(gateway, client):
    for create, asks in (
        (client.chat.completions.create, {"messages": HI}),
        (client.completions.create, {"prompt": "hi"}),
    ):
        create(
            model="tiny", **asks, max_tokens=9, presence_penalty=0.5, frequency_penalty=-1.5,
            logit_bias={"97": 100, "5": -0.25, "6": 0},
            extra_body={"repetition_penalty": 1.25, "min_tokens": 4},
        )  # fmt: skip
        asked = gateway.requests[-1].sampling
        assert (asked.presence_penalty, asked.frequency_penalty) == (0.5, -1.5)
        assert (asked.repetition_penalty, asked.min_tokens) == (1.25, 4)
        assert asked.logit_bias == ((97, 100.0), (5, -0.25))


def test_chats_may_use_the_rest_of_the_context(start_module, kit):
    running = start_module(words("a"))
    with kit.openai_client(running) as client:
        used = client.chat.completions.create(model="tiny", messages=HI).usage.prompt_tokens
    assert running.requests[-1].sampling.max_tokens == 32_768 - used


def test_callers_have_caches_of_their_own(gateway, client, kit):
    client.completions.create(model="tiny", prompt="a")
    first = gateway.requests[-1]
    with kit.openai_client(gateway, "sk-other-key-0123456789") as other:
        other.completions.create(model="tiny", prompt="a")
    second = gateway.requests[-1]
    assert first.cache_salt != second.cache_salt
    assert first.fairness_key != second.fairness_key
    assert kit.KEY.encode() not in first.cache_salt


def test_errors_have_the_clients_types(gateway, client, kit):
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="tiny", messages=[])
    assert (bad.value.param, bad.value.type) == ("messages", "invalid_request_error")
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="other", messages=HI)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(model="tiny", messages=HI, max_tokens=10**6)
    assert long.value.code == "context_length_exceeded"
    with kit.openai_client(gateway, "wrong") as stranger, pytest.raises(openai.AuthenticationError) as denied:
        stranger.models.list()
    assert denied.value.code == "invalid_api_key"


async def _two_streams(url, key):
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
        stream = await client.chat.completions.create(model="tiny", messages=HI, max_tokens=3, stream=True)
        return [chunk async for chunk in stream]


def test_the_async_client_closes_cleanly(gateway, kit):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chunks = asyncio.run(_two_streams(gateway.url, kit.KEY))
    assert len(chunks) == 5
