"""Who may go where, over sockets: pages of other sites, callers behind proxies, scrapers and tenants."""

import json
import socket
from collections.abc import Iterator

import pytest
from plain_proxy import plain_proxy
from tenant_keys import add

from penstock.backends.base import Phase

ADMIN_KEY, SCRAPE_KEY = "sk-admin-0123456789", "sk-scrape-0123456789"
DRAIN = "/admin/workers/tiny-0/drain"
CHAT = "/v1/chat/completions"


def raw(kit, running, text: str, *, port: int = 0) -> tuple[int, dict]:
    """Status and JSON of a request that is sent as it is; `port`: to a proxy."""
    with socket.create_connection((running.host, port or running.port), timeout=20) as wire:
        wire.sendall(text.replace("\n", "\r\n").encode())
        data = b""
        while b"\r\n\r\n" not in data or len(data.partition(b"\r\n\r\n")[2]) < length_of(data):
            piece = wire.recv(65536)
            if not piece:
                break
            data += piece
    body = data.partition(b"\r\n\r\n")[2]
    return int(data.split()[1]), json.loads(body) if body.startswith(b"{") else {}


def length_of(head: bytes) -> int:
    lines = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    return int(lines[0].partition(b":")[2])


def ask(kit, running, path: str, *headers: str, body: dict | None = None, key: str = "", port: int = 0):
    """One request; its Host is the server's own unless the headers say another one."""
    data = "" if body is None else json.dumps(body)
    lines = [f"{'GET' if body is None else 'POST'} {path} HTTP/1.1", *headers]
    if not any(line.lower().startswith("host:") for line in headers):
        lines.append(f"Host: 127.0.0.1:{running.port}")
    if key:
        lines.append(f"Authorization: Bearer {key}")
    if body is not None:
        lines.append(f"Content-Length: {len(data)}")
    return raw(kit, running, "\n".join([*lines, "", ""]) + data, port=port)


def code_of(answer: tuple[int, dict]) -> tuple[int, str]:
    return answer[0], answer[1]["error"]["code"]


@pytest.fixture(scope="module")
def without_keys(kit) -> Iterator[object]:
    """A server without authentication."""
    config = kit.replace(
        kit.make_config(trust_local=False, hosts=("chat.example",)), auth={"keys": (), "disabled": True}
    )
    running = kit.RunningGateway(config)
    yield running
    running.stop()


@pytest.fixture(scope="module")
def with_keys(kit, tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """A server with keys of every kind, as it is configured by default."""
    path = tmp_path_factory.mktemp("keys") / "keys.jsonl"
    stored = {
        "tenant": add(path, tenant="acme").key,
        "other": add(path, tenant="beta").key,
        "admin": add(path, tenant="ops", admin=True).key,
        "scraper": add(path, tenant="ops", scrape=True).key,
    }
    auth = {"admin_keys": (ADMIN_KEY,), "scrape_keys": (SCRAPE_KEY,), "keys_file": str(path)}
    config = kit.make_config(trust_local=False)
    running = kit.RunningGateway(kit.replace(config, auth=auth, queue={"no_worker_wait_s": 0.0}))
    running.stored = stored
    yield running
    running.stop()


# --- without keys: pages of other sites --------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        (("Host: evil.example", "Origin: https://evil.example"), "foreign_host"),
        (("Host: evil.example:8000", "Origin: http://evil.example:8000"), "foreign_host"),  # DNS rebinding.
        (("Host: evil.example",), "foreign_host"),
        (("Host: 10.0.0.7",), "foreign_host"),
        (("Host: 127.0.0.1.evil.example",), "foreign_host"),
        (("Origin: https://evil.example",), "foreign_origin"),
        (("Origin: null",), "foreign_origin"),
        (("Origin: http://127.0.0.1:1",), "foreign_origin"),
        (("Sec-Fetch-Site: cross-site",), "foreign_origin"),
        (("Origin: https://chat.example.evil.example",), "foreign_origin"),
    ],
)
def test_a_page_of_another_site_reaches_nothing(kit, without_keys, headers, code) -> None:
    """A POST with text/plain needs no preflight, so the browser sends it: the server has to say no."""
    plain = "Content-Type: text/plain"
    assert code_of(ask(kit, without_keys, DRAIN, plain, *headers, body={})) == (403, code)
    # The model is still there.
    assert code_of(ask(kit, without_keys, CHAT, plain, *headers, body=kit.chat(max_tokens=1))) == (403, code)
    for path in ("/metrics", "/status.json", "/v1/models", "/admin/workers"):
        assert code_of(ask(kit, without_keys, path, *headers)) == (403, code)
    assert ask(kit, without_keys, "/health", *headers)[0] == 200
    assert ask(kit, without_keys, CHAT, body=kit.chat(max_tokens=1))[0] == 200


@pytest.mark.parametrize(
    "headers",
    [
        (),
        ("Host: localhost",),
        ("Host: LocalHost:9000", "Origin: http://localhost:9000"),
        ("Host: [::1]:8000",),
        ("Host: chat.example", "Origin: https://chat.example", "Sec-Fetch-Site: same-origin"),
        ("Host: Chat.Example:443",),
        ("Origin: https://chat.example", "Sec-Fetch-Site: cross-site"),  # A proxy that sets Host to ours.
        ("Sec-Fetch-Site: same-origin",),
        ("Sec-Fetch-Site: none",),
    ],
)
def test_its_own_pages_and_programs_of_this_machine_are_served(kit, without_keys, headers) -> None:
    for path in ("/metrics", "/status.json", "/v1/models", "/admin/workers"):
        assert ask(kit, without_keys, path, *headers)[0] == 200
    assert ask(kit, without_keys, CHAT, *headers, body=kit.chat(max_tokens=1))[0] == 200


def test_what_a_proxy_passes_on_is_not_of_this_machine(kit, without_keys) -> None:
    for header in (
        "X-Forwarded-For: 10.0.0.1",
        "Forwarded: for=10.0.0.1",
        "Via: 1.1 x",
        "X-Real-IP: 10.0.0.1",
    ):
        for path in ("/metrics", "/status.json", "/admin/workers"):
            assert code_of(ask(kit, without_keys, path, header)) == (403, "not_local")
    assert ask(kit, without_keys, "/v1/models", "X-Forwarded-For: 10.0.0.1")[0] == 200


def test_a_key_needs_no_origin(kit, with_keys) -> None:
    """No browser adds a key by itself, so a request that shows one is meant."""
    foreign = ("Host: api.example", "Origin: https://web.example", "Sec-Fetch-Site: cross-site")
    assert ask(kit, with_keys, CHAT, *foreign, body=kit.chat(max_tokens=1), key=kit.KEY)[0] == 200
    assert ask(kit, with_keys, "/admin/workers", *foreign, key=ADMIN_KEY)[0] == 200
    assert ask(kit, with_keys, "/metrics", *foreign, key=SCRAPE_KEY)[0] == 200


# --- with keys: who sees what ------------------------------------------------------------------------


def test_metrics_and_status_want_a_key(kit, with_keys) -> None:
    for path in ("/metrics", "/status.json"):
        assert ask(kit, with_keys, path)[0] == 401
        assert code_of(ask(kit, with_keys, path, key="sk-unknown-0123456789")) == (401, "invalid_api_key")
    for key in (ADMIN_KEY, SCRAPE_KEY, with_keys.stored["admin"], with_keys.stored["scraper"]):
        assert ask(kit, with_keys, "/metrics", key=key)[0] == 200
        status, everything = ask(kit, with_keys, "/status.json", key=key)
        assert (status, len(everything["workers"])) == (200, 1)


def test_a_tenant_sees_its_own_numbers_only(kit, with_keys) -> None:
    key = with_keys.stored["tenant"]
    ask(kit, with_keys, CHAT, body=kit.chat(max_tokens=3), key=kit.KEY)
    assert code_of(ask(kit, with_keys, "/metrics", key=key)) == (403, "not_a_scrape_key")
    status, own = ask(kit, with_keys, "/status.json", key=key)
    assert status == 200
    assert own == {
        "tenant": "acme", "tier": "", "draining": False, "auth": True, "streams": 0,
        "spent_day_micros": 0, "spent_month_micros": 0,
        "models": [{"name": "tiny", "ready": True, "stage": own["models"][0]["stage"], "progress": None}],
    }  # fmt: skip


def test_a_scrapers_key_is_for_nothing_else(kit, with_keys) -> None:
    chat = kit.chat(max_tokens=1)
    stored = with_keys.stored["scraper"]
    assert code_of(ask(kit, with_keys, CHAT, body=chat, key=stored)) == (403, "scrape_key")
    assert ask(kit, with_keys, "/v1/models", key=stored)[0] == 403
    assert ask(kit, with_keys, DRAIN, body={}, key=stored)[0] == 403
    assert ask(kit, with_keys, CHAT, body=chat, key=SCRAPE_KEY)[0] == 401
    assert ask(kit, with_keys, DRAIN, body={}, key=SCRAPE_KEY)[0] == 401


def test_ready_has_no_counters(kit, with_keys) -> None:
    before = ask(kit, with_keys, "/ready")[1]
    ask(kit, with_keys, CHAT, body=kit.chat(max_tokens=5), key=kit.KEY)
    status, after = ask(kit, with_keys, "/ready")
    assert status == 200
    assert before == after
    (model,) = after["models"]
    assert set(model) == {"name", "ready", "stage", "progress"}


def test_why_a_model_is_down_is_the_operators_to_know(kit, with_keys) -> None:
    why = "down: the worker exited (code 3): /srv/models/tiny/model.safetensors: not whole"
    backend, workers = with_keys.backend, with_keys.registry.of("tiny")
    info, workers.info = workers.info, None
    with_keys.call(lambda: backend.show(Phase.LOST, why))
    tenants = [with_keys.stored["tenant"], with_keys.stored["other"]]
    asked = [("/v1/tokenize", {"prompt": "a"}), (CHAT, kit.chat(max_tokens=1))]
    seen = [ask(kit, with_keys, path, body=body, key=key) for key in tenants for path, body in asked]
    assert [status for status, _ in seen] == [503] * 4
    assert seen[0][1]["error"]["message"] == "The model 'tiny' is not ready: down."
    seen += [ask(kit, with_keys, path) for path in ("/ready", "/health")]
    seen += [ask(kit, with_keys, "/status.json", key=key) for key in tenants]
    assert not [answer for answer in seen if "/srv" in json.dumps(answer) or "code 3" in json.dumps(answer)]
    assert {each["stage"] for _, answer in (seen[4], *seen[6:]) for each in answer["models"]} == {"down"}
    assert ask(kit, with_keys, "/status.json", key=ADMIN_KEY)[1]["models"][0]["stage"] == why
    assert ask(kit, with_keys, "/admin/workers", key=ADMIN_KEY)[1]["workers"][0]["stage"] == why
    workers.info = info
    with_keys.call(lambda: backend.show(Phase.READY, "ready"))


def test_local_callers_that_are_trusted_must_not_be_pages_of_others(kit, gateway) -> None:
    """`gateway` trusts local callers."""
    for path in ("/metrics", "/status.json"):
        assert ask(kit, gateway, path)[0] == 200
        assert code_of(ask(kit, gateway, path, "Host: evil.example")) == (403, "foreign_host")
        assert code_of(ask(kit, gateway, path, "Origin: https://evil.example")) == (403, "foreign_origin")
    assert ask(kit, gateway, "/admin/workers")[0] == 401


# --- behind a proxy ----------------------------------------------------------------------------------


def test_a_proxy_without_a_forwarding_header_makes_nobody_local(kit, with_keys) -> None:
    with plain_proxy(with_keys.host, with_keys.port) as port:
        for path in ("/metrics", "/status.json"):
            assert ask(kit, with_keys, path, port=port)[0] == 401
        assert ask(kit, with_keys, "/metrics", key=SCRAPE_KEY, port=port)[0] == 200
        assert ask(kit, with_keys, CHAT, body=kit.chat(max_tokens=1), key=kit.KEY, port=port)[0] == 200
