"""The life of every request, before and around its worker: composes admission, limits, budgets, queues and flows.

    arrive ──> admission ──> limits ──> budget ──> queue          Queued, or Refused and nothing is left of it
    dispatch ─> what has waited too long ends, and whatever fits a worker starts, in the queue's order
    output, ended, failed, cancel ─> the flow's next state; limits, budget and fair share follow what was really used

No part knows another; all of them are pure, and so is this: the gateway drives it from its event loop, the simulator from
its heap. Nothing here is called by itself. After `arrive`, an end, a worker's report, or at `next_ns`, call `dispatch`.
"""

from collections.abc import Callable, Sequence
from heapq import heappop, heappush

from penstock.clock import NS_PER_S
from penstock.config.flow import QueueConfig
from penstock.errors import Draining, Evicted, PenstockError, WorkerUnavailable
from penstock.policy.answers import (
    Abort,
    Action,
    Diverted,
    Evict,
    Queued,
    Refused,
    Requeued,
    Settled,
    Start,
    Stop,
)
from penstock.policy.flow import Arrival, Event, Flow, State
from penstock.policy.lifecycle.account import Accounts
from penstock.policy.lifecycle.deaths import Deaths
from penstock.policy.lifecycle.fallback import Fallbacks
from penstock.policy.lifecycle.life import Life, blocks_of, charge, charge_matched, count, victims, work_of
from penstock.policy.lifecycle.race import Races
from penstock.policy.parts import Parts, Pass, RouteLoad
from penstock.policy.queueing.band import Work
from penstock.policy.queueing.fair_queue import Full
from penstock.policy.queueing.lane import Lane
from penstock.policy.queueing.room import WorkerView
from penstock.policy.queueing.terms import queue_terms
from penstock.policy.record import Outcome
from penstock.types import RequestId, Usage, WorkerId

_ENDS = {
    Outcome.CANCELLED: Event.CANCEL,
    Outcome.EVICTED: Event.EVICT,
}
"""Events that decide an outcome before the worker's last word ends the request."""


class FlowControl:
    """See the module. One per gateway process, or per simulated gateway."""

    __slots__ = (
        "_accounts",
        "_config",
        "_deaths",
        "_dirty",
        "_drain_ns",
        "_fallbacks",
        "_lanes",
        "_lives",
        "_parts",
        "_pending",
        "_timers",
        "_timers_set",
        "races",
    )

    def __init__(self, config: QueueConfig, parts: Parts | None = None) -> None:
        self._config, self._parts = queue_terms(config), parts or Parts()
        self._accounts = Accounts(self._parts)
        self._lives: dict[RequestId, Life] = {}
        self._fallbacks = Fallbacks(self._parts, self._accounts, self._lives, self._look)
        self._lanes: dict[str, Lane] = {}
        self._dirty: dict[str, Lane] = {}
        self._timers: list[tuple[int, int, Lane]] = []
        self._timers_set = 0
        self._pending: list[Action] = []
        self._deaths = Deaths(self._parts.poison, self._lives)
        self.races = Races(
            self._parts.hedges, self._parts.health, self._lives, self._deaths, on_change=self._touch
        )
        """Where the driver tells of requests that run on two workers at once."""
        self._drain_ns: int | None = None

    # --- from the front ---------------------------------------------------------------------------

    def arrive(self, now_ns: int, arrival: Arrival) -> Queued | Diverted | Refused:
        """Accept a request into the queue, or say why not. Its id must not be in use."""
        assert arrival.id not in self._lives, f"{arrival.id} is here already"
        if self._drain_ns is not None:
            return Refused(arrival.id, "draining", Draining("this server is going away"))
        if (poison := self._parts.poison.refusal(now_ns, arrival)) is not None:
            return Refused(arrival.id, "quarantine", poison)
        lane = self._lane(now_ns, arrival.route)
        if self._config.no_worker == "refuse" and not lane.rooms.num_ready:
            return Refused(arrival.id, "no_worker", _no_worker(arrival.route))
        verdict = self._parts.admission.decide(now_ns, arrival, self._look(now_ns, arrival))
        if not isinstance(verdict, Pass):
            return verdict
        account = self._accounts.open(now_ns, arrival)
        if isinstance(account, Refused):
            return account
        work = work_of(arrival, now_ns, account.expected, verdict)
        dropped = lane.queue.push(now_ns, work)
        if isinstance(dropped, Full):
            account.undo(now_ns)
            return Refused(arrival.id, "queue", lane.overloaded(dropped))
        flow = Flow(arrival, now_ns)
        flow.predicted_ns = verdict.predicted_ns
        self._lives[arrival.id] = Life(flow, lane, work, account)
        lane.suspect(work, self._parts.poison.trial(now_ns, arrival))
        self._touch(lane)
        self._drop_for_room(now_ns, dropped)
        return Queued(arrival.id, arrival.route, verdict.predicted_ns)

    def cancel(self, now_ns: int, request_id: RequestId) -> Settled | Abort | None:
        """The client left. Settled if it only waited; an `Abort` if it runs; None if it has ended or is ending already."""
        life = self._lives.get(request_id)
        if life is None:
            return None
        flow = life.flow
        self._end_race(now_ns, life)
        was = flow.state
        flow.on(Event.CANCEL, now_ns)
        if was is State.QUEUED:
            life.lane.queue.remove(life.work)
            self._touch(life.lane)  # Somebody behind it may fit.
            return self._settle(now_ns, life)
        return Abort(request_id, flow.worker) if was is not State.STOPPING else None

    def move(self, now_ns: int, arrival: Arrival) -> bool:
        """Let a request that waits for a model without workers wait for another one, with its prompt made anew; the id stays. False: it
        has a worker by now or has ended, or is not let in there; nothing has changed then.
        """
        if self._drain_ns is not None:
            return False
        lane = self._lane(now_ns, arrival.route)
        dropped = self._fallbacks.move(now_ns, arrival, lane)
        if dropped is None:
            return False
        self._touch(lane)
        self._drop_for_room(now_ns, dropped)
        return True

    def drain(self, now_ns: int, deadline_ns: int) -> None:
        """Refuse what is new from now on; what is here may go on until the deadline, then it is evicted."""
        self._drain_ns = max(now_ns, deadline_ns)

    # --- from the workers -------------------------------------------------------------------------

    def set_worker(self, now_ns: int, route: str, worker_id: WorkerId, view: WorkerView | None) -> None:
        """Take what a worker says of itself; None: it is gone, and what ran there will be told by `failed`."""
        lane = self._lane(now_ns, route)
        lane.set_worker(now_ns, worker_id, view)
        self._parts.health.worker(route, worker_id, ready=None if view is None else view.ready)
        self._touch(lane)

    def first_output(self, now_ns: int, request_id: RequestId, *, cached_tokens: int | None = None) -> None:
        """The first token came (of any choice); `cached_tokens` of all prompts, if the worker told."""
        life = self._lives.get(request_id)
        if life is None:
            return
        flow, arrival = life.flow, life.flow.arrival
        if flow.state is State.STARTED:
            life.lane.begin(now_ns, flow.worker, life.booked)
            self.races.began(now_ns, life)
            self._parts.health.began(now_ns, life.lane.route, flow.worker, now_ns - flow.dispatched_ns)
            self._touch(life.lane)
        flow.on(Event.FIRST_OUTPUT, now_ns)
        if cached_tokens is not None:
            flow.cached_tokens = min(cached_tokens, arrival.prompt_tokens)
            if flow.cached_tokens != arrival.cached_tokens:
                charge(life, max(life.account.expected, flow.completion_tokens))

    def output(self, now_ns: int, request_id: RequestId, num_tokens: int) -> Stop | None:
        """So many new tokens came, of all choices together: call it once per slice, not per token.

        A `Stop` says that the budget ends here.
        """
        life = self._lives.get(request_id)
        if life is None:
            return None
        flow = life.flow
        if flow.state is State.STARTED:
            self.first_output(now_ns, request_id)
        flow.on(Event.OUTPUT, now_ns)
        flow.completion_tokens = total = flow.completion_tokens + num_tokens
        account = life.account
        account.tokens.renew(now_ns, total)
        if total > account.expected:
            account.expected = total
            charge(life, total)
        if total < account.budgeted or flow.state is State.STOPPING:
            return None
        if self._accounts.next_slice(now_ns, account, flow, total):
            return None
        flow.on(Event.STOP, now_ns)
        flow.finish_reason = "budget"
        return Stop(flow.id, flow.worker)

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
        """The worker's last word: how it ended and what it used, all choices together. None if it had ended.

        An outcome that was decided before (cancelled, evicted, out of budget) stays. Without usage what was reported counts.
        `fault` is what failed it, if it may be the worker's.
        """
        life = self._lives.get(request_id)
        if life is None:
            return None
        flow = life.flow
        assert flow.state is not State.QUEUED, f"{request_id} runs nowhere"
        self._end_race(now_ns, life)
        if outcome in _ENDS:
            flow.on(_ENDS[outcome], now_ns)
        flow.on(Event.FAIL if outcome is Outcome.FAILED else Event.FINISH, now_ns)
        flow.finish_reason = flow.finish_reason or finish_reason
        flow.error = flow.error or error
        return self._over(now_ns, life, usage, fault)

    def failed(
        self,
        now_ns: int,
        request_id: RequestId,
        error: PenstockError,
        *,
        retry: bool,
        usage: Usage | None = None,
    ) -> Settled | Requeued | None:
        """Its worker failed, or could not be sent it. With `retry` it waits again if tries are left: from the beginning, or
        behind what it gave (`usage` says how much) if it has begun; whoever asks knows that the latter is possible.
        """
        life = self._lives.get(request_id)
        if life is None:
            return None
        flow, lane, work = life.flow, life.lane, life.work
        if flow.state is State.QUEUED:
            lane.queue.remove(work)
            self._touch(lane)
            flow.on(Event.FAIL, now_ns)
            flow.error = type(error).__name__
            return self._settle(now_ns, life)
        self._end_race(now_ns, life)
        self._deaths.note(now_ns, flow.worker, life, error, usage)
        again = self._again(now_ns, flow) if retry else None
        if again is not None:
            self._parts.health.ended(now_ns, lane.route, flow.worker, error)
            flow.on(again, now_ns)
            work.identity = life.booked.identity  # Of the attempt that was ahead, if there were two.
            self.races.release(now_ns, life)
            lane.failed(flow.worker, work)
            if flow.has_begun:
                count(flow, usage)
                work.blocks, work.goes_on = blocks_of(flow), True
            lane.queue.requeue(now_ns, work, has_begun=flow.has_begun)
            self._touch(lane)
            return Requeued(request_id, flow.attempts, flow.has_begun)
        flow.on(Event.FAIL, now_ns)
        flow.error = flow.error or type(error).__name__
        return self._over(now_ns, life, usage, error)

    def _again(self, now_ns: int, flow: Flow) -> Event | None:
        """How a request whose worker failed may be tried again; None if it may not."""
        if flow.state not in (State.STARTED, State.STREAMING):
            return None
        if flow.has_begun:
            return Event.MIGRATE if flow.migrations < self._parts.migrations_max else None
        may_retry = flow.attempts <= self._config.retries_max and self._parts.health.may_retry(now_ns)
        return Event.RETRY if may_retry else None

    # --- by the clock -----------------------------------------------------------------------------

    def dispatch(self, now_ns: int) -> Sequence[Action]:
        """What must be done now, in order."""
        if self._deaths:
            self._look_for_poison(now_ns)
        told, self._pending = self._pending, []
        if self._drain_ns is not None and now_ns >= self._drain_ns:
            self._evict_all(now_ns, told)
        timers = self._timers
        while timers and timers[0][0] <= now_ns:
            when_ns, _, lane = heappop(timers)
            if lane.timer_ns == when_ns:
                lane.timer_ns = None
                self._touch(lane)
        if self._dirty:
            dirty, self._dirty = self._dirty, {}
            for lane in dirty.values():
                self._serve(now_ns, lane, told)
        told += self.races.due(now_ns)
        return told

    def shed(self, now_ns: int, route: str) -> Sequence[Action]:
        """Make KV memory free at workers that reported it nearly full. `dispatch` calls it after every report.

        Only for the sake of a higher band that runs there or waits for the model: among equals the engine's own preemption is
        fair, and nothing is lost by it. Lowest band first, in it whoever has the longest answer still to come; protected
        bands never.
        """
        lane, told = self._lanes.get(route), list[Action]()
        for room in lane.rooms.take_fresh() if lane is not None else ():
            assert lane is not None, "its rooms were just looked at"
            lives = [self.races.life_of(name) for name in room.begun]
            error = Evicted("gave way to requests of a higher band: KV memory ran out")
            for victim in victims(self._config, lane, room, lives):
                self._give_way(now_ns, self._lives[RequestId(victim)], "memory", error, told)
        return told

    def next_ns(self, now_ns: int) -> int | None:
        """When `dispatch` must be called if nothing happens until then; not before `now_ns`. None: not at all."""
        timers = self._timers
        while timers and timers[0][2].timer_ns != timers[0][0]:
            heappop(timers)
        first = timers[0][0] if timers else None
        if (hedge_ns := self.races.next_ns()) is not None:
            first = hedge_ns if first is None else min(first, hedge_ns)
        if self._pending or self._dirty:
            first = now_ns
        if self._drain_ns is not None and any(
            life.flow.state is not State.STOPPING for life in self._lives.values()
        ):
            first = self._drain_ns if first is None else min(first, self._drain_ns)
        return None if first is None else max(first, now_ns)

    # --- to look at -------------------------------------------------------------------------------

    def flow(self, request_id: RequestId) -> Flow | None:
        """A request that was accepted and has not ended."""
        life = self._lives.get(request_id)
        return None if life is None else life.flow

    def lane(self, route: str) -> Lane | None:
        """A model's queue and rooms, for gauges."""
        return self._lanes.get(route)

    def __len__(self) -> int:
        """Requests that were accepted and have not ended."""
        return len(self._lives)

    # --- inside -----------------------------------------------------------------------------------

    def _lane(self, now_ns: int, route: str) -> Lane:
        lane = self._lanes.get(route)
        if lane is None:
            parts = self._parts
            lane = self._lanes[route] = Lane(
                self._config, route, now_ns, parts.placement(route), parts.health, parts.pace()
            )
        return lane

    def _look(self, now_ns: int, arrival: Arrival) -> Callable[[str], RouteLoad]:
        def look(route: str) -> RouteLoad:
            return self._lane(now_ns, route).load(now_ns, work_of(arrival, now_ns, 0))

        return look

    def _serve(self, now_ns: int, lane: Lane, told: list[Action]) -> None:
        while (late := lane.next_expired(now_ns)) is not None:
            work, reason = late
            waited_s = (now_ns - work.queued_ns) / NS_PER_S
            error: PenstockError = _no_worker(lane.route)
            if reason == "timeout":
                error = Evicted(f"waited {waited_s:.1f} s without a turn", retry_after_s=lane.retry_after_s())
            elif reason == "late":
                why = f"waited {waited_s:.1f} s, and could not be answered in time any more"
                error = Evicted(why, retry_after_s=lane.retry_after_s())
            lane.queue.remove(work)
            told.append(self._dropped(now_ns, work, reason, error))
        if lane.down_ns is not None and lane.queue.num_waiting:
            self._look_elsewhere(now_ns, lane, lane.down_ns, told)
        while (start := lane.next_start(now_ns)) is not None:
            work, room = start
            life = self._lives[work.id]
            flow = life.flow
            flow.worker = room.id
            flow.on(Event.DISPATCH, now_ns)
            life.attempt, life.booked = flow.attempts, work
            self.races.started(now_ns, life)
            self._parts.health.started(now_ns, lane.route, room.id)
            if work.matched_tokens:
                charge_matched(life)
            band = lane.queue.band_of(work)
            told.append(Start(work.id, lane.route, room.id, band.config.order, flow.attempts))
        if self._config.shed_kv_above < 1:
            told += self.shed(now_ns, lane.route)
        due_ns = lane.due_ns(now_ns)
        if due_ns is not None and (lane.timer_ns is None or due_ns < lane.timer_ns):
            lane.timer_ns = due_ns
            self._timers_set += 1
            heappush(self._timers, (due_ns, self._timers_set, lane))

    def _look_elsewhere(self, now_ns: int, lane: Lane, down_ns: int, told: list[Action]) -> None:
        """No worker is left: what waits falls back to another model under the rules of admission, else it waits on."""
        found, stay, more = self._fallbacks.ask(now_ns, lane, down_ns)
        told += found
        if self._config.no_worker == "refuse":
            for life in stay:
                lane.queue.remove(life.work)
                told.append(self._dropped(now_ns, life.work, "no_worker", _no_worker(lane.route)))
        if more:
            self._touch(lane)

    def _dropped(self, now_ns: int, work: Work, reason: str, error: PenstockError) -> Evict:
        """The end of one that waited and is out of the queue already."""
        life = self._lives[work.id]
        life.flow.reason, life.flow.error = reason, type(error).__name__
        life.flow.on(Event.EVICT, now_ns)
        return Evict(work.id, reason, error, settled=self._settle(now_ns, life))

    def _drop_for_room(self, now_ns: int, dropped: Sequence[Work]) -> None:
        for victim in dropped:
            error = Evicted("gave way to a request of a higher band: the queue is full")
            self._pending.append(self._dropped(now_ns, victim, "queue_full", error))

    def _look_for_poison(self, now_ns: int) -> None:
        """Workers have died since the last time: whoever is found to be the cause does not go on to the next one."""
        for life, error in self._deaths.refused(now_ns):
            life.lane.queue.remove(life.work)
            self._pending.append(self._dropped(now_ns, life.work, "quarantine", error))

    def _evict_all(self, now_ns: int, told: list[Action]) -> None:
        error = Draining("this server went away before the answer was finished")
        for life in list(self._lives.values()):
            if life.flow.state is State.QUEUED:
                life.lane.queue.remove(life.work)
                told.append(self._dropped(now_ns, life.work, "drain", error))
            elif life.flow.state is not State.STOPPING:
                self._give_way(now_ns, life, "drain", error, told)

    def _give_way(
        self, now_ns: int, life: Life, reason: str, error: PenstockError, told: list[Action]
    ) -> None:
        """Tell one that runs to end."""
        self._end_race(now_ns, life, told)
        flow = life.flow
        flow.reason, flow.error = reason, type(error).__name__
        flow.on(Event.EVICT, now_ns)
        told.append(Evict(flow.id, reason, error, worker_id=flow.worker))

    def _end_race(self, now_ns: int, life: Life, told: list[Action] | None = None) -> None:
        """What happens to it happens to all of it: a second attempt ends first."""
        if life.race is not None:
            (self._pending if told is None else told).append(self.races.end(now_ns, life))

    def _touch(self, lane: Lane) -> None:
        self._dirty[lane.route] = lane

    def _over(
        self, now_ns: int, life: Life, usage: Usage | None, fault: PenstockError | None = None
    ) -> Settled:
        """The end of one that ran: counts as the worker says them, room and share given back."""
        flow, lane, work = life.flow, life.lane, life.work
        arrival = flow.arrival
        count(flow, usage)
        # A prompt counts once the worker has shown or told that it was read, or the client left while it was.
        if flow.first_output_ns >= 0 or flow.outcome in (Outcome.FINISHED, Outcome.CANCELLED):
            flow.prompt_tokens = arrival.prompt_tokens
            charge(life, flow.completion_tokens)
            each = flow.completion_tokens // arrival.choices
            self._parts.lengths.observe(arrival.tenant.id, lane.route, each)
        else:
            flow.cached_tokens = flow.completion_tokens = 0
            lane.queue.charge(work, 0)
        self._parts.health.ended(now_ns, lane.route, flow.worker, fault)
        if flow.outcome is Outcome.FINISHED:
            self._parts.health.succeeded()
            self._parts.poison.ended_well(arrival)
        lane.queue.end(work)
        self.races.release(now_ns, life, usage)
        self._touch(lane)
        return self._settle(now_ns, life)

    def _settle(self, now_ns: int, life: Life) -> Settled:
        """Exactly once for each accepted request: it is out of the queue and off its worker."""
        flow = life.flow
        del self._lives[flow.id]
        life.lane.forget(life.work)
        if flow.has_begun:  # Also if it waited for another worker to go on.
            flow.prompt_tokens = flow.arrival.prompt_tokens
        self._accounts.settle(now_ns, life.account, flow)
        assert flow.outcome is not None, "what has ended has an outcome"
        return Settled(flow.id, flow.outcome, flow)


def _no_worker(route: str) -> WorkerUnavailable:
    return WorkerUnavailable(f"no worker of {route!r} is ready")
