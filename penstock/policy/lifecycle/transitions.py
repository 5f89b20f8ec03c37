"""Carries out what the table of flow.py says: the only place where a request starts, ends or gives anything
back. `Accounts` reserves, grows and settles the amounts held for a request; `Fallbacks` asks another
model for requests that their own cannot answer, under the rules of admission.

    no worker is left      what waits is asked once; should a worker come back meanwhile it starts there
    none may be used       they fail, are slow, or have no room (`Health.trouble`): the same, but it starts
                           nowhere until the other model has answered whether it takes it
    an attempt failed      or gave nothing in time, and the model has no other worker for it: at once
    it waits too long      for an external worker

Which model is admission's to say; the driver makes the prompt for it, since it has another tokenizer and
template, and moves the request. All the while it waits where it was: should the other model not let it in,
nothing is lost. It takes nothing of the retry budget: what keeps it from multiplying an overload is that the
other model lets in what it can answer in time. Nothing falls back that has given output.
"""

from collections import deque
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import cast

import msgspec

from penstock.errors import AttemptTimeout, PenstockError, WorkerBusy
from penstock.policy.contracts import Health, Look, Pass, Refusal, TokenHold
from penstock.policy.extras.hooks import Hooks
from penstock.policy.flow import (
    Abort,
    Diverted,
    DowngradeReason,
    Event,
    FallBack,
    Outcome,
    Refused,
    RequestFacts,
    Start,
    State,
    Step,
)
from penstock.policy.lifecycle.policies import Policies
from penstock.policy.queueing.band import Work
from penstock.policy.queueing.fair_queue import Full
from penstock.policy.queueing.model_queue import ModelQueue
from penstock.policy.request import Request, Settled, blocks_of, charge, charge_matched, count, request_of
from penstock.types import RequestId, Usage


class Change(msgspec.Struct, gc=False):
    """The data that an event brings along for its steps."""

    usage: Usage | None = None
    """The worker's count of what it used."""
    error: PenstockError | None = None
    """The error that failed its attempt, if that may be the worker's fault."""
    moved: Request | None = None
    """The same request as it is for another model."""


_NOTHING = Change()
Answer = Settled | Abort | Start
"""The answer of an event's last step."""


class Accounts:
    """The amounts held for requests, by the policies: tokens of limits, and money of budgets."""

    __slots__ = ("_policies",)

    def __init__(self, policies: Policies) -> None:
        self._policies = policies

    def lacks(self, now_ns: int, facts: RequestFacts) -> bool:
        """Whether the store of shared limits is asked first for what `open` would hold."""
        policies, tenant, prompt = self._policies, facts.tenant, facts.prompt_tokens
        if facts.origin:
            return False
        expected = self._expected(facts)
        if (levels := policies.levels) is not None and tenant.has_levels:
            lacks = levels.lacks(now_ns, tenant, prompt, expected, key=facts.key_prefix, user=facts.user)
        else:
            lacks = policies.limits.lacks(now_ns, tenant, prompt + expected)
        if not tenant.has_budget:
            return lacks
        return policies.budgets.lacks(now_ns, tenant, self._first_price(facts)) or lacks

    def _expected(self, facts: RequestFacts) -> int:
        """Tokens of all choices together."""
        lengths = self._policies.lengths
        return facts.choices * lengths.expect(facts.tenant.id, facts.route, facts.max_tokens)

    def open(self, now_ns: int, request: Request) -> Refused | None:
        """Hold what a request is expected to need; nothing if it is refused."""
        policies, facts = self._policies, request.facts
        tenant, expected = facts.tenant, self._expected(facts)
        request.expected = request.output_tokens = expected
        request.budgeted = self._first_slice(facts)
        if facts.origin:  # They were asked where it came from.
            return None
        prompt, name = facts.prompt_tokens, facts.id
        held: TokenHold | Refusal
        if (levels := policies.levels) is not None and tenant.has_levels:
            key, user = facts.key_prefix, facts.user
            held = levels.reserve(now_ns, tenant, prompt, expected, key=key, user=user, request_id=name)
        else:
            held = policies.limits.reserve(now_ns, tenant, prompt, expected, request_id=name)
        if hasattr(held, "error"):
            return Refused(name, "limits", cast("Refusal", held).error())
        request.tokens = cast("TokenHold", held)
        price = self._first_price(facts) if policies.prices.are_any else 0
        if price or tenant.has_budget:
            if (refusal := policies.budgets.reserve(now_ns, tenant, price)) is not None:
                request.tokens.undo(now_ns)
                return Refused(name, "budget", refusal.error())
            request.money = price
        return None

    def _first_slice(self, facts: RequestFacts) -> int:
        """Answer tokens of the first slice."""
        return min(self._policies.slice_tokens, facts.max_tokens * facts.choices)

    def _first_price(self, facts: RequestFacts) -> int:
        """Of the prompt and the first slice of the answer."""
        return self._price(facts.route, facts.prompt_tokens, facts.cached_tokens, self._first_slice(facts))

    def next_slice(self, now_ns: int, request: Request, total: int) -> bool:
        """Hold money for the slice that begins after `total` answer tokens; False: there is none left."""
        assert total >= 0, total
        facts = request.facts
        longest = facts.max_tokens * facts.choices
        request.budgeted = min(total + self._policies.slice_tokens, max(total, longest))
        if facts.origin or request.money is None:
            return True
        cached = max(request.counted_cached_tokens, 0)
        price = self._price(facts.route, facts.prompt_tokens, cached, request.budgeted)
        if not self._policies.budgets.renew(now_ns, facts.tenant.id, request.money, price):
            return False
        request.money = max(request.money, price)
        return True

    def undo(self, now_ns: int, request: Request) -> None:
        """The request was refused after all, or is another model's from here on."""
        request.tokens.undo(now_ns)
        if request.money is not None:
            self._policies.budgets.settle(now_ns, request.tenant, request.money, 0)

    def settle(self, now_ns: int, request: Request, used: Usage) -> int:
        """It used so much; returns its price in millionths."""
        tokens = used.prompt_tokens + used.completion_tokens
        assert tokens >= 0, used
        request.tokens.settle(now_ns, tokens)
        facts, policies = request.facts, self._policies
        price = policies.prices.cost_micros(facts.route, used) if policies.prices.are_any else 0
        assert price >= 0, "nobody is paid for a request"
        if request.money is not None:
            policies.budgets.settle(now_ns, facts.tenant.id, request.money, price)
        elif price and not facts.origin:
            policies.budgets.spend(now_ns, facts.tenant.id, price)
        return price

    def _price(self, route: str, prompt: int, cached: int, output: int) -> int:
        prices = self._policies.prices
        if not prices.are_any:
            return 0
        usage = Usage(prompt_tokens=prompt, cached_tokens=cached, completion_tokens=output)
        return prices.cost_micros(route, usage)


class Transitions:
    """One for each flow control."""

    __slots__ = ("_accounts", "_hooks", "_on_change", "_on_dropped", "_policies", "_requests", "_steps")

    def __init__(
        self,
        policies: Policies,
        accounts: Accounts,
        requests: MutableMapping[RequestId, Request],
        hooks: Hooks,
        *,
        on_change: Callable[[ModelQueue], None],
        on_dropped: Callable[[int, Sequence[Work]], None],
    ) -> None:
        """`requests` are all accepted ones, from which those that have ended are removed; `on_change` is
        called for a model whose queue must be looked at again, `on_dropped` for what a queue dropped to make
        room.
        """
        self._policies, self._accounts, self._requests, self._hooks = policies, accounts, requests, hooks
        self._on_change, self._on_dropped = on_change, on_dropped
        self._steps: dict[Step, Callable[[int, Request, Change], Answer | None]] = {
            Step.ENQUEUE: self._enqueue,
            Step.LEAVE: self._leave,
            Step.RETARGET: self._retarget,
            Step.START: self._start,
            Step.ABORT: self._abort,
            Step.COUNT: self._count,
            Step.RELEASE: self._release,
            Step.SETTLE: self._settle,
        }

    def advance(
        self, now_ns: int, request: Request, event: Event, change: Change = _NOTHING
    ) -> Answer | None:
        """Take an event, and carry out its steps in order."""
        answer = None
        for step in request.on(event, now_ns):
            answer = self._steps[step](now_ns, request, change)
        return answer

    def _enqueue(self, now_ns: int, request: Request, change: Change) -> None:
        model_queue = request.model_queue
        if change.moved is not None:
            dropped = model_queue.queue.push(now_ns, request)
            assert not isinstance(dropped, Full), "it was asked"
            for queued in self._hooks.queued:
                queued(now_ns, request)
            self._on_change(model_queue)
            self._on_dropped(now_ns, dropped)
            return
        model_queue.failed(request.worker, request)
        if request.has_begun:
            count(request, change.usage)
            request.blocks, request.goes_on = blocks_of(request), True
        model_queue.queue.requeue(now_ns, request, has_begun=request.has_begun)
        self._on_change(model_queue)

    def _leave(self, now_ns: int, request: Request, change: Change) -> None:
        if request.waiting:  # Else the queue dropped it, to make room for another one.
            request.model_queue.queue.remove(request)
        self._on_change(request.model_queue)  # A request behind it may fit.

    def _retarget(self, now_ns: int, request: Request, change: Change) -> None:
        assert change.moved is not None, "a move says what it becomes"
        self._forget(request)
        self._accounts.undo(now_ns, request)
        request.retarget(change.moved)

    def _start(self, now_ns: int, request: Request, change: Change) -> Start:
        model_queue = request.model_queue
        request.attempt = request.attempts
        for started in self._hooks.started:
            started(now_ns, request)
        self._policies.health.started(now_ns, model_queue.route, request.worker)
        if request.matched_tokens:
            charge_matched(request)
        order = model_queue.queue.order_of(request)
        return Start(
            request.id, model_queue.route, request.worker, order, request.attempts, request.takes_row
        )

    def _abort(self, now_ns: int, request: Request, change: Change) -> Abort:
        return Abort(request.id, request.worker)

    def _count(self, now_ns: int, request: Request, change: Change) -> None:
        """Counts as the worker reports them.

        A prompt counts once a worker has read it, or the client left while it was read.
        """
        facts, model_queue = request.facts, request.model_queue
        count(request, change.usage)
        if request.has_begun or request.outcome in (Outcome.FINISHED, Outcome.CANCELLED):
            request.counted_prompt_tokens = facts.prompt_tokens
            charge(request, request.completion_tokens)
            each = request.completion_tokens // facts.choices
            self._policies.lengths.observe(facts.tenant.id, model_queue.route, each)
        else:
            request.counted_cached_tokens = request.completion_tokens = 0
            model_queue.queue.charge(request, 0)
        if request.outcome is Outcome.FINISHED:
            self._policies.health.succeeded()
            for finished in self._hooks.finished:
                finished(facts)
        model_queue.queue.end(request)

    def _release(self, now_ns: int, request: Request, change: Change) -> None:
        model_queue = request.model_queue
        self._policies.health.ended(now_ns, model_queue.route, request.worker, change.error)
        usage = change.usage if request.state is State.ENDED else None
        booked = request.hedge_booked or request
        request.identity = booked.identity  # Of the attempt that was ahead, if there were two.
        model_queue.release(now_ns, request.worker, booked, usage)
        request.hedge_booked = None
        self._on_change(model_queue)

    def _forget(self, request: Request) -> None:
        request.model_queue.forget(request)
        for left in self._hooks.left:
            left(request)

    def _settle(self, now_ns: int, request: Request, change: Change) -> Settled:
        """Exactly once for each accepted request: it is out of the queue and off its worker."""
        del self._requests[request.id]
        self._forget(request)
        if request.has_begun:  # Also if it waited for another worker to continue.
            request.counted_prompt_tokens = request.facts.prompt_tokens
        request.cost_micros = self._accounts.settle(now_ns, request, request.given())
        assert request.outcome is not None, "what has ended has an outcome"
        return Settled(request.id, request.outcome, request)


ASKED_MAX = 32
"""Requests that one look at a model without workers sends to others: those that have moved count at the
next."""
FOREIGN_MIGRATIONS_MAX = 1
"""How often a stream leaves foreign engines. Whether it is what ended one is not known: the crash quarantine
hears of our own workers' deaths only."""
_LookFor = Callable[[int, RequestFacts], Look]
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
        look: _LookFor,
        *,
        retries_max: int,
    ) -> None:
        """`requests` are all accepted ones, by reference; `retries_max` bounds the tries at one model."""
        self._retries_max = retries_max
        self._policies, self._accounts, self._requests, self._look = policies, accounts, requests, look
        self._rounds: dict[str, _Round] = {}
        """By model."""

    def ask(self, now_ns: int, model_queue: ModelQueue) -> tuple[list[FallBack], list[Request], bool]:
        """The requests that wait for a model that has no worker, or none that may be used: which requests
        could go elsewhere, which could not, and whether there are more to ask. Each is asked once while that
        lasts.
        """
        found: list[FallBack] = []
        stay: list[Request] = []
        unusable = _unusable(now_ns, model_queue, self._policies.health)
        entered = model_queue.queue.take_entered()
        if unusable is None:
            if self._rounds:
                self._rounds.pop(model_queue.route, None)
            return found, stay, False
        why, since_ns = unusable
        assert since_ns <= now_ns, "trouble that has not begun is none"
        asking = self._rounds.get(model_queue.route)
        if asking is None or asking.since_ns != since_ns:
            asking = self._rounds[model_queue.route] = _Round(since_ns, deque(model_queue.waiting()))
        else:
            asking.unasked.extend(entered)
        unasked = asking.unasked
        while unasked and len(found) + len(stay) < ASKED_MAX:
            work = unasked.popleft()
            request = self._requests.get(work.id) if model_queue.queue.waits(work) else None
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
        model_queue, facts, health = request.model_queue, request.facts, self._policies.health
        may_retry = request.attempts - request.attempts_elsewhere <= self._retries_max
        if (
            may_retry
            and model_queue.has_other(now_ns, request, besides=request.worker, now=True)
            and health.can_retry(now_ns)
        ):
            return True
        return bool(self._policies.admission.elsewhere(now_ns, facts, self._look(now_ns, facts)))

    def can_move(self, now_ns: int, request: Request, *, now: bool) -> bool:
        """Whether a request that runs on a worker of ours would continue on another one if this one ended it;
        `now`: one has room. One move is left for a worker that is lost.
        """
        model_queue, health = request.model_queue, self._policies.health
        worker = model_queue.workers.get(request.worker)
        if request.state not in (State.STARTED, State.STREAMING) or request.hedge is not None:
            return False
        if worker is None or worker.view.is_external:
            return False
        identity = worker.view.identity if request.has_begun else ""
        if not model_queue.has_other(now_ns, request, besides=worker.id, now=now, identity=identity):
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
            worker, limit = request.model_queue.workers.get(request.worker), self._policies.migrations_max
            if worker is not None and worker.view.is_external:
                limit = min(limit, FOREIGN_MIGRATIONS_MAX)
            may_move = request.migrations < limit
            return (Event.MIGRATE if may_move else Event.FAIL), None
        model_queue, health = request.model_queue, self._policies.health
        model_queue.failed(request.worker, request)
        may_retry = request.attempts - request.attempts_elsewhere <= self._retries_max
        has_other = model_queue.has_other(now_ns, request)
        # Requests of a peer cell come home: one that is lost fails all of them at once, which is no overload.
        is_guest = request.worker in model_queue.peers.ids
        if may_retry and has_other and (is_guest or health.may_retry(now_ns)):
            return Event.RETRY, None
        if (leaves := self.leave(now_ns, request, _WHY.get(type(error), "failure"))) is not None:
            return Event.RETRY, leaves
        if isinstance(error, WorkerBusy):  # It is called when there is room: sooner no caller need ask.
            return Event.FAIL, None
        may_retry = may_retry and not has_other and health.may_retry(now_ns)
        return (Event.RETRY if may_retry else Event.FAIL), None

    def too_late(self, now_ns: int, request: Request) -> FallBack | None:
        """It has waited too long for its promise, behind attempts at an external worker: requests ahead of it
        there cannot be seen or ordered here, so another model may have it.
        """
        if not any(worker.view.is_external for worker in request.model_queue.workers):
            return None
        action = self.leave(now_ns, request, "slo")
        if action is not None:
            request.model_queue.queue.wait_on(request)
            request.model_queue.pace.too_late(now_ns, request)
        return action

    def leave(self, now_ns: int, request: Request, why: DowngradeReason) -> FallBack | None:
        """Let it leave for another model, if one may answer it and would in time; it starts nowhere until it
        has moved, or stays.
        """
        facts = request.facts
        if request.has_begun or facts.id in request.model_queue.leaving:
            return None
        route = self._policies.admission.elsewhere(now_ns, facts, self._look(now_ns, facts))
        if not route:
            return None
        assert route != facts.route, "a model is not its own fallback"
        request.model_queue.leaving.add(facts.id)
        return FallBack(facts.id, route, why)

    def _without_worker(self, now_ns: int, request: Request, why: DowngradeReason) -> FallBack | None:
        """Its model has no worker at all: admission's rules for that."""
        facts = request.facts
        verdict = self._policies.admission.decide(now_ns, facts, self._look(now_ns, facts))
        return FallBack(facts.id, verdict.route, verdict.why) if isinstance(verdict, Diverted) else None

    def move(self, now_ns: int, facts: RequestFacts, model_queue: ModelQueue) -> Request | None:
        """The request as it is to wait in that queue; None if a worker has come back, it has ended, or it is
        not let in there.
        """
        request = self._requests.get(facts.id)
        if request is None or request.state is not State.QUEUED or request.has_begun:
            return None
        if model_queue is request.model_queue or (
            request.model_queue.down_ns is None and facts.id not in request.model_queue.leaving
        ):
            return None
        verdict = self._policies.admission.decide(now_ns, facts, self._look(now_ns, facts))
        if not isinstance(verdict, Pass):
            return None
        moved, queue = request_of(facts, request.arrived_ns, model_queue, verdict), model_queue.queue
        if queue.would_refuse(queue.level_of(moved.band), moved.tenant, moved.num_bytes):
            return None
        return moved if self._accounts.open(now_ns, moved) is None else None


def _unusable(now_ns: int, model_queue: ModelQueue, health: Health) -> tuple[DowngradeReason, int] | None:
    """Why none of a model's workers may be used, and since when; None: one may."""
    if model_queue.down_ns is not None:
        return "unavailable", model_queue.down_ns
    trouble = health.trouble(now_ns, model_queue.route)
    return (trouble.why, trouble.since_ns) if trouble is not None and trouble.why else None
