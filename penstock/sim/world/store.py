"""The store of shared limits on virtual time: the real table of buckets, and what carries a gateway's
questions to it.

The other driver of the same two objects is gateway/shared/keeper.py.
"""

from penstock.clock import NS_PER_MS, NS_PER_S
from penstock.config.flow import SharedConfig
from penstock.policy.limits.lease import Leases
from penstock.policy.limits.lease_messages import LeaseReply
from penstock.policy.limits.lease_table import LeaseTable
from penstock.sim.world.events import Rank, Timeline

_HELLOS_PER_TTL = 3
_GATHER_NS = 2 * NS_PER_MS


class SharedStore:
    """The one store of all gateways.

    While it is `down` it answers nobody; it may come back without its memory.
    """

    __slots__ = ("_config", "_epoch", "down", "table")

    def __init__(self, config: SharedConfig) -> None:
        self._config, self._epoch = config, 1
        self.table = LeaseTable(config)
        self.down = False

    def forget(self) -> None:
        """Lose all that it knew."""
        self._epoch += 1
        self.table = LeaseTable(self._config, epoch=self._epoch)


class SimLeaseKeeper:
    """Keeps the leases of one gateway filled."""

    __slots__ = (
        "_actor", "_asked", "_config", "_due_ns", "_leases", "_link_ns", "_name", "_said_ns", "_store",
        "_timeline",
    )  # fmt: skip

    def __init__(
        self, leases: Leases, store: SharedStore, timeline: Timeline, *, actor: int, name: str, link_ns: int
    ) -> None:
        """`name` is the gateway's, for all time."""
        self._leases, self._store, self._timeline = leases, store, timeline
        self._actor, self._name, self._link_ns = actor, name, link_ns
        self._config = leases.config
        self._asked = 0
        """Numbers questions: answers to older ones come too late."""
        self._said_ns = 0
        self._due_ns: int | None = None
        leases.on_want = self._on_want

    def start(self, now_ns: int) -> None:
        """Say hello."""
        self._wake_at(now_ns)

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
