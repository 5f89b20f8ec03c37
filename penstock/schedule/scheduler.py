"""Decides what the engine computes next: one token budget per step, no prefill phase and no decode phase.

A request owes its known but uncomputed tokens, and every step pays a part of the debt: one token while
it decodes, a chunk of the prompt before that, the whole history after a preemption, less what the prefix
cache knows (the rule is vLLM v1's; the idea of iteration-level batching is Orca's, OSDI 2022).

    submit -> waiting -- schedule --> running -- apply: EOS, stop token, length, error --> finished
                 ^                      |
                 +---- preempted <------+   out of blocks: give all up, resume later as a prefix hit

The scheduler knows numbers of tokens and of blocks. Tensors, text, sockets and threads it does not know.

One plan is in flight at most: `schedule` and `apply` alternate. Planning step N+1 before N's tokens are
known will relax that: `schedule` then plans on assumed lengths, and what is freed (`_release`) waits for
the step that last read it. Both already pass through one place each, so callers will not change.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass

from penstock.clock import Clock
from penstock.config.tree import EngineConfig
from penstock.errors import ContextTooLong, InvalidRequest
from penstock.kv.manager import KVManager, blocks_for
from penstock.schedule.plan import RequestOutput, Sampled, StepOutcome, StepPlan, StepResult
from penstock.schedule.queue import WaitingQueue
from penstock.schedule.request import Request, Status
from penstock.schedule.rows import RowTable
from penstock.schedule.step import StepBuilder
from penstock.types import BLOCK_TOKENS, FinishReason, RequestId

_RUNNING = Status.RUNNING


@dataclass(slots=True, frozen=True)
class Limits:
    """The bounds of a batch."""

    step_tokens: int
    """Tokens computed in one step at most."""
    max_running: int
    """Requests in the batch at most: never more than `step_tokens`, since a decode row is never skipped."""
    max_model_len: int
    """Tokens of prompt and answer together."""

    @classmethod
    def of(cls, config: EngineConfig, max_model_len: int) -> "Limits":
        """The bounds that a config asks for, with the model length that was settled on."""
        return cls(config.step_tokens, min(config.max_running, config.step_tokens), max_model_len)


@dataclass(slots=True, frozen=True)
class SchedulerStatistics:
    """Gauges, and counters since the start."""

    step: int
    running: int
    waiting: int
    blocks_total: int
    blocks_used: int
    blocks_cached: int
    prompt_tokens: int
    """Of requests that started."""
    cached_tokens: int
    """Of `prompt_tokens`, what the prefix cache had."""
    generated_tokens: int
    preemptions: int


class Scheduler:
    """Owns every live request, the waiting order, the rows and the KV blocks of one engine."""

    def __init__(self, limits: Limits, manager: KVManager, clock: Clock, queue: WaitingQueue) -> None:
        assert 0 < limits.max_running <= limits.step_tokens, limits
        self.limits = limits
        self._manager, self._clock, self._queue = manager, clock, queue
        self._requests: dict[RequestId, Request] = {}  # Every one that has not ended.
        self._running: list[Request] = []  # By `order`: who came last is the first to be preempted.
        self._rows = RowTable(limits.max_running)
        self._in_flight: StepPlan | None = None
        self._condemned: list[Request] = []  # Aborted while the step in flight may still write their blocks.
        self._step = 0
        self._submitted = 0
        self._releases = 0
        self._blocked: tuple[RequestId, int] | None = (
            None  # The head that found no room, after so many releases.
        )
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._generated_tokens = 0
        self._preemptions = 0

    # --- what callers do --------------------------------------------------------------------------

    def submit(self, request: Request, *, arrived_ns: int | None = None) -> None:
        """Queue a new request. It ends exactly once: in an `apply` outcome, or by `abort`.

        `arrived_ns` is when it came in, if that was before now (while a step ran): queueing counts from there.

        Raises:
            InvalidRequest: an empty prompt, no token to generate, or an id that is already in use.
            ContextTooLong: it does not fit the model's context, or not even an empty KV cache.
            Overloaded: too many requests wait.
        """
        self._check_fits(request)
        request.num_tokens_max = self._num_tokens_max(request)
        request.arrival_ns = self._clock.now_ns() if arrived_ns is None else arrived_ns
        self._submitted += 1
        request.order = (request.priority, request.arrival_ns, self._submitted)
        request.table = self._manager.open(request.salt)
        self._queue.push(request)
        self._requests[request.request_id] = request

    def abort(self, request_id: RequestId) -> RequestOutput | None:
        """End a request wherever it stands; its last output, or None if it is not (any longer) known.

        Its blocks are free at once, or when the step in flight has been applied.
        """
        request = self._requests.get(request_id)
        if request is None:
            return None
        if request.status is not _RUNNING:
            self._queue.remove(request)
        return self._finish(request, FinishReason.ABORT, self._clock.now_ns())

    def schedule(self) -> StepPlan | None:
        """Choose the next step's work; None when there is nothing to do.

        Rows that decode come first and are never skipped, then running prompts, then the head of the queue.
        """
        assert self._in_flight is None, "apply the plan in flight first"
        step = StepBuilder(self.limits.step_tokens)
        self._plan_running(step)
        self._admit(step)
        if not step.has_work:
            assert not self._requests, "a request is left behind"
            return None
        self._step += 1
        self._in_flight = step.build(self._step, self._rows.report_freed())
        return self._in_flight

    def apply(self, result: StepResult) -> StepOutcome:
        """Take in what a step computed: new tokens, ended requests, blocks that may be hit from now on."""
        plan = self._in_flight
        assert plan is not None, "no plan is in flight"
        assert plan.step == result.step, (plan.step, result.step)
        self._in_flight = None
        now_ns = self._clock.now_ns()
        outcome = StepOutcome()
        drawn = iter(result.sampled)
        for work in plan.work:
            draw = next(drawn) if work.samples else None
            request = self._rows[work.row]
            if request.status is not _RUNNING:
                continue  # Aborted in flight.
            request.num_computed = computed = work.num_computed + work.num_tokens
            self._manager.publish_computed(request.table, request.tokens, computed)
            if draw is not None:
                assert draw.row == work.row, (draw.row, work.row)
                outcome.outputs.append(self._append(request, draw, now_ns))
        assert next(drawn, None) is None, "more was sampled than was asked for"
        self._release_condemned()
        return outcome

    @property
    def has_work(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self._requests)

    def live_requests(self) -> tuple[RequestId, ...]:
        """Every request that has not ended, oldest submission first."""
        return tuple(self._requests)

    def statistics(self) -> SchedulerStatistics:
        """Gauges and counters, O(1)."""
        blocks = self._manager.statistics()
        return SchedulerStatistics(
            step=self._step,
            running=len(self._running),
            waiting=len(self._queue),
            blocks_total=blocks.total,
            blocks_used=blocks.used,
            blocks_cached=blocks.cached,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            generated_tokens=self._generated_tokens,
            preemptions=self._preemptions,
        )

    def check_invariants(self) -> None:
        """Assert what must hold between any two calls. O(requests + blocks)."""
        holders = [*self._running, *self._condemned]
        self._manager.check_invariants([request.table for request in holders])
        self._rows.check_invariants(holders)
        assert self._in_flight is not None or not self._condemned, "condemned without a step in flight"
        orders = [request.order for request in self._running]
        assert orders == sorted(set(orders)), "running requests are out of order"
        assert len(self._running) + len(self._queue) == len(self._requests), "a request is lost"
        for request in self._requests.values():
            running = request.status is _RUNNING
            assert running == (request.row >= 0), f"{request.request_id}: row and status disagree"
            assert running or not request.num_computed, f"{request.request_id} has KV but does not run"
            assert 0 <= request.num_computed < len(request.tokens) < request.num_tokens_max
            assert request.num_computed <= len(request.table.blocks) * BLOCK_TOKENS

    # --- making a plan ----------------------------------------------------------------------------

    def _plan_running(self, step: StepBuilder) -> None:
        """One token for every row that decodes, then chunks for running prompts while the budget lasts."""
        prompts: list[Request] = []
        for request in self._running.copy():  # Victims leave the list meanwhile.
            if len(request.tokens) - request.num_computed > 1:
                prompts.append(request)
            elif request.status is _RUNNING:
                self._extend_or_preempt(request, 1, step)
        for request in prompts:
            if step.budget and request.status is _RUNNING:
                self._extend_or_preempt(request, min(request.num_pending, step.budget), step)

    def _extend_or_preempt(self, request: Request, num_tokens: int, step: StepBuilder) -> None:
        """Plan `num_tokens` of a running request; if blocks run out, preempt from the last in order.

        The first in order is preempted only by itself, which `submit` made impossible (alone it fits): so
        some request always advances, and ends.
        """
        end = request.num_computed + num_tokens
        while (blocks := self._manager.extend(request.table, end)) is None:
            victim = self._running[-1]
            step.drop(victim)
            self._preempt(victim)
            if victim is request:
                return
        step.add(request, num_tokens, blocks)

    def _preempt(self, victim: Request) -> None:
        """Take everything from a running request; its full blocks stay cached, so resuming is a prefix hit.

        It is not admitted again in the same step: it needs all that it gave up, and somebody took of that.
        """
        self._running.pop()
        self._release(victim)
        victim.move_to(Status.PREEMPTED)
        victim.num_computed = 0
        victim.num_preemptions += 1
        self._preemptions += 1
        self._queue.requeue(victim)

    def _admit(self, step: StepBuilder) -> None:
        """Start waiting requests while there is budget, a row, and room for the head of the queue.

        The head is never skipped: short prompts would starve long ones.
        """
        reserved = -1
        while step.budget and len(self._running) < self.limits.max_running:
            head = self._queue.peek()
            if head is None or self._blocked == (head.request_id, self._releases):
                return
            if reserved < 0:
                reserved = sum(map(_blocks_owed, self._running))
            if not self._try_start(head, step, reserved):
                return
            reserved += _blocks_owed(head)

    def _try_start(self, request: Request, step: StepBuilder, reserved: int) -> bool:
        """Start the head of the queue if all its known tokens fit beside `reserved` blocks for those that run.

        Without that reserve a new prompt would take the blocks that decoding rows need a few steps later,
        and be preempted for them at once. A refusal is remembered until blocks are released: looking a long
        prompt up is not free.
        """
        hits = self._manager.match_prefix(request.table, request.tokens)
        missing = blocks_for(len(request.tokens)) - len(hits)
        if missing + reserved > self._manager.num_available_after(hits):
            assert self._running, "a lone request must fit"
            self._blocked = (request.request_id, self._releases)
            return False
        head = self._queue.pop()
        assert head is request
        self._start(request, hits)
        num_tokens = min(request.num_pending, step.budget)
        blocks = self._manager.extend(request.table, request.num_computed + num_tokens)
        assert blocks is not None  # There was room for more than that.
        step.add_new(request, num_tokens, hits + blocks)
        return True

    def _start(self, request: Request, hits: tuple[int, ...]) -> None:
        """Give the request a row and its cached prefix."""
        self._manager.adopt(request.table, hits)
        request.num_computed = len(hits) * BLOCK_TOKENS
        request.move_to(_RUNNING)
        self._rows.assign(request)
        insort(self._running, request, key=_order)
        if request.started_ns is None:
            request.started_ns = self._clock.now_ns()
            request.num_cached = request.num_computed
            self._prompt_tokens += request.num_prompt
            self._cached_tokens += request.num_cached

    # --- taking a result in -----------------------------------------------------------------------

    def _append(self, request: Request, draw: Sampled, now_ns: int) -> RequestOutput:
        """One more token for a request: it goes on, or it ends here."""
        if draw.error is not None:
            return self._finish(request, FinishReason.ERROR, now_ns, error=draw.error)
        token = draw.token_id
        request.tokens.append(token)
        self._generated_tokens += 1
        if request.first_token_ns is None:
            request.first_token_ns = now_ns
        if token in request.stop_token_ids:
            output = self._finish(request, FinishReason.STOP, now_ns)
            output.stop_token_id = token
            return output
        if len(request.tokens) < request.num_tokens_max:
            return RequestOutput(request.request_id, (token,), draw.logprob)
        output = self._finish(request, FinishReason.LENGTH, now_ns)
        output.token_ids, output.logprob = (token,), draw.logprob
        return output

    def _finish(
        self, request: Request, reason: FinishReason, now_ns: int, *, error: str | None = None
    ) -> RequestOutput:
        """End a request for good. What it held is free now, or once the step in flight is applied."""
        del self._requests[request.request_id]
        was_running = request.status is _RUNNING
        request.move_to(Status.FINISHED)
        if was_running:
            index = bisect_left(self._running, request.order, key=_order)
            ended = self._running.pop(index)
            assert ended is request
            if self._in_flight is None:
                self._release(request, bad=error is not None)
            else:
                self._condemned.append(request)
        usage = request.usage(now_ns)
        return RequestOutput(request.request_id, (), finish=reason, error=error, usage=usage)

    def _release(self, request: Request, *, bad: bool = False) -> None:
        """Give back a request's row and blocks. No step may be using them."""
        self._manager.release(request.table, bad=bad)
        self._rows.release(request)
        self._releases += 1

    def _release_condemned(self) -> None:
        for request in self._condemned:
            self._release(request)
        self._condemned.clear()

    # --- checking what is submitted ---------------------------------------------------------------

    def _num_tokens_max(self, request: Request) -> int:
        return min(request.num_prompt + request.sampling.max_tokens, self.limits.max_model_len)

    def _check_fits(self, request: Request) -> None:
        """Refuse what can never run, before anything is done for it."""
        if request.request_id in self._requests:
            raise InvalidRequest(f"request {request.request_id} is already running", param="request_id")
        if not request.num_prompt:
            raise InvalidRequest("the prompt is empty", param="prompt")
        if request.sampling.max_tokens < 1:
            raise InvalidRequest("max_tokens must be at least 1", param="max_tokens")
        if request.num_prompt >= self.limits.max_model_len:
            raise ContextTooLong(
                f"the prompt has {request.num_prompt} tokens; with at least one token of answer the model takes "
                f"{self.limits.max_model_len}",
                param="prompt",
            )
        num_tokens = self._num_tokens_max(request) - 1  # The last token is drawn but never computed.
        num_blocks = self._manager.pool.num_blocks
        if blocks_for(num_tokens) > num_blocks:
            raise ContextTooLong(
                f"prompt and answer of up to {num_tokens + 1} tokens do not fit the KV cache, which holds "
                f"{num_blocks * BLOCK_TOKENS}",
                param="prompt" if blocks_for(request.num_prompt) > num_blocks else "max_tokens",
            )


def _order(request: Request) -> tuple[int, int, int]:
    return request.order


def _blocks_owed(request: Request) -> int:
    """Blocks that a running request will soon ask for: for the rest of its known tokens, and one to go on."""
    return blocks_for(len(request.tokens)) - len(request.table.blocks) + 1
