"""What clients that others wrote meet at the door: paths, content types, models, a model that is still
loading.
"""

import json
import select
import socket
import time
import types
from collections.abc import Iterator

import msgspec
import pytest

from penstock.backends.base import Phase
from penstock.clock import SystemClock
from penstock.config.tenancy import TenantConfig, TierConfig
from penstock.gateway.identity.tenants import TenantTable

CHAT = "/v1/chat/completions"


def ask(running, kit, data: bytes) -> tuple[int, dict]:
    raw = kit.Raw(running)
    raw.socket.settimeout(30)
    answer = raw.send(data).read_until(b"\r\n\r\n")
    head, _, rest = answer.partition(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].split()[0])
    while len(rest) < length:
        rest += raw.socket.recv(65536)
    raw.close()
    return int(head.split()[1]), json.loads(rest)


# --- paths and bodies ------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/moderations", "/v1/messages", "/v1", "/api/chat"])
def test_an_unknown_path_is_told_what_there_is(gateway, kit, path):
    status, answer = ask(gateway, kit, kit.post(path, {}))
    error = answer["error"]
    assert (status, error["code"]) == (404, "unknown_path")
    assert error["message"].startswith(f"This server has no {path}. It has ")
    for there in (CHAT, "/v1/completions", "/v1/responses", "/v1/models", "/v1/tokenize", "/v1/detokenize"):
        assert there in error["message"]


@pytest.mark.parametrize(
    "kind", ["application/x-www-form-urlencoded", "text/plain", "multipart/form-data; boundary=x", "json"]
)
@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/tokenize", "/v1/detokenize"])
def test_a_body_that_is_said_to_be_no_json_is_415(gateway, kit, path, kind):
    status, answer = ask(gateway, kit, kit.post(path, kit.chat(), f"Content-Type: {kind}"))
    assert (status, answer["error"]["code"]) == (415, "unsupported_media_type")
    assert "Content-Type: application/json" in answer["error"]["message"]


@pytest.mark.parametrize(
    "headers",
    [
        (),
        ("Content-Type: application/json",),
        ("content-type: Application/JSON; charset=utf-8",),
        ("Content-Type: application/vnd.x+json",),
    ],
)
def test_json_is_taken_however_it_is_spelled(gateway, kit, headers):
    assert ask(gateway, kit, kit.post(CHAT, kit.chat(max_tokens=1), *headers))[0] == 200


# --- what servers gave clients before ----------------------------------------------------------------

# As litellm 1.83 sends its own answer back in a tool loop, with Anthropic's cache marks.
LITELLM = [
    {"role": "system", "content": [{"type": "text", "text": "Be brief.",
    "cache_control": {"type": "ephemeral"}}]},
    {"role": "user", "content": "Weather in Oslo?", "cache_control": {"type": "ephemeral"}},
    {
        "content": None,
        "role": "assistant",
        "tool_calls": [{"index": 0, "function": {"arguments": "{}", "name": "weather",
            "provider_specific_fields": None},
            "id": "call_1", "type": "function", "provider_specific_fields": {"thought_signature": "x"}}],
        "function_call": None,
        "provider_specific_fields": {"refusal": None},
        "annotations": [], "audio": None, "refusal": None, "reasoning": "hm", "reasoning_content": "hm",
        "thinking_blocks": [],
    },
    {"tool_call_id": "call_1", "role": "tool", "name": "weather",
    "content": [{"type": "text", "text": "3", "cache_control": {"type": "ephemeral"}}]},
]  # fmt: skip
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_loop_of_litellm_can_go_on(gateway, kit, stream):
    body = kit.chat(messages=LITELLM, tools=[WEATHER], max_tokens=2, stream=stream)
    raw = kit.Raw(gateway)
    answer = raw.send(kit.post(CHAT, body, "Connection: close")).read_all()
    raw.close()
    assert answer.startswith(b"HTTP/1.1 200")


def test_fields_that_are_dropped_do_not_reach_the_prompt(gateway, kit):
    plain = [{"role": "user", "content": "hi"}]
    marked = [
        {
            "role": "user",
            "content": "hi",
            "provider_specific_fields": {"x": 1},
            "cache_control": {},
            "no_such": 5,
        }
    ]
    counts = [
        ask(gateway, kit, kit.post("/v1/tokenize", {"model": "tiny", "messages": each}))[1]["tokens"]
        for each in (plain, marked)
    ]
    assert counts[0] == counts[1]


def test_the_official_client_sends_its_own_message_back(client, kit):
    asked = kit.chat(tools=[WEATHER], max_tokens=4)
    message = client.chat.completions.create(**asked).choices[0].message
    messages = [
        *asked["messages"],
        message.model_dump() | {"annotations": [], "audio": None},
        {"role": "user", "content": "and?"},
    ]
    assert client.chat.completions.create(**asked | {"messages": messages}).choices


WRONG_TYPES = [
    ({"role": "user", "content": 5}, "messages[0].content"),
    ({"role": "user", "content": "x", "name": 5}, "messages[0].name"),
    ({"role": "assistant", "content": None,
    "tool_calls": [{"id": 1, "function": {"name": "f", "arguments": ""}}]}, "messages[0].tool_calls[0].id"),
    ({"role": "assistant", "content": None,
    "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": {}}}]},
    "messages[0].tool_calls[0].function.arguments"),
]  # fmt: skip


@pytest.mark.parametrize(("message", "param"), WRONG_TYPES)
def test_known_fields_of_a_wrong_type_stay_errors(gateway, kit, message, param):
    status, answer = ask(gateway, kit, kit.post(CHAT, kit.chat(messages=[message])))
    assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, "invalid_type", param)


def test_the_top_level_stays_strict_with_its_hint(gateway, kit):
    error = ask(gateway, kit, kit.post(CHAT, kit.chat(temprature=1)))[1]["error"]
    assert (error["code"], error["param"]) == ("unknown_parameter", "temprature")
    assert error["message"].endswith("Did you mean temperature?")


# --- /v1/models ---------------------------------------------------------------------------------------


def test_models_tell_the_callers_own_limits(start, kit):
    config = kit.make_config()
    tiers = (
        TierConfig(name="gold", requests_per_minute=7, tokens_per_minute=9000, context_tokens_max=64_000),
        TierConfig(name="free", requests_per_minute=1),
    )
    tenants = tuple(
        TenantConfig(id=TenantTable(config, clock=SystemClock()).of_key(key.encode()).tenant.id, tier=tier)
        for key, tier in ((kit.KEY, "gold"), ("sk-other-key-0123456789", "free"))
    )
    running = start(msgspec.structs.replace(config, tiers=tiers, tenants=tenants))

    def limits(path: str, key: str) -> dict:
        answer = ask(running, kit, kit.get(path, f"Authorization: Bearer {key}"))[1]
        return (answer["data"][0] if "data" in answer else answer)["limits"]

    gold = {
        "tier": "gold", "requests_per_minute": 7, "tokens_per_minute": 9000, "concurrent_requests": None,
        "output_tokens": None, "context_tokens": 64_000,
    }  # fmt: skip
    for path in ("/v1/models", "/v1/models/tiny"):
        assert limits(path, kit.KEY) == gold
        free = limits(path, "sk-other-key-0123456789")
        assert (free["tier"], free["requests_per_minute"], free["context_tokens"]) == ("free", 1, None)


# --- a model that is still loading ----------------------------------------------------------------------


class Cold:
    """A gateway whose worker has not answered yet."""

    def __init__(self, kit, **queue):
        class Running(kit.RunningGateway):
            async def make_backends(self):
                backends = await super().make_backends()
                self.info = backends["tiny"].status.info
                backends["tiny"].status.info = None
                backends["tiny"].show(Phase.LOADING, "loading weights")
                return backends

        self.running = Running(kit.replace(kit.make_config(), queue=queue))

    def warm_up(self) -> None:
        def now_ready() -> None:
            self.running.backend.status.info = self.running.info
            self.running.backend.show(Phase.READY, "ready")

        self.running.call(now_ready)


@pytest.fixture
def cold(kit) -> Iterator[types.SimpleNamespace]:
    made: list[Cold] = []

    def make(**queue):
        made.append(Cold(kit, **queue))
        return made[-1]

    yield make
    for each in made:
        each.running.stop()


def answered(raws: list, wait_s: float) -> list:
    """Those that have something to read by then."""
    return select.select([raw.socket for raw in raws], [], [], wait_s)[0]


def test_requests_wait_for_a_models_first_worker(cold, kit):
    at = cold(no_worker_wait_s=30.0)
    bodies = [
        kit.post(CHAT, kit.chat(max_tokens=2)),
        kit.post("/v1/completions", {"model": "tiny", "prompt": "x", "max_tokens": 2}),
        kit.post("/v1/tokenize", {"model": "tiny", "prompt": "x"}),
    ]
    raws = [kit.Raw(at.running).send(body) for body in bodies]
    assert not answered(raws, 0.3), "none was refused while the model loads"
    at.warm_up()
    for raw in raws:
        assert raw.read_until(b"\r\n\r\n").startswith(b"HTTP/1.1 200 OK")
        raw.close()


def test_they_wait_so_long_and_then_hear_how_far_it_is(cold, kit):
    at = cold(no_worker_wait_s=0.3)
    began = time.monotonic()
    status, answer = ask(at.running, kit, kit.post(CHAT, kit.chat()))
    assert time.monotonic() - began >= 0.3
    assert (status, answer["error"]["code"]) == (503, "worker_unavailable")
    assert "not ready: loading weights" in answer["error"]["message"]


def test_they_are_refused_at_once_where_that_is_wanted(cold, kit):
    at = cold(no_worker_wait_s=0.0)
    assert ask(at.running, kit, kit.post(CHAT, kit.chat()))[0] == 503


def test_a_tenant_takes_no_more_than_its_share_of_the_waiting(cold, kit):
    at = cold(no_worker_wait_s=30.0, requests_max=4, tenant_share=0.5)
    body = kit.post(CHAT, kit.chat(max_tokens=1))
    raws = [kit.Raw(at.running).send(body) for _ in range(3)]
    (refused,) = answered(raws, 10.0)
    waiting = [raw for raw in raws if raw.socket is not refused]
    assert b"wait for the model 'tiny' to start" in refused.recv(65536)
    refused.close()
    waiting.append(
        kit.Raw(at.running).send(kit.post(CHAT, kit.chat(max_tokens=1), key="sk-other-key-0123456789"))
    )
    assert not answered(waiting, 0.2), "another tenant has a share of its own"
    waiting.pop(0).close()
    while True:  # One that leaves makes room, as soon as that is known.
        again = kit.Raw(at.running).send(body)
        if not answered([again], 0.2):
            break
        assert b" 429 " in again.read_until(b"\r\n")
        again.close()
    at.warm_up()
    for raw in (*waiting, again):
        assert raw.read_until(b'"usage"').startswith(b"HTTP/1.1 200 OK")
        raw.close()


def test_the_chat_that_a_response_is_made_of_takes_room_too(cold, kit):
    at = cold(no_worker_wait_s=30.0, bytes_max=1500)
    status, answer = ask(at.running, kit, kit.post("/v1/responses", {"model": "tiny", "input": "x" * 1000}))
    assert (status, "wait for the model" in answer["error"]["message"]) == (429, True)
    body = kit.chat(messages=[{"role": "user", "content": "x" * 1000}], max_tokens=1)
    raw = kit.Raw(at.running).send(kit.post(CHAT, body))
    refused = answered([raw], 0.1)
    raw.close()
    assert not refused, "a chat of that size waits"


def test_a_half_closed_client_waits_too(cold, kit):
    at = cold(no_worker_wait_s=30.0)
    raw = kit.Raw(at.running).send(kit.post(CHAT, kit.chat(max_tokens=1)))
    raw.socket.shutdown(socket.SHUT_WR)
    assert b"100 Continue" in raw.read_until(b"\r\n\r\n")
    at.warm_up()
    assert b"HTTP/1.1 200 OK" in raw.read_all()
    raw.close()
