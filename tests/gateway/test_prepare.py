"""Sampling parameters of a request: the checkpoint's defaults come before neutral ones, and long lists are
bounded and read once.
"""

import types

import pytest

from penstock.errors import InvalidRequest
from penstock.gateway.api.job import NO_HINTS, Job, requests_of, shaped
from penstock.gateway.models.prepare import check_sampling, sampling
from penstock.gateway.models.served import filled
from penstock.protocol.needs import NO_CONSTRAINT
from penstock.protocol.openai import ChatRequest
from penstock.protocol.parameters import RareChatRequest, RareCompletionRequest
from penstock.text.reasoning import ReasoningMarks
from penstock.text.tokenizer import GenerationDefaults


@pytest.mark.parametrize(
    ("asked", "default", "expected"),
    [(None, None, 1.0), (None, 1.05, 1.05), (1.0, 1.05, 1.0), (0.5, None, 0.5)],
)
def test_repetition_penalty(asked: float | None, default: float | None, expected: float) -> None:
    defaults = filled(GenerationDefaults(repetition_penalty=default))
    model = types.SimpleNamespace(tokenizer=types.SimpleNamespace(eos_ids=(1,)), defaults=defaults)
    request = ChatRequest(model="m", messages=[], repetition_penalty=asked)
    found = sampling(model, request, max_tokens=4, logprobs=None, seed=0)
    assert found.repetition_penalty == expected


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("bad_words", ["x" * 257], "at most 256 characters"),
        ("bad_words", ["x" * 256] * 33, "at most 8192 characters together"),
        ("bad_words", ["x"] * 257, "at most 256 words"),
        ("bad_words", ["x", " "], "none of them empty"),
        ("allowed_token_ids", [5] * 11, "1 to 10 token ids"),
        ("allowed_token_ids", [], "1 to 10 token ids"),
    ],
)
def test_lists_of_words_and_tokens_are_bounded(field: str, value: list[object], says: str) -> None:
    request = RareChatRequest(model="m", messages=[], **{field: value})
    with pytest.raises(InvalidRequest, match=says) as refused:
        check_sampling(request, 4, types.SimpleNamespace(vocab_size=10))
    assert refused.value.param == field


class Tokens:
    """Counts what it is given to tokenize."""

    defaults, eos_ids = GenerationDefaults(), (1,)

    def __init__(self) -> None:
        self.asked: list[str] = []

    def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        self.asked.append(text)
        return tuple(text.encode())


def test_bad_words_are_tokenized_once_for_all_choices() -> None:
    tokens = Tokens()
    caller = types.SimpleNamespace(tenant=types.SimpleNamespace(weight=1, cache_salt=b"", fairness_key=""))
    job = Job(
        exchange=types.SimpleNamespace(),
        caller=caller,
        model=types.SimpleNamespace(
            tokenizer=tokens,
            defaults=filled(GenerationDefaults()),
            public_prefixes=types.SimpleNamespace(num_tokens_of=lambda _: 0),
            workers=types.SimpleNamespace(adapter_digests={}),
        ),
        adapter="",
        request=RareCompletionRequest(model="m", prompt="x", n=3, seed=7, bad_words=["a", "b"]),
        answer_id="cmpl-1",
        prompts=[(1,), (2, 3)],
        max_tokens=[4, 5],
        logprobs=None,
        needs=frozenset(),
        body=b"",
    )
    found = [each.sampling for each in requests_of(job, NO_HINTS, 1)]
    assert tokens.asked == ["a", " a", "b", " b"]
    assert {each.bad_words for each in found} == {((97,), (98,))}
    assert [each.max_tokens for each in found] == [4, 4, 4, 5, 5, 5]
    assert [each.seed for each in found[:3]] == [each.seed for each in found[3:]]
    assert len({each.seed for each in found}) == 3


def test_a_bound_on_the_reasoning_above_the_answers_is_the_answers() -> None:
    tokenizer = types.SimpleNamespace(decode=lambda ids, skip_special_tokens: "")
    model = types.SimpleNamespace(
        reasoning=ReasoningMarks("<think>", "</think>"),
        tokenizer=tokenizer,
        tool_format=types.SimpleNamespace(call_mark=""),
    )
    request = RareChatRequest(model="m", messages=[], thinking_token_budget=1 << 64)
    grammar = shaped(model, request, (1,), 8, NO_CONSTRAINT).grammar
    assert grammar is not None
    assert grammar.begins_within == 8
