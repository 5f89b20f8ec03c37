"""One accepted request: its facts and its state, its place in a queue or at a worker, what is held for it,
and what its usage record is made of.

Held are tokens of its tenant's limits and money of its budget, slice by slice, both known by their contracts
(policy/contracts.py). A choice is one stream; most requests have one. The usage of its streams is summed
here, as their workers counted it, over all choices and all workers that it ran on.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.errors import PenstockError
from penstock.policy.contracts import Pass, TokenHold
from penstock.policy.flow import (
    TABLE,
    Abort,
    Event,
    FallBack,
    GiveUp,
    Outcome,
    RequestFacts,
    Start,
    State,
    Step,
    UsageRecord,
)
from penstock.policy.queueing.band import Work, cost
from penstock.policy.queueing.capacity import WorkerCapacity
from penstock.policy.queueing.model_queue import ModelQueue
from penstock.policy.terms import QueueTerms
from penstock.types import BLOCK_TOKENS, RequestId, Usage, WorkerId


class _NoTokenHold:
    """Holds nothing. One object is enough for all requests."""

    __slots__ = ()

    def renew(self, now_ns: int, num_output_tokens: int) -> None:
        del now_ns, num_output_tokens

    def settle(self, now_ns: int, actual_tokens: int) -> None:
        del now_ns, actual_tokens

    def undo(self, now_ns: int) -> None:
        del now_ns


NO_TOKENS = _NoTokenHold()


def continued(before: Usage, after: Usage) -> Usage:
    """The usage of a stream that continued on another worker, as if it had never been interrupted: its prompt
    was read once for it, its answer is one, and the time of the move is part of its decoding. The machines'
    work is the sum.
    """
    if not before.completion_tokens:
        before, after = after, before  # It gave nothing there: its prompt was read where it did.
        prefill_ns, decode_ns = before.prefill_ns, before.decode_ns
    else:
        prefill_ns = before.prefill_ns
        decode_ns = before.decode_ns + after.queue_ns + after.prefill_ns + after.decode_ns
    return Usage(
        prompt_tokens=before.prompt_tokens,
        completion_tokens=max(before.completion_tokens, after.completion_tokens),
        cached_tokens=before.cached_tokens,
        host_cached_tokens=before.host_cached_tokens,
        queue_ns=before.queue_ns,
        prefill_ns=prefill_ns,
        decode_ns=decode_ns,
        steps=before.steps + after.steps,
        computed_tokens=before.computed_tokens + after.computed_tokens,
        preemptions=before.preemptions + after.preemptions,
        kv_block_ns=before.kv_block_ns + after.kv_block_ns,
        device_ns=before.device_ns + after.device_ns,
        accepted_drafts=before.accepted_drafts + after.accepted_drafts,
        rejected_drafts=before.rejected_drafts + after.rejected_drafts,
    )


_NOTHING = Usage()
NO_PROMISE = Pass()
_MOVES = [[TABLE.get((state, event)) for event in Event] for state in State]
"""`TABLE` by index: two list look-ups per event."""
_QUEUED, _STARTED, _STREAMING, _ENDED = State.QUEUED, State.STARTED, State.STREAMING, State.ENDED
"""Until Python 3.12 a member costs a call each time its class is asked for it."""

_OUTCOME = {
    Event.CANCEL: Outcome.CANCELLED,
    Event.EVICT: Outcome.EVICTED,
    Event.STOP: Outcome.FINISHED,
    Event.FINISH: Outcome.FINISHED,
    Event.FAIL: Outcome.FAILED,
}
"""How a request ends by the first event that decides it."""


class Hedge(msgspec.Struct, gc=False):
    """The second of two attempts that run at once."""

    worker: WorkerId
    work: Work
    """The work booked there, under a name of its own."""
    attempt: int
    started_ns: int


class Request(Work):
    """One accepted request. `FlowControl` changes it; others read it. The queue and the placement know it as
    a `Work`, whose fields it has, too.
    """

    facts: RequestFacts
    model_queue: ModelQueue
    entered_ns: int
    """When it was queued last."""
    counted_cached_tokens: int
    """Of the prompt: expected, then as reported."""
    predicted_ns: int = 0
    """Its time to first token as it was expected when it came; 0: not known."""
    tokens: TokenHold = NO_TOKENS
    """Held of its tenant's limits."""
    money: int | None = None
    """Held of its tenant's budget, in millionths. None: its first slice costs nothing, and its tenant has no
    budget."""
    expected: int = 0
    """Answer tokens that its fair share was charged for."""
    budgeted: int = 0
    """Answer tokens that the budget holds money for."""
    io: object = None
    """The driver's: its streams on workers, and its client."""

    state: State = State.QUEUED
    dispatched_ns: int = -1
    """When it was dispatched last; -1: never."""
    first_output_ns: int = -1
    ended_ns: int = -1
    queue_ns: int = 0
    """Time in the queue, all visits together."""
    asked_ns: int = -1
    """Since when its model had no worker to use when another model was last looked for."""

    worker: WorkerId = WorkerId("")
    attempt: int = 0
    """The number of the attempt at `worker`; 0 while there is none."""
    attempts: int = 0
    migrations: int = 0
    """Attempts that continued behind what another worker had given, or were to."""
    attempts_elsewhere: int = 0
    """Attempts at models that it fell back from."""
    hedge: Hedge | None = None
    """The other attempt, while there are two."""
    hedged_ns: int = -1
    """When the first attempt was started, if a second one was started too."""
    hedge_booked: Work | None = None
    """The work booked at `worker`, if the attempt there is a hedge that outran the first one."""

    counted_prompt_tokens: int = 0
    """The counted part of the prompt, set at the end: all of it, or nothing if no worker gave anything for
    it."""
    completion_tokens: int = 0
    """As reported until now, all choices together."""
    used_by_choice: dict[int, Usage] = {}  # noqa: RUF012 - msgspec copies it.
    """The usage of its streams, as their workers counted it, by index of the choice."""
    used_before: dict[int, Usage] = {}  # noqa: RUF012 - msgspec copies it.
    """Of choices that continue on another worker: what was used until they left the last one."""
    usage: Usage | None = None
    """The workers' count of all of it, at the end of an attempt."""
    cost_micros: int = 0
    """By the price list, set at the end."""
    machine_micros: int = 0
    """The cost of workers that it began on and left for another one."""

    outcome: Outcome | None = None
    """Set by the event that decides it, which may be before the end."""
    reason: str = ""
    """Why it was evicted."""
    error: str = ""
    finish_reason: str = ""

    def retarget(self, other: "Request") -> None:
        """From here on it is for another model: it has the facts and holds that were made for that, and waits
        there. Its time was predicted for the model that it leaves, and counts no more.
        """
        assert self.state is State.QUEUED, f"{self.id} runs"
        assert not self.waiting, f"{self.id} waits for the model that it leaves"
        for name in Work.__struct_fields__:
            setattr(self, name, getattr(other, name))
        self.facts, self.model_queue = other.facts, other.model_queue
        self.counted_cached_tokens, self.predicted_ns = other.counted_cached_tokens, 0
        self.tokens, self.money = other.tokens, other.money
        self.expected, self.budgeted = other.expected, other.budgeted

    @property
    def booked(self) -> Work:
        """The work booked at `worker`."""
        return self.hedge_booked or self

    @property
    def has_begun(self) -> bool:
        """Whether the client may have seen part of the answer: it is never started from its beginning
        again.
        """
        return self.first_output_ns >= 0

    def attempt_at(self, worker: WorkerId) -> int:
        """The number of its attempt that runs at a worker; 0: none does."""
        if self.state is State.QUEUED:
            return 0
        if self.hedge is not None and self.hedge.worker == worker:
            return self.hedge.attempt
        return self.attempt if self.worker == worker else 0

    def has_attempt(self, number: int) -> bool:
        """Whether what that attempt reports counts."""
        if not number or self.state is State.QUEUED:
            return False
        return number == self.attempt or (self.hedge is not None and number == self.hedge.attempt)

    def on(self, event: Event, now_ns: int) -> tuple[Step, ...]:
        """Take one event; returns what must be done. An event that the table does not have asserts."""
        was = self.state
        move = _MOVES[was][event]
        assert move is not None, f"{self.facts.id}: {event.name} in {was.name}"
        state, actions = move
        if state is was:
            return actions
        self.state = state
        if was is _QUEUED:
            self.queue_ns += now_ns - self.entered_ns
        if self.outcome is None:
            self.outcome = _OUTCOME.get(event)
        if state is _STARTED:
            self.dispatched_ns = now_ns
            self.attempts += 1
        elif state is _STREAMING:
            if self.first_output_ns < 0:
                self.first_output_ns = now_ns
        elif state is _ENDED:
            self.ended_ns = now_ns
        elif state is _QUEUED:
            self.entered_ns = now_ns
            self.migrations += event is Event.MIGRATE
        return actions

    def stream_ended(self, choice: int, usage: Usage) -> None:
        """A choice's stream on its worker is over."""
        before = self.used_before.get(choice)
        self.used_by_choice[choice] = usage if before is None else continued(before, usage)

    def break_off(self) -> None:
        """Every choice whose stream was cut continues elsewhere; if none has begun, each begins again."""
        if self.has_begun:
            self.used_before.update(self.used_by_choice)
        else:
            self.used_by_choice.clear()

    def given(self) -> Usage:
        """The tokens that its client pays for: none of a whole answer that failed or was evicted."""
        if self.facts.is_whole and self.outcome in (Outcome.FAILED, Outcome.EVICTED):
            return _NOTHING
        prompt, cached = self.counted_prompt_tokens, self.counted_cached_tokens
        answer = self.completion_tokens
        return Usage(prompt_tokens=prompt, cached_tokens=cached, completion_tokens=answer)

    @property
    def longest_answer(self) -> int:
        """Tokens of the longest choice."""
        lengths = [usage.completion_tokens for usage in self.used_by_choice.values()]
        return max(lengths, default=0)

    def used(self) -> Usage:
        """Usage of all choices: every prompt once, every answer. Times are the first choice's."""
        if len(self.used_by_choice) == 1 and 0 in self.used_by_choice:
            return self.used_by_choice[0]
        usages, per_prompt = list(self.used_by_choice.values()), self.facts.choices_per_prompt
        firsts = [usage for choice, usage in self.used_by_choice.items() if choice % per_prompt == 0]
        first = self.used_by_choice.get(0, _NOTHING)
        return Usage(
            prompt_tokens=sum(usage.prompt_tokens for usage in firsts),
            completion_tokens=sum(usage.completion_tokens for usage in usages),
            cached_tokens=sum(usage.cached_tokens for usage in firsts),
            host_cached_tokens=sum(usage.host_cached_tokens for usage in firsts),
            queue_ns=first.queue_ns,
            prefill_ns=first.prefill_ns,
            decode_ns=first.decode_ns,
            steps=sum(usage.steps for usage in usages),
            computed_tokens=sum(usage.computed_tokens for usage in usages),
            preemptions=sum(usage.preemptions for usage in usages),
            kv_block_ns=sum(usage.kv_block_ns for usage in usages),
            device_ns=sum(usage.device_ns for usage in usages),
            accepted_drafts=sum(usage.accepted_drafts for usage in usages),
            rejected_drafts=sum(usage.rejected_drafts for usage in usages),
        )

    def record(self, wall_ns: int) -> UsageRecord:
        """The facts for the ledger, of a request that has ended; `wall_ns` is the date of the end.

        The share of the accelerators' cost is not here: the caller that knows it adds it. Times are the
        worker's own where it tells them.
        """
        facts, usage, given = self.facts, self.usage or Usage(), self.given()
        assert self.state is State.ENDED, f"{facts.id} has not ended"
        assert self.outcome is not None, "the event that ended it decided how"
        started, first = self.dispatched_ns, self.first_output_ns
        ran_until = first if first >= 0 else self.ended_ns
        if self.entered_ns > started:
            ran_until = min(ran_until, self.entered_ns)  # It ended while it waited for another attempt.
        prefill_ns = max(0, ran_until - started) if started >= 0 else 0
        # A wait in the middle of the answer is in the queue's time.
        rest_ns = self.ended_ns - self.arrived_ns - self.queue_ns - prefill_ns
        decode_ns = min(self.ended_ns - first, rest_ns) if first >= 0 else 0
        return UsageRecord(
            request_id=facts.id,
            ended_ns=wall_ns,
            tenant=facts.tenant.id,
            tier=facts.tenant.tier,
            key_prefix=facts.key_prefix,
            user=facts.user,
            endpoint=facts.endpoint,
            requested_model=facts.requested_model or facts.route,
            served_model=facts.route,
            route_reason=facts.diverted,
            adapter=facts.adapter,
            worker=self.worker,
            band=facts.tenant.band,
            outcome=self.outcome,
            finish_reason=self.finish_reason,
            error=self.error,
            choices=facts.choices,
            prompt_tokens=given.prompt_tokens,
            cached_tokens=given.cached_tokens,
            completion_tokens=given.completion_tokens,
            attempts=self.attempts,
            queue_us=(self.queue_ns + usage.queue_ns) // 1000,
            prefill_us=(usage.prefill_ns or prefill_ns) // 1000,
            decode_us=(usage.decode_ns or decode_ns) // 1000,
            total_us=(self.ended_ns - self.arrived_ns) // 1000,
            ttft_us=(first - self.arrived_ns) // 1000 if first >= 0 else 0,
            kv_block_us=usage.kv_block_ns // 1000,
            cost_micros=self.cost_micros,
            origin=facts.origin,
            origin_id=facts.origin_id,
        )


def request_of(
    facts: RequestFacts, arrived_ns: int, model_queue: ModelQueue, verdict: Pass = NO_PROMISE
) -> Request:
    """A request that came then, and was let in with that `verdict`: nothing is held for it, and it does not
    wait yet.
    """
    tenant, cached_tokens, choices = facts.tenant, facts.cached_tokens, facts.choices
    computed = facts.prompt_tokens - cached_tokens
    assert computed >= 0, f"more of {facts.id} is cached than there is"
    assert facts.held_tokens <= facts.prompt_tokens, f"more of {facts.id} is held than there is"
    request = Request(
        facts,
        model_queue,
        arrived_ns,
        cached_tokens,
        verdict.predicted_ns,
        id=facts.id,
        band=tenant.band,
        tenant=tenant.id,
        arrived_ns=arrived_ns,
    )
    # One by one: of so many fields each name in the call above takes twice as long.
    request.weight, request.priority = tenant.weight, facts.priority
    request.max_wait_ns, request.start_by_ns = facts.max_wait_ns, verdict.start_by_ns
    if verdict.first_token_ns:
        request.deadline_ns = arrived_ns + verdict.first_token_ns
    request.num_bytes, request.streams = facts.num_bytes, choices
    held = _held(facts, computed) if facts.held_tokens else computed
    request.blocks = -(-held // BLOCK_TOKENS) + choices
    request.prompt_tokens, request.cached_tokens = computed, cached_tokens
    request.context_tokens, request.keys, request.session = facts.context_tokens, facts.keys, facts.session
    request.adapter, request.needs, request.is_strict = facts.adapter, facts.needs, verdict.is_strict
    return request


def hedge_of(request: Request, name: RequestId) -> Work:
    """The booking of a second attempt beside the first one, under a name of its own."""
    fields: dict[str, Any] = {field: getattr(request, field) for field in Work.__struct_fields__}
    fields |= {"id": name, "matched_tokens": 0, "hold_ns": 1}
    return Work(**fields)


def charge(request: Request, output_tokens: int) -> None:
    """Its tenant's fair share pays for the prompt and so much of the answer."""
    prompt, cached = request.facts.prompt_tokens, request.counted_cached_tokens
    tenths = cost(prompt - cached, cached, output_tokens)
    request.model_queue.queue.charge(request, tenths)


def charge_matched(request: Request) -> None:
    """Its worker should have part of the prompt: charge that as cached, until the worker tells."""
    prompt = request.facts.prompt_tokens
    cached = min(request.cached_tokens + request.matched_tokens, prompt)
    request.model_queue.queue.charge(request, cost(prompt - cached, cached, request.output_tokens))


def count(request: Request, usage: Usage | None) -> None:
    """Take a worker's own count of what a request used until now, if there is one."""
    if usage is not None:
        request.usage = usage
        request.completion_tokens = usage.completion_tokens
        request.counted_cached_tokens = min(usage.cached_tokens, request.facts.prompt_tokens)


def blocks_of(request: Request) -> int:
    """KV blocks that a stream needs to continue elsewhere: its prompt and what it gave."""
    tokens = _held(request.facts, request.facts.prompt_tokens) + request.completion_tokens
    return -(-tokens // BLOCK_TOKENS) + request.facts.choices


def blocks_held(request: Request) -> int:
    """KV blocks that a running request holds for itself alone, as far as was told."""
    prompt = _held(request.facts, request.facts.prompt_tokens - request.counted_cached_tokens)
    return -(-(prompt + request.completion_tokens) // BLOCK_TOKENS)


def _held(facts: RequestFacts, tokens: int) -> int:
    """Of so many tokens of its prompts, those whose KV it holds at once."""
    return min(tokens, facts.held_tokens or tokens)


def victims(
    config: QueueTerms, model_queue: ModelQueue, worker: WorkerCapacity, requests: Sequence[Request]
) -> Sequence[Request]:
    """Which of the requests there end at a worker whose KV memory is nearly full, for the sake of a higher
    band there or in the queue.

    The lowest band gives way first, and in it the longest answer still to come: that one would take the most
    memory from now on, and has the least to show for what it took. A protected band never gives way. So many
    end that the use falls to `shed_kv_to`: the gap between the two bounds keeps a worker at the upper one
    from ending one stream after another.
    """
    used, total = worker.view.kv_blocks_used, worker.view.kv_blocks_total
    if used <= total * config.shed_kv_above:
        return ()
    stopping = [request for request in requests if request.state is State.STOPPING]
    need = used - int(total * config.shed_kv_to) - sum(map(blocks_held, stopping))
    waiting = (band.level for band in model_queue.queue.bands if band.waiting)
    best = min([*waiting, *(request.level for request in requests)], default=0)
    may_end = [
        request
        for request in requests
        if request.level > best
        and request.state is not State.STOPPING
        and not model_queue.queue.band_of(request).config.protected
        and blocks_held(request)
    ]
    # By id at last, so that the choice does not depend on their order.
    may_end.sort(key=lambda each: (-each.level, -max(0, each.expected - each.completion_tokens), each.id))
    chosen = list[Request]()
    for request in may_end[: config.shed_max]:
        if need <= 0:
            break
        chosen.append(request)
        need -= blocks_held(request)
    return chosen


# How requests end, as `FlowControl` answers it. Its other answers are in flow.py, which knows no request.


class Settled(msgspec.Struct, frozen=True):
    """The one end of an accepted request. `request.record(wall_ns)` has the facts for the ledger."""

    id: RequestId
    outcome: Outcome
    request: Request


class Evict(msgspec.Struct, frozen=True):
    """Drop it, with this error to its client.

    If it only waited, `settled` is its end. If it runs on `worker_id`, abort it there and tell `ended`.
    """

    id: RequestId
    reason: str
    """"timeout" and "late" (waited too long), "no_worker", "queue_full", "memory", "quarantine", "drain"."""
    error: PenstockError
    worker_id: WorkerId | None = None
    settled: Settled | None = None


Action = Start | Abort | Evict | FallBack | GiveUp
"""The answers of `dispatch`."""
