r"""One client connection: HTTP/1.1 in, responses out (RFC 9112).

    IDLE -> HEAD -> BODY -> BUSY -> IDLE ...       one request at a time
      \-------\-------\------\--> LINGER -> CLOSED

A request with the last one's head that comes whole in one read is BUSY at once (heads.py). Every state but
BUSY has a deadline, every buffer a bound. A second request that arrives before the first is answered
(pipelining) is not served: the first answer says `Connection: close`. After a last answer the connection
lingers: our side is closed, and what the client still sends is read and thrown away for a moment, because
closing with unread bytes would reset the connection and could destroy the answer on its way.
"""

import asyncio
import enum
import socket
from dataclasses import dataclass
from typing import Protocol, cast

import httptools

from penstock.clock import NS_PER_S, Clock
from penstock.config.tree import ServerConfig
from penstock.errors import ClientError, Overloaded, PenstockError, TooLarge
from penstock.gateway.http import sockets
from penstock.gateway.http.cors import Cors
from penstock.gateway.http.errors import HttpFault, error_response
from penstock.gateway.http.exchange import CONTINUE, Exchange, RequestHead, Response
from penstock.gateway.http.heads import LastHead, shape_fault
from penstock.gateway.http.sockets import ConnectionVerdict as Verdict
from penstock.gateway.http.terms import RelayTerms, WireLimits

LINGER_S = 2
WRITE_HIGH_WATER_BYTES = 64 * 1024
FRAMING_BYTES_PER_BYTE = 8
"""A chunked body of single bytes has five bytes of framing for each; more is no body but an attack."""
_UPGRADE_FIELDS = frozenset({b"upgrade", b"connection", b"http2-settings"})

_TOO_MANY = Overloaded("Too many connections. Try again in a moment.", retry_after_s=1.0)
_NO_PARSER = httptools.HttpRequestParser(object())


class ConnectionState(enum.IntEnum):
    """Where a connection is in the life of a request. A plain Enum's hash would be a call into Python."""

    IDLE = enum.auto()
    HEAD = enum.auto()
    BODY = enum.auto()
    BUSY = enum.auto()
    LINGER = enum.auto()
    CLOSED = enum.auto()


_ENDS = ConnectionState.LINGER, ConnectionState.CLOSED
MOVES: dict[ConnectionState, frozenset[ConnectionState]] = {
    ConnectionState.IDLE: frozenset({ConnectionState.HEAD, ConnectionState.BUSY, *_ENDS}),
    ConnectionState.HEAD: frozenset({ConnectionState.BODY, *_ENDS}),
    ConnectionState.BODY: frozenset({ConnectionState.BUSY, *_ENDS}),
    ConnectionState.BUSY: frozenset({ConnectionState.IDLE, *_ENDS}),
    ConnectionState.LINGER: frozenset({ConnectionState.CLOSED}),
    ConnectionState.CLOSED: frozenset(),
}


class Application(Protocol):
    """The interface that answers requests. Called on the event loop; must not block or raise."""

    def refuse(self, head: RequestHead, client: str) -> Response | None:
        """Answer from the headers, which spares reading a body; None to continue. `client` is its address."""
        ...

    def knows(self, head: RequestHead) -> bool:
        """Whether `refuse` let this head in, and would again; it may lack its `Authorization` by now."""
        ...

    def handle(self, exchange: Exchange) -> None:
        """A whole request is here. It is answered now or later."""
        ...

    def finished(self, exchange: Exchange) -> None:
        """The exchange has ended, one way or another. Called exactly once for each."""
        ...


@dataclass(slots=True, kw_only=True)
class ServerContext:
    """The context that all connections of a server share."""

    app: Application
    config: ServerConfig
    limits: WireLimits
    terms: RelayTerms
    cors: Cors | None
    clock: Clock
    connections: "set[Connection]"
    draining: bool = False


class Connection(asyncio.Protocol):
    """The protocol object of one accepted socket."""

    __slots__ = (
        "_body", "_client", "_deadline_ns", "_exchange", "_head_bytes", "_headers", "_last",
        "_looked_at", "_num_sent", "_num_written", "_parser", "_raw_bytes", "_server", "_state",
        "_stuck_ns", "_transport", "_upgrades", "_url", "_whole", "paused",
    )  # fmt: skip

    def __init__(self, server: ServerContext) -> None:
        self._server = server
        self._parser = httptools.HttpRequestParser(self)
        self._state = ConnectionState.IDLE
        self._exchange: Exchange | None = None
        self._client, self.paused, self._last = "", False, LastHead()
        self._deadline_ns: int | None = None
        self._num_written = self._num_sent = self._stuck_ns = 0
        self._looked_at: RequestHead | None = None  # By the application, in this turn of the event loop.
        self._whole: Exchange | None = None  # A request that is complete, until the parser has returned.
        self._reset()

    def _reset(self) -> None:
        self._url = b""
        self._headers: dict[bytes, bytes] = {}
        self._head_bytes = self._raw_bytes = 0
        self._upgrades = False
        self._body = bytearray()

    # --- asyncio ---------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client is here."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's do not say that they are one.
        found: socket.socket | None = transport.get_extra_info("socket")
        sockets.end_when_unacknowledged(found, self._server.terms.write_timeout_s)
        peer: tuple[object, ...] | str | None = transport.get_extra_info("peername")
        self._client = str(peer[0]) if isinstance(peer, tuple) else "local"
        server = self._server
        high = min(WRITE_HIGH_WATER_BYTES, server.terms.buffer_bytes_max)
        self._transport.set_write_buffer_limits(high=high)
        server.connections.add(self)
        self._wait(server.limits.keepalive_timeout_s)
        room = Verdict.SERVE if found is None else sockets.room_of(found.fileno())
        if room is not Verdict.SERVE or len(server.connections) > server.limits.connections_max:
            self._fail(_TOO_MANY, status=503)
            if room is Verdict.REFUSE_AT_ONCE:
                transport.close()

    def data_received(self, data: bytes) -> None:
        """Bytes from the client."""
        self._looked_at = None  # Keys may end while a body comes.
        was_idle = self._state is ConnectionState.IDLE
        if was_idle and (exchange := self._again(data)) is not None:
            self._server.app.handle(exchange)
            return
        if self._state is ConnectionState.BUSY:
            if data.strip(b"\r\n"):  # Some clients end a body with a stray line break.
                self._pipelined()
            return
        if not self._reads() or not self._within_bounds(len(data)):
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as stop:
            self._after_upgrade(data[int(stop.args[0]) :])
        except httptools.HttpParserError as error:
            if self._reads():
                self._malformed(error)
        if was_idle:
            self._within_bounds(len(data))  # The head may have begun in these bytes.
        whole, self._whole = self._whole, None
        if whole is not None and whole.is_open:
            if was_idle:
                self._last.learn(data, whole, self._server.app.knows)
            self._server.app.handle(whole)

    def eof_received(self) -> bool:
        """The client sends nothing more.

        It may wait for its answer, or it has left: what is sent to it now will tell.
        """
        if self._state in (ConnectionState.HEAD, ConnectionState.BODY):
            self._fail(HttpFault(400, "The connection ended in the middle of a request."))
            return False
        if self._exchange is None:
            return False
        self._exchange.close_after()
        self._exchange.probe()
        self._look_soon(sockets.FIRST_LOOK_S)
        return True

    def _look_soon(self, delay_s: float, waited_s: float = 0.0) -> None:
        asyncio.get_running_loop().call_later(delay_s, self._look_whether_gone, delay_s, waited_s)

    def _look_whether_gone(self, delay_s: float, waited_s: float) -> None:
        """See whether a client that sends nothing more has left, until it has its answer."""
        if self._exchange is None:
            return
        if sockets.is_gone(self._transport.get_extra_info("socket")):
            self._transport.abort()
            return
        until_s = waited_s + delay_s
        if any(waited_s < at_s <= until_s for at_s in sockets.PROBES_S):
            self._exchange.probe()
        self._look_soon(min(2 * delay_s, sockets.LAST_LOOK_S), until_s)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._server.connections.discard(self)
        self._move(ConnectionState.CLOSED)
        self._parser = _NO_PARSER  # Its own one leads back here.
        if self._exchange is not None:
            exchange, self._exchange = self._exchange, None
            exchange.disconnected()

    def pause_writing(self) -> None:
        """The client reads slower than we write."""
        self.paused = True
        if self._exchange is not None:
            self._exchange.fell_behind()

    def resume_writing(self) -> None:
        """The client has caught up."""
        self.paused = False
        if self._exchange is not None:
            self._exchange.caught_up()

    # --- the parser ------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        if self._state is ConnectionState.BUSY:
            self._pipelined()
        elif self._state is ConnectionState.IDLE:
            self._reset()
            self._move(ConnectionState.HEAD)
            self._wait(self._server.limits.header_timeout_s)

    def on_url(self, url: bytes) -> None:
        """A piece of the request target."""
        if self._state is ConnectionState.HEAD:
            self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header field; of repeated ones the values are joined (RFC 9110, section 5.3)."""
        if self._state is not ConnectionState.HEAD:
            return
        key = name.lower()
        self._headers[key] = value if key not in self._headers else b"%b, %b" % (self._headers[key], value)

    def on_headers_complete(self) -> None:
        """The head is complete: refuse it now, or continue with the body."""
        if self._state is not ConnectionState.HEAD:
            return
        size = sum(map(len, (self._url, *self._headers, *self._headers.values()))) + 4 * len(self._headers)
        self._head_bytes = max(self._head_bytes, size)
        if self._head_over():
            return
        if fault := self._head_fault():
            self._fail(fault)
            return
        if self._has_body():
            self._looked_at = head = self._head()
            if refusal := self._server.app.refuse(head, self._client):
                self._refuse(refusal)
                return
            if self._parser.should_upgrade():
                self._upgrades = True  # `_after_upgrade` continues.
                return
        self._move(ConnectionState.BODY)
        self._wait(self._server.limits.body_timeout_s)
        if b"expect" in self._headers:
            self._transport.write(CONTINUE)

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        if self._state is not ConnectionState.BODY:
            return
        if len(self._body) + len(body) > self._server.config.body_bytes_max:
            self._fail(self._too_large())
        else:
            self._body += body

    def on_message_complete(self) -> None:
        """The request is complete: hand it over."""
        if self._state is not ConnectionState.BODY:
            return
        self._move(ConnectionState.BUSY)
        self._deadline_ns = None
        exchange = self._open_exchange()
        if not self._parser.should_keep_alive() or self._server.draining:
            exchange.close_after()
        exchange.body = bytes(self._body)
        self._body, self._headers, self._looked_at = bytearray(), {}, None  # The exchange has them now.
        # Not now: the parser is still in the middle of its input, where a pipelined request may show up.
        self._whole = exchange

    # --- what an exchange asks of its wire -------------------------------------------------------

    def write(self, data: bytes) -> None:
        """Give bytes to the transport, which sends what one loop iteration wrote together."""
        self._num_written += len(data)
        self._transport.write(data)

    def buffered_bytes(self) -> int:
        """Bytes that the kernel has not taken yet."""
        return self._transport.get_write_buffer_size()

    def response_done(self, *, keep_alive: bool) -> None:
        """The answer is written: wait for the next request, or linger and close."""
        self._exchange = None
        if self._state is ConnectionState.CLOSED:
            return
        if keep_alive and self._state is ConnectionState.BUSY:
            # The client has not heard that it closes, and may send its next request: that answer says so.
            self._move(ConnectionState.IDLE)
            self._wait(LINGER_S if self._server.draining else self._server.limits.keepalive_timeout_s)
            return
        self._linger()

    def cut(self) -> None:
        """Close now, throwing away what is buffered. An exchange that is still open hears of it."""
        self._transport.abort()

    # --- the server ------------------------------------------------------------------------------

    def check_deadline(self, now_ns: int) -> None:
        """Called now and then: act if this connection has run out of time, or its client does not read."""
        buffered = self._transport.get_write_buffer_size()
        if buffered and self._stuck(now_ns, buffered):
            if self._exchange is not None:
                self._exchange.overrun()
            self._transport.abort()
        elif self._deadline_ns is None or now_ns < self._deadline_ns:
            return
        elif self._state in (ConnectionState.HEAD, ConnectionState.BODY):
            part = "headers" if self._state is ConnectionState.HEAD else "body"
            self._fail(HttpFault(408, f"The request's {part} did not arrive in time."))
        elif buffered and self._server.terms.write_timeout_s:
            self._wait(LINGER_S)  # A slow client that keeps reading gets all of its answer.
        else:
            self._transport.abort()

    def _stuck(self, now_ns: int, buffered: int) -> bool:
        """Whether none of the bytes that wait were taken for `write_timeout_s`."""
        timeout_ns = int(self._server.terms.write_timeout_s * NS_PER_S)
        num_sent = self._num_written - buffered
        if num_sent != self._num_sent or not timeout_ns:
            self._num_sent, self._stuck_ns = num_sent, now_ns
        return now_ns - self._stuck_ns > timeout_ns > 0

    def close_after_answer(self) -> None:
        """See `HttpServer.close_after_answers`."""
        if self._exchange is not None and not self._exchange.streaming:
            self._exchange.close_after()

    def close_if_idle(self) -> None:
        """Close if nothing is in flight. A client that has just connected has a moment to ask."""
        if self._state is ConnectionState.IDLE and self.is_owed():
            self._wait(LINGER_S)
        elif self._state is ConnectionState.IDLE:
            self._transport.close()

    def is_owed(self) -> bool:
        """Whether its client asks, waits for an answer, or has just come and said nothing yet."""
        return self._reads() and (self._state is not ConnectionState.IDLE or not self._num_written)

    # --- inside ----------------------------------------------------------------------------------

    def _move(self, state: ConnectionState) -> None:
        assert state in MOVES[self._state], (self._state, state)
        self._state = state

    def _wait(self, seconds: float) -> None:
        self._deadline_ns = self._server.clock.now_ns() + int(seconds * NS_PER_S)

    def _head(self) -> RequestHead:
        method = self._parser.get_method().decode("ascii", "replace")
        path, _, query = self._url.decode("latin-1").partition("?")
        version = self._parser.get_http_version()
        return RequestHead(method=method, path=path, query=query, headers=self._headers, version=version)

    def _open_exchange(self, head: RequestHead | None = None) -> Exchange:
        head = head or self._looked_at or self._head()
        exchange = Exchange(
            head,
            self,
            client=self._client,
            terms=self._server.terms,
            cors=cors.headers(head) if (cors := self._server.cors) is not None else (),
            on_finished=self._server.app.finished,
        )
        if self.paused:
            exchange.fell_behind()
        exchange.started_ns = self._server.clock.now_ns()
        self._exchange = exchange
        return exchange

    def _again(self, data: bytes) -> Exchange | None:
        """A whole request that repeats the head of the last one, which need not be parsed and checked."""
        found, server = self._last.again(data), self._server
        if found is None or len(found[1]) > server.config.body_bytes_max or not server.app.knows(found[0]):
            return None
        self._move(ConnectionState.BUSY)
        self._deadline_ns = None
        exchange = self._open_exchange(found[0])
        exchange.body = found[1]
        if server.draining:
            exchange.close_after()
        return exchange

    def _reads(self) -> bool:
        """Whether bytes still matter: no answer has ended this connection."""
        return self._state not in (ConnectionState.LINGER, ConnectionState.CLOSED)

    def _within_bounds(self, num_bytes: int) -> bool:
        """Count bytes before the parser buffers them; False if they are too many and were refused."""
        if self._state is ConnectionState.HEAD:
            self._head_bytes += num_bytes
            return not self._head_over()
        if self._state is ConnectionState.BODY:
            # The body proper is counted in `on_body`; this bounds chunk headers and trailers.
            self._raw_bytes += num_bytes
            bytes_max = FRAMING_BYTES_PER_BYTE * len(self._body) + self._server.limits.header_bytes_max
            if self._raw_bytes - num_bytes > bytes_max:
                self._fail(HttpFault(400, "The body is nearly all chunk extensions or trailers."))
                return False
        return True

    def _head_over(self) -> bool:
        limits = self._server.limits
        if self._head_bytes <= limits.header_bytes_max and len(self._headers) <= limits.headers_max:
            return False
        bounds = f"{limits.header_bytes_max} bytes and {limits.headers_max} fields"
        self._fail(HttpFault(431, f"The request's headers are over the bounds of {bounds}."))
        return True

    def _head_fault(self) -> ClientError | None:
        if fault := shape_fault(self._parser.get_http_version(), self._url, self._headers):
            return fault
        if self._headers.get(b"expect", b"100-continue").lower() != b"100-continue":
            return HttpFault(417, "The only expectation that can be met is 100-continue.")
        length = self._headers.get(b"content-length", b"0")
        # The parser has checked that it is a number.
        if length.isdigit() and int(length[:19]) > self._server.config.body_bytes_max:
            return self._too_large()
        return None

    def _has_body(self) -> bool:
        return b"transfer-encoding" in self._headers or self._headers.get(b"content-length", b"0") != b"0"

    def _too_large(self) -> TooLarge:
        return TooLarge(f"The body is over the bound of {self._server.config.body_bytes_max} bytes.")

    def _pipelined(self) -> None:
        if self._exchange is not None:
            self._exchange.close_after()

    def _after_upgrade(self, rest: bytes) -> None:
        """The parser stops behind the head of a request that asks for another protocol, which is never
        granted.

        Without a body the request is complete. With one (Java's client asks for HTTP/2 in this way) a new
        parser is given the head again without the wish.
        """
        if not self._upgrades:
            self._pipelined()
            return
        version = self._parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self._parser.get_method(), self._url, version)]
        lines += [b"%b: %b" % (k, v) for k, v in self._headers.items() if k not in _UPGRADE_FIELDS]
        if b"close" in self._headers.get(b"connection", b"").lower():
            lines.append(b"connection: close")
        self._parser = httptools.HttpRequestParser(self)
        self._reset()
        self.data_received(b"\r\n".join([*lines, b"", b""]) + rest)

    def _malformed(self, error: Exception) -> None:
        if self._state is ConnectionState.BUSY:
            self._pipelined()
        else:
            self._fail(HttpFault(400, f"This is not HTTP/1.1 as this server understands it: {error}."))

    def _fail(self, error: PenstockError, *, status: int | None = None) -> None:
        response = error_response(error)
        if status is not None:
            response = Response(status=status, body=response.body, headers=response.headers)
        self._refuse(response)

    def _refuse(self, response: Response) -> None:
        """Answer before the request is complete, and close: where the next one would start is unknown."""
        head = RequestHead(method="?", path="?", headers=self._headers)
        exchange = self._open_exchange(self._head() if self._url else head)
        exchange.close_after()
        exchange.respond(response)

    def _linger(self) -> None:
        self._move(ConnectionState.LINGER)
        self._wait(self._server.limits.body_timeout_s if self.buffered_bytes() else LINGER_S)
        if self._transport.can_write_eof() and not self._transport.is_closing():
            self._transport.write_eof()
        else:
            self._transport.close()
