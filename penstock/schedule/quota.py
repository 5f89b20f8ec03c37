"""How many KV blocks one tenant may hold: a tenant is a cache salt, as the gateway set it.

Blocks count while a running request holds them, a shared one once; what is only cached is nobody's. Over the
quota a tenant starts nothing new, and is the first to be preempted. Its waiting requests step aside into a
parking place, so that the queue moves on for the others.
"""

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
