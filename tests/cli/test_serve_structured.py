"""Structured output over HTTP: a real `penstock serve` with the demo model, asked by the `openai` client."""

import json
import os
import re
import signal
import threading
import urllib.request
from collections.abc import Iterator
from enum import Enum
from typing import Any

import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field
from served import Server

pytestmark = pytest.mark.timeout(240)

CONFIG = "models: [{path: penstock-demo-mini, name: tiny, replicas: 2, engine: {threads: 1}}]"
MESSAGES: list[Any] = [{"role": "user", "content": "Tell me about a pet."}]
PET = {
    "type": "object",
    "properties": {
        "name_of_the_pet": {"type": "string", "maxLength": 16},
        "years": {"type": "integer", "minimum": 0, "maximum": 30},
        "kind": {"enum": ["cat", "dog", "newt"]},
    },
    "required": ["name_of_the_pet", "years", "kind"],
    "additionalProperties": False,
}
ROWS = {
    "type": "array",
    "minItems": 60,
    "maxItems": 64,
    "items": {
        "type": "object",
        "properties": {
            "number": {"type": "integer", "minimum": 0, "maximum": 99999},
            "good": {"type": "boolean"},
        },
        "required": ["number", "good"],
        "additionalProperties": False,
    },
}
MIGRATIONS = re.compile(r"^penstock_migrations_total\S* (\S+)", re.MULTILINE)
CIRCLE = {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}


class Kind(Enum):
    CAT, DOG = "cat", "dog"


class Pet(BaseModel):
    name: str = Field(max_length=12)
    kind: Kind
    friends: list["Pet"] = Field(max_length=1)


def schema_format(schema: dict[str, Any], *, strict: bool = True) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": strict}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    place = tmp_path_factory.mktemp("structured")
    file = place / "config.yaml"
    file.write_text(CONFIG)
    environment = {"PENSTOCK_STATE_DIR": str(place / "state"), "XDG_RUNTIME_DIR": str(place)}
    server = Server(place, "-c", str(file), "--port", "0", "--no-auth", **environment)
    try:
        server.wait_ready()
        server.until(lambda: states(server) == ["ready", "ready"], "not all workers are ready")
        yield server
    finally:
        server.close()


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url, api_key="none", max_retries=0)


def read(server: Server, path: str) -> str:
    with urllib.request.urlopen(f"{server.url.removesuffix('/v1')}{path}", timeout=60) as response:
        return response.read().decode()


def states(server: Server) -> list[str]:
    return [worker["state"] for worker in json.loads(read(server, "/admin/workers"))["workers"]]


def ask(client: openai.OpenAI, **how: Any) -> Any:
    extra = {name: how.pop(name) for name in list(how) if name.startswith(("guided", "structured"))}
    settings = {"max_tokens": 300, "temperature": 1.2, "seed": 5} | how
    return client.chat.completions.create(model="tiny", messages=MESSAGES, extra_body=extra, **settings)


def test_parse_gives_a_typed_answer(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="tiny", messages=MESSAGES, response_format=Pet, max_tokens=400, temperature=1.0, seed=2
    )
    assert isinstance(answer.choices[0].message.parsed, Pet)
    assert answer.choices[0].finish_reason == "stop"


FORMS: list[tuple[dict[str, Any], str]] = [
    ({"structured_outputs": {"regex": "[a-z]{3,9}@[a-z]+\\.(com|org)"}}, "[a-z]{3,9}@[a-z]+\\.(com|org)"),
    ({"structured_outputs": {"choice": ["ja", "nein"]}}, "ja|nein"),
    ({"structured_outputs": {"grammar": 'start: "a" /[0-9]{2}/'}}, "a[0-9]{2}"),
    ({"guided_regex": "x{2,4}"}, "x{2,4}"),
    ({"guided_choice": ['é "quoted"', "\\back"]}, 'é "quoted"|\\\\back'),
    ({"guided_grammar": 'root ::= "yes" | "no" [0-9]'}, "yes|no[0-9]"),
]


@pytest.mark.parametrize(("form", "pattern"), FORMS)
def test_patterns_choices_and_grammars(client: openai.OpenAI, form: dict[str, Any], pattern: str) -> None:
    for seed in range(3):
        choice = ask(client, seed=seed, **form).choices[0]
        assert choice.finish_reason == "stop"
        assert re.fullmatch(pattern, choice.message.content)


@pytest.mark.parametrize(
    "form",
    [
        {"response_format": schema_format(PET)},
        {"response_format": schema_format(PET, strict=False)},
        {"structured_outputs": {"json": PET}},
        {"structured_outputs": {"json": json.dumps(PET)}},
        {"guided_json": PET},
    ],
)
def test_schemas(client: openai.OpenAI, form: dict[str, Any]) -> None:
    answer = ask(
        client, n=2, logprobs=True, top_logprobs=2, frequency_penalty=0.5, logit_bias={"9": 2}, **form
    )
    assert len({choice.message.content for choice in answer.choices}) == 2
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content), PET)
        assert "".join(each.token for each in choice.logprobs.content) == choice.message.content
        assert all(-1e4 < each.logprob <= 0 for each in choice.logprobs.content)
    plain = ask(client, n=2, frequency_penalty=0.5, logit_bias={"9": 2}, **form)
    assert [each.message.content for each in plain.choices] == [
        each.message.content for each in answer.choices
    ]


def test_a_json_object(client: openai.OpenAI) -> None:
    for seed in range(20):
        choice = ask(client, response_format={"type": "json_object"}, seed=seed, max_tokens=60).choices[0]
        assert choice.message.content.startswith("{")
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(choice.message.content), dict)
        else:
            assert choice.finish_reason == "length"


def test_a_stream_says_the_same_as_a_whole_answer(client: openai.OpenAI) -> None:
    for n in (1, 2):
        whole = ask(client, response_format=schema_format(PET), n=n)
        texts, ends = [""] * n, [None] * n
        for chunk in ask(client, response_format=schema_format(PET), n=n, stream=True):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                ends[choice.index] = choice.finish_reason or ends[choice.index]
        assert texts == [choice.message.content for choice in whole.choices]
        assert ends == ["stop"] * n


def test_a_stop_string_cuts_and_a_plain_completion_obeys_too(client: openai.OpenAI) -> None:
    choice = ask(client, response_format=schema_format(PET), stop=['", "years"']).choices[0]
    assert choice.finish_reason == "stop"
    assert "years" not in choice.message.content
    plain = client.completions.create(
        model="tiny", prompt="x", max_tokens=50, extra_body={"structured_outputs": {"choice": ["one", "two"]}}
    )
    assert plain.choices[0].text in ("one", "two")


def test_a_stream_whose_worker_is_killed_still_validates(server: Server, client: openai.OpenAI) -> None:
    how: dict[str, Any] = {"response_format": schema_format(ROWS), "max_tokens": 3000}
    expected = {seed: ask(client, seed=seed, **how).choices[0].message.content for seed in range(4)}
    # A stream may end before the signal arrives, or run on the other worker: then once more.
    for _ in range(10):
        server.until(lambda: states(server) == ["ready", "ready"], "the worker did not come back")
        texts: dict[int, str] = {}
        begun = threading.Event()

        def read_stream(seed: int, texts: dict[int, str] = texts, begun: threading.Event = begun) -> None:
            for chunk in ask(client, seed=seed, stream=True, **how):
                texts[seed] = texts.get(seed, "") + (chunk.choices[0].delta.content or "")
                if texts[seed]:
                    begun.set()

        threads = [threading.Thread(target=read_stream, args=(seed,)) for seed in expected]
        for thread in threads:
            thread.start()
        assert begun.wait(60)
        os.kill(server.workers[0], signal.SIGKILL)
        for thread in threads:
            thread.join(120)
        assert texts == expected
        if any(float(count) for count in re.findall(MIGRATIONS, read(server, "/metrics"))):
            break
    else:
        pytest.fail("no stream was on a worker that was killed")
    for text in texts.values():
        jsonschema.validate(json.loads(text), ROWS)
    server.until(lambda: states(server) == ["ready", "ready"], "the worker did not come back")


@pytest.mark.parametrize(
    ("form", "param", "words"),
    [
        ({"response_format": schema_format({"not": {}})}, "response_format.json_schema.schema", "/not"),
        (
            {"response_format": schema_format({"type": "object", "properties": {"a": {"format": "foo"}}})},
            "response_format.json_schema.schema",
            "at /properties/a/format",
        ),
        ({"guided_json": {"type": "string", "pattern": "(a"}}, "guided_json", "/pattern"),
        ({"guided_json": "{"}, "guided_json", "not JSON"),
        ({"guided_json": False}, "guided_json", "a schema is an object"),
        ({"guided_json": {"$ref": "http://example.com/x"}}, "guided_json", "/$ref"),
        ({"guided_json": {"minimum": 3, "maximum": 1, "type": "integer"}}, "guided_json", "Unsatisfiable"),
        ({"guided_json": {"multipleOf": 99999989, "type": "integer"}}, "guided_json", "/multipleOf"),
        ({"guided_json": CIRCLE}, "guided_json", "nothing matches"),
        ({"guided_json": {"x-guidance": {"lenient": True}, "not": {}}}, "guided_json", "not"),
        ({"guided_regex": "[a-"}, "guided_regex", "regex"),
        ({"guided_grammar": "start: missing"}, "guided_grammar", "missing"),
        ({"guided_choice": []}, "guided_choice", "array"),
        ({"structured_outputs": {"choice": ["a"], "regex": "a"}}, "structured_outputs", "regex and choice"),
        ({"structured_outputs": {"tag": "{}", "regex": "a"}}, "structured_outputs.tag", "not"),
        ({"structured_outputs": {"choice": [""]}}, "structured_outputs.choice", "empty"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "both"),
        ({"guided_json": {"enum": ["x" * 50 + str(i) for i in range(8000)]}}, "guided_json", "bound"),
        ({"guided_json": {"enum": [{"a": i, "b": i} for i in range(600)]}}, "guided_json", "4950 units"),
        ({"guided_json": {"allOf": [{"type": "string", "pattern": f"a.{{{i}}}b"} for i in range(20)]}},
         "guided_json", "20 patterns hold together"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "Missing"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "xml"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_bad_input_is_told_by_parameter_and_place(
    client: openai.OpenAI, form: dict[str, Any], param: str, words: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, stream=stream, **form)
    assert caught.value.param == param
    assert words in caught.value.message
    assert param in caught.value.message


# --- vLLM's fields that bound what is drawn, or say what the prompt is --------------------------------


def chat(client: openai.OpenAI, extra: dict[str, Any], **how: Any) -> Any:
    settings = {"max_tokens": 12, "temperature": 0.0, "messages": MESSAGES} | how
    return client.chat.completions.create(model="tiny", extra_body=extra, **settings)


def token_ids(server: Server, text: str) -> list[int]:
    body = json.dumps({"model": "tiny", "prompt": text, "add_special_tokens": False}).encode()
    request = urllib.request.Request(f"{server.url}/tokenize", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)["tokens"]


def test_bad_words_and_allowed_token_ids(server: Server, client: openai.OpenAI) -> None:
    free = [each.token for each in chat(client, {}, logprobs=True).choices[0].logprobs.content]
    changed = chat(client, {"bad_words": [free[0], "never said"]}, logprobs=True).choices[0].logprobs.content
    assert changed[0].token != free[0]
    later = chat(client, {"bad_words": ["".join(free[2:5])]}, logprobs=True).choices[0].logprobs.content
    assert [each.token for each in later][:2] == free[:2]
    ids = token_ids(server, "a") + token_ids(server, "b")
    for stream in (False, True):
        answer = chat(client, {"allowed_token_ids": ids}, temperature=1.0, stream=stream)
        texts = (
            [each.choices[0].delta.content or "" for each in answer]
            if stream
            else [answer.choices[0].message.content]
        )
        assert re.fullmatch("[ab]{12}", "".join(texts))


def test_ids_of_tokens(server: Server, client: openai.OpenAI) -> None:
    want = {"return_token_ids": True}
    said = chat(client, want, n=2, temperature=2.0, seed=3)
    usage = said.usage
    assert len(said.prompt_token_ids) == usage.prompt_tokens
    ids = [choice.token_ids for choice in said.choices]
    assert ids[0] != ids[1]
    assert usage.completion_tokens - 2 <= sum(map(len, ids)) <= usage.completion_tokens
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(
        chat(client, want, n=2, temperature=2.0, seed=3, logprobs=True, stream=True, stream_options=options)
    )
    streamed: list[list[int]] = [[], []]
    prompts = [getattr(chunk, "prompt_token_ids", None) for chunk in chunks]
    assert prompts[0] == said.prompt_token_ids
    assert sum(prompt is not None for prompt in prompts) == 2
    for chunk in chunks:
        for choice in chunk.choices:
            streamed[choice.index] += choice.token_ids
    assert streamed == ids
    assert chunks[-1].usage.completion_tokens == usage.completion_tokens
    plain = client.completions.create(
        model="tiny", prompt=[token_ids(server, "one two"), token_ids(server, "three")], max_tokens=4,
        temperature=0, extra_body=want,
    )  # fmt: skip
    assert [each.prompt_token_ids for each in plain.choices] == [
        token_ids(server, "one two"), token_ids(server, "three"),
    ]  # fmt: skip
    stream = client.completions.create(
        model="tiny", prompt="three", max_tokens=4, temperature=0, stream=True, extra_body=want
    )
    choices = [each.choices[0] for each in stream]
    assert choices[0].prompt_token_ids == token_ids(server, "three")
    assert [i for choice in choices for i in choice.token_ids] == plain.choices[1].token_ids


def test_what_the_prompt_is(client: openai.OpenAI) -> None:
    begun: list[Any] = [*MESSAGES, {"role": "assistant", "content": "It has <|im_end|> four"}]
    whole = chat(client, {}, messages=begun).usage.prompt_tokens
    bare = chat(client, {"add_generation_prompt": False}, messages=begun).usage.prompt_tokens
    how = {"add_generation_prompt": False, "continue_final_message": True}
    assert chat(client, how, messages=begun).usage.prompt_tokens < bare < whole
    assert chat(client, {"truncate_prompt_tokens": 5}, messages=begun).usage.prompt_tokens == 5
    text = "one two three four five six seven"
    how = {"truncate_prompt_tokens": 2}
    plain = client.completions.create(
        model="tiny", prompt=text, echo=True, max_tokens=1, temperature=0, extra_body=how
    )
    assert plain.usage.prompt_tokens == 2
    assert "one" not in plain.choices[0].text
    long = client.completions.create(
        model="tiny", prompt="word " * 40_000, max_tokens=9, extra_body={"truncate_prompt_tokens": -1}
    )
    assert long.usage.completion_tokens <= 9 < long.usage.prompt_tokens


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"bad_words": [" "]}, "bad_words"),
        ({"bad_words": ["a"] * 257}, "bad_words"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [4096]}, "allowed_token_ids"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 1 << 30}, "truncate_prompt_tokens"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "add_generation_prompt"),
        ({"chat_template_kwargs": {"continue_final_message": True}}, "chat_template_kwargs"),
    ],
)
def test_fields_that_make_no_sense_are_refused_by_name(
    client: openai.OpenAI, extra: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, extra)
    assert caught.value.param == param
