"""A prompt's own log-probabilities, as evaluation harnesses ask for them, with the official client."""

import openai
import pytest

PROMPTS = [[35, 36, 37, 38], [40, 41], [42]]


def test_a_prompt_is_scored_without_an_answer(client) -> None:
    answer = client.completions.create(model="tiny", prompt=PROMPTS, max_tokens=0, echo=True, logprobs=1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    for prompt, choice in zip(PROMPTS, answer.choices, strict=True):
        assert choice.finish_reason == "length"
        assert len(choice.text) == len(prompt)
        assert len(choice.logprobs.tokens) == len(prompt)
        assert choice.logprobs.token_logprobs == [None, *[-0.5] * (len(prompt) - 1)]
    assert answer.usage.prompt_tokens == 7
    assert answer.usage.completion_tokens == 0


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_whole_and_streamed_scores_are_the_same(client, max_tokens) -> None:
    asked = {
        "model": "tiny",
        "prompt": "abc",
        "max_tokens": max_tokens,
        "echo": True,
        "logprobs": 2,
        "seed": 0,
    }
    whole = client.completions.create(**asked).choices[0]
    pieces = [chunk.choices[0] for chunk in client.completions.create(**asked, stream=True)]
    assert "".join(piece.text for piece in pieces) == whole.text
    assert whole.text.startswith("abc")
    assert (whole.text == "abc") is (max_tokens == 0)
    assert pieces[-1].finish_reason == whole.finish_reason == "length"
    shown = [piece.logprobs for piece in pieces if piece.logprobs is not None and piece.logprobs.tokens]
    assert [each for one in shown for each in one.token_logprobs] == whole.logprobs.token_logprobs
    assert len(whole.logprobs.tokens) == 3 + max_tokens


def test_the_top_logprobs_contain_the_token_itself(client) -> None:
    logprobs = (
        client.completions.create(model="tiny", prompt="ab", max_tokens=2, logprobs=0).choices[0].logprobs
    )
    for token, logprob, top in zip(
        logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True
    ):
        assert top == {token: logprob}


def test_prompt_logprobs_as_vllm_gives_them(client) -> None:
    extra = {"prompt_logprobs": 2}
    answer = client.completions.create(model="tiny", prompt=[[35, 36], [37]], max_tokens=1, extra_body=extra)
    first, second = (choice.model_extra["prompt_logprobs"] for choice in answer.choices)
    assert second == [None]
    assert first[0] is None
    assert {entry["rank"] for entry in first[1].values()} == {1, 2}
    assert set(first[1]["1"]) == {"logprob", "rank", "decoded_token"}
    messages = [{"role": "user", "content": "hi"}]
    chat = client.chat.completions.create(model="tiny", messages=messages, max_tokens=1, extra_body=extra)
    assert len(chat.model_extra["prompt_logprobs"]) == chat.usage.prompt_tokens
    plain = client.chat.completions.create(model="tiny", messages=messages, max_tokens=1)
    assert "prompt_logprobs" not in plain.model_extra


def test_more_prompt_logprobs_than_echoed_ones(client) -> None:
    answer = client.completions.create(
        model="tiny", prompt="abc", max_tokens=1, echo=True, logprobs=1, extra_body={"prompt_logprobs": 3}
    ).choices[0]
    assert [len(top) for top in answer.logprobs.top_logprobs[1:]] == [1, 1, 1]
    assert [len(entry) for entry in answer.model_extra["prompt_logprobs"][1:]] == [3, 3]


BAD = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 0, "logprobs": 1}, "max_tokens"),
    ({"max_tokens": -1, "echo": True}, "max_tokens"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
]


@pytest.mark.parametrize(("fields", "param"), BAD)
def test_what_cannot_be_scored_is_refused_by_name(client, fields, param) -> None:
    fields = dict(fields)
    extra = {name: fields.pop(name) for name in list(fields) if name == "prompt_logprobs"}
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="tiny", prompt="ab", extra_body=extra, **fields)
    assert (refused.value.param, refused.value.code) == (param, "invalid_value")


def test_a_chat_answers_at_least_one_token(client) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "x"}], max_tokens=0
        )
    assert refused.value.param == "max_tokens"
