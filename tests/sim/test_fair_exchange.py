"""Fair shares between simulated gateways that share a store."""

from types import SimpleNamespace

from penstock.clock import NS_PER_MS
from penstock.config.flow import SharedConfig
from penstock.policy.queueing.band import Work
from penstock.policy.queueing.fair_counters import SHARE_S, FairCounters
from penstock.policy.queueing.fair_queue import FairQueue
from penstock.policy.terms import QueueTerms
from penstock.sim.world.messages import Timeline
from penstock.sim.world.store import SharedStore, SimFairExchange
from penstock.types import RequestId, TenantId

LINK_NS = 3 * NS_PER_MS
SHARE_NS = int(SHARE_S * 1e9)


class Gateways:
    """Two of them, and what they share."""

    def __init__(self) -> None:
        self.timeline, self.store = Timeline(), SharedStore(SharedConfig(url="redis://store"))
        self.queues = [FairQueue(QueueTerms()) for _ in range(2)]
        self.exchanges = []
        for actor, queue in enumerate(self.queues):
            model_queue = SimpleNamespace(queue=queue)
            counters = FairCounters(["m"], lambda _, model_queue=model_queue: model_queue)
            self.exchanges.append(
                SimFairExchange(counters, self.store, self.timeline, actor=actor, link_ns=LINK_NS)
            )
            for number in range(4):
                name = RequestId(f"{actor}-{number}")
                queue.push(0, Work(id=name, tenant=TenantId("a"), band="", arrived_ns=0, prompt_tokens=100))

    def run(self, until_ns: int) -> None:
        while (next_ns := self.timeline.next_ns) is not None and next_ns <= until_ns:
            self.timeline.step()

    def served(self, number: int) -> float:
        return self.queues[number].served("default", TenantId("a"))

    def start(self, number: int) -> None:
        assert self.queues[number].pop(0, lambda _: True) is not None


def test_a_gateway_counts_what_another_one_has_served() -> None:
    world = Gateways()
    world.start(0)
    before = world.served(1)
    world.run(SHARE_NS + 2 * LINK_NS - 1)
    assert world.served(1) == before
    world.run(SHARE_NS + 2 * LINK_NS)
    assert world.served(1) - before == world.served(0) > 0


def test_while_the_store_is_away_each_counts_for_itself_and_nothing_is_said_later() -> None:
    world = Gateways()
    world.store.down = True
    world.start(0)
    before = world.served(1)
    world.run(2 * SHARE_NS)
    world.store.down = False
    world.run(4 * SHARE_NS)
    assert world.served(1) == before
    world.exchanges[1].close()
    world.start(0)
    world.run(6 * SHARE_NS)
    assert world.served(1) == before, "one that has left hears nothing"
