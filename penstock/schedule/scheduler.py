"""Decides what the engine computes next: one token budget per step, no prefill phase and no decode phase.

A request owes its known but uncomputed tokens, and every step pays a part of the debt: one token while
it decodes, a chunk of the prompt before that, the whole history after a preemption, less what the prefix
cache knows (the rule is vLLM v1's; the idea of iteration-level batching is Orca's, OSDI 2022).

    submit -> waiting -- schedule --> running -- apply: EOS, stop token, length, error --> finished
                 ^  |                   ^ |
                 |  +-- loading --------+ |     a part of its prefix is in host memory: wait for the copies
                 |         |              |
                 +---- preempted <--------+     out of blocks, or another tenant gets the row (shares.py):
                                                give all up, resume as a prefix hit

Up to two plans are in flight, so that step N+1 is ready when N ends. N+1 is then made before N's tokens are
known: a row that samples in N is planned one more token, which the runner feeds from what it drew itself.
Lengths are known ahead, so no request is planned past its last token. A stop token is found one step late:
what was planned behind it is computed and dropped, and never reaches an output, a count or the prefix cache.

    schedule N    N in flight                     num_planned: computed when all plans are over
    schedule N+1  N, N+1 in flight                num_computed: computed by plans that were applied
    apply N       N's tokens known; ended requests free rows and blocks; the blocks wait for N+1
    schedule N+2  ...

Requests are only preempted at rest, when nothing is in flight (see `Planner`). `schedule` gives None for a
moment when that is needed.

The scheduler knows numbers of tokens and of blocks. Tensors, text, sockets and threads it does not know.
"""

from collections import deque
from collections.abc import Sequence

from penstock.clock import Clock
from penstock.errors import InvalidRequest
from penstock.kv.cache.manager import KVManager
from penstock.schedule.batch import Batch, BatchLimits, Counters, SchedulerStatistics, StepCap
from penstock.schedule.draft_times import DraftTimes
from penstock.schedule.fast_forward import DecodeFastForward, Draw, StepTogether
from penstock.schedule.plan import Forced, RequestOutput, Sampled, Scored, StepOutcome, StepPlan, StepResult
from penstock.schedule.planner import Planner
from penstock.schedule.prefill_budget import LatencyTargets, PrefillBudget
from penstock.schedule.queue import WaitingQueue
from penstock.schedule.request import Request, Status
from penstock.schedule.shares import KVQuota
from penstock.schedule.speculation import Speculation
from penstock.schedule.step import FLIGHTS_MAX, Flight, StepBuilder, check_in_flight
from penstock.types import BLOCK_TOKENS, FinishReason, RequestId

_RUNNING = Status.RUNNING


class Scheduler:
    """Owns every live request, the waiting order, the rows and the KV blocks of one engine."""

    def __init__(
        self,
        limits: BatchLimits,
        manager: KVManager,
        clock: Clock,
        queue: WaitingQueue,
        prefill: PrefillBudget | None = None,
        *,
        draft_worth: float | None = None,
    ) -> None:
        """`draft_worth`: the runner takes drafts that are worth so much (`Speculation`); None: it takes
        none.
        """
        assert 0 < limits.max_running <= limits.step_tokens, limits
        self.limits = limits
        self._prefill = prefill or PrefillBudget(LatencyTargets())
        self._manager, self._clock, self._queue = manager, clock, queue
        self._requests: dict[RequestId, Request] = {}  # Every one that has not ended.
        self._batch = Batch(manager, limits.max_running)
        self._counters = Counters()
        self._quota = KVQuota(manager.pool, limits.kv_quota_fraction)
        self._cap = StepCap(limits.step_tokens)
        self._planner = Planner(
            limits, self._prefill, clock, queue, self._batch, self._counters, self._quota, self._cap
        )
        if draft_worth is not None:
            self._prefill.draft_times = DraftTimes()
            self._planner.speculation = Speculation(
                self._prefill, draft_worth, self._planner.reserve.estimate
            )
        self._fast_forward = DecodeFastForward(self._batch, self._planner, self._prefill, self._counters)
        self._draw: Draw | None = None
        self._builder: type[StepBuilder] = StepBuilder
        self._flights: deque[Flight] = deque()  # Oldest first, at most FLIGHTS_MAX.
        self._step = 0
        self._submitted = 0

    # --- what callers do --------------------------------------------------------------------------

    def submit(self, request: Request, *, arrived_ns: int | None = None) -> None:
        """Queue a new request. It ends exactly once: in an `apply` outcome, or by `abort`.

        `arrived_ns` is when it came in, if that was before now (while a step ran): queueing counts from
        there.

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
        request.table = self._manager.open(
            request.salt,
            adapter=request.adapter_digest,
            adapter_name=request.adapter_name,
            public_tokens=request.public_tokens,
        )
        self._planner.charge_running()
        self._queue.push(request)
        self._planner.wait_for_row(request)
        self._requests[request.request_id] = request

    def abort(self, request_id: RequestId) -> RequestOutput | None:
        """End a request wherever it stands; its last output, or None if it is not (any longer) known.

        Its blocks are free at once, or when the steps in flight that use them have been applied.
        """
        request = self._requests.get(request_id)
        if request is None:
            return None
        if not request.in_batch and not self._quota.remove(request):
            self._queue.remove(request)
        return self._finish(request, FinishReason.ABORT, self._clock.now_ns())

    def schedule(self) -> StepPlan | None:
        """Choose the next step's work; None when there is nothing to do, or nothing before the next `apply`.

        Rows that decode come first, then running prompts, then the head of the queue. May be called while one
        plan is in flight. With nothing to compute, but blocks on their way to or from host memory, the plan
        is to wait for those; that is only planned at rest, for a step in flight brings news of them too.
        """
        assert len(self._flights) < FLIGHTS_MAX, "apply a plan in flight first"
        if self._flights and self._planner.wants_rest:
            return None
        host = self._manager.host
        host.tick(self._clock.now_ns())
        step = self._builder(self._cap.tokens, self.limits.scored_tokens)
        self._planner.plan(step, at_rest=not self._flights)
        if step.is_empty and self._flights:
            return None
        copies = self._manager.take_copies()
        if step.is_empty and not host.busy:
            assert not self.has_work, "a request is left behind"
            return None
        self._step += 1
        flight = step.build(
            self._step, self._batch.rows.report_freed(), self._manager.pool.begin_epoch(), copies
        )
        flight.count_in()
        self._flights.append(flight)
        return flight.plan

    @property
    def oldest(self) -> Flight:
        """The step that `apply` takes next."""
        assert self._flights, "no plan is in flight"
        return self._flights[0]

    def count_drafts(self, result: StepResult) -> None:
        """Before `apply`, and before the step is metered: take in for which drafts of the oldest step there
        was a guess.
        """
        self._flights[0].count_drafts(result.sampled)

    def apply(self, result: StepResult) -> StepOutcome:
        """Take in what the oldest step in flight computed: tokens, ends, blocks that may be hit from now
        on.
        """
        assert self._flights, "no plan is in flight"
        flight = self._flights.popleft()
        assert flight.plan.step == result.step, (flight.plan.step, result.step)
        flight.count_drafts(result.sampled)
        reusable = self._manager.pool.end_epoch(flight.epoch)
        self._manager.finish_copies(result.copied)
        self._batch.releases += bool(reusable or result.copied)  # Blocks that they held may be free now.
        outcome, now_ns = StepOutcome(), self._clock.now_ns()
        if flight.is_void:
            return outcome
        if result.out_of_memory is not None:
            self._out_of_memory(flight, result.out_of_memory, outcome, now_ns)
            return outcome
        self._cap.step_fitted()
        beside = flight.beside
        if flight.plan.work:
            self._prefill.observe(flight.plan, flight.load, now_ns, result.drafting, len(beside))
        num_decoding, outputs = flight.num_decoding, outcome.outputs
        if beside and self._draw is not None:
            self._fast_forward.take(beside, now_ns, self._draw, self._ended_by, outputs)
        self._take_decoded(flight, result.sampled[:num_decoding], outputs, now_ns)
        drawn, scored = iter(result.sampled[num_decoding:]), iter(result.scored)
        others = zip(flight.requests[num_decoding:], flight.plan.work[num_decoding:], strict=True)
        for request, work in others:
            draw = scores = None
            if work.samples:
                draw = next(drawn)
                assert draw.row == work.row, (draw, work.row)
            if work.scores:
                scores = next(scored)
                assert scores.row == work.row, (scores, work.row)
            if request.status is not _RUNNING:
                continue  # It ended while this was in flight: a stop one step before, an error, an abort.
            num_tokens = work.num_tokens
            request.num_computed = computed = work.num_computed + num_tokens
            request.num_steps += 1
            if num_tokens > 1 or computed == request.num_prompt:  # Those of answers: see `Batch.release`.
                self._manager.publish_computed(request.table, request.tokens, computed)
            if scores is not None:
                outputs.append(self._score(request, scores, work.num_computed, now_ns))
            if draw is not None and request.take_draw() and request.status is _RUNNING:
                outputs.append(self._append(request, draw, now_ns))
        assert next(drawn, None) is None, "more was sampled than was asked for"
        assert next(scored, None) is None, "more was scored than was asked for"
        return outcome

    def decode_together(self, draw: Draw | None) -> None:
        """On virtual time: list no rows that decode beside prompts, `draw` gives their tokens. None: list."""
        assert draw is None or self._planner.speculation is None, "drafts are per row"
        self._draw, self._builder = draw, StepBuilder if draw is None else StepTogether
        for flight in self._flights if draw is None else ():
            flight.list_beside(is_counted_in=True)

    def fast_forward_max(self, limit: int) -> int:
        """How many of the next steps, up to `limit`, only decode the rows that run, so that `fast_forward`
        may do them; see fast_forward.py.
        """
        return 0 if self._flights else self._fast_forward.steps_max(limit)

    def fast_forward(self, times_ns: Sequence[int], draw: Draw) -> StepOutcome:
        """Do steps as `schedule` and `apply` would, each planned at one of `times_ns` and over at the next.

        `draw` gives the tokens; only the last of a request may end its answer. No more steps than
        `fast_forward_max` said. The outcome has those that ended; now must be the last of the times.
        """
        assert not self._flights, "apply a plan in flight first"
        ended = self._fast_forward.over(self._step, times_ns, draw)
        self._step += len(times_ns) - 1
        return StepOutcome([self._ended_by(each, each.tokens[-1], times_ns[-1]) for each in ended])

    @property
    def running(self) -> Sequence[Request]:
        """Requests that have a row, in their order. To read."""
        return self._batch.running

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
        """When to call `schedule` although no request has come: blocks have been idle for long.

        None for never.
        """
        return self._manager.host.due_ns

    @property
    def num_steps(self) -> int:
        """Steps that were planned since the start."""
        return self._step

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
            drafted_tokens=self._counters.drafted_tokens,
            accepted_tokens=self._counters.accepted_tokens,
            preemptions=self._counters.preemptions,
            yields=self._counters.yields,
            rows_max=self._planner.row_bound.rows_max,
            host=self._manager.host.statistics(),
            sums=self._prefill.sums,
        )

    @property
    def rows_max(self) -> int:
        """See `SchedulerStatistics`."""
        return self._planner.row_bound.rows_max

    def check_invariants(self) -> None:
        """Assert what must hold between any two calls. O(requests + blocks)."""
        self._manager.check_invariants([request.table for request in self._batch.running])
        self._batch.rows.check_invariants(self._batch.running)
        assert len(self._flights) <= FLIGHTS_MAX
        orders = [request.order for request in self._batch.running]
        assert orders == sorted(set(orders)), "running requests are out of order"
        waiting = len(self._queue) + len(self._quota)
        assert len(self._batch.running) + waiting == len(self._requests), "a request is lost"
        self._batch.check_invariants()
        for request in self._requests.values():
            in_batch = request.in_batch
            assert in_batch == (request.row >= 0), f"{request.request_id}: row and status disagree"
            assert in_batch or not request.num_computed, f"{request.request_id} has KV but does not run"
            waits = request.table.awaits or request.table.broken
            assert not waits or request.status is Status.LOADING, (
                f"{request.request_id} does not wait for its KV"
            )
            assert 0 <= request.num_computed < len(request.tokens) < request.num_tokens_max
            assert request.num_planned <= len(request.table.blocks) * BLOCK_TOKENS
            check_in_flight(request, self._flights)

    # --- taking a result in -----------------------------------------------------------------------

    def _take_decoded(
        self, flight: Flight, drawn: Sequence[Sampled], outputs: list[RequestOutput], now_ns: int
    ) -> None:
        """One token more for every row that decoded: most of what there is to take in, so the plain case is
        all in here.
        """
        rows = flight.requests[: flight.num_decoding]
        num_plain = 0
        for request, work, draw in zip(rows, flight.plan.work, drawn, strict=False):
            assert draw.row == work.row, (draw, work.row)
            if request.status is not _RUNNING:
                continue  # As in `apply`.
            if work.drafts:
                self._take_drafted(request, draw, outputs, now_ns)
                continue
            request.num_computed += 1
            request.num_steps += 1
            if request.num_void:
                request.take_draw()
                continue
            request.num_drawing -= 1  # `take_draw`: a call less for each token.
            assert request.num_drawing >= 0, f"{request.request_id}: a draw that was not planned"
            token, tokens = draw.token_id, request.tokens
            if (
                request.first_token_ns is None
                or draw.error is not None
                or draw.forced is not None
                or len(tokens) + 1 >= request.num_tokens_max
                or token in request.stop_token_ids
            ):
                if request.num_computed == request.num_prompt:  # Blocks of answers wait: see `Batch.release`.
                    self._manager.publish_computed(request.table, tokens, request.num_computed)
                outputs.append(self._append(request, draw, now_ns))
                continue
            tokens.append(token)
            num_plain += 1
            outputs.append(RequestOutput(request.request_id, (token,), draw.logprob))
        assert len(drawn) == len(rows), "less was sampled than was asked for"
        self._counters.generated_tokens += num_plain

    def _take_drafted(
        self, request: Request, draw: Sampled, outputs: list[RequestOutput], now_ns: int
    ) -> None:
        """A row's next token, and those behind it that were guessed right: as steps one after the other would
        have given them.
        """
        counted = request.take_draw()
        assert counted, f"{request.request_id}: drafts behind a token that does not count"
        request.num_speculated = 0
        request.num_steps += 1
        self._planner.learn_drafts(request, draw.drafted, len(draw.follows))
        if draw.drafted:
            request.num_drafted += draw.drafted
            self._counters.drafted_tokens += draw.drafted
        reported: RequestOutput | None = None
        for each in (draw, *draw.follows):
            request.num_computed += 1  # The token that this one was drawn behind.
            if each is not draw:
                request.num_accepted += 1
                self._counters.accepted_tokens += 1
            output = self._append(request, each, now_ns)
            if reported is None or request.sampling.logprobs is not None:
                reported = output
                outputs.append(output)
            else:
                reported.take(output)
            if request.status is not _RUNNING:
                return
        request.num_planned = request.num_computed

    def _out_of_memory(self, flight: Flight, why: str, outcome: StepOutcome, now_ns: int) -> None:
        """A step did not fit: forget it and the plans behind it, and continue in smaller steps, from rest.

        A request whose single token does not fit alone cannot be helped: it ends, and only it.
        """
        for later in self._flights:
            later.is_void = True
        for request in self._batch.running:
            request.restart_from(request.num_computed)
        self._planner.wants_rest = True
        if not self._cap.step_failed(flight.plan.num_tokens) and flight.requests[0].status is _RUNNING:
            words = f"the engine is out of memory: {why}"
            outcome.outputs.append(self._finish(flight.requests[0], FinishReason.ERROR, now_ns, error=words))

    def _score(self, request: Request, scores: Scored, first: int, now_ns: int) -> RequestOutput:
        """Log-probabilities of prompt tokens that follow those from position `first` on."""
        if scores.error is not None:
            return self._finish(request, FinishReason.ERROR, now_ns, error=scores.error)
        added = request.take_scores(first, scores.logprobs)
        return RequestOutput(request.request_id, (), prompt_logprobs=added)

    def _append(self, request: Request, draw: Sampled, now_ns: int) -> RequestOutput:
        """One more token for a request: it continues, or it ends here."""
        if draw.error is not None:
            return self._finish(request, FinishReason.ERROR, now_ns, error=draw.error)
        if request.pools:
            assert draw.vector, f"{request.request_id}: its vector is what comes in the draw's place"
            assert not request.num_generated, "what pools generates nothing"
            request.first_token_ns = now_ns
            output = self._finish(request, FinishReason.STOP, now_ns)
            output.vector = draw.vector
            return output
        token, tokens = draw.token_id, request.tokens
        tokens.append(token)
        self._counters.generated_tokens += 1
        if request.first_token_ns is None:
            request.first_token_ns = now_ns
        if len(tokens) >= request.num_tokens_max or token in request.stop_token_ids:
            return self._ended_by(request, token, now_ns, draw)
        output = RequestOutput(request.request_id, (token,), draw.logprob)
        if draw.forced is not None:
            self._follow(request, draw.forced, output, now_ns)
        return output

    def _follow(self, request: Request, forced: Forced, output: RequestOutput, now_ns: int) -> None:
        """The tokens that the grammar forces behind a token: more tokens, without a draw, or the end."""
        room = request.num_tokens_max - len(request.tokens)
        assert room > 0, f"{request.request_id} ended with its last token"
        assert forced.token_ids or forced.complete, "what forces nothing is not told"
        added = forced.token_ids[:room]
        stops = [i for i, token in enumerate(added) if token in request.stop_token_ids]
        if stops:
            added = added[: stops[0] + 1]
        if added:
            request.void_draws()
            request.tokens.extend(added)
            output.token_ids += added[:-1] if stops else added
            self._counters.generated_tokens += len(added)
        if stops:
            self._end(request, FinishReason.STOP, output, now_ns)
            output.stop_token_id = added[-1]
        elif forced.complete and added == forced.token_ids:
            self._end(request, FinishReason.STOP, output, now_ns)
        elif len(added) == room:
            self._end(request, FinishReason.LENGTH, output, now_ns)

    def _end(self, request: Request, reason: FinishReason, output: RequestOutput, now_ns: int) -> None:
        """End a request behind the tokens of `output`."""
        last = self._finish(request, reason, now_ns)
        output.finish, output.usage = last.finish, last.usage

    def _ended_by(
        self, request: Request, token: int, now_ns: int, draw: Sampled | None = None
    ) -> RequestOutput:
        """The end of a request by its last token, which stops it, fills it up, or completes its grammar."""
        if token in request.stop_token_ids:
            output = self._finish(request, FinishReason.STOP, now_ns)
            output.stop_token_id = token
            return output
        forced = None if draw is None else draw.forced
        complete = forced is not None and forced.complete and not forced.token_ids
        output = self._finish(request, FinishReason.STOP if complete else FinishReason.LENGTH, now_ns)
        output.token_ids, output.logprob = (token,), None if draw is None else draw.logprob
        return output

    def _finish(
        self, request: Request, reason: FinishReason, now_ns: int, *, error: str | None = None
    ) -> RequestOutput:
        """End a request for good. Its blocks are free now, or once no step in flight uses them."""
        del self._requests[request.request_id]
        was_in_batch = request.in_batch
        request.move_to(Status.FINISHED)
        self._planner.reserve.estimate.learn(request)
        self._planner.charge_generated(request)
        self._planner.forget(request)
        if was_in_batch:
            self._batch.leave(request)
            self._batch.release(request, bad=error is not None)
        usage = request.usage(now_ns)
        return RequestOutput(request.request_id, (), finish=reason, error=error, usage=usage)
