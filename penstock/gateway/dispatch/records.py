"""Records and counts of requests: the driver's `Records`, over the ledger and the metrics."""

from functools import partial

from msgspec.structs import replace

from penstock.clock import Clock
from penstock.policy.flow import Outcome, RequestFacts, UsageRecord
from penstock.policy.limits.price import PriceList
from penstock.policy.request import Request
from penstock.telemetry.ledger import Ledger
from penstock.telemetry.ledger_segment import Progress
from penstock.telemetry.metrics import Metrics
from penstock.types import Usage


class GatewayRecords:
    """See `driver.Records`.

    All that one turn of the event loop accepted is written to the journal together.
    """

    def __init__(self, ledger: Ledger, prices: PriceList, metrics: Metrics, clock: Clock) -> None:
        self._ledger, self._prices, self._metrics, self._clock = ledger, prices, metrics, clock

    def opened(self, request: Request) -> None:
        """See `driver.Records`."""
        self._ledger.open(opening_record(request.facts, self._clock.wall_ns()))

    def progressed(self, request: Request) -> None:
        """See `driver.Records`. As a rule a short answer ends before this would be written.

        Of a whole answer its client has nothing before the end.
        """
        if not request.facts.is_whole:
            self._ledger.slice(request.facts.id, partial(self._progress, request))

    def closed(self, request: Request, machine_micros: int) -> None:
        """See `driver.Records`."""
        record = request.record(self._clock.wall_ns())
        if version := self._prices.version:
            record = replace(record, price_version=version, accelerator_cost_micros=machine_micros)
        self._ledger.close(record)
        self._ledger.flush()

    def flush(self) -> None:
        """Write what was opened, before any of it is started."""
        self._ledger.flush()

    def _progress(self, request: Request) -> Progress:
        facts = request.facts
        usage = Usage(
            prompt_tokens=facts.prompt_tokens,
            cached_tokens=request.counted_cached_tokens,
            completion_tokens=request.completion_tokens,
        )
        return Progress(
            request_id=facts.id,
            at_ns=self._clock.wall_ns(),
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
            cost_micros=self._prices.cost_micros(facts.route, usage) if self._prices.are_any else 0,
            worker=request.worker,
        )

    def predicted(self, request: Request, error: float) -> None:
        """See `driver.Records`."""
        self._metrics.predicted(request.facts.route, error)

    def refused(self, route: str, reason: str) -> None:
        """See `driver.Records`."""
        self._metrics.refused(route, reason)

    def diverted(self, route: str, why: str) -> None:
        """See `driver.Records`."""
        self._metrics.diverted(route, why)

    def evicted(self, route: str, reason: str) -> None:
        """See `driver.Records`."""
        self._metrics.evicted(route, reason)

    def timed_out(self, request: Request) -> None:
        """See `driver.Records`."""
        self._metrics.timed_out(request.facts.route)

    def tried_again(self, request: Request) -> None:
        """See `driver.Records`."""
        count = self._metrics.migrated if request.has_begun else self._metrics.retried
        count(request.facts.route)


def opening_record(facts: RequestFacts, wall_ns: int) -> UsageRecord:
    """The facts of a request when it is accepted. It stands if this process ends without another word."""
    tenant, requested = facts.tenant, facts.requested_model or facts.route
    return UsageRecord(
        request_id=facts.id,
        ended_ns=wall_ns,
        tenant=tenant.id,
        tier=tenant.tier,
        key_prefix=facts.key_prefix,
        user=facts.user,
        endpoint=facts.endpoint,
        requested_model=requested,
        served_model=facts.route,
        route_reason=facts.diverted if requested != facts.route else "",
        adapter=facts.adapter,
        band=tenant.band,
        outcome=Outcome.FAILED,
        error="GatewayLost",
        choices=facts.choices,
        origin=facts.origin,
        origin_id=facts.origin_id,
    )
