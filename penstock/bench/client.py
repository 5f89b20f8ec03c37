"""One OpenAI API as `bench`, `chat` and the operator's commands call it: whole exchanges over the gateway's
own HTTP client.

Streamed bytes go to a sink in the call that read them from the socket (`backends/http/client.py`): no task
switch and no copy per chunk, because the load generator shares the machine with the server that it measures.
The time for a whole answer is the only limit on time: a load generator must see a silent server, not hang up
on it. A cancelled request closes its connection, so that the server learns that the client left.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, Self
from urllib.parse import urlsplit

from penstock.backends.http.client import HttpClient
from penstock.backends.http.terms import FailureKind, HttpAddress, HttpFailure, HttpLimits
from penstock.clock import SystemClock
from penstock.errors import ConfigError, PenstockError

_DIGITS_MAX = 9
"""Of `Retry-After`: thirty years are enough."""
_UNLIMITED = 2**62


class EndpointError(PenstockError):
    """The endpoint cannot be reached, or broke off, or does not speak HTTP."""


class CannotConnect(EndpointError):
    """Nothing listens there (nothing was sent)."""


class ApiAddress(HttpAddress):
    """Where an OpenAI API is served: `scheme://host:port` and the path that `/chat/completions` is added
    to.
    """

    __slots__ = ()

    @classmethod
    def parse(cls, url: str) -> Self:
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
        return str(self)


@dataclass(slots=True, frozen=True, kw_only=True)
class ClientLimits:
    """Every bound of the client."""

    connect_timeout_s: float = 10.0
    request_timeout_s: float = 600.0
    idle_connections_max: int = 4096
    body_bytes_max: int = 16 * 1024 * 1024
    """Of a body that is collected; the sink bounds what it is given."""

    def http(self) -> HttpLimits:
        """The same for the HTTP client."""
        return HttpLimits(
            connect_timeout_s=self.connect_timeout_s,
            first_byte_timeout_s=2 * self.request_timeout_s,
            idle_timeout_s=2 * self.request_timeout_s,
            request_timeout_s=self.request_timeout_s,
            connections_max=_UNLIMITED,
            idle_connections_max=self.idle_connections_max,
            response_bytes_max=_UNLIMITED,
        )


class BodySink(Protocol):
    """Takes the body of a 200 answer as it arrives. Must not block or raise."""

    def on_bytes(self, data: bytes) -> None:
        """More of the body: any cut, never empty."""
        ...


@dataclass(slots=True, frozen=True)
class ApiResponse:
    """The end of an exchange. `body` is empty if it went to a sink."""

    status: int
    body: bytes
    retry_after_s: float = 0.0
    """A refusal's time to come back; 0: it does not say, or not in seconds."""


class _Answer:
    """Collects one answer, or passes its body to the sink (an `HttpHandler`)."""

    __slots__ = ("_body", "_limits", "_retry_after_s", "_sink", "_status", "done")

    def __init__(self, sink: BodySink | None, limits: ClientLimits) -> None:
        self.done: asyncio.Future[ApiResponse] = asyncio.get_running_loop().create_future()
        self._sink, self._limits = sink, limits
        self._body = bytearray()
        self._status, self._retry_after_s = 0, 0.0

    def on_response(self, status: int, headers: Mapping[bytes, bytes]) -> None:
        self._status = status
        value = headers.get(b"retry-after", b"")
        if value.isdigit():
            self._retry_after_s = float(value[:_DIGITS_MAX])

    def on_body(self, data: bytes) -> None:
        if self._sink is not None and self._status == 200:
            self._sink.on_bytes(data)
        elif len(self._body) + len(data) > self._limits.body_bytes_max:
            self._fail(EndpointError(f"the answer is over {self._limits.body_bytes_max} bytes"))
        else:
            self._body += data

    def on_end(self) -> None:
        if not self.done.done():
            self.done.set_result(ApiResponse(self._status, bytes(self._body), self._retry_after_s))

    def on_failure(self, failure: HttpFailure) -> None:
        if failure.kind is FailureKind.CONNECT:
            self._fail(CannotConnect(failure.message))
        elif failure.kind in (FailureKind.TIMEOUT, FailureKind.TOO_LONG):
            self._fail(EndpointError(f"no complete answer within {self._limits.request_timeout_s:g} s"))
        else:
            self._fail(EndpointError(failure.message))

    def _fail(self, error: EndpointError) -> None:
        if not self.done.done():
            self.done.set_exception(error)


class Client:
    """Requests to one endpoint over kept-alive connections. Lives on one event loop."""

    def __init__(self, endpoint: ApiAddress, *, key: str = "", limits: ClientLimits | None = None) -> None:
        self.endpoint = endpoint
        self._limits = limits or ClientLimits()
        if not key.isascii() or any(ord(c) < 32 or ord(c) == 127 for c in key):
            raise ConfigError("the API key contains characters that a header cannot carry")
        headers = {"accept": "*/*", **({"authorization": f"Bearer {key}"} if key else {})}
        self._http = HttpClient(endpoint, self._limits.http(), SystemClock(), headers=headers)

    async def post(self, path: str, body: bytes, sink: BodySink | None = None) -> ApiResponse:
        """Send `body` to `base + path`. A 200's body goes to the sink if there is one.

        Raises:
            CannotConnect: nothing listens there.
            EndpointError: the exchange broke, timed out or was not HTTP.
        """
        return await self._exchange("POST", path, body, sink)

    async def get(self, path: str) -> ApiResponse:
        """Fetch `base + path`; raises as `post` does."""
        return await self._exchange("GET", path, b"", None)

    async def close(self) -> None:
        """Close every connection."""
        self._http.close()

    async def _exchange(self, method: str, path: str, body: bytes, sink: BodySink | None) -> ApiResponse:
        answer = _Answer(sink, self._limits)
        exchange = self._http.start(method, path, answer, body=body)
        try:
            return await answer.done
        finally:
            exchange.abort()  # Also when cancelled: the server must see that the client left.
