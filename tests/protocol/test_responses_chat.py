"""A request to the Responses API becomes a chat; what it cannot be is refused in its own words."""

import json

import pytest

from penstock.errors import ClientError, InvalidRequest, Unsupported
from penstock.protocol.responses_chat import ITEMS_MAX, chat_of, items_of, parse_response

TOOLS = [{"type": "function", "name": name, "parameters": {}} for name in ("add", "sub")]


def chat(**request):
    return json.loads(
        chat_of(parse_response(json.dumps({"model": "m", "input": "hi"} | request).encode())).body
    )


def messages(*items, **request):
    return chat(input=list(items), **request)["messages"]


def refused(**request) -> ClientError:
    with pytest.raises((InvalidRequest, Unsupported)) as caught:
        chat(**request)
    return caught.value


def test_a_string_is_what_the_user_says_after_the_instructions() -> None:
    assert chat(instructions="Be brief.")["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
    ]


def test_reasoning_text_and_calls_of_one_answer_are_one_message() -> None:
    assert messages(
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm. "}]},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "So."}]},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "sub", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "3"},
        {"role": "assistant", "content": [
            {"type": "output_text", "text": "3"}, {"type": "refusal", "refusal": "no"},
        ]},
    ) == [
        {
            "role": "assistant", "content": None, "reasoning_content": "Hm. So.",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}},
                {"id": "c2", "type": "function", "function": {"name": "sub", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
        {"role": "assistant", "content": "3", "refusal": "no"},
    ]  # fmt: skip


def test_reasoning_before_the_user_speaks_again_is_dropped() -> None:
    found = messages(
        {"type": "reasoning", "summary": []},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
    )
    assert found == [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@pytest.mark.parametrize(
    ("part", "becomes"),
    [
        ({"type": "input_text", "text": "a"}, {"type": "text", "text": "a"}),
        ({"type": "refusal", "refusal": "no"}, {"type": "refusal", "refusal": "no"}),
        (
            {"type": "input_image", "image_url": "data:x"},
            {"type": "image_url", "image_url": {"url": "data:x"}},
        ),
        (
            {"type": "input_image", "image_url": "data:x", "detail": "low"},
            {"type": "image_url", "image_url": {"url": "data:x", "detail": "low"}},
        ),
        ({"type": "input_file", "file_id": "f"}, {"type": "file", "file": {"file_id": "f"}}),
        (
            {"type": "input_audio", "input_audio": {"data": "x"}},
            {"type": "input_audio", "input_audio": {"data": "x"}},
        ),
    ],
)
def test_a_part_becomes_the_chats_own(part, becomes) -> None:
    assert messages({"role": "user", "content": [part]}) == [{"role": "user", "content": [becomes]}]


def test_parameters_get_the_chats_words() -> None:
    found = chat(
        max_output_tokens=7, reasoning={"effort": "low", "summary": "auto"}, temperature=0.5, tools=TOOLS,
        text={"verbosity": "low", "format": {"type": "json_schema", "name": "n", "schema": {}}},
        tool_choice="required",
        include=["message.output_text.logprobs"], top_logprobs=2,
    )  # fmt: skip
    del found["messages"]
    assert found == {
        "model": "m", "temperature": 0.5, "max_completion_tokens": 7, "reasoning_effort": "low",
        "verbosity": "low",
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}},
        "tools": [
            {"type": "function", "function": {"name": name, "parameters": {}}} for name in ("add", "sub")
        ],
        "tool_choice": "required", "logprobs": True, "top_logprobs": 2,
    }  # fmt: skip
    assert chat(text={"format": {"type": "text"}})["response_format"] == {"type": "text"}


def test_a_choice_among_fewer_tools_leaves_only_those() -> None:
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "sub"}]}
    found = chat(tools=TOOLS, tool_choice=choice)
    assert ([tool["function"]["name"] for tool in found["tools"]], found["tool_choice"]) == (
        ["sub"],
        "required",
    )
    forced = chat(tools=TOOLS, tool_choice={"type": "function", "name": "add"})["tool_choice"]
    assert forced == {"type": "function", "function": {"name": "add"}}


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        ({"input": [{"type": "message", "content": "a"}]}, "input[0].role"),
        ({"input": [{"role": "judge", "content": "a"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "name": "a", "arguments": ""}]}, "input[0].call_id"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].image_url",
        ),
        ({"input": [{"role": "user", "content": [{"type": "smell"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": "a"}] * (ITEMS_MAX + 1)}, "input"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": TOOLS, "tool_choice": {"type": "mcp"}}, "tool_choice"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "tools": [{"name": "mul"}]}},
            "tool_choice.tools",
        ),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "tools": "add"}}, "tool_choice.tools"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"background": True}, "background"),
    ],
)
def test_what_no_chat_can_be_is_refused_by_its_place(request_, param) -> None:
    error = refused(**request_)
    assert error.param == param
    assert param.rpartition(".")[2] in str(error)


def test_earlier_items_come_first_and_count() -> None:
    request = parse_response(b'{"model": "m", "input": "and now?"}')
    earlier = items_of(parse_response(b'{"model": "m", "input": "before"}'))
    made = chat_of(request, earlier)
    assert [each["content"] for each in json.loads(made.body)["messages"]] == ["before", "and now?"]
    assert list(made.origins) == ["previous_response_id", "input"]
    with pytest.raises(InvalidRequest, match="follows"):
        chat_of(request, earlier * ITEMS_MAX)


@pytest.mark.parametrize(
    ("said", "becomes"),
    [
        ("messages[1].tool_call_id", "input[0].call_id"),
        ("messages[9].content", "input.content"),
        ("tools[0].function.name", "tools[0].name"),
        ("tool_choice.function", "tool_choice"),
        ("response_format.json_schema", "text.format"),
        ("max_completion_tokens", "max_output_tokens"),
        ("reasoning_effort", "reasoning.effort"),
        ("elsewhere.messages", "elsewhere.messages"),
    ],
)
def test_errors_of_the_chat_get_the_requests_words(said, becomes) -> None:
    request = parse_response(
        b'{"model": "m", "instructions": "i", "input": [{"role": "user", "content": "a"}]}'
    )
    error = chat_of(request).renamed(InvalidRequest(f"'{said}' is wrong", param=said))
    assert isinstance(error, InvalidRequest)
    assert (str(error), error.param) == (f"'{becomes}' is wrong", becomes)
    bug = KeyError("messages[1]")
    assert chat_of(request).renamed(bug) is bug
    assert bug.args == ("messages[1]",)
