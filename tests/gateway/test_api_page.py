"""docs/api.md says what becomes of every parameter, and this asks our engine's double and a provider, over
sockets.
"""

import importlib.util
import json
import re
import types
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from engine_stand_ins import OpenAIStandIn, until
from fake_backend import FakeBackend
from test_external_conformance import tools as backend_tools

from penstock.backends.http.backend import ExternalWorker
from penstock.backends.http.dialects.openai import OpenAIDialect
from penstock.backends.http.dialects.sglang import SglangDialect
from penstock.backends.http.dialects.tgi import TgiDialect
from penstock.backends.http.dialects.triton import TritonDialect, TrtllmDialect
from penstock.backends.http.dialects.vllm import VllmDialect
from penstock.backends.http.external import make_backend
from penstock.backends.http.terms import HttpBackendLimits
from penstock.protocol.parameters import CHAT, COMPLETION
from penstock.protocol.responses import RESPONSES
from penstock.types import ENGINE_CAPABILITIES, Capability

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "api.md").read_text()
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
NEEDED = {
    "stream_options": {"stream": True},
    "top_logprobs": {"logprobs": True},
    "tool_choice": {"tools": [TOOL]},
    "parallel_tool_calls": {"tools": [TOOL]},
}
"""What else a request must say for a parameter to make sense."""
VALUES = {
    "model": None, "messages": None, "prompt": None, "stream": True,
    "stream_options": {"include_usage": True}, "n": 2, "stop": ["@"], "seed": 7, "max_tokens": 3,
    "max_completion_tokens": 3, "temperature": 0.5, "top_p": 0.5, "frequency_penalty": 0.5,
    "presence_penalty": 0.5, "top_k": 3, "repetition_penalty": 1.1, "min_p": 0.1, "min_tokens": 1,
    "logit_bias": {"5": 1}, "ignore_eos": True, "stop_token_ids": [5], "include_stop_str_in_output": True,
    "skip_special_tokens": False, "user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "flex",
    "response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"},
    "guided_json": {"type": "object"}, "guided_regex": "a", "guided_choice": ["a"],
    "guided_grammar": "root ::= 'a'", "bad_words": ["x"], "allowed_token_ids": [5], "tools": [TOOL],
    "tool_choice": "required", "parallel_tool_calls": False, "chat_template_kwargs": {"x": 1},
    "logprobs": True, "top_logprobs": 1, "modalities": ["audio"], "documents": [{"text": "x"}],
    "reasoning_effort": "low", "verbosity": "low", "include_reasoning": False, "best_of": 1, "echo": True,
    "add_special_tokens": False, "length_penalty": 2, "spaces_between_special_tokens": False,
    "add_generation_prompt": False, "prompt_logprobs": 1, "vllm_xargs": {"a": 1}, "logits_processors": ["x"],
    "suffix": "x", "thinking_token_budget": 5, "truncate_prompt_tokens": 5, "priority": 1,
}  # fmt: skip
"""Values that ask for something; for all others true does."""
CHAT_ONLY = {"add_special_tokens": True, "best_of": 2}
COMPLETION_ONLY = {"logprobs": 1}


def rows(title: str) -> dict[str, list[str]]:
    """Parameter -> the cells of the table under a heading."""
    section = PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    found = [line.removeprefix("|").removesuffix("|").split("|") for line in lines]
    return {cells[0].strip().strip("`"): [cell.strip() for cell in cells[1:]] for cells in found}


TABLES = {
    "chat": rows("Parameters of chat completions"),
    "completion": rows("Parameters of plain completions"),
}


@pytest.fixture(scope="module")
def served(kit: types.SimpleNamespace) -> Iterator[types.SimpleNamespace]:
    class Fleet(kit.RunningGateway):
        async def make_backends(self):
            self._names = ("tiny", "provided")
            self.provider = OpenAIStandIn()
            await self.provider.start()
            worker = ExternalWorker(engine="openai", url=self.provider.url, model="served")
            provided = make_backend(worker, self.tokenizer, backend_tools(HttpBackendLimits(probe_s=0.05)))
            provided.open()
            await until(lambda: provided.status.ready)
            tiny = FakeBackend(self.clock, script=self._recorded)
            assert tiny.status.info is not None
            able = msgspec.structs.replace(tiny.status.info, capabilities=ENGINE_CAPABILITIES)
            tiny.status.info = able
            return {"tiny": tiny, "provided": provided}

        async def close_backends(self) -> None:
            await self.backends["provided"].close()
            await self.provider.kill()

    running = Fleet(kit.make_config(), template=kit.TEMPLATE + "{# </think> #}")
    yield running
    running.stop()


def test_the_tables_are_those_of_the_code() -> None:
    spec = importlib.util.spec_from_file_location("api_page", ROOT / "scripts" / "api_page.py")
    assert spec is not None
    assert spec.loader is not None
    api_page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(api_page)
    assert api_page.written(PAGE) == PAGE, "run: python scripts/api_page.py"
    assert set(TABLES["chat"]) == {each.name for each in CHAT}
    assert set(TABLES["completion"]) == {each.name for each in COMPLETION}


@pytest.mark.parametrize("endpoint", ["chat", "completion"])
def test_what_becomes_of_each_parameter(served, kit, endpoint: str) -> None:
    special = CHAT_ONLY if endpoint == "chat" else COMPLETION_ONLY
    path = "/v1/chat/completions" if endpoint == "chat" else "/v1/completions"
    for name, cells in TABLES[endpoint].items():
        value = special.get(name, VALUES.get(name, True))
        said = [cells[0], cells[2]]
        for model, expected in zip(("tiny", "provided"), said, strict=True):
            body = {"model": model, "max_tokens": 5}
            body |= (
                {"messages": [{"role": "user", "content": "hi"}]} if endpoint == "chat" else {"prompt": "hi"}
            )
            body |= NEEDED.get(name, {})
            if value is not None:
                body[name] = value
            served.provider.requests.clear()
            raw = kit.Raw(served)
            answer = raw.send(
                kit.post(path, body, "Content-Type: application/json", "Connection: close")
            ).read_all()
            raw.close()
            where = (endpoint, name, model, answer[-300:])
            if expected == "refused":
                error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
                assert error["code"] in ("unsupported_parameter", "unsupported_by_model"), where
                assert error["param"].partition(".")[0] == name, where
                assert f"'{name}'" in error["message"], where
                assert "Did you mean" not in error["message"], where
                continue
            assert answer.startswith(b"HTTP/1.1 200"), where
            if model == "provided":
                sent = served.provider.requests[-1].json
                is_forwarded = name in sent and sent[name] == body[name]
                assert (
                    expected == "forwarded"
                    if is_forwarded and name not in HERE[endpoint]
                    else expected == "honoured"
                ), (where, sent)


HERE = {
    "chat": {"stream", "stream_options", "max_tokens", "max_completion_tokens", "seed"},
    "completion": {"stream", "stream_options", "max_tokens", "seed", "prompt"},
}
"""Forwarded by chance: it is this server's own that happens to be the same."""


def asked(served, kit, verb: str, path: str, body: dict) -> dict:
    """The error of a request, or nothing."""
    head = kit.post(path, body, "Content-Type: application/json", "Connection: close")
    raw = kit.Raw(served)
    answer = raw.send(head.replace(b"POST ", verb.encode() + b" ", 1)).read_all()
    raw.close()
    if answer.startswith((b"HTTP/1.1 200", b"HTTP/1.1 302")):
        return {}
    return json.loads(answer.partition(b"\r\n\r\n")[2]).get("error", {})


def test_every_endpoint_of_the_page_is_there(served, kit) -> None:
    listed = [name.split() for name in rows("Endpoints")]
    assert {"/v1/chat/completions", "/v1/responses", "/v1/models/{id}"} <= {path for _, path in listed}
    for verb, path in listed:
        if path == "/console/feed":
            verb = "HEAD"  # What it streams has no end.
        code = asked(served, kit, verb, path.replace("{id}", "x").replace("{request_id}", "x"), {}).get(
            "code"
        )
        assert code not in ("unknown_path", "method_not_allowed"), (verb, path, code)


def test_what_becomes_of_each_parameter_of_a_response(served, kit) -> None:
    table = rows("Parameters of responses")
    assert set(table) == {each.name for each in RESPONSES}
    own = {
        "input": "hi", "instructions": "x", "previous_response_id": "resp_0", "store": False,
        "max_output_tokens": 3, "reasoning": {"effort": "low"}, "text": {"format": {"type": "json_object"}},
        "include": ["message.output_text.logprobs"], "stream_options": {"include_obfuscation": False},
        "tools": [TOOL["function"] | {"type": "function"}], "truncation": "auto", "conversation": "c",
        "prompt": {"id": "p"},
    }  # fmt: skip
    needed = {name: fields for name, fields in NEEDED.items() if name != "top_logprobs"}
    needed["top_logprobs"] = {"include": own["include"]}
    needed["tool_choice"] = needed["parallel_tool_calls"] = {"tools": own["tools"]}
    for name, (said, *_) in table.items():
        value = (own | CHAT_ONLY).get(name, VALUES.get(name, True))
        body = {"model": "tiny", "input": "hi", "max_output_tokens": 3} | needed.get(name, {})
        error = asked(served, kit, "POST", "/v1/responses", body | ({} if value is None else {name: value}))
        if said == "refused":
            assert error.get("code") == "unsupported_parameter", (name, error)
            assert error["param"] == name
        elif name == "previous_response_id":
            assert error["code"] == "previous_response_not_found"
        elif said == "as in a chat" and TABLES["chat"][name][0] == "refused":
            assert error["code"] == "unsupported_by_model", error
            assert error["param"] == name
        else:
            assert not error, (name, error)


@pytest.mark.parametrize("stream", [False, True])
def test_a_provider_gets_a_response_as_a_chat(served, kit, stream: bool) -> None:
    served.provider.requests.clear()
    with kit.openai_client(served) as client:
        answer = client.responses.create(
            model="provided", instructions="Be brief.", input="hi", text={"verbosity": "low"},
            max_output_tokens=3, stream=stream,
        )  # fmt: skip
        if stream:
            *_, last = answer
            answer = last.response
    sent = served.provider.requests[-1].json
    assert [(each["role"], each["content"]) for each in sent["messages"]] == [
        ("system", "Be brief."),
        ("user", "hi"),
    ]
    assert (sent["verbosity"], sent["max_completion_tokens"]) == ("low", 3)
    assert "input" not in sent
    assert answer.output_text


def test_the_capabilities_of_each_engine() -> None:
    dialects = (VllmDialect, SglangDialect, TgiDialect, TrtllmDialect, TritonDialect, OpenAIDialect)
    sets = [ENGINE_CAPABILITIES, *(dialect.capabilities for dialect in dialects)]
    found = {name: [cell == "yes" for cell in cells] for name, cells in rows("Capabilities").items()}
    assert found == {each.value: [each in known for known in sets] for each in Capability}


def test_the_page_names_every_code_that_it_promises() -> None:
    codes = set(re.findall(r"^\| \d+ \| (`.*?) \|", PAGE, re.MULTILINE))
    assert {"`unsupported_by_model`", "`unsupported_parameter`", "`unsupported_media_type`"} <= codes
