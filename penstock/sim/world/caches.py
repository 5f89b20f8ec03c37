"""A simulated gateway's view of its workers' KV caches: the real index, fed by the real block pools'
events.
"""

from collections.abc import Callable, Sequence
from typing import cast

from penstock import rng
from penstock.config.branch import extended
from penstock.config.tree import Config
from penstock.kv.events import AllBlocksCleared, BlockStored, KVEvent, Numbered
from penstock.kv.hashing import BlockHasher, PromptKeyMaker, PromptKeys
from penstock.kv.index.block_names import Cleared, Event, Removed, Stored
from penstock.kv.index.locality import KVLocality
from penstock.kv.index.prefix_index import Tier
from penstock.kv.index.worker_cache_view import KV_INDEX_LIMITS, WorkerCacheView
from penstock.policy.placement.adapters import ResidencyOrder, ignore_order
from penstock.policy.placement.pick import DecisionLog, LeastLoaded
from penstock.policy.placement.route import Router
from penstock.policy.queueing.capacity import Placement
from penstock.policy.terms import PlacementTerms
from penstock.sim.traffic.prompts import PromptBlockNames, SimRequest
from penstock.sim.world.messages import KVUpdate
from penstock.types import WorkerId

_HASHERS_MAX = 256
"""The hashers whose names are kept: every worker that computes something else has one."""


class Chains:
    """The names of the blocks of prompts, by hasher: one for each identity that workers have announced."""

    __slots__ = ("_names",)

    def __init__(self) -> None:
        self._names: dict[BlockHasher, PromptBlockNames] = {}

    def of(self, hasher: BlockHasher) -> PromptBlockNames:
        """Of the workers that go by it."""
        found = self._names.get(hasher)
        if found is None:
            if len(self._names) >= _HASHERS_MAX:
                del self._names[next(iter(self._names))]
            found = self._names[hasher] = PromptBlockNames(hasher)
        return found


class SegmentKeys(PromptKeys):
    """Keys of a prompt that is made of segments, named by them (prompts.py), not hashed token by token."""

    __slots__ = ("_chains", "_public_tokens", "_segments")

    def __init__(self, maker: PromptKeyMaker, chains: Chains, request: SimRequest, salt: bytes) -> None:
        public = request.public_tokens
        super().__init__(
            maker, range(request.prompt_tokens), salt=salt, public_tokens=public, adapter=request.adapter
        )
        self._chains, self._segments, self._public_tokens = chains, request.prompt, public

    def own(self, hasher: BlockHasher) -> Sequence[int]:
        """See `PromptKeys`."""
        if (found := self._own.get(hasher)) is None:
            found = self._own[hasher] = self._chains.of(hasher).keys(
                self._segments, salt=self.owner, adapter=self.adapter, public_tokens=self._public_tokens
            )
        return found


def _event_of(event: KVEvent) -> Event:
    """As `events_of_engine` reads an engine's. The names of a simulated worker's blocks are keys already
    (`SimWorker._names_of`), and all of its blocks are on its device.
    """
    if isinstance(event, AllBlocksCleared):
        return Cleared()
    keys = cast(tuple[int, ...], event.block_hashes)
    if not isinstance(event, BlockStored):
        return Removed(keys, Tier.DEVICE)
    return Stored(keys, cast(int | None, event.parent_block_hash), b"", event.block_size, Tier.DEVICE)


class Asked:
    """One request for what is missing of a worker's events; only the last one of a worker counts."""

    __slots__ = ("first",)

    def __init__(self, first: int) -> None:
        self.first = first


class Caches:
    """One gateway's. Off where placement asks for nothing of it."""

    def __init__(self, config: Config, *, hash_key: bytes, seed: int, gateway: int) -> None:
        """`hash_key` is that of the launcher of its workers."""
        self._chains = Chains()
        self._config = extended(config.routing.placement, PlacementTerms)
        self._seed, self._gateway = seed, gateway
        self.is_on = self._config.policy != "least_loaded"
        self.locality = KVLocality(KV_INDEX_LIMITS, hash_key)
        self._asked: dict[WorkerId, Asked] = {}
        self.decisions = DecisionLog(kept_max=self._config.decisions_kept)

    def placement(
        self, route: str, *, on_order: Callable[[ResidencyOrder], None] = ignore_order
    ) -> Placement:
        """Of one model; `on_order` tells workers which adapters are to be in memory."""
        if not self.is_on:
            return LeastLoaded()
        draw = rng.stream(self._seed, f"placement/{self._gateway}/{route}").randrange
        router = Router(route, self._config, draw, locality=self.locality, log=self.decisions)
        router.adapters.on_order = on_order
        return router

    def keys(self, route: str, request: SimRequest, salt: bytes) -> PromptKeys | None:
        """Of a tenant's request; None where they are not used."""
        return SegmentKeys(self.locality.maker(route), self._chains, request, salt) if self.is_on else None

    def joined(self, worker: WorkerId, route: str, identity: str) -> None:
        """A worker is there, and has announced what it computes."""
        if self.is_on:
            self.locality.add(worker, model=route, is_own=True)
            self.locality.identify(worker, identity)

    def left(self, worker: WorkerId) -> None:
        """A worker is gone."""
        self._asked.pop(worker, None)
        self.locality.remove(worker)

    def received(self, worker: WorkerId, update: KVUpdate) -> Asked | None:
        """Words of a worker about its cache.

        Returns what to ask it for, if anything is missing that was not asked for.
        """
        if (cache_view := self.locality.get(worker)) is None:
            return None
        if isinstance(update, Numbered):
            cache_view.live(*update)
        else:
            cache_view.hear([_event_of(event) for event in update])
        return self._ask(worker, cache_view)

    def received_again(self, worker: WorkerId, asked: Asked, batches: Sequence[Numbered]) -> Asked | None:
        """The events that it could send again; the same."""
        cache_view = self.locality.get(worker)
        if cache_view is None or self._asked.get(worker) is not asked:
            return None
        del self._asked[worker]
        for batch in batches:
            cache_view.again(*batch)
        cache_view.end_of_replay()
        return self._ask(worker, cache_view)

    def reconnected(self, worker: WorkerId) -> Asked | None:
        """It was not heard for a while, and what was said last may be missing; the same."""
        if (cache_view := self.locality.get(worker)) is None:
            return None
        cache_view.reconnected()
        return self._ask(worker, cache_view)

    def _ask(self, worker: WorkerId, cache_view: WorkerCacheView) -> Asked | None:
        if cache_view.wanted is None or worker in self._asked:
            return None
        asked = self._asked[worker] = Asked(cache_view.ask())
        return asked
