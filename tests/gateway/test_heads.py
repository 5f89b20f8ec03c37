"""A request that repeats its connection's last head is what it would be on a new connection."""

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tenant_keys import NOW_S, add

import penstock.gateway
from penstock.clock import NS_PER_S, SystemClock
from penstock.gateway.api.job import _HEADERS
from penstock.gateway.http.exchange import RequestHead
from penstock.gateway.http.heads import BYTES_MAX, MISSES_MAX, LastHead, is_kept
from penstock.gateway.identity.api_keys import edit_keys, revoke

BODY = b'{"a": 1}'
HEAD = (
    b"POST /v1/x HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer sk-1\r\nCOOKIE: c\r\nContent-Length: %d\r\n"
    b"X-B: 2\r\nX-API-Key: sk-2\r\nX-Penstock-Session: s\r\nTraceparent: t\r\n\r\n"
)
BEFORE = {
    b"access-control-request-headers", b"access-control-request-method", b"authorization", b"connection",
    b"content-encoding", b"content-length", b"content-type", b"expect", b"host", b"sec-fetch-site",
    b"transfer-encoding",
}  # fmt: skip
"""Fields that are read only before a request is let in, or of requests that are not remembered."""


class Whole:
    """The part of an exchange that is looked at."""

    def __init__(self, data: bytes) -> None:
        head, _, self.body = data.partition(b"\r\n\r\n")
        lines = [line.split(b":", 1) for line in head.split(b"\r\n")[1:]]
        headers = {name.lower(): value.strip() for name, value in lines}
        self.head = RequestHead(method="POST", path="/v1/x", headers=headers)
        self.keep_alive = True


def request(body: bytes = BODY, head: bytes = HEAD) -> bytes:
    return head % len(body) + body


def learned(data: bytes | None = None, *, known: bool = True) -> LastHead:
    last, data = LastHead(), data or request()
    last.learn(data, Whole(data), lambda head: known)  # pyright: ignore[reportArgumentType]
    return last


@pytest.mark.parametrize("body", [BODY, b"x", b"y" * 12345, b"\r\n\r\nPOST", b""])
def test_another_body_behind_the_same_head(body: bytes) -> None:
    found = learned().again(request(body))
    assert found is not None
    assert found[1] == body
    assert found[0].headers == {b"x-penstock-session": b"s", b"traceparent": b"t"}, "and no secrets"


def test_what_is_read_of_a_head_is_kept_of_it() -> None:
    seen = set(_HEADERS)
    for path in Path(penstock.gateway.__file__).parent.rglob("*.py"):
        for found in re.finditer(
            r'headers(?:\.get\(|\[)b"([a-z-]+)"|b"([a-z-]+)" (?:not )?in [\w.]*headers(?![\w.])',
            path.read_text(),
        ):
            seen.add((found[1] or found[2]).encode())
    assert {b"traceparent", b"x-penstock-session", b"authorization"} <= seen
    assert {name for name in seen if not is_kept(name)} == BEFORE


def test_nothing_else_is_taken_for_the_same() -> None:
    data = request()
    for i in range(len(data) - len(BODY)):
        for byte in (b"\r", b"\n", b"0", b"9", b"z", bytes([data[i] ^ 32])):
            other = data[:i] + byte + data[i + 1 :]
            assert other == data or learned().again(other) is None, other
        assert learned().again(data[:i] + data[i + 1 :]) is None
        assert learned().again(data[:i] + b" " + data[i:]) is None
    for other in (b"", data[:-1], data + b"x", data + data, b"\r\n" + data, data.replace(b"8", b"+8", 1)):
        assert learned().again(other) is None, other


@pytest.mark.parametrize(
    "head",
    [
        HEAD.replace(b"X-B", b"Expect"),
        HEAD.replace(b"X-B", b"Transfer-Encoding"),
        HEAD.replace(b"X-B: 2", b"Upgrade: h2c"),
        HEAD.replace(b"X-B: 2", b"content-length: 8"),
        HEAD.replace(b"X-B", b"X-%s" % (b"y" * BYTES_MAX)),
        HEAD.replace(b"Content-Length: %d\r\n", b"").replace(b"X-B: 2", b"X-B: %d"),
    ],
)
def test_heads_that_are_not_kept(head: bytes) -> None:
    data = request(head=head)
    assert learned(data).again(data) is None
    assert learned(known=False).again(request()) is None


def test_a_client_whose_heads_differ_is_given_up() -> None:
    last = learned()
    for i in range(MISSES_MAX + 1):
        assert last.again(request(head=HEAD.replace(b"X-B: 2", b"X-B: x%d" % i))) is None
        last.learn(request(), Whole(request()), lambda head: True)  # pyright: ignore[reportArgumentType]
    assert last.again(request()) is None


def test_hits_between_make_up_for_misses() -> None:
    last = learned()
    for i in range(3 * MISSES_MAX):
        assert last.again(request(head=HEAD.replace(b"X-B: 2", b"X-B: x%d" % i))) is None
        last.learn(request(), Whole(request()), lambda head: True)  # pyright: ignore[reportArgumentType]
        assert last.again(request()) is not None


def answer_of(raw) -> tuple[int, str]:
    """The status of the next answer, and what it says if it is an error."""
    got = raw.read_until(b"\r\n\r\n")
    head, _, body = got.partition(b"\r\n\r\n")
    length = next(
        int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")
    )
    while len(body) < length:
        body += raw.socket.recv(65536)
    status = int(head.split()[1])
    return status, "" if status == 200 else json.loads(body)["error"]["message"]


@pytest.fixture(scope="module")
def patient(kit) -> Iterator:
    """A gateway that promises no times, so that a busy machine does not change its answers."""
    running = kit.RunningGateway(kit.replace(kit.make_config(), admission=kit.NO_PROMISES))
    yield running
    running.stop()


class JumpingClock(SystemClock):
    """The time since its making, but for jumps, on a day of which the keys are."""

    ahead_s = 0

    def wall_ns(self) -> int:
        return (NOW_S + self.ahead_s) * NS_PER_S


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data,
        lambda data: data.replace(b"Content-Length: ", b"Content-Length: 0"),
        lambda data: data.replace(b"Content-Length: ", b"Content-Length: +"),
        lambda data: data.replace(b"Content-Length: ", b"Content-Length: 1\r\nContent-Length: "),
        lambda data: data.replace(b"Content-Length: ", b"Transfer-Encoding: chunked\r\nContent-Length: "),
        lambda data: data.replace(b"Bearer sk-", b"Bearer sk_"),
        lambda data: data.replace(b'"tiny"', b'"huge"'),
        lambda data: data.replace(b"/v1/chat/", b"/v2/chat/"),
    ],
)
def test_a_changed_request_is_answered_as_on_a_new_connection(patient, kit, change) -> None:
    good = kit.post("/v1/chat/completions", kit.chat(max_tokens=1))
    fresh, used = kit.Raw(patient), kit.Raw(patient)
    for _ in range(2):
        assert answer_of(used.send(good)) == (200, "")
    assert answer_of(used.send(change(good))) == answer_of(fresh.send(change(good)))
    fresh.close()
    used.close()


def test_a_request_in_pieces_and_a_pipelined_one(patient, kit) -> None:
    good, raw = kit.post("/v1/chat/completions", kit.chat(max_tokens=1)), kit.Raw(patient)
    raw.send(good)
    assert answer_of(raw) == (200, "")
    for byte in good:
        raw.send(bytes([byte]))
    assert answer_of(raw) == (200, "")
    answers = raw.send(good + good).read_all()
    assert answers.count(b"HTTP/1.1 200") == 1, "the second is not served"
    assert b"connection: close" in answers.lower()
    raw.close()


def test_keys_on_one_connection(start, kit, tmp_path) -> None:
    """A proxy's connection carries many clients' requests, and keys end while it is open."""
    path = tmp_path / "keys"
    one, other = add(path), add(path, tenant="other")
    brief = add(path, tenant="brief", expires_s=NOW_S + 100)
    config = kit.replace(
        kit.make_config(), auth={"keys_file": str(path), "keys": ()}, admission=kit.NO_PROMISES
    )
    clock = JumpingClock()
    running = start(config, clock=clock)
    gateway, checked = running.gateway, list[bytes]()
    refuse = gateway.refuse

    def counted(head, client):
        checked.append(head.headers[b"authorization"])
        return refuse(head, client)

    gateway.refuse = counted
    raw = kit.Raw(running)

    def asked(key: str) -> tuple[int, str]:
        return answer_of(raw.send(kit.post("/v1/chat/completions", kit.chat(max_tokens=1), key=key)))

    def ended(code: str, key: str) -> None:
        raw.send(kit.post("/v1/chat/completions", kit.chat(max_tokens=1), key=key))
        answer = raw.read_until(b"}}")
        assert b"401" in answer.split(b"\r\n")[0]
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == code

    for key in (one.key, one.key, other.key, one.key, other.key):
        assert asked(key) == (200, "")
    assert checked == [b"Bearer %s" % each.key.encode() for each in (one, other, one, other)], "not again"
    recent = [each.tenant for each in gateway._services.recent.latest(5)]
    assert [str(tenant) for tenant in recent] == ["other", "acme", "other", "acme", "acme"]
    edit_keys(path, lambda keys: ([revoke(k, 1) if k.id == other.record.id else k for k in keys], None))
    done = asyncio.run_coroutine_threadsafe(gateway.tenancy.reload(config), running.loop)
    assert done.result(10)
    ended("revoked_api_key", other.key)
    raw.close()
    raw = kit.Raw(running)
    for _ in range(3):
        assert asked(brief.key) == (200, "")
    clock.ahead_s = 100
    ended("expired_api_key", brief.key)
    raw.close()
