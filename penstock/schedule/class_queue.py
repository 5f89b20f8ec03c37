"""Classes before shares: which priority class is next, and within it whichever tenant was served least.

A class goes before the ones below it, until their oldest request has waited so much longer that it stands
level (`aged_order`: so no class starves). Fair shares hold among the tenants of one class: were they held
across classes, a tenant of a better class would wait behind every tenant that was served less than it was,
and its class would be worth nothing under load.
"""

from collections.abc import Callable, Mapping

from penstock.errors import Overloaded
from penstock.schedule.fair_queue import FairWaitingQueue
from penstock.schedule.queue import Order, OrderedQueue
from penstock.schedule.request import Request

_CLASSES_MAX = 64
"""Classes whose tenants' counters are kept; over it those in which nothing waits are forgotten."""


class _Class:
    """The requests of one class, by share and by age."""

    __slots__ = ("ages", "shares")

    def __init__(self, shares: FairWaitingQueue, ages: OrderedQueue) -> None:
        self.shares, self.ages = shares, ages


class ClassQueue:
    """A `FairWaitingQueue` for each priority class."""

    __slots__ = ("_capacity", "_classes", "_count", "_order", "_waiting", "_weights")

    def __init__(
        self, capacity: int, order: Callable[[Request], Order], weights: Mapping[str, float] | None = None
    ) -> None:
        """`order` is `aged_order`: between classes it is asked of the oldest request of each."""
        assert capacity > 0, capacity
        self._capacity, self._order, self._weights = capacity, order, dict(weights or {})
        self._classes: dict[int, _Class] = {}
        self._waiting: dict[int, _Class] = {}  # Those in which something waits.
        self._count = 0

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
        found = self._first()
        return None if found is None else found.shares.peek()

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
        self._of(request).shares.charge(request, prompt=prompt, cached=cached, generated=generated)

    def served_to(self, request: Request) -> int:
        """See `WaitingQueue.served_to`."""
        found = self._classes.get(request.order[0])
        return 0 if found is None else found.shares.served_to(request)

    def weight_of(self, request: Request) -> float:
        """See `WaitingQueue.weight_of`."""
        return self._weights.get(request.fairness_key, request.fairness_weight)

    def served(self, key: str) -> float:
        """What the key was served in all classes together, in computed prompt tokens."""
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
            return next(iter(waiting.values()))
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
        assert len(found.shares) == len(found.ages), "both orders of a class hold the same requests"

    def _leave(self, found: _Class, request: Request) -> None:
        found.ages.remove(request)
        self._count -= 1
        assert len(found.shares) == len(found.ages) <= self._count, (
            "both orders of a class hold the same requests"
        )
        if not len(found.shares):
            del self._waiting[request.order[0]]
