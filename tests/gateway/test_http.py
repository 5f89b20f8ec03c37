"""HTTP itself, over plain sockets: what no well-behaved client sends."""

import asyncio
import contextlib
import json

import pytest

from penstock.config.tree import ServerConfig
from penstock.errors import ConfigError, Unauthenticated
from penstock.gateway.http.server import HttpServer

END = b"\r\n\r\n"


def head_and_body(answer):
    head, _, body = answer.partition(END)
    status = int(head.split()[1])
    headers = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
    return status, headers, body


def error_of(body):
    return json.loads(body)["error"]


def test_keep_alive_carries_many_requests(raw, kit):
    for _ in range(3):
        raw.send(kit.get("/health"))
        assert head_and_body(raw.read_until(b'"ok"}'))[0] == 200


def test_head_has_the_length_and_no_body(raw, kit):
    raw.send(kit.get("/health"))
    whole = raw.read_until(b'"ok"}]}').partition(b"\r\n\r\n")[2]
    raw.send(kit.get("/health", "Connection: close").replace(b"GET", b"HEAD", 1))
    status, headers, body = head_and_body(raw.read_all())
    assert (status, headers[b"content-length"], body) == (200, b"%d" % len(whole), b"")


def test_options_says_what_is_allowed(raw, kit):
    request = kit.get("/v1/chat/completions", "Connection: close").replace(b"GET", b"OPTIONS", 1)
    status, headers, body = head_and_body(raw.send(request).read_all())
    assert (status, headers[b"allow"], body) == (204, b"post, options", b"")


def test_http_1_0_gets_a_stream_without_chunks(raw, kit):
    request = kit.post("/v1/chat/completions", kit.chat(stream=True, max_tokens=2))
    status, headers, body = head_and_body(raw.send(request.replace(b"HTTP/1.1", b"HTTP/1.0")).read_all())
    assert status == 200
    assert b"transfer-encoding" not in headers
    assert body.startswith(b"data: {")
    assert body.endswith(b"data: [DONE]\n\n")


def test_a_chunked_body(raw, kit):
    body = json.dumps(kit.chat(max_tokens=1)).encode()
    pieces = b"".join(b"%x\r\n%b\r\n" % (1, body[i : i + 1]) for i in range(len(body)))
    head = kit.post("/v1/chat/completions", b"", "Transfer-Encoding: chunked", "Connection: close")
    raw.send(head.replace(b"Content-Length: 0\r\n", b"") + pieces + b"0\r\n\r\n")
    assert head_and_body(raw.read_all())[0] == 200


def test_expect_100_continue(raw, kit):
    whole = kit.post("/v1/tokenize", {"prompt": "abc"}, "Expect: 100-continue", "Connection: close")
    head, _, body = whole.partition(END)
    raw.send(head + END)
    assert raw.read_until(END) == b"HTTP/1.1 100 Continue\r\n\r\n"
    answer = head_and_body(raw.send(body).read_all())
    assert json.loads(answer[2])["count"] == 3


def test_other_expectations_fail(raw, kit):
    raw.send(kit.post("/v1/tokenize", {"prompt": "abc"}, "Expect: tea"))
    assert head_and_body(raw.read_all())[0] == 417


def test_a_wrong_key_is_refused_before_the_body(raw, kit):
    head = kit.post("/v1/chat/completions", b"", "Expect: 100-continue", key="no").partition(END)[0]
    raw.send(head.replace(b"Content-Length: 0", b"Content-Length: 1000000") + END)
    status, headers, body = head_and_body(raw.read_all())
    assert status == 401
    assert headers[b"www-authenticate"].startswith(b"bearer")
    assert headers[b"connection"] == b"close"
    assert error_of(body)["code"] == "invalid_api_key"


def test_a_key_that_ends_while_the_body_comes_is_refused(gateway, raw, kit, monkeypatch):
    """A head whose body comes with it is looked at once; one whose body comes later, again then."""
    entrance = gateway.gateway._entrance
    looked, ask = [], entrance.caller

    def caller(access, head, client):
        if looked and looked[-1] == "ends":
            raise Unauthenticated("this key has ended")
        looked.append("looked")
        return ask(access, head, client)

    monkeypatch.setattr(entrance, "caller", caller)
    whole = kit.post("/v1/tokenize", {"prompt": "abc"})
    raw.send(whole)
    assert b"200 OK" in raw.read_until(b"}")
    assert looked == ["looked"]
    head, _, body = kit.post("/v1/tokenize", {"prompt": "abc"}, "Expect: 100-continue").partition(END)
    raw.send(head + END)
    raw.read_until(END)  # The head was looked at.
    looked.append("ends")
    assert b" 401 " in raw.send(body).read_until(b"}")


MALFORMED = [
    b"GARBAGE\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS.
    b"GET / HTTP/1.1\r\nHost: x\r\nbad header\r\n\r\n",
    b"GET / HTTP/9.9\r\nHost: x\r\n\r\n",
    b"POST /v1/tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    b"POST /v1/tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
    b"POST /v1/tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
    b"GET / HTTP/1.1\r\n\r\n",  # No Host.
    b"GET / HTTP/1.1\r\nHost: x\r\nX: a\x00b\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
]


@pytest.mark.parametrize("data", MALFORMED)
def test_malformed_requests_get_400_and_a_closed_connection(gateway, kit, data):
    raw = kit.Raw(gateway)
    status, headers, body = head_and_body(raw.send(data).read_all())
    raw.close()
    assert status == 400
    assert headers[b"connection"] == b"close"
    assert error_of(body)["type"] == "invalid_request_error"


def test_a_broken_chunk_in_the_body(raw, kit):
    head = kit.post("/v1/tokenize", b"", "Transfer-Encoding: chunked")
    raw.send(head.replace(b"Content-Length: 0\r\n", b"") + b"zz\r\n")
    assert head_and_body(raw.read_all())[0] == 400


@pytest.mark.parametrize(
    "data",
    [
        b"GET /" + b"a" * 40_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 40_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n" + b"X: a\r\n" * 9_000,
        b"GET / HTTP/1.1\r\nHost: x\r\n" + b"".join(b"X%d: a\r\n" % i for i in range(150)) + b"\r\n",
    ],
)
def test_headers_over_the_bound(gateway, kit, data):
    raw = kit.Raw(gateway)
    answer = raw.send(data).read_all()
    raw.close()
    assert head_and_body(answer)[0] == 431


def test_the_bound_of_header_fields_is_configured(start, kit):
    running = start(kit.make_config(), headers_max=5)
    for num_fields, status in ((4, 200), (5, 431)):
        raw = kit.Raw(running)
        fields = b"".join(b"X%d: a\r\n" % i for i in range(num_fields))
        raw.send(b"GET /health HTTP/1.1\r\nHost: x\r\n" + fields + b"\r\n")
        assert b"HTTP/1.1 %d" % status in raw.read_until(b"\r\n")
        raw.close()


def test_headers_over_the_bound_in_drops(raw):
    raw.send(b"GET / HTTP/1.1\r\nHost: x\r\nX: ")
    for _ in range(10):
        raw.send(b"a" * 4_000)
    assert head_and_body(raw.read_all())[0] == 431


def test_an_announced_body_over_the_bound_is_refused_unread(gateway, raw, kit):
    head = kit.post("/v1/tokenize", b"").replace(
        b"Content-Length: 0", b"Content-Length: 99999999999999999999999"
    )
    assert head_and_body(raw.send(head).read_all())[0] == 400  # A number over 64 bits is no HTTP.
    head = kit.post("/v1/tokenize", b"").replace(b"Content-Length: 0", b"Content-Length: 8388609")
    raw = kit.Raw(gateway)
    assert head_and_body(raw.send(head).read_all())[0] == 413
    raw.close()


def test_bodies_over_the_bound(start, kit):
    running = start(kit.make_config(body_bytes_max=1000))
    for data in (
        kit.post("/v1/tokenize", b"x" * 1001),
        kit.post("/v1/tokenize", b"", "Transfer-Encoding: chunked").replace(b"Content-Length: 0\r\n", b"")
        + b"400\r\n" + b"x" * 1024 + b"\r\n0\r\n\r\n",
    ):  # fmt: skip
        raw = kit.Raw(running)
        status, headers, body = head_and_body(raw.send(data).read_all())
        raw.close()
        assert status == 413
        assert headers[b"connection"] == b"close"
        assert error_of(body)["code"] == "request_too_large"
    raw = kit.Raw(running)
    raw.send(kit.post("/v1/tokenize", {"prompt": "x" * 900}, "Connection: close"))
    assert head_and_body(raw.read_all())[0] == 200
    raw.close()


@pytest.mark.parametrize(
    ("data", "what"),
    [(b"GET / HTTP/1.1\r\nHo", b"headers"), (b"POST /v1/tokenize HTTP/1.1\r\nHost: x\r\n", b"headers")],
)
def test_slow_headers_time_out(start, kit, data, what):
    running = start(kit.make_config(), header_timeout_s=0.1)
    raw = kit.Raw(running)
    status, _, body = head_and_body(raw.send(data).read_all())
    raw.close()
    assert status == 408
    assert what in body


def test_a_slow_body_times_out(start, kit):
    running = start(kit.make_config(), body_timeout_s=0.1)
    raw = kit.Raw(running)
    whole = kit.post("/v1/tokenize", {"prompt": "abc"})
    assert head_and_body(raw.send(whole[:-3]).read_all())[0] == 408
    raw.close()


def test_idle_connections_are_closed(start, kit):
    running = start(kit.make_config(), keepalive_timeout_s=0.1)
    raw = kit.Raw(running)
    raw.send(kit.get("/health"))
    assert raw.read_until(b'"ok"}')
    with contextlib.suppress(ConnectionResetError):
        assert raw.socket.recv(1) == b""
    raw.close()


def test_pipelined_requests_are_not_served(gateway, kit):
    raw = kit.Raw(gateway)
    answer = raw.send(kit.get("/health") * 3).read_all()
    raw.close()
    assert answer.count(b"HTTP/1.1 200") == 1
    assert head_and_body(answer)[1][b"connection"] == b"close"


def test_a_second_request_during_a_stream_closes_after_it(start, kit):
    # A second of streaming, so that the second request comes in its middle however busy the machine is.
    raw = kit.Raw(start(step_s=0.005))
    raw.send(kit.post("/v1/chat/completions", kit.chat(stream=True, max_tokens=200)))
    raw.read_until(b"data: ")
    answer = raw.send(kit.get("/health")).read_all()
    raw.close()
    assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert b"HTTP/1.1" not in answer


def test_a_stray_line_break_after_a_body_is_forgiven(raw, kit):
    raw.send(kit.post("/v1/tokenize", {"prompt": "abc"}) + b"\r\n")
    assert b"200 OK" in raw.read_until(b'"tokens"')
    raw.send(kit.get("/health"))
    assert b'"ok"' in raw.read_until(b'"ok"}')


def test_an_upgrade_is_ignored(raw, kit):
    raw.send(kit.get("/health", "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAM"))
    assert head_and_body(raw.read_all())[0] == 200


def test_too_many_connections(start, kit):
    running = start(kit.make_config(), connections_max=2)
    first, second = kit.Raw(running), kit.Raw(running)
    assert b"200" in first.send(kit.get("/health")).read_until(b'"ok"}')
    assert b"200" in second.send(kit.get("/health")).read_until(b'"ok"}')
    third = kit.Raw(running)
    status, headers, body = head_and_body(third.read_all())
    assert status == 503
    assert headers[b"retry-after"] == b"1"
    assert error_of(body)["code"] == "overloaded"
    for raw in (first, second, third):
        raw.close()
    running.wait_until(lambda: running.gateway._server.num_connections == 0)
    again = kit.Raw(running)
    assert b"200" in again.send(kit.get("/health")).read_until(b'"ok"}')
    again.close()


def test_a_port_in_use_is_said_plainly(gateway):
    taken = ServerConfig(port=gateway.port)
    server = HttpServer(gateway.gateway, taken, clock=gateway.clock)
    with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1 port {gateway.port}"):
        asyncio.run(server.start())
