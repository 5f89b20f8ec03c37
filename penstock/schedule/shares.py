"""The parts of the engine that tenants share: its rows (`RowShare`) and its KV blocks (`KVQuota`)."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from itertools import islice

from penstock.errors import KVQuotaExceeded
from penstock.kv.cache.block_pool import BlockPool
from penstock.kv.cache.manager import blocks_for
from penstock.schedule.batch import Batch
from penstock.schedule.queue import Order, WaitingQueue
from penstock.schedule.request import Request, Status
from penstock.types import BLOCK_TOKENS

# Which running request yields its row to a waiting tenant, while no row is left for it.
#
# Rows are shared by tenant (`fairness_key`), in proportion to weights; a tenant that is alone has all of
# them.
#
#     share    the waiting tenant takes a row from one that then still has as many rows as it has itself
#     turn     a waiting tenant without a row takes that of a request that has had its row for `TURN_TOKENS`:
#              so rows go round when there are more tenants than rows. For a first token a block is enough
#
# A lower class never takes from a better one, and nothing is taken for a tenant from itself.
#
# The request that yields keeps what it computed: its full blocks stay in the prefix cache, it waits at
# the front of its tenant's line and continues token-exactly, as after a preemption. How often it yields
# is bounded: the first time after one token at the earliest, then once per `BLOCK_TOKENS` of its answer.
# So each time it has gained a block that it keeps, and computes fewer tokens than that again. The first
# rule cannot go back and forth between two tenants: the one that lost the row would have more rows than
# the other by taking it back.

TURN_TOKENS = 64
"""Tokens of an answer for which a request has its row before tenants without a row may take it. It then
yields at the end of a block, and computes nothing again. One that waits for its first token takes a row that
was had for a block: its client sees nothing meanwhile."""
_ROUNDING = 1 + 1e-9
"""Two quotients compare as their products do, but for so much."""


class RowShare:
    """The rules above, over the rows of one batch.

    Many requests may wait, and most of them get nothing: each costs O(1). Work that costs O(rows) is done
    once for all takers, until a row changes hands.
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
        """The request that yields its row to the taker now, once nothing is in flight; None: none.

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
        """Whether a request may yield to the taker, now or after more steps in which none comes or leaves."""
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

    __slots__ = ("_batch", "_classes", "_found", "_largest", "_queue", "_ranked")

    def __init__(self, batch: Batch, queue: WaitingQueue, requests: Iterable[Request]) -> None:
        """O(rows log rows)."""
        self._batch, self._queue = batch, queue
        self._ranked = sorted(requests, key=self._rank, reverse=True)
        assert len(self._ranked) <= len(batch.running), "others have no row to offer"
        self._classes = [-each.priority for each in self._ranked]
        self._largest: list[tuple[float, str, float]] = []
        """For the first so many: the most rows that one of their tenants has left for its weight, that
        tenant, and the most that another one has."""
        self._found: dict[tuple[str | None, int, float, int], Request | None] = {}
        self._count_largest()

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
            largest, tenant, next_largest = self._largest[count - 1]
            if (next_largest if tenant == own else largest) * weight * _ROUNDING < num_own + 1:
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

    def _count_largest(self) -> None:
        largest, tenant, next_largest = -1.0, "", -1.0
        rows, weight_of = self._batch.rows_by_tenant, self._queue.weight_of
        for each in self._ranked:
            key = each.fairness_key
            left = (rows[key] - 1) / weight_of(each)
            assert left >= 0, f"{each.request_id} has a row"
            if key == tenant:
                largest = max(largest, left)
            elif left > largest:
                largest, tenant, next_largest = left, key, largest
            else:
                next_largest = max(next_largest, left)
            self._largest.append((largest, tenant, next_largest))

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


# KV blocks, shared: how many one tenant may hold (`KVQuota`), how many are kept free for answers that run
# (`AdmissionReserve`), and which request gives way when they run out (`VictimChoice`).
#
# A tenant is a cache salt, as the gateway set it. Its blocks count while a running request holds them, a
# shared one once; blocks that are only cached belong to none. Over the quota a tenant starts nothing new, and
# is the first to be preempted. Its waiting requests step aside into a parking place, so that the queue moves
# on for the others.

PARKED_MAX = 1024
"""Requests parked at most; beyond that the queue waits for its head, as it does without quotas."""


class KVQuota:
    """The bound, and the requests that wait for their own tenant to release blocks."""

    __slots__ = ("_num_parked", "_parked", "_pool", "blocks_max", "bounds")

    def __init__(self, pool: BlockPool, fraction: float) -> None:
        self._pool = pool
        self.blocks_max = max(1, int(fraction * pool.num_blocks))
        """Blocks of one tenant."""
        self.bounds = self.blocks_max < pool.num_blocks
        """Whether it bounds anybody: a quota of all blocks does not. A request that does not fit then waits
        at the head, where no other passes it."""
        self._parked: dict[bytes, list[tuple[Order, Request]]] = {}  # Heaps.
        self._num_parked = 0

    def check_fits(self, request: Request, num_tokens: int) -> None:
        """Refuse what the quota will never let run.

        Raises:
            KVQuotaExceeded: alone it would need more than the tenant may hold.
        """
        if blocks_for(num_tokens) > self.blocks_max:
            prompt = blocks_for(request.num_prompt) > self.blocks_max
            raise KVQuotaExceeded(
                f"prompt and answer of up to {num_tokens} tokens are over the KV quota of one tenant, which "
                f"is {self.blocks_max * BLOCK_TOKENS} tokens",
                param="prompt" if prompt else "max_tokens",
            )

    def is_over(self, request: Request) -> bool:
        """Whether the request's tenant holds more than it may."""
        return self._pool.num_used_by(request.salt) > self.blocks_max

    def admits(self, request: Request, num_blocks: int) -> bool:
        """Whether the tenant may hold so many blocks more; always if it holds none, since `check_fits`."""
        if not self.bounds:
            return True
        assert num_blocks >= 0, num_blocks
        held = self._pool.num_used_by(request.salt)
        return not held or held + num_blocks <= self.blocks_max

    def is_behind(self, request: Request) -> bool:
        """Whether one of the tenant is parked that came before: then this one parks too, without a look."""
        parked = self._parked.get(request.salt)
        return parked is not None and parked[0][0] < request.order

    def park(self, request: Request) -> bool:
        """Put a waiting request aside until its tenant releases blocks; False if no more can be parked."""
        if self._num_parked >= PARKED_MAX:
            return False
        heappush(self._parked.setdefault(request.salt, []), (request.order, request))
        self._num_parked += 1
        return True

    def tenants(self) -> list[bytes]:
        """The tenants with parked requests."""
        return list(self._parked)

    def unpark(self, salt: bytes) -> Request | None:
        """Take out the first that the tenant has parked, if any: it may ask again."""
        parked = self._parked.get(salt)
        if parked is None:
            return None
        _, request = heappop(parked)
        self._num_parked -= 1
        assert request.salt == salt, f"{request.request_id} is parked with another tenant's requests"
        assert self._num_parked >= 0, "more is let back than was parked"
        if not parked:
            del self._parked[salt]
        return request

    def remove(self, request: Request) -> bool:
        """Take out a request that was aborted; whether it was parked. O(parked of its tenant)."""
        parked = self._parked.get(request.salt, [])
        if (request.order, request) not in parked:
            return False
        kept = sorted(entry for entry in parked if entry[1] is not request)
        assert len(kept) == len(parked) - 1, f"{request.request_id} is parked twice"
        self._num_parked -= 1
        if kept:
            self._parked[request.salt] = kept  # Sorted is a heap.
        else:
            del self._parked[request.salt]
        return True

    def __len__(self) -> int:
        """How many are parked."""
        return self._num_parked


# How many KV blocks admission leaves for the answers of those that run.
#
# Blocks for every answer's `max_tokens` waste most of the cache, since few answers get that long; blocks for
# none fill it with requests that are preempted for one another soon after. So a share `rho` of what the
# running rows are *expected* to generate is kept free: rho rises with every step in which a request had to be
# preempted, and decays otherwise (after SGLang's adaptive new-token ratio).

RISE = 0.25
"""Added to rho by a step that preempted."""
DECAY = 1 - 1 / 256
"""The part of rho that remains after a step that did not: half of it after 180 steps."""
PRIOR_TOKENS = 128
"""Expected length of an answer before any of its class has ended."""
_MEMORY = 1 / 16
_CLASSES_MAX = 64
"""Priority classes with an estimate of their own; any further class shares one."""
_NO_CLASS = 1 << 62


class OutputEstimate:
    """How long answers get, by priority class: a running mean over the last 16 or so."""

    __slots__ = ("_means",)

    def __init__(self) -> None:
        self._means: dict[int | None, float] = {}

    def learn(self, request: Request) -> None:
        """Count an answer that ended, for whatever reason."""
        key = self._key(request.priority)
        mean = self._means.get(key, float(PRIOR_TOKENS))
        self._means[key] = mean + _MEMORY * (request.num_generated - mean)

    def remaining(self, request: Request) -> int:
        """Tokens that the request is expected to generate yet: at most what it may, at least a block of that.

        An answer that has outlived the estimate is expected to continue for another block, again and again.
        """
        return self.remaining_of((request,))[0]

    def remaining_of(self, requests: Iterable[Request]) -> list[int]:
        """`remaining` of each. One loop: all rows are asked about whenever one may start."""
        found, means, priority, expected = list[int](), self._means, _NO_CLASS, 0
        for request in requests:
            if request.priority != priority:
                priority = request.priority
                expected = round(means.get(self._key(priority), PRIOR_TOKENS))
            known = len(request.tokens)
            may, left = request.num_tokens_max - known, expected - known + request.num_prompt
            assert may >= 0, f"{request.request_id} has more tokens than it may"
            if left < BLOCK_TOKENS:
                left = BLOCK_TOKENS
            found.append(may if may < left else left)
        return found

    def _key(self, priority: int) -> int | None:
        return priority if priority in self._means or len(self._means) < _CLASSES_MAX else None


class AdmissionReserve:
    """The share rho, in [0, 1], and what it comes to in blocks."""

    __slots__ = ("estimate", "rho")

    def __init__(self) -> None:
        self.estimate = OutputEstimate()
        self.rho = 0.0
        """Nothing is held back before the first preemption shows that it should be."""

    def step_over(self, *, preempted: bool) -> None:
        """Adapt to a step that was planned."""
        self.rho = min(self.rho + RISE, 1.0) if preempted else self.rho * DECAY
        assert 0.0 <= self.rho <= 1.0, self.rho

    @property
    def level(self) -> int:
        """Rho in sixteenths: changes when a refused request should ask again."""
        return int(16 * self.rho)

    def blocks_owed(self, request: Request) -> int:
        """Blocks to keep for a running request: for its known tokens, and for its share of expected ones.

        At least one more than it has known tokens for: a row that decodes needs that within 16 steps.
        """
        return self.blocks_owed_to((request,))

    def blocks_owed_to(self, requests: Sequence[Request]) -> int:
        """The same for several, together."""
        num_blocks, rho, expected = 0, self.rho, list[int]()
        if rho:
            expected = self.estimate.remaining_of(requests)
        for i, request in enumerate(requests):
            num_tokens = len(request.tokens) + request.num_drawing
            num_blocks += -(-num_tokens // BLOCK_TOKENS) - len(request.table.blocks)
            more = round(rho * expected[i] / BLOCK_TOKENS) if rho else 1
            num_blocks += more if more > 1 else 1
        return num_blocks


# The request that gives way when KV blocks run out.
#
# Everything is taken from a victim and it waits to be resumed, so the choice is who loses least:
#
#     1. tenants that hold more than their quota go first
#     2. then the lowest priority class
#     3. within a class: those who were not preempted too often already (the shield)
#     4. then those whose tenant was served most, by the counters that order the queue (fair scheduling only)
#     5. then whose work is quickest to do again
#     6. then who came last
#
# Tenants whose counters are less than a grain (a step's tokens) above the least are alike: a step charges one
# of them that much at once, so less says only who was computed last. It is also what keeps two tenants from
# taking turns: a tenant that gave way for its share has a grain more than the other, which gives way for its
# own only with a grain more in turn; so it was served twice that in between. Among tenants alike, and with
# one tenant, the least work counts.
#
# The first of all running requests in order (class, arrival) is never a victim of others. It gets its
# blocks by taking them from everybody else if need be, so it always advances and ends; then the next is the
# first. Hence every request ends, whatever the other rules say.


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
        assert running, "no request runs that could give way"
        if len(running) == 1:
            return running[0]
        others, least = running[1:], dict[int, int]()
        for request in others:
            served = self._served(request)
            least[request.priority] = min(served, least.get(request.priority, served))
        return max(others, key=lambda request: self._rank(request, least[request.priority]))

    def work_lost(self, request: Request) -> int:
        """Stored tokens that go with the request: those in blocks that no other request holds.

        Blocks that others hold are the head of its table: sharing a block means sharing all before it.
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
