"""A simulated gateway: the real flow control with its parts; requests are structs, and workers are messages away.

    arrive, cancel ──> FlowControl ──> Start, Evict, Abort ──> Network ──> workers
    heard, reported <── Network <── workers

The other driver of the same objects is gateway/dispatch/dispatcher.py, on an event loop and with bytes.
"""

from collections.abc import Sequence

from penstock import rng
from penstock.clock import NS_PER_S
from penstock.errors import EngineFault, PenstockError, StreamBroken, WorkerUnavailable
from penstock.kv.events import Numbered
from penstock.policy.admission.gate import Gate, ModelFacts
from penstock.policy.admission.thrift import Thrift
from penstock.policy.answers import Abort, Diverted, Evict, FallBack, Refused, Settled, Start
from penstock.policy.estimates.output_length import OutputLengths
from penstock.policy.extras.hedge import HedgeOutcome, Hedges
from penstock.policy.extras.quarantine import Quarantine
from penstock.policy.flow import Arrival, Flow
from penstock.policy.lifecycle.control import FlowControl
from penstock.policy.lifecycle.life import continued
from penstock.policy.limits.budget import TenantBudgets
from penstock.policy.limits.lease import Leases
from penstock.policy.limits.price import PriceList
from penstock.policy.limits.rate_limit import Limiter
from penstock.policy.parts import Parts
from penstock.policy.queueing.pace import Pace
from penstock.policy.queueing.room import WorkerView
from penstock.policy.record import Outcome, UsageRecord
from penstock.policy.resilience.health import FleetHealth
from penstock.sim.traffic.prompts import LazyTokens
from penstock.sim.traffic.request import RequestRecord, SimRequest
from penstock.sim.world.caches import Asked, Caches
from penstock.sim.world.events import LocalClock, Rank, Timeline
from penstock.sim.world.facts import Facts, Network, Witness
from penstock.sim.world.kv_event_channel import KVNews
from penstock.sim.world.messages import (
    Began,
    Failed,
    Finished,
    Sliced,
    Submission,
    WorkerLoadReport,
    WorkerMessage,
)
from penstock.sim.world.store import SharedStore, SimLeaseKeeper
from penstock.sim.world.ticket import Ticket
from penstock.sim.world.worker import SimWorker
from penstock.types import FinishReason, RequestId, Usage, WorkerId

_TOKEN_BYTES = 4


class SimGateway:
    """One gateway process. `number` names it to the workers."""

    def __init__(
        self,
        number: int,
        actor: int,
        facts: Facts,
        timeline: Timeline,
        network: Network,
        witness: Witness,
        *,
        store: SharedStore | None = None,
        life: int = 0,
    ) -> None:
        """`store` is that of shared limits, if there is one; `life` counts this gateway's starts."""
        self.number, self.actor = number, actor
        self.life, self.is_gone = life, False
        self._facts, self._timeline, self._network, self._witness = facts, timeline, network, witness
        config = facts.config
        skew_ns = facts.skews_ns.get(number, 0)
        self.clock = LocalClock(wall_offset_ns=timeline.wall_ns() - timeline.now_ns() + skew_ns)
        self.clock.time_ns = timeline.now_ns()
        self.prices = PriceList(config.prices)
        self._keeper: SimLeaseKeeper | None = None
        self.limiter = Limiter(config.limits)
        if store is not None:
            leases = Leases(config.shared)
            self._keeper = SimLeaseKeeper(
                leases, store, timeline, actor=actor, name=f"{number}-{life}", link_ns=facts.link_ns
            )
            self.limiter = Limiter(config.limits, leases.make_bucket)
            self._keeper.start(timeline.now_ns())
        self.budgets = TenantBudgets(
            config.budgets, wall_offset_ns=self.clock.wall_ns() - self.clock.now_ns()
        )
        thrift = Thrift(self.budgets, self.prices)
        self.gate = Gate(config.admission, config.routing, config.queue, self._model_facts, thrift)
        self.caches = Caches(config, hash_key=facts.hash_key, seed=facts.seed, gateway=number)
        self.num_hedges: dict[HedgeOutcome, int] = dict.fromkeys(HedgeOutcome, 0)
        """By what came of them."""
        self.hedges = Hedges(config.health, self._count_hedge) if config.health.hedge_share else None
        self.health = FleetHealth(config.health, rng.stream(facts.seed, f"breakers/{number}/{life}").random)
        parts = Parts(
            admission=self.gate,
            limits=self.limiter,
            budgets=self.budgets,
            prices=self.prices,
            lengths=OutputLengths(config.limits),
            placement=facts.placement or self.caches.placement,
            health=self.health,
            hedges=self.hedges,
            poison=Quarantine(config.health),
            pace=lambda: Pace(config.admission, config.routing.placement),
            migrations_max=config.health.migrations_max,
        )
        self.control = FlowControl(config.queue, parts)
        self.tickets: dict[RequestId, Ticket] = {}
        self._known: dict[WorkerId, str] = {}
        self._timer_ns: int | None = None

    # --- clients ------------------------------------------------------------------------------------

    def arrive(self, now_ns: int, request: SimRequest, number: int) -> bool:
        """Take a request; False if it was refused. `number` is unique in the world."""
        route, diverted = request.model, ""
        for _ in range(1 + len(self._facts.models)):
            arrival = self._arrival(request, route, diverted)
            answer = self.control.arrive(now_ns, arrival)
            if not isinstance(answer, Diverted):
                break
            route, diverted = answer.route, answer.why
        else:
            raise AssertionError(f"{request.id} is sent in circles")
        if isinstance(answer, Refused):
            self._refused(now_ns, arrival, answer)
            self._dispatch(now_ns)
            return False
        self.tickets[arrival.id] = Ticket(request, number, arrival)
        self._dispatch(now_ns)
        return True

    def cancel(self, now_ns: int, request_id: RequestId, *, unless_begun: bool = False) -> None:
        """The client leaves; with `unless_begun` only if it has got nothing yet."""
        ticket = self.tickets.get(request_id)
        if ticket is None or (unless_begun and ticket.first_ns >= 0):
            return
        answer = self.control.cancel(now_ns, request_id)
        if isinstance(answer, Settled):
            self._settled(now_ns, answer)
        elif isinstance(answer, Abort):
            self._network.abort(now_ns, self.number, answer.worker_id, request_id)
        self._dispatch(now_ns)

    def drain(self, now_ns: int, deadline_ns: int) -> None:
        """Take nothing new; what is here may go on until the deadline."""
        self.control.drain(now_ns, deadline_ns)
        self._dispatch(now_ns)

    def leave(self, now_ns: int) -> list[SimRequest]:
        """Be gone at once. Returns the requests that are cut off; the ledger finds them in its journal."""
        self.is_gone, self._timer_ns = True, None
        if self._keeper is not None:
            self._keeper.close()
        tickets, self.tickets = list(self.tickets.values()), {}
        for ticket in tickets:
            self._lose(now_ns, ticket)
        return [ticket.request for ticket in tickets]

    # --- workers ------------------------------------------------------------------------------------

    def heard(self, now_ns: int, worker_id: WorkerId, messages: Sequence[WorkerMessage]) -> None:
        """Words of a worker about requests."""
        for word in messages:
            ticket = self.tickets.get(word.id)
            if ticket is None or not word.attempt or word.attempt not in (ticket.attempt, ticket.beside):
                continue  # Of an attempt that is over.
            if ticket.beside and not self._race(now_ns, ticket, word):
                continue
            match word:
                case Began():
                    self._began(now_ns, ticket, word)
                case Sliced():
                    self._sliced(now_ns, ticket, word)
                case Finished():
                    self._finished(now_ns, ticket, word)
                case Failed():
                    self._failed(now_ns, ticket, word.error)
        self._dispatch(now_ns)

    def reported(
        self,
        now_ns: int,
        route: str,
        worker: SimWorker,
        report: WorkerLoadReport | None,
        *,
        ready: bool = True,
    ) -> None:
        """A worker is there and announces what it serves, has something to say of itself, or drains (not `ready`)."""
        worker_id, spec, is_shared = worker.id, worker.spec, self._facts.config.server.processes > 1
        view = WorkerView(
            ready=ready,
            max_running=report.rows_max if report is not None else spec.engine.max_running,
            running=report.running if report is not None and is_shared else 0,
            waiting=report.waiting if report is not None and is_shared else 0,
            kv_blocks_total=report.blocks_total if report is not None else 0,
            kv_blocks_used=report.blocks_used if report is not None else 0,
            kind=spec.kind,
            max_model_len=spec.max_model_len,
            identity=worker.identity,
        )
        if worker_id not in self._known:
            self._known[worker_id] = route
            self.caches.joined(worker_id, route, worker.identity)
        self.control.set_worker(now_ns, route, worker_id, view)
        self._dispatch(now_ns)

    def lost(self, now_ns: int, worker_id: WorkerId, *, died: bool) -> int:
        """A worker is gone, with all that ran there, or (not `died`) out of sight; returns how many requests that were."""
        route, num_lost = self._known.pop(worker_id, None), 0
        if route is None:
            return 0
        self.control.set_worker(now_ns, route, worker_id, None)
        self.caches.left(worker_id)
        for ticket in list(self.tickets.values()):
            attempt = self.control.races.attempt_at(ticket.arrival.id, worker_id)
            if attempt:
                num_lost += 1
                kind = StreamBroken if ticket.first_ns >= 0 else WorkerUnavailable
                error = kind("the worker is gone", died=died)
                if not self._lost_one(now_ns, ticket, attempt, error):
                    self._failed(now_ns, ticket, error)
        self._dispatch(now_ns)
        return num_lost

    def cached(self, now_ns: int, worker_id: WorkerId, news: KVNews) -> None:
        """Words of a worker about its KV cache. What is found missing is asked for."""
        self._ask_kv(now_ns, worker_id, self.caches.heard(worker_id, news))

    def cached_again(
        self, now_ns: int, worker_id: WorkerId, asked: Asked, batches: Sequence[Numbered]
    ) -> None:
        """What a worker could say again of what was asked for."""
        self._ask_kv(now_ns, worker_id, self.caches.heard_again(worker_id, asked, batches))

    def kv_reconnected(self, now_ns: int, worker_id: WorkerId) -> None:
        """A worker's publisher is heard again after a while."""
        self._ask_kv(now_ns, worker_id, self.caches.reconnected(worker_id))

    def _ask_kv(self, now_ns: int, worker_id: WorkerId, asked: Asked | None) -> None:
        if asked is not None:
            self._network.ask_kv(now_ns, self.number, worker_id, asked)

    def has_streams(self, route: str, worker_id: WorkerId) -> bool:
        """Whether anything of this gateway was started on the worker and has not ended."""
        lane = self.control.lane(route)
        room = lane.rooms.get(worker_id) if lane is not None and not self.is_gone else None
        return room is not None and bool(room.begun)

    # --- inside -------------------------------------------------------------------------------------

    def _lose(self, now_ns: int, ticket: Ticket) -> None:
        """What the journal knows of a request when its gateway is gone."""
        flow, arrival = self._flow(ticket), ticket.arrival
        prompt_tokens = arrival.prompt_tokens if ticket.first_ns >= 0 else 0
        self.clock.time_ns = now_ns
        self._witness.billed(
            UsageRecord(
                request_id=arrival.id,
                ended_ns=self.clock.wall_ns(),
                tenant=arrival.tenant.id,
                requested_model=arrival.requested_model,
                served_model=arrival.route,
                outcome=Outcome.FAILED,
                error="GatewayLost",
                prompt_tokens=prompt_tokens,
                completion_tokens=flow.completion_tokens,
                recovered=True,
            )
        )
        self._witness.ended(
            RequestRecord(
                id=ticket.request.id,
                tenant=arrival.tenant.id,
                model=arrival.route,
                band=arrival.tenant.band,
                outcome=Outcome.FAILED,
                reason="GatewayLost",
                at_ns=ticket.request.at_ns,
                first_ns=ticket.first_ns,
                end_ns=now_ns + self._facts.link_ns,
                prompt_tokens=prompt_tokens,
                completion_tokens=flow.completion_tokens,
                attempts=flow.attempts,
                migrations=flow.migrations,
                worker=flow.worker,
                queue_ns=flow.queue_ns,
            )
        )

    def _race(self, now_ns: int, ticket: Ticket, word: WorkerMessage) -> bool:
        """One of two attempts has said something; whether that counts for the request."""
        if isinstance(word, Failed):
            return not self._lost_one(now_ns, ticket, word.attempt, word.error)
        loser = self.control.races.won(now_ns, word.id, word.attempt)
        assert loser is not None, f"{word.id} runs twice"
        ticket.attempt, ticket.beside = word.attempt, 0
        self._network.abort(now_ns, self.number, loser.worker_id, loser.id)
        return True

    def _lost_one(self, now_ns: int, ticket: Ticket, attempt: int, error: PenstockError) -> bool:
        """An attempt failed: whether another one goes on."""
        if not self.control.races.lost(now_ns, ticket.arrival.id, attempt, error):
            return False
        ticket.attempt, ticket.beside = ticket.attempt + ticket.beside - attempt, 0
        return True

    def _count_hedge(self, route: str, outcome: HedgeOutcome) -> None:
        del route
        self.num_hedges[outcome] += 1

    def _began(self, now_ns: int, ticket: Ticket, word: Began) -> None:
        self.control.first_output(now_ns, ticket.arrival.id, cached_tokens=word.cached_tokens)
        ticket.first_ns, ticket.num_told = now_ns + self._facts.link_ns, 1
        ticket.usage = Usage(
            prompt_tokens=ticket.arrival.prompt_tokens,
            cached_tokens=word.cached_tokens,
            prefill_ns=word.prefill_ns,
        )

    def _sliced(self, now_ns: int, ticket: Ticket, word: Sliced) -> None:
        stop = self.control.output(now_ns, word.id, word.num_tokens - self._flow(ticket).completion_tokens)
        ticket.num_told = word.num_tokens
        if stop is not None:
            self._network.abort(now_ns, self.number, stop.worker_id, stop.id)

    def _finished(self, now_ns: int, ticket: Ticket, word: Finished) -> None:
        outcome = Outcome.FINISHED
        if word.reason == FinishReason.ABORT:
            outcome = Outcome.CANCELLED
        elif word.reason == FinishReason.ERROR:
            outcome = Outcome.FAILED
        answer = self.control.ended(
            now_ns,
            word.id,
            outcome,
            word.usage if ticket.carried is None else continued(ticket.carried, word.usage),
            finish_reason=word.reason if outcome is Outcome.FINISHED else "",
            error="EngineFault" if word.error else "",
            fault=EngineFault(word.error) if word.error else None,
        )
        assert answer is not None, f"{word.id} ended twice"
        if ticket.first_ns < 0 and word.usage.completion_tokens:
            ticket.first_ns = now_ns + self._facts.link_ns  # One token: its first word is its last.
        self._settled(now_ns, answer)

    def _failed(self, now_ns: int, ticket: Ticket, error: PenstockError) -> None:
        """Tried again under the conditions of `gateway.reply.Reply`: every worker of a simulation can go on with an answer."""
        may_move = error.retry_safe or isinstance(error, StreamBroken)
        usage = ticket.break_off()
        answer = self.control.failed(now_ns, ticket.arrival.id, error, retry=may_move, usage=usage)
        if isinstance(answer, Settled):
            self._settled(now_ns, answer)

    def _dispatch(self, now_ns: int) -> None:
        self.clock.time_ns = now_ns
        for action in self.control.dispatch(now_ns):
            if isinstance(action, Start):
                self._start(now_ns, action)
            elif isinstance(action, Abort):
                self._network.abort(now_ns, self.number, action.worker_id, action.id)
                if (ticket := self.tickets.get(action.id)) is not None:
                    ticket.attempt, ticket.beside = ticket.attempt + ticket.beside - action.attempt, 0
            elif isinstance(action, FallBack):
                self._fall_back(now_ns, action)
            else:
                self._evict(now_ns, action)
        due_ns = self.control.next_ns(now_ns)
        if due_ns is not None and (self._timer_ns is None or due_ns < self._timer_ns):
            self._timer_ns = due_ns
            self._timeline.at(due_ns, self.actor, Rank.TIMER, self._on_timer, due_ns)

    def _on_timer(self, now_ns: int, _: int) -> None:
        if self._timer_ns == now_ns and not self.is_gone:
            self._timer_ns = None
            self._dispatch(now_ns)

    def _start(self, now_ns: int, start: Start) -> None:
        ticket = self.tickets[start.id]
        if start.beside:
            ticket.beside = start.attempt
        else:
            ticket.attempt = start.attempt
        request, tenant = ticket.request, ticket.arrival.tenant
        answer = request.answer or (1 << 60) + ticket.number
        max_tokens = ticket.arrival.max_tokens
        submission = Submission(
            id=start.id,
            gateway=self.number,
            attempt=start.attempt,
            prompt=request.prompt,
            answer=answer,
            output_tokens=request.output_tokens,
            max_tokens=max_tokens,
            num_resumed=ticket.num_told,
            salt=tenant.cache_salt,
            adapter=request.adapter,
            public_tokens=request.public_tokens,
            priority=start.priority,
            fairness_key=tenant.fairness_key or tenant.id,
            fairness_weight=tenant.weight,
            poison=request.poison or ticket.number in self._facts.poison,
        )
        self._network.submit(now_ns, start.worker_id, submission)

    def _fall_back(self, now_ns: int, what: FallBack) -> None:
        if (ticket := self.tickets.get(what.id)) is not None:
            arrival = self._arrival(ticket.request, what.route, what.why)
            if self.control.move(now_ns, arrival):
                ticket.arrival = arrival

    def _evict(self, now_ns: int, evict: Evict) -> None:
        if evict.settled is not None:
            self._settled(now_ns, evict.settled, evict.error)
        elif evict.worker_id is not None:
            self._network.abort(now_ns, self.number, evict.worker_id, evict.id)

    def _settled(self, now_ns: int, settled: Settled, error: PenstockError | None = None) -> None:
        flow, ticket = settled.flow, self.tickets.pop(settled.id)
        self.clock.time_ns = now_ns
        self._witness.billed(flow.record(self.clock.wall_ns()))
        self._witness.ended(self._record(now_ns, ticket, flow, _told_ns(error)))

    def _record(self, now_ns: int, ticket: Ticket, flow: Flow, told_ns: int) -> RequestRecord:
        assert flow.outcome is not None, "what has ended has an outcome"
        request = ticket.request
        return RequestRecord(
            id=request.id,
            tenant=request.tenant,
            model=flow.arrival.route,
            band=flow.arrival.tenant.band,
            outcome=flow.outcome,
            reason=flow.reason or flow.error,
            at_ns=request.at_ns,
            first_ns=ticket.first_ns,
            end_ns=now_ns + self._facts.link_ns,
            retry_after_ns=told_ns,
            prompt_tokens=flow.prompt_tokens,
            cached_tokens=flow.cached_tokens,
            completion_tokens=flow.completion_tokens,
            attempts=flow.attempts,
            migrations=flow.migrations,
            worker=flow.worker,
            queue_ns=flow.queue_ns,
        )

    def _refused(self, now_ns: int, arrival: Arrival, refused: Refused) -> None:
        self._witness.ended(
            RequestRecord(
                id=arrival.id,
                tenant=arrival.tenant.id,
                model=arrival.route,
                band=arrival.tenant.band,
                outcome=Outcome.REJECTED,
                reason=refused.reason,
                retry_after_ns=_told_ns(refused.error),
                at_ns=now_ns - self._facts.link_ns,
                end_ns=now_ns + self._facts.link_ns,
            )
        )

    def _arrival(self, request: SimRequest, route: str, diverted: str) -> Arrival:
        num_tokens, tenant = request.prompt_tokens, self._facts.tenant(request.tenant, request.band)
        return Arrival(
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
            keys=self.caches.keys(route, request, tenant.cache_salt),
            prompts=(LazyTokens(request.prompt, num_tokens),),
        )

    def _flow(self, ticket: Ticket) -> Flow:
        flow = self.control.flow(ticket.arrival.id)
        assert flow is not None, "a ticket is a request that lives"
        return flow

    def _model_facts(self, name: str) -> ModelFacts | None:
        spec = self._facts.models.get(name)
        return None if spec is None else ModelFacts(max_model_len=spec.max_model_len, kinds=(spec.kind,))


def _told_ns(error: PenstockError | None) -> int:
    """When a refused client is to come again; 0: it was not told."""
    return round((getattr(error, "retry_after_s", None) or 0) * NS_PER_S)
