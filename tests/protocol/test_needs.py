"""What a request needs of its worker, and the shape of the answer it asks for: from whole bodies, as clients
send them.
"""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config.tree import LimitsConfig
from penstock.errors import InvalidRequest, Unsupported
from penstock.protocol.needs import (
    CALLS_MAX,
    NO_CONSTRAINT,
    calls_schema,
    common_needs,
    constraint_of,
    forced_tool,
    rare_needs,
    text_only,
    unsupported,
)
from penstock.protocol.openai import ChatRequest
from penstock.protocol.openai_validate import is_plain, parse_chat, parse_completion
from penstock.protocol.parameters import Need
from penstock.types import Capability

LIMITS = LimitsConfig()
IMAGE = {"type": "image_url", "image_url": {"url": "data:,x"}}
TEXT = {"type": "text", "text": "what is it?"}
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}


def chat(**fields):
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    return parse_chat(json.dumps(body).encode(), LIMITS)


def completion(**fields):
    return parse_completion(json.dumps({"model": "m", "prompt": "p", **fields}).encode(), LIMITS)


def tool(name="f", **function):
    return {"type": "function", "function": {"name": name, **function}}


def named(name):
    return {"type": "function", "function": {"name": name}}


def needed(request) -> list[tuple[Capability, str]]:
    return [(need.capability, need.param) for need in rare_needs(request)]


def test_a_plain_request_needs_nothing() -> None:
    for request in (chat(), chat(tools=[tool()]), chat(tools=[tool()], tool_choice="auto"), completion()):
        assert needed(request) == []
        assert common_needs(request) == []
        assert constraint_of(request) is NO_CONSTRAINT


RARE = [
    (chat(response_format={"type": "json_object"}), Capability.JSON_OBJECT, "response_format"),
    (
        chat(response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}),
        Capability.JSON_SCHEMA,
        "response_format",
    ),
    (chat(guided_regex="a+"), Capability.STRUCTURED_OUTPUTS, "guided_regex"),
    (completion(structured_outputs={"regex": "a"}), Capability.STRUCTURED_OUTPUTS, "structured_outputs"),
    (chat(reasoning_effort="low"), Capability.REASONING_BUDGET, "reasoning_effort"),
    (chat(tools=[tool()], tool_choice="required"), Capability.FORCED_TOOLS, "tool_choice"),
    (chat(tools=[tool()], tool_choice=named("f")), Capability.FORCED_TOOLS, "tool_choice"),
    (chat(tools=[tool()], tool_choice={"type": "custom"}), Capability.PASS_THROUGH, "tool_choice"),
    (chat(tools=[tool(strict=True)]), Capability.STRICT_TOOLS, "tools[0].function.strict"),
    (chat(tools=[tool(), {"type": "web_search"}]), Capability.PASS_THROUGH, "tools[1].type"),
    (
        chat(messages=[{"role": "user", "content": [TEXT, IMAGE]}]),
        Capability.IMAGES,
        "messages[0].content[1]",
    ),
]


@pytest.mark.parametrize(("request_", "capability", "param"), RARE, ids=[str(each[2]) for each in RARE])
def test_a_rare_need_is_found_by_its_parameter(request_, capability, param) -> None:
    assert needed(request_) == [(capability, param)]


def test_what_a_forced_call_needs_covers_strict_tools_and_none_asks_for_none() -> None:
    assert needed(chat(tools=[tool(strict=True)], tool_choice="required")) == [
        (Capability.FORCED_TOOLS, "tool_choice")
    ]
    assert needed(chat(tools=[tool(strict=True)], tool_choice="none")) == []


def test_common_needs_are_log_probabilities_and_penalties() -> None:
    found = common_needs(chat(logprobs=True, presence_penalty=1, min_p=0.1))
    assert {need.capability for need in found} == {
        Capability.LOGPROBS,
        Capability.PRESENCE_PENALTY,
        Capability.MIN_P,
    }
    echoed = common_needs(completion(logprobs=1, echo=True))
    assert [need.capability for need in echoed] == [Capability.LOGPROBS, Capability.ECHO_LOGPROBS]
    assert [need.param for need in common_needs(completion(logprobs=1))] == ["logprobs"]


REFUSED = [
    ({"response_format": {}}, "response_format.type", "Missing required parameter"),
    ({"response_format": {"type": "yaml"}}, "response_format.type", "'yaml'. Supported values are"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "Missing"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}},
        "response_format.json_schema.schema",
        "expected an object",
    ),
    ({"tool_choice": "always", "tools": [tool()]}, "tool_choice", "'always'. Supported values are"),
    ({"tool_choice": "required"}, "tool_choice", "'tools' must be given"),
    ({"tool_choice": {"type": "function"}, "tools": [tool()]}, "tool_choice.function.name", "Missing"),
    (
        {"tool_choice": {"type": "function", "function": {"name": 5}}, "tools": [tool()]},
        "tool_choice.function.name",
        "Missing",
    ),
    ({"tool_choice": named("g"), "tools": [tool()]}, "tool_choice", "not among 'tools'"),
]


@pytest.mark.parametrize(("fields", "param", "words"), REFUSED, ids=[each[2][:30] for each in REFUSED])
def test_what_cannot_be_understood_is_refused_by_name(fields, param, words) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        rare_needs(chat(**fields))
    assert caught.value.param == param


# --- the shape of the answer -----------------------------------------------------------------------


SHAPES = [
    (chat(response_format={"type": "text"}), {}),
    (chat(response_format={"type": "json_object"}), {"json_object": True}),
    (chat(response_format={"type": "json_schema", "json_schema": {"schema": SCHEMA}}), {"json": SCHEMA}),
    (chat(response_format={"type": "json_schema", "json_schema": {"name": "n"}}), {"json": {}}),
    (chat(guided_choice=["a", "b"]), {"choice": ["a", "b"]}),
    (completion(guided_json=SCHEMA), {"json": SCHEMA}),
    (completion(structured_outputs={"grammar": "g"}), {"grammar": "g"}),
]


@pytest.mark.parametrize(("request_", "structured"), SHAPES)
def test_every_spelling_becomes_structured_outputs(request_, structured) -> None:
    assert constraint_of(request_).structured == structured
    assert constraint_of(request_).forced_tool is None


@pytest.mark.parametrize("said", [{"guided_grammar": "g"}, {"structured_outputs": {"grammar": "g"}}])
def test_a_grammar_needs_a_worker_that_takes_grammars(said: dict) -> None:
    """TGI takes patterns and no grammar: where another worker could, it must not get the request."""
    (param,) = said
    needs = rare_needs(completion(**said))
    assert {need.capability for need in needs} == {Capability.STRUCTURED_OUTPUTS, Capability.GRAMMARS}
    assert {need.param for need in needs} == {param}


def test_a_grammar_that_is_null_is_none() -> None:
    needs = rare_needs(completion(structured_outputs={"json": SCHEMA, "grammar": None}))
    assert {need.capability for need in needs} == {Capability.STRUCTURED_OUTPUTS}


def test_fields_of_an_engine_are_kept_beside_the_shape() -> None:
    constraint = constraint_of(chat(bad_words=["x"], allowed_token_ids=[1], guided_regex="a"))
    assert constraint.fields == {"bad_words": ["x"], "allowed_token_ids": [1]}
    assert constraint.structured == {"regex": "a"}
    assert constraint_of(chat(bad_words=["x"])).structured == {}


@pytest.mark.parametrize("said", [{}, {"calls": {"format": "hermes", "tools": []}}])
def test_structured_outputs_that_ask_for_nothing_clients_may_ask_for_are_refused(said: dict) -> None:
    with pytest.raises(InvalidRequest, match="expected one of json") as refused:
        constraint_of(completion(structured_outputs=said))
    assert refused.value.param == "structured_outputs"


def test_a_schema_of_a_forced_call_is_known_to_the_client_as_one_of_the_tools() -> None:
    for choice in ("required", named("g")):
        assert constraint_of(chat(tools=[tool("g", parameters=SCHEMA)], tool_choice=choice)).param == "tools"


def test_two_shapes_for_one_answer_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="'guided_regex' and 'response_format' cannot both") as caught:
        constraint_of(chat(guided_regex="a", response_format={"type": "json_object"}))
    assert caught.value.param == "response_format"


def test_a_named_function_shapes_the_answer_as_its_arguments() -> None:
    request = chat(tools=[tool("f"), tool("g", parameters=SCHEMA)], tool_choice=named("g"))
    assert forced_tool(request) == "g"
    assert constraint_of(request).structured == {"json": SCHEMA}
    assert constraint_of(request).forced_tool == "g"
    bare = chat(tools=[tool("f")], tool_choice=named("f"))
    assert constraint_of(bare).structured == {"json": {"type": "object"}}


def test_required_shapes_the_answer_as_an_array_of_calls() -> None:
    tools = [tool("f", parameters={"type": "object", "$defs": {"a": {"type": "string"}}}), tool("g")]
    request = chat(tools=tools, tool_choice="required", parallel_tool_calls=False)
    schema = constraint_of(request).structured["json"]
    assert forced_tool(request) == ""
    assert (schema["type"], schema["minItems"], schema["maxItems"]) == ("array", 1, 1)
    assert schema["$defs"]["f"] == {"type": "object", "$defs": {"a": {"type": "string"}}}
    names = [call["properties"]["name"]["enum"] for call in schema["items"]["anyOf"]]
    assert names == [["f"], ["g"]]
    one = constraint_of(chat(tools=[tool("g")], tool_choice="required")).structured["json"]
    assert one["items"]["properties"]["name"] == {"enum": ["g"]}
    assert one["maxItems"] == CALLS_MAX
    assert one["$defs"] == {"g": {"type": "object"}}


def test_references_of_a_tool_are_from_its_own_parameters() -> None:
    """Literals, and properties that are named like keywords, stay what they are."""
    parameters = {
        "$id": "https://example.com/",
        "properties": {
            "all": {"$ref": "#"},
            "one": {"items": [{"$ref": "#/definitions/P"}]},
            "there": {"$ref": "https://example.com/#/a"},
            "fixed": {"const": {"$ref": "#"}, "enum": [{"$ref": "#"}]},
            "enum": {"$ref": "#/properties/all"},
            "$ref": {"type": "string"},
        },
        "definitions": {"P": {"type": "integer"}},
    }
    tools = [tool("f", parameters=parameters), tool("f", parameters={"$defs": {"a": 2}, "$ref": "#/$defs/a"})]
    schema = calls_schema(chat(tools=tools))
    assert [call["properties"]["arguments"] for call in schema["items"]["anyOf"]] == [
        {"$ref": "#/$defs/f"}, {"$ref": "#/$defs/f+1"},
    ]  # fmt: skip
    assert schema["$defs"]["f+1"] == {"$defs": {"a": 2}, "$ref": "#/$defs/f+1/$defs/a"}
    changed = {
        "all": {"$ref": "#/$defs/f"},
        "one": {"items": [{"$ref": "#/$defs/f/definitions/P"}]},
        "enum": {"$ref": "#/$defs/f/properties/all"},
    }
    assert schema["$defs"]["f"] == {
        "type": "object",
        "properties": parameters["properties"] | changed,
        "definitions": parameters["definitions"],
    }


PLAIN = [chat(), chat(temperature=0.5, logprobs=True, n=2, stop="x", stream=True)]
BODIES = [*PLAIN, *(each[0] for each in RARE + SHAPES), *(chat(**fields) for fields, _, _ in REFUSED)]


def test_a_plain_chat_has_no_needs_no_form_and_no_media() -> None:
    """`is_plain` stands for all three questions."""
    assert all(map(is_plain, PLAIN))
    for request in BODIES:
        if is_plain(request):
            assert isinstance(request, ChatRequest)
            assert rare_needs(request) == []
            assert constraint_of(request) is NO_CONSTRAINT
            assert not any(isinstance(message.content, list) for message in request.messages)


# --- messages and errors ---------------------------------------------------------------------------


def test_only_text_is_left_for_an_estimate() -> None:
    (mixed,) = chat(messages=[{"role": "user", "content": [TEXT, IMAGE]}]).messages
    assert [part.type for part in text_only(mixed).content] == ["text"]
    (image,) = chat(messages=[{"role": "user", "content": [IMAGE]}]).messages
    assert text_only(image).content == ""
    (plain,) = chat().messages
    assert text_only(plain) is plain


def test_the_error_names_the_first_need_that_the_ablest_worker_lacks() -> None:
    needs = [Need(Capability.LOGPROBS, "logprobs", "'logprobs'"), Need(Capability.IMAGES, "x", "An image")]
    error = unsupported(needs, frozenset({Capability.IMAGES}), "m")
    assert isinstance(error, Unsupported)
    assert error.param == "x"
    assert "An image is not supported by the model 'm'" in str(error)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["function", "f", "required", "x"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "function", "name", "json_schema", "schema"]), inner)
    ),
    max_leaves=8,
)


@given(st.fixed_dictionaries({}, optional={"response_format": JSON, "tool_choice": JSON}), st.booleans())
def test_any_format_and_choice_give_needs_or_are_refused(fields, with_tools) -> None:
    """A request that is let through has a constraint: nothing that a client writes is a bug here."""
    if with_tools:
        fields = {**fields, "tools": [tool("f")]}
    try:
        request = chat(**fields)
    except InvalidRequest:
        return
    try:
        needs = rare_needs(request)
    except (InvalidRequest, Unsupported):
        assert not is_plain(request)
        return
    assert not (needs and is_plain(request))
    constraint_of(request)
