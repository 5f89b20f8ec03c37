"""Which running request yields its row to a waiting tenant, while no row is left for it.

Rows are shared by tenant (`fairness_key`), in proportion to weights; a tenant that is alone has all of them.

    share    the waiting tenant takes a row from one that then still has as many rows as it has itself
    turn     a waiting tenant without a row takes that of a request that has had its row for `TURN_TOKENS`:
             so rows go round when there are more tenants than rows. For a first token a block is enough

A lower class never takes from a better one, and nothing is taken for a tenant from itself.

The request that yields keeps what it computed: its full blocks stay in the prefix cache, it waits at the
front of its tenant's line and continues token-exactly, as after a preemption. How often it yields is
bounded: the first time after one token at the earliest, then once per `BLOCK_TOKENS` of its answer. So each
time it has gained a block that it keeps, and computes fewer tokens than that again. The first rule cannot go
back and forth between two tenants: the one that lost the row would have more rows than the other by taking
it back.
"""

from bisect import bisect_right
from collections.abc import Iterable
from itertools import islice

from penstock.schedule.batch import Batch
from penstock.schedule.queue import WaitingQueue
from penstock.schedule.request import Request, Status
from penstock.types import BLOCK_TOKENS

TURN_TOKENS = 64
"""Tokens of an answer for which a request has its row before tenants without a row may take it. It then
yields at the end of a block, and computes nothing again. One that waits for its first token takes a row that
was had for a block: its client sees nothing meanwhile."""
_ROUNDING = 1 + 1e-9
"""Two quotients compare as their products do, but for so much."""


class RowShare:
    """The rules above, over the rows of one batch.

    Many requests may wait, and most of them get nothing: each costs O(1). What costs O(rows) is done once for
    all takers, until a row changes hands.
    """

    __slots__ = ("_all", "_batch", "_changes", "_queue", "_ready")

    def __init__(self, batch: Batch, queue: WaitingQueue) -> None:
        self._batch, self._queue = batch, queue
        self._changes = -1
        """`_all` is of the batch after so many changes."""
        self._all: RowOffers | None = None
        """Every running request, whether it may yield now or later."""
        self._ready: RowOffers | None = None
        """Those that may yield now."""

    def look_again(self) -> None:
        """A step was planned, or a row has changed hands."""
        self._ready = None

    def victim(self, taker: Request) -> Request | None:
        """Who yields its row to the taker now, once nothing is in flight; None: nobody.

        The tenant with the most rows for its weight, of that the request that yielded least often, of those
        the one with the least to compute again.
        """
        assert not taker.in_batch, f"{taker.request_id} has a row already"
        if not self.may_yield_to(taker):
            return None
        if self._ready is None:
            ready = [each for each in self._batch.running if _is_ready(each)]
            self._ready = RowOffers(self._batch, self._queue, ready)
        return self._ready.first_for(taker, turns=True)

    def may_yield_to(self, taker: Request) -> bool:
        """Whether anybody may yield to the taker, now or after more steps in which nobody comes or goes."""
        if not self._queue.weight_of(taker):
            return False  # Shares do not count in this order.
        if self._all is None or self._changes != self._batch.changes:
            self._all = RowOffers(self._batch, self._queue, self._batch.running)
            self._changes = self._batch.changes
        if taker.fairness_key not in self._batch.rows_by_tenant:
            return self._all.num_for(taker) > 0
        return self._all.first_for(taker, turns=False) is not None


class RowOffers:
    """Running requests that yield to whichever taker may have their row, best victims first.

    Right until a request enters or leaves the batch.
    """

    __slots__ = ("_batch", "_classes", "_found", "_most", "_queue", "_ranked")

    def __init__(self, batch: Batch, queue: WaitingQueue, requests: Iterable[Request]) -> None:
        """O(rows log rows)."""
        self._batch, self._queue = batch, queue
        self._ranked = sorted(requests, key=self._rank, reverse=True)
        assert len(self._ranked) <= len(batch.running), "others have no row to offer"
        self._classes = [-each.priority for each in self._ranked]
        self._most: list[tuple[float, str, float]] = []
        """For the first so many: the most rows that one of their tenants has left for its weight, that
        tenant, and the most that another one has."""
        self._found: dict[tuple[str | None, int, float, int], Request | None] = {}
        self._count_most()

    def num_for(self, taker: Request) -> int:
        """How many of the first are of no better class than the taker. O(log rows)."""
        return bisect_right(self._classes, -taker.priority)

    def first_for(self, taker: Request, *, turns: bool) -> Request | None:
        """The best victim, if any. `turns`: by turns also, not by shares alone.

        O(log rows) where nothing is found, or was found for a request like it; else O(rows).
        """
        count, weight = self.num_for(taker), self._queue.weight_of(taker)
        assert weight > 0, "shares count in this order"
        own = taker.fairness_key
        num_own = self._batch.rows_by_tenant.get(own, 0)
        by_turns = turns and not num_own
        if not count:
            return None
        if not by_turns:
            most, tenant, next_most = self._most[count - 1]
            if (next_most if tenant == own else most) * weight * _ROUNDING < num_own + 1:
                return None
        turn_tokens = TURN_TOKENS if taker.num_generated else BLOCK_TOKENS
        like = (own if num_own else None, taker.priority, weight, turn_tokens)
        if like not in self._found:
            found = (
                each
                for each in islice(self._ranked, count)
                if each.fairness_key != own
                and (self._has_more(each, num_own + 1, weight) or (by_turns and _had_turn(each, turn_tokens)))
            )
            self._found[like] = next(found, None)
        return self._found[like]

    def _count_most(self) -> None:
        most, tenant, next_most = -1.0, "", -1.0
        rows, weight_of = self._batch.rows_by_tenant, self._queue.weight_of
        for each in self._ranked:
            key = each.fairness_key
            left = (rows[key] - 1) / weight_of(each)
            assert left >= 0, f"{each.request_id} has a row"
            if key == tenant:
                most = max(most, left)
            elif left > most:
                most, tenant, next_most = left, key, most
            else:
                next_most = max(next_most, left)
            self._most.append((most, tenant, next_most))

    def _has_more(self, each: Request, num_rows: int, weight: float) -> bool:
        """Whether its tenant would still have as many rows as the taker's, each by its weight."""
        left = self._batch.rows_by_tenant[each.fairness_key] - 1
        assert left >= 0, f"{each.request_id} has a row"
        return left * weight >= num_rows * self._queue.weight_of(each)

    def _rank(self, each: Request) -> tuple[int, float, int, int, tuple[int, int, int]]:
        rows = self._batch.rows_by_tenant[each.fairness_key]
        return (
            each.priority,
            rows / self._queue.weight_of(each),
            -each.num_yields,
            -(each.num_planned % BLOCK_TOKENS),
            each.order,
        )


def _is_ready(each: Request) -> bool:
    """Whether a request may yield its row now."""
    drawn = each.num_drawn_here
    assert drawn >= 0, f"{each.request_id} lost tokens"
    if each.status is not Status.RUNNING or drawn < (BLOCK_TOKENS if each.num_yields else 1):
        return False
    return each.num_tokens_max - len(each.tokens) > BLOCK_TOKENS  # Else its row is free soon.


def _had_turn(each: Request, turn_tokens: int) -> bool:
    return each.num_drawn_here >= turn_tokens and not each.num_planned % BLOCK_TOKENS
