"""The Responses API with the official client: whole, streamed, tools, reasoning, and what is kept."""

import json

import msgspec
import openai
import pydantic
import pytest

from penstock.gateway.api import generate
from penstock.gateway.api.job import TOKEN_BYTES
from penstock.protocol.responses_chat import ITEMS_MAX, chat_of, parse_response
from penstock.text.tool_blocks import HermesToolParser
from penstock.types import ENGINE_CAPABILITIES

TOOL = {
    "type": "function", "name": "add", "description": "Add.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}  # fmt: skip
CALL = ["Let me see. ", "<tool_", 'call>{"name": "add", ', '"arguments": {"a": 1}}</tool_call>']
PROMPT = "<|user|>hi<|assistant|>"


class Point(pydantic.BaseModel):
    x: int
    y: int


@pytest.fixture(scope="module")
def make(kit):
    """Gateways that answer with these words."""
    running = []

    def of(*words, config=None, **options):
        running.append(kit.RunningGateway(config or kit.make_config(), lambda _: iter(words), **options))
        return running[-1]

    yield of
    for gateway in running:
        gateway.stop()


@pytest.fixture(scope="module")
def hello(make):
    return make("Hel", "lo ", "水", "!")


@pytest.fixture
def talk(hello, kit):
    with kit.openai_client(hello) as client:
        yield client


def prompt_of(gateway) -> str:
    """The prompt that the last request became."""
    ids = gateway.requests[-1].prompt_token_ids
    return gateway.tokenizer.decode(ids, skip_special_tokens=False)


def test_a_response(talk, hello):
    answer = talk.responses.create(model="tiny", input="hi", metadata={"a": "b"}, max_output_tokens=50)
    assert answer.id.startswith("resp_")
    assert (answer.object, answer.status, answer.model) == ("response", "completed", "tiny")
    assert answer.output_text == "Hello 水!"
    (item,) = answer.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "completed")
    assert prompt_of(hello) == PROMPT
    assert answer.usage.input_tokens == len(PROMPT)
    assert answer.usage.output_tokens == 4
    assert answer.usage.total_tokens == len(PROMPT) + 4
    assert answer.usage.input_tokens_details.cached_tokens == 0
    assert (answer.metadata, answer.max_output_tokens, answer.tools) == ({"a": "b"}, 50, [])
    assert answer.error is answer.incomplete_details is None
    assert answer.temperature == 0.7  # The model's own default.


KINDS = [
    "response.created", "response.in_progress", "response.output_item.added",
    "response.content_part.added", *["response.output_text.delta"] * 4, "response.output_text.done",
    "response.content_part.done", "response.output_item.done", "response.completed",
]  # fmt: skip


def test_a_streamed_response(talk):
    events = list(talk.responses.create(model="tiny", input="hi", stream=True))
    assert [event.type for event in events] == KINDS
    assert [event.sequence_number for event in events] == list(range(len(KINDS)))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == "Hello 水!"
    first, last = events[0].response, events[-1].response
    assert (first.status, first.output, first.usage) == ("in_progress", [], None)
    assert (last.id, last.status, last.output_text) == (first.id, "completed", "Hello 水!")
    assert last.usage.output_tokens == 4
    assert {e.item_id for e in events if hasattr(e, "item_id")} == {last.output[0].id}


def test_the_stream_helper_builds_the_same_answer(talk):
    with talk.responses.stream(model="tiny", input="hi") as stream:
        final = stream.get_final_response()
    assert (final.output_text, final.status) == ("Hello 水!", "completed")


def text_part(text):
    return {"type": "input_text", "text": text}


def test_items_become_messages(talk, hello):
    talk.responses.create(
        model="tiny",
        instructions="Be brief.",
        input=[
            {"role": "developer", "content": "No."},
            {"role": "user", "content": [text_part("1"), text_part("2")]},
            {"type": "reasoning", "id": "rs_1", "summary": [],
             "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
             "content": [{"type": "output_text", "text": "yes", "annotations": []}]},
            {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}", "id": "fc_1"},
            {"type": "function_call", "call_id": "c2", "name": "sub", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "3"},
            {"type": "function_call_output", "call_id": "c2", "output": [text_part("4")]},
        ],
    )  # fmt: skip
    assert prompt_of(hello) == (
        "<|system|>Be brief.<|developer|>No.<|user|>1\n2<|assistant|>yes[add][sub]<|tool|>3<|tool|>4"
        "<|assistant|>"
    )


def test_reasoning_in_many_items_is_one_thought():
    thoughts = [{"type": "reasoning", "content": text} for text in "abc"]
    asked = [*thoughts, {"role": "user", "content": "?"}, *thoughts, {"role": "assistant", "content": "!"}]
    chat = chat_of(parse_response(json.dumps({"model": "tiny", "input": asked}).encode()))
    asked, answered = json.loads(chat.body)["messages"]
    assert "reasoning_content" not in asked  # Nothing of the assistant follows it.
    assert answered["reasoning_content"] == "abc"


def test_a_response_that_is_cut_is_incomplete(client):
    for stream in (False, True):
        answer = client.responses.create(model="tiny", input="hi", max_output_tokens=2, stream=stream)
        if stream:
            *_, last = answer
            assert last.type == "response.incomplete"
            answer = last.response
        assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert (answer.output[-1].status, answer.usage.output_tokens) == ("incomplete", 2)


def test_an_answer_of_nothing_is_an_empty_message(make, kit):
    with kit.openai_client(make()) as talk:
        answer = talk.responses.create(model="tiny", input="hi")
        assert (answer.output_text, answer.output[0].type) == ("", "message")
        events = list(talk.responses.create(model="tiny", input="hi", stream=True))
    assert [event.type for event in events] == [kind for kind in KINDS if "delta" not in kind]


# --- tools, reasoning, structured output --------------------------------------------------------------


@pytest.fixture(scope="module")
def caller(make):
    return make(*CALL)


def test_a_call(caller, kit):
    with kit.openai_client(caller) as talk:
        answer = talk.responses.create(model="tiny", input="hi", tools=[TOOL])
        message, call = answer.output
        assert (message.content[0].text, answer.status) == ("Let me see.", "completed")
        assert (call.type, call.name, call.status) == ("function_call", "add", "completed")
        assert json.loads(call.arguments) == {"a": 1}
        assert '"name": "add"' in prompt_of(caller)
        (tool,) = answer.tools
        assert (tool.name, tool.parameters) == ("add", TOOL["parameters"])
        events = list(talk.responses.create(model="tiny", input="hi", tools=[TOOL], stream=True))
    kinds = [event.type.removeprefix("response.") for event in events]
    begin = kinds.index("output_item.added", 4)
    assert kinds[begin:] == [
        "output_item.added", *["function_call_arguments.delta"] * (len(kinds) - begin - 4),
        "function_call_arguments.done", "output_item.done", "completed",
    ]  # fmt: skip
    added, done = events[begin].item, events[-2].item
    assert (added.name, added.arguments, added.status) == ("add", "", "in_progress")
    assert added.call_id == done.call_id
    deltas = [event.delta for event in events if event.type.endswith("arguments.delta")]
    assert json.loads("".join(deltas)) == json.loads(done.arguments) == {"a": 1}
    assert [item.type for item in events[-1].response.output] == ["message", "function_call"]


def test_a_tool_that_nothing_may_call_is_not_shown(caller, kit):
    tools = [TOOL, TOOL | {"name": "sub"}]
    with kit.openai_client(caller) as talk:
        talk.responses.create(model="tiny", input="hi", tools=tools, tool_choice="none")
        assert '"name"' not in prompt_of(caller)
        allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "sub"}]}
        talk.responses.create(model="tiny", input="hi", tools=tools, tool_choice=allowed)
        assert '"name": "sub"' in prompt_of(caller)
        assert '"name": "add"' not in prompt_of(caller)


THOUGHT = ["<think>", "Let me", " think.\n", "</think>", "\n\n", "Yes", "."]


@pytest.fixture(scope="module")
def reasoner(make, kit):
    return make(*THOUGHT, template=kit.TEMPLATE + "{# </think> #}", words=tuple(THOUGHT))


def test_reasoning_is_an_item(reasoner, kit):
    with kit.openai_client(reasoner) as talk:
        answer = talk.responses.create(model="tiny", input="hi", reasoning={"summary": "auto"})
        events = list(talk.responses.create(model="tiny", input="hi", stream=True))
    thought, message = answer.output
    assert (thought.type, thought.content[0].text, thought.summary) == ("reasoning", "Let me think.", [])
    assert message.content[0].text == answer.output_text == "Yes."
    assert answer.usage.output_tokens_details.reasoning_tokens == 4
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[2:4] == ["output_item.added", "content_part.added"]
    done = kinds.index("reasoning_text.done")
    assert set(kinds[4:done]) == {"reasoning_text.delta"}
    assert kinds[done + 1 : done + 3] == ["content_part.done", "output_item.done"]
    assert [item.type for item in events[-1].response.output] == ["reasoning", "message"]


@pytest.fixture(scope="module")
def able(kit):
    """Its worker says that it has what our engine has."""

    class Able(kit.RunningGateway):
        async def make_backends(self):
            made = await super().make_backends()
            status = made["tiny"].status
            status.info = msgspec.structs.replace(status.info, capabilities=ENGINE_CAPABILITIES)
            return made

    running = Able(
        kit.make_config(), lambda _: iter(['{"x": 1, ', '"y": 2}']), template=kit.TEMPLATE + "{# </think> #}"
    )
    yield running
    running.stop()


def test_an_answer_in_the_shape_of_a_model(able, kit):
    with kit.openai_client(able) as talk:
        answer = talk.responses.parse(model="tiny", input="hi", text_format=Point)
        assert answer.output_parsed == Point(x=1, y=2)
        assert json.loads(able.requests[-1].constraint.form)["json"] == answer.text.format.schema_
        with talk.responses.stream(model="tiny", input="hi", text_format=Point) as stream:
            assert stream.get_final_response().output_parsed == Point(x=1, y=2)
        talk.responses.create(model="tiny", input="hi", text={"format": {"type": "json_object"}})
        assert json.loads(able.requests[-1].constraint.form) == {"json_object": True}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "add"}])
def test_a_forced_call(able, kit, choice):
    with kit.openai_client(able) as talk:
        talk.responses.create(model="tiny", input="hi", tools=[TOOL], tool_choice=choice)
    form = json.loads(able.requests[-1].constraint.form)["json"]
    assert form["type"] == ("array" if choice == "required" else "object")


def test_the_effort_bounds_the_reasoning(able, kit):
    with kit.openai_client(able) as talk:
        answer = talk.responses.create(
            model="tiny", input="hi", reasoning={"effort": "low"}, max_output_tokens=50
        )
    assert answer.reasoning.effort == "low"
    assert able.requests[-1].constraint.grammar.begins_within == 10


def test_log_probabilities(talk):
    asked = {"model": "tiny", "input": "hi", "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    answer = talk.responses.create(**asked)
    shown = answer.output[0].content[0].logprobs
    assert [each.token for each in shown] == ["Hel", "lo ", "水", "!"]
    assert [len(each.top_logprobs) for each in shown] == [2, 2, 2, 2]
    events = list(talk.responses.create(**asked, stream=True))
    reported = [
        each.token for event in events if event.type.endswith("text.delta") for each in event.logprobs
    ]
    assert reported == ["Hel", "lo ", "水", "!"]
    assert [each.token for each in events[-1].response.output[0].content[0].logprobs] == reported


def test_parameters_of_a_chat_are_taken_under_their_names(talk, hello):
    talk.responses.create(model="tiny", input="hi", top_p=0.5, extra_body={"seed": 7, "top_k": 3})
    sampling = hello.requests[-1].sampling
    assert (sampling.seed, sampling.top_k, sampling.top_p) == (7, 3, 0.5)


# --- what is kept -------------------------------------------------------------------------------------


def test_a_response_can_be_gone_on_with(talk, hello):
    first = talk.responses.create(model="tiny", input="hi", instructions="Be brief.")
    assert first.store is True
    events = list(
        talk.responses.create(model="tiny", input="and", previous_response_id=first.id, stream=True)
    )
    assert prompt_of(hello) == "<|user|>hi<|assistant|>Hello 水!<|user|>and<|assistant|>"
    second = events[-1].response
    assert second.previous_response_id == first.id
    talk.responses.create(model="tiny", input="more", previous_response_id=second.id)
    said = "<|assistant|>Hello 水!"
    assert prompt_of(hello) == f"<|user|>hi{said}<|user|>and{said}<|user|>more<|assistant|>"
    with pytest.raises(openai.BadRequestError) as found:
        talk.responses.create(model="tiny", input="hi", previous_response_id="resp_0")
    assert (found.value.code, found.value.param) == ("previous_response_not_found", "previous_response_id")


def test_a_response_is_shown_and_deleted(talk):
    made = talk.responses.create(model="tiny", input="hi")
    assert talk.responses.retrieve(made.id).to_dict() == made.to_dict()
    with pytest.raises(openai.BadRequestError, match="Closing the connection"):
        talk.responses.cancel(made.id)
    talk.responses.delete(made.id)
    for ask in (talk.responses.retrieve, talk.responses.delete, talk.responses.cancel):
        with pytest.raises(openai.NotFoundError, match="not found"):
            ask(made.id)


def test_what_is_not_stored_is_not_there(talk):
    made = talk.responses.create(model="tiny", input="hi", store=False)
    assert made.store is False
    with pytest.raises(openai.NotFoundError):
        talk.responses.retrieve(made.id)


def test_no_tenant_sees_another_ones_response(talk, hello, kit):
    made = talk.responses.create(model="tiny", input="secret")
    item = {"type": "item_reference", "id": made.output[0].id}
    with kit.openai_client(hello, key="sk-other-key-0123456789") as other:
        for ask in (other.responses.retrieve, other.responses.delete, other.responses.cancel):
            with pytest.raises(openai.NotFoundError):
                ask(made.id)
        with pytest.raises(openai.BadRequestError, match="not found"):
            other.responses.create(model="tiny", input="hi", previous_response_id=made.id)
        with pytest.raises(openai.BadRequestError, match="not found"):
            other.responses.create(model="tiny", input=[item])
    assert talk.responses.retrieve(made.id).id == made.id


def test_items_may_be_given_by_their_ids(talk, hello):
    made = talk.responses.create(model="tiny", input="hi")
    references = [{"type": "item_reference", "id": item.id} for item in made.output]
    talk.responses.create(
        model="tiny", input=[{"role": "user", "content": "hi"}, *references, {"role": "user", "content": "?"}]
    )
    assert prompt_of(hello) == "<|user|>hi<|assistant|>Hello 水!<|user|>?<|assistant|>"


def test_an_item_is_given_once(talk):
    made = talk.responses.create(model="tiny", input="hi")
    twice = [{"type": "item_reference", "id": made.output[0].id}] * 2
    with pytest.raises(openai.BadRequestError, match="given twice") as found:
        talk.responses.create(model="tiny", input=twice)
    assert found.value.param == "input[1].id"


def test_what_was_stored_counts_as_the_body_of_what_follows(talk, monkeypatch):
    reported, facts_of = [], generate.facts_of

    def facts(*args):
        found = facts_of(*args)
        reported.append(found.num_bytes - TOKEN_BYTES * found.prompt_tokens)
        return found

    monkeypatch.setattr(generate, "facts_of", facts)
    first = talk.responses.create(model="tiny", input="x" * 700)
    talk.responses.create(model="tiny", input="and", previous_response_id=first.id)
    talk.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x" * 700}])
    own, following, chat = reported
    assert 1400 < own < 2100, "the request, and the chat that was made of it"
    assert 700 < following < 1400, "the chat"
    assert 700 < chat < 1400, "the request is the chat"


def test_what_was_stored_makes_no_body_over_the_bound(make, kit):
    bounded = make("a", config=kit.make_config(body_bytes_max=1000))
    with kit.openai_client(bounded) as talk:
        made = [talk.responses.create(model="tiny", input="x" * 600) for _ in range(2)]
        for more in (
            {"input": "x" * 600, "previous_response_id": made[0].id},
            {"input": [{"type": "item_reference", "id": each.output[0].id} for each in made]},
        ):
            with pytest.raises(openai.APIStatusError, match="over the bound of 1000 bytes") as found:
                talk.responses.create(model="tiny", **more)
            assert (found.value.status_code, found.value.code) == (413, "request_too_large")
        assert talk.responses.create(model="tiny", input="x", previous_response_id=made[0].id)


def test_processes_without_a_store_keep_nothing(make, kit):
    config = kit.make_config(processes=2)
    with kit.openai_client(make("a", config=config)) as talk:
        made = talk.responses.create(model="tiny", input="hi")
        assert made.store is False
        for more in ({"store": True}, {"previous_response_id": "resp_0"}):
            with pytest.raises(openai.BadRequestError, match="keeps no responses") as found:
                talk.responses.create(model="tiny", input="hi", **more)
            assert found.value.param == next(iter(more))
        with pytest.raises(openai.NotFoundError, match="keeps no responses"):
            talk.responses.retrieve(made.id)


# --- bad input ----------------------------------------------------------------------------------------

REFUSED = [
    ({"background": True}, "background"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"max_tool_calls": 1}, "max_tool_calls"),
    ({"truncation": "auto"}, "truncation"),
    ({"include": ["file_search_call.results"]}, "include[0]"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [TOOL, {"type": "mcp", "server_label": "x"}]}, "tools[1].type"),
    ({"tool_choice": {"type": "file_search"}}, "tool_choice"),
    ({"input": [{"type": "web_search_call", "id": "x", "status": "completed"}]}, "input[0].type"),
    ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
    ({"reasoning": {"effort": "low"}}, "reasoning.effort"),
    ({"text": {"format": {"type": "json_object"}}}, "text.format"),
    ({"text": {"verbosity": "low"}}, "text.verbosity"),
    ({"service_tier": "flex"}, "service_tier"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
     "input[0].content[0].image_url"),
    ({"input": ["?", {"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]},
     "input[1].content[0]"),
]  # fmt: skip
WRONG = [
    ({"input": []}, "input", None),
    ({"input": 5}, "input", "invalid_type"),
    ({"inptu": "x"}, "inptu", "unknown_parameter"),
    ({"max_output_tokens": 0}, "max_output_tokens", None),
    ({"max_output_tokens": 100000}, "input", "context_length_exceeded"),
    ({"input": "long" * 9000, "instructions": "x"}, "input", "context_length_exceeded"),
    ({"temperature": 3}, "temperature", None),
    ({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
    ({"input": [{"role": "user"}]}, "input[0].content", "missing_required_parameter"),
    ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role", "invalid_value"),
    ({"input": [{"role": "user", "content": [{"type": "x"}]}]}, "input[0].content[0].type", "invalid_value"),
    ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id", None),
    ({"tools": [{"type": "function"}]}, "tools[0].name", "missing_required_parameter"),
    ({"tools": [TOOL | {"name": "a b"}]}, "tools[0].name", None),
    ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice", "invalid_value"),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "tools": []}}, "tool_choice.tools", None),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "tools": [{"name": []}]}},
     "tool_choice.tools", "invalid_value"),
    ({"input": [{"role": "user", "content": "x"}] * (ITEMS_MAX + 1)}, "input", "array_above_max_length"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema", None),
    ({"text": {"format": {"type": "yaml"}}}, "text.format.type", "invalid_value"),
    ({"reasoning": {"effort": 5}}, "reasoning.effort", None),
    ({"input": [{"type": "item_reference", "id": "msg_0_0"}]}, "input[0].id", "item_not_found"),
]  # fmt: skip


def fault_of(client, kind, fields):
    with pytest.raises(kind) as found:
        client.post("/responses", body={"model": "tiny", "input": "hi"} | fields, cast_to=object)
    return found.value


@pytest.mark.parametrize(("fields", "param"), REFUSED)
def test_what_this_server_has_not_is_refused_by_name(client, fields, param):
    if fields.get("input", [None])[0] == "?":
        fields = fields | {"input": [{"role": "user", "content": "x"}, *fields["input"][1:]]}
    error = fault_of(client, openai.BadRequestError, fields)
    assert error.param == param, error
    assert error.code in ("unsupported_parameter", "unsupported_by_model"), error
    assert param.partition("[")[0].partition(".")[0] in error.message or "content" in param


@pytest.mark.parametrize(("fields", "param", "code"), WRONG)
def test_bad_input_is_named_in_the_words_of_this_api(client, fields, param, code):
    error = fault_of(client, openai.BadRequestError, fields)
    assert error.param == param, error
    assert code is None or error.code == code, error
    assert "messages" not in error.message
    assert "max_completion_tokens" not in error.message


def test_other_errors_are_those_of_a_chat(client, gateway, kit):
    assert isinstance(fault_of(client, openai.NotFoundError, {"model": "x"}), openai.NotFoundError)
    with kit.openai_client(gateway, key="wrong") as stranger:
        fault_of(stranger, openai.AuthenticationError, {})


def test_a_worker_that_is_lost_ends_the_stream_with_its_response(start, kit):
    running = start(step_s=0.001)
    running.call(lambda: setattr(running.backend, "resumes", False))
    with kit.openai_client(running) as talk:
        events = []
        for event in talk.responses.create(model="tiny", input="hi", stream=True):
            events.append(event)
            if event.type == "response.output_text.delta" and len(events) < 20:
                running.call(running.backend.lose_worker)
    last = events[-1]
    assert (last.type, last.response.status) == ("response.failed", "failed")
    assert last.response.error.code == "stream_broken"
    assert [event.sequence_number for event in events] == list(range(len(events)))


@pytest.mark.parametrize("place", ["push", "finish"])
def test_a_parser_that_fails_ends_its_own_response(caller, kit, monkeypatch, place):
    def fail(*_args):
        raise ValueError("no such syntax")

    asked = {"model": "tiny", "input": "hi", "tools": [TOOL]}
    with kit.openai_client(caller) as talk:  # Its connection is closed with the stream.
        monkeypatch.setattr(HermesToolParser, place, fail)
        *_, last = talk.responses.create(**asked, stream=True)
        assert (last.type, last.response.error.code) == ("response.failed", "internal_error")
    with kit.openai_client(caller) as talk:
        with pytest.raises(openai.InternalServerError):
            talk.responses.create(**asked)
        assert "no such syntax" not in last.response.error.message
        monkeypatch.undo()
        assert talk.responses.create(**asked).status == "completed"


def test_responses_are_counted_as_such(talk, hello):
    talk.responses.create(model="tiny", input="hi")
    reported = hello.call(hello.metrics.render).decode()
    assert 'penstock_requests_total{endpoint="responses",model="tiny",outcome="stop"}' in reported
