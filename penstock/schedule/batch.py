"""The requests that run: in which order, with which rows, holding which blocks. And the scheduler's counters."""

from bisect import bisect_left, insort
from collections import Counter
from dataclasses import dataclass
from heapq import heappop, heappush

from penstock.kv.cache.host_tier import HostStatistics
from penstock.kv.cache.manager import KVManager
from penstock.kv.cache.prefix_cache import PrefixMatch
from penstock.schedule.request import Request, Status


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
        run: before its end nobody asks for a prompt that has it, and a step of decoding rows has nothing to
        name and nothing to tell.

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


def _order(request: Request) -> tuple[int, int, int]:
    return request.order


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
    preemptions: int = 0
    yields: int = 0


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
    host_cached_tokens: int
    """Of `cached_tokens`, what came back from host memory."""
    generated_tokens: int
    preemptions: int
    yields: int
    """How often a request gave its row to another tenant's (`shares.py`)."""
    rows_max: int
    """Requests that would run at once at most: fewer than the batch has rows where a target bounds them
    (`schedule/prefill_budget.py`)."""
    host: HostStatistics
    """The KV cache's host tier."""
