"""The store that gateways share on virtual time: the real table of buckets, and what carries a gateway's
questions to it; and what carries fair shares between gateways.

The other drivers of the same objects are gateway/shared/keeper.py and gateway/shared/fair.py.
"""

from penstock.clock import NS_PER_MS, NS_PER_S
from penstock.config.flow import SharedConfig
from penstock.config.tree import Config
from penstock.policy.limits.lease import Leases
from penstock.policy.limits.lease_table import LeaseReply, LeaseTable
from penstock.policy.limits.rate_limit import Limiter
from penstock.policy.queueing.fair_counters import SHARE_S, FairCounters, ServedUnits
from penstock.sim.world.messages import Rank, Timeline

_HELLOS_PER_TTL = 3
_GATHER_NS = 2 * NS_PER_MS


class SharedStore:
    """The one store of all gateways.

    While it is `down` it answers no request; it may come back without its memory.
    """

    __slots__ = ("_config", "_epoch", "down", "listeners", "table")

    def __init__(self, config: SharedConfig) -> None:
        self._config, self._epoch = config, 1
        self.table = LeaseTable(config)
        self.down = False
        self.listeners: list[SimFairExchange] = []
        """Of the channel on which gateways tell each other what tenants were served."""

    def forget(self) -> None:
        """Lose all that it knew."""
        self._epoch += 1
        self.table = LeaseTable(self._config, epoch=self._epoch)


class SimLeaseKeeper:
    """Keeps the leases of one gateway filled."""

    __slots__ = (
        "_actor", "_asked", "_config", "_due_ns", "_leases", "_link_ns", "_name", "_said_ns", "_store",
        "_timeline", "limiter",
    )  # fmt: skip

    def __init__(
        self, config: Config, store: SharedStore, timeline: Timeline, *, actor: int, name: str, link_ns: int
    ) -> None:
        """`name` is the gateway's, for all time."""
        self._leases, self._store, self._timeline = Leases(config.shared), store, timeline
        self._actor, self._name, self._link_ns = actor, name, link_ns
        self._config = self._leases.config
        self.limiter = Limiter(config.limits, self._leases.make_bucket)
        self._asked = 0
        """Numbers questions: answers to older ones come too late."""
        self._said_ns = 0
        self._due_ns: int | None = None
        self._leases.on_want = self._on_want
        self._wake_at(timeline.now_ns())  # To say hello.

    def _on_want(self) -> None:
        self._wake_at(self._timeline.now_ns() + _GATHER_NS)

    def _wake_at(self, when_ns: int) -> None:
        if self._due_ns is None or when_ns < self._due_ns:
            self._due_ns = when_ns
            self._timeline.at(when_ns, self._actor, Rank.TIMER, self._on_wake, when_ns)

    def _on_wake(self, now_ns: int, due_ns: int) -> None:
        if self._due_ns != due_ns:
            return
        self._due_ns = None
        self._leases.look_for_idle(now_ns)
        asks = self._leases.asks(now_ns)
        self._asked += 1
        self._said_ns = now_ns
        asked, timeline = self._asked, self._timeline
        if not self._store.down:
            reply = self._store.table.lease(now_ns + self._link_ns, self._name, asks)
            when_ns = now_ns + 2 * self._link_ns
            timeline.at(when_ns, self._actor, Rank.MESSAGE, self._on_reply, (asked, reply))
        else:
            when_ns = now_ns + int(self._config.timeout_s * NS_PER_S)
            timeline.at(when_ns, self._actor, Rank.TIMER, self._on_timeout, asked)

    def _on_reply(self, now_ns: int, what: tuple[int, LeaseReply]) -> None:
        asked, reply = what
        if asked == self._asked:
            self._leases.granted(now_ns, reply)
            self._go_on(now_ns)

    def _on_timeout(self, now_ns: int, asked: int) -> None:
        if asked == self._asked:
            self._leases.failed(now_ns)
            self._wake_at(now_ns + int(self._config.retry_s * NS_PER_S))

    def _go_on(self, now_ns: int) -> None:
        hello_ns = self._said_ns + int(self._config.gateway_ttl_s * NS_PER_S) // _HELLOS_PER_TTL
        wanted_ns = self._leases.next_ns()
        due_ns = min(hello_ns, now_ns + self._leases.lease_ns)
        if wanted_ns is not None:
            due_ns = min(due_ns, max(wanted_ns, now_ns + _GATHER_NS))
        self._wake_at(due_ns)

    def close(self) -> None:
        """Ask nothing any more."""
        self._asked, self._due_ns = -1, -1


class SimFairExchange:
    """Tells the other gateways what one has served, and counts what they tell, while the store is there."""

    __slots__ = ("_actor", "_counters", "_link_ns", "_store", "_timeline")

    def __init__(
        self, counters: FairCounters, store: SharedStore, timeline: Timeline, *, actor: int, link_ns: int
    ) -> None:
        self._counters, self._store, self._timeline = counters, store, timeline
        self._actor, self._link_ns = actor, link_ns
        store.listeners.append(self)
        self._tell(timeline.now_ns(), None)

    def close(self) -> None:
        """Tell nothing more."""
        self._store.listeners.remove(self)

    def _tell(self, now_ns: int, _: None) -> None:
        if self not in self._store.listeners:
            return
        served, timeline = self._counters.take(), self._timeline
        if served and not self._store.down:
            for other in self._store.listeners:
                if other is not self:
                    when_ns = now_ns + 2 * self._link_ns
                    timeline.at(when_ns, other._actor, Rank.MESSAGE, other._heed, served)
        timeline.at(now_ns + int(SHARE_S * NS_PER_S), self._actor, Rank.TIMER, self._tell, None)

    def _heed(self, now_ns: int, served: tuple[ServedUnits, ...]) -> None:
        del now_ns
        self._counters.heed(served)
