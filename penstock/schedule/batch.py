"""The requests that run: in which order, with which rows, holding which blocks."""

from bisect import bisect_left, insort
from collections import Counter

from penstock.kv.cache.manager import KVManager
from penstock.kv.cache.prefix_cache import PrefixMatch
from penstock.schedule.request import Request, Status
from penstock.schedule.rows import RowTable


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
