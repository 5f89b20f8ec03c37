"""A simulated gateway: the driver with all its policies; requests are structs, and workers are messages away.

    arrive, cancel ──> Driver ──> start, abort ──> Network ──> workers
    heard, reported <── Network <── workers

This is what the driver's ports are here; gateway/dispatch/dispatcher.py has those on an event loop, with
bytes.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import msgspec

from penstock import rng
from penstock.errors import EngineFault, PenstockError, StreamBroken, WorkerEjected, WorkerUnavailable
from penstock.kv.events import Numbered
from penstock.policy.contracts import ModelFacts
from penstock.policy.extras.hedging import HedgeOutcome
from penstock.policy.flow import Diverted, FallBack, Outcome, Refused, RequestFacts, Start
from penstock.policy.lifecycle.driver import Driver
from penstock.policy.lifecycle.machine_costs import Meters
from penstock.policy.lifecycle.stack import build_policies
from penstock.policy.limits.rate_limit import Limiter
from penstock.policy.queueing.capacity import WorkerView
from penstock.policy.queueing.fair_counters import FairCounters
from penstock.policy.request import Request
from penstock.policy.terms import part_of
from penstock.sim.traffic.prompts import LazyTokens, SimRequest
from penstock.sim.world.caches import Asked, Caches
from penstock.sim.world.facts import (
    Dealer,
    Facts,
    GuestHost,
    GuestTicket,
    Network,
    RunRecorder,
    SpeedWatch,
    Ticket,
    ticket_of,
)
from penstock.sim.world.messages import (
    Began,
    Failed,
    Finished,
    KVUpdate,
    LocalClock,
    Rank,
    Sliced,
    Submission,
    Timeline,
    WorkerLoadReport,
    WorkerMessage,
)
from penstock.sim.world.records import ended_record, lost_record, lost_usage, refused_record
from penstock.sim.world.store import SharedStore, SimFairExchange, SimLeaseKeeper
from penstock.sim.world.worker import SimWorker
from penstock.types import FinishReason, RequestId, Usage, WorkerId, places_of

_TOKEN_BYTES = 4
NOWHERE: frozenset[str] = frozenset()
"""Needs of a request that is bound to no place."""


class SimGateway:
    """One gateway process. `number` names it to the workers."""

    def __init__(
        self,
        number: int,
        actor: int,
        facts: Facts,
        timeline: Timeline,
        network: Network,
        recorder: RunRecorder,
        *,
        store: SharedStore | None = None,
        life: int = 0,
    ) -> None:
        """`store` is that of shared limits, if there is one; `life` counts this gateway's starts."""
        self.number, self.actor = number, actor
        self.life, self.is_gone = life, False
        self._facts, self._timeline, self._network, self._recorder = facts, timeline, network, recorder
        config = facts.config
        skew_ns = facts.skews_ns.get(number, 0)
        self.clock = LocalClock(wall_offset_ns=timeline.wall_ns() - timeline.now_ns() + skew_ns)
        self.clock.time_ns = timeline.now_ns()
        self._links: list[SimLeaseKeeper | SimFairExchange] = []
        limiter, name = Limiter(config.limits), f"{number}-{life}"
        if store is not None:
            keeper = SimLeaseKeeper(config, store, timeline, actor=actor, name=name, link_ns=facts.link_ns)
            limiter = keeper.limiter
            self._links.append(keeper)
        self.caches = Caches(config, hash_key=facts.hash_key, seed=facts.seed, gateway=number)
        self.num_hedges: dict[HedgeOutcome, int] = dict.fromkeys(HedgeOutcome, 0)  # By what came of them.
        self.policies = build_policies(
            config,
            facts=self._model_facts,
            placement=facts.placement
            or partial(self.caches.placement, on_order=partial(network.order, number)),
            limiter=limiter,
            wall_offset_ns=self.clock.wall_ns() - self.clock.now_ns(),
            random=rng.stream(facts.seed, f"breakers/{number}/{life}").random,
            on_hedge=self._count_hedge,
        )
        self.control = self.policies.control
        if store is not None:
            counters = FairCounters(tuple(facts.models), self.control.model_queue)
            self._links.append(SimFairExchange(counters, store, timeline, actor=actor, link_ns=facts.link_ns))
        self.meters = Meters(self.policies.prices)  # Nothing without `prices.accelerators`.
        self._driver = Driver(self.control, self, self, self, self.meters)
        self._known: dict[WorkerId, str] = {}
        self.places: frozenset[str] = frozenset()
        """Where its workers are, as capabilities, if it is one of several cells'."""
        self._host: GuestHost | None = None
        self.dealer: Dealer | None = None
        self.speeds = SpeedWatch(self.policies.anomalies)
        self._timer_ns: int | None = None

    # --- clients ------------------------------------------------------------------------------------

    def arrive(self, now_ns: int, request: SimRequest, number: int) -> bool:
        """Take a request; False if it was refused. `number` is unique in the world."""
        route, diverted = request.model, ""
        for _ in range(1 + len(self._facts.models)):
            facts = self._request_facts(request, route, diverted)
            answer = self._driver.submit(now_ns, facts, Ticket(request, number))
            if not isinstance(answer, Diverted):
                break
            route, diverted = answer.route, answer.why
        else:
            raise AssertionError(f"{request.id} is sent in circles")
        if isinstance(answer, Refused):
            link_ns = self._facts.link_ns
            self._recorder.ended(refused_record(now_ns - link_ns, now_ns + link_ns, facts, answer))
        self._dispatch(now_ns)
        return not isinstance(answer, Refused)

    def cancel(self, now_ns: int, request_id: RequestId, *, unless_begun: bool = False) -> None:
        """The client leaves; with `unless_begun` only if it has got nothing yet."""
        request = self.control.request(request_id)
        if request is None or (unless_begun and ticket_of(request).first_ns >= 0):
            return
        self._driver.cancel(now_ns, request)
        self._dispatch(now_ns)

    def host(self, host: GuestHost, places: frozenset[str]) -> None:
        """It is one of several cells': requests of others may come, and `host` brings them."""
        self._host, self.places = host, places

    def arrive_guest(self, now_ns: int, ticket: GuestTicket, origin: RequestFacts) -> None:
        """Take a request of another cell, whose limits and price were settled there (`origin`)."""
        assert self._host is not None, "it is one of several cells'"
        facts = msgspec.structs.replace(
            self._request_facts(ticket.request, origin.route, ""),
            tenant=replace(origin.tenant, degrade="never"),
            needs=origin.needs | self._host.stays_in(self.number),
            origin=ticket.cell,
            origin_id=origin.id,
        )
        answer = self._driver.submit(now_ns, facts, ticket)
        if isinstance(answer, Refused):
            ticket.host.refused(now_ns, ticket)
        self._dispatch(now_ns)

    def peer(self, now_ns: int, route: str, worker_id: WorkerId, view: WorkerView) -> None:
        """How a peer cell stands for a model."""
        if not self.is_gone:
            self._known[worker_id] = route
            self.control.set_worker(now_ns, route, worker_id, view)
            self._dispatch(now_ns)

    def drain(self, now_ns: int, deadline_ns: int) -> None:
        """Take nothing new; running requests may continue until the deadline."""
        self.control.drain(now_ns, deadline_ns)
        self._dispatch(now_ns)

    def leave(self, now_ns: int) -> list[SimRequest]:
        """Be gone at once. Returns the requests that are cut off; the ledger finds them in its journal."""
        cut_off = self.requests()
        self.is_gone, self._timer_ns = True, None
        for link in self._links:
            link.close()
        cut_off = [each for each in cut_off if not each.facts.origin]  # Their own cells know what to do.
        for request in cut_off:
            self._lose(now_ns, request)
        return [ticket_of(request).request for request in cut_off]

    def requests(self) -> Sequence[Request]:
        """Those that were accepted and have not ended."""
        return () if self.is_gone else self.control.requests()

    # --- workers ------------------------------------------------------------------------------------

    def received(self, now_ns: int, worker_id: WorkerId, messages: Sequence[WorkerMessage]) -> None:
        """A worker's messages about requests."""
        for message in messages:
            request = self.control.request(message.id)
            if request is None or self.is_gone or not request.has_attempt(message.attempt):
                if self.dealer is not None:
                    self.dealer.received(now_ns, message)
                continue  # Of an attempt that is over, or a copy.
            match message:
                case Began():
                    self._began(now_ns, request, message)
                case Sliced():
                    self._driver.take_lead(now_ns, request, message.attempt)
                    self._sliced(now_ns, request, message)
                case Finished():
                    self._driver.take_lead(now_ns, request, message.attempt)
                    self._finished(now_ns, request, message)
                case Failed():
                    self._failed(now_ns, request, message.attempt, message.error)
        self._dispatch(now_ns)

    def reported(
        self, now_ns: int, route: str, worker: SimWorker, report: WorkerLoadReport | None, *,
        ready: bool = True,
    ) -> None:  # fmt: skip
        """A worker is there and announces what it serves, has something to say of itself, or drains (not
        `ready`).
        """
        worker_id, spec, processes = worker.id, worker.spec, self._facts.config.server.processes
        weight = 1.0
        if self._facts.watches_speed:
            sample = (route, worker, report, ready)
            weight = self.speeds.weight(now_ns, sample, lambda r: self.reported(now_ns, *r[:3], ready=r[3]))
        rows = math.ceil(weight * (report.rows_max if report is not None else spec.engine.max_running))
        is_shared = processes > 1 and not spec.is_external
        view = WorkerView(
            ready=ready and weight > 0,
            max_running=part_of(rows, processes) if spec.is_external else rows,
            running=report.running if report is not None and is_shared else 0,
            waiting=report.waiting if report is not None and is_shared else 0,
            kv_blocks_total=report.blocks_total if report is not None else 0,
            kv_blocks_used=report.blocks_used if report is not None else 0,
            kind=spec.kind,
            max_model_len=spec.max_model_len,
            identity="" if spec.is_external else worker.identity,
            is_external=spec.is_external,
            resumes=spec.resumes,
            adapters=report.adapters if report is not None else None,
            adapters_max=spec.adapters.slots if spec.adapters else 0,
            adapter_load_ns=spec.adapters.read_ns if spec.adapters else 0,
            capabilities=self.places,
        )
        if worker_id not in self._known:
            self._known[worker_id] = route
            self.caches.joined(worker_id, route, worker.identity)
            self.meters.has_worker(now_ns, route, worker_id, tells=False)
        self.meters.serves(now_ns, worker_id, in_service=ready)
        self.control.set_worker(now_ns, route, worker_id, view)
        if not weight:
            why = WorkerEjected("the worker is slower than its peers")
            self._driver.move_off(now_ns, worker_id, why, now=True)
        self._dispatch(now_ns)

    def lost(self, now_ns: int, worker_id: WorkerId, *, died: bool) -> int:
        """A worker is gone, with all that ran there, or (not `died`) out of sight; returns how many requests
        that were.
        """
        route, num_lost = self._known.pop(worker_id, None), 0
        if route is None:
            return 0
        for request in self.requests():
            if attempt := request.attempt_at(worker_id):
                num_lost += 1
                kind = StreamBroken if ticket_of(request).first_ns >= 0 else WorkerUnavailable
                self._failed(now_ns, request, attempt, kind("the worker is gone", died=died))
        self.control.set_worker(now_ns, route, worker_id, None)
        if self.dealer is not None:
            self.dealer.gone(worker_id)
        self.speeds.gone(worker_id)
        self.caches.left(worker_id)
        self.meters.left(now_ns, worker_id)
        self._dispatch(now_ns)
        return num_lost

    def cached(self, now_ns: int, worker_id: WorkerId, update: KVUpdate) -> None:
        """Words of a worker about its KV cache. Events that are missing are asked for."""
        self._ask_kv(now_ns, worker_id, self.caches.received(worker_id, update))

    def cached_again(
        self, now_ns: int, worker_id: WorkerId, asked: Asked, batches: Sequence[Numbered]
    ) -> None:
        """The events that a worker could send again when asked."""
        self._ask_kv(now_ns, worker_id, self.caches.received_again(worker_id, asked, batches))

    def kv_reconnected(self, now_ns: int, worker_id: WorkerId) -> None:
        """A worker's publisher is connected again after a while."""
        self._ask_kv(now_ns, worker_id, self.caches.reconnected(worker_id))

    def _ask_kv(self, now_ns: int, worker_id: WorkerId, asked: Asked | None) -> None:
        if asked is not None:
            self._network.ask_kv(now_ns, self.number, worker_id, asked)

    def has_streams(self, route: str, worker_id: WorkerId) -> bool:
        """Whether anything of this gateway was started on the worker and has not ended."""
        model_queue = self.control.model_queue(route)
        worker = model_queue.workers.get(worker_id) if model_queue is not None and not self.is_gone else None
        return worker is not None and bool(worker.begun)

    # --- for the driver: see `driver.Workers`, `driver.Clients` and `driver.Records` ----------------

    def start(self, now_ns: int, request: Request, start: Start) -> None:
        """See `driver.Workers`."""
        submission = self.submission(request.facts, ticket_of(request), start)
        self._network.submit(now_ns, start.worker_id, submission)

    def submission(self, facts: RequestFacts, ticket: Ticket, start: Start) -> Submission:
        """A request as it is sent to a worker."""
        asked, tenant = ticket.request, facts.tenant
        answer = asked.answer or (1 << 60) + ticket.number
        return Submission(
            id=start.id,
            gateway=self.number,
            attempt=start.attempt,
            prompt=asked.prompt,
            answer=answer,
            output_tokens=asked.output_tokens,
            max_tokens=facts.max_tokens,
            num_resumed=ticket.num_reported,
            salt=tenant.cache_salt,
            adapter=asked.adapter,
            public_tokens=asked.public_tokens,
            priority=start.priority,
            fairness_key=tenant.fairness_key or tenant.id,
            fairness_weight=tenant.weight,
            takes_row=start.takes_row,
            poison=asked.poison or ticket.number in self._facts.poison,
        )

    def abort(self, now_ns: int, worker_id: WorkerId, request_id: RequestId, attempt: int) -> None:
        """See `driver.Workers`."""
        self._network.abort(now_ns, self.number, worker_id, request_id)

    def give_up(self, now_ns: int, request: Request, error: PenstockError) -> None:
        """See `driver.Workers`."""
        self._network.abort(now_ns, self.number, request.worker, request.id)
        self._failed(now_ns, request, request.attempt, error)

    def move_off(self, now_ns: int, request: Request, error: PenstockError) -> None:
        """See `driver.Workers`."""
        self.give_up(now_ns, request, error)

    def timed_out(self, request: Request) -> None:
        """See `driver.Records`."""

    def stop(self, now_ns: int, request: Request, reason: FinishReason) -> None:
        """See `driver.Clients`: the answer ends with what its worker reports."""

    def fail(self, now_ns: int, request: Request, error: PenstockError) -> None:
        """See `driver.Clients`: the client learns it at the end."""

    def fall_back(self, now_ns: int, request: Request, action: FallBack) -> None:
        """See `driver.Clients`."""
        facts = self._request_facts(ticket_of(request).request, action.route, action.why)
        self._driver.move(now_ns, facts, action.why)

    def settled(self, now_ns: int, request: Request, error: PenstockError | None) -> None:
        """See `driver.Clients`."""
        end_ns, ticket = now_ns + self._facts.link_ns, ticket_of(request)
        if isinstance(ticket, GuestTicket):
            ticket.host.settled(now_ns, ticket, request, error)
        else:
            self._recorder.ended(ended_record(end_ns, ticket, request, error))

    def opened(self, request: Request) -> None:
        """See `driver.Records`: nothing is lost here but what `leave` tells."""

    def progressed(self, request: Request) -> None:
        """See `driver.Records`."""

    def closed(self, request: Request, machine_micros: int) -> None:
        """See `driver.Records`."""
        self.clock.time_ns = request.ended_ns
        record = request.record(self.clock.wall_ns())
        record = msgspec.structs.replace(record, accelerator_cost_micros=machine_micros)
        (self._host if record.origin and self._host is not None else self._recorder).billed(record)

    def predicted(self, request: Request, error: float) -> None:
        """See `driver.Records`."""

    def refused(self, route: str, reason: str) -> None:
        """See `driver.Records`."""

    def diverted(self, route: str, why: str) -> None:
        """See `driver.Records`."""

    def evicted(self, route: str, reason: str) -> None:
        """See `driver.Records`."""

    def tried_again(self, request: Request) -> None:
        """See `driver.Records`."""

    # --- inside -----------------------------------------------------------------------------------

    def _lose(self, now_ns: int, request: Request) -> None:
        """The journal's record of a request when its gateway is gone."""
        ticket = ticket_of(request)
        prompt_tokens = request.facts.prompt_tokens if ticket.first_ns >= 0 else 0
        self.clock.time_ns = now_ns
        self._recorder.billed(lost_usage(self.clock.wall_ns(), prompt_tokens, request))
        self._recorder.ended(lost_record(now_ns + self._facts.link_ns, prompt_tokens, ticket, request))

    def _count_hedge(self, route: str, outcome: HedgeOutcome) -> None:
        del route
        self.num_hedges[outcome] += 1

    def _began(self, now_ns: int, request: Request, message: Began) -> None:
        self._driver.first_output(now_ns, request, message.attempt, cached_tokens=message.cached_tokens)
        ticket = ticket_of(request)
        ticket.first_ns, ticket.num_reported = now_ns + self._facts.link_ns, 1
        ticket.usage = Usage(
            prompt_tokens=request.facts.prompt_tokens,
            cached_tokens=message.cached_tokens,
            prefill_ns=message.prefill_ns,
        )
        if isinstance(ticket, GuestTicket):
            ticket.host.said(now_ns, ticket, message)

    def _sliced(self, now_ns: int, request: Request, message: Sliced) -> None:
        ticket = ticket_of(request)
        ticket.num_reported = message.num_tokens
        if isinstance(ticket, GuestTicket):
            ticket.host.said(now_ns, ticket, message)
        self._driver.output(now_ns, request, message.num_tokens)

    def _finished(self, now_ns: int, request: Request, message: Finished) -> None:
        outcome, error, ticket = Outcome.FINISHED, None, ticket_of(request)
        if message.reason == FinishReason.ABORT:
            outcome = Outcome.CANCELLED
        elif message.reason == FinishReason.ERROR:
            outcome, error = Outcome.FAILED, EngineFault(message.error)
        if ticket.first_ns < 0 and message.usage.completion_tokens:
            ticket.first_ns = now_ns + self._facts.link_ns  # One token: its first message is its last.
        if isinstance(ticket, GuestTicket):
            ticket.last = message
        request.stream_ended(0, message.usage)
        self._driver.ended(now_ns, request, outcome, finish_reason=message.reason, error=error)

    def _failed(self, now_ns: int, request: Request, attempt: int, error: PenstockError) -> None:
        """An attempt failed. Its stream can continue elsewhere where its worker returned token ids."""
        ticket = ticket_of(request)
        if request.hedge is None and request.has_begun:
            used = msgspec.structs.replace(ticket.usage, completion_tokens=ticket.num_reported)
            request.stream_ended(0, used)
        if isinstance(ticket, GuestTicket):  # Its own cell knows all places where it could go on.
            self._driver.ended(now_ns, request, Outcome.FAILED, error=error)
            return
        worker = request.model_queue.workers.get(request.worker)
        resumes = worker is None or worker.view.resumes
        self._driver.attempt_failed(now_ns, request, attempt, error, can_resume=resumes)

    def _dispatch(self, now_ns: int) -> None:
        self.clock.time_ns = now_ns
        self._driver.dispatch(now_ns)
        if self.dealer is not None:
            self.dealer.dispatched(now_ns, self.number)
        due_ns = self.control.next_ns(now_ns)
        if due_ns is not None and (self._timer_ns is None or due_ns < self._timer_ns):
            self._timer_ns = due_ns
            self._timeline.at(due_ns, self.actor, Rank.TIMER, self._on_timer, due_ns)

    def _on_timer(self, now_ns: int, _: int) -> None:
        if self._timer_ns == now_ns and not self.is_gone:
            self._timer_ns = None
            self._dispatch(now_ns)

    def _request_facts(self, request: SimRequest, route: str, diverted: str) -> RequestFacts:
        num_tokens, tenant = request.prompt_tokens, self._facts.tenant(request.tenant, request.band)
        return RequestFacts(
            id=RequestId(request.id),
            tenant=tenant,
            route=route,
            requested_model=request.model,
            diverted=diverted,
            prompt_tokens=num_tokens,
            max_tokens=request.max_tokens or request.output_tokens,
            num_bytes=_TOKEN_BYTES * num_tokens,
            first_token_ns=request.first_token_ns,
            context_tokens=num_tokens + (request.max_tokens or request.output_tokens),
            adapter=request.adapter,
            session=f"{tenant.id}\0{request.session}" if request.session else "",
            needs=places_of(request.places) if request.places else NOWHERE,
            keys=self.caches.keys(route, request, tenant.cache_salt),
            prompts=(LazyTokens(request.prompt, num_tokens),),
        )

    def _model_facts(self, name: str) -> ModelFacts | None:
        spec = self._facts.models.get(name)
        return None if spec is None else ModelFacts(max_model_len=spec.max_model_len, kinds=(spec.kind,))
