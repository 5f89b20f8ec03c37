"""The requests that run, and their bounds: in which order, with which rows, holding which blocks; and what is
counted of them.
"""

from bisect import bisect_left, insort
from collections import Counter
from dataclasses import dataclass
from heapq import heappop, heappush
from operator import attrgetter

import msgspec

from penstock.config.tree import EngineConfig
from penstock.errors import ContextTooLong, InvalidRequest
from penstock.kv.cache.host_tier import HostStatistics
from penstock.kv.cache.manager import KVManager, PrefixMatch, blocks_for
from penstock.schedule.plan import SCORED_TOKENS_MAX
from penstock.schedule.request import Request, Status
from penstock.schedule.step_time import StepSums
from penstock.types import BLOCK_TOKENS


def resolve_max_running(max_running: int, step_tokens: int) -> int:
    """Requests in the batch at most: every running request needs a token of each step, since no decode row is
    skipped.
    """
    return min(max_running, step_tokens)


@dataclass(slots=True, frozen=True)
class BatchLimits:
    """The bounds of a batch."""

    step_tokens: int
    """Tokens computed in one step at most."""
    max_running: int
    """Requests in the batch at most (`resolve_max_running`)."""
    max_model_len: int
    """Tokens of prompt and answer together."""
    scored_tokens: int = SCORED_TOKENS_MAX
    """Prompt tokens of a step whose log-probabilities are wanted, at most: each is a row of logits."""

    preemptions_max: int = 3
    """Preemptions of a request before it is shielded within its class."""
    kv_quota_fraction: float = 1.0
    """Share of the KV blocks that one tenant may hold."""

    def __post_init__(self) -> None:
        assert 0 < self.max_running <= self.step_tokens, "a decode row is never skipped"
        assert 0 < self.kv_quota_fraction <= 1, self.kv_quota_fraction

    @classmethod
    def of(cls, config: EngineConfig, max_model_len: int) -> "BatchLimits":
        """The bounds that a config asks for, with the model length that was settled on."""
        return cls(
            config.step_tokens,
            resolve_max_running(config.max_running, config.step_tokens),
            max_model_len,
            kv_quota_fraction=config.kv_quota_fraction or 1.0,
        )

    def num_tokens_max(self, request: Request) -> int:
        """How many tokens prompt and answer of the request may have together."""
        if request.pools:
            assert not request.num_resumed, "nothing of a vector can be resumed"
            return request.num_prompt + 1  # In the place of its one draw comes the vector.
        return min(request.num_prompt + request.sampling.max_tokens, self.max_model_len)

    def check_fits(self, request: Request, num_blocks: int) -> None:
        """Refuse what can never run, before anything is done for it.

        Raises:
            InvalidRequest: an empty prompt, or no token to generate, or no other than was resumed.
            ContextTooLong: it does not fit the model's context, or not even an empty cache of `num_blocks`.
        """
        if not request.num_prompt:
            raise InvalidRequest("the prompt is empty", param="prompt")
        if request.sampling.max_tokens < 1:
            raise InvalidRequest("max_tokens must be at least 1", param="max_tokens")
        if request.pools:
            if request.num_prompt > self.max_model_len:
                raise ContextTooLong(
                    f"the text has {request.num_prompt} tokens; the model takes {self.max_model_len}",
                    param="prompt",
                )
        elif request.num_prompt >= self.max_model_len:
            raise ContextTooLong(
                f"the prompt has {request.num_prompt} tokens; with at least one token of answer the model "
                f"takes {self.max_model_len}",
                param="prompt",
            )
        if len(request.tokens) >= self.num_tokens_max(request):
            raise InvalidRequest("what was resumed is a whole answer already", param="resumed")
        num_tokens = self.num_tokens_max(request) - 1  # The last token is drawn but never computed.
        if blocks_for(num_tokens) > num_blocks:
            raise ContextTooLong(
                f"prompt and answer of up to {num_tokens + 1} tokens do not fit the KV cache, which holds "
                f"{num_blocks * BLOCK_TOKENS}",
                param="prompt" if blocks_for(request.num_prompt) > num_blocks else "max_tokens",
            )


# How large a step may be after steps that did not fit the memory.

GROW_AFTER_STEPS = 64
"""So many steps in a row must fit before larger ones are tried again. A failed step is wasted: about 1 % at
worst."""


class StepCap:
    """Halves with every step that failed, and doubles again once memory has been enough for a while.

    The memory of a step beyond weights and KV grows with its tokens (activations) and its rows (logits), and
    a step has no more rows than tokens: so one number bounds both.
    """

    __slots__ = ("_fitted", "_limit", "tokens")

    def __init__(self, limit: int) -> None:
        self.tokens = self._limit = limit
        """Tokens of one step, and so rows of the batch, at most."""
        self._fitted = 0

    @property
    def is_lowered(self) -> bool:
        """Whether steps are held smaller than they were meant to be."""
        return self.tokens < self._limit

    def step_failed(self, num_tokens: int) -> bool:
        """A step of `num_tokens` ran out of memory.

        False if it was of a single token: no smaller step exists.
        """
        assert 0 < num_tokens <= self._limit, f"a step of {num_tokens} tokens was never allowed"
        self.tokens, self._fitted = max(1, num_tokens // 2), 0
        return num_tokens > 1

    def step_fitted(self) -> None:
        """A step had the memory it needed."""
        if self.tokens < self._limit:
            self._fitted += 1
            if self._fitted >= GROW_AFTER_STEPS:
                self.tokens, self._fitted = min(2 * self.tokens, self._limit), 0


class Batch:
    """Every running request. To enter it takes a row and cached blocks; to leave gives everything back."""

    def __init__(self, manager: KVManager, num_rows: int) -> None:
        self.manager = manager
        self.running: list[Request] = []
        """By `order`: who came last is the first to be preempted."""
        self.rows = RowTable(num_rows)
        self.rows_by_tenant: dict[str, int] = {}
        """Rows in use, by fairness key; no zeros."""
        self.releases = 0
        """How often blocks were given back: what found no room may look again."""
        self.changes = 0
        """How often a request entered or left."""

    def enter(self, request: Request, match: PrefixMatch) -> None:
        """Give the request a row and its cached prefix; it is loading if a part of that is in host memory."""
        self.manager.adopt(request.table, match)
        request.restart_from(match.num_tokens)
        request.num_found = match.num_tokens
        assert request.num_computed <= len(request.tokens), "more was found than it has"
        request.move_to(Status.LOADING if request.table.awaits else Status.RUNNING)
        self.rows.assign(request)
        request.num_known_at_row = len(request.tokens)
        key = request.fairness_key
        self.rows_by_tenant[key] = self.rows_by_tenant.get(key, 0) + 1
        insort(self.running, request, key=_order)
        self.changes += 1

    def leave(self, request: Request) -> None:
        """Take the request out of the order; it still holds its row and its blocks."""
        index = bisect_left(self.running, request.order, key=_order)
        left = self.running.pop(index)
        assert left is request
        self.changes += 1
        key = request.fairness_key
        assert self.rows_by_tenant[key] > 0, f"{key} has no row"
        self.rows_by_tenant[key] -= 1
        if not self.rows_by_tenant[key]:
            del self.rows_by_tenant[key]

    def release(self, request: Request, *, bad: bool = False, preempted: bool = False) -> None:
        """Give back a request's row and blocks, which others may hit from now on unless they are `bad`.

        Blocks of prompts have their names since they were computed. Those of an answer get them here, in one
        run: before its end no request can ask for a prompt that has it, and a step of decoding rows has
        nothing to name and nothing to report.

        Steps in flight may use both still. The runner takes plans in order, so a row may have its next
        request in the next plan; a block waits until the last step that uses it is over.
        """
        if not bad:
            self.manager.publish_computed(request.table, request.tokens, request.num_computed)
        self.manager.release(request.table, last_used=request.last_used, bad=bad, preempted=preempted)
        self.rows.release(request)
        self.releases += 1
        assert not request.table.blocks, f"{request.request_id} holds blocks without a row"

    def check_invariants(self) -> None:
        """Assert that the counts agree. O(rows)."""
        assert self.rows_by_tenant == Counter(request.fairness_key for request in self.running)


_order = attrgetter("order")


# Rows: the small numbers by which the scheduler and the runner speak of running requests.
#
# Every row that was released is reported in the next plan. Rows are only ever assigned while a plan is
# made, and the runner applies `freed_rows` before `new_rows`: so it never sees one row with two requests.


class RowTable:
    """Rows `0 .. num_rows - 1`; the lowest that is free is given out first."""

    __slots__ = ("_free", "_freed", "_requests")

    def __init__(self, num_rows: int) -> None:
        self._requests: list[Request | None] = [None] * num_rows
        self._free = list(range(num_rows))  # A heap.
        self._freed: list[int] = []

    def assign(self, request: Request) -> int:
        """Give the request a row. There must be one: no more requests run than there are rows."""
        assert request.row < 0, f"{request.request_id} has row {request.row} already"
        row = heappop(self._free)
        assert self._requests[row] is None, f"row {row} is taken"
        self._requests[row] = request
        request.row = row
        return row

    def release(self, request: Request) -> None:
        """Take the request's row back; the next plan must report it."""
        assert self._requests[request.row] is request, f"{request.request_id} does not have row {request.row}"
        self._requests[request.row] = None
        heappush(self._free, request.row)
        self._freed.append(request.row)
        request.row = -1

    def report_freed(self) -> tuple[int, ...]:
        """The rows released since the last call, for the plan in the making."""
        freed = tuple(self._freed)
        self._freed.clear()
        return freed

    def __getitem__(self, row: int) -> Request:
        """The request that has the row."""
        request = self._requests[row]
        assert request is not None, f"row {row} is free"
        return request

    def check_invariants(self, running: list[Request]) -> None:
        """Assert that exactly `running` have rows, each its own."""
        taken = [request for request in self._requests if request is not None]
        assert len(taken) == len(running), "rows and running requests differ in number"
        assert all(self._requests[request.row] is request for request in running), "a row is mixed up"
        rows = sorted([*self._free, *(request.row for request in taken)])
        assert rows == list(range(len(self._requests))), "a row is lost or taken twice"


@dataclass(slots=True)
class Counters:
    """Counted since the start."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    host_cached_tokens: int = 0
    generated_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    preemptions: int = 0
    yields: int = 0


class SchedulerStatistics(msgspec.Struct, frozen=True):
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
    host_cached_tokens: int
    """Of `cached_tokens`, what came back from host memory."""
    generated_tokens: int
    drafted_tokens: int
    """Guesses that were computed,"""
    accepted_tokens: int
    """and of these, those that became tokens of answers."""
    preemptions: int
    yields: int
    """How often a request gave its row to another tenant's (`shares.py`)."""
    rows_max: int
    """Requests that would run at once at most: fewer than the batch has rows where a target bounds them
    (`schedule/prefill_budget.py`)."""
    host: HostStatistics
    """The KV cache's host tier."""
    sums: StepSums
    """The work of all steps, and the time; keeps counting."""
