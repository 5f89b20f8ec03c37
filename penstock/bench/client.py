"""A small HTTP/1.1 client for one OpenAI endpoint, cheap enough to measure with.

The load generator shares the machine with the server it measures, so this is an `asyncio.Protocol` over
a C parser: body bytes are pushed to a sink as they arrive, with no task switch and no copy per chunk.
It is not the gateway's own client (backends/http/client.py): a measuring instrument should neither share
the faults of what it measures nor pay for the gateway's bounds on every chunk.
It knows HTTP and nothing of what the bytes mean. Connections are kept alive and reused; a cancelled or
timed-out request closes its connection, which is how a server learns that nobody listens any more.
"""

import asyncio
import ssl
from dataclasses import dataclass
from typing import Any, Protocol, cast
from urllib.parse import urlsplit

import httptools  # pyright: ignore[reportMissingTypeStubs] # The package ships none.

from penstock.backends.http.address import reason_of
from penstock.errors import ConfigError, PenstockError

_DIGITS_MAX = 9
"""Of `Retry-After`: thirty years are enough."""


class EndpointError(PenstockError):
    """The endpoint cannot be reached, or broke off, or does not speak HTTP."""


class CannotConnect(EndpointError):
    """Nobody listens there (nothing was sent)."""


@dataclass(slots=True, frozen=True)
class Endpoint:
    """Where an OpenAI API lives: `scheme://host:port` and the path that `/chat/completions` is added to."""

    scheme: str
    host: str
    port: int
    base: str

    @classmethod
    def parse(cls, url: str) -> "Endpoint":
        """Read a base URL such as `http://127.0.0.1:8000/v1`; a missing path means `/v1`.

        Raises:
            ConfigError: it is not an http(s) URL with a host.
        """
        example = "expected something like http://127.0.0.1:8000/v1"
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"--url {url!r}: {error}; {example}") from error
        printable = url.isascii() and url.isprintable() and " " not in url
        if parts.scheme not in {"http", "https"} or not parts.hostname or not printable:
            raise ConfigError(f"--url {url!r} is not an http or https address; {example}")
        if port is None:
            port = 443 if parts.scheme == "https" else 80
        return cls(parts.scheme, parts.hostname, port, parts.path.rstrip("/") or "/v1")

    @property
    def url(self) -> str:
        """The base URL in its canonical form."""
        return f"{self.scheme}://{self.authority}{self.base}"

    @property
    def authority(self) -> str:
        """The `Host` header; IPv6 addresses are bracketed (RFC 9110, section 7.2)."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@dataclass(slots=True, frozen=True, kw_only=True)
class ClientLimits:
    """Every bound of the client."""

    connect_timeout_s: float = 10.0
    request_timeout_s: float = 600.0
    idle_connections_max: int = 4096
    body_bytes_max: int = 16 * 1024 * 1024
    """Of a body that is collected; streamed bytes are the sink's business."""


class BodySink(Protocol):
    """Takes the body of a 200 answer as it arrives. Must not block or raise."""

    def on_bytes(self, data: bytes) -> None:
        """More of the body: any cut, never empty."""
        ...


@dataclass(slots=True, frozen=True)
class Response:
    """The end of an exchange. `body` is empty if it went to a sink."""

    status: int
    body: bytes
    retry_after_s: float = 0.0
    """What a refusal says of when to come back; 0: it does not say, or not in seconds."""


class _Connection(asyncio.Protocol):
    """One connection: at most one exchange at a time, and `done` is its future."""

    def __init__(self, body_bytes_max: int) -> None:
        self._body_bytes_max = body_bytes_max
        self._parser = cast(Any, httptools).HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[Response] | None = None
        self._sink: BodySink | None = None
        self._body = bytearray()
        self._ends_with_connection = True
        self.heard = False
        """Whether any byte of the present answer has arrived."""
        self.reusable = False

    def start(self, request: bytes, sink: BodySink | None) -> asyncio.Future[Response]:
        """Send a whole request; the future is done when the answer has ended."""
        assert self._transport is not None
        assert self._done is None, "one exchange at a time"
        self._done = asyncio.get_running_loop().create_future()
        self._sink, self._body = sink, bytearray()
        self.heard = self.reusable = False
        self._transport.write(request)
        return self._done

    @property
    def closed(self) -> bool:
        """Whether nothing more can be sent."""
        return self._transport is None or self._transport.is_closing()

    def close(self) -> None:
        """Drop the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    # asyncio calls these.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.heard = True
        try:
            self._parser.feed_data(data)
        except cast(Any, httptools).HttpParserError as error:
            self._fail(f"the answer is not HTTP/1.1: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        if self._done is not None and self.heard and self._status >= 200 and self._ends_with_connection:
            self._finish()  # No length was given: the end of the connection is the end of the body.
        self._fail(f"the connection broke: {exc}" if exc else "the server closed the connection")
        self._transport = None

    # httptools calls these.

    _status = 0
    _retry_after_s = 0.0

    def on_message_begin(self) -> None:
        self._status, self._ends_with_connection, self._retry_after_s = 0, True, 0.0

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name in {b"content-length", b"transfer-encoding"}:
            self._ends_with_connection = False
        elif name == b"retry-after" and value.isdigit():
            self._retry_after_s = float(value[:_DIGITS_MAX])

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        if self._sink is not None and self._status == 200:
            self._sink.on_bytes(data)
        elif len(self._body) + len(data) > self._body_bytes_max:
            self._fail(f"the answer is over {self._body_bytes_max} bytes")
        else:
            self._body += data

    def on_message_complete(self) -> None:
        if self._status >= 200:  # 1xx are followed by the real answer.
            self.reusable = bool(self._parser.should_keep_alive())
            self._finish()

    def _finish(self) -> None:
        done, self._done, self._sink = self._done, None, None
        if done is not None and not done.done():
            done.set_result(Response(self._status, bytes(self._body), self._retry_after_s))

    def _fail(self, why: str) -> None:
        done, self._done, self._sink = self._done, None, None
        if done is not None and not done.done():
            done.set_exception(EndpointError(why))
        self.close()


class Client:
    """Requests to one endpoint over kept-alive connections. Lives on one event loop."""

    def __init__(self, endpoint: Endpoint, *, key: str = "", limits: ClientLimits | None = None) -> None:
        self.endpoint = endpoint
        self._limits = limits or ClientLimits()
        self._ssl = ssl.create_default_context() if endpoint.scheme == "https" else None
        self._idle: list[_Connection] = []
        auth = f"authorization: Bearer {key}\r\n" if key else ""
        if not auth.isascii() or any(ord(c) < 32 or ord(c) == 127 for c in key):
            raise ConfigError("the API key contains characters that a header cannot carry")
        self._headers = (
            f"host: {endpoint.authority}\r\nuser-agent: penstock\r\naccept: */*\r\n"
            f"content-type: application/json\r\n{auth}"
        )

    async def post(self, path: str, body: bytes, sink: BodySink | None = None) -> Response:
        """Send `body` to `base + path`. A 200's body goes to the sink if there is one.

        Raises:
            CannotConnect: nobody listens.
            EndpointError: the exchange broke, timed out or was not HTTP.
        """
        return await self._exchange("POST", path, body, sink)

    async def get(self, path: str) -> Response:
        """Fetch `base + path`; raises as `post` does."""
        return await self._exchange("GET", path, b"", None)

    async def close(self) -> None:
        """Close every idle connection."""
        while self._idle:
            self._idle.pop().close()

    async def _exchange(self, method: str, path: str, body: bytes, sink: BodySink | None) -> Response:
        head = f"{method} {self.endpoint.base}{path} HTTP/1.1\r\n{self._headers}content-length: {len(body)}\r\n\r\n"
        request = head.encode("ascii") + body
        timeout_s = self._limits.request_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await self._send(request, sink)
        except TimeoutError as error:
            raise EndpointError(f"no complete answer within {timeout_s:g} s") from error

    async def _send(self, request: bytes, sink: BodySink | None) -> Response:
        connection = self._take_idle()
        if connection is not None:
            try:
                return await self._run(connection, request, sink)
            except EndpointError:
                # A server may close an idle connection just as we pick it (RFC 9110, section 9.2.2 lets a
                # client retry when it knows that the request was not processed). Once, on a fresh one.
                if connection.heard:
                    raise
        return await self._run(await self._connect(), request, sink)

    async def _run(self, connection: _Connection, request: bytes, sink: BodySink | None) -> Response:
        try:
            response = await connection.start(request, sink)
        except BaseException:
            connection.close()  # Also when cancelled: the server must see that we left.
            raise
        if (
            connection.reusable
            and not connection.closed
            and len(self._idle) < self._limits.idle_connections_max
        ):
            self._idle.append(connection)
        else:
            connection.close()
        return response

    def _take_idle(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed:
                return connection
        return None

    async def _connect(self) -> _Connection:
        loop, at = asyncio.get_running_loop(), self.endpoint
        try:
            async with asyncio.timeout(self._limits.connect_timeout_s):
                _, connection = await loop.create_connection(
                    lambda: _Connection(self._limits.body_bytes_max), at.host, at.port, ssl=self._ssl
                )
        except TimeoutError as error:
            raise CannotConnect(f"{at.authority} does not answer") from error
        except OSError as error:
            raise CannotConnect(f"cannot connect to {at.authority}: {reason_of(error)}") from error
        return connection
