"""Who gives way when KV blocks run out.

Everything is taken from a victim and it waits to be resumed, so the choice is who loses least:

    1. tenants that hold more than their quota go first
    2. then the lowest priority class
    3. within a class: those who were not preempted too often already (the shield)
    4. then those whose tenant was served most, by the counters that order the queue (fair scheduling only)
    5. then whose work is quickest to do again
    6. then who came last

Tenants whose counters are less than a grain (a step's tokens) above the least are alike: a step charges one
of them that much at once, so less says only who was computed last. It is also what keeps two tenants from
taking turns: whoever gave way for its share has a grain more than the other, which gives way for its own only
with a grain more in turn; so it was served twice that in between. Among tenants alike, and with one tenant,
the least work counts.

The first of all running requests in order (class, arrival) is never a victim of others. It gets its blocks by
taking them from everybody else if need be, so it always advances and ends; then the next is the first. Hence
every request ends, whatever the other rules say.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence

from penstock.kv.cache.block_pool import BlockPool
from penstock.schedule.request import Request
from penstock.types import BLOCK_TOKENS


class VictimChoice:
    """The rules above. `preemptions_max` is where the shield begins; `served` is `WaitingQueue.served_to`."""

    __slots__ = ("_grain", "_is_over_quota", "_pool", "_preemptions_max", "_served")

    def __init__(
        self,
        pool: BlockPool,
        preemptions_max: int,
        is_over_quota: Callable[[Request], bool],
        served: Callable[[Request], int],
        grain: int,
    ) -> None:
        self._pool, self._preemptions_max, self._is_over_quota = pool, preemptions_max, is_over_quota
        assert grain > 0, grain
        self._served, self._grain = served, grain

    def choose(self, running: Sequence[Request]) -> Request:
        """One of the running requests, which are in order and at least one. O(rows x log blocks)."""
        assert running, "nobody runs who could give way"
        if len(running) == 1:
            return running[0]
        others, least = running[1:], dict[int, int]()
        for request in others:
            served = self._served(request)
            least[request.priority] = min(served, least.get(request.priority, served))
        return max(others, key=lambda request: self._rank(request, least[request.priority]))

    def work_lost(self, request: Request) -> int:
        """Stored tokens that go with the request: those in blocks that nobody else holds.

        What others hold is the head of its table: sharing a block means sharing all before it.
        """
        return max(request.num_computed - self._num_shared(request) * BLOCK_TOKENS, 0)

    def blocks_freed(self, request: Request) -> int:
        """Blocks that others could have without the request."""
        return len(request.table.blocks) - self._num_shared(request)

    def _num_shared(self, request: Request) -> int:
        pool = self._pool
        return bisect_left(request.table.blocks, True, key=lambda block: pool.num_references(block) <= 1)

    def _rank(self, request: Request, least: int) -> tuple[bool, int, bool, int, int, tuple[int, int, int]]:
        return (
            self._is_over_quota(request),
            request.priority,
            request.num_preemptions < self._preemptions_max,
            (self._served(request) - least) // self._grain,
            -self.work_lost(request),
            request.order,
        )
