"""HTTP/1.1 to one worker: requests over kept-alive connections, answers pushed to a handler as their bytes
arrive.

    start ─> idle connection, or a new one (TCP, TLS) ─> request written ─> on_response ─> on_body* ─> on_end
                                                                      └──────── any failure ──────> on_failure

Knows nothing of models. `start` neither blocks nor awaits, and no task runs per exchange once it is
connected, so a relayed token costs no task switch (docs/design/002). Bounds: connections, idle ones, the size
of heads and bodies, and every wait: to connect, for the answer's head, between two signs of progress, and in
all. Progress is what the handler says it is (`HttpExchange.touch`), so that a peer cannot hold a stream open
with bytes that mean nothing.

A caller that has too much of an answer may pause it: the connection is not read, TCP's window fills and the
peer waits. That time is no silence of the peer's.
"""

import asyncio
import ssl
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import httptools

from penstock.backends.http.chunks import is_one_chunk
from penstock.backends.http.idle import IdleConnections
from penstock.backends.http.terms import (
    HEAD_BYTES_MAX,
    IGNORING_HANDLER,
    Deadlines,
    FailureKind,
    HttpAddress,
    HttpFailure,
    HttpHandler,
    HttpLimits,
    NoConnection,
    RequestBytes,
    reason_of,
    tls_context,
)
from penstock.backends.silence import Gaps
from penstock.clock import NS_PER_S, Clock

_STALE_NS = NS_PER_S
"""A connection that ends within this time of a request, unheard, was closed by its peer while it was idle."""
_SOON_NS = NS_PER_S // 20
"""Progress that follows so soon, or within a hundredth of the wait for it, does not move the deadline."""
_END_TIMEOUT_NS = 2 * NS_PER_S
"""How long the rest of an abandoned answer may take before its connection is closed."""


class HttpExchange:
    """One request and its answer, as its caller sees them."""

    __slots__ = (
        "_client", "_connecting", "_connection", "_deadline_ns", "_ends_ns", "_fresh", "_held_since_ns",
        "_over", "_sent_ns", "_touched_ns", "_what", "handler", "held_ns", "num_bytes", "request",
        "take_chunk",
    )  # fmt: skip

    def __init__(self, client: "HttpClient", request: bytes, handler: HttpHandler, now_ns: int) -> None:
        self.request, self.handler = request, handler
        self.num_bytes = 0
        """Of the answer's body, so far; a read that `take_chunk` took counts with its framing."""
        self.held_ns = 0
        """How long it was held, in all."""
        self.take_chunk: Callable[[bytes], bool] | None = None
        """Set by a handler that can take a read which is one chunk of one event, framing and all; False: it
        is not like those before it, and nothing was done."""
        self._client, self._held_since_ns, self._touched_ns = client, 0, 0
        self._connection: _Connection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._sent_ns, self._fresh, self._over, self._what = 0, False, False, ""
        self._deadline_ns = now_ns
        self._ends_ns = now_ns + client.request_ns

    def touch(self, num_events: int = 1) -> None:
        """There was progress, so many events at once: the wait for the next begins now."""
        client = self._client
        now_ns = client.now_ns()
        if now_ns - self._touched_ns < client.soon_ns:
            client.gaps.num_events += num_events  # No gap worth knowing of, and the deadline is far.
            return
        gap_ns = now_ns - self._touched_ns if self._touched_ns else 0
        num_events -= not self._touched_ns
        self._touched_ns = now_ns
        deadline_ns = now_ns + client.gaps.after(now_ns, gap_ns, num_events, client.idle_ns)
        self._deadline_ns = deadline_ns
        if deadline_ns < client.deadlines.looks_ns:
            client.deadlines.look_by(now_ns, deadline_ns)

    @property
    def is_whole(self) -> bool:
        """Whether all of the answer was read."""
        return self._connection is not None and self._connection.is_whole

    def pause_reading(self) -> None:
        """Read no more of the answer until `resume_reading`; the handler still gets what was read already.

        Idempotent.

        The wait for progress stands still meanwhile. The bound on the whole answer does not, so that no
        client holds a worker for ever.
        """
        if not self._over and not self._held_since_ns and self._connection is not None:
            self._held_since_ns = self._client.clock.now_ns()
            self._connection.read(on=False)

    def resume_reading(self) -> None:
        """Read again, if it was held."""
        if not self._held_since_ns:
            return
        now_ns = self._client.clock.now_ns()
        held_ns = now_ns - self._held_since_ns
        self._held_since_ns = 0
        self.held_ns += held_ns
        self._touched_ns = 0  # It was not the worker who was silent.
        self._deadline_ns += held_ns
        if self._connection is not None:
            self._connection.read(on=True)
        if not self._over:
            self._client.deadlines.look_by(now_ns, self.until_ns)

    def abort(self) -> None:
        """Close the connection, so that the peer sees that the answer is not wanted.

        Idempotent; the handler hears nothing.
        """
        if not self._over:
            self._end()
            if self._connecting is not None:
                self._connecting.cancel()
            if self._connection is not None:
                self._connection.close()

    def discard_rest(self) -> None:
        """The handler has all that it wants; what is left of the answer is read so that the connection can be
        used again.
        """
        if not self._over:
            self.handler, self.take_chunk = IGNORING_HANDLER, None
            if self._connection is not None and self._connection.is_whole:
                return  # It ends as soon as what was read has been passed on.
            self.resume_reading()
            self._touched_ns = 0
            now_ns = self._client.clock.now_ns()
            self._deadline_ns = now_ns + _END_TIMEOUT_NS
            self._client.deadlines.look_by(now_ns, self._deadline_ns)

    # --- from the client and the connection ----------------------------------------------------------

    def wait(self, what: str, timeout_s: float, now_ns: int = 0) -> None:
        """From now on it waits for `what`."""
        self._what, client = what, self._client
        now_ns = now_ns or client.now_ns()
        self._deadline_ns = deadline_ns = now_ns + int(timeout_s * NS_PER_S)
        if deadline_ns < client.deadlines.looks_ns:
            client.deadlines.look_by(now_ns, deadline_ns)

    def connecting(self, task: "asyncio.Task[None]") -> None:
        """A connection is being made for it."""
        self._fresh, self._connecting = True, task

    def not_connected(self, why: str) -> None:
        """There is no connection for it."""
        self._connecting = None
        self.fail(HttpFailure(FailureKind.CONNECT, why))

    def run_on(self, connection: "_Connection", now_ns: int) -> None:
        """Write the request."""
        if self._over:
            self._client.put_back(connection)
            return
        self._connecting, self._connection = None, connection
        self._sent_ns = now_ns
        self.wait("the answer's head", self._client.config.first_byte_timeout_s, now_ns)
        connection.run(self)

    def on_head(self, status: int, headers: Mapping[bytes, bytes]) -> None:
        """The answer begins."""
        self.wait("output", self._client.config.idle_timeout_s)
        self.handler.on_response(status, headers)

    def on_data(self, data: bytes) -> None:
        """Some of its body."""
        self.num_bytes += len(data)
        limit = self._client.bytes_max
        if self.num_bytes > limit:
            self.fail(HttpFailure(FailureKind.TOO_LARGE, f"the answer is over {limit} bytes"))
        else:
            self.handler.on_body(data)

    def complete(self) -> None:
        """The answer has ended."""
        if not self._over:
            self._end()
            if self.handler is not IGNORING_HANDLER:
                self.handler.on_end()

    def fail(self, failure: HttpFailure) -> None:
        """It cannot be completed."""
        if not self._over:
            handler = self.handler
            self.abort()
            handler.on_failure(failure)

    def lost(self, failure: HttpFailure, *, was_received: bool) -> None:
        """Its connection ended.

        One that was idle may have been closed just as it was taken: then a new one is made, once.

        RFC 9110, section 9.2.2: a request may be sent again when it is known that it had no effect;
        generating an abandoned answer has none.
        """
        is_late = self._client.clock.now_ns() - self._sent_ns > _STALE_NS
        if was_received or is_late or self._fresh or self._over:
            self.fail(failure)
        else:
            self._connection = None
            self._client.connect(self)

    def _end(self) -> None:
        self._over = True
        if self._held_since_ns:
            self.resume_reading()  # Another answer may come over this connection.
        self._client.exchanges.pop(self, None)

    @property
    def until_ns(self) -> int:
        """When `look` fails it, if nothing happens until then."""
        return self._ends_ns if self._held_since_ns else min(self._deadline_ns, self._ends_ns)

    def look(self, now_ns: int) -> None:
        """Fail it if its time is over. Called now and then."""
        if self._over:
            return
        if now_ns >= self._ends_ns:
            kind = FailureKind.HELD if self._held_since_ns else FailureKind.TOO_LONG
            self.fail(HttpFailure(kind, f"no end within {self._client.config.request_timeout_s:g} s"))
        elif now_ns >= self._deadline_ns and not self._held_since_ns:
            kind = FailureKind.CONNECT if self._connecting is not None else FailureKind.TIMEOUT
            if self._touched_ns:
                self._client.gaps.timed_out(now_ns, now_ns - self._touched_ns)
            self.fail(HttpFailure(kind, f"timed out waiting for {self._what}"))


class HttpClient:
    """Exchanges with one address. Lives on one event loop."""

    def __init__(
        self,
        address: HttpAddress,
        config: HttpLimits,
        clock: Clock,
        *,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """`headers` go with every request.

        Raises:
            ConfigError: a header cannot be sent, or the CA file cannot be read.
        """
        self.address, self.config, self.clock = address, config, clock
        self.now_ns = clock.now_ns
        self.idle_ns, self.bytes_max = int(config.idle_timeout_s * NS_PER_S), config.response_bytes_max
        self.soon_ns = min(_SOON_NS, self.idle_ns // 100)
        self.gaps = Gaps()
        self._ssl = tls_context(config) if address.scheme == "https" else None
        self._idle = IdleConnections[_Connection](config.idle_connections_max, config.keepalive_s, clock)
        self.exchanges: dict[HttpExchange, None] = {}
        """Those that are not over."""
        self.deadlines = Deadlines(clock, self.exchanges)
        self._requests = RequestBytes(address, headers or {})
        self.request_ns = int(config.request_timeout_s * NS_PER_S)

    @property
    def num_exchanges(self) -> int:
        """Exchanges that are not over."""
        return len(self.exchanges)

    @property
    def num_idle(self) -> int:
        """Connections that wait for work."""
        return len(self._idle)

    def start(
        self,
        method: str,
        path: str,
        handler: HttpHandler,
        *,
        body: bytes = b"",
        headers: Sequence[tuple[str, str]] = (),
    ) -> HttpExchange:
        """Send a request to `path`, which begins after the address's base; `headers` are printable. A body is
        JSON unless they say otherwise.

        Raises:
            NoConnection: `connections_max` exchanges are under way.
        """
        if len(self.exchanges) >= self.config.connections_max:
            raise NoConnection(f"all {self.config.connections_max} connections to {self.address} are in use")
        request = self._requests.of(method, path, body, headers)
        now_ns = self.now_ns()
        exchange = HttpExchange(self, request, handler, now_ns)
        self.exchanges[exchange] = None
        connection = self._idle.take(now_ns)
        if connection is not None:
            exchange.run_on(connection, now_ns)
        else:
            self.connect(exchange)
        return exchange

    def close(self) -> None:
        """Abort what runs and close every connection."""
        for exchange in list(self.exchanges):
            exchange.abort()
        self._idle.close()
        self.deadlines.stop()

    # --- from exchanges and connections --------------------------------------------------------------

    def connect(self, exchange: HttpExchange) -> None:
        """Make a connection for it."""
        exchange.wait(f"a connection to {self.address.authority}", self.config.connect_timeout_s)
        exchange.connecting(asyncio.create_task(self._connect(exchange), name=f"connect {self.address}"))

    def put_back(self, connection: "_Connection") -> None:
        """A connection may be used again."""
        self._idle.put(connection)

    def forget(self, connection: "_Connection") -> None:
        """A connection that may have been idle has ended."""
        self._idle.forget(connection)

    async def _connect(self, exchange: HttpExchange) -> None:
        loop, at = asyncio.get_running_loop(), self.address
        try:
            _, connection = await loop.create_connection(
                lambda: _Connection(self), at.host, at.port, ssl=self._ssl
            )
        except (OSError, ssl.SSLError) as error:
            exchange.not_connected(f"cannot connect to {at.authority}: {reason_of(error)}")
            return
        exchange.run_on(connection, self.now_ns())


class _Connection(asyncio.Protocol):
    """One connection: at most one exchange at a time."""

    def __init__(self, client: HttpClient) -> None:
        self.idle_since_ns = 0
        self._client = client
        self._bodies: list[bytes] = []
        """Of what is being read: a server sends each event as a chunk, and they cost less together."""
        self.on_body = self._bodies.append
        """The parser calls it for each chunk."""
        self._parser = cast(Any, httptools).HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._exchange: HttpExchange | None = None
        self._received = False
        self._is_between = False
        """Between two chunks of an answer: the last read was one chunk of one event."""
        self.is_whole = False
        """All of the answer was read."""
        self._status = 0
        self._headers: dict[bytes, bytes] = {}
        self._head_bytes = 0

    @property
    def closed(self) -> bool:
        """Whether nothing more can be sent."""
        return self._transport is None or self._transport.is_closing()

    def run(self, exchange: HttpExchange) -> None:
        """Send a request, and bring its answer."""
        assert self._exchange is None, "one exchange at a time"
        if self._transport is None or self._transport.is_closing():
            exchange.lost(
                HttpFailure(FailureKind.BROKEN, "the server closed the connection"), was_received=False
            )
            return
        self._exchange, self._received, self._status, self.is_whole = exchange, False, 0, False
        self._is_between = False
        self._transport.write(exchange.request)

    def read(self, *, on: bool) -> None:
        """Resume or pause reading: what the peer sends then stays with the kernels, and in the end with the
        peer.
        """
        if self._transport is not None and not self._transport.is_closing():
            (self._transport.resume_reading if on else self._transport.pause_reading)()

    def close(self) -> None:
        """Drop it at once."""
        self._exchange = None
        if self._transport is not None:
            self._transport.abort()

    # asyncio calls these.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        exchange = self._exchange
        if exchange is None:
            self.close()  # Nothing was asked: whatever this is, it must not become the next answer.
            return
        if self._is_between:
            num_bytes, take = exchange.num_bytes + len(data), exchange.take_chunk
            if take is not None and num_bytes <= self._client.bytes_max and take(data):
                exchange.num_bytes = num_bytes
                return  # The parser stands where it stood: before a chunk.
            self._is_between = False
        self._received = True
        try:
            self._parser.feed_data(data)
            if self._bodies:
                body = self._pass_body()
                self._is_between = exchange.take_chunk is not None and is_one_chunk(data, body)
        except cast(Any, httptools).HttpParserUpgrade:
            self._fail(FailureKind.MALFORMED, "the server wants another protocol")
        except cast(Any, httptools).HttpParserError as error:
            self._fail(FailureKind.MALFORMED, f"the answer is not HTTP/1.1: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self._client.forget(self)
        exchange, self._exchange, self._transport = self._exchange, None, None
        if exchange is None:
            return
        if (
            exc is None
            and self._status >= 200
            and not {b"content-length", b"transfer-encoding"} & self._headers.keys()
        ):
            exchange.complete()  # No length was given: the end of the connection is the end of the body.
            return
        why = f"the connection broke: {exc}" if exc else "the server closed the connection"
        exchange.lost(HttpFailure(FailureKind.BROKEN, why), was_received=self._received)

    # httptools calls these.

    def on_message_begin(self) -> None:
        self._status, self._head_bytes = 0, 0
        self._headers = {}

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > HEAD_BYTES_MAX:
            self._fail(FailureKind.TOO_LARGE, f"the answer's head is over {HEAD_BYTES_MAX} bytes")
        elif not self._status:  # Else it is a trailer: the head has been handed over.
            name = name.lower()
            known = self._headers.get(name)
            self._headers[name] = value if known is None else known + b", " + value

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200 or self._exchange is None:
            return  # 1xx: the real answer follows.
        self._status = status
        if self._headers.get(b"content-encoding", b"identity").lower() != b"identity":
            self._fail(FailureKind.MALFORMED, "the answer is compressed, which was not asked for")
            return
        self._exchange.on_head(status, self._headers)

    def _pass_body(self) -> bytes:
        data = b"".join(self._bodies)  # One alone is not copied.
        self._bodies.clear()
        if data and self._exchange is not None:
            self._exchange.on_data(data)
        return data

    def on_message_complete(self) -> None:
        if self._status < 200:
            return
        self.is_whole = True
        self._pass_body()
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            return
        if self._parser.should_keep_alive():
            self._client.put_back(self)
        else:
            self.close()
        exchange.complete()

    def _fail(self, kind: FailureKind, message: str) -> None:
        self._pass_body()
        exchange = self._exchange
        self.close()
        if exchange is not None:
            exchange.fail(HttpFailure(kind, message))
