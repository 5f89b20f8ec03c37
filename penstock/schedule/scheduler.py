"""Decides what the engine computes next: one token budget per step, no prefill phase and no decode phase.

A request owes its known but uncomputed tokens, and every step pays a part of the debt: one token while
it decodes, a chunk of the prompt before that, the whole history after a preemption, less what the prefix
cache knows (the rule is vLLM v1's; the idea of iteration-level batching is Orca's, OSDI 2022).

    submit -> waiting -- schedule --> running -- apply: EOS, stop token, length, error --> finished
                 ^  |                   ^ |
                 |  +-- loading --------+ |     a part of its prefix is in host memory: wait for the copies
                 |         |              |
                 +---- preempted <--------+     out of blocks: give all up, resume later as a prefix hit

The scheduler knows numbers of tokens and of blocks. Tensors, text, sockets and threads it does not know.

One plan is in flight at most: `schedule` and `apply` alternate. Planning step N+1 before N's tokens are
known will relax that: `schedule` then plans on assumed lengths, and what is freed (`_release`) waits for
the step that last read it. Both already pass through one place each, so callers will not change.
"""

from penstock.clock import Clock
from penstock.errors import InvalidRequest
from penstock.kv.manager import KVManager
from penstock.schedule.batch import Batch
from penstock.schedule.limits import Limits
from penstock.schedule.plan import RequestOutput, Sampled, Scored, StepOutcome, StepPlan, StepResult
from penstock.schedule.planner import Planner
from penstock.schedule.prefill_budget import LatencyTargets, PrefillBudget
from penstock.schedule.queue import WaitingQueue
from penstock.schedule.quota import KVQuota
from penstock.schedule.request import Request, Status
from penstock.schedule.statistics import Counters, SchedulerStatistics
from penstock.schedule.step import StepBuilder
from penstock.types import BLOCK_TOKENS, FinishReason, RequestId

_RUNNING = Status.RUNNING


class Scheduler:
    """Owns every live request, the waiting order, the rows and the KV blocks of one engine."""

    def __init__(
        self,
        limits: Limits,
        manager: KVManager,
        clock: Clock,
        queue: WaitingQueue,
        prefill: PrefillBudget | None = None,
    ) -> None:
        assert 0 < limits.max_running <= limits.step_tokens, limits
        self.limits = limits
        self._prefill = prefill or PrefillBudget(LatencyTargets())
        self._manager, self._clock, self._queue = manager, clock, queue
        self._requests: dict[RequestId, Request] = {}  # Every one that has not ended.
        self._batch = Batch(manager, limits.max_running)
        self._counters = Counters()
        self._quota = KVQuota(manager.pool, limits.kv_quota_fraction)
        self._planner = Planner(limits, self._prefill, clock, queue, self._batch, self._counters, self._quota)
        self._in_flight: StepPlan | None = None
        self._condemned: list[Request] = []  # Aborted while the step in flight may still write their blocks.
        self._step = 0
        self._submitted = 0

    # --- what callers do --------------------------------------------------------------------------

    def submit(self, request: Request, *, arrived_ns: int | None = None) -> None:
        """Queue a new request. It ends exactly once: in an `apply` outcome, or by `abort`.

        `arrived_ns` is when it came in, if that was before now (while a step ran): queueing counts from there.

        Raises:
            InvalidRequest: an empty prompt, no token to generate, or an id that is already in use.
            ContextTooLong: it does not fit the model's context, or not even an empty KV cache.
            KVQuotaExceeded: it does not fit what its tenant may hold of the KV cache.
            Overloaded: too many requests wait.
        """
        if request.request_id in self._requests:
            raise InvalidRequest(f"request {request.request_id} is already running", param="request_id")
        self.limits.check_fits(request, self._manager.pool.num_blocks)
        request.num_tokens_max = self.limits.num_tokens_max(request)
        self._quota.check_fits(request, request.num_tokens_max - 1)  # The last is drawn but never computed.
        request.arrival_ns = self._clock.now_ns() if arrived_ns is None else arrived_ns
        self._submitted += 1
        request.order = (request.priority, request.arrival_ns, self._submitted)
        request.table = self._manager.open(request.salt, public_tokens=request.public_tokens)
        self._planner.charge_running()
        self._queue.push(request)
        self._requests[request.request_id] = request

    def abort(self, request_id: RequestId) -> RequestOutput | None:
        """End a request wherever it stands; its last output, or None if it is not (any longer) known.

        Its blocks are free at once, or when the step in flight has been applied.
        """
        request = self._requests.get(request_id)
        if request is None:
            return None
        if not request.in_batch and not self._quota.remove(request):
            self._queue.remove(request)
        return self._finish(request, FinishReason.ABORT, self._clock.now_ns())

    def schedule(self) -> StepPlan | None:
        """Choose the next step's work; None when there is nothing to do.

        Rows that decode come first and are never skipped, then running prompts, then the head of the queue. With
        nothing to compute, but blocks on their way to or from host memory, the plan is to wait for those.
        """
        assert self._in_flight is None, "apply the plan in flight first"
        self._manager.host.tick(self._clock.now_ns())
        step = StepBuilder(self.limits.step_tokens, self.limits.scored_tokens)
        self._planner.plan(step)
        copies = self._manager.take_copies()
        if not step.has_work and not self._manager.host.busy:
            assert not self._requests, "a request is left behind"
            return None
        self._step += 1
        self._in_flight = step.build(self._step, self._batch.rows.report_freed(), copies)
        return self._in_flight

    def apply(self, result: StepResult) -> StepOutcome:
        """Take in what a step computed: new tokens, ended requests, blocks that may be hit from now on."""
        plan = self._in_flight
        assert plan is not None, "no plan is in flight"
        assert plan.step == result.step, (plan.step, result.step)
        self._in_flight = None
        now_ns = self._clock.now_ns()
        if plan.work:
            self._prefill.observe(plan, now_ns)
        outcome = StepOutcome()
        if result.copied:
            self._manager.finish_copies(result.copied)
            self._batch.releases += 1  # Blocks that copies held may be free now.
        drawn, scored = iter(result.sampled), iter(result.scored)
        for work in plan.work:
            draw = next(drawn) if work.samples else None
            scores = next(scored) if work.scores else None
            request = self._batch.rows[work.row]
            if request.status is not _RUNNING:
                continue  # Aborted in flight.
            request.num_computed = computed = work.num_computed + work.num_tokens
            request.num_steps += 1
            self._manager.publish_computed(request.table, request.tokens, computed)
            if scores is not None:
                assert scores.row == work.row, (scores.row, work.row)
                outcome.outputs.append(self._score(request, scores, work.num_computed, now_ns))
            if draw is not None and request.status is _RUNNING:
                assert draw.row == work.row, (draw.row, work.row)
                outcome.outputs.append(self._append(request, draw, now_ns))
        assert next(drawn, None) is None, "more was sampled than was asked for"
        assert next(scored, None) is None, "more was scored than was asked for"
        self._release_condemned()
        return outcome

    @property
    def has_work(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self._requests)

    @property
    def kv(self) -> KVManager:
        """The blocks that it gives out."""
        return self._manager

    @property
    def due_ns(self) -> int | None:
        """When to call `schedule` although no request has come: blocks have been idle for long. None for never."""
        return self._manager.host.due_ns

    def live_requests(self) -> tuple[RequestId, ...]:
        """Every request that has not ended, oldest submission first."""
        return tuple(self._requests)

    def statistics(self) -> SchedulerStatistics:
        """Gauges and counters, O(1)."""
        blocks = self._manager.statistics()
        return SchedulerStatistics(
            step=self._step,
            running=len(self._batch.running),
            waiting=len(self._queue) + len(self._quota),
            blocks_total=blocks.total,
            blocks_used=blocks.used,
            blocks_cached=blocks.cached,
            prompt_tokens=self._counters.prompt_tokens,
            cached_tokens=self._counters.cached_tokens,
            host_cached_tokens=self._counters.host_cached_tokens,
            generated_tokens=self._counters.generated_tokens,
            preemptions=self._counters.preemptions,
            host=self._manager.host.statistics(),
        )

    def check_invariants(self) -> None:
        """Assert what must hold between any two calls. O(requests + blocks)."""
        holders = [*self._batch.running, *self._condemned]
        self._manager.check_invariants([request.table for request in holders])
        self._batch.rows.check_invariants(holders)
        assert self._in_flight is not None or not self._condemned, "condemned without a step in flight"
        orders = [request.order for request in self._batch.running]
        assert orders == sorted(set(orders)), "running requests are out of order"
        waiting = len(self._queue) + len(self._quota)
        assert len(self._batch.running) + waiting == len(self._requests), "a request is lost"
        for request in self._requests.values():
            in_batch = request.in_batch
            assert in_batch == (request.row >= 0), f"{request.request_id}: row and status disagree"
            assert in_batch or not request.num_computed, f"{request.request_id} has KV but does not run"
            waits = request.table.awaits or request.table.broken
            assert not waits or request.status is Status.LOADING, (
                f"{request.request_id} does not wait for its KV"
            )
            assert 0 <= request.num_computed < len(request.tokens) < request.num_tokens_max
            assert request.num_computed <= len(request.table.blocks) * BLOCK_TOKENS

    # --- taking a result in -----------------------------------------------------------------------

    def _score(self, request: Request, scores: Scored, first: int, now_ns: int) -> RequestOutput:
        """Log-probabilities of prompt tokens that follow those from position `first` on."""
        if scores.error is not None:
            return self._finish(request, FinishReason.ERROR, now_ns, error=scores.error)
        news = request.take_scores(first, scores.logprobs)
        return RequestOutput(request.request_id, (), prompt_logprobs=news)

    def _append(self, request: Request, draw: Sampled, now_ns: int) -> RequestOutput:
        """One more token for a request: it goes on, or it ends here."""
        if draw.error is not None:
            return self._finish(request, FinishReason.ERROR, now_ns, error=draw.error)
        token = draw.token_id
        request.tokens.append(token)
        self._counters.generated_tokens += 1
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
        was_in_batch = request.in_batch
        request.move_to(Status.FINISHED)
        self._planner.reserve.estimate.learn(request)
        self._planner.charge_generated(request)
        if was_in_batch:
            self._batch.leave(request)
            if self._in_flight is None:
                self._batch.release(request, bad=error is not None)
            else:
                self._condemned.append(request)
        usage = request.usage(now_ns)
        return RequestOutput(request.request_id, (), finish=reason, error=error, usage=usage)

    def _release_condemned(self) -> None:
        for request in self._condemned:
            self._batch.release(request)
        self._condemned.clear()
