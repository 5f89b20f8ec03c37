"""Traces to an OpenTelemetry collector, by OTLP over HTTP (the `traces` extra: OpenTelemetry's own SDK).

Authentication and other headers come from OTEL_EXPORTER_OTLP_HEADERS, as for every program that uses the SDK.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from penstock.rng import fresh_key
from penstock.telemetry.traces import Attempt, EndedTrace

TIMEOUT_S = 5.0
"""For one export, the SDK's own attempts included."""
WHY_CHARS_MAX = 300
_SCOPE = InstrumentationScope("penstock")
_Attributes = Mapping[str, str | int | float | Sequence[str]]


class _FirstWarning(logging.Handler):
    """Keeps the first thing that the SDK says of an export: why it failed, before it gives up."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        self.text = self.text or record.getMessage()[:WHY_CHARS_MAX]


class OtlpExporter:
    """See `traces.Exporter`."""

    def __init__(self, endpoint: str, *, version: str, instance: str) -> None:
        """`instance` names this process."""
        self._exporter = OTLPSpanExporter(endpoint=endpoint, timeout=TIMEOUT_S)
        self._warning = _FirstWarning()
        library = logging.getLogger("opentelemetry")  # It has a line for each attempt of each export.
        library.handlers, library.propagate = [self._warning], False
        self._resource = Resource.create(
            {"service.name": "penstock", "service.version": version, "service.instance.id": instance}
        )

    def export(self, traces: Sequence[EndedTrace]) -> str:
        """See `traces.Exporter`."""
        spans = [span for trace in traces for span in _Tree(trace, self._resource).spans()]
        self._warning.text = ""
        try:
            result = self._exporter.export(spans)
        except Exception as error:  # noqa: BLE001 - requests go on, whatever the SDK meets.
            return f"{type(error).__name__}: {error}"
        return "" if result is SpanExportResult.SUCCESS else self._warning.text or "not taken"

    def close(self) -> None:
        """See `traces.Exporter`."""
        self._exporter.shutdown()


class _Tree:
    """The spans of one request."""

    def __init__(self, ended: EndedTrace, resource: Resource) -> None:
        self._ended, self._resource = ended, resource
        self._flags = TraceFlags(TraceFlags.SAMPLED)
        self._trace_id = int(ended.trace.trace_id, 16)

    def spans(self) -> Iterator[ReadableSpan]:
        ended, trace = self._ended, self._ended.trace
        parent = trace.parent
        yield self._span(
            ended.name, trace.span_id, parent and parent.span_id, ended.started_ns, ended.ended_ns,
            kind=SpanKind.SERVER, attributes=ended.attributes, error=ended.error, is_remote=True,
        )  # fmt: skip
        attempts = trace.attempts
        accepted_ns = ended.ended_ns if ended.accepted_ns < 0 else ended.accepted_ns
        yield self._below("admit", ended.started_ns, accepted_ns)
        if ended.accepted_ns >= 0:
            queued_until_ns = attempts[0].started_ns + ended.offset_ns if attempts else ended.ended_ns
            yield self._below("queue", accepted_ns, queued_until_ns)
        for attempt in attempts:
            yield from self._attempt(attempt)
        last_ns = max((each.ended_ns + ended.offset_ns for each in attempts if each.ended_ns >= 0), default=0)
        if 0 < last_ns < ended.ended_ns:
            yield self._below("relay", last_ns, ended.ended_ns)

    def _attempt(self, attempt: Attempt) -> Iterator[ReadableSpan]:
        ended = self._ended
        start_ns = attempt.started_ns + ended.offset_ns
        end_ns = ended.ended_ns if attempt.ended_ns < 0 else attempt.ended_ns + ended.offset_ns
        attributes = {
            "penstock.worker": attempt.worker,
            "penstock.attempt": attempt.number,
            "penstock.attempt.kind": attempt.kind,
        }
        name = attempt.kind if attempt.number > 1 else "attempt"
        yield self._span(
            name, attempt.span_id, ended.trace.span_id, start_ns, end_ns,
            kind=SpanKind.CLIENT, attributes=attributes, error=attempt.error,
        )  # fmt: skip
        first_ns = end_ns if attempt.first_ns < 0 else attempt.first_ns + ended.offset_ns
        yield self._below("prefill", start_ns, first_ns, attempt.span_id)
        if attempt.first_ns >= 0:
            yield self._below("decode", first_ns, end_ns, attempt.span_id)

    def _below(self, name: str, start_ns: int, end_ns: int, parent: str = "") -> ReadableSpan:
        return self._span(name, fresh_key(8).hex(), parent or self._ended.trace.span_id, start_ns, end_ns)

    def _span(
        self,
        name: str,
        span_id: str,
        parent_id: str | None,
        start_ns: int,
        end_ns: int,
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: _Attributes | None = None,
        error: str = "",
        is_remote: bool = False,
    ) -> ReadableSpan:
        more = {"error.type": error} if error else {}
        return ReadableSpan(
            name=name,
            context=self._context(span_id),
            parent=self._context(parent_id, is_remote=is_remote) if parent_id else None,
            resource=self._resource,
            attributes={**(attributes or {}), **more},
            kind=kind,
            status=Status(StatusCode.ERROR, error) if error else Status(StatusCode.UNSET),
            start_time=start_ns,
            end_time=max(start_ns, end_ns),
            instrumentation_scope=_SCOPE,
        )

    def _context(self, span_id: str, *, is_remote: bool = False) -> SpanContext:
        return SpanContext(self._trace_id, int(span_id, 16), is_remote=is_remote, trace_flags=self._flags)
