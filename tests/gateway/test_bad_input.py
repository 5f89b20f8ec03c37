"""What an attacker or a broken proxy sends: refused at once, in the OpenAI error shape, and nobody else
notices.
"""

import contextlib
import json

import pytest

BODY = b'{"prompt":"abc"}'
LENGTH = b"Content-Length: %d" % len(BODY)
CHUNKED = b"Transfer-Encoding: chunked"
CHUNKS = b"10\r\n" + BODY + b"\r\n0\r\n\r\n"
AUTH = b"Authorization: Bearer sk-test-key-0123456789"
POST = b"POST /v1/tokenize HTTP/1.1"


def message(*lines, body=b"", end=b"\r\n"):
    return end.join([*lines, b"", b""]) + body


def post(*headers, body=BODY):
    return message(POST, b"Host: x", AUTH, *headers, body=body)


def get(target=b"/health", *headers, version=b"HTTP/1.1"):
    return message(b"GET " + target + b" " + version, *(headers or [b"Host: x"]))


SMUGGLING = {
    "length and chunked": post(LENGTH, CHUNKED, body=CHUNKS),
    "chunked and length": post(CHUNKED, LENGTH, body=CHUNKS),
    "two lengths": post(LENGTH, b"Content-Length: 3"),
    "the same length twice": post(LENGTH, LENGTH),
    "a list of lengths": post(b"Content-Length: 16, 16"),
    "a signed length": post(b"Content-Length: +16"),
    "a negative length": post(b"Content-Length: -16"),
    "a length in hex": post(b"Content-Length: 0x10"),
    "a length with a gap": post(b"Content-Length: 1 6"),
    "an empty length": post(b"Content-Length: "),
    "a length over 64 bits": post(b"Content-Length: 99999999999999999999999"),
    "a folded field": get(b"/health", b"Host: x", b"X: a", b" b"),
    "a folded coding": post(b"Transfer-Encoding:", b" chunked", body=CHUNKS),
    "a field before the first": get(b"/health", b" Host: x"),
    "bare line feeds": message(b"GET /health HTTP/1.1", b"Host: x", end=b"\n"),
    "a bare line feed": b"GET /health HTTP/1.1\r\nHost: x\nX: y\r\n\r\n",
    "a bare line feed at the end": b"GET /health HTTP/1.1\r\nHost: x\r\n\n",
    "a bare carriage return": b"GET /health HTTP/1.1\r\nHost: x\rX: y\r\n\r\n",
    "a space before the colon": post(b"Content-Length : 16"),
    "a tab before the colon": post(b"Transfer-Encoding\t: chunked", body=CHUNKS),
    "coding identity": post(b"Transfer-Encoding: identity"),
    "coding gzip, chunked": post(b"Transfer-Encoding: gzip, chunked", body=CHUNKS),
    "coding chunked, chunked": post(b"Transfer-Encoding: chunked, chunked", body=CHUNKS),
    "coding chunked twice": post(CHUNKED, CHUNKED, body=CHUNKS),
    "coding chunked, identity": post(b"Transfer-Encoding: chunked, identity", body=CHUNKS),
    "coding xchunked": post(b"Transfer-Encoding: xchunked", body=CHUNKS),
    "coding behind a control character": post(b"Transfer-Encoding: \x0bchunked", body=CHUNKS),
    "a quoted coding": post(b'Transfer-Encoding: "chunked"', body=CHUNKS),
    "chunked in HTTP/1.0": post(CHUNKED, body=CHUNKS).replace(b"HTTP/1.1", b"HTTP/1.0"),
    "two hosts": get(b"/health", b"Host: x", b"Host: y"),
    "a host with a space": get(b"/health", b"Host: a b"),
    "no host": message(b"GET /health HTTP/1.1", b"X: y"),
}

CHUNK_ABUSE = {
    "a negative size": post(CHUNKED, body=b"-1\r\nx\r\n0\r\n\r\n"),
    "a size over 64 bits": post(CHUNKED, body=b"fffffffffffffffff\r\nx"),
    "a size with 0x": post(CHUNKED, body=b"0x10\r\n" + BODY + b"\r\n0\r\n\r\n"),
    "a size with a space": post(CHUNKED, body=b"10 \r\n" + BODY + b"\r\n0\r\n\r\n"),
    "line feeds alone": post(CHUNKED, body=CHUNKS.replace(b"\r\n", b"\n")),
    "a chunk that is too long": post(CHUNKED, body=b"10\r\n" + BODY + b"xx0\r\n\r\n"),
    "a line feed in an extension": post(CHUNKED, body=b"10;a\nb\r\n" + BODY + b"\r\n0\r\n\r\n"),
    "a huge extension": post(CHUNKED, body=b"10;a=" + b"b" * 2_000_000),
    "endless trailers": post(CHUNKED, body=CHUNKS[:-2] + b"X: yyyyyyyyyyyy\r\n" * 120_000),
    "a length in the trailers": post(CHUNKED, body=CHUNKS[:-2] + b"Content-Length: 4\r\n\r\n"),
}

TARGETS = {
    "CONNECT": message(b"CONNECT a.example:443 HTTP/1.1", b"Host: a.example"),
    "an absolute target": get(b"http://a.example/health"),
    "a target without a slash": get(b"health"),
    "a target in UTF-8": get("/é".encode()),
    "a target that is not UTF-8": get(b"/\xff"),
    "HTTP/0.9": b"GET /health\r\n\r\n",
    "HTTP/1.2": get(version=b"HTTP/1.2"),
    "a lower-case version": get(version=b"http/1.1"),
    "a lower-case method": get().replace(b"GET", b"get"),
    "a field without a name": get(b"/health", b"Host: x", b": y"),
    "a field name that is no token": get(b"/health", b"Host: x", b"X(: y"),
    "a field name in UTF-8": get(b"/health", b"Host: x", "X-é: y".encode()),
    "a control character": get(b"/health", b"Host: x", b"X: a\x01"),
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
}

ALL = SMUGGLING | CHUNK_ABUSE | TARGETS


def one_answer(raw):
    """The only answer until the server closes its side: status, error."""
    head, _, body = raw.read_all().partition(b"\r\n\r\n")
    assert b"connection: close" in head
    error = json.loads(body)["error"]  # One object: nothing follows it.
    assert error["message"]
    assert error["type"] == "invalid_request_error"
    assert set(error) == {"message", "type", "param", "code"}
    return int(head.split()[1]), error


def tried(gateway, kit, data):
    raw = kit.Raw(gateway)
    with contextlib.suppress(
        BrokenPipeError, ConnectionResetError
    ):  # The answer may come before all of it is sent.
        raw.send(data)
    status, _ = one_answer(raw)
    raw.close()
    return status


@pytest.mark.parametrize("name", ALL)
def test_shapes_that_two_servers_may_read_in_two_ways(gateway, kit, name):
    assert tried(gateway, kit, ALL[name]) == 400
    assert not gateway.requests or gateway.requests[-1].prompt_token_ids != (64, 65, 66)


def test_nobody_else_notices(start, kit):
    running = start(step_s=0.001)
    raw = kit.Raw(running)
    raw.send(kit.post("/v1/chat/completions", kit.chat(stream=True, max_tokens=400, ignore_eos=True)))
    got = raw.read_until(b'"content":" ')
    for data in ALL.values():
        tried(running, kit, data)
    got += raw.read_until(b"[DONE]")
    raw.close()
    assert got.count(b'"delta":{"content":') == 400
    running.wait_until(lambda: running.gateway._server.num_connections <= 1)


def test_a_compressed_body_is_refused_unread(gateway, kit):
    assert tried(gateway, kit, post(b"Content-Encoding: gzip", b"Content-Length: 8000000", body=b"")) == 415


@pytest.mark.parametrize("data", [b"GET /health HTTP/1.1\r\nHo", post(LENGTH, body=BODY[:5])])
def test_a_request_that_ends_in_its_middle(gateway, kit, data):
    raw = kit.Raw(gateway)
    raw.send(data).socket.shutdown(1)
    assert one_answer(raw)[0] == 400
    raw.close()


def test_a_body_in_drops_times_out_as_a_whole(start, kit):
    """Every byte is progress; the deadline does not move."""
    running = start(kit.make_config(), body_timeout_s=0.2)
    raw = kit.Raw(running)
    raw.send(post(b"Content-Length: 1000", body=b""))
    raw.socket.settimeout(0.01)
    for _ in range(500):
        try:
            raw.send(b" ")
            if raw.socket.recv(1):
                break
        except TimeoutError:
            continue
    else:
        pytest.fail("the body was waited for")
    raw.close()


def test_a_wish_for_another_protocol_does_not_lose_the_body(gateway, kit):
    """Java's client asks for HTTP/2 with its first request, whatever that is."""
    wish = (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAEA")
    whole = post(LENGTH, *wish)
    for cut in (len(whole), len(whole) - len(BODY), len(whole) - 3, 20):
        raw = kit.Raw(gateway)
        raw.send(whole[:cut])
        if cut < len(whole):
            raw.send(whole[cut:])
        assert b'"count":3' in raw.read_until(b'"tokens":[64,65,66]}')
        raw.send(kit.get("/health"))
        assert b'"ok"' in raw.read_until(b'"ok"}')
        raw.close()


DEEP = 100_000
CHAT = b'{"model":"tiny","messages":[{"role":"user","content":"hi"}]%b}'
BAD_JSON = {
    "not UTF-8": (CHAT % b',"user":"\xff"', "UTF-8"),
    "half a surrogate pair": (CHAT % b',"user":"\\ud800"', "JSON"),
    "deep arrays": (b"[" * DEEP, "JSON"),
    "deep objects": (b'{"messages":' * DEEP, "JSON|object"),
    "a deep schema": (CHAT % (b',"metadata":' + b'{"a":' * DEEP + b"1" + b"}" * DEEP), "nested|metadata"),
    "deep template values": (
        CHAT % (b',"chat_template_kwargs":' + b'{"a":' * 100 + b"1" + b"}" * 100), "nested more than 64"
    ),
    "a key twice": (CHAT % b',"model":"other"', "key 'model' twice"),
    "a key twice, spelled differently": (CHAT % b',"mod\\u0065l":"other"', "key 'model' twice"),
    "a key twice, deep": (CHAT % b',"chat_template_kwargs":{"a":{"b":1,"c":2,"b":3}}', "key 'b' twice"),
    "a gigantic integer": (CHAT % (b',"max_tokens":' + b"9" * 100_000), "max_tokens|JSON"),
    "a gigantic float": (CHAT % b',"temperature":1e400', "range|JSON"),
    "not a number": (CHAT % b',"temperature":NaN', "JSON"),
    "a negative zero integer": (CHAT % b',"n":-0', "'n'"),
    "n": (CHAT % b',"n":9', "'n'"),
    "max_tokens": (CHAT % b',"max_tokens":9223372036854775807', "max_tokens|context"),
    "top_logprobs": (CHAT % b',"logprobs":true,"top_logprobs":21', "top_logprobs"),
    "seed": (CHAT % b',"seed":9223372036854775808', "seed"),
    "too many values": (
        CHAT % (b',"chat_template_kwargs":{"a":[' + b"[]," * 150_000 + b"[]]}"), "more than 100000"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_JSON)
def test_bodies_that_are_json_at_most_in_name(gateway, kit, name):
    body, words = BAD_JSON[name]
    raw = kit.Raw(gateway)
    raw.send(kit.post("/v1/chat/completions", body, "Connection: close"))
    status, error = one_answer(raw)
    raw.close()
    assert status == 400
    assert any(word in error["message"] for word in words.split("|")), error


def test_a_connection_survives_a_refused_body(raw, kit):
    for _ in range(3):
        raw.send(kit.post("/v1/chat/completions", CHAT % b',"n":9'))
        assert b"400 Bad Request" in raw.read_until(b'"invalid_value"}}')
    raw.send(kit.get("/health"))
    assert b'"ok"' in raw.read_until(b'"ok"}')
