"""What a request leaves open: the checkpoint's own defaults come before neutral ones."""

import types

import pytest

from penstock.gateway.models.prepare import sampling
from penstock.protocol.openai import ChatRequest
from penstock.text.tokenizer import GenerationDefaults


@pytest.mark.parametrize(
    ("asked", "default", "expected"),
    [(None, None, 1.0), (None, 1.05, 1.05), (1.0, 1.05, 1.0), (0.5, None, 0.5)],
)
def test_repetition_penalty(asked: float | None, default: float | None, expected: float) -> None:
    tokenizer = types.SimpleNamespace(defaults=GenerationDefaults(repetition_penalty=default), eos_ids=(1,))
    request = ChatRequest(model="m", messages=[], repetition_penalty=asked)
    found = sampling(types.SimpleNamespace(tokenizer=tokenizer), request, max_tokens=4, logprobs=None, seed=0)
    assert found.repetition_penalty == expected
