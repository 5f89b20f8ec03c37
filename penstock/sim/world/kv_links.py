"""How what workers say of their KV caches reaches the gateways of a world, over channels that may lose it
(`KVEventChannel`).
"""

from collections.abc import Callable, Mapping, Sequence

from penstock.kv.events import KVEvent, Numbered
from penstock.sim.world.caches import Asked
from penstock.sim.world.facts import Member
from penstock.sim.world.gateway import SimGateway
from penstock.sim.world.messages import KVUpdate, Rank, Timeline
from penstock.types import WorkerId

Arrives = Callable[[int, dict[int, int], Member, int], int]
"""When a message arrives that leaves now, between a worker and the gateway with this number."""


class KVLinks:
    """Of one world; `fronts` are the gateways of each region, by number."""

    def __init__(
        self,
        timeline: Timeline,
        gateways: Sequence[SimGateway],
        fronts: Mapping[str, Sequence[int]],
        arrives_ns: Arrives,
    ) -> None:
        self._timeline, self._gateways, self._fronts = timeline, gateways, fronts
        self._arrives_ns = arrives_ns

    def cached(self, now_ns: int, member: Member, events: tuple[KVEvent, ...]) -> None:
        """A worker's cache has changed."""
        if (update := member.kv.said(events)) is not None:
            for number in self._fronts[member.pool.region]:
                self.tell(now_ns, self._gateways[number], member, update)

    def hear(self, now_ns: int, member: Member) -> None:
        """Its reports of its cache arrive again."""
        member.kv.is_lost = False
        for number in self._fronts[member.pool.region]:
            gateway = self._gateways[number]
            if (update := member.kv.anew()) is not None:
                self.tell(now_ns, gateway, member, update)
            elif not gateway.is_gone:
                gateway.kv_reconnected(now_ns, member.worker.id)

    def ask(self, now_ns: int, gateway: int, member: Member, asked: Asked) -> None:
        """A gateway asks for what it has missed."""
        when_ns = self._arrives_ns(now_ns, member.sent_ns, member, gateway)
        what = (self._gateways[gateway], member, asked)
        self._timeline.at(when_ns, member.worker.actor, Rank.MESSAGE, self._on_asked, what)

    def tell(self, now_ns: int, to: SimGateway, member: Member, update: KVUpdate) -> None:
        """Let a gateway know."""
        when_ns = self._arrives_ns(now_ns, member.retry_after_ns, member, to.number)
        self._timeline.at(when_ns, to.actor, Rank.MESSAGE, self._on_cached, (to, member.worker.id, update))

    def _on_cached(self, now_ns: int, what: tuple[SimGateway, WorkerId, KVUpdate]) -> None:
        gateway, worker_id, update = what
        if not gateway.is_gone:
            gateway.cached(now_ns, worker_id, update)

    def _on_asked(self, now_ns: int, what: tuple[SimGateway, Member, Asked]) -> None:
        gateway, member, asked = what
        if not member.worker.is_gone:
            replay = (gateway, member.worker.id, asked, member.kv.again(asked.first))
            when_ns = self._arrives_ns(now_ns, member.retry_after_ns, member, gateway.number)
            self._timeline.at(when_ns, gateway.actor, Rank.MESSAGE, self._on_again, replay)

    def _on_again(self, now_ns: int, what: tuple[SimGateway, WorkerId, Asked, Sequence[Numbered]]) -> None:
        gateway, worker_id, asked, batches = what
        if not gateway.is_gone:
            gateway.cached_again(now_ns, worker_id, asked, batches)
