"""The life of every request, before and around its worker: composes admission, limits, budgets, queues and
placement.

    arrive ──> admission ──> limits ──> budget ──> queue          Queued, or Refused and nothing is left of it
    dispatch ─> what has waited too long ends, and whatever fits a worker starts, in the queue's order
    output, ended, failed, cancel ─> the request's next state; limits, budget and fair share follow actual use

An event's consequences are those that the table of flow.py names, carried out by transitions.py and nowhere
else. All parts are pure, and so is this: the driver calls it, from the gateway's event loop or the
simulator's heap. Nothing here is called by itself. After `arrive`, a worker's report, a first output or an
end (if it `is_due` then), or at `next_ns`, call `dispatch`.
"""

from collections.abc import Sequence
from heapq import heappop, heappush

from penstock.clock import NS_PER_S
from penstock.config.flow import QueueConfig
from penstock.errors import Draining, Evicted, PenstockError, WorkerError, WorkerUnavailable
from penstock.policy.contracts import Look, Pass
from penstock.policy.extras.hedging import MARK, Hedging
from penstock.policy.extras.hooks import AttemptClock, Hooks
from penstock.policy.extras.quarantine import CrashQuarantine
from penstock.policy.flow import (
    Abort,
    Diverted,
    Event,
    Outcome,
    Queued,
    Refused,
    RequestFacts,
    Requeued,
    Start,
    State,
    Stop,
)
from penstock.policy.lifecycle.policies import Policies
from penstock.policy.lifecycle.transitions import Accounts, Change, Fallbacks, Transitions
from penstock.policy.queueing.band import Work
from penstock.policy.queueing.capacity import WorkerView
from penstock.policy.queueing.fair_queue import Full
from penstock.policy.queueing.model_queue import ModelQueue
from penstock.policy.request import Action, Evict, Request, Settled, charge, request_of, victims
from penstock.policy.terms import queue_terms
from penstock.types import RequestId, Usage, WorkerId

_DECIDED = {Outcome.CANCELLED: Event.CANCEL, Outcome.EVICTED: Event.EVICT}
"""Events that decide an outcome before the worker's final report ends the request."""

_EXPIRED = {"timeout": " without a turn", "late": ", and could not be answered in time any more"}


class FlowControl:
    """See the module. One per gateway process, or per simulated gateway."""

    __slots__ = (
        "_accounts", "_advance", "_config", "_dirty", "_drain_ns", "_fallbacks", "_has_clock", "_hooks",
        "_model_queues", "_pending", "_policies", "_quarantine", "_requests", "_timers", "_timers_set",
        "_transitions", "hedging", "model_queue", "request",
    )  # fmt: skip

    def __init__(self, config: QueueConfig, policies: Policies | None = None) -> None:
        self._config, self._policies = queue_terms(config), policies or Policies()
        self._accounts, self._requests = Accounts(self._policies), dict[RequestId, Request]()
        self.request = self._requests.get
        """A request that was accepted and has not ended."""
        self._fallbacks = Fallbacks(
            self._policies, self._accounts, self._requests, self._look, retries_max=self._config.retries_max
        )
        self._model_queues: dict[str, ModelQueue] = {}
        self.model_queue = self._model_queues.get
        """A model's queue and workers, for gauges."""
        self._dirty: dict[str, ModelQueue] = {}
        self._timers: list[tuple[int, int, ModelQueue]] = []
        self._timers_set, self._pending = 0, list[Action]()
        self._drain_ns: int | None = None
        self.hedging: Hedging | None = None
        """For the driver, which says which of two attempts won; None if requests are never hedged."""
        self._hooks, self._has_clock = Hooks(), False
        self._quarantine: CrashQuarantine | None = None
        """There is one from the first crash of a worker on."""
        if (hedges := self._policies.hedges) is not None:
            health, change = self._policies.health, self._touch
            self.hedging = Hedging(hedges, health, self._requests, on_lost=self._lost, on_change=change)
            self._hooks.put(0, self.hedging)
        self._transitions = Transitions(
            self._policies, self._accounts, self._requests, self._hooks,
            on_change=self._touch, on_dropped=self._drop_for_room,
        )  # fmt: skip
        self._advance = self._transitions.advance

    # --- from the front ---------------------------------------------------------------------------

    def lacks(self, now_ns: int, facts: RequestFacts) -> bool:
        """Whether the store of shared limits is asked before this request arrives; see `TokenSource`."""
        return self._accounts.lacks(now_ns, facts)

    def refuses_any(self, now_ns: int, facts: RequestFacts) -> Refused | None:
        """The refusal of a request that `arrive` would refuse with any prompt; `facts` are those that are
        known before its prompt is made. None: nothing has changed. O(1) unless others come too late here.
        """
        model_queue = self._model_queues.get(facts.route)
        if model_queue is None or not model_queue.pace.is_any_late(now_ns):
            return None
        return self._policies.admission.refuses_any(now_ns, facts, self._look(now_ns, facts))

    def arrive(self, now_ns: int, facts: RequestFacts) -> Queued | Diverted | Refused:
        """Accept a request into the queue, or say why not. Its id must not be in use."""
        assert facts.id not in self._requests, f"{facts.id} is here already"
        if self._drain_ns is not None:
            return Refused(facts.id, "draining", Draining("this server is going away"))
        for refusal in self._hooks.refusal:
            if (error := refusal(now_ns, facts)) is not None:
                return Refused(facts.id, "quarantine", error)
        model_queue = self._model_queue(now_ns, facts.route)
        verdict = self._policies.admission.decide(now_ns, facts, self._look(now_ns, facts))
        if not isinstance(verdict, Pass):
            return verdict
        if not (self._config.no_worker_wait_s or model_queue.workers.num_ready or model_queue.wake_ns):
            return Refused(facts.id, "no_worker", _no_worker(facts.route))
        request = request_of(facts, now_ns, model_queue, verdict)
        if (refused := self._accounts.open(now_ns, request)) is not None:
            return refused
        if facts.first_token_ns and not self._has_clock:
            self._use_clock()
        if isinstance(dropped := model_queue.queue.push(now_ns, request), Full):
            self._accounts.undo(now_ns, request)
            return Refused(facts.id, "queue", model_queue.overloaded(dropped))
        self._requests[facts.id] = request
        if facts.adapter:
            model_queue.placement.asked(now_ns, request, model_queue.workers)
        for queued in self._hooks.queued:
            queued(now_ns, request)
        self._touch(model_queue)
        self._drop_for_room(now_ns, dropped)
        return Queued(facts.id, facts.route, verdict.predicted_ns)

    def cancel(self, now_ns: int, request_id: RequestId) -> Settled | Abort | None:
        """The client left. Settled: it only waited; an `Abort`: it runs; None: it has ended or is ending."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        self._end_extras(now_ns, request, self._pending)
        answer = self._advance(now_ns, request, Event.CANCEL)
        assert not isinstance(answer, Start), "a cancelled request starts nothing"
        return answer

    def move(self, now_ns: int, facts: RequestFacts) -> bool:
        """Let a request that waits for a model without workers wait for another one, with a prompt made for
        that; its id stays. False: it has a worker by now, has ended or is not let in there; nothing changed.
        """
        if self._drain_ns is not None:
            return False
        model_queue = self._model_queue(now_ns, facts.route)
        moved = self._fallbacks.move(now_ns, facts, model_queue)
        if moved is None:
            return False
        request = self._requests[facts.id]
        request.attempts_elsewhere = request.attempts
        self._advance(now_ns, request, Event.MOVE, Change(moved=moved))
        return True

    def stay(self, request_id: RequestId) -> None:
        """It was to move, and cannot: it waits on where it is."""
        request = self._requests.get(request_id)
        if request is not None and request_id in request.model_queue.leaving:
            request.model_queue.leaving.discard(request_id)
            self._touch(request.model_queue)

    def drain(self, now_ns: int, deadline_ns: int) -> None:
        """Refuse new requests; accepted ones may run until the deadline, then they are evicted."""
        self._drain_ns = max(now_ns, deadline_ns)

    # --- from the workers -------------------------------------------------------------------------

    def set_worker(self, now_ns: int, route: str, worker_id: WorkerId, view: WorkerView | None) -> None:
        """Take a worker's report; None: it is gone, and what ran there will be reported by `failed`."""
        model_queue = self._model_queue(now_ns, route)
        model_queue.set_worker(now_ns, worker_id, view)
        ready, is_external = (None, False) if view is None else (view.ready, view.is_external)
        self._policies.health.worker(route, worker_id, ready=ready, is_external=is_external)
        if is_external and not self._has_clock:
            self._use_clock()
        self._touch(model_queue)

    def _use_clock(self) -> None:
        assert not self._has_clock, "attempts have one clock"
        self._has_clock, policies, can_leave = True, self._policies, self._fallbacks.can_leave
        bound_ns = policies.first_token_ns
        clock = AttemptClock(self._requests, policies.health, can_leave, first_token_ns=bound_ns)
        self._hooks.put(0, clock)

    def _use_quarantine(self) -> None:
        if (poison := self._policies.poison) is not None:
            self._quarantine = CrashQuarantine(poison)
            self._hooks.put(int(self._has_clock), self._quarantine)
            for model_queue in self._model_queues.values():
                model_queue.apart = self._quarantine

    def first_output(self, now_ns: int, request_id: RequestId, *, cached_tokens: int | None = None) -> None:
        """The first token came (of any choice); `cached_tokens` of all prompts, if the worker told them."""
        request = self._requests.get(request_id)
        if request is None:
            return
        assert request.hedge is None, "the driver says first which of two attempts won"
        if request.state is State.STARTED:
            model_queue = request.model_queue
            model_queue.begin(now_ns, request.worker, request.hedge_booked or request)
            for first_output in self._hooks.first_output:
                first_output(now_ns, request)
            ttft_ns = now_ns - request.dispatched_ns
            self._policies.health.began(now_ns, model_queue.route, request.worker, ttft_ns)
            self._dirty[model_queue.route] = model_queue
        self._advance(now_ns, request, Event.FIRST_OUTPUT)
        if cached_tokens is not None:
            request.counted_cached_tokens = min(cached_tokens, request.facts.prompt_tokens)
            if request.counted_cached_tokens != request.facts.cached_tokens:
                charge(request, max(request.expected, request.completion_tokens))

    def output(self, now_ns: int, request_id: RequestId, num_tokens: int) -> Stop | None:
        """So many new tokens came, of all choices together: call it once per slice, not per token.

        A `Stop` says that the budget ends here.
        """
        request = self._requests.get(request_id)
        if request is None:
            return None
        if request.state is State.STARTED:
            self.first_output(now_ns, request_id)
        self._advance(now_ns, request, Event.OUTPUT)
        request.completion_tokens = total = request.completion_tokens + num_tokens
        request.tokens.renew(now_ns, total)
        if total > request.expected:
            request.expected = total
            charge(request, total)
        if total < request.budgeted or request.state is State.STOPPING:
            return None
        if self._accounts.next_slice(now_ns, request, total):
            return None
        answer = self._advance(now_ns, request, Event.STOP)
        assert isinstance(answer, Abort), f"{request.id} is not aborted"
        request.finish_reason = "budget"
        return Stop(request.id, answer.worker_id)

    def ended(
        self,
        now_ns: int,
        request_id: RequestId,
        outcome: Outcome,
        usage: Usage | None = None,
        *,
        finish_reason: str = "",
        error: str = "",
        fault: PenstockError | None = None,
    ) -> Settled | None:
        """The worker's final report: how it ended and what it used, all choices together; None: it had ended.

        An outcome that was decided before (cancelled, evicted, out of budget) stays. Without usage what was
        reported counts. `fault` is what failed it, if it may be the worker's.
        """
        request = self._requests.get(request_id)
        if request is None:
            return None
        assert request.state is not State.QUEUED, f"{request_id} runs nowhere"
        self._end_extras(now_ns, request, self._pending)
        if outcome in _DECIDED:
            self._advance(now_ns, request, _DECIDED[outcome])
        request.finish_reason = request.finish_reason or finish_reason
        request.error = request.error or error
        event = Event.FAIL if outcome is Outcome.FAILED else Event.FINISH
        answer = self._advance(now_ns, request, event, Change(usage=usage, error=fault))
        assert isinstance(answer, Settled), answer
        return answer

    def failed(
        self,
        now_ns: int,
        request_id: RequestId,
        error: PenstockError,
        *,
        retry: bool,
        usage: Usage | None = None,
    ) -> Settled | Requeued | None:
        """Its worker failed, or could not be sent it.

        With `retry` it waits again if attempts are left: from the beginning, or behind what it gave (`usage`
        says how much) if it has begun; the caller knows that the latter is possible.
        """
        request = self._requests.get(request_id)
        if request is None:
            return None
        event, leaves = Event.FAIL, None
        if request.state is not State.QUEUED:
            self._end_extras(now_ns, request, self._pending)
            self._lost(now_ns, request, request.worker, error, usage)
            if retry:
                event, leaves = self._fallbacks.next_try(now_ns, request, error)
        if event is Event.FAIL:
            request.error = request.error or type(error).__name__
        answer = self._advance(now_ns, request, event, Change(usage=usage, error=error))
        if isinstance(answer, Settled):
            return answer
        if leaves is not None:
            self._pending.append(leaves)
        return Requeued(request_id, request.attempts, request.has_begun)

    # --- by the clock -----------------------------------------------------------------------------

    def dispatch(self, now_ns: int) -> Sequence[Action]:
        """The actions that are due now, in order."""
        for evictions in self._hooks.evictions:
            for request, reason, error in evictions(now_ns):
                self._evict(now_ns, request, reason, error, self._pending)
        actions, self._pending = self._pending, []
        if self._drain_ns is not None and now_ns >= self._drain_ns:
            self._evict_all(now_ns, actions)
        timers = self._timers
        while timers and timers[0][0] <= now_ns:
            when_ns, _, model_queue = heappop(timers)
            if model_queue.timer_ns == when_ns:
                model_queue.timer_ns = None
                self._touch(model_queue)
        if self._dirty:
            dirty, self._dirty = self._dirty, {}
            for model_queue in dirty.values():
                self._serve(now_ns, model_queue, actions)
        for due in self._hooks.due:
            actions += due(now_ns)
        return actions

    @property
    def is_due(self) -> bool:
        """Whether `dispatch` has something to do now: what changed where nothing waits needs no look."""
        return bool(self._pending) or True in [each.needs_look for each in self._dirty.values()]

    def next_ns(self, now_ns: int) -> int | None:
        """When `dispatch` must be called if nothing happens until then, not before `now_ns`; None: never."""
        timers = self._timers
        while timers and timers[0][2].timer_ns != timers[0][0]:
            heappop(timers)
        times = [timers[0][0]] if timers else []
        times += [due_ns for next_ns in self._hooks.next_ns if (due_ns := next_ns()) is not None]
        if self._pending or self._dirty:
            times.append(now_ns)
        if self._drain_ns is not None and any(each.state is not State.STOPPING for each in self.requests()):
            times.append(self._drain_ns)
        return max(min(times), now_ns) if times else None

    # --- to look at -------------------------------------------------------------------------------

    def requests(self) -> Sequence[Request]:
        """All of them, in the order in which they came."""
        return list(self._requests.values())

    def running_at(self, worker_id: WorkerId) -> Sequence[Request]:
        """Requests that have an attempt at a worker, in the order in which they came."""
        return [request for request in self._requests.values() if request.attempt_at(worker_id)]

    def can_move(self, now_ns: int, request: Request, *, now: bool) -> bool:
        """Whether a request that runs would continue elsewhere if its worker ended it; `now`: at once."""
        return self._fallbacks.can_move(now_ns, request, now=now)

    def __len__(self) -> int:
        """Requests that were accepted and have not ended."""
        return len(self._requests)

    # --- inside -----------------------------------------------------------------------------------

    def _model_queue(self, now_ns: int, route: str) -> ModelQueue:
        model_queue = self._model_queues.get(route)
        if model_queue is None:
            policies = self._policies
            placement, pace = policies.placement(route), policies.pace()
            model_queue = self._model_queues[route] = ModelQueue(
                self._config, route, now_ns, placement, policies.health, pace, self._quarantine
            )
        return model_queue

    def _look(self, now_ns: int, facts: RequestFacts) -> Look:
        return lambda route: self._model_queue(now_ns, route).load(now_ns, facts)

    def _booked_as(self, name: RequestId) -> Request:
        """The request that is booked at a worker under a name."""
        return self._requests.get(name) or self._requests[RequestId(name.rpartition(MARK)[0])]

    def _serve(self, now_ns: int, model_queue: ModelQueue, actions: list[Action]) -> None:
        while (late := model_queue.next_expired(now_ns)) is not None:
            work, reason = late
            request = self._requests[work.id]
            if reason == "late":
                if now_ns < work.deadline_ns and self._start_all(now_ns, model_queue, actions):
                    continue  # This process was late itself: what fits can still be in time.
                if (leaves := self._fallbacks.too_late(now_ns, request)) is not None:
                    actions.append(leaves)
                    continue
                if model_queue.waits_on(now_ns, work, is_bound=request.facts.first_token_ns > 0):
                    continue
            error: PenstockError = _no_worker(model_queue.route)
            if (said := _EXPIRED.get(reason)) is not None:
                waited = f"waited {(now_ns - work.queued_ns) / NS_PER_S:.1f} s{said}"
                error = Evicted(waited, retry_after_s=model_queue.retry_after_s())
            self._evict(now_ns, request, reason, error, actions)
        if model_queue.queue.num_waiting and not model_queue.wake_ns:
            self._look_elsewhere(now_ns, model_queue, actions)
        self._start_all(now_ns, model_queue, actions)
        if self._config.shed_kv_above < 1:
            self._shed(now_ns, model_queue, actions)
        due_ns = model_queue.due_ns(now_ns)
        if due_ns is not None and (model_queue.timer_ns is None or due_ns < model_queue.timer_ns):
            model_queue.timer_ns = due_ns
            self._timers_set += 1
            heappush(self._timers, (due_ns, self._timers_set, model_queue))

    def _start_all(self, now_ns: int, model_queue: ModelQueue, actions: list[Action]) -> bool:
        """Start what fits a worker, in the queue's order; whether something did."""
        num = len(actions)
        while (start := model_queue.next_start(now_ns)) is not None:
            work, worker = start
            request = self._requests[work.id]
            request.worker = worker.id
            answer = self._advance(now_ns, request, Event.DISPATCH)
            assert isinstance(answer, Start), "what is dispatched starts"
            actions.append(answer)
        return len(actions) > num

    def _shed(self, now_ns: int, model_queue: ModelQueue, actions: list[Action]) -> None:
        """Make KV memory free at workers that reported it nearly full: after every report.

        Only for the sake of a higher band that runs there or waits for the model: among equals the engine's
        own preemption is fair, and nothing is lost by it. Lowest band first, in it the longest answer still
        to come; protected bands never.
        """
        for worker in model_queue.workers.take_fresh():
            view = worker.view
            if view.kv_blocks_used <= view.kv_blocks_total * self._config.shed_kv_above:
                continue  # Nearly always: no worker need be looked up.
            here = [self._booked_as(name) for name in worker.begun]
            for request in victims(self._config, model_queue, worker, here):
                error = Evicted("gave way to requests of a higher band: KV memory ran out")
                self._evict(now_ns, request, "memory", error, actions)

    def _look_elsewhere(self, now_ns: int, model_queue: ModelQueue, actions: list[Action]) -> None:
        """No worker is left, or none may be used: what waits falls back if admission lets it, else waits."""
        found, stay, more = self._fallbacks.ask(now_ns, model_queue)
        actions += found
        if model_queue.down_ns is not None and not self._config.no_worker_wait_s:
            for request in stay:
                self._evict(now_ns, request, "no_worker", _no_worker(model_queue.route), actions)
        if more:
            self._touch(model_queue)

    def _drop_for_room(self, now_ns: int, dropped: Sequence[Work]) -> None:
        for victim in dropped:
            error = Evicted("gave way to a request of a higher band: the queue is full")
            self._evict(now_ns, self._requests[victim.id], "queue_full", error, self._pending)

    def _evict_all(self, now_ns: int, actions: list[Action]) -> None:
        error = Draining("this server went away before the answer was finished")
        for request in list(self._requests.values()):
            if request.state is not State.STOPPING:
                self._evict(now_ns, request, "drain", error, actions)

    def _evict(
        self, now_ns: int, request: Request, reason: str, error: PenstockError, actions: list[Action]
    ) -> None:
        """End a request that waits, or abort one that runs."""
        self._end_extras(now_ns, request, actions)
        request.reason, request.error = reason, type(error).__name__
        answer = self._advance(now_ns, request, Event.EVICT)
        if isinstance(answer, Settled):
            actions.append(Evict(request.id, reason, error, settled=answer))
        else:
            assert isinstance(answer, Abort), f"{request.id} neither ends nor is aborted"
            actions.append(Evict(request.id, reason, error, worker_id=answer.worker_id))

    def _lost(
        self,
        now_ns: int,
        request: Request,
        worker: WorkerId,
        error: PenstockError | None,
        usage: Usage | None = None,
    ) -> None:
        if self._quarantine is None and isinstance(error, WorkerError) and error.died:
            self._use_quarantine()
        for attempt_lost in self._hooks.attempt_lost:
            attempt_lost(now_ns, request, worker, error, usage)

    def _end_extras(self, now_ns: int, request: Request, actions: list[Action]) -> None:
        """An event of a request concerns all of its attempts: a second one ends first."""
        if endings := self._hooks.ending:
            actions += [abort for ending in endings if (abort := ending(now_ns, request)) is not None]

    def _touch(self, model_queue: ModelQueue) -> None:
        self._dirty[model_queue.route] = model_queue


def _no_worker(route: str) -> WorkerUnavailable:
    return WorkerUnavailable(f"no worker of {route!r} is ready")
