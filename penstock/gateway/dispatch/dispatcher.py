"""Carries out on the event loop what the driver says: streams on workers, replies to clients.

    submit ──> Driver.submit ──> (next turn of the loop) flush the journal, Driver.dispatch ──> start, fail
    on_first_output, on_tokens, on_attempt_failed, on_ended <── the replies ──> Driver

The driver decides, replies carry bytes, the ledger remembers; this file only passes on what each has to know.
`Dispatcher` is the driver's `Workers` and `Clients`; its `Records` are in telemetry/ledger.py.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

from msgspec.structs import replace

from penstock.backends.base import GenerateRequest, Sink, nothing
from penstock.clock import NS_PER_S, Clock
from penstock.errors import PenstockError, WorkerEjected
from penstock.fleet.registry import Registry, Worker
from penstock.gateway.dispatch.guests import guest_of
from penstock.gateway.dispatch.whole_answers import WholeAnswers
from penstock.gateway.dispatch.worker_feed import WorkerFeed
from penstock.gateway.http.exchange import Exchange
from penstock.gateway.relay.reply import FallBackTo, Reply, StreamSlots
from penstock.policy.flow import Diverted, FallBack, Outcome, Refused, RequestFacts, Start
from penstock.policy.lifecycle.driver import Driver
from penstock.policy.lifecycle.machine_costs import Meters
from penstock.policy.lifecycle.stack import PolicyStack
from penstock.policy.request import Request
from penstock.protocol.cells import Guest
from penstock.telemetry.catalog import OutcomeLabel as Answer
from penstock.telemetry.ledger import Ledger, RequestRecords
from penstock.telemetry.log import Log
from penstock.telemetry.metrics import Metrics
from penstock.types import FinishReason, RequestId, WorkerId

Pairs = tuple[tuple[str, str], ...]
Streams = Sequence[tuple[GenerateRequest, Sink]]
"""One for each choice, and what takes its output."""

FEW = 8
"""Requests, of which a turn of the event loop hardly ever ends two."""


class Dispatcher:
    """All accepted requests of this gateway. Owner of their replies; the driver's `Workers` and `Clients`."""

    def __init__(
        self,
        policies: PolicyStack,
        registry: Registry,
        *,
        ledger: Ledger,
        slots: StreamSlots,
        metrics: Metrics,
        clock: Clock,
        log: Log,
        processes: int = 1,
    ) -> None:
        """`processes`: gateways that use the same workers."""
        self.control, self.anomalies = policies.control, policies.anomalies
        self._limiter, self._slots, self._clock, self._log = policies.limiter, slots, clock, log
        self._metrics, self._health, self.registry = metrics, policies.health, registry
        self._slice_tokens, self._hedges = policies.slice_tokens, policies.hedges is not None
        self.meters = Meters(policies.prices, is_shared=processes > 1)
        self._records = RequestRecords(ledger, policies.prices, metrics, clock)
        self.answers = WholeAnswers(self._records.flush, self.on_bug)
        self._gave_way = False
        self._driver = Driver(self.control, self, self, self._records, self.meters)
        self._tasks: set[asyncio.Future[None]] = set()
        self._is_due = False
        self.on_dispatched: Callable[[], None] = nothing
        """Called when requests may have begun to run, or to wait."""
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ns = 0
        self._workers = WorkerFeed(
            self.control,
            registry,
            self.meters,
            policies.anomalies,
            processes=processes,
            shed_kv_above=policies.shed_kv_above,
            on_change=self._dispatch_soon,
        )

    def __len__(self) -> int:
        return len(self.control)

    def expect(self, to_come: Mapping[str, float]) -> None:
        """Models that have no worker and get one when somebody asks, and how many seconds that takes."""
        self._workers.expect(self._clock.now_ns(), to_come)
        self._dispatch_soon()

    @property
    def num_streams(self) -> int:
        """Streams that wait or run, of all accepted requests."""
        return self._slots.taken

    # --- from the endpoints ----------------------------------------------------------------------

    def submit(
        self, facts: RequestFacts, reply: Reply, streams: Streams, fall_back: FallBackTo | None
    ) -> Diverted | None:
        """Accept a request; `Diverted` if another model should have it, and then nothing is left of it here.

        Raises:
            PenstockError: it was refused.
        """
        now_ns = self._clock.now_ns()
        self._slots.check(facts.choices)
        self._workers.refresh(now_ns)
        try:
            answer = self._driver.submit(now_ns, facts, reply)
        finally:
            reply.exchange.headers = self._limiter.headers(now_ns, facts.tenant)
        if isinstance(answer, Diverted):
            return answer
        if isinstance(answer, Refused):
            raise answer.error
        self._take(reply, streams, facts.id)
        reply.fall_back = fall_back
        self._slots.take(facts.choices)
        self._dispatch_soon()
        return None

    def is_crowded(self, model: str) -> bool:
        """Whether requests came too late here a short while ago: ask `check_crowd` about the next one."""
        model_queue = self.control.model_queue(model)
        return model_queue is not None and model_queue.pace.is_any_late(self._clock.now_ns())

    def check_crowd(self, exchange: Exchange, facts: RequestFacts) -> None:
        """Refuse a request under overload before its prompt is rendered and tokenized, which is most of the
        work on a request that is refused; `facts` are those that are known before.

        Raises:
            PenstockError: it would be refused with any prompt.
        """
        now_ns = self._clock.now_ns()
        if (error := self._driver.refuse_any(now_ns, facts)) is not None:
            exchange.headers = self._limiter.headers(now_ns, facts.tenant)
            raise error

    def move(self, request: Request, facts: RequestFacts, start: Callable[[], tuple[Reply, Streams]]) -> bool:
        """Let a request that waits for a model without workers wait for another one; `start` makes its reply.

        False: it stays.
        """
        if not self._driver.move(self._clock.now_ns(), facts, facts.diverted):
            self._dispatch_soon()
            return False
        old = _reply_of(request)
        reply, streams = start()
        request.io, reply.fall_back = reply, old.fall_back
        self._take(reply, streams, facts.id)
        self._dispatch_soon()
        return True

    def left_alone(self, model: str, *, rests: bool = True) -> Mapping[WorkerId, str]:
        """Workers of a model that are ready and given nothing, or little: `FleetHealth.left_alone`."""
        reported = self._health.left_alone(self._clock.now_ns(), model, rests=rests)
        return reported | self._workers.left_alone(model)

    def heartbeat(self, ticks: int) -> None:
        """Let every reply that was silent for `ticks` calls show that it lives."""
        for reply in self._replies():
            reply.heartbeat(ticks)

    def tick(self) -> None:
        """Called every second or so."""
        now_ns = self._clock.now_ns()
        self._workers.refresh(now_ns)
        self._leave_ejected(now_ns)
        self.meters.tick(now_ns)
        for model, count in self._workers.num_waiting():
            self._metrics.queue_waiting(model, count)
        for model, worker, state in self._health.states():
            self._metrics.breaker(model, worker, state)
        self._metrics.retry_budget(self._health.retries.level(now_ns))
        for cell, rtt_ns in self._workers.round_trips():
            self._metrics.round_trip(cell, rtt_ns)
        self.on_dispatched()

    def drain(self, timeout_s: float) -> None:
        """Accept nothing new; accepted requests may run for so long."""
        now_ns = self._clock.now_ns()
        self._driver.drain(now_ns, now_ns + int(timeout_s * NS_PER_S))
        self._dispatch_soon()

    def fail_all(self, error: PenstockError) -> None:
        """End what is still here."""
        for reply in self._replies():
            reply.fail(error)

    def close(self) -> None:
        """Nothing more will be dispatched."""
        if self._timer is not None:
            self._timer.cancel()
        self._is_due = True
        for task in self._tasks:
            task.cancel()

    # --- from the replies: see `ReplyListener` ----------------------------------------------------

    def on_first_output(self, reply: Reply) -> None:
        """See `ReplyListener`."""
        exchange, usage, now_ns = reply.exchange, reply.first_usage(), self._clock.now_ns()
        request, exchange.first_usage = exchange.request, usage
        assert request is not None, "only accepted requests are started"
        if exchange.trace is not None:
            exchange.trace.first_output(now_ns, request.attempt)
        self._driver.first_output(
            now_ns, request, request.attempt, cached_tokens=usage and usage.cached_tokens
        )
        self._look_soon()  # Its worker was busy with its prompt, or kept apart for it.

    def on_tokens(self, reply: Reply) -> None:
        """See `ReplyListener`: a slice is full."""
        if self._driver.output(self._clock.now_ns(), _request_of(reply), reply.num_produced):
            reply.next_slice = reply.num_produced + self._slice_tokens
        self._look_soon()  # It continues here, and has begun.

    def on_attempt_failed(self, reply: Reply, error: PenstockError) -> bool:
        """See `ReplyListener`."""
        request, now_ns = _request_of(reply), self._clock.now_ns()
        if (trace := reply.exchange.trace) is not None:
            trace.end_attempt(now_ns, request.attempt, error)
        goes_on = self._driver.attempt_failed(now_ns, request, request.attempt, error)
        self._dispatch_soon()
        return goes_on

    def on_hedge_won(self, reply: Reply, attempt: int) -> None:
        """See `ReplyListener`."""
        request, now_ns = _request_of(reply), self._clock.now_ns()
        if (trace := reply.exchange.trace) is not None:
            trace.keep_attempt(now_ns, attempt)
        self._driver.take_lead(now_ns, request, attempt)
        if (worker := self.registry.get(request.worker)) is not None:
            reply.exchange.migration = _migration(worker, reply.streams)
        self._dispatch_soon()

    def on_hedge_lost(self, reply: Reply, attempt: int, error: PenstockError | None) -> None:
        """See `ReplyListener`."""
        request = _request_of(reply)
        if (trace := reply.exchange.trace) is not None:
            trace.end_attempt(self._clock.now_ns(), attempt, error)
        if request.hedge is not None:
            self._driver.attempt_failed(self._clock.now_ns(), request, attempt, error)
        self._dispatch_soon()

    def on_client_left(self, reply: Reply) -> None:
        """See `ReplyListener`."""
        if reply.request is not None:
            self._driver.cancel(self._clock.now_ns(), reply.request)
            self._dispatch_soon()

    def on_bug(self, reply: Reply, error: Exception) -> None:
        """See `ReplyListener`."""
        self._log.bug("an answer could not be passed on", error, request_id=reply.exchange.id)

    def on_ended(self, reply: Reply) -> bool:
        """See `ReplyListener`. A request that goes to another model has a reply that was never accepted.

        Whole answers of one turn of the event loop are sent together, behind one write of their records, if
        so many requests run that a turn ends several.
        """
        request, label = reply.exchange.request, reply.exchange.outcome
        if request is None:
            return False
        if (trace := reply.exchange.trace) is not None:
            trace.end_attempt(self._clock.now_ns(), request.attempt, reply.error)
        cancelled = label is Answer.ABORT
        outcome = Outcome.CANCELLED if cancelled else Outcome.FAILED if reply.error else Outcome.FINISHED
        is_whole = request.facts.is_whole
        if is_together := is_whole and outcome is Outcome.FINISHED and len(self.control) > FEW:
            self.answers.add(reply)
        now_ns, reason = self._clock.now_ns(), label or ""
        self._driver.ended(now_ns, request, outcome, finish_reason=reason, error=reply.error)
        # Also of one that failed: a budget may have ended it well before.
        return is_together or (is_whole and not self.answers.record((reply,)))

    # --- for the driver: see `driver.Workers` and `driver.Clients` --------------------------------

    def start(self, now_ns: int, request: Request, start: Start) -> None:
        """See `driver.Workers`."""
        reply, worker = request.io, self.registry.get(start.worker_id)
        assert isinstance(reply, Reply), f"{request.id} has no reply"
        assert worker is not None, f"{start.worker_id} has room, so it is there"
        try:
            exchange, headers = reply.exchange, ()
            if exchange.trace is not None:
                headers = _trace_headers(now_ns, request, reply, start, worker)
            if start.is_hedge:
                ((stream, sink),) = reply.streams
                stream = _attempt(stream, start, headers, None)
                reply.start_hedge(worker.backend, stream, sink, attempt=start.attempt)
                return
            # A request that continues reports at once, so that flow control knows that it has begun there.
            reply.next_slice = reply.num_produced + (1 if request.has_begun else self._slice_tokens)
            exchange.queue_ns = request.queue_ns
            streams = reply.streams if exchange.first_ns is None else reply.remaining()
            guest = None
            if worker.cell is not None:
                guest = guest_of(request, now_ns, headers)
                self._metrics.sent_to_cell(worker.route, worker.cell.name)
            if start.priority or start.attempt > 1 or start.takes_row or headers or guest is not None:
                streams = [(_attempt(stream, start, headers, guest), sink) for stream, sink in streams]
            migration = _migration(worker, streams)
            if request.has_begun:
                exchange.migrated = migrated(exchange, migration)
            exchange.migration, exchange.cell = migration, worker.cell.name if worker.cell is not None else ""
            race = start.attempt if self._hedges and start.attempt == 1 and len(streams) == 1 else 0
            reply.start(worker.backend, streams, race=race)
        except Exception as error:  # noqa: BLE001 - one request's bug must not end the others.
            self._log.bug("a request could not be started", error, request_id=reply.exchange.id)
            reply.fail(error)

    def abort(self, now_ns: int, worker_id: WorkerId, request_id: RequestId, attempt: int) -> None:
        """See `driver.Workers`. A request that has ended has aborted all of its streams."""
        if (request := self.control.request(request_id)) is not None:
            reply = _reply_of(request)
            if attempt:
                reply.abort_attempt(attempt)
            else:
                reply.abort()

    def give_up(self, now_ns: int, request: Request, error: PenstockError) -> None:
        """See `driver.Workers`."""
        _reply_of(request).give_up(error)

    def move_off(self, now_ns: int, request: Request, error: PenstockError) -> None:
        """See `driver.Workers`."""
        _reply_of(request).move_off(error)

    def stop(self, now_ns: int, request: Request, reason: FinishReason) -> None:
        """See `driver.Clients`."""
        _reply_of(request).stop(reason)

    def fail(self, now_ns: int, request: Request, error: PenstockError) -> None:
        """See `driver.Clients`."""
        _reply_of(request).fail(error)

    def fall_back(self, now_ns: int, request: Request, action: FallBack) -> None:
        """See `driver.Clients`."""
        if (make := _reply_of(request).fall_back) is not None:
            making = self._fall_back(request, make(request, action.route, action.why))
            task = asyncio.ensure_future(making)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def settled(self, now_ns: int, request: Request, error: PenstockError | None) -> None:
        """See `driver.Clients`."""
        reply = _reply_of(request)
        self._slots.give_back(request.facts.choices)
        request.io, reply.streams, reply.fall_back = None, (), None  # They refer to each other.
        if error is not None:
            reply.fail(error)
        if self._look_soon():
            return  # That dispatch asks the pace, which learns first.
        if (pace := request.model_queue.pace).has_lesson:  # When its client has its answer.
            self.answers.soon(pace.learn)

    # --- inside ----------------------------------------------------------------------------------

    def _leave_ejected(self, now_ns: int) -> None:
        """Requests on workers that are ejected continue on others. At one that is only slow it stays until
        another one has room: to wait would be slower still.
        """
        for worker_id, cause in self.anomalies.ejected():
            error = WorkerEjected(f"the worker is {cause}")
            num_moved = self._driver.move_off(now_ns, worker_id, error, now=cause == "slow")
            if num_moved:
                self._log.warning("streams leave a worker", worker=worker_id, cause=cause, streams=num_moved)
                self._set_timer(now_ns)

    def _replies(self) -> Iterator[Reply]:
        return (_reply_of(request) for request in self.control.requests() if request.io is not None)

    def _take(self, reply: Reply, streams: Streams, request_id: RequestId) -> None:
        """From here on the reply is that request's."""
        request = self.control.request(request_id)
        assert request is not None, f"{request_id} was just accepted"
        reply.exchange.request, reply.streams = request, streams

    async def _fall_back(self, request: Request, making: Awaitable[None]) -> None:
        try:
            await making
        except PenstockError as error:  # It does not fit the other model, so it waits on.
            self.control.stay(request.id)
            self._dispatch_soon()
            self._log.info("a request that waits cannot fall back", error=error, request_id=request.id)
        except Exception as error:  # noqa: BLE001 - one request's bug must not end the others.
            self._log.bug("a prompt could not be made for another model", error, request_id=request.id)
            if request.io is not None:
                _reply_of(request).fail(error)

    def _look_soon(self) -> bool:
        """Dispatch soon if there is a reason to. Whether that will be done."""
        if not self._is_due and self.control.is_due:
            self._dispatch_soon()
        return self._is_due

    def _dispatch_soon(self) -> None:
        if not self._is_due:
            self._is_due = True
            self.answers.soon(self._dispatch)

    def _dispatch(self) -> None:
        """Start and end what the driver says, once for all that this turn of the loop brought."""
        if self.answers and not self._gave_way:
            self._gave_way = True  # Once: under load every turn completes answers.
            self.answers.soon(self._dispatch)
            return
        self._is_due = self._gave_way = False
        self._records.flush()
        now_ns = self._clock.now_ns()
        self._workers.refresh(now_ns)
        self._driver.dispatch(now_ns)
        self._set_timer(now_ns)
        self.on_dispatched()

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


def _reply_of(request: Request) -> Reply:
    assert isinstance(request.io, Reply), f"{request.id} has no reply"
    return request.io


def _request_of(reply: Reply) -> Request:
    request = reply.exchange.request
    assert request is not None, "only accepted requests are started"
    return request


def migrated(before: Exchange, migration: str) -> str:
    """How an answer continues at a worker with this `migration`: exactly between workers of ours only."""
    is_exact = not (before.migration or migration or before.migrated == "approximate")
    return "exact" if is_exact else "approximate"


def _migration(worker: Worker, streams: Streams) -> str:
    """The value of `x-penstock-migration` (gateway/http/exchange.py); empty: the header is left out."""
    if worker.engine == "penstock" or worker.cell is not None or not streams:
        return ""
    return "approximate" if worker.backend.status.resumes and streams[0][0].may_move else "none"


def _trace_headers(now_ns: int, request: Request, reply: Reply, start: Start, worker: Worker) -> Pairs:
    """An attempt begins: what its request carries of its trace. Engines of ours make no spans."""
    trace = reply.exchange.trace
    assert trace is not None, f"{request.id} is traced"
    kind = "first"
    if start.attempt > 1:
        kind = "hedge" if start.is_hedge else "migration" if request.has_begun else "retry"
    trace.start_attempt(now_ns, start.attempt, start.worker_id, kind)
    return () if worker.engine == "penstock" else trace.headers(start.attempt)


def _attempt(
    request: GenerateRequest, start: Start, trace_headers: Pairs, guest: Guest | None
) -> GenerateRequest:
    """A stream as it is sent now.

    A worker that was thought dead may still have it from an earlier attempt: that is another.
    """
    name = f"{request.request_id}~{start.attempt}" if start.attempt > 1 else request.request_id
    return replace(
        request,
        priority=start.priority,
        takes_row=start.takes_row,
        request_id=RequestId(name),
        trace_headers=trace_headers,
        guest=guest,
    )
