"""The driver of requests' lives: carries out what `FlowControl` decides, on the event loop.

    submit ──> arrive ──> Queued: the ledger's journal has it ──> (next turn of the loop) flush, dispatch
                 │                                                     │
                 └─> refused: raised; diverted: returned               ├─ Start ─> the reply starts on the worker
                                                                       └─ Evict ─> the reply fails
    began, produced, broke, settled <── the reply

`FlowControl` decides, replies carry bytes, the ledger remembers; this file only passes on what each has to know. All
that one turn of the loop accepted is written to the journal together, before any of it is started.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from penstock.backends.base import GenerateRequest, Sink
from penstock.clock import NS_PER_S, Clock
from penstock.errors import EngineFault, PenstockError
from penstock.fleet.registry import Registry
from penstock.gateway.dispatch.meters import Meters
from penstock.gateway.dispatch.worker_feed import WorkerFeed
from penstock.gateway.models.served import ServedModel
from penstock.gateway.relay.reply import Reply, StreamSlots
from penstock.policy.admit_facts import DowngradeReason
from penstock.policy.answers import Diverted, Evict, FallBack, Refused, Settled, Start
from penstock.policy.flow import Arrival, Flow, State
from penstock.policy.lifecycle.control import FlowControl
from penstock.policy.limits.price import PriceList
from penstock.policy.limits.rate_limit import Limiter
from penstock.policy.record import Outcome, UsageRecord
from penstock.policy.resilience.health import FleetHealth
from penstock.telemetry.catalog import OutcomeLabel as Answer
from penstock.telemetry.ledger import Ledger
from penstock.telemetry.ledger_segment import Progress
from penstock.telemetry.log import Log
from penstock.telemetry.metrics import Metrics
from penstock.types import FinishReason, RequestId, Usage


@dataclass(slots=True, kw_only=True, eq=False)
class Ticket:
    """One request that was submitted."""

    arrival: Arrival
    model: ServedModel
    reply: Reply
    streams: Sequence[tuple[GenerateRequest, Sink]]
    reported: int = 0
    """Answer tokens that flow control knows of."""
    settled: Settled | None = None
    """Its end, if that was decided before its reply had ended."""
    again: Callable[[str, DowngradeReason], Awaitable[None]] | None = None
    """Makes its prompt anew for another model, and moves it there (`Dispatcher.move`), while it waits."""
    second: int = 0
    """The number of a second attempt that ran at once with the first; 0: there was none."""
    machine_micros: int = 0
    """What workers cost that it began on and left for another one."""


class Dispatcher:
    """All accepted requests of this gateway. Owner of their replies."""

    def __init__(
        self,
        control: FlowControl,
        registry: Registry,
        *,
        limiter: Limiter,
        health: FleetHealth,
        prices: PriceList,
        ledger: Ledger,
        slots: StreamSlots,
        metrics: Metrics,
        clock: Clock,
        log: Log,
        slice_tokens: int,
        is_shared: bool = False,
        shed_kv_above: float = 1.0,
        hedges: bool = False,
    ) -> None:
        """`slice_tokens` are the answer tokens between two looks at limits and budgets; `is_shared`: other gateways
        use the same workers; `shed_kv_above` is flow control's; `hedges`: flow control may start a request a second time beside the first.
        """
        self.control = control
        self._limiter, self._ledger, self._slots, self._clock = limiter, ledger, slots, clock
        self._log, self._slice_tokens = log, slice_tokens
        self._tickets: dict[RequestId, Ticket] = {}
        self._by_reply: dict[Reply, Ticket] = {}
        self._prices, self._metrics, self._health = prices, metrics, health
        self._meters = Meters(prices, is_shared=is_shared)
        self._registry = registry
        self._hedges = hedges
        self._tasks: set[asyncio.Future[None]] = set()
        self._is_due = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ns = 0
        self._workers = WorkerFeed(
            control,
            registry,
            self._meters,
            is_shared=is_shared,
            shed_kv_above=shed_kv_above,
            on_news=self._dispatch_soon,
        )

    def __len__(self) -> int:
        return len(self._tickets)

    @property
    def num_streams(self) -> int:
        """Streams that wait or run, of all accepted requests."""
        return self._slots.taken

    # --- from the endpoints ----------------------------------------------------------------------

    def submit(self, ticket: Ticket) -> Diverted | None:
        """Accept a request; `Diverted` if another model should have it, and then nothing is left of it here.

        Raises:
            PenstockError: it was refused.
        """
        now_ns, arrival = self._clock.now_ns(), ticket.arrival
        self._slots.check(arrival.choices)
        self._workers.refresh(now_ns)
        found = self.control.arrive(now_ns, arrival)
        if isinstance(found, Diverted):
            self._metrics.diverted(arrival.route, found.why)
            return found
        ticket.reply.exchange.headers = self._limiter.headers(now_ns, arrival.tenant)
        if isinstance(found, Refused):
            self._metrics.refused(arrival.route, found.reason)
            raise found.error
        self._open(now_ns, ticket)
        self._slots.take(arrival.choices)
        self._tickets[arrival.id] = self._by_reply[ticket.reply] = ticket
        self._dispatch_soon()
        return None

    def move(
        self,
        ticket: Ticket,
        arrival: Arrival,
        model: ServedModel,
        start: Callable[[], tuple[Reply, Sequence[tuple[GenerateRequest, Sink]]]],
    ) -> bool:
        """Let a request that waits for a model without workers wait for another one; `start` makes its reply. False: it stays."""
        route, now_ns = ticket.arrival.route, self._clock.now_ns()
        if arrival.id not in self._tickets or not self.control.move(now_ns, arrival):
            return False
        self._metrics.diverted(route, arrival.diverted)
        del self._by_reply[ticket.reply]
        ticket.arrival, ticket.model = arrival, model
        ticket.reply, ticket.streams = start()
        self._by_reply[ticket.reply] = ticket
        self._dispatch_soon()
        return True

    def heartbeat(self, ticks: int) -> None:
        """Let every reply that was silent for `ticks` calls show that it lives."""
        for ticket in list(self._tickets.values()):
            ticket.reply.heartbeat(ticks)

    def tick(self) -> None:
        """Called every second or so."""
        now_ns = self._clock.now_ns()
        self._workers.refresh(now_ns)
        self._meters.tick(now_ns)
        for model, count in self._workers.num_waiting():
            self._metrics.queue_waiting(model, count)
        for model, worker, state in self._health.states():
            self._metrics.breaker(model, worker, state)
        self._metrics.retry_budget(self._health.retries.level(now_ns))
        for model, costs in self._meters.costs(now_ns).items():
            self._metrics.accelerator_costs(model, costs.busy, costs.idle, costs.charged)

    def drain(self, timeout_s: float) -> None:
        """Accept nothing new; what is here may go on for so long."""
        now_ns = self._clock.now_ns()
        self.control.drain(now_ns, now_ns + int(timeout_s * NS_PER_S))
        self._dispatch_soon()

    def fail_all(self, error: PenstockError) -> None:
        """End what is still here."""
        for ticket in list(self._tickets.values()):
            ticket.reply.fail(error)

    def close(self) -> None:
        """Nothing more will be dispatched."""
        if self._timer is not None:
            self._timer.cancel()
        self._is_due = True
        for task in self._tasks:
            task.cancel()

    # --- from the replies ------------------------------------------------------------------------

    def began(self, reply: Reply) -> None:
        """See `Owner`."""
        request_id, now_ns = self._by_reply[reply].arrival.id, self._clock.now_ns()
        told = reply.first_usage()
        self.control.first_output(now_ns, request_id, cached_tokens=told and told.cached_tokens)
        flow = self.control.flow(request_id)
        assert flow is not None, "it produces, so it lives"
        self._meters.began(flow)
        # From here on its prompt counts, also if nothing more is heard.
        self._ledger.slice(self._progress(flow))
        if flow.attempts == 1 and flow.predicted_ns:
            ttft_ns = max(1, now_ns - flow.arrived_ns)
            error = abs(flow.predicted_ns - ttft_ns) / max(flow.predicted_ns, ttft_ns)
            self._metrics.predicted(flow.arrival.route, error)

    def produced(self, reply: Reply) -> None:
        """See `Owner`: a slice is full."""
        ticket, now_ns = self._by_reply[reply], self._clock.now_ns()
        new, ticket.reported = reply.num_produced - ticket.reported, reply.num_produced
        stop = self.control.output(now_ns, ticket.arrival.id, new)
        flow = self.control.flow(ticket.arrival.id)
        assert flow is not None, "it produces, so it lives"
        self._meters.produced(flow)
        self._ledger.slice(self._progress(flow))
        if stop is not None:
            reply.stop(FinishReason.BUDGET)
        else:
            reply.next_slice = reply.num_produced + self._slice_tokens

    def broke(self, reply: Reply, error: PenstockError) -> bool:
        """See `Owner`: another attempt if flow control grants one."""
        ticket, now_ns = self._by_reply[reply], self._clock.now_ns()
        usage, machine_micros = None, 0
        if (flow := self.control.flow(ticket.arrival.id)) is not None:
            machine_micros = self._meters.ended(now_ns, flow)
            if flow.has_begun:  # Else whoever runs the worker pays for what it lost.
                ticket.machine_micros += machine_micros
                usage = reply.tally.total()
        answer = self.control.failed(now_ns, ticket.arrival.id, error, retry=True, usage=usage)
        if isinstance(answer, Settled):
            ticket.settled = answer
            return False
        if answer is not None and answer.migrates:
            self._metrics.migrated(ticket.arrival.route)
        else:
            self._metrics.retried(ticket.arrival.route)
        self._dispatch_soon()
        return answer is not None

    def won(self, reply: Reply, attempt: int) -> None:
        """See `Owner`."""
        ticket, now_ns = self._by_reply[reply], self._clock.now_ns()
        if (flow := self.control.flow(ticket.arrival.id)) is not None:
            self._meters.dropped(now_ns, flow, second=attempt != ticket.second)
        self.control.races.won(now_ns, ticket.arrival.id, attempt)
        self._dispatch_soon()

    def lost(self, reply: Reply, attempt: int, error: PenstockError | None) -> None:
        """See `Owner`."""
        ticket, now_ns = self._by_reply[reply], self._clock.now_ns()
        if (flow := self.control.flow(ticket.arrival.id)) is not None:
            self._meters.dropped(now_ns, flow, second=attempt == ticket.second)
        self.control.races.lost(now_ns, ticket.arrival.id, attempt, error)
        self._dispatch_soon()

    def settled(self, reply: Reply) -> None:
        """See `Owner`: one record, and the place is free."""
        ticket = self._by_reply.pop(reply)
        del self._tickets[ticket.arrival.id]
        self._slots.give_back(ticket.arrival.choices)
        settled = ticket.settled or self._end(ticket)
        flow = settled.flow
        record = flow.record(self._clock.wall_ns())
        machine_micros = self._meters.settled(self._clock.now_ns(), flow, ticket.machine_micros)
        if self._prices.version:
            record = replace(
                record, price_version=self._prices.version, accelerator_cost_micros=machine_micros
            )
        self._ledger.close(record)
        self._ledger.flush()
        self._dispatch_soon()

    # --- inside ----------------------------------------------------------------------------------

    def _end(self, ticket: Ticket) -> Settled:
        """Tell flow control how the reply ended."""
        now_ns, tally, request_id = self._clock.now_ns(), ticket.reply.tally, ticket.arrival.id
        flow, error = self.control.flow(request_id), ticket.reply.error
        assert flow is not None, f"{request_id} has ended before"
        cancelled = tally.outcome is Answer.ABORT
        if flow.state is State.QUEUED:
            why = error if isinstance(error, PenstockError) else EngineFault("it never started")
            answer = (
                self.control.cancel(now_ns, request_id)
                if cancelled
                else self.control.failed(now_ns, request_id, why, retry=False)
            )
        else:
            outcome = Outcome.CANCELLED if cancelled else Outcome.FAILED if error else Outcome.FINISHED
            answer = self.control.ended(
                now_ns,
                request_id,
                outcome,
                tally.total(),
                finish_reason=tally.outcome.value if outcome is Outcome.FINISHED and tally.outcome else "",
                error=type(error).__name__ if error else "",
                fault=error if isinstance(error, PenstockError) else None,
            )
        assert isinstance(answer, Settled), answer
        return answer

    def _open(self, now_ns: int, ticket: Ticket) -> None:
        """Write down that it was accepted. If that cannot be, it ends here."""
        try:
            self._ledger.open(opening_record(ticket.arrival, self._clock.wall_ns()))
        except PenstockError as error:
            answer = self.control.failed(now_ns, ticket.arrival.id, error, retry=False)
            assert isinstance(answer, Settled), answer
            raise

    def _progress(self, flow: Flow) -> Progress:
        usage = Usage(
            prompt_tokens=flow.arrival.prompt_tokens,
            cached_tokens=flow.cached_tokens,
            completion_tokens=flow.completion_tokens,
        )
        return Progress(
            request_id=flow.id,
            at_ns=self._clock.wall_ns(),
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
            cost_micros=self._prices.cost_micros(flow.arrival.route, usage),
            worker=flow.worker,
        )

    def _dispatch_soon(self) -> None:
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        """Start and end what flow control says, once for all that this turn of the loop brought."""
        self._is_due = False
        self._ledger.flush()
        now_ns = self._clock.now_ns()
        self._workers.refresh(now_ns)
        for action in self.control.dispatch(now_ns):
            if isinstance(action, Start):
                (self._start_beside if action.beside else self._start)(action)
            elif isinstance(action, Evict):
                self._evict(action)
            elif isinstance(action, FallBack):
                self._fall_back(action)
            # An `Abort` is of an attempt whose reply ends as a whole, and aborts both.
        self._set_timer(now_ns)

    def _start(self, start: Start) -> None:
        ticket = self._tickets[start.id]
        reply, flow = ticket.reply, self.control.flow(start.id)
        assert flow is not None, "it was started just now"
        ticket.reported = reply.num_produced
        # Who goes on is heard of at once, so that flow control knows that it has begun there.
        reply.next_slice = reply.num_produced + (1 if flow.has_begun else self._slice_tokens)
        self._meters.started(self._clock.now_ns(), flow)
        if (served := ticket.reply.exchange.served) is not None:
            served.queue_ns = flow.queue_ns
        streams = reply.remaining(ticket.streams)
        if start.priority or start.attempt > 1:
            streams = [(_attempt(request, start), sink) for request, sink in streams]
        try:
            worker = self._registry.get(start.worker_id)
            assert worker is not None, f"{start.worker_id} has room, so it is there"
            race = start.attempt if self._hedges and start.attempt == 1 and len(streams) == 1 else 0
            reply.start(worker.backend, streams, race=race)
        except Exception as error:  # noqa: BLE001 - one request's bug must not end the others.
            self._log.bug("a request could not be started", error, request_id=reply.exchange.id)
            reply.fail(error)

    def _start_beside(self, start: Start) -> None:
        ticket = self._tickets[start.id]
        flow = self.control.flow(start.id)
        assert flow is not None, "it was started just now"
        ticket.second = start.attempt
        self._meters.started_beside(self._clock.now_ns(), flow, start.worker_id)
        ((request, sink),) = ticket.streams
        worker = self._registry.get(start.worker_id)
        assert worker is not None, f"{start.worker_id} has room, so it is there"
        try:
            ticket.reply.start_beside(worker.backend, _attempt(request, start), sink, attempt=start.attempt)
        except Exception as error:  # noqa: BLE001 - one request's bug must not end the others.
            self._log.bug("a second attempt could not be started", error, request_id=start.id)
            ticket.reply.fail(error)

    def _fall_back(self, what: FallBack) -> None:
        ticket = self._tickets.get(what.id)
        if ticket is not None and ticket.again is not None:
            task = asyncio.ensure_future(self._made_anew(ticket, ticket.again(what.route, what.why)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _made_anew(self, ticket: Ticket, making: Awaitable[None]) -> None:
        try:
            await making
        except PenstockError as error:  # It does not fit the other model, so it waits on.
            self._log.info("a request that waits cannot fall back", error=error, request_id=ticket.arrival.id)
        except Exception as error:  # noqa: BLE001 - one request's bug must not end the others.
            self._log.bug("a request could not be made anew", error, request_id=ticket.arrival.id)
            ticket.reply.fail(error)

    def _evict(self, evict: Evict) -> None:
        ticket = self._tickets.get(evict.id)
        if ticket is not None:
            self._metrics.evicted(ticket.arrival.route, evict.reason)
            ticket.settled = evict.settled
            ticket.reply.fail(evict.error)

    def _set_timer(self, now_ns: int) -> None:
        due_ns = self.control.next_ns(now_ns)
        if due_ns is None or self._is_due:
            return
        if self._timer is not None:
            if now_ns < self._timer_ns <= due_ns:
                return
            self._timer.cancel()
        delay_s = max(0, due_ns - now_ns) / NS_PER_S
        self._timer_ns, self._timer = due_ns, asyncio.get_running_loop().call_later(delay_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if not self._is_due:
            self._dispatch()


def _attempt(request: GenerateRequest, start: Start) -> GenerateRequest:
    """A stream as it is sent now. A worker that was thought dead may still have it from an earlier attempt: that is another."""
    name = f"{request.request_id}~{start.attempt}" if start.attempt > 1 else request.request_id
    return replace(request, priority=start.priority, request_id=RequestId(name))


def opening_record(arrival: Arrival, wall_ns: int) -> UsageRecord:
    """What is known of a request when it is accepted. It stands if this process is never heard of again."""
    tenant, requested = arrival.tenant, arrival.requested_model or arrival.route
    return UsageRecord(
        request_id=arrival.id,
        ended_ns=wall_ns,
        tenant=tenant.id,
        tier=tenant.tier,
        key_prefix=arrival.key_prefix,
        user=arrival.user,
        endpoint=arrival.endpoint,
        requested_model=requested,
        served_model=arrival.route,
        route_reason=arrival.diverted if requested != arrival.route else "",
        adapter=arrival.adapter,
        band=tenant.band,
        outcome=Outcome.FAILED,
        error="GatewayLost",
        choices=arrival.choices,
    )
