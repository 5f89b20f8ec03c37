"""KV blocks, shared: how many one tenant may hold (`KVQuota`), how many are kept free for answers that run
(`AdmissionReserve`), and which request gives way when they run out (`VictimChoice`).

A tenant is a cache salt, as the gateway set it. Its blocks count while a running request holds them, a shared
one once; what is only cached is nobody's. Over the quota a tenant starts nothing new, and is the first to be
preempted. Its waiting requests step aside into a parking place, so that the queue moves on for the others.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from heapq import heappop, heappush

from penstock.errors import KVQuotaExceeded
from penstock.kv.cache.block_pool import BlockPool
from penstock.kv.cache.manager import blocks_for
from penstock.schedule.queue import Order
from penstock.schedule.request import Request
from penstock.types import BLOCK_TOKENS

PARKED_MAX = 1024
"""Requests parked at most; beyond that the queue waits for its head, as it does without quotas."""


class KVQuota:
    """The bound, and the requests that wait for their own tenant to release blocks."""

    __slots__ = ("_num_parked", "_parked", "_pool", "blocks_max")

    def __init__(self, pool: BlockPool, fraction: float) -> None:
        self._pool = pool
        self.blocks_max = max(1, int(fraction * pool.num_blocks))
        """Blocks of one tenant."""
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
        """Whether the tenant may hold so many blocks more; always if it holds none, since `check_fits`.

        A quota of all there is bounds nobody. What does not fit then waits at the head, where nobody passes
        it.
        """
        if self.blocks_max >= self._pool.num_blocks:
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
        """Who has something parked."""
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


# How much room admission leaves for the answers of those that run.
#
# Room for every answer's `max_tokens` wastes most of the cache, since few answers get that long; room for
# none fills it with requests that are preempted for one another soon after. So a share `rho` of what the
# running rows are *expected* to generate is kept free: rho rises with every step in which somebody had to
# be preempted, and decays otherwise (after SGLang's adaptive new-token ratio).

RISE = 0.25
"""Added to rho by a step that preempted."""
DECAY = 1 - 1 / 256
"""What is left of rho after a step that did not: half of it after 180 steps."""
PRIOR_TOKENS = 128
"""Expected length of an answer before any of its class has ended."""
_MEMORY = 1 / 16
_CLASSES_MAX = 64
"""Priority classes with an estimate of their own; any further class shares one."""


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

        An answer that has outlived the estimate is expected to go on for another block, again and again.
        """
        may = request.num_tokens_max - len(request.tokens)
        assert may >= 0, f"{request.request_id} has more tokens than it may"
        mean = self._means.get(self._key(request.priority), PRIOR_TOKENS)
        return min(may, max(round(mean) - request.num_generated, BLOCK_TOKENS))

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
        known = blocks_for(len(request.tokens) + request.num_drawing) - len(request.table.blocks)
        expected = self.rho * self.estimate.remaining(request) if self.rho else 0.0
        return known + max(1, round(expected / BLOCK_TOKENS))


# Who gives way when KV blocks run out.
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
# Tenants whose counters are less than a grain (a step's tokens) above the least are alike: a step charges
# one of them that much at once, so less says only who was computed last. It is also what keeps two tenants
# from taking turns: whoever gave way for its share has a grain more than the other, which gives way for its
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
