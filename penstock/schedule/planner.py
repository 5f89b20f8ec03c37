"""Chooses a step's work: who is computed, how many tokens of whom, and who must give way."""

from penstock.clock import Clock
from penstock.kv.cache.manager import PrefixMatch, blocks_for
from penstock.schedule.batch import Batch, BatchLimits, Counters, StepCap
from penstock.schedule.prefill_budget import PrefillBudget, RowBound
from penstock.schedule.queue import WaitingQueue
from penstock.schedule.request import Request, Status
from penstock.schedule.shares import AdmissionReserve, KVQuota, RowShare, VictimChoice
from penstock.schedule.speculation import MATCHES, Speculation
from penstock.schedule.step import StepBuilder
from penstock.types import BLOCK_TOKENS, RequestId

_RUNNING, _LOADING = Status.RUNNING, Status.LOADING
_NO_BOUND = 1 << 60
FORCED_TOKENS_MAX = 64
"""A row of at most so many tokens that its grammar forced is computed beside the rows that decode, as it is
one of them; more wait as a prompt does."""


class Planner:
    """Moves requests from the queue into the batch and back, and fills steps with their work."""

    def __init__(
        self,
        limits: BatchLimits,
        prefill: PrefillBudget,
        clock: Clock,
        queue: WaitingQueue,
        batch: Batch,
        counters: Counters,
        quota: KVQuota,
        cap: StepCap,
    ) -> None:
        self._limits = limits
        self._manager, self._prefill = batch.manager, prefill
        self._clock, self._queue = clock, queue
        self._batch, self._counters, self._cap = batch, counters, cap
        self._quota, self.reserve = quota, AdmissionReserve()
        self.row_bound = RowBound(prefill, self.reserve.estimate, limits.max_running)
        self._victims = VictimChoice(
            batch.manager.pool, limits.preemptions_max, quota.is_over, queue.served_to, limits.step_tokens
        )
        self._row_share = RowShare(batch, queue)
        self._takers: dict[RequestId, Request] = {}  # Those that wait and may take a row, oldest first.
        self.wants_rest = False
        """A request must give way or yield, but nothing can be taken from others while a step is in
        flight."""
        self._at_rest = True
        self._blocked: tuple[RequestId, int, int] | None = None
        """The head that found no room, after so many releases, at a level of the reserve."""
        self._held: tuple[RequestId, int, int] | None = None
        """The head that would make steps too long, after so many releases, and the plan in which it asks
        again."""
        self._plans = 0
        self.speculation: Speculation | None = None
        """How many tokens of rows that decode are guessed; None: none."""
        self._unparked_at = 0
        """How many releases there were when parked requests were last let back into the queue."""

    def plan(self, step: StepBuilder, *, at_rest: bool) -> None:
        """Fill a step. Rows that decode come first, then running prompts, then the head of the queue.

        `at_rest` says that no step is in flight. Only then may requests be preempted: what they computed is
        published and what they drew is known, so nothing of theirs is lost or on its way. Nothing is admitted
        while blocks are so short that a request had to give way, or will have to.
        """
        step.planned_ns = self._clock.now_ns()
        self._plans += 1
        self._at_rest, self.wants_rest = at_rest, False
        preemptions = self._counters.preemptions
        self._let_parked_back()
        if at_rest:
            self._shrink_batch(step.planned_ns)
        self._share_rows(step)
        if self.wants_rest:
            return
        self._plan_running(step)
        preempted = self._counters.preemptions > preemptions
        self.reserve.step_over(preempted=preempted)
        if not preempted and not self.wants_rest:
            self._admit(step)
        if self.speculation is not None:
            if not self.speculation.rests(step.num_decoding):
                self._add_drafts(step, self.speculation)
            step.reads_states = self.speculation.reads_states
        assert len(self._batch.running) <= self._limits.max_running, "more requests run than may"

    def _shrink_batch(self, now_ns: int) -> None:
        """A step ran out of memory, and not even the rows that decode fit in half of it: fewer must run."""
        while len(self._batch.running) > self._cap.tokens:
            self._preempt(self._batch.running[-1], now_ns)

    def num_decode_only(self) -> int:
        """How many of the next steps, planned at rest, start no request and let none back as long as none
        ends: see `DecodeFastForward`.
        """
        if len(self._quota) or self._cap.is_lowered or self._manager.host.limits.num_slots:
            return 0
        if any(map(self._row_share.may_yield_to, self._takers.values())):
            return 0
        head = self._queue.peek()
        if head is None or len(self._batch.running) >= self._limits.max_running:
            return _NO_BOUND
        if self._held is not None and self._is_held(head):
            return self._held[2] - self._plans - 1
        # While rho decays, its level may fall, and the head may ask again.
        return _NO_BOUND if not self.reserve.rho and self._is_blocked(head) else 0

    def fast_forward(self, num_steps: int) -> None:
        """Apply the effects of planning so many steps, at most `num_decode_only`."""
        assert num_steps > 0, num_steps
        self._plans += num_steps
        self.wants_rest, self._at_rest = False, True
        self._unparked_at = self._batch.releases
        for _ in range(num_steps if self.reserve.rho else 0):
            self.reserve.step_over(preempted=False)

    def charge_running(self) -> None:
        """Count what running requests have generated against their shares: before the order matters, not per
        token.
        """
        drawn = [
            (request, generated)
            for request in self._batch.running
            if (generated := len(request.tokens) - request.num_prompt - request.num_charged)
        ]
        if drawn:
            self._queue.charge_drawn(drawn)
            for request, generated in drawn:
                request.num_charged += generated

    def charge_generated(self, request: Request) -> None:
        """The same for one request."""
        if generated := len(request.tokens) - request.num_prompt - request.num_charged:
            assert generated > 0, f"{request.request_id} was charged for more than it has drawn"
            request.num_charged += generated
            self._queue.charge(request, generated=generated)

    def forget(self, request: Request) -> None:
        """It has ended."""
        self._takers.pop(request.request_id, None)

    def wait_for_row(self, request: Request) -> None:
        """A request is in the queue; if it may take a row, it need not be its head for that."""
        if request.takes_row:
            self._takers[request.request_id] = request

    def _share_rows(self, step: StepBuilder) -> None:
        """Let waiting requests that may take a row have those of tenants with more (`RowShare`).

        A request that yields waits again only afterwards, behind the others that may take one: so rows go
        round. Those without a first token ask first: less is asked of the row that they may take.
        """
        yielded: list[Request] = []
        worst, reserved = _NO_BOUND, -1
        self._row_share.look_again()
        for taker in sorted(self._takers.values(), key=_has_output):
            if self._cap.is_lowered or not self._lacks_rows():
                break
            if taker.priority >= worst:
                continue  # One of its class has none and found none.
            victim = self._row_share.victim(taker)
            if victim is None:
                if taker.fairness_key not in self._batch.rows_by_tenant:
                    worst = taker.priority
                continue
            match = self._manager.match_prefix(taker.table, taker.tokens, taker.num_skippable)
            if self._is_over_quota(taker, match):
                continue
            if reserved < 0:
                reserved = self.reserve.blocks_owed_to(self._batch.running)
            if not self._fits_in_place_of(victim, taker, match, reserved):
                continue
            if not self._at_rest or self._manager.pool.num_draining:
                self.wants_rest = True
                break
            self._swap(victim, taker, step)
            self._row_share.look_again()
            reserved = -1
            yielded.append(victim)
        for request in yielded:
            self._queue.requeue(request)
            self.wait_for_row(request)

    def _lacks_rows(self) -> bool:
        """Whether what waits cannot start beside those that run."""
        head = self._queue.peek()
        is_full = len(self._batch.running) >= self._limits.max_running
        return is_full or (head is not None and (self._is_held(head) or self._is_blocked(head)))

    def _fits_in_place_of(self, victim: Request, taker: Request, match: PrefixMatch, reserved: int) -> bool:
        """Whether the taker's known tokens fit beside those that run, less the victim (`_try_start`).

        `reserved`: the blocks owed to all that run.
        """
        reserved -= self.reserve.blocks_owed(victim)
        missing = blocks_for(len(taker.tokens)) - match.num_present
        freed = self._victims.blocks_freed(victim) - len({*match.blocks} & {*victim.table.blocks})
        return missing + reserved <= self._manager.num_available_after(match) + freed

    def _swap(self, victim: Request, taker: Request, step: StepBuilder) -> None:
        """Give the victim's row to the taker, which is computed with this step's running prompts."""
        assert victim.fairness_key != taker.fairness_key, "no tenant takes from itself"
        victim.num_yields += 1
        victim.takes_row = True
        self._counters.yields += 1
        self._give_up(victim, step.planned_ns)
        if not self._quota.remove(taker):
            self._queue.remove(taker)
        # The victim's blocks may be a part of those that were found.
        self._start(taker, self._manager.match_prefix(taker.table, taker.tokens, taker.num_skippable))
        taker.count_blocks(step.planned_ns, len(taker.table.blocks))
        self._let_back(taker.salt)
        step.enter(taker)

    def _plan_running(self, step: StepBuilder) -> None:
        """One token for every row that decodes, then chunks for running prompts while their share lasts."""
        prompts: list[Request] = []
        forced: list[Request] = []  # Rows that decode, and whose grammar has given them several tokens.
        decoding: list[Request] = []  # Since the last that needed a block: added at once.
        for request in self._batch.running.copy():  # Victims leave the list meanwhile.
            if request.status is _LOADING and not self._end_loading(request, step.planned_ns):
                continue
            planned = request.num_planned
            known = len(request.tokens) + request.num_drawing  # Properties cost too much in here.
            if known >= request.num_tokens_max or request.num_speculated:
                continue  # Its last token is drawn or on its way; or it is not known how many drafts count.
            if known - planned > 1:
                (forced if _is_forced(request, known) else prompts).append(request)
            elif planned % BLOCK_TOKENS:  # There is room behind the token before, in the same block.
                if request.status is _RUNNING:  # Else it gave way to a request before it.
                    decoding.append(request)
            elif request.status is _RUNNING:
                step.add_all_decoding(decoding)  # Before any of them may have to give way.
                decoding.clear()
                self._extend_or_preempt(request, 1, step)
        step.add_all_decoding(decoding)
        for request in forced:
            if self.wants_rest or not step.budget:
                break
            if request.status is _RUNNING:
                self._extend_or_preempt(request, min(request.num_pending, step.budget), step)
        self._open_prompts(step, prompts)
        for request in prompts:
            if self.wants_rest or not step.takes_prompts:
                return
            if request.status is _RUNNING and (num_tokens := step.room(request, request.num_planned)):
                self._extend_or_preempt(request, num_tokens, step)

    def _add_drafts(self, step: StepBuilder, speculation: Speculation) -> None:
        """Let rows that decode have drafts. No request gives way for one: there are blocks for all rows'
        next.
        """
        rows, pool = step.decoding, self._manager.pool
        room = min(step.budget, step.scored_budget)
        for index, wanted in speculation.choose(rows, step.load(), room):
            request = rows[index]
            end, held = request.num_planned + 1 + wanted, len(request.table.blocks)
            blocks: tuple[int, ...] = ()
            if held < blocks_for(end):
                if pool.num_available > len(self._batch.running) + blocks_for(wanted):
                    blocks = self._manager.extend(request.table, end) or ()
                    request.count_blocks(step.planned_ns, len(request.table.blocks))
                end = min(end, len(request.table.blocks) * BLOCK_TOKENS)
            if (num_drafts := end - request.num_planned - 1) > 0:
                step.add_drafts(index, num_drafts, MATCHES[request.draft_level], blocks)

    def learn_drafts(self, request: Request, num_drafted: int, num_right: int) -> None:
        """Of so many drafts of the request, the first so many were right; 0: there was no guess."""
        assert self.speculation is not None, "drafts come from the planner"
        if num_drafted:
            self.speculation.learn(request, num_drafted, num_right)
        else:
            self.speculation.missed(request)

    def _open_prompts(self, step: StepBuilder, prompts: list[Request]) -> None:
        """Settle what prompts may take of the step, beside the rows that decode in it."""
        head = self._queue.peek()
        can_start = head is not None and not self._is_blocked(head) and not self._is_held(head)
        free_rows = self._limits.max_running - len(self._batch.running)
        num_prompts = len(prompts) + can_start * min(len(self._queue), free_rows)
        if num_prompts:
            # All rows in the step so far decode.
            load, rows = step.load(), self._batch.rows
            if self._prefill.targets.by_priority:
                classes = {rows[row].priority for row in step.rows()}
            else:
                classes = {0} if load.num_sequences else set[int]()  # All are alike.
            oldest_ns = min((request.arrival_ns for request in prompts), default=step.planned_ns)
            if can_start and head is not None:
                oldest_ns = min(oldest_ns, head.arrival_ns)
            step.prompts = self._prefill.open(load, classes, num_prompts, step.planned_ns - oldest_ns)

    def _end_loading(self, request: Request, now_ns: int) -> bool:
        """Whether the request's prefix has arrived.

        If a copy failed it starts again, and computes that part.
        """
        if request.table.broken:
            self._send_back(request, now_ns)
            return False
        if request.table.awaits:
            return False
        request.move_to(_RUNNING)
        self._count_start(request)
        return True

    def _extend_or_preempt(self, request: Request, num_tokens: int, step: StepBuilder) -> None:
        """Plan `num_tokens` of a running request; if blocks run out, others must give way, or it itself.

        While a step is in flight or freed blocks are still in use, the request is left out instead, and the
        next plan is made at rest: this happens once per preemption, so the pause costs nothing that counts.
        """
        assert num_tokens > 0, num_tokens
        end = request.num_planned + num_tokens
        while (blocks := self._manager.extend(request.table, end)) is None:
            if not self._at_rest or self._manager.pool.num_draining:
                self.wants_rest = True
                return
            self.charge_running()
            victim = self._victims.choose(self._batch.running)
            step.drop(victim)
            self._preempt(victim, step.planned_ns)
            if victim is request:
                return
        if blocks:
            request.count_blocks(step.planned_ns, len(request.table.blocks))
        if num_tokens == 1 == request.num_pending:
            step.add_decoding(request, blocks)
        else:
            step.add(request, num_tokens, blocks)

    def _preempt(self, victim: Request, now_ns: int) -> None:
        """Take everything from a running request; its full blocks stay cached, so resuming is a prefix hit.

        It is not admitted again in the same step: it needs all blocks that it gave up, and another request
        took some of those.
        """
        assert self._at_rest, "what a step in flight computes or draws would be lost"
        victim.num_preemptions += 1
        self._counters.preemptions += 1
        self._send_back(victim, now_ns, preempted=True)

    def _send_back(self, request: Request, now_ns: int, *, preempted: bool = False) -> None:
        """Out of the batch, into the queue."""
        self._give_up(request, now_ns, preempted=preempted)
        self._queue.requeue(request)
        self.wait_for_row(request)

    def _give_up(self, request: Request, now_ns: int, *, preempted: bool = False) -> None:
        """Out of the batch; its full blocks stay cached."""
        request.count_blocks(now_ns, 0)
        self._batch.leave(request)
        self._batch.release(request, preempted=preempted)
        request.move_to(Status.PREEMPTED)
        assert request.num_computed >= request.num_found, "what was found counts as computed"
        request.num_run_before += request.num_computed - request.num_found
        request.restart_from(0)
        request.num_found = 0

    def _admit(self, step: StepBuilder) -> None:
        """Start waiting requests while there is budget, a row, and room for the head of the queue.

        The head is never skipped: short prompts would starve long ones.
        """
        reserved = -1
        if step.takes_prompts and len(self._queue) > 1:  # The only request is next, whatever was counted.
            self.charge_running()
        max_running = min(self._limits.max_running, self._cap.tokens)
        while step.takes_prompts and len(self._batch.running) < max_running:
            head = self._queue.peek()
            if head is None or self._is_blocked(head) or self._is_held(head):
                return
            if reserved < 0:
                self.row_bound.open(self._batch.running)
                reserved = self.reserve.blocks_owed_to(self._batch.running)
            assert reserved >= 0, reserved
            if not self.row_bound.admits(head):
                self._held = (
                    head.request_id,
                    self._batch.releases,
                    self._plans + self.row_bound.refused_steps,
                )
                return
            match = self._manager.match_prefix(head.table, head.tokens, head.num_skippable)
            if self._is_over_quota(head, match):
                if not self._quota.park(head):
                    return
                self._queue.remove(head)
                continue
            if not self._try_start(head, match, step, reserved):
                return
            self.row_bound.started(head)
            reserved += self.reserve.blocks_owed(head)

    def _try_start(self, request: Request, match: PrefixMatch, step: StepBuilder, reserved: int) -> bool:
        """Start the head of the queue if all its known tokens fit beside `reserved` blocks for those that
        run.

        Without that reserve a new prompt would take the blocks that decoding rows need a few steps later,
        and be preempted for them at once. A refusal is remembered until blocks are released or less is
        reserved: looking a long prompt up is not free.
        """
        missing = blocks_for(len(request.tokens)) - match.num_present
        if missing + reserved > self._manager.num_available_after(match):
            # No request may run, but steps and loads hold blocks to their end that belong to none any more.
            held = self._manager.pool.num_draining or self._manager.host.busy
            assert self._batch.running or held, "a lone request must fit"
            self._blocked = (request.request_id, self._batch.releases, self.reserve.level)
            return False
        num_tokens = step.room(request, match.num_tokens)
        if not num_tokens and not match.num_host_tokens:
            return False  # Loading takes nothing of the step.
        head = self._queue.pop()
        assert head is request
        self._start(request, match)
        request.count_blocks(step.planned_ns, len(request.table.blocks))
        self._let_back(request.salt)
        if request.status is _LOADING:
            step.enter(request)
            return True
        blocks = self._manager.extend(request.table, request.num_planned + num_tokens)
        assert blocks is not None  # There was room for more than that.
        request.count_blocks(step.planned_ns, len(request.table.blocks))
        step.add_new(request, num_tokens, match.blocks + blocks)
        return True

    def _is_blocked(self, head: Request) -> bool:
        """Whether the head was refused, and nothing has changed since that could let it in."""
        return self._blocked == (head.request_id, self._batch.releases, self.reserve.level)

    def _is_held(self, head: Request) -> bool:
        """Whether the head would have made steps too long, and it is not yet time to ask again."""
        if self._held is None:
            return False
        request_id, releases, until = self._held
        return request_id == head.request_id and releases == self._batch.releases and self._plans < until

    def _is_over_quota(self, head: Request, match: PrefixMatch) -> bool:
        """Whether the head must wait for its own tenant, or behind a request of it that does."""
        if not self._quota.bounds:
            return False
        idle = self._manager.pool.num_idle(match.blocks)
        num_new = blocks_for(len(head.tokens)) - len(match.blocks) + idle
        return self._quota.is_behind(head) or not self._quota.admits(head, num_new)

    def _let_parked_back(self) -> None:
        """After blocks were released: the first parked request of every tenant may ask again."""
        if self._unparked_at != self._batch.releases:
            self._unparked_at = self._batch.releases
            for salt in self._quota.tenants():
                self._let_back(salt)

    def _let_back(self, salt: bytes) -> None:
        if (parked := self._quota.unpark(salt)) is not None:
            self._queue.requeue(parked)

    def _start(self, request: Request, match: PrefixMatch) -> None:
        """Put the request into the batch, where it runs, or loads a part of its prefix first."""
        self._takers.pop(request.request_id, None)
        self._batch.enter(request, match)
        if request.started_ns is None:
            request.num_host_cached = match.num_host_tokens
        if request.status is _RUNNING:
            self._count_start(request)

    def _count_start(self, request: Request) -> None:
        """Note when a request could first be computed, and how much of it was there already."""
        if request.started_ns is not None:
            return
        request.started_ns = self._clock.now_ns()
        request.num_cached = min(request.num_computed, request.num_prompt)
        # Resumed tokens may be cached too, but are not of the prompt.
        request.num_host_cached = min(request.num_host_cached, request.num_cached)
        assert 0 <= request.num_host_cached <= request.num_cached <= request.num_prompt, (
            "found where it was not"
        )
        self._queue.charge(request, prompt=request.num_prompt - request.num_cached, cached=request.num_cached)
        self._counters.prompt_tokens += request.num_prompt
        self._counters.cached_tokens += request.num_cached
        self._counters.host_cached_tokens += request.num_host_cached


def _is_forced(request: Request, known: int) -> bool:
    """Whether all that a row owes is tokens that its grammar has forced."""
    return (
        request.grammar is not None
        and request.num_planned >= request.num_prompt
        and known - request.num_planned <= FORCED_TOKENS_MAX
    )


def _has_output(request: Request) -> bool:
    return request.num_generated > 0
