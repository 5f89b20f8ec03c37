"""Which request waits, and which is next: the queue (`WaitingQueue`) and its orders. A plug: the scheduler
only ever asks for the head.

FCFSQueue      smaller priority first, then earlier arrival: a class can starve those below it
OrderedQueue   by `aged_order` the same, but a class is only worth so many seconds of waiting: none starves
ClassQueue     by tenant in each class, the least served first; a class goes first until those below have
               waited long enough
"""

from collections.abc import Callable, Mapping, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from itertools import groupby
from typing import NamedTuple, Protocol

from penstock.clock import NS_PER_S
from penstock.config.engine_settings import EngineSettings
from penstock.errors import Overloaded
from penstock.schedule.fair_share import OUTPUT_COST, PROMPT_COST, UNIT, ServiceCounter, cost, share
from penstock.schedule.request import Request
from penstock.types import RequestId

Drawn = tuple[Request, int]
"""A request and how many tokens were drawn for it."""


class WaitingQueue(Protocol):
    """Requests that have no row, in the order in which they shall get one."""

    def push(self, request: Request) -> None:
        """Add a request that was just submitted.

        Raises:
            Overloaded: the queue is full; nothing changed.
        """
        ...

    def requeue(self, request: Request) -> None:
        """Put a preempted request back, before everything of its class. Never refused."""
        ...

    def peek(self) -> Request | None:
        """The head, or None when nothing waits."""
        ...

    def pop(self) -> Request:
        """Take the head, which must exist."""
        ...

    def remove(self, request: Request) -> None:
        """Take a request out that is in the queue (it was aborted)."""
        ...

    def charge(self, request: Request, *, prompt: int = 0, cached: int = 0, generated: int = 0) -> None:
        """Count what a request was given: prompt tokens computed, prompt tokens found cached, tokens
        drawn.
        """
        ...

    def charge_drawn(self, drawn: Sequence[Drawn]) -> None:
        """`charge` of drawn tokens for all rows at once, which are in the order of their classes."""
        ...

    def served_to(self, request: Request) -> int:
        """The service of the request's tenant in its class, in computed prompt tokens; 0 where shares do not
        count.
        """
        ...

    def weight_of(self, request: Request) -> float:
        """How much its tenant's share of the rows is worth; 0 where shares do not count."""
        ...

    def __len__(self) -> int:
        """How many wait."""
        ...


Order = tuple[int, int, int]
"""Unique to a request; smaller goes first."""


class OrderedQueue:
    """Requests by a key that does not change while they wait.

    O(log n) to add and to take, wherever it stands.

    A preempted request keeps its arrival, so it is before all of its class that never ran: those
    arrived later, or they would have been admitted before it.
    """

    __slots__ = ("_capacity", "_heap", "_key", "_waiting")

    def __init__(self, capacity: int, key: Callable[[Request], Order]) -> None:
        assert capacity > 0, capacity
        self._capacity, self._key = capacity, key
        self._heap: list[tuple[Order, RequestId]] = []
        # The requests that really wait. Removed requests leave their heap entry behind until it surfaces.
        self._waiting: dict[RequestId, tuple[Order, Request]] = {}

    def push(self, request: Request) -> None:
        """See `WaitingQueue.push`."""
        if len(self._waiting) >= self._capacity:
            raise Overloaded(f"{len(self._waiting)} requests are waiting already; that is the limit")
        self.requeue(request)

    def requeue(self, request: Request) -> None:
        """See `WaitingQueue.requeue`. At most as many as can run come on top of the capacity."""
        assert request.request_id not in self._waiting, f"{request.request_id} waits already"
        order = self._key(request)
        self._waiting[request.request_id] = (order, request)
        heappush(self._heap, (order, request.request_id))

    def peek(self) -> Request | None:
        """See `WaitingQueue.peek`."""
        while self._heap:
            order, request_id = self._heap[0]
            waiting = self._waiting.get(request_id)
            if waiting is not None and waiting[0] == order:
                return waiting[1]
            heappop(self._heap)
        return None

    def pop(self) -> Request:
        """See `WaitingQueue.pop`."""
        request = self.peek()
        assert request is not None, "the queue is empty"
        _, name = heappop(self._heap)
        assert name == request.request_id, "`peek` leaves the head's entry on top"
        del self._waiting[request.request_id]
        return request

    def remove(self, request: Request) -> None:
        """See `WaitingQueue.remove`. Amortised O(log n)."""
        del self._waiting[request.request_id]
        assert len(self._heap) > len(self._waiting), "everything that waits has an entry"
        if len(self._heap) > 2 * len(self._waiting) + 16:
            # Most entries are of requests that left: rebuild, so that aborts cannot grow the heap.
            self._heap = [(order, name) for name, (order, _) in self._waiting.items()]
            heapify(self._heap)

    def charge(self, request: Request, *, prompt: int = 0, cached: int = 0, generated: int = 0) -> None:
        """See `WaitingQueue.charge`. Changes nothing: the order is settled on arrival."""

    def charge_drawn(self, drawn: Sequence[Drawn]) -> None:
        """See `WaitingQueue.charge_drawn`. Changes nothing."""

    def served_to(self, request: Request) -> int:
        """See `WaitingQueue.served_to`. All are alike."""
        return 0

    def weight_of(self, request: Request) -> float:
        """See `WaitingQueue.weight_of`."""
        return 0.0

    def __len__(self) -> int:
        """See `WaitingQueue.__len__`."""
        return len(self._waiting)


# Fair shares between tenants, by the virtual token counter (`fair_share`).
#
# Every fairness key has a counter of what it was served, divided by the key's weight. The waiting key
# with the smallest counter goes first. A key that comes back to the queue is lifted to the smallest
# counter of those that wait (if none does: to that of the key that left the queue last). For as long as
# two keys both have requests waiting, what they are served then differs by a bound that does not grow
# with time (theorem 4.4 of the paper): twice the dearest of one prompt and of a batch full of answers.
#
# Nothing is idle for the sake of fairness: a lone tenant gets everything, in the order of its own
# requests.

_KEYS_MAX = 4096
"""Counters that are kept. Over it the smallest idle ones are dropped: coming back would lift them anyway."""


class FairWaitingQueue:
    """Requests by key; among those of one key, by `order`."""

    __slots__ = ("_capacity", "_count", "_counters", "_heads", "_last", "_order", "_waiting", "_weights")

    def __init__(
        self, capacity: int, order: Callable[[Request], Order], weights: Mapping[str, float] | None = None
    ) -> None:
        assert capacity > 0, capacity
        self._capacity, self._order = capacity, order
        self._weights = dict(weights or {})
        assert all(weight > 0 for weight in self._weights.values()), weights
        self._counters: dict[str, ServiceCounter] = {}
        self._waiting: dict[str, OrderedQueue] = {}  # Keys that have something waiting.
        self._heads: list[tuple[int, Order, str]] = []  # May be stale, but never too late for a key.
        self._count = 0
        self._last = ""  # The key that left the queue last.

    def push(self, request: Request) -> None:
        """See `WaitingQueue.push`."""
        if self._count >= self._capacity:
            raise Overloaded(f"{self._count} requests are waiting already; that is the limit")
        key = request.fairness_key
        if key not in self._waiting:
            floor = self._floor()
            self._counter(key).lift(floor)
            self._forget_idle()
        self.requeue(request)

    def requeue(self, request: Request) -> None:
        """See `WaitingQueue.requeue`. No lift: a preempted request did not idle."""
        key = request.fairness_key
        if key not in self._waiting:
            self._waiting[key] = OrderedQueue(self._capacity, self._order)
        self._waiting[key].requeue(request)
        self._count += 1
        heappush(self._heads, self._head(key)[0])

    def peek(self) -> Request | None:
        """See `WaitingQueue.peek`. The first of the key that was served least.

        Counters only grow: a stale entry is early, and put right here.
        """
        while self._heads:
            entry = self._heads[0]
            if entry[2] not in self._waiting:
                heappop(self._heads)
                continue
            now, request = self._head(entry[2])
            if now <= entry:
                return request
            heapreplace(self._heads, now)
        return None

    def pop(self) -> Request:
        """See `WaitingQueue.pop`."""
        request = self.peek()
        assert request is not None, "the queue is empty"
        self.remove(request)
        self._last = request.fairness_key
        return request

    def remove(self, request: Request) -> None:
        """See `WaitingQueue.remove`. Amortised O(log n)."""
        key = request.fairness_key
        self._waiting[key].remove(request)
        self._count -= 1
        assert self._count >= len(self._waiting) - 1, "every key but perhaps this one has something waiting"
        if not len(self._waiting[key]):
            del self._waiting[key]
        if len(self._heads) > 2 * self._count + 16:
            self._heads = [self._head(key)[0] for key in self._waiting]
            heapify(self._heads)

    def charge(self, request: Request, *, prompt: int = 0, cached: int = 0, generated: int = 0) -> None:
        """See `WaitingQueue.charge`."""
        assert prompt >= 0 <= cached, "service is not taken back: counters only grow"
        assert generated >= 0, "service is not taken back: counters only grow"
        key, weight = request.fairness_key, request.fairness_weight
        counter = self._counters.get(key) or self._counter(key)
        if self._weights:
            weight = self._weights.get(key, weight)
        counter.served += share(cost(prompt, cached, generated), weight)

    def charge_drawn(self, drawn: Sequence[Drawn]) -> None:
        """See `WaitingQueue.charge_drawn`."""
        counters, weights = self._counters, self._weights
        for request, generated in drawn:
            assert generated > 0, "service is not taken back: counters only grow"
            key, weight = request.fairness_key, request.fairness_weight
            counter = counters.get(key) or self._counter(key)
            counter.served += share(OUTPUT_COST * generated, weights.get(key, weight) if weights else weight)

    def served_to(self, request: Request) -> int:
        """See `WaitingQueue.served_to`."""
        return self._served(request.fairness_key) // (PROMPT_COST * UNIT)

    def weight_of(self, request: Request) -> float:
        """See `WaitingQueue.weight_of`."""
        return self._weights.get(request.fairness_key, request.fairness_weight)

    def served(self, key: str) -> float:
        """The key's counter, in computed prompt tokens."""
        return self._served(key) / (PROMPT_COST * UNIT)

    def __len__(self) -> int:
        """See `WaitingQueue.__len__`."""
        return self._count

    def _counter(self, key: str) -> ServiceCounter:
        return self._counters.get(key) or self._counters.setdefault(key, ServiceCounter())

    def _served(self, key: str) -> int:
        found = self._counters.get(key)
        return 0 if found is None else found.served

    def _head(self, key: str) -> tuple[tuple[int, Order, str], Request]:
        """Of a waiting key: its entry among `_heads` as of now, and its first request."""
        request = self._waiting[key].peek()
        assert request is not None, "a key without requests is not waiting"
        return (self._served(key), self._order(request), key), request

    def _floor(self) -> int:
        head = self.peek()
        return self._served(self._last if head is None else head.fairness_key)

    def _forget_idle(self) -> None:
        if len(self._counters) <= _KEYS_MAX:
            return
        idle = sorted((each.served, key) for key, each in self._counters.items() if key not in self._waiting)
        for _, key in idle[: len(self._counters) - _KEYS_MAX // 2]:
            del self._counters[key]


# Classes before shares: which priority class is next, and within it whichever tenant was served least.
#
# A class goes before the ones below it, until their oldest request has waited so much longer that it stands
# level (`aged_order`: so no class starves). Fair shares hold among the tenants of one class: were they held
# across classes, a tenant of a better class would wait behind every tenant that was served less than it was,
# and its class would be worth nothing under load.

_CLASSES_MAX = 64
"""Classes whose tenants' counters are kept; over it those in which nothing waits are forgotten."""


class _Class(NamedTuple):
    """The requests of one class, by share and by age."""

    shares: FairWaitingQueue
    ages: OrderedQueue


class ClassQueue:
    """A `FairWaitingQueue` for each priority class."""

    __slots__ = ("_capacity", "_classes", "_count", "_head", "_order", "_waiting", "_weights")

    def __init__(
        self, capacity: int, order: Callable[[Request], Order], weights: Mapping[str, float] | None = None
    ) -> None:
        """`order` is `aged_order`: between classes it is asked of the oldest request of each."""
        assert capacity > 0, capacity
        self._capacity, self._order, self._weights = capacity, order, dict(weights or {})
        self._classes: dict[int, _Class] = {}
        self._waiting: dict[int, _Class] = {}  # Those in which something waits.
        self._count = 0
        self._head: Request | None = None  # If it is known: a plan asks for it several times.

    def push(self, request: Request) -> None:
        """See `WaitingQueue.push`."""
        if self._count >= self._capacity:
            raise Overloaded(f"{self._count} requests are waiting already; that is the limit")
        found = self._of(request)
        found.shares.push(request)
        self._enter(found, request)

    def requeue(self, request: Request) -> None:
        """See `WaitingQueue.requeue`."""
        found = self._of(request)
        found.shares.requeue(request)
        self._enter(found, request)

    def peek(self) -> Request | None:
        """See `WaitingQueue.peek`."""
        if self._head is None and (found := self._first()) is not None:
            self._head = found.shares.peek()
        return self._head

    def pop(self) -> Request:
        """See `WaitingQueue.pop`."""
        found = self._first()
        assert found is not None, "the queue is empty"
        request = found.shares.pop()
        self._leave(found, request)
        return request

    def remove(self, request: Request) -> None:
        """See `WaitingQueue.remove`. Amortised O(log n)."""
        found = self._classes[request.order[0]]
        found.shares.remove(request)
        self._leave(found, request)

    def charge(self, request: Request, *, prompt: int = 0, cached: int = 0, generated: int = 0) -> None:
        """See `WaitingQueue.charge`."""
        if self._count > 1:
            self._head = None
        found = self._classes.get(request.order[0]) or self._of(request)
        found.shares.charge(request, prompt=prompt, cached=cached, generated=generated)

    def charge_drawn(self, drawn: Sequence[Drawn]) -> None:
        """See `WaitingQueue.charge_drawn`."""
        if self._count > 1:
            self._head = None
        for _, rows in groupby(drawn, lambda each: each[0].order[0]):
            its = list(rows)
            self._of(its[0][0]).shares.charge_drawn(its)

    def served_to(self, request: Request) -> int:
        """See `WaitingQueue.served_to`."""
        found = self._classes.get(request.order[0])
        return 0 if found is None else found.shares.served_to(request)

    def weight_of(self, request: Request) -> float:
        """See `WaitingQueue.weight_of`."""
        return self._weights.get(request.fairness_key, request.fairness_weight)

    def served(self, key: str) -> float:
        """The service of the key in all classes together, in computed prompt tokens."""
        return sum(each.shares.served(key) for each in self._classes.values())

    def __len__(self) -> int:
        """See `WaitingQueue.__len__`."""
        return self._count

    def _of(self, request: Request) -> _Class:
        priority = request.order[0]
        found = self._classes.get(priority)
        if found is None:
            if len(self._classes) >= _CLASSES_MAX:
                self._classes = dict(self._waiting)
            # Preempted requests come on top of the capacity, which is counted here over all classes.
            shares = FairWaitingQueue(self._capacity, self._order, self._weights)
            found = self._classes[priority] = _Class(shares, OrderedQueue(self._capacity, self._order))
        return found

    def _first(self) -> _Class | None:
        """The class whose oldest request goes before every other class's oldest."""
        waiting = self._waiting
        if len(waiting) == 1:  # Nearly always: nothing to compare.
            (only,) = waiting.values()
            return only
        best: tuple[Order, _Class] | None = None
        for each in waiting.values():
            oldest = each.ages.peek()
            assert oldest is not None, "something waits in it"
            order = self._order(oldest)
            if best is None or order < best[0]:
                best = order, each
        return None if best is None else best[1]

    def _enter(self, found: _Class, request: Request) -> None:
        found.ages.requeue(request)
        self._waiting[request.order[0]] = found
        self._count += 1
        self._head = None
        assert len(found.shares) == len(found.ages), "both orders of a class hold the same requests"

    def _leave(self, found: _Class, request: Request) -> None:
        found.ages.remove(request)
        self._count -= 1
        self._head = None
        assert len(found.shares) == len(found.ages) <= self._count, (
            "both orders of a class hold the same requests"
        )
        if not len(found.shares):
            del self._waiting[request.order[0]]


# The orders, and which one a config asks for: chosen once, where the engine is wired.


def waiting_queue(config: EngineSettings) -> WaitingQueue:
    """The queue of `engine.scheduling`."""
    aged = aged_order(round(config.priority_ageing_s * NS_PER_S), round(config.starvation_s * NS_PER_S))
    match config.scheduling:
        case "fcfs":
            return FCFSQueue(config.max_waiting)
        case "priority":
            return OrderedQueue(config.max_waiting, aged)
        case "fair":
            return ClassQueue(config.max_waiting, aged, config.fair_weights)


class FCFSQueue(OrderedQueue):
    """Smaller priority first, then earlier arrival."""

    __slots__ = ()

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity, by_class)


def by_class(request: Request) -> Order:
    """The order that `submit` gave: class, arrival, submission."""
    return request.order


def aged_order(ageing_ns: int, starvation_ns: int) -> Callable[[Request], Order]:
    """Arrival, later by `ageing_ns` for each class down, and by no more than `starvation_ns` in all.

    Everybody ages alike, so who is before whom never changes while both wait, and the order needs no clock:
    a request of class 2 that has waited for 2 x `ageing_ns` stands level with a fresh one of class 0. The
    starvation clock: who came more than `starvation_ns` later never goes first, whatever the classes.
    """
    assert ageing_ns >= 0 <= starvation_ns, (ageing_ns, starvation_ns)
    bound = starvation_ns // 2

    def key(request: Request) -> Order:
        priority, arrival_ns, number = request.order
        handicap_ns = priority * ageing_ns
        if handicap_ns > bound or handicap_ns < -bound:
            handicap_ns = bound if handicap_ns > 0 else -bound
        return arrival_ns + handicap_ns, arrival_ns, number

    return key
