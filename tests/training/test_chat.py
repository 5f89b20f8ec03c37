"""The chat template: what it renders, and that training data has exactly the same form."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from training.chat import CHAT_TEMPLATE, TOOLS_TEXT, Message, render, tool_call
from training.conversations import Conversation, conversation
from training.tasks.base import Persona

TOOL = {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def template(messages: list[dict[str, Any]], *, tools: list[Any] | None = None, prompt: bool = False) -> str:
    """The text that `transformers` renders from the template."""
    rendered, _ = render_jinja_template(
        conversations=[messages], tools=tools, chat_template=CHAT_TEMPLATE, add_generation_prompt=prompt
    )
    return rendered[0]


def user(text: str) -> dict[str, Any]:
    """A user message."""
    return {"role": "user", "content": text}


def test_one_turn_without_a_system_message() -> None:
    assert template([user("Hi")], prompt=True) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_system_and_several_turns() -> None:
    messages = [
        {"role": "system", "content": "S"},
        user("A"),
        {"role": "assistant", "content": "B"},
        user("C"),
    ]
    assert template(messages) == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nA<|im_end|>\n"
        "<|im_start|>assistant\nB<|im_end|>\n<|im_start|>user\nC<|im_end|>\n"
    )


@pytest.mark.parametrize("system", ["", "S"])
def test_tools_stand_in_the_system_turn(system: str) -> None:
    messages = ([{"role": "system", "content": system}] if system else []) + [user("Weather?")]
    text = template(messages, tools=[{"type": "function", "function": TOOL}, TOOL])
    opening = system + "\n\n" if system else ""
    line = json.dumps(TOOL)
    assert text.startswith(f"<|im_start|>system\n{opening}{TOOLS_TEXT}\n{line}\n{line}\n</tools><|im_end|>\n")


@pytest.mark.parametrize("arguments", ['{"city": "Paris"}', {"city": "Paris"}])
@pytest.mark.parametrize("content", [None, ""])
def test_tool_calls_in_the_openai_form(arguments: object, content: str | None) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    assistant = {"role": "assistant", "content": content, "tool_calls": [call]}
    assert template([user("W"), assistant]).endswith(f"<|im_start|>assistant\n{CALL}<|im_end|>\n")


def test_text_before_and_between_tool_calls() -> None:
    call = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Paris"}}}
    text = template([user("W"), {"role": "assistant", "content": "Well.", "tool_calls": [call, call]}])
    assert text.endswith(f"<|im_start|>assistant\nWell.\n{CALL}\n{CALL}<|im_end|>\n")


def test_neighbouring_tool_messages_share_one_user_turn() -> None:
    tool = [{"role": "tool", "tool_call_id": str(i), "content": f"R{i}"} for i in range(2)]
    assert template([user("W"), *tool]).endswith(
        "<|im_start|>user\n<tool_response>\nR0\n</tool_response>\n"
        "<tool_response>\nR1\n</tool_response><|im_end|>\n"
    )


def test_content_parts_and_nothing() -> None:
    parts = [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]
    assert template([{"role": "user", "content": parts}]) == "<|im_start|>user\nAB<|im_end|>\n"
    assert template([{"role": "assistant", "content": None}]) == "<|im_start|>assistant\n<|im_end|>\n"
    assert template([]) == ""


def test_braces_and_non_ascii_survive() -> None:
    text = "{{ 1 }} {% x %} <b> & é 漢 🙂"
    assert text in template([user(text)])
    assert "é <&>" in template([user("x")], tools=[{"name": "n", "description": "é <&>"}])


def test_training_text_equals_the_template() -> None:
    rng, persona = Random(1), Persona("penstock-demo", "12M")
    for _ in range(200):
        talk = conversation(rng, persona)
        assert "".join(piece.text for piece in talk.pieces()) == template(
            as_openai(talk), tools=list(talk.tools) or None
        )


def as_openai(talk: Conversation) -> list[dict[str, Any]]:
    """A training conversation as a client would send it."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": talk.system}] if talk.system else []
    for message in talk.messages:
        if message.content.startswith("<tool_call>"):
            call = json.loads(message.content.removeprefix("<tool_call>").removesuffix("</tool_call>"))
            messages.append(
                {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": call}]}
            )
        else:
            messages.append({"role": message.role, "content": message.content})
    return messages


def test_only_assistant_turns_are_learned() -> None:
    messages = [
        Message("user", "Q"),
        Message("assistant", tool_call("f", {})),
        Message("tool", "R"),
        Message("assistant", "A"),
    ]
    learned = [piece.text for piece in render(messages, system="S") if piece.learn]
    assert learned == [tool_call("f", {}) + "<|im_end|>", "A<|im_end|>"]
