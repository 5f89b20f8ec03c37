"""One request and its response: what a handler sees of HTTP.

An exchange is answered once: by `respond`, or by `begin_stream`, any number of writes and `end`. If the
client leaves before that, `on_disconnect` is called at once and everything written later goes nowhere.
It knows how a response is framed; sockets, parsing and timeouts belong to `connection.py`.

The model that answered, and why, as the client reads it: in headers, and once more in a stream's last usage
chunk.

    x-penstock-model: small                     the model that answers; the body's `model` says the same
    x-penstock-requested-model: large           what was asked for, if that is another one
    x-penstock-downgrade: slo                   why: queue_depth, slo, budget, context, complexity,
                                                unavailable, failure, timeout, breaker, busy
    x-penstock-route: complexity=0.31 (code .20, question .11)      how `model: "auto"` was decided
    x-penstock-queue-ms: 12                     how long it waited here for a worker
    x-penstock-migration: approximate           or none: where its worker is no one of ours (docs/failures.md)
    x-penstock-migrated: exact                  or approximate: another worker continued it, and how
    x-penstock-cell: west                       a peer cell answers (docs/cells.md)
"""

import enum
import http
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Protocol
from urllib.parse import quote

import msgspec

from penstock.clock import NS_PER_MS
from penstock.errors import ClientError, LimitReached, Overloaded, WorkerUnavailable
from penstock.gateway.http.terms import RelayTerms
from penstock.policy.flow import DowngradeReason
from penstock.policy.request import Request
from penstock.policy.tenant import ANONYMOUS, Tenant
from penstock.protocol.openai import CachedTokens, CompletionDetails, UsageBody
from penstock.protocol.stream import HEARTBEAT
from penstock.telemetry.catalog import Endpoint, OutcomeLabel
from penstock.telemetry.counts import RequestMeasurement
from penstock.telemetry.traces import RequestTrace
from penstock.types import Usage

Headers = tuple[tuple[bytes, bytes], ...]


class _Facts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The content of `penstock` in the last usage chunk."""

    model: str
    requested_model: str = ""
    downgrade: str = ""
    route: str = ""
    queue_ms: int | None = None
    migrated: str = ""
    cell: str = ""


class Served(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The model that answers a request, and why."""

    model: str
    requested: str
    counted_model: str
    """In whose metrics it is: of an adapter, the model that it is for."""
    endpoint: Endpoint
    tenant: Tenant = ANONYMOUS
    downgrade: DowngradeReason | None = None
    """Why another model answers than was asked for."""
    route: str = ""
    """How it was chosen, if it was: `Choice.explain()`."""
    assigned: object = None
    """The version that a rollout has assigned to its conversation (`policy.rollout.dealing.Assigned`)."""


@lru_cache(maxsize=256)
def _value(name: str) -> bytes:
    """A model's name in a header: as it is if it is ASCII, else percent-encoded (RFC 3986)."""
    return (name if name.isascii() else quote(name, safe="/:@!$&'()*+,;=~")).encode()


def outcome_of(error: Exception) -> OutcomeLabel:
    """How a request that failed with this error is counted."""
    if isinstance(error, ClientError):
        return OutcomeLabel.REJECTED
    if isinstance(error, LimitReached):
        return OutcomeLabel.LIMITED
    if isinstance(error, Overloaded | WorkerUnavailable):
        return OutcomeLabel.SHED
    return OutcomeLabel.ERROR


JSON = b"application/json"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
EVENTS = b"text/event-stream; charset=utf-8"
_SIZE_LINES = tuple([b"%x\r\n" % size for size in range(1024)])


class RequestHead(msgspec.Struct, frozen=True, kw_only=True):
    """A request's first line and headers; header names are in lower case."""

    method: str
    path: str
    """Without the query, which is what follows its "?"."""
    query: str = ""
    headers: Mapping[bytes, bytes]
    version: str = "1.1"
    seen: object = None
    """The application's result for the head, from before the body was read."""


_FORGOTTEN = RequestHead(method="", path="", headers={})


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """A whole response."""

    body: bytes
    status: int = 200
    content_type: bytes = JSON
    headers: tuple[tuple[bytes, bytes], ...] = ()


class Ending(enum.StrEnum):
    """How an exchange ended, for logs and metrics."""

    ANSWERED = "answered"
    DISCONNECTED = "disconnected"  # The client left first.
    OVERRUN = "overrun"  # The client read too slowly and its buffer was full.
    CUT = "cut"  # The server gave up in the middle of a stream.


class Wire(Protocol):
    """The part of its connection that an exchange needs."""

    paused: bool
    """The client does not keep up; the transport is buffering."""

    def write(self, data: bytes) -> None:
        """Give bytes to the transport."""
        ...

    def buffered_bytes(self) -> int:
        """Bytes that the kernel has not taken yet."""
        ...

    def response_done(self, *, keep_alive: bool) -> None:
        """The response is complete; the next request may come, or the connection closes."""
        ...

    def cut(self) -> None:
        """Close now and throw away what is buffered."""
        ...


class Exchange:
    """A request in the hands of a handler, and the way back to the client."""

    __slots__ = (
        "_chunked", "_held_bytes", "_keep_alive", "_on_finished", "_wire", "asked", "body", "cell",
        "client", "cors",
        "ended_ns", "ending", "error", "first_ns", "first_usage", "head", "headers", "holds", "id",
        "idle_ticks", "is_open", "limits_ns", "method", "migrated", "migration", "on_caught_up",
        "on_disconnect", "on_full", "outcome", "path", "queue_ns", "reasoning_tokens", "request", "rewrite",
        "served", "started_ns", "status", "streaming", "terms", "trace", "version",
    )  # fmt: skip

    def __init__(
        self,
        head: RequestHead,
        wire: Wire,
        *,
        client: str,
        terms: RelayTerms,
        cors: Headers = (),
        on_finished: Callable[["Exchange"], None],
    ) -> None:
        self.head = head
        self.method, self.path, self.version = head.method, head.path, head.version
        self.client, self.body, self.id = client, b"", ""
        self.trace: RequestTrace | None = None  # If it is traced, or its caller traces it.
        self.asked = ""
        """The ensemble that was asked for; empty: none."""
        self.rewrite: Callable[[Response], None] | None = None
        """Takes a whole answer that went well, and responds with another one later."""
        self.served: Served | None = None
        """Set by handlers that generate. Its headers go with the response, whatever that is."""
        self.request: Request | None = None
        """Since flow control accepted it."""
        self.outcome: OutcomeLabel | None = None
        self.error: Exception | None = None
        """The error that it ended with, after its caller was known."""
        self.started_ns = 0
        self.first_ns: int | None = None
        """When the first output of any choice came."""
        self.first_usage: Usage | None = None
        """The worker's report with it, of a request that is one stream."""
        self.limits_ns: int | None = None
        """When its prompt was made, and limits were asked."""
        self.ended_ns: int | None = None
        """When its last stream ended."""
        self.queue_ns: int | None = None
        """From its arrival to its (last) start on a worker; None before."""
        self.migration = ""
        """"approximate" or "none", where its worker cannot promise the same tokens."""
        self.migrated = ""
        """"exact" or "approximate": how another worker continued it after its own was lost."""
        self.cell = ""
        """The peer cell that answers; empty: this one."""
        self.reasoning_tokens = -1
        """-1: the model does not reason."""
        self.status, self.streaming = 0, False
        self.idle_ticks = 0
        """Heartbeat ticks since the last write."""
        self.is_open = True
        """Whether writing still makes sense."""
        self.ending: Ending | None = None
        self.on_disconnect: Callable[[], None] | None = None
        self.cors = cors
        """CORS headers, which go with every answer (gateway/http/terms.py)."""
        self.headers: Headers = ()
        """Sent with the response, whatever it is."""
        self.on_caught_up: Callable[[], None] | None = None
        """Called when a slow client has read what was written."""
        self.on_full: Callable[[], bool] | None = None
        """Called when too much waits for a slow client. Whether its source was stopped: what comes all the
        same is little."""
        self.terms = terms
        self.holds = terms.flusher is not None
        """Whether text had better be held back (`hold`) than written now."""
        self._held_bytes = 0
        self._wire = wire
        self._on_finished = on_finished
        self._keep_alive = True
        self._chunked = False

    def serve(self, served: Served) -> None:
        """From here on this model is to answer. Nothing of it was started."""
        self.served, self.queue_ns = served, None
        self.migration = self.migrated = self.cell = ""

    def used(self) -> Usage:
        """The usage of its streams until now."""
        return self.request.used() if self.request is not None else Usage()

    def usage(self) -> UsageBody:
        """The same for the client: every prompt once, every choice's answer."""
        total = self.used()
        return UsageBody(
            prompt_tokens=total.prompt_tokens,
            completion_tokens=total.completion_tokens,
            total_tokens=total.prompt_tokens + total.completion_tokens,
            prompt_tokens_details=CachedTokens(total.cached_tokens),
            completion_tokens_details=CompletionDetails.of(
                self.reasoning_tokens, total.accepted_drafts, total.rejected_drafts
            ),
        )

    def measured(self, served: Served, now_ns: int) -> RequestMeasurement:
        """The request as it is counted; `now_ns` is its end."""
        request, usage = self.request, self.used()
        first = request.used_by_choice.get(0) if request is not None else None
        longest = usage.completion_tokens if usage is first or request is None else request.longest_answer
        ended_ns = now_ns if self.ended_ns is None else self.ended_ns
        ttft_ns = tpot_ns = None
        if self.first_ns is not None:
            ttft_ns = self.first_ns - self.started_ns
            if longest > 1:
                tpot_ns = (ended_ns - self.first_ns) // (longest - 1)
        return RequestMeasurement(
            served.endpoint,
            self.outcome or OutcomeLabel.ERROR,
            now_ns - self.started_ns,
            None if first is None or request is None else request.queue_ns + first.queue_ns,
            ttft_ns,
            tpot_ns,
            usage.prompt_tokens,
            usage.cached_tokens,
            usage.completion_tokens,
            served.tenant.id,
            served.tenant.tier,
            served.tenant.band,
            "" if request is None else request.worker,
        )

    @property
    def keep_alive(self) -> bool:
        """Whether the connection may carry another request after this one."""
        return self._keep_alive

    def close_after(self) -> None:
        """Close the connection once this is answered. Idempotent."""
        self._keep_alive = False

    def forget_request(self) -> None:
        """Body and headers are not read any more: they may be megabytes, and the stream long."""
        self.body = b""
        self.head = _FORGOTTEN

    def respond(self, response: Response) -> None:
        """Answer with a whole response, whose length is known."""
        if not self.is_open:
            return
        assert not self.streaming, "the response has started"
        if self.rewrite is not None and response.status == http.HTTPStatus.OK:
            rewrite, self.rewrite = self.rewrite, None
            rewrite(response)
            return
        self.status = response.status
        head = self._head(response.status, response.content_type, response.headers)
        length = b"" if response.status == 204 else b"content-length: %d\r\n" % len(response.body)
        body = b"" if self.method == "HEAD" else response.body
        self._wire.write(b"%b%b\r\n%b" % (head, length, body))
        self._finish(Ending.ANSWERED)

    def begin_stream(self) -> None:
        """Send the head of a 200 event stream."""
        if not self.is_open:
            return
        assert not self.streaming, "the response has started"
        self.status, self.streaming = 200, True
        self._chunked = self.version == "1.1"
        if not self._chunked:
            self._keep_alive = False  # HTTP/1.0 has no chunks: the end of the connection is the end.
        head = self._head(200, EVENTS, ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")))
        self._wire.write(head + (b"transfer-encoding: chunked\r\n\r\n" if self._chunked else b"\r\n"))

    def probe(self) -> None:
        """Send what says nothing, so that the kernel of a client that has left answers with a reset."""
        if not self.is_open:
            return
        if self.streaming:
            self.write(HEARTBEAT)
        elif self.version == "1.1":
            self._wire.write(
                CONTINUE
            )  # An interim response, of which a client must expect any number (RFC 9110, 15.2).

    def write(self, data: bytes) -> None:
        """Send a piece of the stream.

        Over the buffer's bound its source waits, or the exchange ends as if the client had left.
        """
        if not self.is_open:
            return
        self.idle_ticks = 0
        wire = self._wire
        if self._chunked:  # The size lines of most events are looked up, which is faster than formatting.
            size = len(data)
            data = (_SIZE_LINES[size] if size < 1024 else b"%x\r\n" % size) + data + b"\r\n"
        wire.write(data)
        if wire.paused and wire.buffered_bytes() > self.terms.buffer_bytes_max:
            self._full()

    @property
    def waits(self) -> bool:
        """Whether the client must be waited for before more is written."""
        return self.terms.pauses and self._wire.paused

    def hold(self, num_bytes: int) -> None:
        """Bytes are held back for this client.

        They count against the same bound as what its transport buffers.
        """
        self._held_bytes += num_bytes
        if self._wire.paused and self._held_bytes + self._wire.buffered_bytes() > self.terms.buffer_bytes_max:
            self._full()

    def let_go(self) -> None:
        """Text that was held back is about to be written."""
        self._held_bytes = 0

    def fell_behind(self) -> None:
        """The transport buffers more than a mark (called by the connection)."""
        self.holds = self.holds or self.terms.pauses

    def caught_up(self) -> None:
        """The transport's buffer is nearly empty again (called by the connection)."""
        self.holds = self.terms.flusher is not None
        if self.on_caught_up is not None:
            self.on_caught_up()

    def _full(self) -> None:
        """More waits than may: stop what it comes from, or give the client up."""
        if not self.terms.pauses or self.on_full is None or not self.on_full():
            self.overrun()

    @property
    def is_behind(self) -> bool:
        """Whether the client has yet to take what was written."""
        return self._wire.paused

    def overrun(self) -> None:
        """The client reads too slowly: give it up."""
        if self.is_open:
            self._lost(Ending.OVERRUN)
            self._wire.cut()

    def end(self, data: bytes = b"") -> None:
        """Send the last piece and finish the stream."""
        if not self.is_open:
            return
        if self._chunked:
            piece = b"%x\r\n%b\r\n" % (len(data), data) if data else b""
            self._wire.write(piece + b"0\r\n\r\n")
        elif data:
            self._wire.write(data)
        self._finish(Ending.ANSWERED)

    def end_broken(self, data: bytes) -> None:
        """Finish a stream that failed: send `data`, then close the connection."""
        self._keep_alive = False
        self.end(data)

    def disconnected(self) -> None:
        """The connection is gone (called by it)."""
        if self.is_open:
            self._lost(Ending.DISCONNECTED)

    def cut(self) -> None:
        """Give up: close the connection in the middle of the response."""
        if self.is_open:
            self._lost(Ending.CUT)
            self._wire.cut()

    def _finish(self, ending: Ending) -> None:
        self.is_open, self.ending = False, ending
        self._forget_callbacks()
        self._on_finished(self)
        self._wire.response_done(keep_alive=self._keep_alive)

    def _lost(self, ending: Ending) -> None:
        self.is_open, self.ending = False, ending
        if self.on_disconnect is not None:
            self.on_disconnect()
        self._forget_callbacks()
        self._on_finished(self)

    def _forget_callbacks(self) -> None:
        """They lead to the reply, which leads here: without them all of the request is freed at its end, not
        by the collector.
        """
        self.on_disconnect = self.on_caught_up = self.on_full = self.rewrite = None

    def served_facts(self) -> bytes:
        """The model that answers, and the state of the request, as JSON, for clients that see no headers."""
        served = self.served
        assert served is not None, "a model answers"
        return msgspec.json.encode(
            _Facts(
                model=served.model,
                requested_model=served.requested if served.requested != served.model else "",
                downgrade=served.downgrade or "",
                route=served.route,
                queue_ms=None if self.queue_ns is None else round(self.queue_ns / NS_PER_MS),
                migrated=self.migrated,
                cell=self.cell,
            )
        )

    def _add_served(self, served: Served, lines: list[bytes]) -> None:
        """The same as lines of a head, as far as it is known."""
        lines.append(b"x-penstock-model: " + _value(served.model))
        if served.requested != served.model:
            lines.append(b"x-penstock-requested-model: " + _value(served.requested))
        if served.downgrade:
            lines.append(b"x-penstock-downgrade: " + served.downgrade.encode())
        if served.route:
            lines.append(b"x-penstock-route: " + served.route.encode())
        if self.queue_ns is not None:
            lines.append(b"x-penstock-queue-ms: %.0f" % (self.queue_ns / NS_PER_MS))
        if self.migration:
            lines.append(b"x-penstock-migration: " + self.migration.encode())
        if self.migrated:
            lines.append(b"x-penstock-migrated: " + self.migrated.encode())
        if self.cell:
            lines.append(b"x-penstock-cell: " + self.cell.encode())

    def _head(self, status: int, content_type: bytes, headers: tuple[tuple[bytes, bytes], ...]) -> bytes:
        lines = [_first_lines(status, content_type)]
        if self.id:
            lines.append(b"x-request-id: " + self.id.encode())
        if fields := self.cors + self.headers + headers:
            lines += [b"%b: %b" % field for field in fields]
        if self.served is not None:
            self._add_served(self.served, lines)
        if not self._keep_alive:
            lines.append(b"connection: close")
        elif self.version != "1.1":
            lines.append(b"connection: keep-alive")
        lines.append(b"")
        return b"\r\n".join(lines)


_PHRASES = {status.value: status.phrase.encode() for status in http.HTTPStatus}


@lru_cache(maxsize=256)
def _first_lines(status: int, content_type: bytes) -> bytes:
    line = b"HTTP/1.1 %d %b" % (status, _PHRASES.get(status, b"Unknown"))
    return line if status == 204 else b"%b\r\ncontent-type: %b" % (line, content_type)
