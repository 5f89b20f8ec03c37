"""The same checks on the tokenizer and template that are really shipped."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.clock import ManualClock
from penstock.config.checkpoints import resolve
from penstock.text.chat import ChatTemplate
from penstock.text.detokenizer import detokenizer
from penstock.text.tokenizer import Tokenizer

CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hello! 你好 👋🏽"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather in Zürich?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Zürich"}}}
            ],
        },
        {"role": "tool", "content": '{"sky": "<clear>"}'},
    ],
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]


@pytest.fixture(scope="module")
def demo() -> Path:
    return resolve("penstock-demo")


@pytest.fixture(scope="module")
def demo_tokenizer(demo: Path) -> Tokenizer:
    return Tokenizer.load(demo)


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("messages", CHATS)
def test_prompts_and_ids_are_those_of_transformers(
    demo: Path, demo_tokenizer: Tokenizer, messages: list[dict[str, Any]], tools: list | None
) -> None:
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast.from_pretrained(demo)
    prompt = theirs.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)
    template = ChatTemplate.load(demo, wall_ns=ManualClock().wall_ns)
    assert template.render(messages, tools=tools) == prompt
    ids = demo_tokenizer.encode(prompt)
    assert list(ids) == theirs(prompt, add_special_tokens=False)["input_ids"]
    assert demo_tokenizer.decode(ids, skip_special_tokens=False) == prompt
    assert demo_tokenizer.decode(ids) == theirs.decode(
        ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )


def test_it_knows_how_to_end(demo_tokenizer: Tokenizer) -> None:
    assert demo_tokenizer.token_id("<|im_end|>") in demo_tokenizer.eos_ids


@given(ids=st.lists(st.integers(0, 4095), max_size=40))
def test_any_tokens_stream_to_the_decoded_text(demo_tokenizer: Tokenizer, ids: list[int]) -> None:
    stream = detokenizer(demo_tokenizer)
    assert "".join(stream.push((token,)) for token in ids) + stream.finish() == demo_tokenizer.decode(ids)
