"""Which workers of a model keep which adapters (LoRA) in memory, and what one waits for that is not there.

    demand    requests for each adapter, and their tokens, halved every five minutes
    replicas  one, and one more for every half of a worker's part of all tokens
    homes     those of the most requests first, until all places are taken; who has a place keeps it until
              another one is wanted much more. A few places of each worker are no adapter's: what is asked for
              rarely comes there
    waits     what a request waits at a worker: nothing, what is left of a load that was ordered, or the loads
              before it and its own

Pure. Worked out at the arrival of requests, at most once a second: an adapter without requests moves nothing.
Loads are ordered when a request arrives, before it has a worker. A `ResidencyOrder` goes to a worker that can
be told; one that cannot (a foreign engine that loads by itself) is given the requests all the same, which has
the same effect on what it keeps.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass

from penstock.clock import NS_PER_S
from penstock.policy.queueing.capacity import CapacityTable, WorkerCapacity
from penstock.types import WorkerId

HALF_LIFE_S = 300.0
PLAN_S = 1.0
REPLICA_SHARE = 0.5
"""A worker's part of the demand that one adapter may be before it gets another replica."""
STAYS = 1.2
"""An adapter at home gives way to one that is wanted so many times as much: evictions cost loads."""
NOBODYS = 20
"""One in so many places of a worker is no adapter's, at least one of several."""
DEMAND_MAX = 4096
"""Adapters whose demand is remembered: those that were asked for last."""
_HOME = 0.8
"""Of a load's time, what counts where the adapter has its home: there it will be wanted again."""
_ORDERED = 0.5
"""The share of the rest of a load on its way that counts: else a worker that is a little less busy would be
given the request, and would load the same again."""
_FORGET_S = 60.0
"""A load that was ordered and is over due by so much is not expected any more."""


@dataclass(slots=True, frozen=True)
class ResidencyOrder:
    """The adapters that a worker is to have in memory."""

    worker: WorkerId
    names: tuple[str, ...]
    keep: bool
    """Keep all of these, the most wanted first, in place of what was said before; else: a request for it will
    come."""


@dataclass(slots=True, frozen=True)
class AdapterDemand:
    """How much an adapter was asked for of late."""

    requests: float = 0.0
    tokens: float = 0.0
    at_ns: int = 0

    def now(self, now_ns: int) -> "AdapterDemand":
        """The rest of it."""
        left = 0.5 ** ((now_ns - self.at_ns) / (HALF_LIFE_S * NS_PER_S))
        return AdapterDemand(self.requests * left, self.tokens * left, now_ns)


def ignore_order(order: ResidencyOrder) -> None:
    """There is no worker to order."""
    del order


class AdapterPlacement:
    """One for each model."""

    def __init__(self, *, load_s: float) -> None:
        """`load_s`: what a load takes at workers that do not tell."""
        self._load_ns = int(load_s * NS_PER_S)
        self._demand: OrderedDict[str, AdapterDemand] = OrderedDict()
        self._homes: dict[str, tuple[WorkerId, ...]] = {}
        self._kept: dict[WorkerId, tuple[str, ...]] = {}
        """The adapters that each worker was ordered to keep."""
        self._loading: dict[WorkerId, dict[str, int]] = {}
        """Loads that were caused -> when they should be over."""
        self._planned_ns: int | None = None
        self.on_order: Callable[[ResidencyOrder], None] = ignore_order
        """Carries an order out."""

    def homes(self, adapter: str) -> Collection[WorkerId]:
        """The workers that are to keep it."""
        return self._homes.get(adapter, ())

    def asked(self, now_ns: int, adapter: str, tokens: int, workers: CapacityTable) -> None:
        """A request for it came, of so many tokens. Gives the orders that follow."""
        assert adapter, "a request for the model itself needs none"
        before = self._demand.pop(adapter, AdapterDemand()).now(now_ns)
        if len(self._demand) >= DEMAND_MAX:
            self._demand.popitem(last=False)
        self._demand[adapter] = AdapterDemand(before.requests + 1, before.tokens + tokens, now_ns)
        if self._planned_ns is None or now_ns - self._planned_ns >= PLAN_S * NS_PER_S:
            self._planned_ns = now_ns
            self._plan(now_ns, workers)
        self._order_load(now_ns, adapter, workers)

    def wait_ns(self, now_ns: int, worker: WorkerCapacity, adapter: str) -> int:
        """The wait of a request for it that is sent there now, for its load."""
        view = worker.view
        if view.adapters is None or not view.adapters_max:
            return 0 if view.adapters is not None and adapter in view.adapters else self._load_ns
        loading = self._loading.get(worker.id)
        if adapter in view.adapters:
            if loading is not None:
                loading.pop(adapter, None)
            return 0
        load_ns = view.adapter_load_ns or self._load_ns
        due_ns = loading.get(adapter) if loading is not None else None
        if due_ns is not None and now_ns - due_ns < _FORGET_S * NS_PER_S:
            return int(max(due_ns - now_ns, load_ns // 8) * _ORDERED)
        wait_ns = self._free_ns(now_ns, worker) - now_ns + load_ns
        return int(wait_ns * _HOME) if worker.id in self.homes(adapter) else wait_ns

    def started(self, now_ns: int, adapter: str, worker: WorkerCapacity) -> None:
        """A request for it was sent there: it is loaded there if it is not yet."""
        view = worker.view
        if view.adapters is None or not view.adapters_max or adapter in view.adapters:
            return
        loading = self._loading.setdefault(worker.id, {})
        if adapter not in loading:
            loading[adapter] = self._free_ns(now_ns, worker) + (view.adapter_load_ns or self._load_ns)

    def _free_ns(self, now_ns: int, worker: WorkerCapacity) -> int:
        """When the loads that were caused there are over."""
        loading = self._loading.get(worker.id)
        if not loading:
            return now_ns
        has = worker.view.adapters or frozenset()
        for name in [each for each, due_ns in loading.items() if each in has or now_ns > due_ns + NS_PER_S]:
            del loading[name]
        return max(now_ns, *loading.values()) if loading else now_ns

    def _order_load(self, now_ns: int, adapter: str, workers: CapacityTable) -> None:
        """Let it be loaded where that is soonest, unless it is somewhere or on its way."""
        able = [worker for worker in workers if _can_load(worker, adapter)]
        if not able or any(
            adapter in (worker.view.adapters or ()) or adapter in self._loading.get(worker.id, ())
            for worker in able
        ):
            return
        best = min(
            able, key=lambda worker: (self.wait_ns(now_ns, worker, adapter), worker.booked, worker.number)
        )
        self.started(now_ns, adapter, best)
        self.on_order(ResidencyOrder(best.id, (adapter,), keep=False))

    # --- homes --------------------------------------------------------------------------------------

    def _plan(self, now_ns: int, workers: CapacityTable) -> None:
        """Assign homes again, and order the workers for which that changes anything."""
        able = {
            capacity.id: capacity
            for capacity in workers
            if capacity.view.ready and capacity.view.adapters_max
        }
        for gone in [each for each in self._loading if each not in able]:
            del self._loading[gone]
        for gone in [each for each in self._kept if each not in able]:
            del self._kept[gone]
        self._homes, by_worker = give_homes(
            {name: demand.now(now_ns) for name, demand in self._demand.items()},
            {worker: _Holder.of(capacity) for worker, capacity in able.items()},
            self._homes,
        )
        for worker, names in by_worker.items():
            if set(names) != set(self._kept.get(worker, ())):
                self._kept[worker] = names
                self.on_order(ResidencyOrder(worker, names, keep=True))


@dataclass(slots=True)
class _Holder:
    """A worker while homes are given."""

    places: int
    number: int
    has: frozenset[str]
    serves: frozenset[str] | None
    names: list[str]
    tokens: float = 0.0

    @classmethod
    def of(cls, worker: WorkerCapacity) -> "_Holder":
        limit, view = worker.view.adapters_max, worker.view
        places = limit - max(1, limit // NOBODYS) if limit > 1 else limit
        return cls(places, worker.number, view.adapters or frozenset(), view.adapters_served, [])

    def takes(self, name: str) -> bool:
        """Whether it has a place for it, and could load it."""
        is_free = len(self.names) < self.places and name not in self.names
        return is_free and (self.serves is None or name in self.serves)


def give_homes(
    demand: dict[str, AdapterDemand],
    holders: dict[WorkerId, _Holder],
    before: dict[str, tuple[WorkerId, ...]],
) -> tuple[dict[str, tuple[WorkerId, ...]], dict[WorkerId, tuple[str, ...]]]:
    """The workers of each adapter that has a home, and the adapters of each worker, the most wanted first.

    `before`: who had which home. Tokens are spread evenly over an adapter's replicas.
    """
    share = sum(each.tokens for each in demand.values()) / max(1, len(holders)) * REPLICA_SHARE
    order = sorted(
        demand, key=lambda name: (-demand[name].requests * (STAYS if name in before else 1.0), name)
    )
    homes: dict[str, tuple[WorkerId, ...]] = {}
    left = sum(holder.places for holder in holders.values())
    for name in order:
        if not left:
            break
        count = min(len(holders), 1 + int(demand[name].tokens / share)) if share else 1
        found: list[WorkerId] = []
        for worker in sorted(holders, key=lambda each: _fitness(name, holders[each], each, before)):
            if len(found) == count:
                break
            if holders[worker].takes(name):
                found.append(worker)
        for worker in found:
            holders[worker].names.append(name)
            holders[worker].tokens += demand[name].tokens / len(found)
        left -= len(found)
        assert left >= 0, "no adapter is given more places than there are"
        if found:
            homes[name] = tuple(found)
    return homes, {worker: tuple(holder.names) for worker, holder in holders.items()}


def _fitness(
    name: str, holder: _Holder, worker: WorkerId, before: dict[str, tuple[WorkerId, ...]]
) -> tuple[bool, bool, float, int]:
    """Least is best: where it was, where it is, where least is wanted."""
    return (worker not in before.get(name, ()), name not in holder.has, holder.tokens, holder.number)


def _can_load(worker: WorkerCapacity, adapter: str) -> bool:
    view = worker.view
    serves = view.adapters_served is None or adapter in view.adapters_served
    return view.ready and view.adapters_max > 0 and serves
