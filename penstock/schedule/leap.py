"""Many steps in one call, where every step would be the same: all rows decode, and nobody comes or goes but in the last.

For who drives the scheduler on virtual time (sim/worker.py): what a leap leaves behind is what so many calls of `schedule`
and `apply` would have left, to the last bit. Within it blocks are taken and named in the order of those calls, row by row and
step by step, so that evictions and events are the same ones too; tests/sim/test_leap.py holds both ways side by side.
"""

from array import array
from collections.abc import Callable, Sequence

from penstock.kv.manager import KVManager
from penstock.schedule.batch import Batch
from penstock.schedule.planner import Planner
from penstock.schedule.prefill_budget import PrefillBudget
from penstock.schedule.request import Request, Status
from penstock.schedule.statistics import Counters
from penstock.schedule.step_time import StepLoad
from penstock.types import BLOCK_TOKENS

Draw = Callable[[Request, int], "array[int]"]
"""The next so many tokens of a request; only the last may stop it."""
_RUNNING = Status.RUNNING


class Leap:
    """The steps that one scheduler may leap over. It shares that scheduler's parts."""

    __slots__ = ("_batch", "_counters", "_manager", "_planner", "_prefill")

    def __init__(self, batch: Batch, planner: Planner, prefill: PrefillBudget, counters: Counters) -> None:
        self._batch, self._planner, self._prefill, self._counters = batch, planner, prefill, counters
        self._manager: KVManager = batch.manager

    def steps_max(self, most: int) -> int:
        """How many of the next steps, at most `most`, do nothing but decode each running row once; 0 if the next does more.

        Nothing may be in flight. Whoever knows that an answer stops sooner asks for no more steps than until then. O(rows).
        """
        if not self._planner.only_decodes():
            return 0
        needed = 0
        for request in self._batch.running:
            most = min(most, request.num_tokens_max - len(request.tokens))
            if request.status is not _RUNNING or len(request.tokens) != request.num_planned + 1:
                return 0
        available = self._manager.pool.num_available
        if len(self._batch.running) * (most // BLOCK_TOKENS + 1) > available:
            # Near the end of memory somebody may have to give way: count to the block.
            needed = sum(
                (request.num_planned + most - 1) // BLOCK_TOKENS - (request.num_planned - 1) // BLOCK_TOKENS
                for request in self._batch.running
            )
        return most if needed <= available else 0

    def over(self, step: int, times_ns: Sequence[int], draw: Draw) -> None:
        """Do steps `step + 1` and so on; each is planned at one of the times and over at the next.

        At most `steps_max`, and nothing may have changed since that was asked.
        """
        count, running = len(times_ns) - 1, self._batch.running
        self._planner.leap(count)
        self._observe(step, times_ns)
        by_place: list[list[Request]] = [[] for _ in range(BLOCK_TOKENS)]
        for request in running:
            request.tokens.extend(draw(request, count))
            by_place[request.num_planned % BLOCK_TOKENS].append(request)
        self._counters.generated_tokens += count * len(running)
        for index in range(count):
            # Whose token is the first of a block, and whose is the last of one.
            for request in by_place[-index % BLOCK_TOKENS]:
                self._extend(request, request.num_planned + index + 1, times_ns[index])
            for request in by_place[-(index + 1) % BLOCK_TOKENS]:
                self._manager.publish_computed(request.table, request.tokens, request.num_planned + index + 1)
        for request in running:
            request.num_planned += count
            request.num_computed += count
            request.num_steps += count

    def _extend(self, request: Request, num_tokens: int, planned_ns: int) -> None:
        blocks = self._manager.extend(request.table, num_tokens)
        assert blocks is not None, "there were blocks enough"
        if blocks:
            request.count_blocks(planned_ns, len(request.table.blocks))

    def _observe(self, step: int, times_ns: Sequence[int]) -> None:
        """Let the prefill budget learn what it would have."""
        rows = len(self._batch.running)
        kv_read = sum(request.num_planned for request in self._batch.running)
        for index in range(len(times_ns) - 1):
            kv_read += rows
            if self._prefill.learns_decoding(step + index + 1):
                load = StepLoad(rows, rows, kv_read, 0)
                self._prefill.observe_decoding(load, times_ns[index], times_ns[index + 1])
        self._prefill.step_over(times_ns[-1])
