"""Headers that say how a request may be treated and who answered it, and `model: "auto"`."""

import itertools
import json
from types import SimpleNamespace

import pytest

from penstock.config.flow import LimitsConfig
from penstock.config.routing import AdmissionConfig, AutoModel, ModelRoute, RoutingConfig
from penstock.errors import Forbidden, InvalidRequest, NotFound
from penstock.gateway.api.job import Hints, read_hints
from penstock.gateway.dispatch.dispatcher import migrated as how_migrated
from penstock.gateway.http.exchange import Exchange, RequestHead, Response, Served
from penstock.gateway.models.auto_model import AutoModels, features_of
from penstock.policy.tenant import ANONYMOUS, Tenant
from penstock.policy.terms import BandTerms
from penstock.protocol.openai import ChatRequest, CompletionRequest, FunctionSpec, Message, ToolSpec
from penstock.telemetry.catalog import Endpoint
from penstock.types import TenantId

CONFIG, LIMITS = AdmissionConfig(), LimitsConfig()
ADMIN_KEY = "sk-admin-0123456789"


# --- what the client says -------------------------------------------------------------------------


def test_no_headers_are_no_hints() -> None:
    assert read_hints({b"host": b"x"}, None) == Hints()


def test_both_headers() -> None:
    headers = {b"x-penstock-degrade": b" Prefer", b"x-penstock-max-wait-ms": b"1500"}
    assert read_hints(headers, None) == Hints(degrade="prefer", max_wait_ns=1_500_000_000)


@pytest.mark.parametrize("value", [b"", b"maybe", b"never, allow", b"\xff\x00", b"never" * 1000])
def test_a_degrade_that_is_no_word_of_ours(value: bytes) -> None:
    with pytest.raises(InvalidRequest, match=r"x-penstock-degrade.*never, allow, prefer") as caught:
        read_hints({b"x-penstock-degrade": value}, None)
    assert caught.value.param == "x-penstock-degrade"
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize(
    "value", [b"", b"0", b"-1", b"1.5", b"1e3", b"600001", b"9" * 5000, "٣".encode(), b"1,2", b"nan"]
)
def test_a_wait_that_is_out_of_bounds(value: bytes) -> None:
    with pytest.raises(InvalidRequest, match=r"x-penstock-max-wait-ms.*from 1 to 600000") as caught:
        read_hints({b"x-penstock-max-wait-ms": value}, None)
    assert caught.value.param == "x-penstock-max-wait-ms"


def test_a_session_is_named_by_the_client() -> None:
    assert read_hints({b"x-penstock-session": b" talk-7 "}, None) == Hints(session="talk-7")


@pytest.mark.parametrize(
    ("headers", "user", "session"),
    [
        ({}, "someone", "someone"),
        ({}, "x" * 257, "x" * 256),
        ({}, {"name": "no text"}, ""),
        ({b"x-penstock-session": b"talk-7"}, "someone", "talk-7"),
    ],
)
def test_a_session_is_named_by_the_user_if_by_no_header(headers, user, session) -> None:
    assert read_hints(headers, user) == Hints(session=session)


def test_a_session_name_is_bounded(monkeypatch) -> None:
    monkeypatch.setattr("penstock.gateway.api.job.SESSION_BYTES_MAX", 4)
    assert read_hints({}, "someone") == Hints(session="some")
    with pytest.raises(InvalidRequest, match=r"x-penstock-session.*1 to 4 characters"):
        read_hints({b"x-penstock-session": b"five5"}, None)


@pytest.mark.parametrize("value", [b"", b"  ", b"x" * 257])
def test_a_session_name_that_is_none(value: bytes) -> None:
    with pytest.raises(InvalidRequest, match=r"x-penstock-session.*1 to 256") as caught:
        read_hints({b"x-penstock-session": value}, None)
    assert caught.value.param == "x-penstock-session"


# --- what the client is told ----------------------------------------------------------------------


def exchange_of(**served):
    """An exchange that a model answers, and what it wrote."""
    sent = []
    wire = SimpleNamespace(write=sent.append, paused=False, response_done=lambda **_: None)
    head, terms = RequestHead(method="POST", path="/", headers={}), SimpleNamespace(flusher=None)
    exchange = Exchange(head, wire, client="", terms=terms, on_finished=lambda _: None)
    exchange.serve(Served(counted_model=served["model"], endpoint=Endpoint.CHAT, **served))
    return exchange, sent


def reported(sent):
    """The headers of ours in a response."""
    lines = [line.split(b": ", 1) for line in sent[0].split(b"\r\n")]
    return {name: value for name, *(value,) in lines[1:-2] if name.startswith(b"x-penstock-")}


def test_only_the_model_where_nothing_was_changed() -> None:
    exchange, sent = exchange_of(model="large", requested="large")
    exchange.respond(Response(body=b""))
    assert reported(sent) == {b"x-penstock-model": b"large"}
    assert json.loads(exchange.served_facts()) == {"model": "large"}


def test_all_that_is_known() -> None:
    exchange, sent = exchange_of(
        model="klein/ä", requested="large", downgrade="slo", route="complexity=0.31 (code .20)"
    )
    exchange.queue_ns, exchange.migrated = 12_400_000, "exact"
    exchange.begin_stream()
    assert reported(sent) == {
        b"x-penstock-model": b"klein/%C3%A4",
        b"x-penstock-requested-model": b"large",
        b"x-penstock-downgrade": b"slo",
        b"x-penstock-route": b"complexity=0.31 (code .20)",
        b"x-penstock-queue-ms": b"12",
        b"x-penstock-migrated": b"exact",
    }
    assert json.loads(exchange.served_facts()) == {
        "model": "klein/ä",
        "requested_model": "large",
        "downgrade": "slo",
        "route": "complexity=0.31 (code .20)",
        "queue_ms": 12,
        "migrated": "exact",
    }


@pytest.mark.parametrize(
    ("starts", "migrated"),
    [
        (("", ""), "exact"),
        (("", "", ""), "exact"),
        (("approximate", ""), "approximate"),
        (("approximate", "none"), "approximate"),
        (("approximate", "", ""), "approximate"),
    ],
)
def test_a_continuation_is_exact_between_workers_of_ours_only(starts: tuple[str, ...], migrated: str) -> None:
    exchange, _ = exchange_of(model="m", requested="m")
    for exchange.migration, migration in itertools.pairwise(starts):
        exchange.migrated = how_migrated(exchange, migration)
    assert exchange.migrated == migrated


# --- auto -----------------------------------------------------------------------------------------

ROUTING = RoutingConfig(
    models=(ModelRoute(model="small", tools=False),),
    auto=(AutoModel(model="small", up_to=0.195), AutoModel(model="large")),
)
TOOL = ToolSpec(type="function", function=FunctionSpec(name="f"))


def chat(*texts: str, **fields) -> ChatRequest:
    return ChatRequest(
        model="auto", messages=[Message(role="user", content=text) for text in texts], **fields
    )


def chosen(request, *, tenant: Tenant = ANONYMOUS, lengths=None) -> str:
    return (
        AutoModels(ROUTING)
        .choose(request, tenant, ({"small": 4096, "large": 4096} if lengths is None else lengths).get)
        .model
    )


def test_by_what_the_request_needs() -> None:
    assert chosen(chat("hi")) == "small"
    assert chosen(chat("hi", tools=[TOOL])) == "large"
    assert chosen(chat("hi", tools=[TOOL], tool_choice="none")) == "small"
    assert chosen(chat("hi", max_tokens=5000), lengths={"small": 4096, "large": 8192}) == "large"
    assert chosen(chat("hi"), lengths={"large": 4096}) == "large"
    assert chosen(chat("hi"), lengths={}) == "small"
    assert chosen(chat("hi", max_tokens=10**6)) == "small"


def test_by_what_the_tenant_may_use() -> None:
    only_large = Tenant(id=TenantId("t"), models=frozenset({"large"}))
    assert chosen(chat("hi"), tenant=only_large) == "large"
    with pytest.raises(Forbidden):
        chosen(chat("hi"), tenant=Tenant(id=TenantId("t"), models=frozenset({"other"})))
    only_small = Tenant(id=TenantId("t"), models=frozenset({"small"}))
    with pytest.raises(NotFound, match="tools"):
        chosen(chat("hi", tools=[TOOL]), tenant=only_small)


def test_features_of_every_kind_of_prompt() -> None:
    request = chat("one", "two", tools=[TOOL])
    features = features_of(request, tier="pro")
    assert (list(features.texts), features.num_chars, features.num_tools, features.tier) == (
        ["one", "two"],
        6,
        1,
        "pro",
    )
    plain = CompletionRequest(model="auto", prompt=["ab", [1, 2, 3], "c"])
    assert (list(features_of(plain, tier="").texts), features_of(plain, tier="").num_chars) == (
        ["ab", "c"],
        15,
    )
    ids = CompletionRequest(model="auto", prompt=[1, 2])
    assert features_of(ids, tier="").num_chars == 8


@pytest.fixture(scope="module")
def auto_gateway(kit):
    auto = (AutoModel(model="tiny"),)
    config = kit.replace(kit.make_config(), routing={"auto": auto}, auth={"admin_keys": (ADMIN_KEY,)})
    running = kit.RunningGateway(config)
    yield running
    running.stop()


def ask(kit, gateway, request: bytes) -> tuple[dict[str, str], bytes]:
    """Headers and body of one answer."""
    raw = kit.Raw(gateway)
    head, _, body = raw.send(request).read_all().partition(b"\r\n\r\n")
    raw.close()
    return dict(line.split(": ", 1) for line in head.decode().split("\r\n")[1:]), body


def test_auto_is_listed(kit, auto_gateway) -> None:
    headers = (f"Authorization: Bearer {kit.KEY}", "Connection: close")
    listed = json.loads(ask(kit, auto_gateway, kit.get("/v1/models", *headers))[1])
    assert [card["id"] for card in listed["data"]] == ["tiny", "auto"]
    assert json.loads(ask(kit, auto_gateway, kit.get("/v1/models/auto", *headers))[1])["id"] == "auto"


def test_auto_answers_and_says_how_it_was_chosen(kit, auto_gateway) -> None:
    body = kit.chat(model="auto", max_tokens=3)
    headers, answer = ask(kit, auto_gateway, kit.post("/v1/chat/completions", body, "Connection: close"))
    assert json.loads(answer)["model"] == "tiny"
    assert headers["x-penstock-model"] == "tiny"
    assert headers["x-penstock-requested-model"] == "auto"
    assert headers["x-penstock-downgrade"] == "complexity"
    assert headers["x-penstock-route"].startswith("complexity=0.00 (simple -")
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    streamed, events = ask(kit, auto_gateway, kit.post("/v1/chat/completions", body, "Connection: close"))
    assert streamed["x-penstock-route"] == headers["x-penstock-route"]
    last = next(line for line in events.split(b"\n") if b'"penstock":{' in line)
    facts = json.loads(last.removeprefix(b"data: "))["penstock"]
    assert facts.pop("queue_ms") >= 0
    assert facts == {
        "model": "tiny",
        "requested_model": "auto",
        "downgrade": "complexity",
        "route": headers["x-penstock-route"],
    }


def test_how_it_was_chosen_is_in_the_log_and_explained(kit, auto_gateway) -> None:
    body = kit.chat(model="auto", max_tokens=3)
    headers, answer = ask(kit, auto_gateway, kit.post("/v1/chat/completions", body, "Connection: close"))
    get = kit.get(
        f"/admin/explain/{json.loads(answer)['id']}",
        f"Authorization: Bearer {ADMIN_KEY}",
        "Connection: close",
    )
    reported = json.loads(ask(kit, auto_gateway, get)[1])
    assert [each["reason"] for each in reported["decisions"]] == ["only"]
    choice = reported["model_choice"]
    assert (choice["model"], choice["complexity"], choice["passed_over"]) == ("tiny", 0.0, [])
    assert choice["parts"]["simple"] < 0
    lines = auto_gateway.log_text.getvalue().splitlines()
    (line,) = (each for each in lines if "model chosen" in each and headers["x-request-id"] in each)
    assert f"complexity=0.0 part_simple={round(choice['parts']['simple'], 3)}" in line


def test_a_model_that_was_asked_for_by_name(kit, auto_gateway) -> None:
    body = {"model": "tiny", "prompt": "hi", "max_tokens": 2}
    headers, _ = ask(kit, auto_gateway, kit.post("/v1/completions", body, "Connection: close"))
    assert [name for name in headers if name.startswith("x-penstock")] == [
        "x-penstock-model",
        "x-penstock-queue-ms",
    ]


def test_in_a_band_of_deadlines_who_waits_less_long_starts_first(kit) -> None:
    bands = (BandTerms(name="default", order=0, discipline="deadline"),)
    config = kit.replace(
        kit.make_config(), queue={"bands": bands, "worker_credit": 0}, admission=kit.NO_PROMISES
    )
    running = kit.RunningGateway(config, max_running=1, step_s=0.01)
    asked = [("first", 400, ()), ("patient", 2, ()), ("urgent", 2, ("x-penstock-max-wait-ms: 30000",))]
    sockets = []
    for number, (name, max_tokens, headers) in enumerate(asked):
        body = {"model": "tiny", "prompt": name, "max_tokens": max_tokens}
        sockets.append(
            kit.Raw(running).send(kit.post("/v1/completions", body, "Connection: close", *headers))
        )
        running.wait_until(lambda number=number: running.gateway.num_accepted == number + 1)
    running.wait_until(lambda: running.backend.num_streams == 1)
    sockets[0].close()
    for raw in sockets[1:]:
        assert b"200 OK" in raw.read_all()
        raw.close()
    running.stop()
    names = [bytes(request.prompt_token_ids) for request in running.requests]
    assert len(names) == 3
    assert len(names[1]) < len(names[2]), "urgent is shorter than patient"
