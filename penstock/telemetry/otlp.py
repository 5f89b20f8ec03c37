"""Traces to an OpenTelemetry collector: OTLP over HTTP, in protocol buffers (opentelemetry-proto 1.x).

The messages are written here, field by field: a span has eight fields, and OpenTelemetry's SDK took ten times
the time for them, which was the largest part of everything that tracing cost a request. The tests read them
with OpenTelemetry's own messages.

As for programs with the SDK, the environment says what goes beside the address: OTEL_EXPORTER_OTLP_HEADERS
(authentication), OTEL_EXPORTER_OTLP_CERTIFICATE (a file of trusted authorities), OTEL_SERVICE_NAME and
OTEL_RESOURCE_ATTRIBUTES.
"""

import os
import struct
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from urllib.parse import unquote

from penstock.config.checks import is_address
from penstock.errors import ConfigError
from penstock.telemetry.http_post import TRY_AGAIN, Posted, Poster
from penstock.telemetry.traces import EndedTrace, RequestTrace

PAUSES_S = (0.5, 1.5)
"""Before an export is tried again that the collector could not take just now."""
WHY_CHARS_MAX = 300
Value = str | int | float | Sequence[str]
_INTERNAL, _SERVER, _CLIENT = 1, 2, 3
"""Kinds of spans."""
_FAILED = b"\x18\x02"
"""A status' code."""
_IDS = struct.Struct("<BB16sBB8s")
_TIMES = struct.Struct("<BBBQBQBBI")
_HAS_REMOTE, _IS_REMOTE = 0x100, 0x200
"""Flags: it is known whether the parent is in another process; it is."""


class OtlpExporter:
    """See `traces.Exporter`."""

    def __init__(
        self, endpoint: str, *, version: str, instance: str, pauses_s: Sequence[float] = PAUSES_S
    ) -> None:
        """`instance` names this process.

        Raises:
            ConfigError: the address or a file that the environment names cannot be used.
        """
        if not is_address(endpoint):
            raise ConfigError(f"traces.endpoint must be an http or https address, not {endpoint!r}")
        self._pauses_s, self._closing = pauses_s, threading.Event()
        headers = {"Content-Type": "application/x-protobuf", **_pairs(_setting("HEADERS"))}
        authorities = _setting("CERTIFICATE") or None
        try:
            self._poster = Poster(endpoint, headers, authorities=authorities)
        except OSError as error:
            raise ConfigError(f"OTEL_EXPORTER_OTLP_CERTIFICATE: {authorities}: {error}") from None
        reported = _pairs(os.environ.get("OTEL_RESOURCE_ATTRIBUTES", ""))
        name = os.environ.get("OTEL_SERVICE_NAME") or reported.get("service.name") or "penstock"
        reported |= {"service.name": name, "service.version": version, "service.instance.id": instance}
        self._resource = _message(0x0A, b"".join(_attributes(reported, 0x0A)))
        self._scope = _message(0x0A, _text(0x0A, "penstock"))

    def export(self, traces: Sequence[EndedTrace]) -> str:
        """See `traces.Exporter`."""
        try:
            body = self.encode(traces)
            posted = self._poster.post(body)
            for pause_s in self._pauses_s:
                if not may_try_again(posted) or self._closing.wait(pause_s):
                    break
                posted = self._poster.post(body)
            why = posted.why
        except Exception as error:  # noqa: BLE001 - requests continue, whatever a collector does.
            why = f"{type(error).__name__}: {error}"
        return why[:WHY_CHARS_MAX]

    def close(self) -> None:
        """See `traces.Exporter`."""
        self._closing.set()

    def encode(self, traces: Sequence[EndedTrace]) -> bytes:
        """These as one ExportTraceServiceRequest."""
        spans = [_message(0x12, span) for trace in traces for span in _Tree(trace).spans()]
        return _message(0x0A, self._resource + _message(0x12, self._scope + b"".join(spans)))


def may_try_again(posted: Posted) -> bool:
    """Whether a collector may be sent the same again: one that is late may have taken it."""
    return bool(posted.why) and not posted.is_late and (not posted.status or posted.status in TRY_AGAIN)


def _setting(name: str) -> str:
    """The environment's setting for traces, or for all that is exported."""
    found = os.environ.get(f"OTEL_EXPORTER_OTLP_TRACES_{name}")
    return found or os.environ.get(f"OTEL_EXPORTER_OTLP_{name}", "")


def _pairs(text: str) -> dict[str, str]:
    """`name=value,name=value`, percent-encoded, as OpenTelemetry writes lists in its variables."""
    pairs = (each.partition("=") for each in text.split(",") if "=" in each)
    return {unquote(name.strip()): unquote(value.strip()) for name, _, value in pairs}


# --- messages ------------------------------------------------------------------------------------


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)


def _message(tag: int, body: bytes) -> bytes:
    """A field of bytes: text, or a message within another."""
    size = len(body)
    return b"%c%c%b" % (tag, size, body) if size < 0x80 else b"%c%b%b" % (tag, _varint(size), body)


def _text(tag: int, text: str) -> bytes:
    return _message(tag, text.encode("utf-8", "replace"))


def _value(value: Value) -> bytes:
    """An AnyValue."""
    if isinstance(value, str):
        return _text(0x0A, value)
    if isinstance(value, bool):
        return b"\x10%c" % value
    if isinstance(value, int):
        return b"\x18" + _varint(value & ((1 << 64) - 1))
    if isinstance(value, float):
        return b"\x21" + struct.pack("<d", value)
    return _message(0x2A, b"".join(_message(0x0A, _text(0x0A, each)) for each in value))


@cache
def _name(name: str) -> bytes:
    """A span's, of those that are our own words."""
    return _text(0x2A, name)


@cache
def _key(name: str) -> bytes:
    """A KeyValue's: they are few, and our own."""
    return _text(0x0A, name)


def _attributes(attributes: Mapping[str, Value], tag: int) -> Iterable[bytes]:
    """A KeyValue for each, as a field with this tag."""
    for name, value in attributes.items():
        yield _message(tag, _key(name) + _message(0x12, _value(value)))


class _Tree:
    """The spans of one request."""

    def __init__(self, ended: EndedTrace) -> None:
        self._ended, trace = ended, ended.trace
        self._trace, self._trace_id = trace, bytes.fromhex(trace.trace_id)
        self._num_ids, self._own_id = len(trace.attempts), trace.id_bytes(0)

    def spans(self) -> Iterator[bytes]:
        ended, trace = self._ended, self._trace
        parent, own_id = trace.parent, self._own_id
        yield self._span(
            ended.name, own_id, bytes.fromhex(parent.span_id) if parent is not None else b"",
            ended.started_ns, ended.ended_ns,
            kind=_SERVER, attributes=ended.attributes, error=ended.error, flags=_HAS_REMOTE | _IS_REMOTE,
        )  # fmt: skip
        attempts = trace.attempts
        accepted_ns = ended.ended_ns if ended.accepted_ns < 0 else ended.accepted_ns
        yield self._below("admit", ended.started_ns, accepted_ns)
        if ended.accepted_ns >= 0:
            queued_until_ns = attempts[0].started_ns + ended.offset_ns if attempts else ended.ended_ns
            yield self._below("queue", accepted_ns, queued_until_ns)
        for place in range(len(attempts)):
            yield from self._attempt(trace, place)
        last_ns = max((each.ended_ns + ended.offset_ns for each in attempts if each.ended_ns >= 0), default=0)
        if 0 < last_ns < ended.ended_ns:
            yield self._below("relay", last_ns, ended.ended_ns)

    def _attempt(self, trace: RequestTrace, place: int) -> Iterator[bytes]:
        ended, attempt = self._ended, trace.attempts[place]
        span_id = trace.id_bytes(place + 1)
        start_ns = attempt.started_ns + ended.offset_ns
        end_ns = ended.ended_ns if attempt.ended_ns < 0 else attempt.ended_ns + ended.offset_ns
        attributes: dict[str, Value] = {
            "penstock.worker": attempt.worker,
            "penstock.attempt": attempt.number,
            "penstock.attempt.kind": attempt.kind,
        }
        name = attempt.kind if attempt.number > 1 else "attempt"
        yield self._span(
            name, span_id, self._own_id, start_ns, end_ns,
            kind=_CLIENT, attributes=attributes, error=attempt.error,
        )  # fmt: skip
        first_ns = end_ns if attempt.first_ns < 0 else attempt.first_ns + ended.offset_ns
        yield self._below("prefill", start_ns, first_ns, span_id)
        if attempt.first_ns >= 0:
            yield self._below("decode", first_ns, end_ns, span_id)

    def _below(self, name: str, start_ns: int, end_ns: int, parent: bytes = b"") -> bytes:
        """A span without attributes, which cannot fail: the most of them."""
        self._num_ids += 1
        times = _TIMES.pack(
            0x30, _INTERNAL, 0x39, start_ns, 0x41, max(start_ns, end_ns), 0x85, 0x01, 1 | _HAS_REMOTE
        )
        ids = _IDS.pack(0x0A, 16, self._trace_id, 0x12, 8, self._trace.id_bytes(self._num_ids))
        return b'%b"\x08%b%b%b' % (ids, parent or self._own_id, _name(name), times)

    def _span(
        self,
        name: str,
        span_id: bytes,
        parent_id: bytes,
        start_ns: int,
        end_ns: int,
        *,
        kind: int,
        attributes: Mapping[str, Value],
        error: str = "",
        flags: int = _HAS_REMOTE,
    ) -> bytes:
        """The fields of one Span."""
        found = [_IDS.pack(0x0A, 16, self._trace_id, 0x12, 8, span_id)]
        if parent_id:
            found.append(_message(0x22, parent_id))
        found.append(_text(0x2A, name))
        found.append(
            _TIMES.pack(0x30, kind, 0x39, start_ns, 0x41, max(start_ns, end_ns), 0x85, 0x01, 1 | flags)
        )
        found += _attributes(attributes, 0x4A)
        if error:
            found += _attributes({"error.type": error}, 0x4A)
            found.append(_message(0x7A, _text(0x12, error) + _FAILED))
        return b"".join(found)
