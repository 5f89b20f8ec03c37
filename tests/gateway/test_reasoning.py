"""Reasoning and tool calls as the official client sees them, whole and streamed."""

import json

import msgspec
import openai
import pytest

from penstock.text.tool_blocks import HermesToolParser
from penstock.types import ENGINE_CAPABILITIES

HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
ANSWER = ["<think>", "Let me", " think.\n", "</think>", "\n\n", "Yes", "."]
LLAMA = '{"name": "add", "parameters": {"a": 1, "b": [2]}}; {"name": "add", "parameters": {}}'


@pytest.fixture(scope="module")
def reasoner(kit):
    """Its template knows the marks and opens the section where it is asked to."""
    template = kit.TEMPLATE + "{% if opens %}<think>\n{% endif %}{# </think> #}"
    running = kit.RunningGateway(kit.make_config(), _script, template=template, words=tuple(ANSWER))
    yield running
    running.stop()


def _script(request):
    return iter(ANSWER[1:] if request.sampling.seed == 1 else ANSWER)


@pytest.fixture
def talk(reasoner, kit):
    with kit.openai_client(reasoner) as client:
        yield client


@pytest.mark.parametrize("opens", [False, True])
def test_reasoning_is_told_apart(talk, opens) -> None:
    asked = {
        "model": "tiny", "messages": HI, "seed": int(opens),
        "extra_body": {"chat_template_kwargs": {"opens": opens}},
    }  # fmt: skip
    answer = talk.chat.completions.create(**asked)
    message = answer.choices[0].message
    assert message.content == "Yes."
    assert message.reasoning_content == message.reasoning == "Let me think."
    counted = answer.usage.completion_tokens_details.reasoning_tokens
    assert counted == (3 if opens else 4)
    chunks = list(talk.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(delta.model_extra.get("reasoning_content", "") for delta in deltas) == "Let me think."
    assert "".join(delta.content or "" for delta in deltas) == "Yes."
    assert chunks[-1].usage.completion_tokens_details.reasoning_tokens == counted


def test_reasoning_can_be_left_out(talk) -> None:
    for stream in (False, True):
        answer = talk.chat.completions.create(
            model="tiny", messages=HI, stream=stream, extra_body={"include_reasoning": False}
        )
        if stream:
            assert not any("reasoning" in chunk.choices[0].delta.model_extra for chunk in answer)
        else:
            assert "reasoning" not in answer.choices[0].message.model_extra
            assert answer.usage.completion_tokens_details.reasoning_tokens == 4


def test_a_model_that_does_not_reason_says_nothing_of_it(client) -> None:
    answer = client.chat.completions.create(model="tiny", messages=HI, max_tokens=2)
    assert answer.usage.completion_tokens_details is None


def test_earlier_reasoning_reaches_the_template_by_either_name(start, kit) -> None:
    template = "{% for m in messages %}{{ m.reasoning_content or '' }}{{ m.content }}{% endfor %}"
    running = start(template=template)
    with kit.openai_client(running) as client:
        for name in ("reasoning", "reasoning_content"):
            said = {"role": "assistant", "content": "Yes.", name: "Hm. "}
            used = client.chat.completions.create(model="tiny", messages=[said], max_tokens=1).usage
            assert used.prompt_tokens == len("Hm. Yes.")


def test_a_streamed_call_names_itself_before_its_arguments(start, kit) -> None:
    running = start(script=lambda _request: iter(LLAMA), template=kit.TEMPLATE + "{# <|python_tag|> #}")
    with kit.openai_client(running) as client:
        chunks = list(client.chat.completions.create(model="tiny", messages=HI, tools=[TOOL], stream=True))
        pieces = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
        first = [piece for piece in pieces if piece.index == 0]
        assert (first[0].function.name, first[0].type) == ("add", "function")
        assert not first[0].function.arguments
        assert first[0].id
        assert len(first) > 5
        assert all(piece.id is None and piece.function.name is None for piece in first[1:])
        assert json.loads("".join(piece.function.arguments or "" for piece in first)) == {"a": 1, "b": [2]}
        assert [piece.index for piece in pieces if piece.id] == [0, 1]
        assert chunks[-1].choices[0].finish_reason == "tool_calls"
        one = client.chat.completions.create(
            model="tiny", messages=HI, tools=[TOOL], parallel_tool_calls=False
        ).choices[0]
        assert [call.function.name for call in one.message.tool_calls] == ["add"]
        assert one.finish_reason == "tool_calls"


@pytest.mark.parametrize("place", ["push", "finish"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_parser_that_fails_ends_its_own_answer_with_an_error(
    start, kit, monkeypatch, place, stream
) -> None:
    running = start(script=lambda _request: iter(["Hm", "."]))
    with kit.openai_client(running) as client:
        asked = {"model": "tiny", "messages": HI, "stream": stream}

        def fail(*_args):
            raise ValueError("no such syntax")

        monkeypatch.setattr(HermesToolParser, place, fail)
        with pytest.raises(openai.APIError) as failed:
            list(client.chat.completions.create(**asked, tools=[TOOL]))
        assert "no such syntax" not in str(failed.value)
        answer = client.chat.completions.create(**asked)
        assert stream or answer.choices[0].message.content == "Hm."
    assert "an answer could not be passed on" in running.log_text.getvalue()
    assert "no such syntax" in running.log_text.getvalue()


def test_special_marks_are_shown_to_the_parser_only(start, kit) -> None:
    """Plain completions have no reasoning to cut out, so their text has no special tokens."""
    marks = ("<|START_THINKING|>", "<|END_THINKING|>")
    running = start(template=kit.TEMPLATE + f"{{# {marks[1]} #}}", words=marks)
    with kit.openai_client(running) as client:
        client.chat.completions.create(model="tiny", messages=HI, max_tokens=1)
        client.completions.create(model="tiny", prompt="a", max_tokens=1)
    assert [request.skip_special_tokens for request in running.requests] == [False, True]


def test_code_in_front_of_a_call_does_not_end_the_answer(start, kit) -> None:
    words = ["```py", "\nx\n", "```", "\n", "```tool", "_code\n", "add(a=1)", "\n```"]
    running = start(script=lambda _request: iter(words), template=kit.TEMPLATE + "{# ```tool_code #}")
    with kit.openai_client(running) as client:
        message = (
            client.chat.completions.create(model="tiny", messages=HI, tools=[TOOL], parallel_tool_calls=False)
            .choices[0]
            .message
        )
    assert message.content == "```py\nx\n```"
    assert [(call.function.name, call.function.arguments) for call in message.tool_calls] == [
        ("add", '{"a": 1}')
    ]


def test_a_thinker_that_writes_of_calls_goes_on(start, kit) -> None:
    words = ["<think>", "Not </tool_call>", "</think>", "Yes."]
    running = start(script=lambda _request: iter(words), template=kit.TEMPLATE + "{# </think> #}")
    with kit.openai_client(running) as client:
        answer = client.chat.completions.create(
            model="tiny", messages=HI, tools=[TOOL], parallel_tool_calls=False
        )
    assert answer.choices[0].message.content == "Yes."


def test_thoughts_come_before_text_with_log_probabilities(start, kit) -> None:
    words = ["<think>", "Hm", " so</think>Yes", "."]
    running = start(script=lambda _request: iter(words), template=kit.TEMPLATE + "{# </think> #}")
    with kit.openai_client(running) as client:
        chunks = list(client.chat.completions.create(model="tiny", messages=HI, stream=True, logprobs=True))
    shown = [chunk.choices[0].delta for chunk in chunks]
    said = [delta.content or delta.model_extra.get("reasoning") for delta in shown]
    assert [each for each in said if each] == ["Hm", " so", "Yes", "."]
    tokens = [
        item.token
        for chunk in chunks
        if chunk.choices[0].logprobs
        for item in chunk.choices[0].logprobs.content
    ]
    assert tokens == words


@pytest.mark.parametrize(
    ("added", "mark"), [("", "<tool_call>"), ("{# [func_name1( #}", r"(?:add)\(")], ids=["hermes", "pythonic"]
)
def test_strict_tools_are_held_to_their_schemas(kit, added: str, mark: str) -> None:
    class Able(kit.RunningGateway):
        async def make_backends(self):
            made = await super().make_backends()
            status = made["tiny"].status
            status.info = msgspec.structs.replace(status.info, capabilities=ENGINE_CAPABILITIES)
            return made

    strict = {"type": "function", "function": {**TOOL["function"], "strict": True}}
    running = Able(kit.make_config(), template=kit.TEMPLATE + added)
    try:
        with kit.openai_client(running) as client:
            asked = {"model": "tiny", "messages": HI, "max_tokens": 1}
            client.chat.completions.create(**asked, tools=[strict])
            client.chat.completions.create(**asked, tools=[TOOL])
            client.chat.completions.create(**asked, tools=[TOOL], tool_choice="none")
    finally:
        running.stop()
    first, second, third = (request.constraint.as_grammar() for request in running.requests)
    assert mark in first.call_mark
    assert second == msgspec.structs.replace(first, is_optional=True)
    assert third is None
