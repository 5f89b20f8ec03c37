"""The adapters of a simulated worker: the engine's own pool (schedule/adapters.py); only the time of a read
is modelled.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from penstock.policy.placement.adapters import ResidencyOrder
from penstock.schedule.adapters import AdapterPool, PooledAdapter, Released
from penstock.sim.world.messages import Rank, Submission, Timeline
from penstock.types import RequestId


@dataclass(slots=True, frozen=True, kw_only=True)
class SimAdapterSpec:
    """The adapters that a worker has room for. All adapters are of one size."""

    names: tuple[str, ...]
    """All that it may be asked for: those that its gateway has told it of."""
    slots: int = 20
    """In memory, and in use at once."""
    read_ns: int = 500_000_000
    """For one, one at a time."""


@dataclass(slots=True, frozen=True)
class _Weights:
    num_bytes: int = 1


class SimAdapters:
    """One worker's."""

    def __init__(
        self,
        spec: SimAdapterSpec,
        timeline: Timeline,
        actor: int,
        *,
        on_read: Callable[[int, Sequence[Submission]], None],
    ) -> None:
        """`on_read` is called when another adapter is in memory, with the requests that can start with it."""
        self._spec, self._timeline, self._actor = spec, timeline, actor
        self._on_read = on_read
        self._entries: dict[RequestId, PooledAdapter] = {}
        self._held: dict[RequestId, Submission] = {}
        self.num_reads = 0
        self._given_up = 0
        """The number of the read that was given up last."""
        self.waits_ns: list[tuple[int, int]] = []
        """When each request went on, and what it had waited for its adapter."""
        self._pool: AdapterPool[Submission] = AdapterPool(
            timeline, slots=spec.slots, bytes_max=spec.slots, read=self._read, give_up=self._give_up
        )
        for name in spec.names:
            self._pool.load(name, name, name)

    @property
    def loaded(self) -> frozenset[str]:
        """Those in memory."""
        return frozenset(entry.name for entry in self._pool.entries() if entry.packed is not None)

    def waiting(self) -> Iterator[Submission]:
        """Requests that wait for an adapter."""
        return iter(self._held.values())

    def pass_on(
        self, now_ns: int, message: Submission | RequestId | ResidencyOrder
    ) -> Sequence[Submission | RequestId]:
        """A message on its way to the worker; the messages for its engine."""
        if isinstance(message, ResidencyOrder):
            self._take_order(message)
            return ()
        if isinstance(message, Submission):
            if not message.adapter:
                return (message,)
            self._held[message.id] = message
            asked = self._pool.submit(message.id, message, message.adapter, "", now_ns)
            return self._go_on(now_ns, asked)
        if not self._pool.abort(message):
            return (message,)
        return (self._held.pop(message), message)  # The engine says that it has ended.

    def _take_order(self, order: ResidencyOrder) -> None:
        if order.keep:
            self._pool.keep(order.names)
        else:
            for name in order.names:
                self._pool.load(name, name, name, is_wanted=True)

    def finished(self, now_ns: int, request_id: RequestId) -> Sequence[Submission]:
        """A request has ended; those that can start after it."""
        entry = self._entries.pop(request_id, None)
        return () if entry is None else self._go_on(now_ns, self._pool.finished(entry))

    def check_invariants(self) -> None:
        """The invariants."""
        self._pool.check_invariants()

    def _go_on(self, now_ns: int, released: Released[Submission]) -> Sequence[Submission]:
        assert not released.failed, "all of them can be read"
        for each in released.ready:
            self._entries[each.request.id] = each.entry
            del self._held[each.request.id]
            self.waits_ns.append((now_ns, now_ns - each.arrived_ns))
        return [each.request for each in released.ready]

    def _read(self, entry: PooledAdapter) -> None:
        self.num_reads += 1
        when_ns = self._timeline.now_ns() + self._spec.read_ns
        self._timeline.at(when_ns, self._actor, Rank.TIMER, self._was_read, (entry, self.num_reads))

    def _was_read(self, now_ns: int, read: tuple[PooledAdapter, int]) -> None:
        entry, number = read
        if number != self._given_up:
            self._on_read(now_ns, self._go_on(now_ns, self._pool.take(entry, _Weights(), entry.name)))

    def _give_up(self, entry: PooledAdapter) -> None:
        self._given_up = self.num_reads
        self._timeline.at(self._timeline.now_ns(), self._actor, Rank.TIMER, self._ends_early, entry)

    def _ends_early(self, now_ns: int, entry: PooledAdapter) -> None:
        del now_ns
        self._pool.given_up(entry)
