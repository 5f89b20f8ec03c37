"""Which running request yields its row to a waiting tenant, while no row is left for it.

Rows are shared by tenant (`fairness_key`), in proportion to weights; a tenant that is alone has all of them.

    share    the waiting tenant takes a row from one that then still has as many rows as it has itself
    turn     a waiting tenant without a row takes that of a request that has had its row for `TURN_TOKENS`:
             so rows go round when there are more tenants than rows

A lower class never takes from a better one, and nothing is taken for a tenant from itself.

The request that yields keeps what it computed: its full blocks stay in the prefix cache, it waits at the
front of its tenant's line and continues token-exactly, as after a preemption. How often it yields is
bounded: the first time after one token at the earliest, then once per `BLOCK_TOKENS` of its answer. So each
time it has gained a block that it keeps, and computes fewer tokens than that again. The first rule cannot go
back and forth between two tenants: the one that lost the row would have more rows than the other by taking
it back.
"""

from penstock.schedule.batch import Batch
from penstock.schedule.queue import WaitingQueue
from penstock.schedule.request import Request, Status
from penstock.types import BLOCK_TOKENS

TURN_TOKENS = 64
"""Tokens of an answer for which a request has its row before tenants without a row may take it. It then
yields at the end of a block, and computes nothing again."""


class RowShare:
    """The rules above, over the rows of one batch."""

    __slots__ = ("_batch", "_queue")

    def __init__(self, batch: Batch, queue: WaitingQueue) -> None:
        self._batch, self._queue = batch, queue

    def victim(self, taker: Request) -> Request | None:
        """Who yields its row to the taker now, once nothing is in flight; None: nobody.

        The tenant with the most rows for its weight, of that the request that yielded least often, of those
        the one with the least to compute again. O(rows).
        """
        if not self.may_yield_to(taker):
            return None
        found = [each for each in self._batch.running if self._yields(each, taker)]
        return max(found, key=self._rank) if found else None

    def may_yield_to(self, taker: Request) -> bool:
        """Whether anybody may yield to the taker, now or after more steps in which nobody comes or goes."""
        rows, own = self._batch.rows_by_tenant, taker.fairness_key
        if not self._queue.weight_of(taker) or len(rows) == (own in rows):
            return False  # Shares do not count in this order, or nobody else has a row.
        return any(
            each.fairness_key != own
            and each.priority >= taker.priority
            and (own not in rows or self._has_more(each, taker))
            for each in self._batch.running
        )

    def _has_more(self, each: Request, taker: Request) -> bool:
        """Whether its tenant would still have as many rows as the taker's, each by its weight."""
        rows, weight_of = self._batch.rows_by_tenant, self._queue.weight_of
        assert rows[each.fairness_key] > 0, f"{each.request_id} has a row"
        left, more = rows[each.fairness_key] - 1, rows.get(taker.fairness_key, 0) + 1
        return left * weight_of(taker) >= more * weight_of(each)

    def _yields(self, each: Request, taker: Request) -> bool:
        if each.fairness_key == taker.fairness_key or each.priority < taker.priority:
            return False
        drawn = each.num_drawn_here
        assert drawn >= 0, f"{each.request_id} lost tokens"
        if each.status is not Status.RUNNING or drawn < (BLOCK_TOKENS if each.num_yields else 1):
            return False
        if each.num_tokens_max - len(each.tokens) <= BLOCK_TOKENS:
            return False  # Its row is free soon.
        if self._has_more(each, taker):
            return True
        has_row = taker.fairness_key in self._batch.rows_by_tenant
        return not has_row and drawn >= TURN_TOKENS and not each.num_planned % BLOCK_TOKENS

    def _rank(self, each: Request) -> tuple[int, float, int, int, tuple[int, int, int]]:
        rows = self._batch.rows_by_tenant[each.fairness_key]
        return (
            each.priority,
            rows / self._queue.weight_of(each),
            -each.num_yields,
            -(each.num_planned % BLOCK_TOKENS),
            each.order,
        )
