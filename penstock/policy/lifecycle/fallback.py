"""Requests that their own model cannot answer: another model may, under the rules of admission.

    no worker is left      what waits is asked once; should a worker come back meanwhile it starts there
    none may be used       they fail, are slow, or have no room (`Health.trouble`): the same, but it starts
                           nowhere until the other model has answered whether it takes it
    an attempt failed      or gave nothing in time, and the model has no other worker for it: at once
    it waits too long      for an external worker

Which model is admission's to say; the driver makes the prompt anew for it, since it has another tokenizer and
template, and moves the request. All the while it waits where it was: should the other model not let it in,
nothing is lost. It takes nothing of the retry budget: what keeps it from multiplying an overload is that the
other model lets in what it can answer in time. Nothing falls back that has given output.
"""

from collections import deque
from collections.abc import Callable, Mapping

import msgspec

from penstock.errors import AttemptTimeout, PenstockError, WorkerBusy
from penstock.policy.admit_facts import DowngradeReason
from penstock.policy.answers import Diverted, FallBack, Refused
from penstock.policy.contracts import Health, Pass, RouteLoad
from penstock.policy.flow import Event, RequestFacts, State
from penstock.policy.lifecycle.policies import Policies
from penstock.policy.lifecycle.transitions import Accounts, Moved
from penstock.policy.queueing.band import Work
from penstock.policy.queueing.model_queue import ModelQueue
from penstock.policy.requests.request import Request, work_of
from penstock.types import RequestId

ASKED_MAX = 32
"""Requests that one look at a model without workers sends to others: those that have moved count at the
next."""
FOREIGN_MIGRATIONS_MAX = 1
"""How often a stream leaves foreign engines. Whether it is what ended one is not known: the crash quarantine
hears of our own workers' deaths only."""
Look = Callable[[int, RequestFacts], Callable[[str], RouteLoad]]
"""How models stand for a request: `contracts.Admission.decide` asks."""

_WHY: Mapping[type[PenstockError], DowngradeReason] = {AttemptTimeout: "timeout", WorkerBusy: "busy"}
"""Why another model answers, by what ended the attempt; of any other error "failure"."""


class _Round(msgspec.Struct):
    """One time in which a model cannot be used."""

    since_ns: int
    unasked: deque[Work]
    """Requests that wait and have not been asked yet; some may have left, or moved."""


class Fallbacks:
    """Those of one flow control."""

    __slots__ = ("_accounts", "_look", "_policies", "_requests", "_retries_max", "_rounds")

    def __init__(
        self,
        policies: Policies,
        accounts: Accounts,
        requests: Mapping[RequestId, Request],
        look: Look,
        *,
        retries_max: int,
    ) -> None:
        """`requests` are all accepted ones, by reference; `retries_max` bounds the tries at one model."""
        self._retries_max = retries_max
        self._policies, self._accounts, self._requests, self._look = policies, accounts, requests, look
        self._rounds: dict[str, _Round] = {}
        """By model."""

    def ask(self, now_ns: int, lane: ModelQueue) -> tuple[list[FallBack], list[Request], bool]:
        """What waits for a model that has no worker, or none that may be used: which requests could go
        elsewhere, which could not, and whether there are more to ask. Each is asked once while that lasts.
        """
        found, stay = list[FallBack](), list[Request]()
        unusable = _unusable(now_ns, lane, self._policies.health)
        entered = lane.queue.take_entered()
        if unusable is None:
            if self._rounds:
                self._rounds.pop(lane.route, None)
            return found, stay, False
        why, since_ns = unusable
        assert since_ns <= now_ns, "trouble that has not begun is none"
        asking = self._rounds.get(lane.route)
        if asking is None or asking.since_ns != since_ns:
            asking = self._rounds[lane.route] = _Round(since_ns, deque(lane.waiting()))
        else:
            asking.unasked.extend(entered)
        unasked = asking.unasked
        while unasked and len(found) + len(stay) < ASKED_MAX:
            work = unasked.popleft()
            request = self._requests.get(work.id) if lane.queue.waits(work) else None
            if request is None or request.has_begun or request.asked_ns == since_ns:
                continue
            request.asked_ns = since_ns
            leaves = self._without_worker if why == "unavailable" else self.leave
            if (action := leaves(now_ns, request, why)) is not None:
                found.append(action)
            else:
                stay.append(request)
        return found, stay, bool(unasked)

    def can_leave(self, now_ns: int, request: Request) -> bool:
        """Whether another worker or model would take a request that runs and has given nothing."""
        lane, facts, health = request.lane, request.facts, self._policies.health
        may_retry = request.attempts - request.attempts_elsewhere <= self._retries_max
        if (
            may_retry
            and lane.has_other(now_ns, request, besides=request.worker, now=True)
            and health.can_retry(now_ns)
        ):
            return True
        return bool(self._policies.admission.elsewhere(now_ns, facts, self._look(now_ns, facts)))

    def can_move(self, now_ns: int, request: Request, *, now: bool) -> bool:
        """Whether a request that runs on a worker of ours would go on at another one if this one ended it;
        `now`: one has room. One move is left for a worker that is lost.
        """
        lane, health = request.lane, self._policies.health
        room = lane.rooms.get(request.worker)
        if request.state not in (State.STARTED, State.STREAMING) or request.hedge is not None:
            return False
        if room is None or room.view.is_external:
            return False
        identity = room.view.identity if request.has_begun else ""
        if not lane.has_other(now_ns, request, besides=room.id, now=now, identity=identity):
            return False
        if request.has_begun:
            return request.migrations + 1 < self._policies.migrations_max
        may_retry = request.attempts - request.attempts_elsewhere <= self._retries_max
        return may_retry and health.can_retry(now_ns)

    def next_try(self, now_ns: int, request: Request, error: PenstockError) -> tuple[Event, FallBack | None]:
        """How a request whose worker failed is tried again, `FAIL` if it is not; and whether at another
        model.
        """
        if request.state not in (State.STARTED, State.STREAMING):
            return Event.FAIL, None
        if request.has_begun:
            room, most = request.lane.rooms.get(request.worker), self._policies.migrations_max
            if room is not None and room.view.is_external:
                most = min(most, FOREIGN_MIGRATIONS_MAX)
            may_move = request.migrations < most
            return (Event.MIGRATE if may_move else Event.FAIL), None
        lane, health = request.lane, self._policies.health
        lane.failed(request.worker, request)
        may_retry = request.attempts - request.attempts_elsewhere <= self._retries_max
        has_other = lane.has_other(now_ns, request)
        if may_retry and has_other and health.may_retry(now_ns):
            return Event.RETRY, None
        if (leaves := self.leave(now_ns, request, _WHY.get(type(error), "failure"))) is not None:
            return Event.RETRY, leaves
        if isinstance(error, WorkerBusy):  # It is told when there is room: sooner nobody need ask.
            return Event.FAIL, None
        may_retry = may_retry and not has_other and health.may_retry(now_ns)
        return (Event.RETRY if may_retry else Event.FAIL), None

    def too_late(self, now_ns: int, request: Request) -> FallBack | None:
        """It has waited too long for its promise, behind attempts at an external worker: what is ahead of it
        there nobody here can see or order, so another model may have it.
        """
        if not any(room.view.is_external for room in request.lane.rooms):
            return None
        action = self.leave(now_ns, request, "slo")
        if action is not None:
            request.lane.queue.wait_on(request)
        return action

    def leave(self, now_ns: int, request: Request, why: DowngradeReason) -> FallBack | None:
        """Let it leave for another model, if one may answer it and would in time; it starts nowhere until it
        has moved, or stays.
        """
        facts = request.facts
        if request.has_begun or facts.id in request.lane.leaving:
            return None
        route = self._policies.admission.elsewhere(now_ns, facts, self._look(now_ns, facts))
        if not route:
            return None
        assert route != facts.route, "a model is not its own fallback"
        request.lane.leaving.add(facts.id)
        return FallBack(facts.id, route, why)

    def _without_worker(self, now_ns: int, request: Request, why: DowngradeReason) -> FallBack | None:
        """Its model has no worker at all: admission's rules for that."""
        facts = request.facts
        verdict = self._policies.admission.decide(now_ns, facts, self._look(now_ns, facts))
        return FallBack(facts.id, verdict.route, verdict.why) if isinstance(verdict, Diverted) else None

    def move(self, now_ns: int, facts: RequestFacts, lane: ModelQueue) -> Moved | None:
        """What it becomes to wait in that queue; None if a worker has come back, it has ended, or it is not
        let in there.
        """
        request = self._requests.get(facts.id)
        if request is None or request.state is not State.QUEUED or request.has_begun:
            return None
        if lane is request.lane or (request.lane.down_ns is None and facts.id not in request.lane.leaving):
            return None
        verdict = self._policies.admission.decide(now_ns, facts, self._look(now_ns, facts))
        if not isinstance(verdict, Pass):
            return None
        work = work_of(facts, request.arrived_ns, 0, verdict)
        if lane.queue.would_refuse(work):
            return None
        holds = self._accounts.open(now_ns, facts)
        if isinstance(holds, Refused):
            return None
        work.output_tokens = holds.expected
        return Moved(facts, lane, work, holds)


def _unusable(now_ns: int, lane: ModelQueue, health: Health) -> tuple[DowngradeReason, int] | None:
    """Why none of a model's workers may be used, and since when; None: one may."""
    if lane.down_ns is not None:
        return "unavailable", lane.down_ns
    trouble = health.trouble(now_ns, lane.route)
    return (trouble.why, trouble.since_ns) if trouble is not None and trouble.why else None
