"""Chooses a step's work: who is computed, how many tokens of whom, and who must give way."""

from penstock.clock import Clock
from penstock.kv.manager import blocks_for
from penstock.kv.prefix_cache import PrefixMatch
from penstock.schedule.batch import Batch
from penstock.schedule.limits import Limits
from penstock.schedule.prefill_budget import PrefillBudget
from penstock.schedule.queue import WaitingQueue
from penstock.schedule.request import Request, Status
from penstock.schedule.statistics import Counters
from penstock.schedule.step import StepBuilder
from penstock.types import RequestId

_RUNNING, _LOADING = Status.RUNNING, Status.LOADING


class Planner:
    """Moves requests from the queue into the batch and back, and fills steps with their work."""

    def __init__(
        self,
        limits: Limits,
        prefill: PrefillBudget,
        clock: Clock,
        queue: WaitingQueue,
        batch: Batch,
        counters: Counters,
    ) -> None:
        self._limits = limits
        self._manager, self._prefill = batch.manager, prefill
        self._clock, self._queue = clock, queue
        self._batch, self._counters = batch, counters
        self._blocked: tuple[RequestId, int] | None = None
        """The head that found no room, after so many releases."""

    def plan(self, step: StepBuilder) -> None:
        """Fill a step. Rows that decode come first, then running prompts, then the head of the queue."""
        step.planned_ns = self._clock.now_ns()
        self._plan_running(step)
        self._admit(step)

    def _plan_running(self, step: StepBuilder) -> None:
        """One token for every row that decodes, then chunks for running prompts while their share lasts."""
        prompts: list[Request] = []
        for request in self._batch.running.copy():  # Victims leave the list meanwhile.
            if request.status is _LOADING and not self._end_loading(request):
                continue
            if len(request.tokens) - request.num_computed > 1:
                prompts.append(request)
            elif request.status is _RUNNING:
                self._extend_or_preempt(request, 1, step)
        self._open_prompts(step, len(prompts))
        for request in prompts:
            if not step.takes_prompts:
                return
            if request.status is _RUNNING and (num_tokens := step.room(request, request.num_computed)):
                self._extend_or_preempt(request, num_tokens, step)

    def _open_prompts(self, step: StepBuilder, num_running: int) -> None:
        """Settle what prompts may take of the step, beside the rows that decode in it."""
        head = self._queue.peek()
        can_start = head is not None and self._blocked != (head.request_id, self._batch.releases)
        free_rows = self._limits.max_running - len(self._batch.running)
        num_prompts = num_running + can_start * min(len(self._queue), free_rows)
        if num_prompts:
            # All rows in the step so far decode.
            classes = {self._batch.rows[row].priority for row in step.rows()}
            step.prompts = self._prefill.open(step.load(), classes, num_prompts)

    def _end_loading(self, request: Request) -> bool:
        """Whether the request's prefix has arrived. If a copy failed it starts anew, and computes that part."""
        if request.table.broken:
            self._send_back(request)
            return False
        if request.table.awaits:
            return False
        request.move_to(_RUNNING)
        self._count_start(request)
        return True

    def _extend_or_preempt(self, request: Request, num_tokens: int, step: StepBuilder) -> None:
        """Plan `num_tokens` of a running request; if blocks run out, preempt from the last in order.

        The first in order is preempted only by itself, which `submit` made impossible (alone it fits): so
        some request always advances, and ends.
        """
        end = request.num_computed + num_tokens
        while (blocks := self._manager.extend(request.table, end)) is None:
            victim = self._batch.running[-1]
            step.drop(victim)
            self._preempt(victim)
            if victim is request:
                return
        step.add(request, num_tokens, blocks)

    def _preempt(self, victim: Request) -> None:
        """Take everything from a running request; its full blocks stay cached, so resuming is a prefix hit.

        It is not admitted again in the same step: it needs all that it gave up, and somebody took of that.
        """
        victim.num_preemptions += 1
        self._counters.preemptions += 1
        self._send_back(victim, preempted=True)

    def _send_back(self, request: Request, *, preempted: bool = False) -> None:
        """Out of the batch, into the queue."""
        self._batch.leave(request)
        self._batch.release(request, preempted=preempted)
        request.move_to(Status.PREEMPTED)
        request.num_computed = 0
        self._queue.requeue(request)

    def _admit(self, step: StepBuilder) -> None:
        """Start waiting requests while there is budget, a row, and room for the head of the queue.

        The head is never skipped: short prompts would starve long ones.
        """
        reserved = -1
        while step.takes_prompts and len(self._batch.running) < self._limits.max_running:
            head = self._queue.peek()
            if head is None or self._blocked == (head.request_id, self._batch.releases):
                return
            if reserved < 0:
                reserved = sum(map(_blocks_owed, self._batch.running))
            if not self._try_start(head, step, reserved):
                return
            reserved += _blocks_owed(head)

    def _try_start(self, request: Request, step: StepBuilder, reserved: int) -> bool:
        """Start the head of the queue if all its known tokens fit beside `reserved` blocks for those that run.

        Without that reserve a new prompt would take the blocks that decoding rows need a few steps later,
        and be preempted for them at once. A refusal is remembered until blocks are released: looking a long
        prompt up is not free.
        """
        match = self._manager.match_prefix(request.table, request.tokens, request.num_skippable)
        missing = blocks_for(len(request.tokens)) - match.num_present
        if missing + reserved > self._manager.num_available_after(match):
            # Nobody may run, but loads that nobody awaits any more hold their blocks to their end.
            assert self._batch.running or self._manager.host.busy, "a lone request must fit"
            self._blocked = (request.request_id, self._batch.releases)
            return False
        num_tokens = step.room(request, match.num_tokens)
        if not num_tokens and not match.num_host_tokens:
            return False  # Loading takes nothing of the step.
        head = self._queue.pop()
        assert head is request
        self._start(request, match)
        if request.status is _LOADING:
            step.enter(request)
            return True
        blocks = self._manager.extend(request.table, request.num_computed + num_tokens)
        assert blocks is not None  # There was room for more than that.
        step.add_new(request, num_tokens, match.blocks + blocks)
        return True

    def _start(self, request: Request, match: PrefixMatch) -> None:
        """Put the request into the batch, where it runs, or loads a part of its prefix first."""
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
        request.num_cached = request.num_computed
        self._counters.prompt_tokens += request.num_prompt
        self._counters.cached_tokens += request.num_cached
        self._counters.host_cached_tokens += request.num_host_cached


def _blocks_owed(request: Request) -> int:
    """Blocks that a running request will soon ask for: for the rest of its known tokens, and one to go on."""
    return blocks_for(len(request.tokens)) - len(request.table.blocks) + 1
