"""What each kind of worker can do, over sockets: requests go where they can be answered, as they came, or are
refused by name.
"""

import json
import types
from collections.abc import Iterator, Sequence

import msgspec
import openai
import pytest
from engine_stand_ins import EOS, OpenAIStandIn, VllmStandIn, until
from fake_backend import FakeBackend
from test_external_conformance import tools as backend_tools

from penstock.backends.http.backend import ExternalWorker
from penstock.backends.http.external import make_backend
from penstock.backends.http.terms import HttpBackendLimits

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo=", "detail": "low"}}
SCHEMA = {
    "type": "json_schema",
    "json_schema": {
        "name": "point",
        "strict": True,
        "schema": {"type": "object", "properties": {"x": {"type": "integer"}}},
    },
}
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"at": {"$ref": "#/$defs/place"}},
            "$defs": {"place": {"type": "string"}},
        },
    },
}
TOUCH = {"type": "function", "function": {"name": "touch", "parameters": {"type": "object"}}}
NAMED = {"type": "function", "function": {"name": "look"}}
TWO_CALLS = (
    '<tool_call>\n{"name": "look", "arguments": {"at": "sky"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "touch", "arguments": {}}\n</tool_call> and more'
)


class SayingVllm(VllmStandIn):
    """Answers with the tokens that it is told."""

    says: tuple[int, ...] | None = None

    def tokens(self, seed: int, max_tokens: int, prompt: Sequence[int] = ()) -> tuple[list[int], str]:
        if self.says is None:
            return super().tokens(seed, max_tokens, prompt)
        ids = [*self.says, EOS]
        return (ids, "stop") if len(ids) <= max_tokens else (ids[:max_tokens], "length")


@pytest.fixture(scope="module")
def served(kit: types.SimpleNamespace) -> Iterator[types.SimpleNamespace]:
    yield from serve(kit)


def serve(kit: types.SimpleNamespace, added: str = "") -> Iterator[types.SimpleNamespace]:
    """Models named by their workers: our engine's double, a provider, vLLM, and "both", which has one of ours
    and a provider. `added` to their template.
    """

    class Fleet(kit.RunningGateway):
        async def make_backends(self):
            self._names = ("tiny", "provided", "vllm", "both", "text-only")
            self.provider, self.vllm, self.says = OpenAIStandIn(), SayingVllm(), None
            for stand_in in (self.provider, self.vllm):
                await stand_in.start()
            made = backend_tools(HttpBackendLimits(probe_s=0.05))
            workers = [
                ExternalWorker(engine="openai", url=self.provider.url, model="served"),
                ExternalWorker(engine="vllm", url=self.vllm.url, model="served"),
                ExternalWorker(engine="openai", url=self.provider.url, model="served"),
                ExternalWorker(
                    engine="openai", url=self.provider.url, model="served", lacks=frozenset({"images"})
                ),
            ]
            self.foreign = [make_backend(worker, self.tokenizer, made) for worker in workers]
            for backend in self.foreign:
                backend.open()
            await until(lambda: all(backend.status.ready for backend in self.foreign))
            provided, vllm, beside, text_only = self.foreign
            own = [FakeBackend(self.clock, script=self._recorded) for _ in range(2)]
            for backend in own:  # Workers of one model have one vocabulary.
                backend.status.info = msgspec.structs.replace(
                    backend.status.info, vocab_size=self.tokenizer.vocab_size
                )
            return {
                "tiny": own[0], "provided": provided, "vllm": vllm, "both": [own[1], beside],
                "text-only": text_only,
            }  # fmt: skip

        def _recorded(self, request):
            self.requests.append(request)
            if self.says is not None:
                return iter(self.says)
            return self._script(request)

        async def close_backends(self) -> None:
            for backend in self.foreign:
                await backend.close()
            await self.provider.kill()
            await self.vllm.kill()

    config = kit.replace(kit.make_config(), limits={"media_hosts": ("*.example.com",)})
    running = Fleet(config, template=kit.TEMPLATE + added)
    with kit.openai_client(running) as client:
        yield types.SimpleNamespace(
            running=running, provider=running.provider, vllm=running.vllm, client=client
        )
    running.stop()


@pytest.fixture(autouse=True)
def well_behaved(served: types.SimpleNamespace) -> None:
    served.running.requests.clear()
    served.running.says = None
    served.vllm.says = None
    for stand_in in (served.provider, served.vllm):
        stand_in.requests.clear()


def ask(model: str, **fields: object) -> dict[str, object]:
    return {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 200, **fields}


def send(
    served, kit, body: dict[str, object] | bytes, path: str = "/v1/chat/completions"
) -> tuple[int, dict]:
    """Status and JSON of the answer."""
    raw = kit.Raw(served.running)
    answer = raw.send(kit.post(path, body, "Content-Type: application/json", "Connection: close")).read_all()
    raw.close()
    head, _, rest = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(rest)


AS_IT_CAME = {
    "json_object": {"response_format": {"type": "json_object"}},
    "json_schema": {"response_format": SCHEMA},
    "strict tools": {"tools": [LOOK], "tool_choice": "auto"},
    "required": {"tools": [LOOK, TOUCH], "tool_choice": "required", "parallel_tool_calls": False},
    "named": {"tools": [LOOK], "tool_choice": NAMED},
    "image": {"messages": [{"role": "user", "content": [{"type": "text", "text": "what?"}, IMAGE]}]},
    "audio": {"messages": [{"role": "user",
        "content": [{"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}}]}]},
    "custom tool": {"tools": [{"type": "custom", "custom": {"name": "shell"}}]},
    "effort": {"reasoning_effort": "low", "verbosity": "low"},
    "promises": {"store": True, "metadata": {"a": "b"}, "service_tier": "flex",
        "prediction": {"type": "content", "content": "x"}},
    "labels": {"safety_identifier": "u1", "prompt_cache_key": "k", "user": "u"},
    "vllm's": {"guided_regex": "a+", "bad_words": ["x"], "top_k": 3,
        "chat_template_kwargs": {"enable_thinking": False}},
}  # fmt: skip


@pytest.mark.parametrize("fields", AS_IT_CAME.values(), ids=AS_IT_CAME)
@pytest.mark.parametrize("model", ["provided", "both"])
def test_a_provider_gets_it_exactly_as_it_came(served, kit, fields, model) -> None:
    for stream in (False, True):
        body = json.dumps(ask(model, stream=stream, **fields)).encode()
        raw = kit.Raw(served.running)
        answer = raw.send(
            kit.post("/v1/chat/completions", body, "Content-Type: application/json", "Connection: close")
        )
        assert answer.read_all().startswith(b"HTTP/1.1 200")
        raw.close()
    needs_a_provider = fields is not AS_IT_CAME["labels"]
    assert len(served.provider.requests) == 2 or (model == "both" and not needs_a_provider)
    for request in served.provider.requests:
        sent = {name: value for name, value in request.json.items() if name in fields}
        assert sent == fields
        for value in fields.values():  # To the byte: key order, numbers, escapes.
            assert json.dumps(value).encode() in request.body


NOT_OURS = {
    "response_format": {"response_format": {"type": "json_object"}},
    "response_format ": {"response_format": SCHEMA},
    "tool_choice": {"tools": [TOUCH], "tool_choice": "required"},
    "tool_choice ": {"tools": [TOUCH], "tool_choice": {"type": "function", "function": {"name": "touch"}}},
    "tools[0].function.strict": {"tools": [LOOK]},
    "tools[0].type": {"tools": [{"type": "custom", "custom": {"name": "shell"}}]},
    "messages[0].content[1]": AS_IT_CAME["image"],
    "reasoning_effort": {"reasoning_effort": "low"},
    "verbosity": {"verbosity": "high"},
    "prediction": {"prediction": {"type": "content", "content": "x"}},
    "service_tier": {"service_tier": "priority"},
    "store": {"store": True},
    "structured_outputs": {"structured_outputs": {"regex": "a+"}},
    "guided_json": {"guided_json": {"type": "object"}},
    "bad_words": {"bad_words": ["x"]},
    "allowed_token_ids": {"allowed_token_ids": [1]},
}


@pytest.mark.parametrize(("param", "fields"), NOT_OURS.items(), ids=map(str.strip, NOT_OURS))
def test_a_model_without_an_able_worker_says_so_by_name(served, kit, param, fields) -> None:
    status, answer = send(served, kit, ask("tiny", **fields))
    error = answer["error"]
    assert (status, error["code"], error["param"]) == (400, "unsupported_by_model", param.strip())
    assert "is not supported by the model 'tiny'" in error["message"]
    assert "Did you mean" not in error["message"]
    assert not served.running.requests


def test_an_image_from_elsewhere_needs_a_host_that_is_allowed(served, kit) -> None:
    there = {"type": "image_url", "image_url": {"url": "https://images.example.org/a.png"}}
    status, answer = send(served, kit, ask("provided", messages=[{"role": "user", "content": [there]}]))
    assert (status, answer["error"]["param"]) == (400, "messages[0].content[0].image_url.url")
    assert "images.example.org" in answer["error"]["message"]
    assert not served.provider.requests
    beside = {"type": "text", "text": "hi", "uuid": "u", "image_url": there["image_url"]}
    status, answer = send(served, kit, ask("provided", messages=[{"role": "user", "content": [beside]}]))
    assert (status, answer["error"]["param"]) == (400, "messages[0].content[0].image_url")
    file = {"type": "input_file", "file_url": "https://images.example.org/a.pdf"}
    body = {"model": "provided", "input": [{"role": "user", "content": [file]}]}
    status, answer = send(served, kit, body, "/v1/responses")
    assert (status, answer["error"]["code"]) == (400, "invalid_value")
    assert answer["error"]["param"].startswith("input[0]")
    assert not served.provider.requests
    there = {"type": "image_url", "image_url": {"url": "https://images.example.com/a.png"}}
    assert send(served, kit, ask("provided", messages=[{"role": "user", "content": [there]}]))[0] == 200
    assert served.provider.requests[-1].json["messages"][0]["content"] == [there]


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_the_reasoning_of_a_provider_is_told(served, name) -> None:
    served.provider.thoughts = {name: "Let me think."}
    try:
        create = served.client.chat.completions.create
        whole = create(**ask("provided", max_tokens=4))
        message = whole.choices[0].message
        assert message.reasoning_content == message.reasoning == "Let me think."
        assert len(message.content) == 4
        assert whole.usage.completion_tokens_details.reasoning_tokens == len("Let me think.")
        options = {"stream": True, "stream_options": {"include_usage": True}}
        for extra in ({}, {"logprobs": True}):
            chunks = list(create(**ask("provided", max_tokens=4, **options, **extra)))
            deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
            reported = [delta.model_extra.get("reasoning") or delta.content for delta in deltas]
            assert [each for each in reported if each] == ["Let me think.", *message.content]
            assert chunks[-1].usage.completion_tokens_details.reasoning_tokens == len("Let me think.")
        answer = served.client.responses.create(model="provided", input="hi", max_output_tokens=16)
        assert [item.type for item in answer.output] == ["reasoning", "message"]
    finally:
        served.provider.thoughts = None


def test_an_operator_says_what_a_worker_lacks(served, kit) -> None:
    status, answer = send(served, kit, ask("text-only", **AS_IT_CAME["image"]))
    assert (status, answer["error"]["code"]) == (400, "unsupported_by_model")
    assert send(served, kit, ask("text-only", response_format={"type": "json_object"}))[0] == 200


def test_of_two_kinds_of_workers_an_able_one_gets_it(served) -> None:
    create = served.client.chat.completions.create
    for _ in range(6):
        create(**ask("both", max_tokens=2))
    assert served.running.requests, "ours gets its share of what it can do"
    ours = len(served.running.requests)
    for _ in range(6):
        create(**ask("both", max_tokens=2, response_format={"type": "json_object"}))
    assert len(served.running.requests) == ours
    # What nearly every engine has and a provider has not: a prompt's log-probabilities.
    for _ in range(6):
        served.client.completions.create(model="both", prompt="abc", max_tokens=2, echo=True, logprobs=1)
    assert len(served.running.requests) == ours + 6


BAD = [
    ({"response_format": {"type": "yaml"}}, "response_format.type", "invalid_value"),
    ({"response_format": {}}, "response_format.type", "missing_required_parameter"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema",
    "missing_required_parameter"),
    ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
    ({"tool_choice": "maybe", "tools": [TOUCH]}, "tool_choice", "invalid_value"),
    ({"tool_choice": NAMED, "tools": [TOUCH]}, "tool_choice", "invalid_value"),
    ({"tool_choice": {"type": "function"}, "tools": [TOUCH]}, "tool_choice.function.name",
    "missing_required_parameter"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].image_url",
    "missing_required_parameter"),
    ({"messages": [{"role": "user", "content": [{"type": "smell"}]}]}, "messages[0].content[0].type",
    "invalid_value"),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "response_format", "invalid_value"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "code"), BAD)
def test_bad_input_stays_bad_input_whoever_would_answer(served, kit, fields, param, code) -> None:
    for model in ("tiny", "provided"):
        status, answer = send(served, kit, ask(model, **fields))
        assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, param, code)


def test_vllm_gets_token_ids_and_its_structured_outputs(served) -> None:
    create = served.client.chat.completions.create
    create(**ask("vllm", max_tokens=3, response_format=SCHEMA))
    create(**ask("vllm", max_tokens=3, response_format={"type": "json_object"}))
    create(
        **ask("vllm", max_tokens=3),
        extra_body={"structured_outputs": {"choice": ["a", "b"]}, "bad_words": ["x"]},
    )
    create(**ask("vllm", max_tokens=3), extra_body={"guided_regex": "a+"})
    served.client.completions.create(
        model="vllm", prompt="x", max_tokens=3, extra_body={"response_format": SCHEMA}
    )
    bodies = [request.json for request in served.vllm.requests]
    assert [request.path for request in served.vllm.requests] == ["/v1/completions"] * 5
    assert all(isinstance(body["prompt"][0], int) for body in bodies)
    schema = SCHEMA["json_schema"]["schema"]
    assert [body["structured_outputs"] for body in bodies] == [
        {"json": schema}, {"json_object": True}, {"choice": ["a", "b"]}, {"regex": "a+"}, {"json": schema},
    ]  # fmt: skip
    assert bodies[2]["bad_words"] == ["x"]
    assert "response_format" not in bodies[0]


FORCED = [
    (NAMED, '{"at": "sky"}', [("look", {"at": "sky"})]),
    ("required", '[{"name": "touch", "arguments": {}}, {"name": "look", "arguments": {"at": "sky"}}]',
    [("touch", {}), ("look", {"at": "sky"})]),
]  # fmt: skip


@pytest.mark.parametrize(("choice", "says", "calls"), FORCED, ids=["named", "required"])
def test_a_forced_call_at_vllm_is_a_schema_and_comes_back_as_calls(served, choice, says, calls) -> None:
    served.vllm.says = served.running.tokenizer.encode(says)
    asked = ask("vllm", tools=[LOOK, TOUCH], tool_choice=choice)
    whole = served.client.chat.completions.create(**asked).choices[0]
    assert whole.finish_reason == "tool_calls"
    assert [
        (call.function.name, json.loads(call.function.arguments)) for call in whole.message.tool_calls
    ] == calls
    assert whole.message.content is None
    chunks = [chunk.choices[0] for chunk in served.client.chat.completions.create(**asked, stream=True)]
    streamed: dict[int, list] = {}
    for piece in (piece for chunk in chunks for piece in chunk.delta.tool_calls or ()):
        found = streamed.setdefault(piece.index, [piece.function.name, ""])
        found[1] += piece.function.arguments or ""
    assert [(name, json.loads(arguments)) for name, arguments in streamed.values()] == calls
    assert not any(chunk.delta.content for chunk in chunks)
    assert chunks[-1].finish_reason == "tool_calls"
    schema = served.vllm.requests[-1].json["structured_outputs"]["json"]
    if choice == NAMED:
        assert schema == LOOK["function"]["parameters"]
    else:
        look, touch = schema["items"]["anyOf"]
        assert (schema["type"], schema["minItems"]) == ("array", 1)
        assert look["properties"]["name"] == {"enum": ["look"]}
        assert schema["$defs"]["look"]["$defs"] == {"place": {"type": "string"}}
        place = {"$ref": "#/$defs/look/$defs/place"}
        assert schema["$defs"]["look"]["properties"]["at"] == place, "references are from the root"
        assert touch["properties"]["arguments"] == {"$ref": "#/$defs/touch"}


@pytest.fixture
def thinking(kit) -> Iterator[types.SimpleNamespace]:
    yield from serve(kit, "{% if add_generation_prompt %}<think>\n{% endif %}{# </think> #}")


def test_a_grammar_of_vllm_holds_from_the_first_token_so_the_reasoning_is_closed(thinking) -> None:
    served = thinking
    create = served.client.chat.completions.create
    for says, fields in (
        ('{"x": 1}', {"response_format": SCHEMA}),
        ('{"at": "sky"}', {"tools": [LOOK], "tool_choice": NAMED}),
    ):
        served.vllm.says = served.running.tokenizer.encode(says)
        message = create(**ask("vllm", **fields)).choices[0].message
        assert "reasoning" not in message.model_extra
        found = message.content or message.tool_calls[0].function.arguments
        assert json.loads(found) == json.loads(says)
        prompt = served.running.tokenizer.decode(
            served.vllm.requests[-1].json["prompt"], skip_special_tokens=False
        )
        assert prompt.endswith("<think>\n</think>\n\n")
        streamed = [chunk.choices[0].delta for chunk in create(**ask("vllm", **fields), stream=True)]
        assert not any("reasoning" in delta.model_extra for delta in streamed)
    served.vllm.says = served.running.tokenizer.encode("Hm.</think>Yes")
    message = create(**ask("vllm")).choices[0].message
    assert (message.reasoning, message.content) == ("Hm.", "Yes"), "without a grammar it reasons"


def test_a_forced_call_that_was_cut_off_is_not_lost(served) -> None:
    served.vllm.says = served.running.tokenizer.encode('{"at": "the sky above"}')
    asked = ask("vllm", tools=[LOOK], tool_choice=NAMED)
    cut = served.client.chat.completions.create(**asked | {"max_tokens": 10}).choices[0]
    assert (cut.finish_reason, cut.message.tool_calls[0].function.arguments) == ("length", '{"at": "th')


@pytest.mark.parametrize("stream", [False, True])
def test_without_parallel_calls_the_answer_ends_with_the_first(served, stream) -> None:
    served.running.says = list(TWO_CALLS)
    asked = ask("tiny", tools=[TOUCH, {**TOUCH, "function": {"name": "look"}}], stream=stream)
    found, tokens = {}, {}
    for parallel in (True, False):
        extra = {"parallel_tool_calls": parallel} | (
            {"stream_options": {"include_usage": True}} if stream else {}
        )
        answer = served.client.chat.completions.create(**asked, **extra)
        chunks = list(answer) if stream else [answer]
        parts = [chunk.choices[0] for chunk in chunks if chunk.choices]
        said = [part.delta if stream else part.message for part in parts]
        found[parallel] = [
            call.function.name for each in said for call in each.tool_calls or () if call.function.name
        ]
        assert parts[-1].finish_reason == "tool_calls"
        tokens[parallel] = chunks[-1].usage.completion_tokens
    assert found == {True: ["look", "touch"], False: ["look"]}
    assert tokens[False] < tokens[True], "it ended; it was not only hidden"


def test_every_chunk_has_the_usage_where_that_is_asked_for(served) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    asked = ask("tiny", max_tokens=5, stream=True, stream_options=options)
    chunks = list(served.client.chat.completions.create(**asked))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert set(counts) >= {1, 2, 3, 4, 5}
    assert {chunk.usage.prompt_tokens for chunk in chunks} == {chunks[-1].usage.prompt_tokens}
    with pytest.raises(openai.BadRequestError, match=r"needs .stream_options\.include_usage"):
        served.client.chat.completions.create(**asked | {"stream_options": {"continuous_usage_stats": True}})


def test_the_sdk_tells_unsupported_from_bad_input(served) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        served.client.chat.completions.create(**ask("tiny", response_format={"type": "json_object"}))
    assert (caught.value.code, caught.value.param) == ("unsupported_by_model", "response_format")
