"""What an operator of a whole server meets: two workers of a renamed model, two tenants, open to other
machines.

Everything goes over sockets, to one `penstock serve` as the command line starts it.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from http.client import HTTPMessage

import psutil
import pytest
from served import PATIENCE_S, Server

ACME, ZOO, ADMIN = "sk-acme-0123456789abcdef", "sk-zoo-0123456789abcdef", "sk-admin-0123456789abcdef"
ORIGIN = "https://chat.example.com"
NAME = "a-small-model-with-a-long-name"
CONFIG = f"""
models:
  - path: penstock-demo-mini
    name: {NAME}
    replicas: 2
    engine: {{threads: 1, kv_memory_bytes: 4194304, max_running: 8}}
server: {{host: 0.0.0.0, port: 0, cors_origins: ["{ORIGIN}"]}}
auth: {{keys: ["{ACME}", "{ZOO}"], admin_keys: ["{ADMIN}"]}}
"""

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    place = tmp_path_factory.mktemp("operator")
    (place / "penstock.yaml").write_text(CONFIG)
    made = Server(place, "-c", str(place / "penstock.yaml"), PENSTOCK_STATE_DIR=str(place / "state"))
    try:
        made.wait_ready()
        yield made
    finally:
        made.close()


class Answer:
    def __init__(self, status: int, headers: HTTPMessage, body: bytes) -> None:
        self.status, self.headers, self.body = status, headers, body

    @property
    def json(self) -> dict:
        return json.loads(self.body)


def call(
    server: Server,
    path: str,
    body: object = None,
    *,
    key: str = ADMIN,
    method: str | None = None,
    **headers: str,
) -> Answer:
    """Over loopback, wherever the banner says that others find it."""
    port = int(server.url.rpartition(":")[2].removesuffix("/v1"))
    data = None if body is None else json.dumps(body).encode()
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    if data is not None:
        sent["Content-Type"] = "application/json"
    if key:
        sent["Authorization"] = f"Bearer {key}"
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, sent, method=method)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return Answer(answer.status, answer.headers, answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return Answer(error.code, error.headers, error.read())


def chat(max_tokens: int = 4, **fields: object) -> dict[str, object]:
    messages = [{"role": "user", "content": "What is 1 + 2?"}]
    return {"model": NAME, "messages": messages, "max_tokens": max_tokens, **fields}


def until(look: Callable[[], object], what: str) -> object:
    deadline = time.monotonic() + PATIENCE_S
    while not (found := look()):
        assert time.monotonic() < deadline, what
        time.sleep(0.02)
    return found


def test_the_banner_names_an_address_for_other_machines(server: Server) -> None:
    text = server.out.read_text()
    assert "listens on 0.0.0.0" in text
    host = re.search(r"API +http://([^:/]+):", text)
    assert host
    mine = {
        each.address
        for addresses in psutil.net_if_addrs().values()
        for each in addresses
        if each.family == socket.AF_INET
    }
    assert host[1] in mine
    assert not host[1].startswith("127.") or all(address.startswith("127.") for address in mine)
    request = urllib.request.Request(f"{server.url}/models", headers={"Authorization": f"Bearer {ACME}"})
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        assert NAME in answer.read().decode()


def test_polls_are_no_news(server: Server) -> None:
    for path in ("/ready", "/metrics", "/status.json", "/health", "/admin/workers"):
        assert call(server, path).status == 200
    assert call(server, "/admin/workers", key="").status == 401  # Somebody's key is wrong: that is news.
    assert call(server, "/v1/chat/completions", chat(), key=ACME).status == 200
    server.wait_said("POST /v1/chat/completions 200")
    lines = [line for line in server.err.read_text().splitlines() if " GET /" in line and "/v1/" not in line]
    assert [line for line in lines if "GET /admin/workers 401" in line]
    assert not [line for line in lines if " 200 " in line]


def test_pages_of_a_listed_origin_may_call_the_api(server: Server) -> None:
    preflight = call(
        server, "/v1/chat/completions", key="", method="OPTIONS", Origin=ORIGIN,
        Access_Control_Request_Method="POST", Access_Control_Request_Headers="authorization,content-type,"
        "x-stainless-os",
    )  # fmt: skip
    assert (preflight.status, preflight.body) == (204, b"")
    reported = {name.lower(): value for name, value in preflight.headers.items()}
    assert reported["access-control-allow-origin"] == ORIGIN
    assert reported["access-control-allow-methods"] == "POST"
    assert reported["access-control-allow-headers"] == "authorization,content-type,x-stainless-os"
    assert reported["vary"] == "Origin"
    for stream in (False, True):
        answer = call(server, "/v1/chat/completions", chat(stream=stream), key=ACME, Origin=ORIGIN)
        assert answer.status == 200
        assert answer.headers["access-control-allow-origin"] == ORIGIN
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
        assert "retry-after" in answer.headers["access-control-expose-headers"]
    refused = call(server, "/v1/chat/completions", chat(), key="", Origin=ORIGIN)
    assert (refused.status, refused.headers["access-control-allow-origin"]) == (401, ORIGIN)
    for answer in (preflight, refused):
        assert "access-control-allow-credentials" not in answer.headers


def test_other_origins_and_other_paths_are_told_nothing(server: Server) -> None:
    stranger = call(server, "/v1/models", key=ACME, Origin="https://evil.example.com")
    assert (stranger.status, stranger.headers["access-control-allow-origin"]) == (200, None)
    assert stranger.headers["vary"] == "Origin"  # A cache must not hand this to a page that may read it.
    for path in ("/metrics", "/status.json", "/admin/workers", "/"):
        assert call(server, path, Origin=ORIGIN).headers["access-control-allow-origin"] is None
    preflight = call(
        server,
        "/admin/workers",
        key="",
        method="OPTIONS",
        Origin=ORIGIN,
        Access_Control_Request_Method="POST",
    )
    assert "access-control-allow-origin" not in preflight.headers


def test_one_of_several_tenants_may_hold_half_of_the_kv_cache(server: Server) -> None:
    (model,) = call(server, "/status.json").json["models"]
    tokens = model["info"]["num_blocks"] * model["info"]["block_tokens"]  # Of each worker.
    assert model["info"]["max_model_len"] > 0.8 * tokens, "or the context would be what refuses"
    much = call(server, "/v1/chat/completions", chat(int(0.7 * tokens)), key=ACME)
    assert (much.status, much.json["error"]["code"]) == (400, "kv_quota_exceeded")
    assert call(server, "/v1/chat/completions", chat(int(0.4 * tokens)), key=ACME).status == 200


def test_top_fits_a_terminal_of_eighty(server: Server) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "penstock", "top", "--once", "--interval", "0.1", "--url", server.url],
        env={**os.environ, "PENSTOCK_ADMIN_KEY": ADMIN, "COLUMNS": "80"},
        capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    for worker in (f"{NAME}-0", f"{NAME}-1"):
        (line,) = (line for line in lines if line.startswith(worker))
        assert "ready" in line.split()


def test_a_dead_worker_of_two_shows_and_is_named_with_its_time(server: Server) -> None:
    os.kill(server.workers[-1], signal.SIGKILL)

    def dead() -> tuple[dict, str] | None:
        status = call(server, "/status.json").json
        gone = [worker["id"] for worker in status["workers"] if worker["state"] != "ready"]
        return (status, gone[0]) if gone else None

    status, killed = until(dead, "it was never seen to be gone")
    (model,) = status["models"]
    assert model["ready"] is True
    assert model["workers"].get("ready") == 1
    health = call(server, "/health", key="")
    assert (health.status, health.json["status"]) == (200, "degraded")
    (note,) = until(lambda: call(server, "/status.json").json["models"][0]["notes"], "no note")
    assert re.fullmatch(
        rf"{killed}, \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d UTC: the worker was killed by SIGKILL", note
    )
    until(lambda: call(server, "/health").json["status"] == "ok", "it never came back")
    (worker,) = (each for each in call(server, "/admin/workers").json["workers"] if each["id"] == killed)
    assert re.fullmatch(r"\d{4}-.* UTC: the worker was killed by SIGKILL", worker["notes"][0])
