"""Many steps in one call, where every step would be the same: all rows decode, and no request comes or leaves
but in the last. And the rows that decode beside other work in one step, counted and not listed one by one.

For who drives the scheduler on virtual time (sim/world/worker.py): what they leave behind is what so many
calls of `schedule` and `apply` would have left, except for which free block went to whom. As many blocks are
evicted as by those calls, in the same order, and nothing is named meanwhile (`Batch.release`);
tests/sim/test_fast_forward.py holds both ways side by side.
"""

from array import array
from collections.abc import Callable, Iterator, Sequence

from penstock.kv.cache.block_pool import Epoch
from penstock.kv.cache.host_tier import NO_COPIES, Copies
from penstock.kv.cache.manager import KVManager
from penstock.schedule.batch import Batch, Counters
from penstock.schedule.plan import RequestOutput
from penstock.schedule.planner import Planner
from penstock.schedule.prefill_budget import PrefillBudget, decoding_learned
from penstock.schedule.request import Request, Status
from penstock.schedule.step import Flight, StepBuilder
from penstock.schedule.step_time import StepLoad
from penstock.types import BLOCK_TOKENS

Draw = Callable[[Sequence[Request], int], Sequence["array[int]"]]
"""The next so many tokens of each of these requests; only the last of a request may stop it."""
_RUNNING = Status.RUNNING


class StepTogether(StepBuilder):
    """A step whose rows that decode are only counted, unless there is nothing else in it."""

    __slots__ = ("_beside",)

    def __init__(self, step_tokens: int, scored_tokens: int) -> None:
        super().__init__(step_tokens, scored_tokens)
        self._beside: list[Request] = []

    @property
    def is_empty(self) -> bool:
        """See `StepBuilder`."""
        return not self._beside and super().is_empty

    @property
    def num_decoding(self) -> int:
        """See `StepBuilder`."""
        return len(self._beside)

    @property
    def decoding(self) -> Sequence[Request]:
        """See `StepBuilder`."""
        return self._beside

    def rows(self) -> Iterator[int]:
        """See `StepBuilder`."""
        yield from [request.row for request in self._beside]
        yield from super().rows()

    def load(self) -> StepLoad:
        """See `StepBuilder`."""
        num_sequences = len(self._beside) + len(self._work)
        return StepLoad(self._num_tokens, num_sequences, self._kv_read, self._pairs)

    def add_decoding(self, request: Request, blocks: tuple[int, ...]) -> None:
        """See `StepBuilder`: who drives on virtual time tells no runner of blocks."""
        del blocks
        self.add_all_decoding([request])

    def add_all_decoding(self, requests: list[Request]) -> None:
        """See `StepBuilder`."""
        count = len(requests)
        assert not self._work, "rows that decode come first"
        self.budget -= count
        assert self.budget >= 0, "over the token budget"
        self._beside += requests
        self._num_tokens += count
        self._kv_read += sum([request.num_planned for request in requests]) + count

    def drop(self, request: Request) -> None:
        """See `StepBuilder`."""
        for index, each in enumerate(self._beside):
            if each is request:
                self.budget += 1
                self._count(request.num_planned, 1, -1)
                del self._beside[index]
                return
        super().drop(request)

    def build(
        self, step: int, freed_rows: tuple[int, ...], epoch: Epoch, copies: Copies = NO_COPIES
    ) -> Flight:
        """See `StepBuilder`."""
        flight = super().build(step, freed_rows, epoch, copies)
        flight.beside = tuple(self._beside)
        if not self._work:
            flight.list_beside()
        return flight


Ended = Callable[[Request, int, int], RequestOutput]
"""The end of a request by its last token, at a time."""


class DecodeFastForward:
    """The steps that one scheduler may do at once. It shares that scheduler's parts."""

    __slots__ = ("_batch", "_counters", "_manager", "_planner", "_prefill")

    def __init__(self, batch: Batch, planner: Planner, prefill: PrefillBudget, counters: Counters) -> None:
        self._batch, self._planner, self._prefill, self._counters = batch, planner, prefill, counters
        self._manager: KVManager = batch.manager

    def steps_max(self, limit: int) -> int:
        """How many of the next steps, at most `limit`, do nothing but decode each running row once; 0 if the
        next does more.

        Nothing may be in flight. A caller that knows that an answer stops sooner asks for no more steps than
        until then. O(rows).
        """
        limit = min(limit, self._planner.num_decode_only())
        if limit <= 0:
            return 0
        running = self._batch.running
        for request in running:
            num_tokens = len(request.tokens)
            if num_tokens != request.num_planned + 1 or request.status is not _RUNNING:
                return 0
            left = request.num_tokens_max - num_tokens
            assert left > 0, f"{request.request_id} has all its tokens and runs on"
            limit = min(limit, left)
        available = self._manager.pool.num_available
        if len(running) * (limit // BLOCK_TOKENS + 1) <= available:
            return limit
        # Near the end of memory a request may have to give way: count to the block.
        needed = sum(
            (request.num_planned + limit - 1) // BLOCK_TOKENS - (request.num_planned - 1) // BLOCK_TOKENS
            for request in running
        )
        return limit if needed <= available else 0

    def over(self, step: int, times_ns: Sequence[int], draw: Draw) -> list[Request]:
        """Do steps `step + 1` and so on; each is planned at one of the times and over at the next.

        At most `steps_max`, and nothing may have changed since that was asked. Returns those that stop, or
        are full. O(rows + blocks).
        """
        count, running = len(times_ns) - 1, self._batch.running
        assert count > 0, "at least one step is done at once"
        assert times_ns[0] <= times_ns[-1], "time runs back"
        self._planner.fast_forward(count)
        kv_read = 0
        ended: list[Request] = []
        begins: list[tuple[Request, int]] = []  # Those that begin a block, and in which of the steps.
        for request, update in zip(running, draw(running, count), strict=True):
            tokens, planned = request.tokens, request.num_planned
            tokens += update
            kv_read += planned
            request.num_planned = request.num_computed = end = planned + count
            request.num_steps += count
            if (index := -planned % BLOCK_TOKENS) < count:
                begins += [(request, index) for index in range(index, count, BLOCK_TOKENS)]
            num_tokens = len(tokens)
            assert num_tokens == end + 1, f"{request.request_id} was given other than {count} tokens"
            if num_tokens >= request.num_tokens_max or tokens[-1] in request.stop_token_ids:
                ended.append(request)
        if begins:
            self._give_blocks(begins, times_ns)
        self._observe(step, times_ns, kv_read)
        self._counters.generated_tokens += count * len(running)
        return ended

    def take(
        self, rows: Sequence[Request], now_ns: int, draw: Draw, ended: Ended, outputs: list[RequestOutput]
    ) -> None:
        """A step is over in which these rows decoded beside other work: one token more for each."""
        for request, update in zip(rows, draw(rows, 1), strict=True):
            assert request.status is _RUNNING, "on virtual time nothing ends while a step runs"
            tokens = request.tokens
            request.num_planned = request.num_computed = computed = request.num_planned + 1
            request.num_steps += 1
            if request.first_token_ns is None:  # The last token of its prompt was left.
                if computed == request.num_prompt:
                    self._manager.publish_computed(request.table, tokens, computed)
                request.first_token_ns = now_ns
            tokens += update
            if len(tokens) >= request.num_tokens_max or tokens[-1] in request.stop_token_ids:
                outputs.append(ended(request, tokens[-1], now_ns))
        self._counters.generated_tokens += len(rows)

    def _give_blocks(self, begins: Sequence[tuple[Request, int]], times_ns: Sequence[int]) -> None:
        """Each of these requests begins a block in one of the steps."""
        blocks = self._manager.pool.allocate_each([request.salt for request, _ in begins])
        for (request, index), block in zip(begins, blocks, strict=True):
            table = request.table
            assert table.num_public <= len(table.blocks), "an answer is its own tenant's alone"
            assert not table.awaits, "what is still loading does not decode"
            table.blocks.append(block)
            request.count_blocks(times_ns[index], len(table.blocks))

    def _observe(self, step: int, times_ns: Sequence[int], kv_read: int) -> None:
        """Let the prefill budget learn what it would have; so many tokens were stored before the steps."""
        rows, prefill = len(self._batch.running), self._prefill
        count = len(times_ns) - 1
        all_read = count * kv_read + rows * count * (count + 1) // 2
        for number in decoding_learned(step + 1, step + count):
            index = number - step
            load = StepLoad(rows, rows, kv_read + rows * index, 0)
            prefill.observe_decoding(load, times_ns[index - 1], times_ns[index])
        together = StepLoad(rows * count, rows * count, all_read, 0, count)
        prefill.steps_over(together, times_ns[0], times_ns[-1])
