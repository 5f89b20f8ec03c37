"""Distributed traces: one span tree for each request, as W3C Trace Context and OpenTelemetry have them.

    chat MODEL                        from the request's first byte to the answer's last (server span)
      admit                           checks, template, tokens, until flow control has it or refuses it
      queue                           until its first attempt starts
      attempt 1 of MODEL              at one worker (client span; its id is the worker's parent)
        prefill                       until its first output
        decode
      attempt 2 ...                   what follows a failure (retry, migration), or runs with it (hedge)
      relay                           what is written to the client after the last attempt

A request that arrives with a `traceparent` continues that trace, and external workers get a `traceparent` of
their attempt. Spans are made when the request is over: until then a trace is a few numbers. Which traces are
exported is decided there too (`is_kept`): errors and slow first tokens always, of the others a share, the
same for every service that decides by the trace's id. Nothing of a prompt or an answer is in a span.

`TraceKeeper` hands what is kept to an exporter on a thread. Requests never wait for it: its queue is bounded,
and what does not fit is dropped and counted.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import msgspec

from penstock.config.tree import TracesConfig
from penstock.rng import fresh_seed, stream
from penstock.telemetry.log import Log

PENDING_MAX = 2048
"""Traces that wait for the exporter."""
BATCH_MAX = 256
"""Traces of one export."""
EVERY_S = 5.0
"""Between two exports, as in OpenTelemetry's batch processor, unless a batch is full before: an export costs
as much as some twenty traces."""
ATTEMPTS_MAX = 16
"""Attempts of one trace; of more the oldest count."""
STATE_BYTES_MAX = 512
"""Of a `tracestate` (W3C Trace Context 3.3.1.1); a longer one is dropped."""
TRACE_BITS = 192
"""By chance, for each trace: its id and that of its first span."""
SHARE_MAX = (1 << 56) - 1
"""Of a trace's id these bits decide; W3C's level 2 wants them to be random."""
_SPAN_MAX = (1 << 64) - 1
_STRIDE = 0x9E3779B97F4A7C15
"""Odd, so that no two of a trace's 2**64 numbers have the same id."""


class TraceContext(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A caller's span (W3C Trace Context)."""

    trace_id: str
    """32 hexadecimal digits."""
    span_id: str
    """16 of them."""
    is_sampled: bool
    state: str = ""
    """`tracestate`, as it came."""


def read_context(parent: bytes | None, state: bytes | None) -> TraceContext | None:
    """The headers `traceparent` and `tracestate`. None if there is none, or none that is valid: W3C wants a
    new trace then, and no error.
    """
    if parent is None:
        return None
    version, _, rest = parent.strip().decode("latin-1").partition("-")
    parts = rest.split("-")
    if not _is_hex(version, 2) or version == "ff" or len(parts) < 3 or (version == "00" and len(parts) > 3):
        return None
    trace_id, span_id, flags = parts[:3]
    if not (_is_hex(trace_id, 32) and _is_hex(span_id, 16) and _is_hex(flags, 2)):
        return None
    if not int(trace_id, 16) or not int(span_id, 16):
        return None
    said = (state or b"").strip()
    keeps = len(said) <= STATE_BYTES_MAX and said.isascii() and said.decode("ascii").isprintable()
    return TraceContext(
        trace_id=trace_id,
        span_id=span_id,
        is_sampled=bool(int(flags, 16) & 1),
        state=said.decode("ascii") if keeps else "",
    )


def _is_hex(text: str, length: int) -> bool:
    return len(text) == length and all(digit in "0123456789abcdef" for digit in text)


class Attempt(msgspec.Struct, gc=False):
    """One run of the request at a worker. Times are the gateway's clock in nanoseconds; -1: never."""

    number: int
    worker: str
    kind: str
    """first, retry, migration or hedge."""
    started_ns: int
    first_ns: int = -1
    ended_ns: int = -1
    error: str = ""


class RequestTrace:
    """One request's, while it runs: what the gateway tells it, for spans that are made at the end.

    Its ids follow from one draw, and are written out where they are read: most traces are never sent.
    """

    __slots__ = ("_bits", "_is_ours", "attempts", "is_sampled", "parent")

    def __init__(
        self, parent: TraceContext | None, bits: int = 0, sampled_below: int = 0, *, is_ours: bool = True
    ) -> None:
        """Of a trace that begins here `bits` has the ids (`TRACE_BITS` by chance), and it is sampled if its
        number is below `sampled_below`; a caller has decided for its own. A trace that is not ours adds no
        spans: what workers get is the caller's.
        """
        assert is_ours or parent is not None, "it is either ours or a caller's"
        self.parent, self._is_ours, self._bits = parent, is_ours, bits
        self.is_sampled = (
            parent.is_sampled if parent is not None else (bits >> 64) & SHARE_MAX < sampled_below
        )
        self.attempts = list[Attempt]()

    @property
    def trace_id(self) -> str:
        """32 hexadecimal digits."""
        return self.parent.trace_id if self.parent is not None else f"{self._bits >> 64 or 1:032x}"

    @property
    def span_id(self) -> str:
        """Of the request's own span."""
        return self.id_of(0) if self._is_ours or self.parent is None else self.parent.span_id

    def id_of(self, number: int) -> str:
        """16 hexadecimal digits for a span below: 1 and on are the attempts', in their order; every number
        has another id.
        """
        return self.id_bytes(number).hex()

    def id_bytes(self, number: int) -> bytes:
        """The same as eight bytes."""
        return ((self._bits + number * _STRIDE) & _SPAN_MAX or 1).to_bytes(8, "big")

    def start_attempt(self, now_ns: int, number: int, worker: str, kind: str) -> None:
        """An attempt starts at a worker."""
        if self._is_ours and len(self.attempts) < ATTEMPTS_MAX:
            self.attempts.append(Attempt(number, worker, kind, now_ns))

    def headers(self, number: int) -> tuple[tuple[str, str], ...]:
        """W3C's headers for the worker of that attempt: of its span, or of one above it if it has none."""
        place = next((i for i, each in enumerate(self.attempts, 1) if each.number == number), 0)
        span_id = self.id_of(place) if place else self.span_id
        parent = ("traceparent", f"00-{self.trace_id}-{span_id}-{self.is_sampled:02x}")
        if self.parent is not None and self.parent.state:
            return parent, ("tracestate", self.parent.state)
        return (parent,)

    def first_output(self, now_ns: int, number: int) -> None:
        """An attempt has its first output."""
        attempt = self._find(number)
        if attempt is not None and attempt.first_ns < 0:
            attempt.first_ns = now_ns

    def keep_attempt(self, now_ns: int, number: int) -> None:
        """Of two attempts this one is kept; the other is aborted."""
        for each in self.attempts:
            if each.number != number and each.ended_ns < 0:
                self.end_attempt(now_ns, each.number, "superseded")

    def end_attempt(self, now_ns: int, number: int, error: Exception | str | None) -> None:
        """An attempt is over; with an error it failed, or was aborted."""
        attempt = self._find(number)
        if attempt is not None and attempt.ended_ns < 0:
            attempt.ended_ns = now_ns
            attempt.error = error if isinstance(error, str) else type(error).__name__ if error else ""

    def _find(self, number: int) -> Attempt | None:
        for each in reversed(self.attempts):
            if each.number == number:
                return each
        return None


class EndedTrace(msgspec.Struct, frozen=True, kw_only=True):
    """A trace and how its request ended. Times are the wall clock's, but the attempts': those need
    `offset_ns` more.
    """

    trace: RequestTrace
    name: str
    offset_ns: int
    started_ns: int
    accepted_ns: int
    """When flow control had it; -1: it never came so far."""
    ended_ns: int
    status: int
    error: str
    attributes: dict[str, str | int | float | Sequence[str]]


class Exporter(Protocol):
    """Sends traces away. Called on a thread; may block for seconds."""

    def export(self, traces: Sequence[EndedTrace]) -> str:
        """Send these. Returns why that failed, and then they are lost; empty: it did not fail."""
        ...

    def close(self) -> None:
        """Nothing more is sent; an `export` that runs gives up."""
        ...


class TraceKeeper:
    """Keeps ended traces until the exporter has them."""

    def __init__(self, config: TracesConfig, exporter: Exporter, log: Log) -> None:
        self._config, self._exporter, self._log = config, exporter, log
        # Not from the system for each request: ids must differ, and guessing them gains nothing.
        self._draw = stream(fresh_seed(), "traces").getrandbits
        self._sampled_below = round(config.share * (SHARE_MAX + 1))
        self._slow_ns = config.slow_ms * 1_000_000
        self._pending = deque[EndedTrace]()
        self._task: asyncio.Task[None] | None = None
        self.exported = 0
        self.dropped = 0
        """Traces that did not fit, or that the collector did not take."""
        self._is_failing = self._is_closing = False
        self._wake = asyncio.Event()
        """A batch is full, or the last one is to be sent."""

    def begin(self, parent: TraceContext | None) -> RequestTrace:
        """A request has come."""
        return RequestTrace(parent, self._draw(TRACE_BITS), self._sampled_below)

    def is_kept(self, trace: RequestTrace, *, failed: bool, ttft_ns: int | None) -> bool:
        """Whether a trace whose request is over is exported."""
        return trace.is_sampled or failed or (ttft_ns is not None and ttft_ns >= self._slow_ns > 0)

    def add(self, trace: EndedTrace) -> None:
        """Export it soon."""
        if len(self._pending) >= PENDING_MAX:
            self.dropped += 1
            return
        self._pending.append(trace)
        if len(self._pending) == BATCH_MAX:
            self._wake.set()

    def start(self) -> None:
        """Begin to export."""
        self._task = asyncio.create_task(self._run(), name="export traces")

    async def stop(self) -> None:
        """Export what is left, unless the collector takes nothing."""
        self._is_closing = True
        self._wake.set()
        if self._is_failing:
            await asyncio.to_thread(self._exporter.close)
        if self._task is not None:
            await self._task
        while self._pending and not self._is_failing:
            await self._export()
        await asyncio.to_thread(self._exporter.close)

    async def _run(self) -> None:
        while not self._is_closing:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(EVERY_S):
                    await self._wake.wait()
            self._wake.clear()
            while self._pending and not self._is_closing:
                await self._export()

    async def _export(self) -> None:
        batch = [self._pending.popleft() for _ in range(min(BATCH_MAX, len(self._pending)))]
        why = await asyncio.to_thread(self._exporter.export, batch)
        if why:
            self.dropped += len(batch)
        else:
            self.exported += len(batch)
        if why and not self._is_failing:
            self._log.warning("the collector takes no traces", endpoint=self._config.endpoint, why=why)
        elif self._is_failing and not why:
            self._log.info("the collector takes traces again", endpoint=self._config.endpoint)
        self._is_failing = bool(why)
