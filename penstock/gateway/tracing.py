"""Which requests are traced, and what their traces say of them (telemetry/traces.py).

Requests to the API are: `traces.endpoint` says where their spans go. Without one, a caller's trace is passed
to external workers as if this gateway were not there.
"""

from collections.abc import Sequence

from penstock import __version__
from penstock.clock import Clock
from penstock.config.tree import TracesConfig
from penstock.gateway.http.exchange import Ending, Exchange
from penstock.telemetry.catalog import Endpoint, OutcomeLabel
from penstock.telemetry.counts import RequestMeasurement
from penstock.telemetry.log import Log
from penstock.telemetry.otlp import OtlpExporter
from penstock.telemetry.traces import EndedTrace, RequestTrace, TraceKeeper, read_context

_OPERATIONS = {
    Endpoint.COMPLETIONS: "text_completion",
    Endpoint.EMBEDDINGS: "embeddings",
    Endpoint.RERANK: "rerank",
    Endpoint.SCORE: "score",
}
"""Of OpenTelemetry's `gen_ai.operation.name`; every other endpoint is a chat."""


class RequestTraces:
    """Those of one gateway process."""

    def __init__(self, config: TracesConfig, *, instance: str, clock: Clock, log: Log) -> None:
        """`instance` names this process.

        Raises:
            ConfigError: see `OtlpExporter`.
        """
        self._clock = clock
        self.exports = bool(config.endpoint)
        """Without an endpoint only a caller's trace is passed on."""
        self._keeper: TraceKeeper | None = None
        if config.endpoint:
            exporter = OtlpExporter(config.endpoint, version=__version__, instance=instance)
            self._keeper = TraceKeeper(config, exporter, log)

    @property
    def exported(self) -> int:
        """Traces that the collector took."""
        return self._keeper.exported if self._keeper is not None else 0

    @property
    def dropped(self) -> int:
        """Traces that it did not take, or that there was no room for."""
        return self._keeper.dropped if self._keeper is not None else 0

    def start(self) -> None:
        """Begin to export."""
        if self._keeper is not None:
            self._keeper.start()

    async def stop(self) -> None:
        """Export what is left."""
        if self._keeper is not None:
            await self._keeper.stop()

    def begin(self, exchange: Exchange) -> None:
        """A request has come that has a trace, or may be given one: set its `trace`."""
        headers, keeper = exchange.head.headers, self._keeper
        given = headers.get(b"traceparent")
        if not exchange.path.startswith("/v1/"):
            return
        parent = None if given is None else read_context(given, headers.get(b"tracestate"))
        if keeper is not None:
            exchange.trace = keeper.begin(parent)
        elif parent is not None:
            exchange.trace = RequestTrace(parent, is_ours=False)

    def end(self, exchange: Exchange, record: RequestMeasurement | None) -> None:
        """It is over; `record` is of a request whose model was found."""
        trace, keeper, request = exchange.trace, self._keeper, exchange.request
        if trace is None or keeper is None:
            return
        error = _error(exchange, record)
        if not keeper.is_kept(trace, failed=bool(error), ttft_ns=record and record.ttft_ns):
            return
        now_ns = self._clock.now_ns()
        offset_ns = self._clock.wall_ns() - now_ns
        attributes = _attributes(exchange, record)
        name = f"{exchange.method} {exchange.path}"
        if exchange.served is not None:
            name = f"{attributes['gen_ai.operation.name']} {exchange.served.model}"
        keeper.add(
            EndedTrace(
                trace=trace,
                name=name,
                offset_ns=offset_ns,
                started_ns=exchange.started_ns + offset_ns,
                accepted_ns=request.arrived_ns + offset_ns if request is not None else -1,
                ended_ns=now_ns + offset_ns,
                status=exchange.status,
                error=error,
                attributes=attributes,
            )
        )


def _error(exchange: Exchange, record: RequestMeasurement | None) -> str:
    """Why it failed: an error's name, a status, or an outcome; empty if it did not, or its client left."""
    if exchange.ending is Ending.DISCONNECTED:
        return ""
    request = exchange.request
    if request is not None and request.error:
        return request.error
    if exchange.status >= 400:
        return str(exchange.status)
    failed = (OutcomeLabel.ERROR, OutcomeLabel.SHED, OutcomeLabel.REJECTED)
    return record.outcome.value if record is not None and record.outcome in failed else ""


def _attributes(
    exchange: Exchange, record: RequestMeasurement | None
) -> dict[str, str | int | float | Sequence[str]]:
    """OpenTelemetry's names where there are any; nothing that a client wrote but the model's name."""
    found: dict[str, str | int | float | Sequence[str]] = {
        "http.request.method": exchange.method,
        "url.path": exchange.path,
        "http.response.status_code": exchange.status or 499,
        "penstock.request_id": exchange.id,
    }
    served, request = exchange.served, exchange.request
    if served is None or record is None:
        return found
    found |= {
        "gen_ai.operation.name": _OPERATIONS.get(served.endpoint, "chat"),
        "gen_ai.provider.name": "penstock",
        "gen_ai.request.model": served.requested,
        "gen_ai.response.model": served.model,
        "gen_ai.response.finish_reasons": (record.outcome.value,),
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": record.generated_tokens,
        "penstock.cached_tokens": record.cached_tokens,
    }
    if request is not None:
        found["penstock.tenant"] = request.facts.tenant.id
        found["penstock.band"] = request.facts.tenant.band
    return found
