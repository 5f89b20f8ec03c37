"""Exchanges that are over are counted, remembered and logged: one by one, or all whose answers are sent
together.

One after the other they find this code and its objects in the processor's caches; each by itself, between
pieces of other requests, takes several times as long.
"""

import asyncio

from penstock.gateway.api.routes import is_poll
from penstock.gateway.api.services import Services
from penstock.gateway.http.errors import failure_of
from penstock.gateway.http.exchange import Ending, Exchange
from penstock.gateway.tracing import RequestTraces
from penstock.telemetry.catalog import OutcomeLabel
from penstock.telemetry.counts import RequestMeasurement
from penstock.telemetry.history import Recorder
from penstock.telemetry.log import AccessLine
from penstock.types import RequestId


class Endings:
    """Exchanges that are over and still to be counted and logged."""

    def __init__(self, services: Services, recorder: Recorder, traces: RequestTraces) -> None:
        self._services, self._recorder, self._traces = services, recorder, traces
        self._clock, self._log = services.clock, services.log
        self._over: list[tuple[Exchange, int]] = []
        self._is_log_due = False
        self._answers = services.dispatcher.answers
        self._answers.on_sent = self.tell

    def take(self, exchange: Exchange) -> None:
        """Count and log it now, or once the answers that are being sent have all been sent."""
        self._over.append((exchange, self._clock.now_ns()))
        if not self._answers.is_sending:
            self.tell()

    def tell(self) -> None:
        """Of all that came since the last time. Their lines in the log are written in the next turn of the
        event loop, behind what it sends.
        """
        over, self._over = self._over, []
        for exchange, now_ns in over:
            try:
                record = self._count(exchange, now_ns)
                if self._log.tells_requests:
                    self._log.access(_access_line(exchange, record, now_ns))
            except Exception as error:  # noqa: BLE001 - one request's bug must not leave the others untold.
                self._log.bug("a request could not be counted", error, request_id=exchange.id)
        if over and self._log.tells_requests and not self._is_log_due:
            self._is_log_due = True
            asyncio.get_running_loop().call_soon(self._flush_log)

    def _flush_log(self) -> None:
        self._is_log_due = False
        self._log.flush()

    def _count(self, exchange: Exchange, now_ns: int) -> RequestMeasurement | None:
        services, metrics = self._services, self._services.metrics
        if exchange.status:
            metrics.http_response(exchange.status)
        if exchange.ending is Ending.DISCONNECTED:
            metrics.client_disconnects.inc()
        elif exchange.ending is Ending.OVERRUN:
            metrics.slow_client_aborts.inc()
        served, record = exchange.served, None
        if served is not None:
            if exchange.ending is Ending.DISCONNECTED and exchange.outcome is None:
                exchange.outcome = OutcomeLabel.ABORT  # It left while its prompt was tokenized.
            record = exchange.measured(served, now_ns)
            self._recorder.ended(served.counted_model, record)
            services.recent.add(exchange, served, record)
            if served.assigned is not None:
                services.trials.ended(exchange, served, record)
        if exchange.trace is not None:
            self._traces.end(exchange, record)
        kept = services.kept
        if exchange.error is not None and kept is not None and exchange.path.startswith("/v1/"):
            kept.failed(RequestId(exchange.id), failure_of(exchange.error))
        return record


def _access_line(exchange: Exchange, record: RequestMeasurement | None, now_ns: int) -> AccessLine:
    served = exchange.served
    return AccessLine(
        method=exchange.method,
        path=exchange.path,
        status=exchange.status or 499,  # nginx's number for a client that left before the answer.
        duration_ns=now_ns - exchange.started_ns,
        is_poll=is_poll(exchange.method, exchange.path, exchange.status),
        request_id=exchange.id or None,
        trace_id=exchange.trace and exchange.trace.trace_id,
        model=served and served.counted_model,
        outcome=record and record.outcome,
        ttft_ns=record and record.ttft_ns,
        prompt_tokens=record and record.prompt_tokens,
        cached_tokens=record and record.cached_tokens,
        generated_tokens=record and record.generated_tokens,
    )
