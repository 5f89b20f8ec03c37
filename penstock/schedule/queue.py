"""Requests that wait, in the order of a key. A plug: the scheduler only ever asks for the head.

Which orders there are: order.py.
"""

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Protocol

from penstock.errors import Overloaded
from penstock.schedule.request import Request
from penstock.types import RequestId


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

    def served_to(self, request: Request) -> int:
        """What the request's tenant was served in its class, in computed prompt tokens; 0 where shares do not
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
        # What really waits. Removed requests leave their heap entry behind until it surfaces.
        self._waiting: dict[RequestId, Request] = {}

    def push(self, request: Request) -> None:
        """See `WaitingQueue.push`."""
        if len(self._waiting) >= self._capacity:
            raise Overloaded(f"{len(self._waiting)} requests are waiting already; that is the limit")
        self.requeue(request)

    def requeue(self, request: Request) -> None:
        """See `WaitingQueue.requeue`. At most as many as can run come on top of the capacity."""
        assert request.request_id not in self._waiting, f"{request.request_id} waits already"
        self._waiting[request.request_id] = request
        heappush(self._heap, (self._key(request), request.request_id))

    def peek(self) -> Request | None:
        """See `WaitingQueue.peek`."""
        while self._heap:
            order, request_id = self._heap[0]
            request = self._waiting.get(request_id)
            if request is not None and self._key(request) == order:
                return request
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
            self._heap = [(self._key(waiting), name) for name, waiting in self._waiting.items()]
            heapify(self._heap)

    def charge(self, request: Request, *, prompt: int = 0, cached: int = 0, generated: int = 0) -> None:
        """See `WaitingQueue.charge`. Changes nothing: the order is settled on arrival."""

    def served_to(self, request: Request) -> int:
        """See `WaitingQueue.served_to`. All are alike."""
        return 0

    def weight_of(self, request: Request) -> float:
        """See `WaitingQueue.weight_of`."""
        return 0.0

    def __len__(self) -> int:
        """See `WaitingQueue.__len__`."""
        return len(self._waiting)
