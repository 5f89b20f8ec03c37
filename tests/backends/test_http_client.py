"""The HTTP client by itself: connections, reuse, TLS, bounds."""

import asyncio
import datetime
import ssl
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import pytest
import uvloop
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from engine_stand_ins import StandIn, VllmStandIn, serving, until

from penstock.backends.http.client import HttpClient, HttpExchange
from penstock.backends.http.small_answer import ProbeFailed, fetch
from penstock.backends.http.terms import (
    Deadlines,
    FailureKind,
    HttpAddress,
    HttpFailure,
    HttpLimits,
    NoConnection,
)
from penstock.backends.silence import MIN_NS, Gaps
from penstock.clock import NS_PER_S, SystemClock
from penstock.errors import ConfigError


class Waits:
    """Fails at its time, which is pushed back as often as it is asked."""

    def __init__(self, until_ns: int, *, pushed_ns: int = 0, times: int = 0) -> None:
        self.until_ns, self.failed, self.looks = until_ns, False, 0
        self._pushed_ns, self._times = pushed_ns, times

    def look(self, now_ns: int) -> None:
        self.looks += 1
        if now_ns >= self.until_ns and self._times:
            self.until_ns, self._times = now_ns + self._pushed_ns, self._times - 1
        self.failed = self.failed or now_ns >= self.until_ns


class Listener:
    """Collects one answer."""

    def __init__(self) -> None:
        self.status, self.body = 0, b""
        self.failure: HttpFailure | None = None
        self.over = asyncio.Event()

    def on_response(self, status: int, headers: Mapping[bytes, bytes]) -> None:
        self.status = status

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_end(self) -> None:
        assert not self.over.is_set()
        self.over.set()

    def on_failure(self, failure: HttpFailure) -> None:
        assert not self.over.is_set()
        self.failure = failure
        self.over.set()


def run(
    check: Callable[[StandIn, HttpClient], Awaitable[None]],
    *,
    tls: ssl.SSLContext | None = None,
    **config: object,
) -> None:
    async def inside() -> None:
        async with serving(VllmStandIn(tls=tls)) as server:
            client = HttpClient(HttpAddress.parse(server.url), HttpLimits(**config), SystemClock())
            await check(server, client)
            client.close()
            assert client.num_exchanges == 0

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(inside())


async def get(client: HttpClient, path: str = "/health") -> Listener:
    listener = Listener()
    client.start("GET", path, listener)
    async with asyncio.timeout(10):
        await listener.over.wait()
    return listener


def test_connections_are_kept_and_used_again() -> None:
    async def check(server: StandIn, client: HttpClient) -> None:
        for _ in range(5):
            assert (await get(client)).status == 200
        assert server.num_connections == 1
        await asyncio.gather(*(get(client) for _ in range(4)))
        assert server.num_connections == 4
        assert client.num_idle == 2  # The others were closed.

    run(check, idle_connections_max=2)


def test_a_connection_that_was_idle_for_long_is_not_used_again() -> None:
    async def check(server: StandIn, client: HttpClient) -> None:
        await get(client)
        await get(client)
        assert server.num_connections == 2

    run(check, keepalive_s=0)


def test_a_connection_that_the_server_closed_while_idle_is_made_anew() -> None:
    async def check(server: StandIn, client: HttpClient) -> None:
        await get(client)
        await server.kill()
        await server.start()
        assert (await get(client)).status == 200

    run(check)


def test_more_connections_than_allowed_are_refused() -> None:
    async def check(server: StandIn, client: HttpClient) -> None:
        listeners = [Listener(), Listener()]
        for listener in listeners:
            client.start("GET", "/health", listener)
        with pytest.raises(NoConnection, match="2 connections"):
            client.start("GET", "/health", Listener())
        for listener in listeners:
            await listener.over.wait()
        assert (await get(client)).status == 200

    run(check, connections_max=2)


def test_an_abort_is_final_at_every_stage() -> None:
    async def check(server: StandIn, client: HttpClient) -> None:
        for pause_s in (None, 0, 0.01):
            listener = Listener()
            exchange = client.start("GET", "/health", listener)
            if pause_s is not None:
                await asyncio.sleep(pause_s)
            ended = listener.over.is_set()
            exchange.abort()
            exchange.abort()
            await asyncio.sleep(0.01)
            assert listener.over.is_set() == ended
        assert (await get(client)).status == 200

    run(check)


def test_nobody_listens() -> None:
    async def check(server: StandIn, client: HttpClient) -> None:
        await server.kill()
        failure = (await get(client)).failure
        assert failure is not None
        assert failure.kind is FailureKind.CONNECT
        assert "refused" in failure.message

    run(check)


def test_an_answer_over_its_bound_ends() -> None:
    async def check(server: StandIn, client: HttpClient) -> None:
        server.metrics = "x" * 5000
        failure = (await get(client, "/metrics")).failure
        assert failure is not None
        assert failure.kind is FailureKind.TOO_LARGE
        server.metrics = "x" * 900
        with pytest.raises(ProbeFailed, match="more than"):
            await fetch(client, "/metrics", 100)

    run(check, response_bytes_max=1000)


STREAM = b'{"model": "m", "prompt": [1], "seed": 1, "max_tokens": %d}'


def test_an_answer_that_is_held_is_not_silent_but_ends_in_time() -> None:
    async def check(server: StandIn, client: HttpClient) -> None:
        server.step_s = 0.01
        listener = Listener()
        exchange = client.start("POST", "/v1/completions", listener, body=STREAM % 1000)
        await until(lambda: bool(listener.body))
        exchange.pause_reading()
        await until(lambda: listener.over.is_set())
        assert listener.failure is not None
        assert listener.failure.kind is FailureKind.HELD
        assert exchange.held_ns > 100_000_000
        await until(lambda: server.num_aborted == 1)

    run(check, idle_timeout_s=0.05, request_timeout_s=0.5)


def test_a_connection_is_read_again_after_an_answer_that_was_held_at_its_end() -> None:
    async def check(server: StandIn, client: HttpClient) -> None:
        for ends in (False, True):
            listener = Listener()
            exchange = client.start("POST", "/v1/completions", listener, body=STREAM % 20)
            tell = listener.on_body

            def hold(data: bytes, exchange=exchange, tell=tell) -> None:
                tell(data)
                exchange.pause_reading()

            listener.on_body = hold
            while not listener.over.is_set():
                await asyncio.sleep(0.001)
                exchange.discard_rest() if ends and listener.body else exchange.resume_reading()
                if ends and not client.num_exchanges:
                    break
            assert listener.failure is None
            assert (await get(client)).status == 200
        assert server.num_connections == 1

    run(check)


def test_an_answer_that_takes_too_long_in_all_ends() -> None:
    async def check(server: StandIn, client: HttpClient) -> None:
        server.step_s = 0.01
        listener = Listener()
        body = b'{"model": "m", "prompt": [1], "seed": 1, "max_tokens": 1000}'
        exchange = client.start("POST", "/v1/completions", listener, body=body)
        while not listener.over.is_set():
            exchange.touch()  # Progress, always.
            await asyncio.sleep(0.01)
        assert listener.failure is not None
        assert "no end" in listener.failure.message
        await until(lambda: server.num_aborted == 1)

    run(check, request_timeout_s=0.2)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, Path]:
    """A server's context with a certificate that no system trusts, and the file to trust it by."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "penstock test")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    place = tmp_path_factory.mktemp("tls")
    pem = made.public_bytes(serialization.Encoding.PEM)
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (place / "ca.pem").write_bytes(pem)
    (place / "server.pem").write_bytes(secret + pem)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(place / "server.pem")
    return context, place / "ca.pem"


@pytest.mark.parametrize(
    ("host", "trusts", "works"),
    [("localhost", True, True), ("127.0.0.1", True, False), ("localhost", False, False)],
)
def test_certificates_and_names_are_verified(
    certificate: tuple[ssl.SSLContext, Path], host: str, trusts: bool, works: bool
) -> None:
    context, ca_file = certificate

    async def inside() -> None:
        async with serving(VllmStandIn(tls=context)) as server:
            config = HttpLimits(ca_file=str(ca_file) if trusts else "")
            client = HttpClient(HttpAddress.parse(f"https://{host}:{server.port}"), config, SystemClock())
            listener = await get(client)
            assert (listener.status == 200) == works
            if not works:
                assert listener.failure is not None
                assert "certificate" in listener.failure.message
            client.close()
            await asyncio.sleep(0.01)

    asyncio.run(inside())


def test_a_ca_file_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.pem").write_text("nothing")
    for name in ("x.pem", "nonsuch.pem"):
        with pytest.raises(ConfigError, match="ca_file"):
            HttpClient(
                HttpAddress.parse("https://h"), HttpLimits(ca_file=str(tmp_path / name)), SystemClock()
            )


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://h:80/", "http://h"),
        ("https://h/v1/", "https://h/v1"),
        ("http://[::1]:9000", "http://[::1]:9000"),
        ("http://10.0.0.7:8000", "http://10.0.0.7:8000"),
    ],
)
def test_addresses(url: str, shown: str) -> None:
    assert str(HttpAddress.parse(url)) == shown


MINUTE_NS, MOST_NS = 60 * NS_PER_S, 600 * NS_PER_S


def quiet(longest_ns: int) -> Gaps:
    """Gaps that are known well enough, the longest of them now."""
    gaps = Gaps()
    for _ in range(100):
        gaps.after(MINUTE_NS, NS_PER_S // 20, 1, MOST_NS)
    gaps.after(MINUTE_NS, longest_ns, 1, MOST_NS)
    return gaps


def test_streams_may_be_silent_for_some_times_their_longest_gap() -> None:
    assert Gaps().after(0, 0, 0, MOST_NS) == MOST_NS
    assert quiet(0).after(MINUTE_NS, 0, 0, MOST_NS) == MIN_NS
    assert quiet(4 * NS_PER_S).after(MINUTE_NS, 0, 0, MOST_NS) == 20 * NS_PER_S
    limit_ns = 5 * NS_PER_S
    assert quiet(0).after(MINUTE_NS, 0, 0, limit_ns) == limit_ns, (
        "the configuration's bound holds in any case"
    )


def test_a_long_gap_is_forgotten_by_time_and_not_by_events() -> None:
    gaps = quiet(8 * NS_PER_S)
    for _ in range(5000):
        gaps.after(MINUTE_NS, NS_PER_S // 1000, 1, MOST_NS)
    assert gaps.after(MINUTE_NS, 0, 0, MOST_NS) == 40 * NS_PER_S, "a busy worker reads long prompts too"
    assert gaps.after(2 * MINUTE_NS, 0, 0, MOST_NS) == 20 * NS_PER_S
    for second in range(60):
        gaps.after(2 * MINUTE_NS + second * NS_PER_S, NS_PER_S // 1000, 1, MOST_NS)
    assert gaps.after(3 * MINUTE_NS, 0, 0, MOST_NS) == pytest.approx(10 * NS_PER_S, rel=1e-6)


def test_a_worker_that_has_become_slow_is_given_more_time_after_each_time_out() -> None:
    gaps, bounds_s = quiet(0), []
    for _ in range(4):
        bound_ns = gaps.after(MINUTE_NS, 0, 0, MINUTE_NS)
        bounds_s.append(bound_ns // NS_PER_S)
        for _ in range(30):
            gaps.timed_out(MINUTE_NS, bound_ns)  # All of its streams at once.
    assert bounds_s == [10, 20, 40, 60]


def test_a_silence_that_was_too_long_is_remembered() -> None:
    silences = list[int]()

    class Watched(Gaps):
        def timed_out(self, now_ns: int, silent_ns: int) -> None:
            silences.append(silent_ns)

    async def check(server: StandIn, client: HttpClient) -> None:
        client.gaps, server.step_s = Watched(), 60.0
        for is_begun in (False, True):
            listener = Listener()
            exchange = client.start("POST", "/v1/completions", listener, body=STREAM % 5)
            if is_begun:
                exchange.touch()
            await until(listener.over.is_set)
            assert listener.failure is not None
            assert listener.failure.kind is FailureKind.TIMEOUT
        (silent_ns,) = silences
        assert silent_ns >= 50_000_000

    run(check, idle_timeout_s=0.05, first_byte_timeout_s=0.05)


def test_one_timer_serves_every_deadline_and_those_that_move() -> None:
    async def check() -> None:
        clock = SystemClock()
        now_ns = clock.now_ns()
        near, moved = Waits(now_ns + NS_PER_S // 50), Waits(now_ns, pushed_ns=NS_PER_S // 50, times=1)
        far = Waits(now_ns + 3600 * NS_PER_S)
        every: dict[Waits, None] = dict.fromkeys((far, near, moved))
        deadlines = Deadlines(clock, every)
        for each in every:
            deadlines.look_by(now_ns, each.until_ns)
        assert deadlines.looks_ns == moved.until_ns
        await until(lambda: near.failed and moved.failed)
        assert (far.failed, far.looks) == (False, near.looks)
        for each in (near, moved):
            every.pop(each, None)
        await until(lambda: deadlines.looks_ns == far.until_ns)
        deadlines.stop()
        assert deadlines.looks_ns > far.until_ns

    asyncio.run(check())


def test_trailers_are_no_part_of_the_head() -> None:
    """It has been handed over: a `Retry-After` that is repeated behind the body would change it."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(
            b"HTTP/1.1 503 busy\r\nretry-after: 5\r\ntransfer-encoding: chunked\r\n\r\n"
            b"2\r\nno\r\n0\r\nretry-after: 9\r\nx-late: 1\r\n\r\n"
        )
        await writer.drain()
        writer.close()

    class Head(Listener):
        def on_response(self, status: int, headers: Mapping[bytes, bytes]) -> None:
            self.status, self.headers = status, headers

    async def check() -> None:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            client = HttpClient(HttpAddress.parse(f"http://127.0.0.1:{port}"), HttpLimits(), SystemClock())
            head = Head()
            client.start("GET", "/", head)
            async with asyncio.timeout(10):
                await head.over.wait()
            client.close()
        assert (head.status, head.body, head.headers[b"retry-after"]) == (503, b"no", b"5")
        assert b"x-late" not in head.headers

    asyncio.run(check())


def test_events_that_come_too_soon_to_be_a_gap_are_known_of() -> None:
    """A fast worker's answers may end before any of its gaps is long enough to be looked at."""

    async def seen() -> Gaps:
        client = HttpClient(HttpAddress.parse("http://127.0.0.1:9"), HttpLimits(), SystemClock())
        for _ in range(12):
            exchange = HttpExchange(client, b"", Listener(), client.now_ns())
            for _ in range(16):
                exchange.touch()
        return client.gaps

    gaps = asyncio.run(seen())
    assert gaps.num_events >= 12 * 15
    assert gaps.after(SystemClock().now_ns(), 0, 0, MOST_NS) == MIN_NS
