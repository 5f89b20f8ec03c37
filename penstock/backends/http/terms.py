"""The terms of an HTTP exchange with a worker: where it goes and whom TLS trusts, the bounds on waits, sizes
and connections (the section `backends`, and constants), the callbacks that an answer makes, the ways in
which it fails or is odd, and the timer of all exchanges with one address.
"""

import asyncio
import enum
import ssl
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

from penstock.clock import NS_PER_S, Clock
from penstock.config.fleet import BackendsConfig
from penstock.errors import ConfigError

HEAD_BYTES_MAX = 64 * 1024
"""Of an answer."""
HEADS_MAX = 256
"""Methods and paths whose beginning of a request is remembered."""


class FailureKind(enum.Enum):
    """The kind of failure that an exchange met."""

    CONNECT = "connect"  # Refused, TLS failed, or it took too long.
    TIMEOUT = "timeout"  # No head, or no progress.
    TOO_LONG = "too_long"  # No end in time.
    BROKEN = "broken"  # The connection ended in the middle.
    MALFORMED = "malformed"  # The bytes that came are not HTTP/1.1.
    TOO_LARGE = "too_large"  # A head or a body over its bound.
    HELD = "held"  # No end in time, and it was this side that did not read.


class Anomaly(enum.StrEnum):
    """Why an answer was odd but usable, or why it could not be used."""

    NO_END = "no_end"  # Ended without the last event.
    NO_FINISH = "no_finish"  # Ended without saying why.
    NO_USAGE = "no_usage"
    USAGE_MISMATCH = "usage_mismatch"  # Its count of tokens is not ours.
    OTHER_MODEL = "other_model"
    OVERRUN = "overrun"  # More tokens than were asked for.
    CORRUPT = "corrupt"  # An event that cannot be read, or is too large.
    NO_STREAM = "no_stream"  # 200, and something that is no stream of events.


@dataclass(slots=True, frozen=True)
class HttpFailure:
    """Why an exchange has no (whole) answer."""

    kind: FailureKind
    message: str


class HttpHandler(Protocol):
    """Takes one answer as it arrives. Must not block or raise."""

    def on_response(self, status: int, headers: Mapping[bytes, bytes]) -> None:
        """The head; names in lower case, repeated ones joined by commas. Never called with 1xx."""
        ...

    def on_body(self, data: bytes) -> None:
        """More of the body, cut anywhere."""
        ...

    def on_end(self) -> None:
        """The answer is complete."""
        ...

    def on_failure(self, failure: HttpFailure) -> None:
        """It never will be. Instead of `on_end`; nothing follows. Not called after `abort`."""
        ...


class _Nobody:
    """Hears the rest of an answer that is not needed."""

    def on_response(self, status: int, headers: Mapping[bytes, bytes]) -> None:
        """Not needed."""

    def on_body(self, data: bytes) -> None:
        """Not needed."""

    def on_end(self) -> None:
        """Not needed."""

    def on_failure(self, failure: HttpFailure) -> None:
        """Not needed."""


IGNORING_HANDLER = _Nobody()


class NoConnection(Exception):
    """Every connection that the configuration allows is in use."""


@dataclass(slots=True, frozen=True, kw_only=True)
class HttpLimits:
    """HTTP to one server. They hold for each."""

    connect_timeout_s: float = 5.0
    """TCP and TLS together."""
    first_byte_timeout_s: float = 120.0
    """From the request to the answer's head."""
    idle_timeout_s: float = 60.0
    """Between two events of a stream, or its head and the first."""
    request_timeout_s: float = 3600.0
    """One answer in all."""
    connections_max: int = 1024
    """Open at once, which is streams at once."""
    idle_connections_max: int = 64
    keepalive_s: float = 20.0
    """A connection that was idle for longer is not used again."""
    event_bytes_max: int = 1024 * 1024
    """One event of a stream."""
    response_bytes_max: int = 64 * 1024 * 1024
    """One whole answer."""
    error_bytes_max: int = 64 * 1024
    """An answer that is an error, of which little is shown."""
    ca_file: str = ""
    """Certificates (PEM) of authorities to trust beside the system's own."""

    @classmethod
    def of(cls, config: BackendsConfig) -> "HttpLimits":
        """As configured."""
        return cls(
            first_byte_timeout_s=config.first_byte_timeout_s,
            idle_timeout_s=config.idle_timeout_s,
            ca_file=config.ca_file,
        )


HTTP_LIMITS = HttpLimits()


@dataclass(slots=True, frozen=True, kw_only=True)
class HttpBackendLimits:
    """How one worker is asked for answers, for its health and for its load."""

    http: HttpLimits = HTTP_LIMITS
    probe_s: float = 2.0
    """Its health and metrics are read this often, give or take a tenth."""
    probe_timeout_s: float = 5.0
    """One look may take so long; after that the worker counts as not ready."""
    stale_s: float = 10.0
    """A load that was read longer ago is not believed any more: only what this gateway started there counts
    then."""
    metrics_bytes_max: int = 8 * 1024 * 1024
    """One page of metrics."""


@dataclass(slots=True, frozen=True)
class HttpAddress:
    """Where a worker listens: `http://host:port/base`."""

    scheme: str
    host: str
    port: int
    base: str
    """Path before every other path; empty or "/v1", never with a slash at its end."""

    @classmethod
    def parse(cls, url: str) -> "HttpAddress":
        """Read an address.

        Raises:
            ConfigError: it is no http or https URL with a host and without user, query or fragment.
        """
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"{url!r} is no address: {error}") from error
        plain = url.isascii() and url.isprintable() and " " not in url
        if parts.scheme not in {"http", "https"} or not parts.hostname or not plain:
            raise ConfigError(f"expected an address such as http://10.0.0.7:8000, got {url!r}")
        if "@" in parts.netloc or parts.query or parts.fragment:
            raise ConfigError("an address has no user, query or fragment; keys belong into the environment")
        return cls(
            parts.scheme,
            parts.hostname,
            port or (443 if parts.scheme == "https" else 80),
            parts.path.rstrip("/"),
        )

    @property
    def authority(self) -> str:
        """The `Host` header; IPv6 addresses are bracketed (RFC 9110, section 7.2)."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        is_default = self.port == (443 if self.scheme == "https" else 80)
        return host if is_default else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}{self.base}"


def tls_context(config: HttpLimits) -> ssl.SSLContext:
    """Certificates and host names are verified, always; `ca_file` adds to whom the system trusts."""
    context = ssl.create_default_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if config.ca_file:
        try:
            context.load_verify_locations(cafile=config.ca_file)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"backends.ca_file: {config.ca_file}: {reason_of(error)}") from error
    return context


def reason_of(error: OSError) -> str:
    """The system's own word for the trouble, without asyncio's wrapping."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not accepted ({error.verify_message})"
    if isinstance(error, ssl.SSLError):
        return f"TLS failed ({error.reason or error})"
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    return error.strerror or str(error)


def head_lines(address: HttpAddress, headers: Mapping[str, str]) -> str:
    """The lines that the head of every request to `address` has, with these headers.

    Raises:
        ConfigError: a header cannot be sent.
    """
    lines = {"host": address.authority, "user-agent": "penstock", "accept-encoding": "identity", **headers}
    for name, value in lines.items():
        if not value.isascii() or not value.isprintable():
            raise ConfigError(
                f"the header '{name}' for {address} holds characters that a header cannot carry"
            )
    return "".join(f"{name}: {value}\r\n" for name, value in lines.items())


class RequestBytes:
    """Makes requests to one address."""

    __slots__ = ("_base", "_heads", "_lines")

    def __init__(self, address: HttpAddress, headers: Mapping[str, str]) -> None:
        """`headers` go with each.

        Raises:
            ConfigError: a header cannot be sent.
        """
        self._base, self._lines = address.base, head_lines(address, headers)
        self._heads: dict[tuple[str, str], bytes] = {}
        """Beginnings of requests, by method and path."""

    def of(self, method: str, path: str, body: bytes, headers: Sequence[tuple[str, str]]) -> bytes:
        """One; a body is JSON unless its own `headers` say otherwise."""
        head = self._heads.get((method, path))
        if head is None:
            if len(self._heads) >= HEADS_MAX:
                self._heads.clear()
            line = f"{method} {self._base}{path} HTTP/1.1\r\n{self._lines}"
            head = self._heads[method, path] = line.encode("ascii")
        more = b"content-type: application/json\r\n" if body else b""
        if headers:
            lines = "".join([f"{name}: {value}\r\n" for name, value in headers]).encode("ascii")
            more = lines if any(name == "content-type" for name, _ in headers) else more + lines
        return b"%b%bcontent-length: %d\r\n\r\n%b" % (head, more, len(body), body)


class Timed(Protocol):
    """Something that fails if nothing happens in time."""

    @property
    def until_ns(self) -> int:
        """When, as things stand."""
        ...

    def look(self, now_ns: int) -> None:
        """Fail it if its time is over."""
        ...


LOOK_NS = NS_PER_S // 10
"""Between two looks at everything, unless something begins or goes on that has less time."""
_NEVER = 1 << 62


class Deadlines:
    """One timer for many deadlines that hardly ever come: each would be set and cancelled for nothing.

    Progress moves a deadline and leaves the timer alone: when it fires there is mostly nothing to do but to
    set it again.
    """

    __slots__ = ("_all", "_clock", "_timer", "looks_ns")

    def __init__(self, clock: Clock, all_of_them: Collection[Timed]) -> None:
        """`all_of_them`: those that have not ended, by reference."""
        self._clock, self._all = clock, all_of_them
        self._timer: asyncio.TimerHandle | None = None
        self.looks_ns = _NEVER
        """When the timer fires: a deadline that is later need not be told."""

    def look_by(self, now_ns: int, until_ns: int) -> None:
        """Look at all of them then, or sooner."""
        if until_ns < self.looks_ns:
            self.stop()
            delay_s, self.looks_ns = max(0, until_ns - now_ns) / NS_PER_S, until_ns
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._look)

    def stop(self) -> None:
        """Do not look any more."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self.looks_ns = None, _NEVER

    def _look(self) -> None:
        """However many deadlines are near, this is called some ten times a second."""
        self._timer, self.looks_ns = None, _NEVER
        now_ns = self._clock.now_ns()
        for each in list(self._all):
            each.look(now_ns)
        if self._all:
            next_ns = min([each.until_ns for each in self._all])
            self.look_by(now_ns, max(next_ns, now_ns + LOOK_NS))
