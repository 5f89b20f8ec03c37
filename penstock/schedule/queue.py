"""The order in which waiting requests start. A plug: the scheduler only ever asks for the head.

`FCFSQueue` is first come, first served within a priority class. Other orders (ageing, fair shares by a
virtual token counter) implement the same `WaitingQueue`.
"""

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

    def __len__(self) -> int:
        """How many wait."""
        ...


class FCFSQueue:
    """Smaller priority first, then earlier arrival. O(log n) to add and to take, wherever it stands.

    A preempted request keeps its arrival, so it is before all of its class that never ran: those
    arrived later, or they would have been admitted before it.
    """

    __slots__ = ("_capacity", "_heap", "_waiting")

    def __init__(self, capacity: int) -> None:
        assert capacity > 0, capacity
        self._capacity = capacity
        self._heap: list[tuple[tuple[int, int, int], RequestId]] = []
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
        heappush(self._heap, (request.order, request.request_id))

    def peek(self) -> Request | None:
        """See `WaitingQueue.peek`."""
        while self._heap:
            order, request_id = self._heap[0]
            request = self._waiting.get(request_id)
            if request is not None and request.order == order:
                return request
            heappop(self._heap)
        return None

    def pop(self) -> Request:
        """See `WaitingQueue.pop`."""
        request = self.peek()
        assert request is not None, "the queue is empty"
        heappop(self._heap)
        del self._waiting[request.request_id]
        return request

    def remove(self, request: Request) -> None:
        """See `WaitingQueue.remove`. Amortised O(log n)."""
        del self._waiting[request.request_id]
        if len(self._heap) > 2 * len(self._waiting) + 16:
            # Most entries are of requests that left: rebuild, so that aborts cannot grow the heap.
            self._heap = [(waiting.order, key) for key, waiting in self._waiting.items()]
            heapify(self._heap)

    def __len__(self) -> int:
        """See `WaitingQueue.__len__`."""
        return len(self._waiting)
